// Sequential references for local-update strategies: one process, plain loops over the history of all replicas.
// Needs strategy/data_parallel for the replicas' own training. Bits are those of sums in rank order.
#pragma once

#include <cmath>    // sqrt, pow
#include <cstddef>  // size_t
#include <memory>   // replicas
#include <variant>  // gaps
#include <vector>   // histories

#include "toy.hpp"                               // trainer
#include <tutti/core/config.hpp>                 // TUTTI_EXACT
#include <tutti/optimize/sgd.hpp>                // sgd
#include <tutti/strategy/data_parallel.hpp>      // local
#include <tutti/strategy/local_update_rule.hpp>  // hyper-parameters

namespace tutti::test {

using vec = std::vector<float>;

TUTTI_EXACT inline vec mean_over(const std::vector<vec>& rows) {
    TUTTI_EXACT_BODY
    vec out = rows[0];
    for (std::size_t g = 1; g < rows.size(); ++g) {
        for (std::size_t i = 0; i < out.size(); ++i) { out[i] = out[i] + rows[g][i]; }
    }
    for (float& v : out) { v = v / static_cast<float>(rows.size()); }
    return out;
}
TUTTI_EXACT inline vec minus(const vec& a, const vec& b) {
    TUTTI_EXACT_BODY
    vec out(a.size());
    for (std::size_t i = 0; i < a.size(); ++i) { out[i] = a[i] - b[i]; }
    return out;
}
/// Of fewer than 4096 elements, in the order that the library promises.
TUTTI_EXACT inline double norm_of(const vec& v) {
    TUTTI_EXACT_BODY
    double partial[8] = {};
    for (std::size_t i = 0; i < v.size(); ++i) {
        partial[i % 8] += static_cast<double>(v[i]) * static_cast<double>(v[i]);
    }
    double total = 0;
    for (const double p : partial) { total += p; }
    return std::sqrt(total);
}

/// The outer optimizer and the gap, by the formulas.
struct outer_reference {
    strategy::local_update_rule rule;
    vec m, squares, last_step;
    double c = 0, gap = 1;
    int count = 0;

    TUTTI_EXACT void update(vec& x, vec d, double lr) {
        TUTTI_EXACT_BODY
        using namespace strategy;
        if (m.empty()) {
            m.assign(x.size(), 0.0f);
            squares = last_step = m;
        }
        ++count;
        gap = 1;
        if (const auto* k = std::get_if<constant_gap>(&rule.gap)) { gap = k->value; }
        if (const auto* k = std::get_if<scalar_gap>(&rule.gap); k != nullptr && rule.delay == 1) {
            c = std::max(k->decay * c, norm_of(d));
            gap = c > 0 ? 1 + norm_of(last_step) / c : 1;
        }
        if (const auto* k = std::get_if<elementwise_gap>(&rule.gap); k != nullptr && rule.delay == 1) {
            const auto decay = static_cast<float>(k->decay);
            const double correction = 1 - std::pow(k->decay, count);
            for (std::size_t i = 0; i < x.size(); ++i) {
                squares[i] = decay * squares[i] + (1.0f - decay) * (d[i] * d[i]);
                if (last_step[i] == 0 || squares[i] == 0) { continue; }
                const double typical = std::sqrt(static_cast<double>(squares[i]) / correction);
                const double by = 1 + std::fabs(static_cast<double>(last_step[i])) / typical;
                d[i] = static_cast<float>(static_cast<double>(d[i]) / by);
            }
        }
        const double unit = rule.outer.units == outer_units::gradients ? lr : 1;
        const auto divisor = static_cast<float>(unit * gap);
        const auto beta = static_cast<float>(rule.outer.momentum);
        const auto scale = static_cast<float>(rule.outer.rate * unit);
        const auto phi = static_cast<float>(rule.outer.clip);
        for (std::size_t i = 0; i < x.size(); ++i) {
            const float g = d[i] / divisor;
            m[i] = std::min(std::max(beta * m[i] + g, -phi), phi);
            last_step[i] = scale * (rule.outer.nesterov ? g + beta * m[i] : m[i]);
            x[i] = x[i] - last_step[i];
        }
    }
};

/// All replicas of a run, one after the other.
template <class Optimizer = optimize::sgd> class sequential {
    using inner = strategy::local<Optimizer>;
    /// Elements [first, last), whose rounds end together.
    struct part {
        std::size_t first, last, in_round;
        std::vector<outer_reference> outer{};  // one, or one a replica where they differ
        // History: by round, the common anchor where it began and what replicas had in its end.
        std::vector<vec> anchors{};
        std::vector<std::vector<vec>> ends{};
        std::vector<std::vector<vec>> began{};  // by round and replica
    };
    strategy::local_update_rule rule_;
    recipe how_;
    int ranks_;
    std::vector<std::unique_ptr<toy<float>>> toys_;
    std::vector<std::unique_ptr<inner>> all_;
    std::vector<part> parts_;
    double lr_ = 0, gap_ = 1;
    int step_ = 0;

public:
    sequential(strategy::local_update_rule rule, int ranks, recipe how, Optimizer optimizer)
        : rule_(rule), how_(how), ranks_(ranks) {
        for (int g = 0; g < ranks; ++g) {
            toys_.push_back(std::make_unique<toy<float>>());
            all_.push_back(std::make_unique<inner>(comm::self<host_queue>{}, optimizer));
            all_.back()->attach(toys_.back()->parameters);
        }
        // Where fragments of the toy end: tensors end at 5, 69, 70, 103, 303, 310, 310, 439, 451.
        const std::vector<std::vector<std::size_t>> cuts_of{{}, {0, 451}, {0, 303, 451}, {0, 103, 303, 451}};
        const std::vector<std::size_t>& cuts = cuts_of.at(rule.fragments);
        for (std::size_t f = 1; f < cuts.size(); ++f) {
            // As if a part of the first round had been made already.
            const std::size_t ahead = rule.period - f * rule.period / (cuts.size() - 1);
            part p{cuts[f - 1], cuts[f], ahead};
            for (int g = 0; g < ranks; ++g) { p.outer.push_back({rule, {}, {}, {}}); }
            p.anchors.push_back(values(p)[0]);
            p.began.push_back(values(p));
            parts_.push_back(std::move(p));
        }
    }

    [[nodiscard]] std::vector<vec> values() const {
        std::vector<vec> all;
        for (const auto& t : toys_) { all.push_back(t->values()); }
        return all;
    }
    /// That the last mean was divided by.
    [[nodiscard]] double gap() const { return gap_; }
    [[nodiscard]] vec momentum() const {
        vec all;
        for (const part& p : parts_) {
            const vec zero(p.last - p.first);
            const vec& m = p.outer[0].m.empty() ? zero : p.outer[0].m;
            all.insert(all.end(), m.begin(), m.end());
        }
        return all;
    }
    [[nodiscard]] vec anchor() const {
        vec all;
        for (const part& p : parts_) { all.insert(all.end(), p.anchors.back().begin(), p.anchors.back().end()); }
        return all;
    }

    void step() {
        recipe one = how_;
        one.steps = 1;
        one.first_step = step_;
        for (int g = 0; g < ranks_; ++g) { train(*all_[static_cast<std::size_t>(g)], g, ranks_, one); }
        lr_ = how_.learning_rate / (1 + step_);
        ++step_;
        for (part& p : parts_) {
            if (++p.in_round != rule_.period) { continue; }
            end_round(p);
            gap_ = p.outer[0].gap;
        }
    }

    void finish() {
        for (part& p : parts_) { finish(p); }
    }

private:
    void finish(part& p) {
        using enum strategy::round_merge;
        if (p.in_round != 0 && step_ != 0 && rule_.has_outer()) { end_round(p); }
        if (rule_.merge == anchor || rule_.merge == interpolation) {
            vec x = p.anchors.back();
            if (rule_.delay == 1 && !p.ends.empty()) { p.outer[0].update(x, difference(p, p.ends.size() - 1), lr_); }
            if (rule_.takes_mean()) { return; }
            p.anchors.back() = x;
            set(p, std::vector<vec>(static_cast<std::size_t>(ranks_), x));
            return;
        }
        if (rule_.merge == eager && !p.ends.empty()) { eager_end(p); }
        set(p, std::vector<vec>(static_cast<std::size_t>(ranks_), mean_over(values(p))));
    }
    [[nodiscard]] std::vector<vec> values(const part& p) const {
        std::vector<vec> all;
        for (const vec& x : values()) {
            all.emplace_back(x.begin() + static_cast<std::ptrdiff_t>(p.first),
                             x.begin() + static_cast<std::ptrdiff_t>(p.last));
        }
        return all;
    }
    void set(const part& p, const std::vector<vec>& x) {
        for (std::size_t g = 0; g < x.size(); ++g) {
            std::copy(x[g].begin(), x[g].end(), all_[g]->owned().begin() + static_cast<std::ptrdiff_t>(p.first));
            all_[g]->publish();
        }
    }
    /// Mean pseudo-gradient of round t.
    vec difference(const part& p, std::size_t t) const {
        if (rule_.payload == strategy::round_payload::parameters) { return minus(p.anchors[t], mean_over(p.ends[t])); }
        std::vector<vec> d;
        for (const vec& x : p.ends[t]) { d.push_back(minus(p.anchors[t], x)); }
        return mean_over(d);
    }

    TUTTI_EXACT void end_round(part& p) {
        TUTTI_EXACT_BODY
        using enum strategy::round_merge;
        p.in_round = 0;
        const std::vector<vec> x = values(p);
        const std::size_t t = p.ends.size();
        const auto w = static_cast<float>(rule_.weight);
        std::vector<vec> next = x;
        if (rule_.merge == eager) {
            eager_end(p);
            return;
        }
        p.ends.push_back(x);
        if (rule_.takes_mean()) {
            next.assign(x.size(), mean_over(x));
            p.anchors.push_back(next[0]);
        } else if (rule_.merge == anchor || rule_.merge == interpolation) {
            vec a = p.anchors.back();
            if (rule_.delay == 0) { p.outer[0].update(a, difference(p, t), lr_); }
            if (rule_.delay == 1 && t > 0) { p.outer[0].update(a, difference(p, t - 1), lr_); }
            p.anchors.push_back(a);
            for (vec& v : next) {
                for (std::size_t i = 0; i < v.size(); ++i) {
                    v[i] = rule_.merge == anchor ? a[i] : (1.0f - w) * a[i] + w * v[i];
                }
            }
        } else if (t > 0) {  // what was sent at the end of round t - 1 is what replicas began round t with
            const vec q = mean_over(p.began[t]);
            for (std::size_t g = 0; g < next.size(); ++g) {
                for (std::size_t i = 0; i < q.size(); ++i) {
                    next[g][i] = rule_.merge == delay_corrected ? q[i] + (x[g][i] - p.began[t][g][i])
                                                                : (1.0f - w) * x[g][i] + w * q[i];
                }
            }
        }
        p.began.push_back(next);
        set(p, next);
    }

    /// D = d_t / n + (mean of d_(t-1) - d_(t-1) / n); in the first round d_0.
    TUTTI_EXACT void eager_end(part& p) {
        TUTTI_EXACT_BODY
        const std::vector<vec> x = values(p);
        const auto n = static_cast<float>(ranks_);
        std::vector<vec> d, next;
        for (std::size_t g = 0; g < x.size(); ++g) { d.push_back(minus(p.began.back()[g], x[g])); }
        for (std::size_t g = 0; g < x.size(); ++g) {
            vec use = d[g];
            if (!p.ends.empty()) {
                const vec mean = mean_over(p.ends.back());
                for (std::size_t i = 0; i < use.size(); ++i) {
                    use[i] = d[g][i] / n + (mean[i] - p.ends.back()[g][i] / n);
                }
            }
            next.push_back(p.began.back()[g]);
            p.outer[g].update(next.back(), use, lr_);
        }
        p.ends.push_back(d);  // of the eager form the pseudo-gradients themselves
        p.began.push_back(next);
        set(p, next);
    }
};

}  // namespace tutti::test
