// data_parallel<Comm, Optimizer, T, Exchange>: every rank holds the whole model; gradients are averaged during backward.
// Needs schedule/lane, schedule/bucket, optimize and a communicator. `local` is the same over one rank.
// Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, section 3.
#pragma once

#include <concepts>  // invocable
#include <cstddef>   // size_t
#include <cstdint>   // steps
#include <optional>  // what exists from attach on; a seed
#include <span>      // state
#include <string>    // names
#include <utility>   // move
#include <vector>    // buckets

#include <tutti/comm/communicator.hpp>                  // communicator, can_all_reduce
#include <tutti/comm/self.hpp>                          // local
#include <tutti/core/buffer.hpp>                        // storage
#include <tutti/core/elementwise.hpp>                   // copy
#include <tutti/core/hash.hpp>                          // hash_of
#include <tutti/core/text.hpp>                          // formatted
#include <tutti/optimize/clip.hpp>                      // global_norm
#include <tutti/optimize/optimizer.hpp>                 // optimizer
#include <tutti/schedule/bucket.hpp>                    // bucket_plan
#include <tutti/schedule/lane.hpp>                      // lane
#include <tutti/strategy/detail/changed_gradients.hpp>  // changed
#include <tutti/strategy/detail/clipped_optimizer.hpp>  // clipped_optimizer
#include <tutti/strategy/detail/gradient_storage.hpp>   // gradient_storage
#include <tutti/strategy/detail/micro_batches.hpp>      // micro_batch_order, ready_buckets
#include <tutti/strategy/detail/parameter_list.hpp>     // expect_valid, agree_on, entries_of
#include <tutti/strategy/detail/rounding.hpp>           // round_values
#include <tutti/strategy/detail/step_trace.hpp>         // step_trace
#include <tutti/strategy/gradient_exchange.hpp>         // gradient_exchange
#include <tutti/strategy/strategy.hpp>                  // parameter

namespace tutti::strategy {

struct data_parallel_options {
    /// Gradients are sent in messages of about this size: small enough to start early, large enough for bandwidth.
    std::size_t bucket_bytes = std::size_t{4} << 20;
    /// Values of 16 bits are rounded from their masters stochastically, by random numbers of this seed; without, to
    /// nearest even. All ranks give the same.
    std::optional<std::uint64_t> stochastic_rounding_seed{};
    duration timeout = 2 * default_timeout();  ///< of waits for the lane, see lane_options
    schedule::timeline* trace = nullptr;       ///< records collectives, waits and steps; must outlive the strategy
    int trace_rank = -1;                       ///< process of the trace; -1: the communicator's rank
};

/// Plain data parallelism.
///
/// Semantics    attach broadcasts rank 0's initial values. Buckets become their mean over the ranks on a lane, as the
///              exchange does it (plain_mean: all_reduce in T), during the backward pass of the last micro-batch: bucket
///              k as soon as buckets 0..k are complete, so that the order of launches is the plan's on every rank,
///              whatever the order of gradient_ready. The gradient is clipped by its global norm inside the update. A
///              norm that is not finite skips the step on all ranks. An error inside attach or finish ends the
///              communicator's family, since other ranks take part.
/// Storage      one flat gradient of T, in parameter order, unless all of the trainer's gradients lie in that order one
///              behind the other: then that memory is used as it is. Other gradients of the trainer are packed before
///              and unpacked (averaged) after the all_reduce, on the lane. Likewise owned() is the trainer's own memory
///              when T is float or double and its values lie one behind the other; else a flat copy in master_t<T>,
///              from which the values are rounded. state() lists the masters, never rounded values.
/// Determinism  on deterministic backends the bits depend on data and number of ranks, not on bucket size nor timing.
///              Stochastic rounding depends on the seed, the number of updates and the element's place in the model,
///              and on nothing that differs between ranks: rounded by a seed of their own, replicas would drift apart.
/// Cost         the exchange's; passes over memory: zero, norm, update, which writes masters and values at once.
/// Errors       usage_error naming the parameter on wrong order of calls; mismatch_error from attach and finish; those
///              of the communicator from step, flush and finish; those of the exchange also from begin.
template <communicator C, class Optimizer, floating_element T = float, class Exchange = plain_mean>
requires optimize::optimizer<Optimizer, T, queue_of<C>> && comm::can_broadcast<C, T> &&
    gradient_exchange<Exchange, C, T>
class data_parallel {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using master = master_t<T>;
    using state_of_exchange = exchange_state_of<Exchange, C, T>;

public:
    using element_type = T;
    using memory_type = M;
    using queue_type = Q;

    explicit data_parallel(C comm, Optimizer optimizer = {}, data_parallel_options options = {}, Exchange exchange = {})
        : queue_(comm.queue())
        , optimizer_(std::move(optimizer), options.stochastic_rounding_seed)
        , exchange_((exchange.validate(), std::move(exchange)))
        , options_(options)
        , lanes_{options.timeout, options.trace, options.trace_rank, "main"}
        , steps_(options.trace, options.trace_rank < 0 ? comm.rank() : options.trace_rank)
        , gradients_(queue_)
        , owned_storage_(queue_, 0)
        , norm_scratch_(queue_, 0)
        , comm_(std::move(comm))
        , lane_(comm_.duplicate("gradients"), lanes_) {}
    data_parallel(data_parallel&&) = default;
    data_parallel& operator=(data_parallel&&) = delete;  // communication in flight belongs to one object all its life

    void attach(parameters<T, M>& list) {
        order_.expect_not_attached();
        detail::check_alone(
            comm_, [&] { detail::expect_valid(list, options_.bucket_bytes, options_.stochastic_rounding_seed); });
        detail::agree_on(comm_, list, describe());
        parameters_ = list;
        plan_ = detail::plan_of(list, options_.bucket_bytes);
        detail::check_alone(
            comm_, [&] { exchanged_.emplace(exchange_.template make_state<C, T>(comm_, list, plan_, lanes_)); });
        gradients_.place(queue_, parameters_, plan_);
        place_values();
        norm_scratch_ = buffer<double, Q>(queue_, optimize::norm_blocks(plan_.elements) + 1);
        const auto whole = [&](std::size_t i) {
            return detail::tensor_part{0, list[i].value.size(), plan_.offsets[i]};
        };
        const bool apart = owned_storage_.size() != 0;
        optimizer_.attach(queue_, plan_.elements, detail::decay_segments(list, whole, apart));
        if (apart) { published_ = detail::values_of(list, optimizer_.segments()); }
        state_ = detail::entries_of<T, M, Q>(list, ownership::replicated, whole, owned_, optimizer_.state(),
                                             exchanged_->entries());
        for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
            bucket_names_.push_back(formatted("all_reduce bucket {}", b));
        }
        in_flight_.resize(plan_.buckets.size());
        order_.attach(list);  // last: attached is what nothing failed for
    }

    void begin(micro_batch m) {
        if (exchanged_ && m.index == 0) { exchanged_->expect_rate(m.learning_rate); }
        order_.begin(m);
        if (m.index == 0) {
            steps_.begin(queue_);
            gradients_.zero(queue_);
            exchanged_->begin(m.learning_rate, m.loss_scale);
        }
        ready_.begin(plan_);
    }

    [[nodiscard]] view<const T, M> before_use(std::size_t i) const {
        order_.expect_index("before_use", i);
        return parameters_[i].value;
    }
    void after_use(std::size_t i) const { order_.expect_index("after_use", i); }

    [[nodiscard]] view<T, M> gradient(std::size_t i) const {
        order_.expect_index("gradient", i);
        return gradients_.of(i);
    }

    void gradient_ready(std::size_t i) {
        order_.ready(i);
        if (order_.last()) {
            ready_.ready(plan_.bucket_of[i], [this](std::size_t b) { launch(b); });
        }
    }

    /// The bits of update(h, change) and publish(), without reading the masters a second time.
    template <std::invocable<view<T, M>> Change = detail::no_change> step_result step(hyper h, Change change = {}) {
        const step_result result = advance(h, published_, std::move(change));
        if (result.skipped) { publish(); }  // an outer strategy may have changed owned() before
        steps_.end(queue_);
        return result;
    }

    /// Averages, clips and applies the gradients to owned(), and leaves the values as they are: between this and
    /// publish() an outer strategy may change owned(). `change(view)` is given the gradients first, averaged and not
    /// clipped, in the order of owned(); if it returns a number, that is the gradient's norm, of a model of which other
    /// ranks have the rest. Errors: as step.
    template <std::invocable<view<T, M>> Change = detail::no_change> step_result update(hyper h, Change change = {}) {
        return advance(h, {}, std::move(change));
    }

    /// owned() -> the trainer's values; nothing to do where they are the same memory. Rounds as the last update did, so
    /// that it may be called again, and after a resume, with the same result.
    void publish() {
        order_.expect_between_steps("publish");
        for (std::size_t k = 0; k < published_.size(); ++k) {
            const optimize::segment& s = optimizer_.segments()[k];
            detail::round_values<Q, T>(queue_, owned_.sub(s.first, s.count), published_[k], optimizer_.noise(),
                                       s.first);
        }
    }

    [[nodiscard]] view<master, M> owned() const {
        order_.expect_attached("owned");
        return owned_;
    }
    /// Every rank owns all elements: there is nothing to add.
    void sum_over_shards(view<double, M>) const noexcept {}

    /// The optimizer's moments, in its order; for outer strategies that average or reset them.
    [[nodiscard]] std::vector<view<master, M>> moments() const {
        order_.expect_between_steps("moments");
        std::vector<view<master, M>> all;
        for (const auto& m : optimizer_.state().moments()) { all.push_back(m.values.view()); }
        return all;
    }
    /// As if no update had been made. Stochastic rounding, which counts updates, draws the same numbers again.
    void reset_moments() {
        order_.expect_between_steps("reset_moments");
        optimizer_.state().reset(queue_);
    }

    void flush() {
        lane_.drain();
        if (exchanged_) { exchanged_->flush(); }
        comm_.synchronize();
    }

    void finish() {
        order_.finish();
        flush();
        comm_.agree(hash_of(queue_, owned_), "the hash of all parameters at finish");
    }

    [[nodiscard]] std::span<const state_entry<M>> state() const {
        order_.expect_attached("state");
        return state_;
    }
    void restored() {
        order_.expect_between_steps("restored");
        optimizer_.state().restored(queue_);
        exchanged_->restored();
        publish();
    }

    using consensus_scope = equal_replicas;
    consensus_scope consensus() const {
        order_.expect_between_steps("consensus");
        return {};
    }

    [[nodiscard]] Q queue() const { return queue_; }
    /// Steps that were skipped because the gradient was not finite.
    [[nodiscard]] std::uint64_t skipped_steps() const noexcept { return optimizer_.skipped(); }
    [[nodiscard]] const schedule::bucket_plan& plan() const noexcept { return plan_; }
    /// The exchange's own controls, such as levels; between steps.
    [[nodiscard]] state_of_exchange& exchange() {
        order_.expect_between_steps("exchange");
        return *exchanged_;
    }

private:
    /// Equal exactly when ranks do the same with the same gradients.
    [[nodiscard]] std::string describe() const {
        return formatted("{}, {} in buckets of {} bytes{}", optimizer_.describe(), exchange_.describe(),
                         options_.bucket_bytes, detail::describe_rounding(options_.stochastic_rounding_seed));
    }

    /// One update, which writes the values too if views of them are given.
    template <class Change> step_result advance(hyper h, std::span<const view<T, M>> values, Change change) {
        detail::expect_valid(h);
        order_.step(h.learning_rate);
        for (const auto& t : in_flight_) { t.wait(queue_); }
        const std::optional<double> norm = detail::changed(change, gradients_.flat());
        const view<const T, M> gradients = gradients_.flat();
        const double own_norm = norm ? *norm
                                     : optimize::global_norm(queue_, gradients, 0, plan_.elements, norm_scratch_.view(),
                                                             [this](view<double, M> x) { sum_over_shards(x); });
        return optimizer_.update(queue_, owned_, gradients, own_norm, order_.loss_scale(), h, values);
    }

    void place_values() {
        const view<T, M> together = detail::contiguous(parameters_, &parameter<T, M>::value);
        const bool one_run = together.size() == plan_.elements;
        if (one_run) {
            comm_.broadcast(together, 0);
        } else {
            for (const auto& p : parameters_) { comm_.broadcast(p.value, 0); }
        }
        if constexpr (std::same_as<T, master>) {
            if (one_run) {
                owned_ = together;
                return;
            }
        }
        owned_storage_ = buffer<master, Q>(queue_, plan_.elements);
        owned_ = owned_storage_.view();
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            copy(queue_, parameters_[i].value, owned_.sub(plan_.offsets[i], parameters_[i].value.size()));
        }
    }

    void launch(std::size_t b) {
        auto work = [average = exchanged_->average(b, gradients_.flat()), apart = gradients_.apart(b)](C& c) {
            detail::gradient_storage<T, Q>::pack(c.queue(), *apart);
            average(c);
            detail::gradient_storage<T, Q>::unpack(c.queue(), *apart);
        };
        // nvcc takes the reference that an assignment gives for a ticket thrown away.
        static_cast<void>(in_flight_[b] = lane_.submit(bucket_names_[b], std::move(work), queue_));
    }

    Q queue_;
    detail::clipped_optimizer<Optimizer, T, Q> optimizer_;
    Exchange exchange_;
    data_parallel_options options_;
    schedule::lane_options lanes_;  // this one's lane, and those of the exchange
    detail::step_trace<Q> steps_;
    detail::micro_batch_order order_;
    parameters<T, M> parameters_;
    schedule::bucket_plan plan_;
    std::vector<std::string> bucket_names_;
    std::vector<view<T, M>> published_;  // the trainer's values by segment; none where owned() is their memory
    std::vector<state_entry<M>> state_;
    detail::ready_buckets ready_;

    detail::gradient_storage<T, Q> gradients_;
    buffer<master, Q> owned_storage_;
    buffer<double, Q> norm_scratch_;
    view<master, M> owned_;
    std::optional<state_of_exchange> exchanged_;

    // Last, so that destruction ends communication before the memory it uses is released.
    C comm_;
    schedule::lane<C> lane_;
    std::vector<schedule::ticket<Q>> in_flight_;
};

/// One rank: an optimizer behind the strategy interface, and the inner strategy of local-update methods.
template <class Optimizer, floating_element T = float, queue Q = host_queue>
using local = data_parallel<comm::self<Q>, Optimizer, T>;

}  // namespace tutti::strategy
