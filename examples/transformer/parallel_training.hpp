// The run of one rank that has a part of the model: of each layer, of the layers, or both. Pipelines `tp`, `pp`, `3d`.
// Needs parallel_rank.hpp and train.hpp's parts. All ranks call train_in_parts() with the same options, text.
#pragma once

#include <algorithm>   // max
#include <array>       // bytes
#include <chrono>      // step times
#include <cstdint>     // tokens
#include <functional>  // passes
#include <memory>      // ledgers
#include <numeric>     // accumulate, reduce
#include <optional>    // checkpoints
#include <stdexcept>   // a run that diverged
#include <string>      // notes
#include <utility>     // move
#include <vector>      // micro-batches

#include <fmt/format.h>                        // messages
#include <tutti/optimize/learning_rate.hpp>    // schedule
#include <tutti/parallel/mesh.hpp>             // dimensions
#include <tutti/parallel/pipeline_replay.hpp>  // bubbles
#include <tutti/schedule/span.hpp>             // spans of the trace
#include <tutti/schedule/timeline.hpp>         // trace

#include "any_strategy.hpp"
#include "checkpoints.hpp"
#include "data.hpp"
#include "device.hpp"
#include "masters.hpp"
#include "parallel_rank.hpp"
#include "parallel_run.hpp"
#include "progress.hpp"
#include "train.hpp"
#include "weights_of_parts.hpp"

namespace transformer {

/// The part of their time for which a schedule lets ranks wait, where a backward pass takes two forward passes.
[[nodiscard]] inline double bubble_fraction(const tutti::parallel::pipeline_schedule& s) {
    const auto replay = tutti::parallel::replayed(s, {});
    const auto busy = std::accumulate(replay.busy.begin(), replay.busy.end(), std::int64_t{0});
    return 1 - static_cast<double>(busy) / (static_cast<double>(replay.makespan()) * s.ranks);
}

/// Trains, evaluates, and returns the result on every rank.
///
/// Semantics    as train(). Collective over `world`.
/// Determinism  how the model is cut, the schedule and --micro-batch change losses only through rounding.
/// Errors       as train().
template <class Device, class World>
[[nodiscard]] result train_in_parts(World& world, Device& device, const options& o, const corpus& text,
                                    tutti::deadline origin) {
    using rank_type = parallel_rank<Device, World>;
    using T = typename rank_type::T;
    using M = typename rank_type::M;
    using Q = typename rank_type::Q;
    using clock = std::chrono::steady_clock;
    using tutti::parallel::dimension;
    using tutti::schedule::scoped_span;

    tutti::schedule::timeline trace(origin);
    const auto track = trace.track_of(world.rank(), "main");
    rank_type rank(world, device, o, &trace);
    auto& net = rank.net();
    // Weights are the same along the sequence dimension too: what is averaged, and shared by --zero, is over both.
    typename rank_type::Comm replicas(device.along(world, o, rank.grid(), {dimension::data, dimension::sequence}));
    const std::shared_ptr<tutti::comm::ledger> among_replicas = replicas.traffic_ledger();
    auto strategy = make_strategy_of_parts<T>(std::move(replicas), o, &trace, world.rank());
    if (!o.load.empty()) { load(net, o.load); }
    strategy.attach(net.parameters(), [&] { net.release_values(); });
    if constexpr (has_masters<T>) {
        if (!o.load.empty()) { load_masters(net, o.load, strategy); }
    }
    rank.find_owned(strategy);
    rank.rehearse(strategy, true);
    world.barrier();  // before any device waits for another
    rank.connect();
    rank.rehearse(strategy, false);

    const auto rate = tutti::optimize::learning_rate::cosine({.peak = o.learning_rate,
                                                              .minimum = o.final_learning_rate(),
                                                              .warmup = static_cast<std::uint64_t>(o.warmup_steps()),
                                                              .end = static_cast<std::uint64_t>(o.steps)});
    const int last_step = o.last_step();
    progress shown(last_step, static_cast<double>(o.batch) * o.model.context, o.quiet || world.rank() != 0);
    std::optional<checkpoints<World, decltype(strategy)>> kept;
    int first_step = 0;
    if (!o.checkpoint.empty()) {
        kept.emplace(o, strategy, text, rank.kept());
        first_step = kept->resume(world, [&](const std::string& what) { shown.note(what); });
        strategy.flush();  // restored values may be on their way still
    }
    rank.expect_same(strategy);
    result r;
    r.device = device.name();
    r.first_step = first_step;
    for (const declaration& d : rank.whole_model()) {
        r.parameters += d.size();
        r.tensors.push_back(d.name);
    }
    r.levels.emplace_back(1, std::vector<int>());
    r.peak_flops = device.peak_flops();
    if (Device::is_accelerator) { shown.compare_with(flops_per_token(o.model, r.parameters), r.peak_flops * o.ranks); }

    std::vector<batch> micro_batches;
    const auto queue = net.queue();
    clock::duration passing{}, waiting{};
    const bool meets_outside_lanes = Q::executes_inline && (o.pp > 1 || o.tp > 1);  // else `waiting` is the host's own
    const auto exposed = [&] {
        const double outside_lanes = meets_outside_lanes ? std::chrono::duration<double>(waiting).count() : 0.0;
        return outside_lanes + detail::exposed_in_steps(trace, world.rank());
    };
    net.time_passes_by([&](const char* name, const std::function<void()>& pass) {
        static_cast<void>(net.math().take_adding());  // between passes, and of those that are no step's
        const auto begin = clock::now();
        const scoped_span span(&trace, track, name, queue);
        pass();
        passing += clock::now() - begin - net.math().take_adding();
    });
    const auto sent = [&] {
        const auto of_model = rank.sent();
        return std::array{of_model[0], of_model[1], among_replicas->total().bytes, of_model[2], of_model[3]};
    };
    auto not_in_steps = sent();  // until now, and by evaluation
    std::vector<double> losses, step_seconds;
    const std::function<double(tutti::view<T, M>)> norm = [&](tutti::view<T, M> owned) { return rank.norm(owned); };

    for (int step = first_step; step < last_step; ++step) {
        const auto begin = clock::now();
        // The loss is a mean over all tokens that have a target, not of means; gradients are averaged over ranks.
        const std::uint64_t valid =
            rank.rows().draw(micro_batches, text.training(), step, rank.coordinate(dimension::data));
        const double of_loss = o.dp * o.sp / static_cast<double>(valid);
        const double now = rate(static_cast<std::uint64_t>(step));
        rank.begin(strategy, micro_batches, static_cast<typename rank_type::real>(of_loss), now);
        {
            const auto running = clock::now();
            passing = {};
            rank.run(strategy);
            waiting += clock::now() - running - passing;
        }
        const auto stepped = [&] {
            const scoped_span optimizer(&trace, track, "optimizer", queue);
            return strategy.step({.learning_rate = now, .clip_norm = o.clip_norm}, norm);
        }();
        double loss[1] = {net.take_loss()};
        if (!rank.counts_losses()) { loss[0] = 0; }
        world.all_reduce(tutti::view<const double>(loss, 1), tutti::view<double>(loss, 1), tutti::sum{});
        loss[0] /= static_cast<double>(valid);
        step_seconds.push_back(std::chrono::duration<double>(clock::now() - begin).count());
        if (stepped.skipped) {  // on all ranks at once
            throw std::runtime_error(
                fmt::format("the gradient is not finite in step {}: try a smaller --lr", step + 1));
        }
        losses.push_back(loss[0]);
        shown.step(step + 1, loss[0], step_seconds.back(), exposed);
        if (kept && ((step + 1) % o.checkpoint_every == 0 || step + 1 == last_step)) {
            const scoped_span checkpoint(&trace, track, "checkpoint", queue);
            kept->save(step + 1);
        }
        if ((step + 1) % o.eval_every == 0 && step + 1 < last_step) {
            const scoped_span evaluation(&trace, track, "evaluate", queue);
            strategy.flush();
            const auto before = sent();
            const auto common = strategy.consensus();
            r.validation.emplace_back(step + 1, rank.evaluate(strategy, text.validation()));
            const auto after = sent();
            for (std::size_t d = 0; d < after.size(); ++d) { not_in_steps[d] += after[d] - before[d]; }
            shown.note(
                fmt::format("step {}: validation {:.4f} nats per {}", step + 1, r.validation.back().second, o.unit()));
        }
    }
    if (kept) { kept->finish(); }
    strategy.flush();
    auto sent_in_steps = sent();
    for (std::size_t d = 0; d < sent_in_steps.size(); ++d) { sent_in_steps[d] -= not_in_steps[d]; }
    r.overlap = strategy.overlap(trace, world.rank());
    const auto steps_traced = trace.steps(world.rank());
    const double waited = exposed();

    strategy.finish();
    rank.expect_same(strategy);
    // A hash of all parts, in the order of ranks.
    std::vector<std::uint64_t> hashes;
    for (const auto& record : world.gather_control({net.hash(strategy), 0, 0, 0})) { hashes.push_back(record[0]); }
    r.parameter_hash = tutti::hash_bytes(tutti::as_bytes(tutti::view<const std::uint64_t>(hashes)));
    if (!o.save.empty()) {
        const auto whole = rank.whole_model();
        if (world.rank() == 0) {
            write_weights(o.save, whole, [&](std::size_t i) { return gathered(net, world, strategy, i); });
        } else {
            for (std::size_t i = 0; i < whole.size(); ++i) { static_cast<void>(gathered(net, world, strategy, i)); }
        }
    }
    r.validation.emplace_back(last_step, rank.evaluate(strategy, text.validation()));
    if (!o.quiet) {
        r.sample =
            o.token_file.empty() ? rank.generate(strategy, '\n', 400) : rank.generate(strategy, gpt2_end_of_text, 64);
    }

    for (std::size_t done = 0; done < losses.size(); ++done) {
        r.training.emplace_back(first_step + static_cast<int>(done) + 1, losses[done]);
    }
    detail::tell_seconds(r, world, step_seconds, waited);
    parallel_result parallel;
    parallel.micro_batches = rank.schedule().micro_batches;
    parallel.stages = rank.schedule().stages();
    parallel.bubble_fraction = bubble_fraction(rank.schedule());
    const std::uint64_t steps = losses.size();
    const std::uint64_t sent_in_all = std::reduce(sent_in_steps.begin(), sent_in_steps.end());
    for (std::size_t d = 0; d < sent_in_steps.size(); ++d) {
        for (const auto& record : world.gather_control({sent_in_steps[d], sent_in_all, 0, 0})) {
            parallel.bytes[d] = std::max<std::uint64_t>(parallel.bytes[d], record[0] / steps);
            r.wire_bytes_per_step = std::max<std::uint64_t>(r.wire_bytes_per_step, record[1] / steps);
        }
    }
    r.parallel = parallel;
    const std::size_t peak = detail::peak_of(strategy.queue().account(), net.account());
    for (const auto& record : world.gather_control({peak, 0, 0, 0})) {
        r.peak_bytes = std::max<std::uint64_t>(r.peak_bytes, record[0]);
    }
    r.trace = tutti::schedule::timeline::document(
        detail::gather_texts(world, trace.events(detail::since_last(steps_traced, origin))));
    return r;
}

}  // namespace transformer
