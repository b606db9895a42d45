// forward_tuning: the run of one rank whose pipeline makes forward passes alone: mezo.
// Needs train.hpp for evaluation and samples, and zeroth. All ranks call tune() with the same options and text.
#pragma once

#include <chrono>     // step times
#include <cmath>      // isfinite
#include <cstdint>    // samples
#include <memory>     // ledger
#include <numeric>    // reduce
#include <stdexcept>  // a run that cannot begin
#include <vector>     // slices, losses

#include <tutti/comm/counted.hpp>      // bytes on the wire
#include <tutti/schedule/span.hpp>     // spans of the trace
#include <tutti/zeroth/in_memory.hpp>  // weights and their perturbed copy
#include <tutti/zeroth/replicate.hpp>  // steps

#include "pipelines/mezo.hpp"
#include "train.hpp"

namespace transformer {

/// Weights that lie somewhere as the model's own do, where a model looks for them.
template <class T, tutti::memory M> class weights_at {
    const tutti::strategy::parameters<T, M>& parameters_;
    tutti::view<const T, M> all_;

public:
    weights_at(const tutti::strategy::parameters<T, M>& parameters, tutti::view<const T, M> all)
        : parameters_(parameters), all_(all) {}
    [[nodiscard]] tutti::view<const T, M> before_use(std::size_t i) const {
        return all_.sub(static_cast<std::size_t>(parameters_[i].value.data() - parameters_[0].value.data()),
                        parameters_[i].value.size());
    }
    void after_use(std::size_t) const {}
};

/// Fine-tunes, evaluates, and returns the result on every rank.
///
/// Semantics    as train(), at one learning rate, without decay or clipping. A step's loss is the mean of both sides'.
///              A step whose loss is not finite is left out on all ranks; the curve repeats what was before.
/// Determinism  losses, slopes and weights have the same bits on any ranks and by any --zo-parallel, if shards and
///              micro-batches are the same.
/// Cost         two forward passes a direction; memory of the weights twice, and activations of one micro-batch.
/// Errors       runtime_error when the first loss is not finite; mismatch_error when ranks come to differ.
template <class Device, class Comm>
[[nodiscard]] result tune(Comm& world, Device& device, const options& o, const corpus& text, tutti::deadline origin) {
    using Math = typename Device::math;
    using T = typename Math::element;
    using clock = std::chrono::steady_clock;
    using tutti::schedule::scoped_span;
    namespace zeroth = tutti::zeroth;

    tutti::schedule::timeline trace(origin);
    const auto track = trace.track_of(world.rank(), "main");
    tutti::comm::counted training(device.communicator(world, o));
    const std::shared_ptr<tutti::comm::ledger> wire = training.traffic_ledger();
    const auto queue = training.queue();
    model<Math> net(o.model, o.micro_batch, o.seed, device.make_math(queue), static_cast<recompute>(o.recompute));
    using M = typename model<Math>::memory_type;
    if (!o.load.empty()) {
        weights_file start(o.load, o.model);
        for (std::size_t i = 0; i < net.parameters().size(); ++i) {
            std::vector<T> values(net.parameters()[i].value.size());
            start.read(i, tutti::view<T>(values));
            net.put(values, net.parameters()[i].value);
        }
        world.agree(net.hash(), "weights loaded");
    }

    // A parameter is a tensor; the head has the token table's.
    std::vector<zeroth::tensor_slice> slices;
    std::size_t offset = 0;
    for (const auto& p : net.parameters()) {
        slices.push_back({.tensor = static_cast<std::uint32_t>(slices.size()),
                          .offset = offset,
                          .count = p.value.size(),
                          .decayed = p.decay});
        offset += p.value.size();
    }
    const tutti::view<T, M> weights(net.parameters()[0].value.data(), offset);
    int step = 0;
    batch b;
    const auto forward = [&](tutti::view<const T, M> moved, std::size_t micro_batch) -> zeroth::loss_value {
        const scoped_span span(&trace, track, "forward", queue);
        const auto first = static_cast<std::uint64_t>(step) * static_cast<std::uint64_t>(o.batch) +
                           micro_batch * static_cast<std::uint64_t>(o.micro_batch);
        draw(b, text.training(), o.seed, first, static_cast<std::size_t>(o.micro_batch), o.model.context);
        weights_at<T, M> there(net.parameters(), moved);
        const double sum = net.forward(there, b.in, b.targets, o.model.context);
        return {sum / static_cast<double>(b.in.size()), static_cast<std::uint32_t>(b.in.size())};
    };
    zeroth::in_memory held(queue, weights, std::move(slices), forward);
    zeroth::replicated driver(std::move(training), held, pipelines::mezo::estimator_of(o),
                              pipelines::mezo::division_of(o));

    const double tokens_per_step = static_cast<double>(o.batch) * o.model.context;
    const int last_step = o.last_step();
    progress shown(last_step, tokens_per_step, o.quiet || world.rank() != 0);
    published<T, M> own{net.parameters()};
    const auto gathered = [&] { return std::chrono::duration<double>(driver.gathering()).count(); };
    result r;
    r.device = device.name();
    r.parameters = net.parameter_count();
    r.peak_flops = device.peak_flops();
    for (const auto& p : net.parameters()) { r.tensors.push_back(p.name); }
    r.levels.emplace_back(1, std::vector<int>());
    zeroth_result figures;
    for (; step < last_step; ++step) {
        const auto begin = clock::now();
        const zeroth::step_result now = driver.step(o.learning_rate);
        r.step_seconds.push_back(std::chrono::duration<double>(clock::now() - begin).count());
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
        if ((step + 1) % o.eval_every == 0 && step + 1 < last_step) {
            const scoped_span evaluation(&trace, track, "evaluate", queue);
            held.flush();
            r.validation.emplace_back(step + 1, evaluate(net, own, text.validation(), world));
            shown.note(
                fmt::format("step {}: validation {:.4f} nats per {}", step + 1, r.validation.back().second, o.unit()));
        }
    }
    held.flush();
    r.parameter_hash = net.hash();
    world.agree(r.parameter_hash, "parameters after training");
    if (!o.save.empty() && world.rank() == 0) {
        write_weights(o.save, net.parameters(),
                      [&](std::size_t i) { return net.on_host(tutti::view<const T, M>(net.parameters()[i].value)); });
    }
    r.validation.emplace_back(last_step, evaluate(net, own, text.validation(), world));
    if (world.rank() == 0 && !o.quiet) {
        r.sample = o.token_file.empty() ? generate(net, own, '\n', o.seed, 400)
                                        : generate(net, own, gpt2_end_of_text, o.seed, 64);
    }
    const auto steps = static_cast<std::uint64_t>(last_step);
    figures.scalar_bytes = driver.scalar_bytes() / steps;
    figures.skipped = driver.skipped();
    r.zeroth = figures;

    std::vector<double> seconds = r.step_seconds;
    seconds.push_back(gathered());
    world.all_reduce(tutti::view<const double>(seconds), tutti::view<double>(seconds), tutti::sum{});
    for (double& x : seconds) { x /= o.ranks; }
    r.exposed_seconds = seconds.back();
    seconds.pop_back();
    r.step_seconds = seconds;
    r.total_seconds = std::reduce(seconds.begin(), seconds.end());
    r.compute_seconds = r.total_seconds - r.exposed_seconds;
    r.step_median = detail::median(seconds);
    const tutti::memory_account &used = queue.account(), &by_model = net.account();
    const std::size_t peak = used.peak() + (&used == &by_model ? 0 : by_model.peak());
    for (const auto& record : world.gather_control({wire->total().bytes / steps, peak, 0, 0})) {
        r.wire_bytes_per_step = std::max<std::uint64_t>(r.wire_bytes_per_step, record[0]);
        r.peak_bytes = std::max<std::uint64_t>(r.peak_bytes, record[1]);
    }
    r.trace = tutti::schedule::timeline::document(detail::gather_texts(world, trace.events(origin)));
    return r;
}

}  // namespace transformer
