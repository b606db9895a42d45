// tensor_group: the ranks that share layers, and the few collectives by which parts of a layer become the layer.
// Needs comm/communicator and schedule/lane. Source: Shoeybi et al. 2019, arXiv:1909.08053; in the sequence-parallel
// form Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
#pragma once

#include <cstddef>      // size_t
#include <optional>     // lane
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // counts

#include <tutti/comm/communicator.hpp>  // communicator
#include <tutti/core/buffer.hpp>        // rows of all
#include <tutti/core/error.hpp>         // usage_error
#include <tutti/core/partition.hpp>     // part
#include <tutti/core/reduce_op.hpp>     // sum
#include <tutti/core/text.hpp>          // formatted
#include <tutti/core/view.hpp>          // view
#include <tutti/schedule/lane.hpp>      // lane
#include <tutti/schedule/ticket.hpp>    // ticket

namespace tutti::parallel {

struct tensor_options {
    /// Between layers each rank has its share of the rows (tokens) instead of all of them.
    bool sequence_parallel = false;
    /// Collectives of backward run on a lane, beside the products that do not need them.
    bool overlap = false;
    schedule::lane_options lane_choice{};
};

/// The ranks among which layers are cut.
///
/// Semantics  construction is collective when collectives overlap. Layers hold a reference to it; all its calls are
///            collective.
///   feature_share  rank r has features [r n/t, (r+1) n/t) of a layer; n must divide. Columns of padding make it so.
///   row_share      rank r's rows in the sequence-parallel form; any number of rows, as equal as possible.
///   gather_rows    all rows from everybody's share           sum_to_rows  this rank's share of the sum of all
///   add_up         the sum over ranks in place of the parts
///   Where a layer begins and ends, in both forms; what is called gets a view that is gone when it returns:
///   on_whole_rows      calls work(all rows): gathered ones in the sequence-parallel form, else `share` itself
///   sum_of_parts       calls work(part) to write this rank's part of all rows; `sum` becomes this rank's share of the
///                      parts' sum, or all of it
///   back_from_whole_rows   what backward is where forward was on_whole_rows(share, ...): sum_of_parts(d_share, input) and
///                      on_whole_rows(share, weight), with the gather beside `input` and the sum beside `weight`, where
///                      collectives overlap
/// Shapes     rows of `width` elements, one behind the other; `rows` is the number of all.
/// Cost       S bytes of rows: gather_rows and sum_to_rows (t-1)/t S each, add_up 2(t-1)/t S. Of the last three, in the
///            sequence-parallel form, that of a gather, of a sum to rows and of both, and S bytes of scratch for each;
///            else nothing, add_up and add_up.
/// Errors     usage_error when features do not divide.
template <communicator C> class tensor_group {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    C comm_;
    bool sequence_parallel_;
    std::optional<schedule::lane<C>> lane_;

public:
    explicit tensor_group(C own, tensor_options o = {})
        : comm_(std::move(own)), sequence_parallel_(o.sequence_parallel) {
        if (o.overlap) { lane_.emplace(comm_.duplicate("tensor"), o.lane_choice); }
    }

    [[nodiscard]] int rank() const noexcept { return comm_.rank(); }
    [[nodiscard]] int size() const noexcept { return comm_.size(); }
    [[nodiscard]] Q queue() const noexcept { return comm_.queue(); }
    [[nodiscard]] bool sequence_parallel() const noexcept { return sequence_parallel_; }
    [[nodiscard]] C& communicator() noexcept { return comm_; }

    [[nodiscard]] part feature_share(std::size_t features, std::string_view what) const {
        const auto t = static_cast<std::size_t>(size());
        if (features % t != 0) {
            throw usage_error(formatted("tensor: {} {} do not divide over {} ranks", features, what, t));
        }
        return partition(features, t, static_cast<std::size_t>(rank()));
    }
    [[nodiscard]] part row_share(std::size_t rows) const {
        return partition(rows, static_cast<std::size_t>(size()), static_cast<std::size_t>(rank()));
    }
    /// Rows that this rank has between layers.
    [[nodiscard]] std::size_t outer_rows(std::size_t rows) const {
        return sequence_parallel_ ? row_share(rows).count : rows;
    }

    template <class T>
    [[nodiscard]] schedule::ticket<Q> gather_rows(std::size_t rows, std::size_t width, view<const T, M> share,
                                                  view<T, M> all) {
        return start("gather rows",
                     [counts = counts_of(rows, width), share, all](C& c) { c.all_gather_v(share, all, counts); });
    }
    template <class T>
    [[nodiscard]] schedule::ticket<Q> sum_to_rows(std::size_t rows, std::size_t width, view<const T, M> all,
                                                  view<T, M> share) {
        return start("sum to rows", [counts = counts_of(rows, width), all, share](C& c) {
            c.reduce_scatter_v(all, share, counts, sum{});
        });
    }
    template <class T> [[nodiscard]] schedule::ticket<Q> add_up(view<T, M> parts) {
        return start("add up", [parts](C& c) { c.all_reduce(parts, parts, sum{}); });
    }

    template <class T, class Work>
    void on_whole_rows(std::size_t rows, std::size_t width, view<const T, M> share, Work work) {
        if (!sequence_parallel_) { return work(share); }
        const buffer<T, Q> all(queue(), rows * width);
        gather_rows(rows, width, share, all.view()).wait(queue());
        work(view<const T, M>(all.view()));
    }
    template <class T, class Work> void sum_of_parts(std::size_t rows, std::size_t width, view<T, M> sum, Work work) {
        if (!sequence_parallel_) {
            work(sum);
            return add_up(sum).wait(queue());
        }
        const buffer<T, Q> all(queue(), rows * width);
        work(all.view());
        sum_to_rows(rows, width, view<const T, M>(all.view()), sum).wait(queue());
    }
    template <class T, class Input, class Weight>
    void back_from_whole_rows(std::size_t rows, std::size_t width, view<const T, M> share, view<T, M> d_share,
                              Input input, Weight weight) {
        const std::size_t scratch = sequence_parallel_ ? rows * width : 0;
        const buffer<T, Q> all(queue(), scratch), d_all(queue(), scratch);
        // Tickets go first when something throws: what they use is above.
        const auto gathered = sequence_parallel_ ? gather_rows(rows, width, share, all.view()) : schedule::ticket<Q>();
        const view<T, M> d_whole = sequence_parallel_ ? d_all.view() : d_share;
        input(d_whole);
        const auto summed =
            sequence_parallel_ ? sum_to_rows(rows, width, view<const T, M>(d_whole), d_share) : add_up(d_share);
        gathered.wait(queue());
        weight(sequence_parallel_ ? view<const T, M>(all.view()) : share);
        summed.wait(queue());
    }

    /// Whether this rank counts, in sums over the model, parameters that every rank has.
    [[nodiscard]] bool counts_replicated() const noexcept { return rank() == 0; }
    /// Gradients of parameters that every rank has (norms, biases of whole rows): in the sequence-parallel form each
    /// has seen only its rows, so they are added up; otherwise they are complete and nothing is done.
    template <class T> void add_up_replicated(view<T, M> gradient) {
        if (sequence_parallel_) { comm_.all_reduce(gradient, gradient, sum{}); }
    }

private:
    [[nodiscard]] std::vector<std::size_t> counts_of(std::size_t rows, std::size_t width) const {
        std::vector<std::size_t> counts;
        for (int r = 0; r < size(); ++r) {
            counts.push_back(width *
                             partition(rows, static_cast<std::size_t>(size()), static_cast<std::size_t>(r)).count);
        }
        return counts;
    }
    template <class Work> [[nodiscard]] schedule::ticket<Q> start(std::string_view what, Work work) {
        if (lane_.has_value()) {
            Q after = queue();
            return lane_->submit(what, std::move(work), after);
        }
        work(comm_);
        return {};
    }
};

}  // namespace tutti::parallel
