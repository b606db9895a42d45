// forward_tuning: the run of one rank whose pipeline makes forward passes alone: mezo, zo2, distzo2.
// Needs train.hpp for evaluation and samples, tuned_weights.hpp and zeroth. All ranks call tune() with the same options
// and text.
#pragma once

#include <algorithm>  // max, fill
#include <chrono>     // step times
#include <cmath>      // isfinite
#include <cstdint>    // samples
#include <cstring>    // memcpy
#include <memory>     // ledger, weights
#include <optional>   // file
#include <span>       // probes, weights
#include <stdexcept>  // a run that cannot begin
#include <vector>     // losses

#include <tutti/comm/counted.hpp>             // bytes on the wire
#include <tutti/schedule/span.hpp>            // spans of the trace
#include <tutti/zeroth/replicate.hpp>         // steps
#include <tutti/zeroth/transfer_overlap.hpp>  // how well transfers were hidden

#include "forward_model.hpp"
#include "pipelines/mezo.hpp"
#include "train.hpp"
#include "tuned_weights.hpp"

namespace transformer {

/// Micro-batches of a text, each drawn before its pass.
template <class Math> class passes_over_text {
    using T = typename Math::element;
    tuned_weights<T>& weights_;
    forward_model<Math>& net_;
    const options& o_;
    const corpus& text_;
    tutti::schedule::timeline& trace_;
    tutti::schedule::timeline::track track_;
    typename Math::queue_type queue_;
    batch batch_;

public:
    int step = 0;

    passes_over_text(tuned_weights<T>& weights, forward_model<Math>& net, const options& o, const corpus& text,
                     tutti::schedule::timeline& trace, tutti::schedule::timeline::track track,
                     typename Math::queue_type queue)
        : weights_(weights), net_(net), o_(o), text_(text), trace_(trace), track_(track), queue_(queue) {}

    void evaluate(std::span<const tutti::zeroth::probe> probes, std::size_t micro_batch,
                  std::span<tutti::zeroth::loss_value> losses) {
        const tutti::schedule::scoped_span span(&trace_, track_, "forward", queue_);
        const auto first = static_cast<std::uint64_t>(step) * static_cast<std::uint64_t>(o_.batch) +
                           micro_batch * static_cast<std::uint64_t>(o_.micro_batch);
        draw(batch_, text_.training(), o_.seed, first, static_cast<std::size_t>(o_.micro_batch), o_.model.context);
        net_.take(batch_.in, batch_.targets, o_.model.context);
        weights_.evaluate(probes, micro_batch, losses);
    }
    void update(std::span<const tutti::zeroth::pending_update> updates) { weights_.update(updates); }
    void flush() { weights_.flush(); }
    [[nodiscard]] std::uint64_t hash() { return weights_.hash(); }
};

/// Streams that a pass works on in turn: where weights come once for all of them, those of every direction.
[[nodiscard]] inline std::size_t branches_of(const options& o) {
    using pipeline = pipelines::mezo;
    if (!o.zeroth.offloads(o.pipeline)) { return 1; }
    return tutti::zeroth::branches_of(pipeline::estimator_of(o), pipeline::division_of(o));
}

/// Parameter i whole, wherever its parts are. Collective over `world` where ranks have parts.
template <class T, class Comm>
void read_whole(Comm& world, tuned_weights<T>& weights, std::size_t i, bool sliced,
                std::vector<tutti::master_t<T>>& values) {
    weights.read(i, tutti::view(values));
    if (!sliced) { return; }
    // Parts begin at multiples of 256 bytes, so that no two ranks have bits of one word: sums of words put them together.
    const tutti::view<std::byte> bytes = tutti::as_bytes(tutti::view(values));
    std::vector<std::uint64_t> words((bytes.size() + 7) / 8);
    std::memcpy(words.data(), bytes.data(), bytes.size());
    world.all_reduce(tutti::view<const std::uint64_t>(words), tutti::view<std::uint64_t>(words), tutti::sum{});
    std::memcpy(bytes.data(), words.data(), bytes.size());
}

/// Fine-tunes, evaluates, and returns the result on every rank.
///
/// Semantics    as train(), at one learning rate, without decay or clipping. A step's loss is the mean of both sides'.
///              A step whose loss is not finite is left out on all ranks; the curve repeats what was before.
/// Determinism  losses, slopes and weights have the same bits on any ranks, by any --zo-parallel, and wherever weights
///              are, if shards and micro-batches are the same; with --upload-bits also the passes that a rank makes, since
///              what travels is made anew between them.
/// Cost         two forward passes a direction. mezo: memory of the weights twice; the others: of the tables twice and of
///              --slots blocks, whatever the number of layers. Activations of one layer.
/// Errors       runtime_error when the first loss is not finite; mismatch_error when ranks come to differ.
template <class Device, class Comm>
[[nodiscard]] result tune(Comm& world, Device& device, const options& o, const corpus& text, tutti::deadline origin) {
    using Math = typename Device::math;
    using T = typename Math::element;
    using Q = typename Math::queue_type;
    using clock = std::chrono::steady_clock;
    using tutti::schedule::scoped_span;
    namespace zeroth = tutti::zeroth;

    tutti::schedule::timeline trace(origin);
    const auto track = trace.track_of(world.rank(), "main");
    tutti::comm::counted training(device.communicator(world, o));
    const std::shared_ptr<tutti::comm::ledger> wire = training.traffic_ledger();
    const Q queue = training.queue();
    forward_model<Math> net(queue, o.model, o.micro_batch, branches_of(o), device.make_math(queue));

    const std::vector<declaration> parameters = parameters_of(o.model);
    std::optional<slice_gather<Q>> gather;
    if (o.zeroth.sliced) { gather.emplace(gather_of<T>(training, o)); }
    std::unique_ptr<tuned_weights<T>> weights;
    {
        std::optional<weights_file> file;
        if (!o.load.empty()) { file.emplace(o.load, o.model); }
        weights = place_weights(training, net, o, gather, &trace, [&]<class R>(std::size_t i, tutti::view<R> values) {
            if (file) { return file->read(i, values); }
            const tutti::buffer<R, Q> there(queue, values.size());
            initialize<R>(queue, there.view(), parameters[i], o.seed, static_cast<std::uint32_t>(i));
            if constexpr (Q::memory_type::host_accessible) {
                std::copy_n(there.data(), values.size(), values.data());
            } else {
                download(queue, there.view(), values);
            }
        });
    }
    passes_over_text<Math> passes(*weights, net, o, text, trace, track, queue);
    zeroth::replicated driver(std::move(training), passes, pipelines::mezo::estimator_of(o),
                              pipelines::mezo::division_of(o));

    const double tokens_per_step = static_cast<double>(o.batch) * o.model.context;
    const int last_step = o.last_step();
    progress shown(last_step, tokens_per_step, o.quiet || world.rank() != 0);
    const auto gathered = [&] { return std::chrono::duration<double>(driver.gathering()).count(); };
    result r;
    r.device = device.name();
    r.peak_flops = device.peak_flops();
    for (const declaration& d : parameters) {
        r.parameters += d.size();
        r.tensors.push_back(d.name);
    }
    r.levels.emplace_back(1, std::vector<int>());
    zeroth_result figures;
    const auto sent = [&] { return wire->total().bytes; };
    std::uint64_t sent_before = sent(), sent_in_steps = 0;
    bool validated = false;
    for (int step = 0; step < last_step; ++step) {
        passes.step = step;
        const zeroth::transfer_counters before = weights->moved();
        sent_before = sent();
        const auto begin = clock::now();
        const zeroth::step_result now = driver.step(o.learning_rate);
        r.step_seconds.push_back(std::chrono::duration<double>(clock::now() - begin).count());
        sent_in_steps += sent() - sent_before;
        if (!validated) {  // a validation before it would have taken the last update back to the host
            const zeroth::transfer_counters moved = weights->moved() - before;
            figures.upload_bytes = moved.upload_bytes;
            figures.offload_bytes = moved.offload_bytes;
            figures.gathered_bytes = moved.gathered_bytes;
        }
        validated = false;
        double loss = (now.loss_plus + now.loss_other) / 2;
        if (now.skipped) {
            if (r.training.empty()) { throw std::runtime_error("the loss of the first step is not finite"); }
            loss = r.training.back().second;
        } else {
            figures.loss_plus = now.loss_plus;
            figures.loss_minus = now.loss_other;
            figures.gradient = now.derivatives.front();
            figures.largest_move = std::max(figures.largest_move, now.move);
        }
        r.training.emplace_back(step + 1, loss);
        shown.step(step + 1, loss, r.step_seconds.back(), gathered);
        const bool last = step + 1 == last_step;
        if (((step + 1) % o.eval_every == 0 || last) && r.validation.empty()) {  // validation is not what is measured
            const zeroth::transfer_overlap overlap = zeroth::overlap_of(trace, world.rank());
            if (overlap.steps > 0) { figures.overlap_efficiency = overlap.efficiency(); }
        }
        if ((step + 1) % o.eval_every == 0 && !last) {
            const scoped_span evaluation(&trace, track, "evaluate", queue);
            r.validation.emplace_back(step + 1, evaluate(net, *weights, text.validation(), world));
            validated = true;
            shown.note(
                fmt::format("step {}: validation {:.4f} nats per {}", step + 1, r.validation.back().second, o.unit()));
        }
    }
    const bool sliced = o.zeroth.sliced;
    r.validation.emplace_back(last_step, evaluate(net, *weights, text.validation(), world));
    if ((world.rank() == 0 || sliced) && !o.quiet && !(o.random_weights && o.load.empty())) {
        r.sample = o.token_file.empty() ? generate(net, *weights, '\n', o.seed, 400)
                                        : generate(net, *weights, gpt2_end_of_text, o.seed, 64);
    }
    weights->flush();
    r.parameter_hash = tutti::hash_seed;
    using kept = tutti::master_t<T>;
    std::vector<kept> values;
    const auto read = [&](std::size_t i) {
        values.resize(parameters[i].size());
        read_whole<T>(world, *weights, i, sliced, values);
        r.parameter_hash = tutti::hash_bytes(tutti::as_bytes(tutti::view<const kept>(values)), r.parameter_hash);
        return std::span<const kept>(values);
    };
    if (!o.save.empty() && world.rank() == 0) {
        write_weights(o.save, parameters, read);
    } else {
        for (std::size_t i = 0; i < parameters.size(); ++i) { static_cast<void>(read(i)); }
    }
    world.agree(r.parameter_hash, "parameters after training");

    const auto steps = static_cast<std::uint64_t>(last_step);
    figures.scalar_bytes = driver.scalar_bytes() / steps;
    figures.skipped = driver.skipped();
    figures.flat = driver.flat();
    figures.host_bytes = weights->host_bytes();
    if (gather) {
        figures.gather = ways_to_gather[gather->chosen()];
        figures.gather_seconds = gather->times();
    }
    figures.upload_bits = o.zeroth.upload_bits;
    figures.upload_error = detail::mean_over_ranks(world, {weights->upload_error()})[0];
    figures.peak_device_bytes = queue.account().peak();
    figures.overlap_efficiency = detail::mean_over_ranks(world, {figures.overlap_efficiency})[0];
    detail::tell_seconds(r, world, r.step_seconds, gathered());
    for (const auto& record :
         world.gather_control({sent_in_steps / steps, figures.peak_device_bytes, figures.host_bytes, 0})) {
        r.wire_bytes_per_step = std::max<std::uint64_t>(r.wire_bytes_per_step, record[0]);
        r.peak_bytes = std::max<std::uint64_t>(r.peak_bytes, record[1]);
        figures.host_bytes = std::max<std::uint64_t>(figures.host_bytes, record[2]);
    }
    figures.peak_device_bytes = r.peak_bytes;
    r.zeroth = figures;
    const auto traced = trace.steps(world.rank());  // passes of blocks
    const auto since = traced.size() > 1000 ? traced[traced.size() - 1000].begin : origin;
    r.trace = tutti::schedule::timeline::document(detail::gather_texts(world, trace.events(since)));
    return r;
}

}  // namespace transformer
