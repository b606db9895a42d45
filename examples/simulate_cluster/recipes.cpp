// What the recipes charge, and the strategies that they run. Everything heavy to compile is here.
#include "recipes.hpp"

#include <memory>   // plans
#include <string>   // names
#include <utility>  // move
#include <vector>   // parameters

#include <fmt/format.h>  // names

#include <tutti/core/buffer.hpp>                     // storage
#include <tutti/core/element.hpp>                    // bfloat16
#include <tutti/core/error.hpp>                      // usage_error
#include <tutti/optimize/adamw.hpp>                  // adamw
#include <tutti/parallel/mesh.hpp>                   // split_along
#include <tutti/parallel/pipeline.hpp>               // pipeline
#include <tutti/parallel/schedules/dual_pipe.hpp>    // schedules
#include <tutti/parallel/schedules/one_way.hpp>      // schedules
#include <tutti/parallel/schedules/zero_bubble.hpp>  // schedules
#include <tutti/parallel/tensor_group.hpp>           // tensor_group
#include <tutti/parallel/tied_weights.hpp>           // copies of stages
#include <tutti/strategy/local_update.hpp>           // local_update
#include <tutti/strategy/zero.hpp>                   // zero

namespace simulate_cluster {

namespace {

using namespace tutti;
using rank = simulate::communicator;
using phantom = phantom_memory;
template <int Stage> using sharded = strategy::zero<Stage, rank, optimize::adamw, bfloat16>;

// What one layer takes for some tokens, on one of t tensor ranks: the sums of plan/time, in halves with a collective
// behind each. Backward takes twice the products, one time for inputs and one for weights; of scores both with inputs.
struct layer_cost {
    cost attention, feed_forward, attention_backward, feed_forward_backward, weights, norms;

    layer_cost(const plan::model_shape& m, double tokens, double t, const plan::machine& on = {}) {
        const auto h = static_cast<double>(m.hidden);
        const double scores = 4 * tokens * static_cast<double>(m.sequence) * h / t;
        // Half a wave of each product is lost, and every kernel is launched: three of products and three others a half.
        const double launches = 3 * on.launch_seconds;
        const double late = launches * on.flops * on.product_efficiency;
        attention = {0, 8 * tokens * h * h / t + scores + on.wave * (h + h / t) + late};
        feed_forward = {0, 16 * tokens * h * h / t + on.wave * (h + 4 * h / t) + late};
        attention_backward = {0, 8 * tokens * h * h / t + 2 * scores + on.wave * (h + 3 * h / t) + late};
        feed_forward_backward = {0, 16 * tokens * h * h / t + on.wave * (h + 4 * h / t) + late};
        weights = {0, 24 * tokens * h * h / t + on.wave * 4 * tokens + 2 * late};
        norms = {tokens * h * (12 + 24 / t) + launches * on.memory_bandwidth * on.memory_efficiency, 0};  // of a half
    }
};

[[nodiscard]] std::size_t layer_parameters(const plan::model_shape& m, std::int64_t t) {
    return static_cast<std::size_t>(12 * m.hidden * m.hidden / t + 7 * m.hidden / t + 6 * m.hidden);
}

// A list of parameters and their storage.
struct parameter_storage {
    std::vector<buffer<bfloat16, virtual_queue>> values;
    strategy::parameters<bfloat16, phantom> list;
    void add(virtual_queue q, std::string name, std::size_t count) {
        values.emplace_back(q, count);
        list.push_back({std::move(name), {count}, true, values.back().view(), {}});
    }
};

// The layers of a rank: pipelines call it.
class transformer_stage {
    const parallel_job& job_;
    virtual_queue pipeline_;
    parallel::tensor_group<rank>& tensor_;
    sharded<1>& data_;
    std::size_t layers_;  // of a chunk
    layer_cost layer_;
    double tokens_;
    buffer<bfloat16, virtual_queue> rows_;  // what layers add up over tensor ranks

public:
    transformer_stage(const parallel_job& j, virtual_queue q, parallel::tensor_group<rank>& tensor, sharded<1>& data)
        : job_(j)
        , pipeline_(std::move(q))
        , tensor_(tensor)
        , data_(data)
        , layers_(static_cast<std::size_t>(j.model.layers / (j.how.pipeline * j.how.chunks)))
        , layer_(j.model, static_cast<double>(j.model.sequence * j.how.micro_batch), j.how.tensor, j.on)
        , tokens_(static_cast<double>(j.model.sequence * j.how.micro_batch))
        , rows_(tensor.queue(), static_cast<std::size_t>(j.model.sequence * j.how.micro_batch * j.model.hidden)) {}

    void forward(const parallel::stage_call& call, view<const bfloat16, phantom>, view<bfloat16, phantom>) {
        begin();
        if (call.stage == 0) { charge("embedding", {4 * tokens_ * static_cast<double>(job_.model.hidden), 0}); }
        for (std::size_t l = 0; l < layers_; ++l) {
            half("attention", layer_.attention);
            half("feed forward", layer_.feed_forward);
        }
        end();
    }
    void backward_input(const parallel::stage_call& call, view<const bfloat16, phantom>, view<const bfloat16, phantom>,
                        view<bfloat16, phantom>) {
        begin();
        if (call.stage + 1 == job_.how.pipeline * job_.how.chunks) {  // logits, loss, and back
            charge("head",
                   {0, 6 * tokens_ * static_cast<double>(job_.model.hidden * job_.model.vocabulary) / job_.how.tensor});
        }
        for (std::size_t l = 0; l < layers_; ++l) {
            half("feed forward backward", layer_.feed_forward_backward);
            half("attention backward", layer_.attention_backward);
        }
        end();
    }
    void backward_weight(const parallel::stage_call& call, view<const bfloat16, phantom>,
                         view<const bfloat16, phantom>) {
        begin();
        virtual_queue data = data_.queue();
        // Of two copies none has whole gradients here: train() adds them up.
        const bool last = job_.how.copies() == 1 && call.micro_batch + 1 == job_.how.micro_batches;
        for (std::size_t l = layers_; l-- > 0;) {
            charge("weights", layer_.weights);
            charge("norms", {2 * layer_.norms.bytes, 0});
            if (!last) { continue; }
            data.wait(tensor_.queue().record());
            data_.gradient_ready(static_cast<std::size_t>(call.chunk) * layers_ + l);
        }
        end();
    }

private:
    void begin() { tensor_.queue().wait(pipeline_.record()); }
    void end() { pipeline_.wait(tensor_.queue().record()); }
    void charge(std::string_view name, cost c) { tensor_.queue().charge(name, c); }
    void half(std::string_view name, cost products) {
        charge(name, products);
        charge("norms", layer_.norms);
        if (tensor_.size() > 1) { tensor_.add_up(rows_.view()).wait(tensor_.queue()); }
    }
};

[[nodiscard]] parallel::pipeline_schedule schedule_of(const plan::job& j) {
    const int m = static_cast<int>(j.micro_batches);
    switch (j.schedule) {
    case plan::pipelining::gpipe: return parallel::gpipe(j.pipeline, m);
    case plan::pipelining::one_forward_one_backward: return parallel::one_forward_one_backward(j.pipeline, m);
    case plan::pipelining::interleaved: return parallel::interleaved(j.pipeline, m, j.chunks);
    case plan::pipelining::zero_bubble: return parallel::zero_bubble(j.pipeline, m);
    case plan::pipelining::dual_pipe: return parallel::dual_pipe(j.pipeline, m);
    case plan::pipelining::zero_bubble_v: break;
    }
    throw usage_error("simulate_cluster: no recipe has this schedule");
}

void train(const parallel_job& j, const std::shared_ptr<const parallel::pipeline_plan>& plan, const parallel::mesh& m,
           rank& world, int steps) {
    using parallel::dimension;
    parallel::tensor_group<rank> tensor(parallel::split_along(world, m, dimension::tensor));
    parallel::pipeline_options options;
    options.elements = {static_cast<std::size_t>(j.model.sequence * j.how.micro_batch * j.model.hidden)};
    options.recompute = j.how.recompute == plan::recomputation::full;
    parallel::pipeline<rank, bfloat16> pipe(parallel::split_along(world, m, dimension::pipeline), plan, options);
    rank replicas = parallel::split_along(world, m, dimension::data);
    virtual_queue data = replicas.queue();
    const int stage = pipe.communicator().rank();

    parameter_storage held;
    const auto layers_held = static_cast<std::size_t>(rank_layers(j.model, j.how));
    for (std::size_t l = 0; l < layers_held; ++l) {
        held.add(data, fmt::format("layer {}", l), layer_parameters(j.model, j.how.tensor));
    }
    const bool at_end = stage == 0 || stage + 1 == j.how.pipeline;
    std::vector<parallel::tied_weights<rank>> copies;  // by stage
    for (int s = 0; j.how.copies() > 1 && s < j.how.pipeline; ++s) {
        copies.emplace_back(pipe.communicator(), plan->schedule, std::vector{s});
    }
    if (at_end) {
        held.add(data, "embedding",
                 static_cast<std::size_t>((j.model.vocabulary / j.how.tensor + j.model.sequence) * j.model.hidden));
    }
    sharded<1> zero(std::move(replicas), {}, {.bucket_bytes = std::size_t{256} << 20});
    zero.attach(held.list);
    transformer_stage layers(j, pipe.queue(), tensor, zero);
    for (int step = 0; step < steps; ++step) {
        zero.begin({});
        for (std::size_t i = 0; i < held.list.size(); ++i) {
            static_cast<void>(zero.before_use(i));
            zero.after_use(i);
        }
        pipe.queue().wait(data.record());
        pipe.run(layers);
        // Stage r and stage p - 1 - r are on the same two ranks, which have the lower one first; words are with either.
        for (std::size_t i = 0; !copies.empty() && i < held.list.size(); ++i) {
            const int of = (i < layers_held / 2) == (2 * stage < j.how.pipeline) ? stage : j.how.pipeline - 1 - stage;
            copies[static_cast<std::size_t>(of)].add_up(zero.gradient(i));
        }
        data.wait(pipe.queue().record());
        for (std::size_t l = layers_held; !copies.empty() && l-- > 0;) { zero.gradient_ready(l); }
        if (at_end) { zero.gradient_ready(held.list.size() - 1); }
        zero.step({.learning_rate = 1e-4, .clip_norm = 1});
    }
    zero.flush();
}

template <int Stage> void train(const replica_job& j, rank& world, int steps) {
    std::vector<int> inside, across;
    for (int r = 0; r < world.size(); ++r) {
        inside.push_back(j.network.node_of(r));
        across.push_back(j.network.local_rank(r));
    }
    schedule::timeline* const trace = world.rank() == 0 ? j.trace : nullptr;
    sharded<Stage> inner(
        *world.split(inside, "inside"), {},
        {.bucket_bytes = std::size_t{256} << 20, .trace = trace, .trace_rank = 0, .trace_steps = false});
    const strategy::local_update_rule rule = j.late ? strategy::co2_method{.period = j.period}.rule()
                                                    : strategy::local_sgd_method{.period = j.period}.rule();
    strategy::local_update<rank, sharded<Stage>> s(*world.split(across, "across"), std::move(inner), rule,
                                                   {.trace = trace, .trace_rank = 0});
    const auto count = static_cast<std::size_t>(j.model.layers);
    const double tokens = static_cast<double>(j.tokens);
    const layer_cost layer(j.model, tokens, 1);
    const double forward = layer.attention.flops + layer.feed_forward.flops;
    virtual_queue q = s.queue();
    {
        // Stage 3 has read the values, and needs no others; stage 2 works on them.
        auto held = std::make_unique<parameter_storage>();
        for (std::size_t l = 0; l < count; ++l) {
            held->add(q, fmt::format("layer {}", l), layer_parameters(j.model, 1));
        }
        held->add(q, "embedding", static_cast<std::size_t>((j.model.vocabulary + j.model.sequence) * j.model.hidden));
        s.attach(held->list);
        if constexpr (Stage == 3) { held.reset(); }
        const auto use = [&](std::size_t i, std::string_view name, cost c) {
            static_cast<void>(s.before_use(i));
            q.charge(name, c);
            s.after_use(i);
        };
        const double head = 2 * tokens * static_cast<double>(j.model.hidden * j.model.vocabulary);
        for (int step = 0; step < steps; ++step) {
            s.begin({});
            for (std::size_t l = 0; l < count; ++l) { use(l, "forward", {0, forward}); }
            use(count, "head", {0, 3 * head});
            s.gradient_ready(count);
            for (std::size_t l = count; l-- > 0;) {
                use(l, "backward", {0, 2 * forward});
                s.gradient_ready(l);
            }
            s.step({.learning_rate = 1e-4, .clip_norm = 1});
        }
        s.flush();
    }
}

}  // namespace

simulate::outcome run(const parallel_job& j, int steps, const simulate::trace_options& trace) {
    plan::validate(j.model, j.how);
    if (j.how.zero_stage != 1 || j.how.replicas != 1 || j.how.sequence_parallel || j.how.sequence != 1 ||
        j.how.recompute == plan::recomputation::selective) {
        throw usage_error(
            "simulate_cluster: the recipe is of ZeRO stage 1 over all replicas, of whole sequences, without sequence "
            "parallelism, with all activations kept or recomputed");
    }
    const auto ranks = static_cast<int>(j.how.ranks());
    const simulate::cluster machines(j.on, ranks);
    const parallel::mesh m({.pipeline = j.how.pipeline, .data = j.how.data, .tensor = j.how.tensor}, ranks);
    const auto shared = parallel::plan_pipeline(schedule_of(j.how));
    return machines.run([&](rank& world) { train(j, shared, m, world, steps); }, trace);
}

simulate::outcome run(const replica_job& j, int steps) {
    if (j.zero_stage != 2 && j.zero_stage != 3) {
        throw usage_error(fmt::format("simulate_cluster: ZeRO stage {} inside nodes, expected 2 or 3", j.zero_stage));
    }
    const simulate::cluster machines(j.network, j.rates);
    return machines.run(
        [&](rank& world) { j.zero_stage == 2 ? train<2>(j, world, steps) : train<3>(j, world, steps); });
}

double steady_seconds(const replica_job& j) {
    const int round = static_cast<int>(j.period);  // the second one waits for the first one's mean
    return (run(j, 2 * round).seconds - run(j, round).seconds) / round;
}

replica_job co2_7b(int nodes, std::size_t period, bool late) {
    replica_job j{.model = {32, 4096, 32, 65536, 2048},
                  .network = comm::topology::uniform(1, 8, {5e-6, 210e9}, {5e-5, 10e9}, 1),
                  .rates = {1.6e12, 1},
                  .zero_stage = 2,
                  .tokens = 1024,
                  .period = 48};
    // 0.86 at a period of 12: a mean takes 13.95 steps. It is of 4 bytes an element, 15/8 of them through 10 GB/s.
    const double step = 15.0 / 8 * 4 * static_cast<double>(j.model.parameters()) / 10e9 / 13.95;
    // What a node's step takes besides products does not depend on their speed.
    const double flops =
        plan::model_flops(j.model, {}) * static_cast<double>(j.tokens) / static_cast<double>(j.model.sequence);
    j.rates.flops_per_second = flops / step;
    const double besides = steady_seconds(j) - step;
    j.rates.flops_per_second = flops / (step - besides);
    j.network = comm::topology::uniform(nodes, 8, j.network.inside(), j.network.between(), 1);
    j.period = period;
    j.late = late;
    return j;
}

replica_job co2_22b(int nodes, const plan::machine& on) {
    return {.model = {48, 6144, 48, 51200, 2048},
            .network = simulate::network_of(on, nodes * on.ranks_per_node),
            .rates = simulate::rates_of(on),
            .zero_stage = 3,
            .tokens = 4 * 2048,
            .period = 4,
            .late = true};
}

parallel_job frontier_175b(int data, const plan::machine& on) {
    return {{96, 12288, 96, 50688, 2048},
            {.tensor = 4,
             .pipeline = 16,
             .data = data,
             .zero_stage = 1,
             .recompute = plan::recomputation::full,
             .micro_batches = 640},
            on};
}
parallel_job frontier_1t(int data, const plan::machine& on) {
    return {{128, 25600, 128, 50688, 2048},
            {.tensor = 8,
             .pipeline = 64,
             .data = data,
             .zero_stage = 1,
             .recompute = plan::recomputation::full,
             .micro_batches = 1600},
            on};
}

}  // namespace simulate_cluster
