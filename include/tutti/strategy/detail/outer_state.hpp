// outer_state: the copies of the parameters that a local-update strategy keeps, and the arithmetic of a round's end.
// Needs strategy/local_update_rule and optimize/clip (norms). No communication: the strategy does that.
#pragma once

#include <algorithm>    // max
#include <cmath>        // isfinite, pow
#include <concepts>     // invocable
#include <cstddef>      // size_t
#include <limits>       // largest clip
#include <string_view>  // names
#include <variant>      // gaps
#include <vector>       // entries

#include <tutti/core/buffer.hpp>                     // copies
#include <tutti/core/elementwise.hpp>                // copy, fill
#include <tutti/core/error.hpp>                      // error
#include <tutti/core/run.hpp>                        // fetch
#include <tutti/core/state.hpp>                      // state_entry
#include <tutti/core/text.hpp>                       // formatted
#include <tutti/optimize/clip.hpp>                   // sums of squares
#include <tutti/strategy/detail/round_progress.hpp>  // fragment
#include <tutti/strategy/local_update_rule.hpp>      // local_update_rule
#include <tutti/strategy/outer_optimizer.hpp>        // merges, outer steps
#include <tutti/strategy/staleness.hpp>              // gaps

namespace tutti::strategy::detail {

/// What an outer level keeps.
///
/// Semantics    x is always the inner strategy's owned(). `payload` holds what is sent and, in the same memory, its mean.
///              Every fragment has rounds of its own: calls say of which fragment the elements are meant.
///              arrived() comes before adopting a mean and changes nothing when it throws.
/// Determinism  norms are summed in the order of elements, then over shards: equal on ranks that hold the same.
/// Cost         copies: payload, and those that the rule keeps.
template <floating_element R, queue Q> class outer_state {
    using M = typename Q::memory_type;
    local_update_rule rule_;
    Q queue_;
    int ranks_;
    buffer<R, Q> payload_, anchor_, momentum_, previous_, own_, moved_, squares_;
    buffer<double, Q> scratch_;
    std::vector<state_entry<M>> entries_;
    double arrived_norm_ = 0;

public:
    round_progress<Q> rounds;

    outer_state(Q q, const local_update_rule& rule, int ranks, view<R, M> x)
        : rule_(rule)
        , queue_(q)
        , ranks_(ranks)
        , payload_(q, x.size())
        , anchor_(q, rule.keeps_anchor() ? x.size() : 0)
        , momentum_(q, rule.keeps_momentum() ? x.size() : 0)
        , previous_(q, rule.keeps_previous() ? x.size() : 0)
        , own_(q, rule.merge == round_merge::eager ? x.size() : 0)
        , moved_(q, rule.elementwise() ? x.size() : 0)
        , squares_(q, rule.elementwise() ? x.size() : 0)
        , scratch_(q, optimize::norm_blocks(x.size()) + 1)
        , rounds(q, rule) {
        start(x);
        for (const auto* b : {&payload_, &momentum_, &previous_, &own_, &moved_, &squares_}) {
            fill(q, b->view(), R{0});
        }
        const auto add = [this](std::string_view name, const buffer<R, Q>& b) {
            if (b.size() != 0) { entries_.push_back(state_of(formatted("local_update/{}", name), b.view())); }
        };
        if (rule.delay == 1) { add("in_flight", payload_); }
        add("anchor", anchor_);
        add("momentum", momentum_);
        add("previous", previous_);
        add("own", own_);
        add("moved", moved_);
        add("squares", squares_);
        for (const state_entry<M>& e : rounds.entries()) { entries_.push_back(e); }
    }

    [[nodiscard]] view<R, M> payload() const noexcept { return payload_.view(); }
    [[nodiscard]] view<R, M> anchor() const noexcept { return anchor_.view(); }
    [[nodiscard]] view<R, M> momentum() const noexcept { return momentum_.view(); }
    [[nodiscard]] const std::vector<state_entry<M>>& entries() const noexcept { return entries_; }

    /// The first round begins with x.
    void start(view<R, M> x) {
        if (rule_.keeps_anchor()) { copy(queue_, x, anchor()); }
    }

    /// Looks at a mean before anything is done with it. Errors: error when it is not finite.
    template <std::invocable<view<double, M>> Sum> void arrived(const fragment& f, Sum sum_over_shards) {
        arrived_norm_ = norm(of(f, payload()), sum_over_shards);
        if (!std::isfinite(arrived_norm_)) {
            throw error(
                formatted("local update: the mean of round {} is not finite, nothing of it was adopted: a replica "
                          "has diverged; lower the learning rate or the outer momentum, and go on from a "
                          "checkpoint",
                          f.rounds - (rule_.delay == 1 ? 1 : 0)));
        }
    }

    /// Delay 0: what is sent.
    void snapshot(const fragment& f, view<R, M> x) {
        if (rule_.payload == round_payload::parameters) {
            copy(queue_, of(f, x), of(f, payload()));
        } else {
            subtract(of(f, anchor()), of(f, x), of(f, payload()));
        }
    }
    /// Delay 0: the mean that arrived becomes x.
    template <class Sum> void adopt(fragment& f, view<R, M> whole, Sum sum_over_shards) {
        const view<R, M> x = of(f, whole), mean = of(f, payload());
        if (rule_.takes_mean()) {
            copy(queue_, mean, x);
            ++f.adopted;
            return;
        }
        if (rule_.payload == round_payload::parameters) { subtract(of(f, anchor()), mean, mean); }
        step(f, mean, sum_over_shards);
        go_on(f, x);
    }

    /// Delay 1, the end of a round: adopts the mean that arrived, if one did, and leaves what is sent next in payload().
    template <class Sum> void turn(fragment& f, view<R, M> whole, Sum sum_over_shards) {
        const view<R, M> x = of(f, whole), mean = of(f, payload());
        switch (rule_.merge) {
        case round_merge::anchor:
        case round_merge::interpolation: turn_anchor(f, x, sum_over_shards); break;
        case round_merge::eager: turn_eager(f, x, sum_over_shards); break;
        case round_merge::delay_corrected:
            if (f.arriving) {
                run(queue_, correct_delay_operation<R, M>{x, mean, of(f, anchor())});
                ++f.adopted;
            }
            copy(queue_, x, of(f, anchor()));
            copy(queue_, x, mean);
            break;
        case round_merge::pull_back:
            if (f.arriving) {
                run(queue_, mix_operation<R, M>{x, mean, x, static_cast<R>(rule_.weight)});
                ++f.adopted;
            }
            copy(queue_, x, mean);
            break;
        }
    }
    /// Delay 1, the end of training: adopts the last mean, for rules with an outer optimizer.
    template <class Sum> void settle(fragment& f, view<R, M> whole, Sum sum_over_shards) {
        if (rule_.merge == round_merge::eager) {
            turn_eager(f, of(f, whole), sum_over_shards);
            return;
        }
        const view<R, M> mean = of(f, payload());
        if (rule_.payload == round_payload::parameters) { subtract(of(f, previous_.view()), mean, mean); }
        step(f, mean, sum_over_shards);
    }

private:
    [[nodiscard]] static view<R, M> of(const fragment& f, view<R, M> all) { return all.sub(f.offset, f.size); }

    template <class Sum> void turn_anchor(fragment& f, view<R, M> x, Sum sum_over_shards) {
        const bool parameters = rule_.payload == round_payload::parameters;
        const view<R, M> mean = of(f, payload()), origin = of(f, anchor());
        if (f.arriving && parameters) { subtract(of(f, previous_.view()), mean, mean); }
        if (rule_.keeps_previous()) {
            copy(queue_, origin, of(f, previous_.view()));
        } else {
            subtract(origin, x, x);  // what is sent waits in x, which the anchor replaces anyway
        }
        if (f.arriving) { step(f, mean, sum_over_shards); }
        if (rule_.keeps_previous() && !parameters) {
            subtract(of(f, previous_.view()), x, mean);
        } else {
            copy(queue_, x, mean);
        }
        go_on(f, x);
    }
    template <class Sum> void turn_eager(fragment& f, view<R, M> x, Sum sum_over_shards) {
        const view<R, M> own = of(f, own_.view()), origin = of(f, anchor());
        if (f.arriving) {
            run(queue_, eager_operation<R, M>{x, own, origin, of(f, payload()), static_cast<R>(ranks_)});
        } else {
            subtract(origin, x, x);
            copy(queue_, x, own);
        }
        copy(queue_, own, of(f, payload()));
        step(f, x, sum_over_shards);
        copy(queue_, origin, x);
    }
    void go_on(const fragment& f, view<R, M> x) {
        if (rule_.merge == round_merge::interpolation) {
            run(queue_, mix_operation<R, M>{of(f, anchor()), x, x, static_cast<R>(rule_.weight)});
        } else {
            copy(queue_, of(f, anchor()), x);
        }
    }

    /// The outer step for the pseudo-gradient d, which becomes the step.
    template <class Sum> void step(fragment& f, view<R, M> d, Sum sum_over_shards) {
        double& gap = rounds.gap;
        gap = 1;
        if (const auto* const constant = std::get_if<constant_gap>(&rule_.gap)) { gap = constant->value; }
        if (rule_.scalar()) {
            const bool known = rule_.payload == round_payload::pseudo_gradient;
            const double now = known ? arrived_norm_ : norm(d, sum_over_shards);
            f.scale = std::max(std::get<scalar_gap>(rule_.gap).decay * f.scale, now);
            gap = gap_of(f.moved, f.scale);
        }
        ++f.adopted;
        if (rule_.elementwise()) {
            const double decay = std::get<elementwise_gap>(rule_.gap).decay;
            run(queue_,
                elementwise_gap_operation<R, M>{d, of(f, squares_.view()), of(f, moved_.view()), static_cast<R>(decay),
                                                1 - std::pow(decay, static_cast<double>(f.adopted))});
        }
        const outer_optimizer& o = rule_.outer;
        const double unit = o.units == outer_units::gradients ? rounds.learning_rate : 1;
        const double limit = std::min(o.clip, static_cast<double>(std::numeric_limits<R>::max()));
        const auto with = [&]<bool moving>() {
            run(queue_,
                outer_step_operation<R, M, moving>{of(f, anchor()), moving ? of(f, momentum()) : momentum(), d,
                                                   static_cast<R>(unit * gap), static_cast<R>(o.momentum),
                                                   static_cast<R>(limit), static_cast<R>(o.rate * unit), o.nesterov});
        };
        if (rule_.keeps_momentum()) {
            with.template operator()<true>();
        } else {
            with.template operator()<false>();
        }
        if (rule_.scalar()) { f.moved = norm(d, sum_over_shards); }
        if (rule_.elementwise()) { copy(queue_, d, of(f, moved_.view())); }
    }

    template <class Sum> [[nodiscard]] double norm(view<R, M> v, Sum sum_over_shards) {
        const std::size_t blocks = optimize::norm_blocks(v.size());
        const view<double, M> sums = scratch_.view().sub(0, blocks);
        const view<double, M> total = scratch_.view().sub(blocks, 1);
        run(queue_, optimize::square_sums_operation<R, M>{v, sums});
        run(queue_, optimize::ordered_sum_operation<M>{sums, total});
        sum_over_shards(total);
        return std::sqrt(fetch(queue_, total, 0.0));
    }
    void subtract(view<R, M> a, view<R, M> b, view<R, M> out) { run(queue_, difference_operation<R, M>{a, b, out}); }
};

}  // namespace tutti::strategy::detail
