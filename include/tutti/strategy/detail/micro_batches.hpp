// micro_batch_order: the order of calls that every strategy demands of its trainer, and the texts when it is broken;
// ready_buckets: which buckets a call of gradient_ready completes.
// Needs strategy/strategy. Strategies ask first, so that misuse is reported before anything moved.
#pragma once

#include <cmath>        // isfinite
#include <concepts>     // invocable
#include <cstddef>      // size_t
#include <cstdint>      // flags
#include <limits>       // a rate not told
#include <string>       // names
#include <string_view>  // operations
#include <utility>      // move, exchange
#include <vector>       // flags

#include <tutti/core/error.hpp>         // usage_error
#include <tutti/core/text.hpp>          // formatted
#include <tutti/schedule/bucket.hpp>    // bucket_plan
#include <tutti/strategy/strategy.hpp>  // micro_batch

namespace tutti::strategy::detail {

/// Errors  usage_error naming the value.
inline void expect_valid(const hyper& h) {
    if (!(h.clip_norm >= 0)) {
        throw usage_error(formatted("step: clip_norm is {}, expected a norm, or 0 for none", h.clip_norm));
    }
    if (std::isnan(h.learning_rate)) {
        throw usage_error("step: no learning rate, or not a number; give it as in step({.learning_rate = 1e-3})");
    }
    if (!(h.learning_rate >= 0) || !std::isfinite(h.learning_rate)) {
        throw usage_error(formatted("step: learning rate is {}, expected a number of 0 or more", h.learning_rate));
    }
}

/// Where a strategy is: attach, then steps, each between its first begin and step, then finish.
///
/// Errors  usage_error naming the operation.
class lifecycle {
    enum class phase : std::uint8_t { created, between_steps, in_step, finished };
    phase phase_ = phase::created;

public:
    lifecycle() = default;
    // A strategy that was moved from has nothing attached and says so.
    lifecycle(lifecycle&& other) noexcept : phase_(std::exchange(other.phase_, phase::created)) {}
    lifecycle& operator=(lifecycle&&) = delete;

    void attach() noexcept { phase_ = phase::between_steps; }
    void begin() noexcept { phase_ = phase::in_step; }
    void step() noexcept { phase_ = phase::between_steps; }
    void finish() noexcept { phase_ = phase::finished; }
    [[nodiscard]] bool in_step() const noexcept { return phase_ == phase::in_step; }
    [[nodiscard]] bool finished() const noexcept { return phase_ == phase::finished; }

    void expect_not_attached() const {
        if (phase_ != phase::created) { throw usage_error("attach: parameters are attached already"); }
    }
    void expect_attached(std::string_view operation) const {
        if (phase_ == phase::created) { throw usage_error(formatted("{}: no parameters are attached", operation)); }
    }
    void expect_between_steps(std::string_view operation) const {
        expect_attached(operation);
        if (in_step()) { throw usage_error(formatted("{}: in the middle of a step", operation)); }
    }
    void expect_running(std::string_view operation) const {
        expect_attached(operation);
        if (finished()) { throw usage_error(formatted("{}: the strategy is finished", operation)); }
    }
};

/// attach, then per step: begin(0 of n) ... begin(n-1 of n), each followed by one gradient_ready per parameter, then
/// step.
///
/// Cost    a few comparisons a call; begin clears one byte a parameter.
/// Errors  usage_error naming the parameters and the micro-batch.
class micro_batch_order {
    static constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

    lifecycle life_;
    micro_batch now_{-1, 0};
    double rate_ = unknown;  // of the step that has begun
    std::vector<std::string> names_;
    std::vector<std::uint8_t> ready_;
    std::size_t ready_count_ = 0;

public:
    void expect_not_attached() const { life_.expect_not_attached(); }
    void expect_attached(std::string_view operation) const { life_.expect_attached(operation); }
    void expect_between_steps(std::string_view operation) const { life_.expect_between_steps(operation); }

    template <class T, memory M> void attach(const parameters<T, M>& list) {
        for (const auto& p : list) { names_.push_back(p.name); }
        ready_.assign(names_.size(), 0);
        life_.attach();
    }
    void expect_index(std::string_view operation, std::size_t i) const {
        expect_attached(operation);
        if (i >= names_.size()) {
            throw usage_error(formatted("{}: parameter {} of {} parameters", operation, i, names_.size()));
        }
    }
    void begin(micro_batch m) {
        life_.expect_running("begin");
        if (m.count < 1 || m.index < 0 || m.index >= m.count) {
            throw usage_error(formatted("begin: micro-batch {} of {} does not exist", m.index, m.count));
        }
        if (life_.in_step()) { expect_all_ready("begin"); }
        const int next = life_.in_step() ? now_.index + 1 : 0;
        if (life_.in_step() && next == now_.count) {
            throw usage_error(formatted("begin: all {} micro-batches are done, expected a step", now_.count));
        }
        if (m.index != next || (next != 0 && m.count != now_.count)) {
            throw usage_error(formatted("begin: micro-batch {} of {}, expected {} of {}", m.index, m.count, next,
                                        next == 0 ? m.count : now_.count));
        }
        if (!(m.loss_scale > 0) || !std::isfinite(m.loss_scale)) {
            throw usage_error(formatted("begin: loss scale is {}, expected a number above 0", m.loss_scale));
        }
        if (m.learning_rate < 0 || std::isinf(m.learning_rate)) {
            throw usage_error(formatted("begin: learning rate is {}, expected a number of 0 or more", m.learning_rate));
        }
        if (next != 0 && m.loss_scale != now_.loss_scale) {
            throw usage_error(formatted("begin: micro-batch {} of {} has loss scale {}, those before it {}", m.index,
                                        m.count, m.loss_scale, now_.loss_scale));
        }
        const double before = next == 0 ? unknown : rate_;
        expect_same_rate("begin", m.learning_rate, before);
        rate_ = std::isnan(before) ? m.learning_rate : before;
        now_ = m;
        life_.begin();
        ready_.assign(ready_.size(), 0);
        ready_count_ = 0;
    }
    void ready(std::size_t i) {
        expect_index("gradient_ready", i);
        if (!life_.in_step()) {
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
        if (!life_.in_step()) {
            throw usage_error(formatted("gradient: '{}' outside a micro-batch, expected begin", names_[i]));
        }
        if (ready_[i] != 0) {
            throw usage_error(formatted("gradient: '{}' is ready already in micro-batch {} of {}", names_[i],
                                        now_.index, now_.count));
        }
    }
    [[nodiscard]] bool first() const noexcept { return now_.index == 0; }
    [[nodiscard]] bool last() const noexcept { return now_.index + 1 == now_.count; }
    /// `rate` is the step's: what its micro-batches were told of it, if they were, must be the same.
    void step(double rate) {
        life_.expect_running("step");
        if (!life_.in_step()) { throw usage_error("step: no micro-batch has begun"); }
        if (!last()) {
            throw usage_error(formatted("step: micro-batch {} of {} was the last one begun", now_.index, now_.count));
        }
        expect_all_ready("step");
        expect_same_rate("step", rate, rate_);
        life_.step();
    }
    void finish() {
        life_.expect_running("finish");
        life_.expect_between_steps("finish");
        life_.finish();
    }

private:
    // Feedback was scaled by what begin was told.
    static void expect_same_rate(std::string_view operation, double rate, double told) {
        if (std::isnan(rate) || std::isnan(told) || rate == told) { return; }
        throw usage_error(formatted("{}: learning rate is {}, but begin was told {}", operation, rate, told));
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

/// Buckets all of whose gradients are ready, in the order of the plan: the same on every rank, whatever the order in
/// which gradients become so.
class ready_buckets {
    std::vector<std::size_t> missing_;  // by bucket: gradients that are not ready
    std::size_t next_ = 0;

public:
    /// Of a micro-batch in which no gradient is ready.
    void begin(const schedule::bucket_plan& plan) {
        missing_.resize(plan.buckets.size());
        for (std::size_t b = 0; b < missing_.size(); ++b) { missing_[b] = plan.buckets[b].count; }
        next_ = 0;
    }
    /// One more gradient of a bucket is. Calls launch(b) for each bucket whose turn that makes it.
    template <std::invocable<std::size_t> Launch> void ready(std::size_t bucket, Launch launch) {
        --missing_[bucket];
        for (; next_ < missing_.size() && missing_[next_] == 0; ++next_) { launch(next_); }
    }
};

}  // namespace tutti::strategy::detail
