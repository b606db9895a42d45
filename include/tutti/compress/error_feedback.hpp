// error_feedback: what compression took from a gradient, kept until the next step, which sends it along.
// Needs core/buffer, core/elementwise and core/state. Karimireddy et al., Error feedback fixes SignSGD, 2019,
// algorithm 2; scaled when the learning rate changes as BytePS does it.
#pragma once

#include <cmath>    // isfinite
#include <cstddef>  // size_t
#include <span>     // entries
#include <string>   // names
#include <utility>  // move
#include <vector>   // entries

#include <tutti/compress/compressor.hpp>  // layout
#include <tutti/compress/shards.hpp>      // runs of segments
#include <tutti/core/buffer.hpp>          // storage
#include <tutti/core/elementwise.hpp>     // fill, scale
#include <tutti/core/error.hpp>           // usage_error
#include <tutti/core/state.hpp>           // state_entry
#include <tutti/core/text.hpp>            // formatted

namespace tutti::compress {

/// One rank's residuals: a float for each element of a flat gradient.
///
/// Semantics    zero at first. Every compressed collective that is given view() adds it to what it compresses and
///              leaves there what did not arrive: this rank's own compression error, not its distance from the mean,
///              so it stays as small as a few gradients, and zero for segments that are sent dense.
///              Over all steps, what arrived + what is left, summed over ranks = the sum of all gradients.
///   rescale    residuals are gradients of their step. An optimizer that steps by learning rate * gradient owes
///              old rate * residual: when the rate changes, rescale(old / new) keeps the debt what it was. Optimizers
///              whose step does not grow with the gradient (Adam) need none.
///   reset      forgets; of some segments only, such as a tensor whose gradients were not finite.
///   entries    what a resume restores, on each rank its own, for strategy::state().
/// Determinism  elementwise. Cost: 4 bytes an element; rescale and reset read and write them once.
/// Errors       usage_error for a factor that is not finite or negative, for segments outside.
template <queue Q = host_queue> class residuals {
    using M = typename Q::memory_type;
    Q queue_;
    buffer<float, Q> values_;
    std::vector<state_entry<M>> entries_;

public:
    residuals(Q q, std::size_t elements, std::string name = "residual")
        : queue_(q), values_(std::move(q), elements), entries_{state_of(std::move(name), values_.view())} {
        reset();
    }

    [[nodiscard]] tutti::view<float, M> view() const noexcept { return values_.view(); }
    [[nodiscard]] std::span<const state_entry<M>> entries() const noexcept { return entries_; }

    void reset() { fill(queue_, values_.view(), 0.0f); }
    void reset(layout some) {
        detail::expect_inside("residuals", some, values_.size());
        detail::for_runs(some, [&](part run) { fill(queue_, values_.view().sub(run.first, run.count), 0.0f); });
    }
    void rescale(double factor) {
        if (!std::isfinite(static_cast<float>(factor)) || factor < 0) {
            throw usage_error(formatted("residuals: rescale by {}; old learning rate / new must be a finite float >= 0, "
                                        "reset before a rate of 0",
                                        factor));
        }
        scale(queue_, values_.view(), values_.view(), static_cast<float>(factor));
    }
};

}  // namespace tutti::compress
