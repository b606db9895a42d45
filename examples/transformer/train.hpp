// The training loop of one rank, over any pipeline, element type and communicator; evaluation and text generation.
// Needs model, data, report, progress. All ranks call train() with the same options and text.
#pragma once

#include <algorithm>  // min, nth_element
#include <chrono>     // step times
#include <cmath>      // pow
#include <cstdint>    // tokens
#include <memory>     // ledger
#include <numeric>    // reduce
#include <optional>   // checkpoints
#include <span>       // weights
#include <stdexcept>  // a run that diverged
#include <vector>     // losses

#include <tutti/comm/call.hpp>               // an all_reduce that is only counted
#include <tutti/comm/cost.hpp>               // wire_bytes
#include <tutti/comm/counted.hpp>            // bytes on the wire
#include <tutti/core/state.hpp>              // hash_bytes
#include <tutti/optimize/learning_rate.hpp>  // schedule
#include <tutti/schedule/span.hpp>           // spans of the trace
#include <tutti/schedule/timeline.hpp>       // trace, exposed communication

#include "any_strategy.hpp"
#include "checkpoints.hpp"
#include "data.hpp"
#include "device.hpp"
#include "document_steps.hpp"
#include "masters.hpp"
#include "model.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "weights.hpp"

namespace transformer {

/// Mean loss over the whole validation text, in windows that do not overlap; ranks share the work.
///
/// Semantics    collective over `world`. Every rank calls forward equally often, since before_use may communicate.
/// Determinism  of weights, text, rank count and micro-batch size.
template <class Model, class S, class Comm>
[[nodiscard]] double evaluate(Model& net, S& weights, tokens text, Comm& world) {
    const auto length = static_cast<std::size_t>(net.config().context);
    const std::size_t scored = text.size() - 1;  // every token but the first
    const std::size_t windows = scored / length;
    const auto at_once = static_cast<std::size_t>(net.batch());
    const auto ranks = static_cast<std::size_t>(world.size()), rank = static_cast<std::size_t>(world.rank());
    batch b;
    std::vector<double> losses(1, 0.0);
    for (std::size_t turn = 0; turn * ranks * at_once < windows; ++turn) {
        const std::size_t first = (turn * ranks + rank) * at_once;
        b.clear();
        for (std::size_t w = first; w < std::min(first + at_once, windows); ++w) { b.append(text, w * length, length); }
        const bool idle = b.in.empty();
        if (idle) { b.append(text, 0, length); }
        const double loss = net.forward(weights, b.in, b.targets, net.config().context);
        if (!idle) { losses[0] += loss; }
    }
    if (const std::size_t rest = scored % length; rest != 0) {
        b.clear();
        b.append(text, windows * length, rest);
        const double loss = net.forward(weights, b.in, b.targets, static_cast<int>(rest));
        if (rank == 0) { losses[0] += loss; }
    }
    world.all_reduce(tutti::view<const double>(losses), tutti::view<double>(losses), tutti::sum{});
    return losses[0] / static_cast<double>(scored);
}

/// `count` tokens that the model writes after `first`, at temperature 0.8. Where ranks share values every rank calls it, as
/// before_use communicates, and has the same.
/// Determinism  of weights and seed.
template <class Model, class S>
[[nodiscard]] std::vector<std::uint16_t> generate(Model& net, S& weights, std::uint16_t first, std::uint64_t seed,
                                                  int count) {
    const auto window = static_cast<std::size_t>(net.config().context);
    const tutti::random_stream random = random_for(seed, purpose::sample);
    std::vector<std::uint16_t> text{first};
    std::vector<double> weight(static_cast<std::size_t>(net.config().vocabulary));
    for (int i = 0; i < count; ++i) {
        const std::size_t seen = std::min(window, text.size());
        const auto probabilities = net.predict(weights, tokens(text).last(seen));
        double total = 0;
        for (std::size_t v = 0; v < weight.size(); ++v) {
            total += weight[v] = std::pow(static_cast<double>(probabilities[v]), 1 / 0.8);
        }
        double left = total * static_cast<double>(random.uniform(static_cast<std::uint64_t>(i)));
        std::size_t chosen = 0;
        while (chosen + 1 < weight.size() && left >= weight[chosen]) { left -= weight[chosen++]; }
        text.push_back(static_cast<std::uint16_t>(chosen));
    }
    return {text.begin() + 1, text.end()};
}

namespace detail {

[[nodiscard]] inline double median(std::vector<double> v) {
    const auto middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
    std::nth_element(v.begin(), middle, v.end());
    return *middle;
}

/// Of numbers that every rank has one of each.
template <class Comm> [[nodiscard]] std::vector<double> mean_over_ranks(Comm& world, std::vector<double> v) {
    world.all_reduce(tutti::view<const double>(v), tutti::view<double>(v), tutti::sum{});
    for (double& x : v) { x /= world.size(); }
    return v;
}

/// Times of steps, as means over ranks: those of this one, and for how long it waited in all of them.
template <class Comm> void tell_seconds(result& r, Comm& world, const std::vector<double>& of_steps, double exposed) {
    std::vector<double> all = of_steps;
    all.insert(all.end(), {exposed, median(of_steps)});
    all = mean_over_ranks(world, std::move(all));
    r.step_median = all.back();
    all.pop_back();
    r.exposed_seconds = all.back();
    all.pop_back();
    r.total_seconds = std::reduce(all.begin(), all.end());
    r.compute_seconds = r.total_seconds - r.exposed_seconds;
    r.step_seconds = std::move(all);
}

/// Bytes on a rank's device: of the training's queue and, where it has one of its own, of the model's.
[[nodiscard]] inline std::size_t peak_of(const tutti::memory_account& used, const tutti::memory_account& by_model) {
    return used.peak() + (&used == &by_model ? 0 : by_model.peak());
}

/// For how long a rank has waited in the steps that are traced.
[[nodiscard]] inline double exposed_in_steps(const tutti::schedule::timeline& trace, int rank) {
    double seconds = 0;
    for (const auto& step : trace.steps(rank)) { seconds += step.exposed; }
    return seconds;
}

/// Where the last 1000 of the traced steps begin: a viewer takes no more.
template <class Steps> [[nodiscard]] tutti::deadline since_last(const Steps& steps, tutti::deadline origin) {
    const std::size_t shown = std::min<std::size_t>(steps.size(), 1000);
    return shown == 0 ? origin : steps[steps.size() - shown].begin;
}

/// Every rank's text, by rank, on every rank.
template <class Comm> [[nodiscard]] std::vector<std::string> gather_texts(Comm& world, const std::string& own) {
    std::vector<std::size_t> sizes;
    std::size_t total = 0;
    for (const auto& record : world.gather_control({own.size(), 0, 0, 0})) {
        sizes.push_back(static_cast<std::size_t>(record[0]));
        total += sizes.back();
    }
    std::string all(total, '\0');
    world.all_gather_v(tutti::as_bytes(tutti::view<const char>(own)), tutti::as_bytes(tutti::view<char>(all)), sizes);
    std::vector<std::string> texts;
    std::size_t first = 0;
    for (const std::size_t size : sizes) {
        texts.push_back(all.substr(first, size));
        first += size;
    }
    return texts;
}

}  // namespace detail

/// Trains, evaluates, and returns the result on every rank.
///
/// Semantics    the pipeline is the one that `o` names. Collective over `world`, which itself carries only control,
///              evaluation and statistics: training runs on a counted communicator that the device makes. `origin` is
///              the traces' time zero. Spans of the trace lie where the work ran: on a GPU, between marks on its
///              streams.
/// Determinism  --ranks and --micro-batch change losses only through rounding.
/// Errors       bad_input when there is nothing to resume; runtime_error when a gradient is not finite; mismatch_error
///              when ranks end with different parameters.
template <class Device, class Comm>
[[nodiscard]] result train(Comm& world, Device& device, const options& o, const corpus& text, tutti::deadline origin) {
    using Math = typename Device::math;
    using T = typename Math::element;
    using clock = std::chrono::steady_clock;
    using tutti::schedule::scoped_span;

    tutti::schedule::timeline trace(origin);
    const auto track = trace.track_of(world.rank(), "main");
    tutti::comm::counted training(device.communicator(world, o));
    const std::shared_ptr<tutti::comm::ledger> wire = training.traffic_ledger();

    // Documents: ranks share their attention.
    const std::unique_ptr<document_attention<T>> shared =
        make_document_attention<T>(training, o, &trace, world.rank(), o.model.heads);
    const int rows = shared ? static_cast<int>(shared->most_rows()) : o.micro_batch * o.model.context;

    // The model works on the strategy's queue, and is there for longer than it.
    auto made = make_strategy<T>(std::move(training), o, &trace);
    model<Math> net(o.model, (rows + o.model.context - 1) / o.model.context, o.seed, device.make_math(made.queue()),
                    static_cast<recompute>(o.recompute));
    auto strategy = std::move(made);
    std::optional<weights_file> start;
    if (!o.load.empty()) {
        start.emplace(o.load, o.model);
        std::uint64_t loaded = tutti::hash_seed;
        for (std::size_t i = 0; i < net.parameters().size(); ++i) {
            std::vector<T> values(net.parameters()[i].value.size());
            start->read(i, tutti::view<T>(values));
            net.put(values, net.parameters()[i].value);
            loaded = tutti::hash_bytes(tutti::as_bytes(tutti::view<const T>(values)), loaded);
        }
        world.agree(loaded, "weights loaded");
    }
    strategy.attach(net.parameters(), [&] { net.release_values(); });
    if constexpr (has_masters<T>) {
        if (start) { read_masters(*start, net, strategy); }
    }
    start.reset();

    const auto rate = tutti::optimize::learning_rate::cosine({.peak = o.learning_rate,
                                                              .minimum = o.final_learning_rate(),
                                                              .warmup = static_cast<std::uint64_t>(o.warmup_steps()),
                                                              .end = static_cast<std::uint64_t>(o.steps)});
    const int last_step = o.last_step();
    const double tokens_per_step = static_cast<double>(o.batch) * o.model.context;
    progress shown(last_step, tokens_per_step, o.quiet || world.rank() != 0);
    std::optional<checkpoints<Comm, decltype(strategy)>> kept;
    int first_step = 0;
    if (!o.checkpoint.empty()) {
        kept.emplace(o, strategy, text);
        first_step = kept->resume(world, [&](const std::string& what) { shown.note(what); });
    }

    const int part = o.batch / o.ranks;
    const int micro_batches = shared ? 1 : part / o.micro_batch;
    const auto first_of = [&](int step, int m) {  // global index of the first sample of a micro-batch
        return static_cast<std::uint64_t>(step) * static_cast<std::uint64_t>(o.batch) +
               static_cast<std::uint64_t>(world.rank() * part + m * o.micro_batch);
    };

    result r;
    r.device = device.name();
    r.parameters = net.parameter_count();
    r.peak_flops = device.peak_flops();
    r.first_step = first_step;
    std::vector<double> losses;  // this rank's, then the mean over ranks
    std::vector<double> step_seconds;
    const auto queue = strategy.queue();
    batch b;
    if (Device::is_accelerator) {
        shown.compare_with(flops_per_token(o.model, net.parameter_count()), r.peak_flops * o.ranks);
    }
    const std::uint64_t sent_before = wire->total().bytes;
    std::uint64_t sent_by_evaluation = 0;

    for (const auto& p : net.parameters()) { r.tensors.push_back(p.name); }
    std::optional<document_steps<T>> documents;
    if (shared) { documents.emplace(world, *shared, o, text.training()); }

    for (int step = first_step; step < last_step; ++step) {
        const auto begin = clock::now();
        double of_loss = 1.0 / (static_cast<double>(part) * o.model.context);  // what a token's loss is multiplied by
        if (documents) {
            const scoped_span planning(&trace, track, "plan", queue);
            of_loss = documents->next(step);
        }
        const auto scale = static_cast<typename Math::real>(of_loss);
        for (int m = 0; m < micro_batches; ++m) {
            strategy.begin({m, micro_batches, rate(static_cast<std::uint64_t>(step))});
            if (!documents) {
                draw(b, text.training(), o.seed, first_of(step, m), static_cast<std::size_t>(o.micro_batch),
                     o.model.context);
            }
            {
                const scoped_span forward(&trace, track, "forward", queue);
                if (documents) {
                    net.forward_training(strategy, documents->rows(), documents->attention(), scale);
                } else {
                    net.forward_training(strategy, b.in, b.targets, o.model.context, scale);
                }
            }
            const scoped_span backward(&trace, track, "backward", queue);
            net.backward(strategy);
        }
        const auto stepped = [&] {
            const scoped_span optimizer(&trace, track, "optimizer", queue);
            return strategy.step({.learning_rate = rate(static_cast<std::uint64_t>(step)), .clip_norm = o.clip_norm});
        }();
        const double loss = net.take_loss() * of_loss;
        step_seconds.push_back(std::chrono::duration<double>(clock::now() - begin).count());
        if (stepped.skipped) {  // on all ranks at once
            throw std::runtime_error(
                fmt::format("the gradient is not finite in step {}: try a smaller --lr", step + 1));
        }
        losses.push_back(loss);
        if (auto now = strategy.levels(); r.levels.empty() || r.levels.back().second != now) {
            r.levels.emplace_back(step + 1, std::move(now));
        }
        // Ranks have rows of documents of other lengths: one rank's losses are not those of the step.
        const double loss_shown = documents && !o.quiet ? detail::mean_over_ranks(world, {loss})[0] : loss;
        shown.step(step + 1, loss_shown, step_seconds.back(),
                   [&] { return detail::exposed_in_steps(trace, world.rank()); });

        if (kept && ((step + 1) % o.checkpoint_every == 0 || step + 1 == last_step)) {
            const scoped_span checkpoint(&trace, track, "checkpoint", queue);
            kept->save(step + 1);
        }
        if ((step + 1) % o.eval_every == 0 && step + 1 < last_step) {
            const scoped_span evaluation(&trace, track, "evaluate", queue);
            strategy.flush();
            const std::uint64_t sent = wire->total().bytes;
            const auto common = strategy.consensus();
            r.validation.emplace_back(step + 1, evaluate(net, strategy, text.validation(), world));
            sent_by_evaluation += wire->total().bytes - sent;
            shown.note(
                fmt::format("step {}: validation {:.4f} nats per {}", step + 1, r.validation.back().second, o.unit()));
        }
    }
    if (kept) { kept->finish(); }
    strategy.flush();
    const std::uint64_t sent = wire->total().bytes - sent_before - sent_by_evaluation;
    const auto steps_traced = trace.steps(world.rank());
    const double exposed = detail::exposed_in_steps(trace, world.rank());
    r.overlap = strategy.overlap(trace, world.rank());
    if (const std::size_t lost = trace.dropped() + trace.pending(); lost != 0) {
        shown.note(fmt::format("{} spans are missing in the trace and in the exposed communication", lost));
    }

    strategy.finish();
    // One parameter at a time: where ranks share values, no rank need have room for all.
    r.parameter_hash = tutti::hash_seed;
    const std::size_t count = net.parameters().size();
    for (std::size_t i = 0; i < count; ++i) {
        const std::vector<T> value = net.value_on_host(strategy, i);
        r.parameter_hash = tutti::hash_bytes(tutti::as_bytes(tutti::view<const T>(value)), r.parameter_hash);
    }
    world.agree(r.parameter_hash, "parameters after training");
    if (!o.save.empty()) {
        if constexpr (has_masters<T>) {
            const auto masters = gather_masters(world, net, strategy);
            if (world.rank() == 0) {
                write_weights(o.save, net.parameters(),
                              [&](std::size_t i) { return std::span<const tutti::master_t<T>>(masters[i]); });
            }
        } else if (world.rank() == 0) {
            write_weights(o.save, net.parameters(), [&](std::size_t i) { return net.value_on_host(strategy, i); });
        } else {
            for (std::size_t i = 0; i < count; ++i) { static_cast<void>(net.value_on_host(strategy, i)); }
        }
    }
    r.validation.emplace_back(last_step, evaluate(net, strategy, text.validation(), world));
    const bool values_are_shared = net.values().empty();
    if (!o.quiet && (values_are_shared || world.rank() == 0)) {
        r.sample = o.token_file.empty() ? generate(net, strategy, '\n', o.seed, 400)
                                        : generate(net, strategy, gpt2_end_of_text, o.seed, 64);
    }

    if (documents) { r.sequence = documents->finish(world); }
    losses = detail::mean_over_ranks(world, std::move(losses));
    for (std::size_t done = 0; done < losses.size(); ++done) {
        r.training.emplace_back(first_step + static_cast<int>(done) + 1, losses[done]);
    }
    detail::tell_seconds(r, world, step_seconds, exposed);
    const auto overlap = detail::mean_over_ranks(
        world, {r.overlap.step, r.overlap.communication, r.overlap.exposed, r.overlap.outer, r.overlap.round});
    r.overlap.step = overlap[0];
    r.overlap.communication = overlap[1];
    r.overlap.exposed = overlap[2];
    r.overlap.outer = overlap[3];
    r.overlap.round = overlap[4];
    std::uint64_t dense = 0;  // what this rank would send of gradients as they are
    for (const auto& bucket : strategy.plan().buckets) {
        tutti::comm::call as_is;
        as_is.kind = tutti::comm::collective::all_reduce;
        as_is.element_size = sizeof(T);
        as_is.in_count = bucket.size;
        dense += tutti::comm::wire_bytes(as_is, world.rank(), world.size());
    }
    const std::size_t peak = detail::peak_of(queue.account(), net.account());
    for (const auto& record : world.gather_control({sent / losses.size(), dense, peak, 0})) {
        r.wire_bytes_per_step = std::max<std::uint64_t>(r.wire_bytes_per_step, record[0]);
        r.dense_bytes_per_step = std::max<std::uint64_t>(r.dense_bytes_per_step, record[1]);
        r.peak_bytes = std::max<std::uint64_t>(r.peak_bytes, record[2]);
    }
    r.trace = tutti::schedule::timeline::document(
        detail::gather_texts(world, trace.events(detail::since_last(steps_traced, origin))));
    return r;
}

}  // namespace transformer
