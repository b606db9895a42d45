// search: the fastest jobs among all that fit a machine's memory: every choice of (tensor, pipeline, data, sequence, ZeRO
// stage, micro-batch, recomputation, schedule), and of compression and rounds where they are allowed.
// Needs plan/space, plan/time, plan/memory. Exhaustive: what is left out provably cannot be among the results.
#pragma once

#include <algorithm>  // sort, max_element
#include <cstddef>    // size_t
#include <cstdint>    // counts
#include <numeric>    // gcd
#include <tuple>      // order of jobs
#include <vector>     // lists

#include <tutti/core/error.hpp>    // usage_error
#include <tutti/core/text.hpp>     // formatted
#include <tutti/plan/machine.hpp>  // machine
#include <tutti/plan/memory.hpp>   // peak_of
#include <tutti/plan/model.hpp>    // job
#include <tutti/plan/space.hpp>    // search_space
#include <tutti/plan/time.hpp>     // time_of_step

namespace tutti::plan {

/// A job, and what it takes.
struct planned {
    job how{};
    step_time time{};
    peak_memory peak{};
    [[nodiscard]] constexpr double seconds() const noexcept { return time.total(); }
};

/// The faster first; of equal ones the one that holds less, then the one with fewer tensor ranks, stages, sequence ranks,
/// chunks, lower ZeRO stage, and so on: a total order of different jobs.
[[nodiscard]] inline bool precedes(const planned& a, const planned& b) noexcept {
    const auto key = [](const planned& x) {
        const job& j = x.how;
        return std::make_tuple(x.seconds(), x.peak.memory.total(), j.tensor, j.pipeline, j.sequence, j.chunks,
                               j.zero_stage, j.micro_batch, j.schedule, j.recompute, j.sequence_parallel, j.replicas,
                               j.tau, j.delayed, j.compression, j.secondary);
    };
    return key(a) < key(b);
}

namespace detail {

// Jobs that differ in how a model is divided and in what a layer computes, each with the largest micro-batch that it can
// have: f(job, sizes of all, ascending).
template <class F> void for_each_division(const model_shape& m, const machine& on, const search_space& s, F f) {
    const int lowest = *std::min_element(s.zero_stages.begin(), s.zero_stages.end());
    for (const int t : tensor_ranks(m, s)) {
        if (!on.lies_evenly(t, s.ranks)) { continue; }
        for (const int p : dividing(s.pipeline, std::gcd(static_cast<int>(m.layers), s.ranks / t))) {
            if (!can_run({.pipeline = p, .zero_stage = lowest})) { continue; }
            for (const int q : sequence_ranks(m, s, s.ranks / t / p)) {
                const int d = s.ranks / t / p / q;
                if (s.sequences % d != 0 || !on.lies_evenly(t * q, s.ranks)) { continue; }
                const std::vector<std::int64_t> sizes = dividing(s.micro_batches, s.sequences / d);
                if (sizes.empty()) { continue; }
                for (const recomputation r : s.recomputations) {
                    for (const bool cut_rows : {false, true}) {
                        if (cut_rows && t == 1) { continue; }
                        job j{.tensor = t, .pipeline = p, .data = d, .sequence = q};
                        j.sequence_parallel = cut_rows;
                        j.recompute = r;
                        j.micro_batch = sizes.back();
                        j.micro_batches = s.sequences / d / sizes.back();
                        f(j, sizes);
                    }
                }
            }
        }
    }
}
// The layouts of a division, which differ in their micro-batches: f(job).
template <class F>
void for_each_layout(const search_space& s, job division, const std::vector<std::int64_t>& sizes, F f) {
    for (const std::int64_t b : sizes) {
        division.micro_batch = b;
        division.micro_batches = s.sequences / division.data / b;
        f(division);
    }
}
// Whether a layout can have the schedule that it names, but for chunks.
[[nodiscard]] inline bool can_be_scheduled(const model_shape& m, const job& j) {
    const bool enough = !j.splits_backward() || j.micro_batches >= 2 * j.pipeline;
    const bool even = j.copies() == 1 || (j.pipeline % 2 == 0 && j.micro_batches % 2 == 0);
    return enough && even && (j.schedule != pipelining::zero_bubble_v || m.layers / j.pipeline % 2 == 0) &&
           (j.schedule != pipelining::interleaved || j.micro_batches % j.pipeline == 0);
}
// The schedules of a layout. One rank has nothing to schedule.
template <class F> void for_each_schedule(const model_shape& m, const search_space& s, job j, F f) {
    if (j.pipeline == 1) { return f(j); }
    for (const pipelining schedule : s.schedules) {
        j.schedule = schedule;
        j.chunks = 1;
        if (!can_be_scheduled(m, j)) { continue; }
        if (schedule != pipelining::interleaved) {
            f(j);
            continue;
        }
        for (const std::int64_t chunks : chunks_of(m, s, j.pipeline)) {
            j.chunks = static_cast<int>(chunks);
            f(j);
        }
    }
}
// What every schedule of a layout works at least.
[[nodiscard]] inline working_time least_working(const model_shape& m, const machine& on, const search_space& s, job j) {
    j.schedule = pipelining::dual_pipe;  // each end has the head for half of the micro-batches
    if (!has(s.schedules, j.schedule) || j.pipeline % 2 != 0) { j.schedule = job{}.schedule; }
    return time_of_working(m, j, on, s.kept_scores);
}
// What data ranks may do. A replica is a rank with those that share its sequences, or those of a node; where nothing is
// shared stages are the same.
template <class F> void for_each_exchange(const search_space& s, const machine& on, job j, F f) {
    const int lowest = *std::min_element(s.zero_stages.begin(), s.zero_stages.end());
    const comm::two_levels group = on.group_of(j.averaging(), j.tensor, j.ranks());
    const bool is_whole = j.tensor * j.pipeline * j.sequence == 1;
    const bool has_nodes =
        !s.of_trainer && group.nodes > 1 && group.largest_node > 1 && group.largest_node == group.smallest_node;
    const auto compressed = [&](job k) {
        f(k);
        if (k.averaging() == 1 || (k.replicas > 1 && k.tau == 0)) { return; }
        if (s.of_trainer && (!is_whole || k.zero_stage > 0 || k.tau > 0)) { return; }
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
    const bool nodes_are_replicas = has_nodes && j.data % group.nodes == 0;  // no sequence goes over two
    if (nodes_are_replicas) { with(group.nodes, 0, false); }
    for (const int tau : s.taus) {
        for (const bool delayed : {false, true}) {
            if (j.data == 1 || (delayed && !s.delayed) || (s.of_trainer && !is_whole)) { continue; }
            with(j.data, tau, delayed);
            if (nodes_are_replicas && group.nodes < j.data) { with(group.nodes, tau, delayed); }
        }
    }
}

}  // namespace detail

/// All jobs of a space, each once: f(job).
template <class F> void for_each_job(const model_shape& m, const machine& on, const search_space& s, F f) {
    validate(on);
    detail::validate(s);
    detail::for_each_division(m, on, s, [&](const job& division, const std::vector<std::int64_t>& sizes) {
        detail::for_each_layout(s, division, sizes, [&](const job& layout) {
            detail::for_each_schedule(m, s, layout,
                                      [&](const job& scheduled) { detail::for_each_exchange(s, on, scheduled, f); });
        });
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
/// Semantics    the job with the least `precedes` first. What is cut off: layouts whose products, memory, tensor
///              collectives and rings alone take longer than the last of `count` jobs that were found, all of a division
///              where this holds of its largest micro-batch, schedules for which it holds with their bubble, and those
///              that would not fit if all ranks that have the same states shared as much as can_run lets them. No term
///              of a time or of a memory is below 0, sums of floats are monotone, and larger micro-batches work no longer
///              a sequence, since what each takes by itself is taken less often: no result is lost.
/// Determinism  of the arguments alone; no two jobs are of the same rank.
/// Cost         well below a second for 3072 ranks and 10^12 parameters.
/// Errors       usage_error for a machine or space that makes no sense, in which no number divides, or no schedule that
///              is allowed suits what does.
[[nodiscard]] inline search_result search(const model_shape& m, const machine& on, const search_space& s,
                                          std::size_t count = 5) {
    validate(on);
    detail::validate(s);
    struct bounded {
        job division;
        std::vector<std::int64_t> sizes;
        double seconds;
    };
    std::vector<bounded> divisions;
    search_result out;
    detail::for_each_division(m, on, s, [&](const job& j, const std::vector<std::int64_t>& sizes) {
        validate(m, j);
        constexpr double rounded = 1e-9;  // sums of smaller micro-batches are less by far less than that
        divisions.push_back({j, sizes, (1 - rounded) * detail::least_working(m, on, s, j).step.working()});
        out.layouts += sizes.size();
    });
    if (divisions.empty()) {
        throw usage_error(formatted(
            "plan: no layout divides {} ranks, {} layers, {} heads, {} words and {} "
            "sequences{}",
            s.ranks, m.layers, m.heads, m.vocabulary, s.sequences,
            detail::allowed(s.tensor, "with tensor ranks") + detail::allowed(s.pipeline, "with stages") +
                detail::allowed(s.sequence, "with sequence ranks") +
                detail::allowed(s.micro_batches, "with micro-batches") +
                (detail::has(s.zero_stages, 0) || detail::has(s.zero_stages, 1)
                     ? ""
                     : ", with ZeRO stages that take no pipeline") +
                (s.ranks <= on.ranks_per_node ? "" : formatted(", evenly over nodes of {}", on.ranks_per_node))));
    }
    std::stable_sort(divisions.begin(), divisions.end(),
                     [](const bounded& a, const bounded& b) { return a.seconds < b.seconds; });
    const double limit = usable_bytes(on, s.margin);
    const int most_shared = *std::max_element(s.zero_stages.begin(), s.zero_stages.end());
    const auto too_slow = [&](double seconds) {
        return out.best.size() == count && seconds > out.best.back().seconds();
    };
    const auto price = [&](const job& j) {
        planned one{j, time_of_step(m, j, on, s.kept_scores), {}};
        ++out.evaluated;
        if (too_slow(one.seconds())) { return; }
        one.peak = peak_of(m, j);
        if (one.peak.memory.total() > limit) { return; }
        const auto at = std::upper_bound(out.best.begin(), out.best.end(), one, precedes);
        if (at == out.best.end() && out.best.size() == count) { return; }
        out.best.insert(at, one);
        if (out.best.size() > count) { out.best.pop_back(); }
    };
    const auto look = [&](const job& layout) {
        const detail::working_time least = detail::least_working(m, on, s, layout);
        if (too_slow(least.step.working())) { return; }
        detail::for_each_schedule(m, s, layout, [&](job scheduled) {
            if (too_slow(least.step.working() + detail::bubble_share(scheduled) * least.micro_batch)) { return; }
            scheduled.zero_stage = most_shared;
            if (!can_run(scheduled)) { scheduled.zero_stage = 1; }
            rank_memory held = peak_of(m, scheduled).memory;
            held.exchange = 0;
            if (held.total() <= limit) { detail::for_each_exchange(s, on, scheduled, price); }
        });
    };
    for (const bounded& b : divisions) {
        if (count == 0 || too_slow(b.seconds)) { break; }
        detail::for_each_layout(s, b.division, b.sizes, look);
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
        if (first) {
            throw usage_error(
                "plan: no layout can have a schedule of those allowed: its micro-batches are too few, odd "
                "or do not divide, or its layers do not");
        }
    }
    return out;
}

}  // namespace tutti::plan
