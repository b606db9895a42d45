// search: the fastest jobs among all that fit a machine's memory: every choice of (tensor, pipeline, data, ZeRO stage,
// micro-batch, recomputation, schedule), and of compression and rounds where they are allowed.
// Needs plan/time, plan/memory. Exhaustive: what is left out provably cannot be among the results.
#pragma once

#include <algorithm>    // sort, find
#include <cmath>        // isfinite
#include <cstddef>      // size_t
#include <cstdint>      // counts
#include <numeric>      // gcd
#include <string>       // messages
#include <string_view>  // messages
#include <tuple>        // order of jobs
#include <vector>       // lists

#include <tutti/core/error.hpp>    // usage_error
#include <tutti/core/text.hpp>     // formatted
#include <tutti/plan/machine.hpp>  // machine
#include <tutti/plan/memory.hpp>   // peak_of
#include <tutti/plan/model.hpp>    // job
#include <tutti/plan/time.hpp>     // time_of_step

namespace tutti::plan {

/// What may be chosen. An empty list of tensor, pipeline or micro_batches is every number that divides; heads need not be
/// divided evenly.
struct search_space {
    int ranks = 1;
    std::int64_t sequences = 1;  ///< of a step, of all ranks together: never changed, since training depends on it
    std::vector<int> tensor{};
    std::vector<int> pipeline{};
    std::vector<std::int64_t> micro_batches{};  ///< sequences of each
    std::vector<int> zero_stages{0, 1, 2, 3};   ///< 2 and 3 where there is no pipeline, see can_run
    std::vector<recomputation> recomputations{recomputation::selective, recomputation::full};
    std::vector<pipelining> schedules{pipelining::gpipe, pipelining::one_forward_one_backward, pipelining::interleaved,
                                      pipelining::zero_bubble, pipelining::zero_bubble_v};
    // These change what is learned, so there are none unless they are listed.
    std::vector<double> compressions{};  ///< ratios; 1 is always among them
    std::vector<int> taus{};             ///< steps of rounds; synchronous steps are always among them
    bool delayed = false;                ///< rounds may be adopted late as well
    bool kept_scores = false;            ///< of attention, as in time_of_step
    double margin = 0.1;                 ///< of memory, as in fits
};

/// A job, and what it takes.
struct planned {
    job how{};
    step_time time{};
    peak_memory peak{};
    [[nodiscard]] constexpr double seconds() const noexcept { return time.total(); }
};

/// The faster first; of equal ones the one that holds less, then the one with fewer tensor ranks, stages, chunks, lower
/// ZeRO stage, and so on: a total order of different jobs.
[[nodiscard]] inline bool precedes(const planned& a, const planned& b) noexcept {
    const auto key = [](const planned& x) {
        const job& j = x.how;
        return std::make_tuple(x.seconds(), x.peak.memory.total(), j.tensor, j.pipeline, j.chunks, j.zero_stage,
                               j.micro_batch, j.schedule, j.recompute, j.sequence_parallel, j.replicas, j.tau,
                               j.delayed, j.compression, j.secondary);
    };
    return key(a) < key(b);
}

namespace detail {

template <class T> [[nodiscard]] std::vector<T> divisors(T of) {
    std::vector<T> low;
    std::vector<T> high;
    for (T d = 1; d * d <= of; ++d) {
        if (of % d != 0) { continue; }
        low.push_back(d);
        if (d != of / d) { high.insert(high.begin(), of / d); }
    }
    low.insert(low.end(), high.begin(), high.end());
    return low;
}
// Those of `listed`, or all where none is, that divide `of`, in ascending order.
template <class T> [[nodiscard]] std::vector<T> dividing(const std::vector<T>& listed, T of) {
    std::vector<T> all = divisors(of);
    if (!listed.empty()) {
        std::erase_if(all, [&](T d) { return std::find(listed.begin(), listed.end(), d) == listed.end(); });
    }
    return all;
}
template <class T> [[nodiscard]] bool has(const std::vector<T>& list, const T& value) {
    return std::find(list.begin(), list.end(), value) != list.end();
}

inline void validate(const search_space& s) {
    expect(s.ranks > 0 && s.sequences > 0,
           [&] { return formatted("{} ranks and {} sequences a step; both must be positive", s.ranks, s.sequences); });
    expect(!s.zero_stages.empty() && !s.recomputations.empty() && !s.schedules.empty(),
           [] { return std::string("a search needs a ZeRO stage, a recomputation and a schedule at least"); });
    expect(s.margin >= 0 && s.margin < 1, [&] { return formatted("a margin of {}; 0 to below 1", s.margin); });
    for (const int stage : s.zero_stages) {
        expect(stage >= 0 && stage <= 3, [&] { return formatted("ZeRO stage {} of 0 to 3", stage); });
    }
    for (const double ratio : s.compressions) {
        expect(ratio >= 1 && std::isfinite(ratio),
               [&] { return formatted("compression {}; at least 1, and finite", ratio); });
    }
    for (const int tau : s.taus) {
        expect(tau > 0, [&] { return formatted("rounds of {} steps; at least 1", tau); });
    }
}

// Ranks that a layer can be divided over: they divide the vocabulary, and each has a head at least.
[[nodiscard]] inline std::vector<int> tensor_ranks(const model_shape& m, const search_space& s) {
    std::vector<int> all = dividing(s.tensor, static_cast<int>(std::gcd(m.vocabulary, std::int64_t{s.ranks})));
    std::erase_if(all, [&](int t) { return t > m.heads; });
    return all;
}
// ", with stages of 4, 8": what a list allows; "" where it allows everything.
template <class T> [[nodiscard]] std::string allowed(const std::vector<T>& listed, std::string_view what) {
    std::string text;
    for (const T& value : listed) { text += formatted("{}{}", text.empty() ? "" : ", ", value); }
    return listed.empty() ? "" : formatted(", {} of {}", what, text);
}

// Jobs that differ in what a micro-batch takes on a rank: f(job).
template <class F> void for_each_layout(const model_shape& m, const search_space& s, F f) {
    const int lowest = *std::min_element(s.zero_stages.begin(), s.zero_stages.end());
    for (const int t : tensor_ranks(m, s)) {
        for (const int p : dividing(s.pipeline, std::gcd(static_cast<int>(m.layers), s.ranks / t))) {
            const int d = s.ranks / t / p;
            if (s.sequences % d != 0 || !can_run({.pipeline = p, .zero_stage = lowest})) { continue; }
            for (const std::int64_t b : dividing(s.micro_batches, s.sequences / d)) {
                for (const recomputation r : s.recomputations) {
                    for (const bool cut_rows : {false, true}) {
                        if (cut_rows && t == 1) { continue; }
                        job j{.tensor = t, .pipeline = p, .data = d};
                        j.sequence_parallel = cut_rows;
                        j.recompute = r;
                        j.micro_batch = b;
                        j.micro_batches = s.sequences / d / b;
                        f(j);
                    }
                }
            }
        }
    }
}
// The schedules of a layout. One rank has nothing to schedule.
template <class F> void for_each_schedule(const model_shape& m, const search_space& s, job j, F f) {
    if (j.pipeline == 1) { return f(j); }
    const std::int64_t layers = m.layers / j.pipeline;
    for (const pipelining schedule : s.schedules) {
        j.schedule = schedule;
        j.chunks = 1;
        const bool splits = schedule == pipelining::zero_bubble || schedule == pipelining::zero_bubble_v;
        if (splits && j.micro_batches < 2 * j.pipeline) { continue; }
        if (schedule == pipelining::zero_bubble_v && layers % 2 != 0) { continue; }
        if (schedule != pipelining::interleaved) {
            f(j);
        } else if (j.micro_batches % j.pipeline == 0) {
            for (const std::int64_t chunks : divisors(layers)) {
                j.chunks = static_cast<int>(chunks);
                if (chunks > 1) { f(j); }
            }
        }
    }
}
// What data ranks may do. A replica is a rank, or those of a node; where nothing is shared stages are the same.
template <class F> void for_each_exchange(const search_space& s, const machine& on, job j, F f) {
    const int lowest = *std::min_element(s.zero_stages.begin(), s.zero_stages.end());
    const comm::two_levels group = on.group_of(j.data, j.tensor);
    const bool has_nodes = group.nodes > 1 && group.largest_node > 1 && group.largest_node == group.smallest_node;
    const auto compressed = [&](job k) {
        f(k);
        if (k.data == 1 || (k.replicas > 1 && k.tau == 0)) { return; }
        for (const double ratio : s.compressions) {
            k.compression = ratio;
            if (ratio > 1) { f(k); }
        }
    };
    const auto with = [&](int replicas, int tau, bool delayed) {
        job k = j;
        k.replicas = replicas;
        k.tau = tau;
        k.delayed = delayed;
        if (k.shards() == 1) {
            k.zero_stage = lowest;
            return compressed(k);
        }
        for (const int stage : s.zero_stages) {
            k.zero_stage = stage;
            if (!can_run(k)) { continue; }
            if (replicas == 1 || tau > 0 || stage > 0) { compressed(k); }
            if (stage == 3 && replicas == 1 && has_nodes) {
                job keeping = k;
                keeping.secondary = group.largest_node;
                compressed(keeping);
            }
        }
    };
    with(1, 0, false);
    if (has_nodes) { with(group.nodes, 0, false); }
    for (const int tau : s.taus) {
        for (const bool delayed : {false, true}) {
            if (j.data == 1 || (delayed && !s.delayed)) { continue; }
            with(j.data, tau, delayed);
            if (has_nodes) { with(group.nodes, tau, delayed); }
        }
    }
}

}  // namespace detail

/// All jobs of a space, each once: f(job).
template <class F> void for_each_job(const model_shape& m, const machine& on, const search_space& s, F f) {
    validate(on);
    detail::validate(s);
    detail::for_each_layout(m, s, [&](const job& layout) {
        detail::for_each_schedule(m, s, layout,
                                  [&](const job& scheduled) { detail::for_each_exchange(s, on, scheduled, f); });
    });
}

struct search_result {
    std::vector<planned> best{};  ///< fastest first; empty where nothing fits
    planned lightest{};           ///< where nothing fits: the job that holds least
    std::size_t layouts = 0;      ///< that the space has
    std::size_t evaluated = 0;    ///< jobs, of those that bounds left
};

/// The `count` fastest jobs that fit.
///
/// Semantics    the job with the least `precedes` first. What is cut off: layouts whose products, memory and tensor
///              collectives alone take longer than the last of `count` jobs that were found, schedules for which this
///              holds with their bubble, and those that would not fit if all data ranks shared as much as can_run lets
///              them. No term of a time or of a memory is below 0, and sums of floats are monotone, so no result is lost.
/// Determinism  of the arguments alone; no two jobs are of the same rank.
/// Cost         well below a second for 3072 ranks and 10^12 parameters.
/// Errors       usage_error for a machine or space that makes no sense, or in which no number divides.
[[nodiscard]] inline search_result search(const model_shape& m, const machine& on, const search_space& s,
                                          std::size_t count = 5) {
    validate(on);
    detail::validate(s);
    struct bounded {
        job layout;
        double seconds;
    };
    std::vector<bounded> layouts;
    detail::for_each_layout(m, s, [&](const job& j) {
        const step_time t = time_of_step(m, j, on, s.kept_scores);
        layouts.push_back({j, t.products + t.memory + t.tensor});
    });
    if (layouts.empty()) {
        throw usage_error(formatted("plan: no layout divides {} ranks, {} layers, {} heads, {} words and {} "
                                    "sequences{}",
                                    s.ranks, m.layers, m.heads, m.vocabulary, s.sequences,
                                    detail::allowed(s.tensor, "with tensor ranks") +
                                        detail::allowed(s.pipeline, "with stages") +
                                        detail::allowed(s.micro_batches, "with micro-batches") +
                                        (detail::has(s.zero_stages, 0) || detail::has(s.zero_stages, 1)
                                             ? ""
                                             : ", with ZeRO stages that take no pipeline")));
    }
    std::stable_sort(layouts.begin(), layouts.end(),
                     [](const bounded& a, const bounded& b) { return a.seconds < b.seconds; });
    search_result out;
    out.layouts = layouts.size();
    const double limit = usable_bytes(on, s.margin);
    const int most_shared = *std::max_element(s.zero_stages.begin(), s.zero_stages.end());
    const auto too_slow = [&](double seconds) {
        return out.best.size() == count && seconds > out.best.back().seconds();
    };
    for (const bounded& b : layouts) {
        if (count == 0 || too_slow(b.seconds)) { break; }
        detail::for_each_schedule(m, s, b.layout, [&](job scheduled) {
            scheduled.zero_stage = most_shared;
            if (!can_run(scheduled)) { scheduled.zero_stage = 1; }
            rank_memory least = peak_of(m, scheduled).memory;
            least.exchange = 0;
            const step_time t = time_of_step(m, scheduled, on, s.kept_scores);
            if (least.total() > limit || too_slow(b.seconds + t.bubble)) { return; }
            detail::for_each_exchange(s, on, scheduled, [&](const job& j) {
                planned one{j, time_of_step(m, j, on, s.kept_scores), {}};
                ++out.evaluated;
                if (too_slow(one.seconds())) { return; }
                one.peak = peak_of(m, j);
                if (one.peak.memory.total() > limit) { return; }
                const auto at = std::upper_bound(out.best.begin(), out.best.end(), one, precedes);
                if (at == out.best.end() && out.best.size() == count) { return; }
                out.best.insert(at, one);
                if (out.best.size() > count) { out.best.pop_back(); }
            });
        });
    }
    if (out.best.empty()) {
        bool first = true;
        for_each_job(m, on, s, [&](const job& j) {
            if (j.tau > 0 || j.compression > 1) { return; }  // hold more, not less
            planned one{j, {}, peak_of(m, j)};
            if (!first && one.peak.memory.total() >= out.lightest.peak.memory.total()) { return; }
            first = false;
            one.time = time_of_step(m, j, on, s.kept_scores);
            out.lightest = one;
        });
    }
    return out;
}

}  // namespace tutti::plan
