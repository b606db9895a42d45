// explain: why a job is the best: what its neighbors in each dimension cost.
// Needs plan/search. Tables of both: plan/tables.
#pragma once

#include <algorithm>    // upper_bound, lower_bound, sort
#include <cstddef>      // size_t
#include <cstdint>      // counts
#include <numeric>      // gcd
#include <string>       // words
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // lists

#include <tutti/core/error.hpp>    // usage_error
#include <tutti/core/text.hpp>     // formatted
#include <tutti/plan/machine.hpp>  // machine
#include <tutti/plan/memory.hpp>   // usable_bytes
#include <tutti/plan/model.hpp>    // job
#include <tutti/plan/search.hpp>   // planned
#include <tutti/plan/space.hpp>    // search_space
#include <tutti/plan/time.hpp>     // time_of_step

namespace tutti::plan {

/// FLOPs of the model, or of the hardware (with what is computed again), a second, over the peaks of all ranks.
struct utilization {
    double model = 0;
    double hardware = 0;
};
/// Of a job in the time that it is planned to take.
[[nodiscard]] inline utilization utilization_of(const model_shape& m, const machine& on, const planned& p) noexcept {
    const double peak = p.seconds() * on.flops * static_cast<double>(p.how.ranks());
    return {model_flops(m, p.how) / peak, hardware_flops(m, p.how) / peak};
}

/// "zero<2> over 4 replicas, compressed 4 times": what ranks with the same weights do, by the names of this library's
/// strategies.
[[nodiscard]] inline std::string strategy_of(const job& j) {
    std::string name = j.averaging() == 1 ? "-" : j.shards() == 1 && j.tau > 0 ? "local" : "data_parallel";
    if (j.zero_stage > 0 && j.shards() > 1) { name = formatted("zero<{}>", j.zero_stage); }
    if (j.replicas > 1 && j.tau == 0) { name += formatted(", node_shards of {}", j.shards()); }
    if (j.secondary > 0) { name += formatted(", secondary_shards of {}", j.secondary); }
    if (j.tau > 0) { name = formatted("{} of {} steps over {}", j.delayed ? "co2" : "slow_mo", j.tau, name); }
    if (j.compression > 1) { name += formatted(", compressed {} times", j.compression); }
    return name;
}

/// "interleaved x 4"
[[nodiscard]] inline std::string schedule_of(const job& j) {
    std::string name(j.pipeline == 1 ? "-" : name_of(j.schedule));
    return j.chunks > 1 ? name + formatted(" x {}", j.chunks) : name;
}

/// A job that differs from the best one in one dimension, and why it was not chosen.
struct alternative {
    std::string dimension{};
    std::string value{};
    std::string verdict{};
    bool possible = false;  ///< it divides; `job` and what it takes are valid
    planned job{};
};

namespace detail {

[[nodiscard]] inline std::string gibibytes(double bytes) { return formatted("{:.1f} GiB", bytes / (1 << 30)); }

// What takes most more time, of two steps.
[[nodiscard]] inline std::string growth(const step_time& from, const step_time& to) {
    const struct {
        std::string_view name;
        double more;
    } terms[] = {{"products", to.products - from.products},
                 {"memory traffic", to.memory - from.memory},
                 {"tensor collectives", to.tensor - from.tensor},
                 {"rings", to.sequence - from.sequence},
                 {"bubble", to.bubble - from.bubble},
                 {"messages", to.messages - from.messages},
                 {"data exchange", to.data - from.data},
                 {"updates", to.updates - from.updates}};
    const auto* most = &terms[0];
    for (const auto& t : terms) {
        if (t.more > most->more) { most = &t; }
    }
    return formatted("{} +{:.3g} s", most->name, most->more);
}

// Why `b` is not the best, given that `a` is.
[[nodiscard]] inline std::string verdict_of(const planned& a, const planned& b, double limit) {
    const double held = b.peak.memory.total();
    if (held > limit) { return formatted("does not fit: {} of {}", gibibytes(held), gibibytes(limit)); }
    if (b.seconds() == a.seconds()) {
        return held > a.peak.memory.total() ? "as fast, holds more" : "as fast, later in order";
    }
    return formatted("{:+.2f} % time: {}", 100 * (b.seconds() / a.seconds() - 1), growth(a.time, b.time));
}

// The values next to `at` among ascending ones.
template <class T> [[nodiscard]] std::vector<T> next_to(const std::vector<T>& values, T at) {
    std::vector<T> out;
    const auto up = std::upper_bound(values.begin(), values.end(), at);
    const auto down = std::lower_bound(values.begin(), values.end(), at);
    if (down != values.begin()) { out.push_back(*(down - 1)); }
    if (up != values.end()) { out.push_back(*up); }
    return out;
}

}  // namespace detail

/// What each dimension's neighboring values would cost if nothing but them changed: with the number of data ranks
/// and micro-batches that follow.
///
/// Semantics  `best` is the first of search's results over the same space. Values that the space does not have are left
///            out; what does not divide, or would lie unevenly on nodes, says so. Stages come with ZeRO stage 1 where the
///            best one's takes no pipeline. Dimensions that the space does not search are not listed: see `text_of`.
/// Cost       some twenty evaluations.
[[nodiscard]] inline std::vector<alternative> alternatives(const model_shape& m, const machine& on,
                                                           const search_space& s, const planned& best) {
    std::vector<alternative> out;
    const double limit = usable_bytes(on, s.margin);
    const auto look = [&](std::string_view dimension, std::string value, job j) {
        alternative a{std::string(dimension), std::move(value), {}, false, {}};
        try {
            validate(m, j);
            if (!can_run(j)) { throw usage_error("plan: ZeRO stages 2 and 3 take no pipeline"); }
            a.job = {j, time_of_step(m, j, on, s.kept_scores), peak_of(m, j)};
            a.possible = true;
            a.verdict = detail::verdict_of(best, a.job, limit);
        } catch (const usage_error& e) {
            constexpr std::string_view prefix = "plan: ";
            const std::string_view what = e.what();
            a.verdict = what.substr(what.starts_with(prefix) ? prefix.size() : 0);
        }
        out.push_back(std::move(a));
    };
    // With other ranks or micro-batches: data ranks follow, and replicas are as before ranks or nodes.
    const auto moved = [&](std::string_view dimension, std::string value, job j) {
        for (const int together : {j.tensor, j.tensor * j.sequence}) {
            if (on.lies_evenly(together, s.ranks)) { continue; }
            out.push_back({std::string(dimension),
                           std::move(value),
                           formatted("groups of {} ranks lie unevenly on nodes of {}", together, on.ranks_per_node),
                           false,
                           {}});
            return;
        }
        const int model_ranks = j.tensor * j.pipeline * j.sequence;  // and of whole sequences
        const std::int64_t data = s.ranks / model_ranks;
        if (s.ranks % model_ranks != 0 || s.sequences % (data * j.micro_batch) != 0) {
            out.push_back({std::string(dimension),
                           std::move(value),
                           s.ranks % model_ranks != 0
                               ? formatted("{} ranks do not divide", s.ranks)
                               : formatted("{} sequences do not divide over {} data ranks", s.sequences, data),
                           false,
                           {}});
            return;
        }
        j.data = static_cast<int>(data);
        j.micro_batches = s.sequences / data / j.micro_batch;
        const comm::two_levels group = on.group_of(j.averaging(), j.tensor, j.ranks());
        if (j.secondary > 0) { j.secondary = group.nodes > 1 && group.largest_node > 1 ? group.largest_node : 0; }
        if (best.how.replicas > 1) { j.replicas = best.how.replicas == best.how.data ? j.data : group.nodes; }
        if (!can_run(j) && detail::has(s.zero_stages, 1)) {
            j.zero_stage = 1;
            j.secondary = 0;
            if (j.shards() > 1) { value += " with zero<1>"; }
        }
        if (j.pipeline == 1) {
            j.schedule = pipelining::one_forward_one_backward;
            j.chunks = 1;
        }
        if (j.tensor == 1) { j.sequence_parallel = false; }
        look(dimension, std::move(value), j);
    };
    const job& b = best.how;
    // The values next to `at`, and, where those lie unevenly, the next that do not: each is `times` as many ranks.
    const auto neighbors = [&](std::vector<int> values, int at, int times) {
        std::vector<int> chosen = detail::next_to(values, at);
        std::erase_if(values, [&](int v) { return !on.lies_evenly(std::int64_t{v} * times, s.ranks); });
        for (const int v : detail::next_to(values, at)) {
            if (!detail::has(chosen, v)) { chosen.push_back(v); }
        }
        std::sort(chosen.begin(), chosen.end());
        return chosen;
    };
    for (const int t : neighbors(detail::tensor_ranks(m, s), b.tensor, b.sequence)) {
        job j = b;
        j.tensor = t;
        j.sequence_parallel = b.tensor == 1 || b.sequence_parallel;
        moved("tensor", formatted("{}", t), j);
    }
    for (const int p :
         detail::next_to(detail::dividing(s.pipeline, std::gcd(static_cast<int>(m.layers), s.ranks)), b.pipeline)) {
        job j = b;
        j.pipeline = p;
        moved("pipeline", formatted("{}", p), j);
    }
    for (const int q : neighbors(detail::sequence_ranks(m, s, s.ranks), b.sequence, b.tensor)) {
        job j = b;
        j.sequence = q;
        moved("sequence", formatted("{}", q), j);
    }
    for (const std::int64_t micro :
         detail::next_to(detail::dividing(s.micro_batches, s.sequences / b.data), b.micro_batch)) {
        job j = b;
        j.micro_batch = micro;
        moved("micro-batch", formatted("{}", micro), j);
    }
    if (b.shards() > 1) {
        for (const int stage : {b.zero_stage - 1, b.zero_stage + 1}) {
            job j = b;
            j.zero_stage = stage;
            j.secondary = stage == 3 ? b.secondary : 0;
            if (detail::has(s.zero_stages, stage)) { look("ZeRO stage", formatted("{}", stage), j); }
        }
    }
    for (const recomputation r : s.recomputations) {
        job j = b;
        j.recompute = r;
        if (r != b.recompute) { look("recomputation", std::string(name_of(r)), j); }
    }
    if (b.tensor > 1) {
        job j = b;
        j.sequence_parallel = !b.sequence_parallel;
        look("sequence parallel", j.sequence_parallel ? "yes" : "no", j);
    }
    if (b.pipeline > 1) {
        for (const pipelining schedule : s.schedules) {
            job j = b;
            j.schedule = schedule;
            j.chunks = 1;
            if (schedule != pipelining::interleaved) {
                if (schedule != b.schedule) { look("schedule", schedule_of(j), j); }
                continue;
            }
            std::vector<std::int64_t> chunks = detail::chunks_of(m, s, b.pipeline);
            if (b.schedule == schedule) { chunks = detail::next_to(chunks, std::int64_t{b.chunks}); }
            for (const std::int64_t v : chunks) {
                j.chunks = static_cast<int>(v);
                look("schedule", schedule_of(j), j);
            }
        }
    }
    job plain = b;  // of which all exchanges are made, that of `b` and those that add nothing to it, too
    plain.compression = 1;
    plain.secondary = 0;
    detail::for_each_exchange(s, on, plain, [&](const job& j) {
        const bool rounds =
            j.tau != b.tau || j.delayed != b.delayed || j.replicas != b.replicas || j.secondary != b.secondary;
        if (j.zero_stage != b.zero_stage || rounds == (j.compression != b.compression)) { return; }
        look(rounds ? "replicas" : "compression", strategy_of(j), j);
    });
    return out;
}

}  // namespace tutti::plan
