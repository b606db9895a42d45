// micro_batch_order: the order of calls that every strategy demands of its trainer, and the texts when it is broken.
// Needs strategy/strategy. Strategies ask it first, so that misuse is reported before anything moved.
#pragma once

#include <cmath>        // isfinite
#include <cstdint>      // flags
#include <string>       // names
#include <string_view>  // operations
#include <utility>      // move, exchange
#include <vector>       // flags

#include <tutti/core/error.hpp>         // usage_error
#include <tutti/core/text.hpp>          // formatted
#include <tutti/strategy/strategy.hpp>  // micro_batch

namespace tutti::strategy::detail {

/// Errors  usage_error naming the value.
inline void expect_valid(const hyper& h) {
    if (!(h.clip_norm >= 0)) { throw usage_error(formatted("step: clip_norm is {}", h.clip_norm)); }
    if (!(h.learning_rate >= 0) || !std::isfinite(h.learning_rate)) {
        throw usage_error(formatted("step: learning rate is {}", h.learning_rate));
    }
}

/// attach, then per step: begin(0 of n) ... begin(n-1 of n), each followed by one gradient_ready per parameter, then
/// step.
///
/// Cost    a few comparisons a call; begin clears one byte a parameter.
/// Errors  usage_error naming the parameters and the micro-batch.
class micro_batch_order {
    enum class phase : std::uint8_t { created, between_steps, in_micro_batch, finished };
    phase phase_ = phase::created;
    micro_batch now_{-1, 0};
    std::vector<std::string> names_;
    std::vector<std::uint8_t> ready_;
    std::size_t ready_count_ = 0;

public:
    micro_batch_order() = default;
    // A strategy that was moved from has nothing attached and says so.
    micro_batch_order(micro_batch_order&& other) noexcept
        : phase_(std::exchange(other.phase_, phase::created))
        , now_(other.now_)
        , names_(std::move(other.names_))
        , ready_(std::move(other.ready_))
        , ready_count_(other.ready_count_) {}
    micro_batch_order& operator=(micro_batch_order&&) = delete;

    void expect_not_attached() const {
        if (phase_ != phase::created) { throw usage_error("attach: parameters are attached already"); }
    }
    void attach(std::vector<std::string> names) {
        names_ = std::move(names);
        ready_.assign(names_.size(), 0);
        phase_ = phase::between_steps;
    }
    void expect_attached(std::string_view operation) const {
        if (phase_ == phase::created) { throw usage_error(formatted("{}: no parameters are attached", operation)); }
    }
    void expect_between_steps(std::string_view operation) const {
        expect_attached(operation);
        if (phase_ == phase::in_micro_batch) { throw usage_error(formatted("{}: in the middle of a step", operation)); }
    }
    void expect_index(std::string_view operation, std::size_t i) const {
        expect_attached(operation);
        if (i >= names_.size()) {
            throw usage_error(formatted("{}: parameter {} of {} parameters", operation, i, names_.size()));
        }
    }
    void begin(micro_batch m) {
        expect_running("begin");
        if (m.count < 1 || m.index < 0 || m.index >= m.count) {
            throw usage_error(formatted("begin: micro-batch {} of {} does not exist", m.index, m.count));
        }
        if (phase_ == phase::in_micro_batch) { expect_all_ready("begin"); }
        const int next = phase_ == phase::between_steps ? 0 : now_.index + 1;
        if (phase_ == phase::in_micro_batch && next == now_.count) {
            throw usage_error(formatted("begin: all {} micro-batches are done, expected a step", now_.count));
        }
        if (m.index != next || (next != 0 && m.count != now_.count)) {
            throw usage_error(formatted("begin: micro-batch {} of {}, expected {} of {}", m.index, m.count, next,
                                        next == 0 ? m.count : now_.count));
        }
        if (!(m.loss_scale > 0) || !std::isfinite(m.loss_scale)) {
            throw usage_error(formatted("begin: loss scale is {}", m.loss_scale));
        }
        if (next != 0 && m.loss_scale != now_.loss_scale) {
            throw usage_error(formatted("begin: micro-batch {} of {} has loss scale {}, those before it {}", m.index,
                                        m.count, m.loss_scale, now_.loss_scale));
        }
        now_ = m;
        phase_ = phase::in_micro_batch;
        ready_.assign(ready_.size(), 0);
        ready_count_ = 0;
    }
    void ready(std::size_t i) {
        expect_index("gradient_ready", i);
        if (phase_ != phase::in_micro_batch) {
            throw usage_error(formatted("gradient_ready: '{}' outside a micro-batch, expected begin", names_[i]));
        }
        if (ready_[i] != 0) {
            throw usage_error(formatted("gradient_ready: '{}' a second time in micro-batch {} of {}", names_[i],
                                        now_.index, now_.count));
        }
        ready_[i] = 1;
        ++ready_count_;
    }
    /// Of the step that has begun.
    [[nodiscard]] double loss_scale() const noexcept { return now_.loss_scale; }
    /// A gradient of which the micro-batch still adds something.
    void expect_accumulating(std::size_t i) const {
        expect_index("gradient", i);
        if (phase_ != phase::in_micro_batch) {
            throw usage_error(formatted("gradient: '{}' outside a micro-batch, expected begin", names_[i]));
        }
        if (ready_[i] != 0) {
            throw usage_error(formatted("gradient: '{}' is ready already in micro-batch {} of {}", names_[i],
                                        now_.index, now_.count));
        }
    }
    [[nodiscard]] bool first() const noexcept { return now_.index == 0; }
    [[nodiscard]] bool last() const noexcept { return now_.index + 1 == now_.count; }
    void step() {
        expect_running("step");
        if (phase_ != phase::in_micro_batch) { throw usage_error("step: no micro-batch has begun"); }
        if (!last()) {
            throw usage_error(formatted("step: micro-batch {} of {} was the last one begun", now_.index, now_.count));
        }
        expect_all_ready("step");
        phase_ = phase::between_steps;
    }
    void finish() {
        expect_running("finish");
        expect_between_steps("finish");
        phase_ = phase::finished;
    }

private:
    void expect_running(std::string_view operation) const {
        expect_attached(operation);
        if (phase_ == phase::finished) { throw usage_error(formatted("{}: the strategy is finished", operation)); }
    }
    void expect_all_ready(std::string_view operation) const {
        if (ready_count_ == ready_.size()) { return; }
        constexpr std::size_t shown = 8;
        std::string list;
        std::size_t missing = 0;
        for (std::size_t i = 0; i < ready_.size(); ++i) {
            if (ready_[i] != 0) { continue; }
            if (++missing <= shown) { list += formatted("{}'{}'", missing == 1 ? "" : ", ", names_[i]); }
        }
        if (missing > shown) { list += formatted(" and {} more", missing - shown); }
        throw usage_error(
            formatted("{}: gradients not ready in micro-batch {} of {}: {}; parameters that a model does not use "
                      "must be left out of the list, or reported with a zero gradient",
                      operation, now_.index, now_.count, list));
    }
};

}  // namespace tutti::strategy::detail
