// level_selection: selected_mean's work beside the steps: measuring all levels on a window of gradients, and solving.
// Needs compress/level_* and schedule/lane. Two lanes: one measures where gradients are and averages tables over the
// ranks, one solves on the host.
#pragma once

#include <algorithm>  // copy
#include <cmath>      // sqrt
#include <cstddef>    // size_t
#include <cstdint>    // hashes
#include <exception>  // what ends a selection
#include <memory>     // what work on the lanes shares with the strategy
#include <optional>   // a selection under way
#include <span>       // norms
#include <utility>    // move, exchange
#include <vector>     // tensors

#include <tutti/comm/communicator.hpp>         // communicator
#include <tutti/comm/self.hpp>                 // the lane that solves
#include <tutti/compress/critical_regime.hpp>  // critical_regime
#include <tutti/compress/level_choice.hpp>     // choose_levels
#include <tutti/compress/level_errors.hpp>     // squared_errors
#include <tutti/compress/level_table.hpp>      // level_table
#include <tutti/core/buffer.hpp>               // storage
#include <tutti/core/elementwise.hpp>          // fill, copy
#include <tutti/core/reduce_op.hpp>            // mean
#include <tutti/schedule/lane.hpp>             // lanes

namespace tutti::strategy::detail {

/// `How` is a selected_mean: what is measured and how it is solved.
///
/// Semantics  start() behind all that wrote the window, which must stay as it is until finish(). Calls alternate, the
///            same on all ranks. Moves while work is under way.
/// Errors     those of the work at finish(); mismatch_error there where ranks have chosen differently.
template <communicator C, class How> class level_selection {
    using Q = queue_of<C>;
    using M = memory_of<C>;

    struct shared {
        How how;
        std::vector<compress::segment> tensors;
        compress::level_table table;            // errors of the last selection
        std::vector<double> norms;              // of the selection before; 0: none
        buffer<float, Q> window;                // gradients, added up
        buffer<double, Q> rows;                 // of squared_errors
        buffer<double, staging_queue<Q>> read;  // where the host sees them
        compress::level_choice chosen{};
    };
    struct tickets {
        schedule::ticket<Q> measured;
        schedule::ticket<host_queue> solved;
    };

    std::shared_ptr<shared> shared_;
    // Behind the memory that its work uses: it ends first.
    schedule::lane<C> measuring_;
    schedule::lane<comm::self<host_queue>> solving_;
    std::optional<tickets> under_way_;

public:
    /// The table has the tensors' costs. Collective.
    level_selection(const How& how, C& comm, std::vector<compress::segment> tensors, compress::level_table table,
                    std::size_t elements, schedule::lane_options lanes)
        : measuring_(comm.duplicate("levels"), lanes)
        , solving_(
              comm::self<host_queue>(host_queue(), {.name = "choice of levels"}),
              {lanes.timeout, lanes.trace, lanes.trace_rank < 0 ? comm.rank() : lanes.trace_rank, lanes.consumer}) {
        const Q q = comm.queue();
        const std::size_t numbers = tensors.size() * compress::error_row(how.levels);
        std::vector<double> norms(tensors.size(), 0.0);
        shared_ = std::make_shared<shared>(shared{how, std::move(tensors), std::move(table), std::move(norms),
                                                  buffer<float, Q>(q, elements), buffer<double, Q>(q, numbers),
                                                  buffer<double, staging_queue<Q>>(staging_queue<Q>(), numbers)});
        fill(q, shared_->window.view(), 0.0f);
    }

    [[nodiscard]] const How& how() const noexcept { return shared_->how; }
    [[nodiscard]] view<float, M> window() const noexcept { return shared_->window.view(); }
    [[nodiscard]] std::size_t tensors() const noexcept { return shared_->tensors.size(); }
    /// The tensors' norms in the last window that was measured with `critical`; between finish() and start().
    [[nodiscard]] std::span<double> norms() const noexcept { return shared_->norms; }

    /// Measures and solves, behind what `q` has been given. The step decides what is drawn.
    void start(Q q, std::uint64_t step) {
        const compress::draw_key key{how().mean.seed, static_cast<std::uint32_t>(step), 0};
        under_way_.emplace();
        // nvcc takes the reference that an assignment gives for a ticket thrown away.
        static_cast<void>(under_way_->measured = measuring_.submit(
                              "measure levels", [own = shared_, key](C& c) { measure(c, *own, key); }, q));
        static_cast<void>(
            under_way_->solved = solving_.submit(
                "choose levels", [own = shared_](comm::self<host_queue>&) { solve(*own); }, under_way_->measured));
    }
    [[nodiscard]] bool started() const noexcept { return under_way_.has_value(); }
    /// Waits for work under way, whose choice finish() still gives.
    void drain() {
        measuring_.drain();
        solving_.drain();
    }
    /// Waits and forgets.
    void drop() { under_way_.reset(); }
    /// The choice, once all ranks have agreed on it.
    [[nodiscard]] const compress::level_choice& finish(const Q& q) {
        const auto done = std::exchange(under_way_, std::nullopt);
        try {
            done->solved.wait(host_queue());
        } catch (const std::exception& e) {
            measuring_.abort(e.what());  // the other ranks would wait for this one's choice
            throw;
        }
        const std::uint64_t hash = compress::hash_of(shared_->chosen);
        measuring_.submit("agree on levels", [hash](C& c) { c.agree(hash, "the chosen levels"); }).wait(q);
        return shared_->chosen;
    }

private:
    static void measure(C& c, shared& own, const compress::draw_key& key) {
        const Q q = c.queue();
        const bool average = own.how.averages();
        const buffer<float, Q> mean_of(q, average ? own.window.size() : 0);
        if (average) { c.all_reduce(own.window.view(), mean_of.view(), tutti::mean{}); }
        const view<const float, M> x = average ? mean_of.view() : own.window.view();
        const view<double, M> rows = own.rows.view();
        compress::squared_errors(q, own.how.mean.compressor, own.tensors, own.how.levels, x, rows, key);
        c.all_reduce(rows, rows, tutti::mean{});
        if constexpr (Q::executes_inline) {
            copy(q, rows, own.read.view());
        } else {
            download(q, rows, own.read.view());
        }
    }
    static void solve(shared& own) {
        const std::size_t width = compress::error_row(own.how.levels);
        std::vector<double> norms(own.tensors.size());
        for (std::size_t t = 0; t < norms.size(); ++t) {
            const double* const row = own.read.data() + t * width;
            norms[t] = std::sqrt(row[0]);
            const auto errors = own.table.errors(t);
            for (std::size_t l = 0; l < errors.size(); ++l) { errors[l] = std::sqrt(row[l + 1]); }
        }
        const auto everywhere = [&](int level) {
            return std::vector<std::size_t>(norms.size(), own.how.option_of(level));
        };
        std::vector<std::size_t> trusted = everywhere(own.how.mean.level);
        std::vector<double> seen = own.norms;
        if (const auto& critical = own.how.critical) {
            compress::critical_regime regime(norms.size(), critical->eta);
            std::copy(own.norms.begin(), own.norms.end(), regime.norms().begin());
            trusted = regime.update(norms, everywhere(critical->relaxed), everywhere(critical->careful));
            seen.assign(regime.norms().begin(), regime.norms().end());
        }
        own.chosen = compress::choose_levels(own.table, trusted, own.how.choice);
        if (own.chosen.reason != compress::choice_reason::error_not_finite) { own.norms = std::move(seen); }
    }
};

}  // namespace tutti::strategy::detail
