// module_runner: the perturbed copy of one module at a time, and the model run on it, module by module.
// Needs zeroth/{block_model,layout,perturbation,probe}.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // normalizers
#include <limits>   // normalizers
#include <span>     // slices, updates
#include <vector>   // weights

#include <tutti/core/buffer.hpp>            // buffer
#include <tutti/core/error.hpp>             // usage_error
#include <tutti/core/partition.hpp>         // part
#include <tutti/core/run.hpp>               // fetch
#include <tutti/core/text.hpp>              // formatted
#include <tutti/core/view.hpp>              // view
#include <tutti/schedule/span.hpp>          // scoped_span
#include <tutti/schedule/timeline.hpp>      // timeline
#include <tutti/zeroth/block_model.hpp>     // block_model
#include <tutti/zeroth/layout.hpp>          // model_layout
#include <tutti/zeroth/pending_update.hpp>  // pending_update
#include <tutti/zeroth/perturbation.hpp>    // perturb
#include <tutti/zeroth/probe.hpp>           // probe, loss_value
#include <tutti/zeroth/tensor_slice.hpp>    // tensor_slice

namespace tutti::zeroth::detail {

/// Semantics  for each module in turn: copies, for as many branches as `begin` was told, each before its run. A copy is
///            free as soon as the next one is made: the model has read it by then, in the order of the queue.
/// Lifetime   what it is made of outlives it.
template <floating_element T, queue Q, block_model<Q, T> Model> class module_runner {
    using M = typename Q::memory_type;

    Q q_;
    Model& model_;
    const model_layout& layout_;
    std::span<const buffer<T, Q>> residents_;  // by module, with those that tied tensors belong to
    schedule::timeline* trace_;
    schedule::timeline::track track_ = 0;
    buffer<T, Q> copy_;
    buffer<double, Q> losses_;               // mean and normalizer of each branch
    std::vector<view<const T, M>> weights_;  // of the module that runs

public:
    module_runner(Q q, Model& model, const model_layout& layout, std::span<const buffer<T, Q>> residents,
                  schedule::timeline* trace, int trace_rank)
        : q_(q)
        , model_(model)
        , layout_(layout)
        , residents_(residents)
        , trace_(trace)
        , copy_(q, layout.largest_copy())
        , losses_(q, 0) {
        if (trace_ != nullptr) { track_ = trace_->track_of(trace_rank, "compute"); }
    }

    /// A pass of so many branches begins: a step of the trace, as long as the scope lives.
    [[nodiscard]] schedule::scoped_span<Q> begin(std::size_t branches) {
        if (losses_.size() < 2 * branches) { losses_ = buffer<double, Q>(q_, 2 * branches); }
        return schedule::scoped_span<Q>(trace_, track_, "step", q_, schedule::span_kind::step);
    }

    /// Part p of the copy of a module whose weights are `all`, which are brought up to date in the same pass over memory.
    void copy(view<T, M> all, part p, std::span<const tensor_slice> slices, std::span<const pending_update> updates,
              const probe& by) {
        const view<T, M> weights = all.sub(p.first, p.count);
        const view<T, M> to = copy_.view().sub(p.first, p.count);
        if (updates.empty()) {
            perturb(q_, view<const T, M>(weights), to, slices, by.z, by.scale);
        } else {
            update_then_perturb(q_, weights, to, slices, updates, by.z, by.scale);
        }
    }
    /// What module m shares with others, whose weights are up to date.
    void copy_tied(std::size_t m, const probe& by) {
        for (const tensor_place& tied : layout_.places(m)) {
            if (tied.owner == m) { continue; }
            const view<const T, M> in = residents_[tied.owner].view().sub(tied.at.offset, tied.at.count);
            perturb(q_, in, copy_.view().sub(tied.copied, tied.at.count), {&tied.alone, 1}, by.z, by.scale);
        }
    }

    /// Module m on its copy.
    void run_copy(std::size_t m, std::size_t branch, std::size_t micro_batch) {
        weights_.clear();
        for (const tensor_place& p : layout_.places(m)) { weights_.push_back(copy_.view().sub(p.copied, p.at.count)); }
        run(m, branch, micro_batch);
    }
    /// Module m on its weights themselves.
    void run_weights(std::size_t m, view<const T, M> own, std::size_t branch, std::size_t micro_batch) {
        weights_.clear();
        for (const tensor_place& p : layout_.places(m)) {
            const view<const T, M> from = p.owner == m ? own : residents_[p.owner].view();
            weights_.push_back(from.sub(p.at.offset, p.at.count));
        }
        run(m, branch, micro_batch);
    }

    /// What the tail left. Waits. Errors: usage_error for a number of terms that is none.
    [[nodiscard]] loss_value loss(std::size_t branch) const {
        const view<double, M> cells = losses_.view().sub(2 * branch, 2);
        const double mean = fetch(q_, cells.sub(0, 1), 0.0);
        const double terms = fetch(q_, cells.sub(1, 1), 1.0);
        if (!(terms >= 0 && terms <= std::numeric_limits<std::uint32_t>::max())) {
            throw usage_error(formatted("evaluate: the model says that its loss is of {} terms", terms));
        }
        return {mean, static_cast<std::uint32_t>(terms)};
    }

private:
    void run(std::size_t m, std::size_t branch, std::size_t micro_batch) {
        const bool first = m == 0;
        const bool last = m == layout_.tail();
        const schedule::scoped_span<Q> running(trace_, track_, first ? "head" : last ? "tail" : "block", q_);
        if (first) {
            model_.head(q_, weights_, branch, micro_batch);
        } else if (last) {
            model_.tail(q_, weights_, branch, micro_batch, losses_.view().sub(2 * branch, 2));
        } else {
            model_.block(q_, m - 1, weights_, branch, micro_batch);
        }
    }
};

}  // namespace tutti::zeroth::detail
