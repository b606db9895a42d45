// in_memory: a pipeline whose weights stay where they are: in one view, beside a perturbed copy of it.
// Needs zeroth/probe, zeroth/perturbation and optimize. What every other pipeline must equal, bit for bit.
// Source: MeZO, arXiv 2305.17333, algorithm 1; with a copy, so that nothing has to be restored.
#pragma once

#include <algorithm>  // sort
#include <concepts>   // same_as
#include <cstddef>    // size_t
#include <cstdint>    // hashes
#include <optional>   // the last update
#include <span>       // probes, updates
#include <utility>    // move, declval
#include <vector>     // slices, pending updates

#include <tutti/core/buffer.hpp>            // the perturbed copy
#include <tutti/core/element.hpp>           // floating_element
#include <tutti/core/error.hpp>             // usage_error
#include <tutti/core/hash.hpp>              // hash_of
#include <tutti/core/queue.hpp>             // queue
#include <tutti/core/text.hpp>              // formatted
#include <tutti/core/view.hpp>              // view
#include <tutti/optimize/optimizer.hpp>     // optimizer_state
#include <tutti/zeroth/pending_update.hpp>  // pending_update
#include <tutti/zeroth/perturbation.hpp>    // perturb, apply_updates
#include <tutti/zeroth/probe.hpp>           // loss_value
#include <tutti/zeroth/tensor_slice.hpp>    // tensor_slice

namespace tutti::zeroth {

/// When updates reach the weights. No result depends on it.
enum class applied { at_once, with_next_probe };

/// No moments: weights follow the estimate itself.
struct no_optimizer {};

/// Weights in one view, and a forward pass: loss_value forward(view<const T, M> weights, std::size_t micro_batch).
///
/// Semantics    forward sees weights laid out as the view is; elements that no slice names are as in the view when its
///              pipeline was made, and so are frozen ones. It may enqueue, and returns when it knows the loss. The
///              caller must not write to the view while the pipeline lives, and reads it after flush().
///              With an optimizer of `optimize` (momentum: sgd; ZO-Adam: adamw) weights are float or double, the decay
///              is the optimizer's, and an update is applied at once: the sum over directions takes the place of the
///              perturbed copy, which a step does not need then.
/// Determinism  as perturb and apply_updates: bits, if forward's are.
/// Cost         as much memory as the weights again; a probe reads and writes them once, an update also. An optimizer's
///              moments come on top.
/// Errors       usage_error for slices that overlap or leave the view; before anything moved, for an update that is not
///              finite and for a step twice.
template <floating_element T, queue Q, class Forward, class Optimizer = no_optimizer> class in_memory {
    using M = typename Q::memory_type;
    static constexpr bool moving = !std::same_as<Optimizer, no_optimizer>;
    static_assert(!moving || std::same_as<T, master_t<T>>, "an optimizer needs weights of float or double");
    struct nothing {};
    static auto state_of(Q q, const Optimizer& o, std::size_t n) {
        if constexpr (moving) {
            o.validate();
            return o.template make_state<T>(q, n);
        } else {
            return nothing{};
        }
    }

    Q queue_;
    view<T, M> weights_;
    std::vector<tensor_slice> slices_;
    Forward forward_;
    applied when_;
    Optimizer optimizer_;
    buffer<T, Q> copy_;
    std::vector<pending_update> pending_;
    std::optional<direction> last_;  // of the last update
    std::vector<optimize::segment> segments_;
    decltype(state_of(std::declval<Q>(), std::declval<const Optimizer&>(), 0)) state_;

public:
    in_memory(Q q, view<T, M> weights, std::vector<tensor_slice> slices, Forward forward,
              applied when = applied::at_once, Optimizer optimizer = {})
        : queue_(q)
        , weights_(weights)
        , slices_(std::move(slices))
        , forward_(std::move(forward))
        , when_(when)
        , optimizer_(optimizer)
        , copy_(q, checked(slices_, weights))
        , state_(state_of(q, optimizer, weights.size())) {
        copy(queue_, weights_, copy_.view());  // what no slice names
        for (const tensor_slice& s : slices_) {
            if (s.count != 0 && !s.frozen) { segments_.push_back({s.offset, s.count, s.decayed}); }
        }
        std::sort(segments_.begin(), segments_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    }

    [[nodiscard]] view<T, M> weights() const noexcept { return weights_; }
    [[nodiscard]] std::span<const tensor_slice> slices() const noexcept { return slices_; }
    [[nodiscard]] std::span<const pending_update> pending() const noexcept { return pending_; }
    /// The optimizer's moments and step count. With the weights and the number of the next step this is all that a bit-exact
    /// resume needs; restored() after their memory was written.
    [[nodiscard]] auto& state() noexcept requires(moving) { return state_; }

    void evaluate(std::span<const probe> probes, std::size_t micro_batch, std::span<loss_value> losses) {
        if (losses.size() != probes.size()) {
            throw usage_error(formatted("zeroth: {} probes and {} losses", probes.size(), losses.size()));
        }
        for (std::size_t k = 0; k < probes.size(); ++k) {
            const probe& p = probes[k];
            if (p.scale == 0) {
                flush();
                losses[k] = forward_(view<const T, M>(weights_), micro_batch);
                continue;
            }
            flush_unless(p.z.kind);
            update_then_perturb(queue_, weights_, copy_.view(), slices_, pending_, p.z, p.scale);
            pending_.clear();
            losses[k] = forward_(view<const T, M>(copy_.view()), micro_batch);
        }
    }

    /// The updates of one step, all at once. None: the step changes nothing.
    void update(std::span<const pending_update> updates) {
        if (updates.empty()) { return; }
        const direction& z = updates.front().z;
        detail::expect_updates("update", updates, z.kind);
        if (last_.has_value() && last_->seed == z.seed && last_->step == z.step) {
            throw usage_error(
                formatted("update: step {} of seed {} again; a step's updates come together", z.step, z.seed));
        }
        if constexpr (moving) {
            move_by_optimizer(updates);
        } else {
            flush_unless(z.kind);
            pending_.insert(pending_.end(), updates.begin(), updates.end());
            if (when_ == applied::at_once) { flush(); }
        }
        last_ = updates.back().z;
    }

    void flush() {
        apply_updates(queue_, weights_, slices_, pending_);
        pending_.clear();
    }

    [[nodiscard]] std::uint64_t hash() {
        flush();
        return hash_of(queue_, weights_);
    }

private:
    static std::size_t checked(std::span<const tensor_slice> slices, view<T, M> weights) {
        expect_each_once(slices, weights.size());
        return weights.size();
    }
    // Lists of updates are of one distribution, and so is the perturbation that an update is fused with.
    void flush_unless(distribution kind) {
        if (!pending_.empty() && pending_.front().z.kind != kind) { flush(); }
    }
    void move_by_optimizer(std::span<const pending_update> updates) {
        for (const pending_update& u : updates) {
            if (u.weight_decay != 0) { throw usage_error("zeroth: the weight decay of an optimizer is its own"); }
        }
        sum_directions(queue_, copy_.view(), slices_, updates);
        optimizer_.update(queue_, weights_, view<const T, M>(copy_.view()), state_, segments_,
                          {updates.front().learning_rate});
    }
};

}  // namespace tutti::zeroth
