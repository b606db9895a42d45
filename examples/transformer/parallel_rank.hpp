// parallel_rank: what one rank has of a model that is divided over a mesh, its communicators, and passes through it.
// Needs stages.hpp, parallel_math.hpp and micro_batches.hpp. Training is parallel_training.hpp's.
#pragma once

#include <algorithm>         // max_element, min
#include <array>             // messages, counts
#include <cmath>             // exp
#include <cstdint>           // tokens
#include <initializer_list>  // dimensions
#include <memory>            // attention
#include <optional>          // pipeline, rates
#include <span>              // gradients
#include <utility>           // move
#include <vector>            // micro-batches

#include <fmt/format.h>                      // names of parts
#include <tutti/comm/connect.hpp>            // connect_all
#include <tutti/comm/counted.hpp>            // bytes on the wire
#include <tutti/core/hash.hpp>               // same values
#include <tutti/core/partition.hpp>          // heads
#include <tutti/parallel/gradient_norm.hpp>  // model_norm
#include <tutti/parallel/mesh.hpp>           // who does what
#include <tutti/parallel/pipeline.hpp>       // pipeline
#include <tutti/parallel/tied_weights.hpp>   // both ends, copies
#include <tutti/schedule/timeline.hpp>       // trace

#include "checkpoints.hpp"
#include "data.hpp"
#include "document_attention.hpp"
#include "masters.hpp"
#include "micro_batches.hpp"
#include "parallel_math.hpp"
#include "parallel_run.hpp"
#include "stages.hpp"

namespace transformer {

/// A replica of the model at work: a rank's stages, and the communicators along the dimensions that a replica has.
///
/// Semantics    construction is collective over `world`. Members in the order in which they are made. Ranks along the
///              sequence dimension have the same stages, and parts of the sequences.
template <class Device, class World> class parallel_rank {
public:
    using math_of_device = typename Device::math;
    using T = typename math_of_device::element;
    using Comm = tutti::comm::counted<decltype(std::declval<Device&>().along(
        std::declval<World&>(), std::declval<const options&>(), std::declval<const tutti::parallel::mesh&>(), {}))>;
    using Q = tutti::queue_of<Comm>;
    using M = typename Q::memory_type;
    using math_type = parallel_math<math_of_device, Comm>;
    using real = typename math_of_device::real;
    using dimension = tutti::parallel::dimension;

private:
    World& world_;
    const options& o_;
    tutti::parallel::mesh mesh_;
    tutti::parallel::pipeline_schedule schedule_;
    Comm along_pipeline_;
    Comm of_norm_;
    Comm along_sequences_;
    tutti::parallel::tensor_group<Comm> group_;
    std::unique_ptr<document_attention<T>> attention_;  // that ranks share, if they do
    micro_batch_rows<T> rows_;
    stages<math_type> net_;
    tutti::parallel::tied_weights<Comm> ends_;
    std::vector<tutti::parallel::tied_weights<Comm>> copies_;  // by stage, where there are two
    std::optional<tutti::parallel::pipeline<Comm, T>> pipe_;
    std::vector<std::size_t> numbers_;  // in the whole model, of what this rank has
    struct owned_part {
        std::size_t first, count;
        bool counted;
    };
    std::vector<owned_part> owned_;  // likewise: where the strategy has it, and whether it counts in norms

    [[nodiscard]] Comm along(Device& device, std::initializer_list<dimension> dimensions) {
        return Comm(device.along(world_, o_, mesh_, dimensions));
    }
    [[nodiscard]] tutti::parallel::vocabulary_share share() const {
        return {group_, static_cast<std::size_t>(o_.model.vocabulary), std::size_t{math_of_device::row_multiple}};
    }
    [[nodiscard]] tensor_part part() const { return {group_.size(), group_.rank(), share().count}; }
    [[nodiscard]] std::size_t most_rows() const {
        return static_cast<std::size_t>(attention_ ? attention_->most_rows() : o_.attention_tokens());
    }
    [[nodiscard]] int heads() const {
        const auto ranks = static_cast<std::size_t>(group_.size()), rank = static_cast<std::size_t>(group_.rank());
        return static_cast<int>(tutti::partition(static_cast<std::size_t>(o_.model.heads), ranks, rank).count);
    }
    // Rows that this rank has of so many sequences.
    [[nodiscard]] batch zeros(int sequences) const {
        const auto count = static_cast<std::size_t>(sequences), length = static_cast<std::size_t>(o_.model.context);
        const std::vector<std::uint16_t> text(count * length + 1);
        batch b;
        rows_.take(b, text, 0, count, length);
        return b;
    }
    [[nodiscard]] int last_stage() const { return schedule_.stages() - 1; }

public:
    parallel_rank(World& world, Device& device, const options& o, tutti::schedule::timeline* trace)
        : world_(world)
        , o_(o)
        , mesh_({.pipeline = o.pp, .data = o.dp, .sequence = o.sp, .tensor = o.tp}, world.size())
        , schedule_(schedule_of(o))
        , along_pipeline_(along(device, {dimension::pipeline}))
        , of_norm_(o.zero == 0
                       ? along(device, {dimension::pipeline, dimension::tensor})
                       : along(device, {dimension::pipeline, dimension::data, dimension::sequence, dimension::tensor}))
        , along_sequences_(along(device, {dimension::sequence}))
        , group_(along(device, {dimension::tensor}), {.sequence_parallel = o.sequence_parallel})
        , attention_(make_document_attention<T>(along_sequences_, o, trace, world.rank(), heads()))
        , rows_(o, attention_.get())
        , net_(o.model, static_cast<int>(most_rows()), o.seed, schedule_, along_pipeline_.rank(), part(),
               static_cast<recompute>(o.recompute),
               math_type(device.make_math(along_pipeline_.queue()), group_, share(), most_rows()), attention_.get())
        , ends_(along_pipeline_, schedule_, {0, schedule_.stages() - 1}) {
        for (int stage = 0; schedule_.routes.size() > 1 && stage < schedule_.stages(); ++stage) {
            copies_.emplace_back(along_pipeline_, schedule_, std::vector{stage});
        }
        for (std::size_t i = 0; i < whole_model().size(); ++i) {
            if (net_.place_of(i) != net_.nowhere) { numbers_.push_back(i); }
        }
        const std::size_t border = net_.border(zeros(o.micro_batch).in.size());
        pipe_.emplace(std::move(along_pipeline_), schedule_,
                      tutti::parallel::pipeline_options{
                          .elements = {border}, .recompute = o.recompute == static_cast<int>(recompute::stages)});
    }

    [[nodiscard]] const tutti::parallel::mesh& grid() const { return mesh_; }
    [[nodiscard]] const tutti::parallel::pipeline_schedule& schedule() const { return schedule_; }
    [[nodiscard]] stages<math_type>& net() { return net_; }
    [[nodiscard]] const micro_batch_rows<T>& rows() const { return rows_; }
    /// Every shape that steps, evaluate and generate have: a micro-batch, and for the latter two one sequence.
    template <class Strategy> void rehearse(Strategy& strategy, bool alone) {
        net_.rehearse(strategy, zeros(o_.micro_batch), alone, o_.shares_gradients());
        net_.rehearse_scoring(strategy, zeros(1), alone, o_.shares_gradients());
    }
    /// This rank's part of the model, which those along the data and sequence dimensions have too.
    [[nodiscard]] kept_part kept() const {
        const auto at = [&](dimension d) { return static_cast<std::size_t>(coordinate(d)); };
        return {fmt::format("tensor {} of {}, pipeline {} of {}", at(dimension::tensor), o_.tp, at(dimension::pipeline),
                            o_.pp),
                at(dimension::data) * static_cast<std::size_t>(o_.sp) + at(dimension::sequence),
                static_cast<std::size_t>(o_.dp) * static_cast<std::size_t>(o_.sp)};
    }
    [[nodiscard]] std::vector<declaration> whole_model() const { return parameters_of(o_.model); }
    [[nodiscard]] int coordinate(dimension d) const { return mesh_.coordinate(world_.rank(), d); }
    /// Bytes that this rank has sent along the tensor and pipeline dimensions, for norms, and along the sequence one.
    [[nodiscard]] std::array<std::uint64_t, 4> sent() {
        return {group_.communicator().traffic_ledger()->total().bytes,
                pipe_->communicator().traffic_ledger()->total().bytes, of_norm_.traffic_ledger()->total().bytes,
                along_sequences_.traffic_ledger()->total().bytes};
    }

    /// The strategy is attached. What it owns of each parameter, and what of that this rank counts in norms.
    template <class Strategy> void find_owned(Strategy& strategy) {
        using R = tutti::master_t<T>;
        const auto state = strategy.state();
        const R* const begin = strategy.owned().data();
        for (const std::size_t i : numbers_) {
            const auto e = detail::entry_of<R, M>(state, net_.declared(i).name + "/value");
            const auto own = detail::elements_of<R, M>(e);
            bool counted = cut_of(i, o_.model) != cut::whole || group_.counts_replicated();
            if (i == token_table) {
                counted = counted && ends_.counts();
            } else if (!copies_.empty()) {
                counted = counted && copies_[static_cast<std::size_t>(net_.stage_of(i))].counts();
            }
            const std::size_t first = own.empty() ? 0 : static_cast<std::size_t>(own.data() - begin);
            owned_.push_back({first, own.size(), counted});
        }
    }

    /// A step begins. To the strategy all micro-batches are one, or, where ranks share gradients, as many as there are.
    template <class Strategy>
    void begin(Strategy& strategy, const std::vector<batch>& micro_batches, real scale, double learning_rate) {
        if (!o_.shares_gradients()) { strategy.begin({0, 1, learning_rate}); }
        net_.begin(micro_batches, scale, o_.shares_gradients() ? std::optional(learning_rate) : std::nullopt);
    }
    /// All micro-batches of the step forward and backward. Gradients are this replica's, complete and announced.
    template <class Strategy> void run(Strategy& strategy) {
        auto work = net_.of(strategy);
        static_cast<void>(pipe_->run(work));
        for (const std::size_t i : numbers_) {
            if (!net_.is_tied(i)) { continue; }
            const std::size_t place = net_.place_of(i);
            if (i == token_table) {
                ends_.add_up(strategy.gradient(place));
            } else {
                copies_[static_cast<std::size_t>(net_.stage_of(i))].add_up(strategy.gradient(place));
            }
        }
        for (auto i = numbers_.rbegin(); i != numbers_.rend(); ++i) {
            if (net_.is_tied(*i)) { net_.announce(strategy, *i); }
        }
    }
    /// Of the whole model, from this rank's part of the averaged gradients. Collective.
    [[nodiscard]] double norm(tutti::view<T, M> owned) {
        std::vector<tutti::parallel::held_gradient<T, M>> list;
        for (const owned_part& p : owned_) { list.push_back({owned.sub(p.first, p.count), p.counted}); }
        return tutti::parallel::model_norm<T>(of_norm_, std::span<const tutti::parallel::held_gradient<T, M>>(list));
    }

    /// Sum of the losses of this rank's rows of a batch of sequences of `length`, of all ranks of the pipeline: forward
    /// alone, from rank to rank. Collective over them; batches follow one another through the pipeline.
    template <class Strategy> [[nodiscard]] double score(Strategy& weights, const batch& b, int length) {
        Comm& comm = pipe_->communicator();
        const std::size_t count = net_.border(b.in.size());
        double loss = 0;
        tutti::buffer<T, Q> in(net_.queue(), 0);
        for (int stage = 0; stage <= last_stage(); ++stage) {
            if (schedule_.rank_of(stage, 0) != comm.rank()) { continue; }
            const int from = stage == 0 ? comm.rank() : schedule_.rank_of(stage - 1, 0);
            const int to = stage == last_stage() ? comm.rank() : schedule_.rank_of(stage + 1, 0);
            if (from != comm.rank()) {
                in = tutti::buffer<T, Q>(net_.queue(), count);
                comm.exchange(std::array{tutti::comm::receive_from(from, in.view())});
            }
            tutti::buffer<T, Q> out(net_.queue(), stage == last_stage() ? 0 : count);
            loss += net_.score(weights, stage, b, length, tutti::view<const T, M>(in.view()), out.view());
            if (to != comm.rank()) {
                comm.exchange(std::array{tutti::comm::send_to(to, tutti::view<const T, M>(out.view()))});
            }
            in = std::move(out);
        }
        return leads_last_stage() ? loss : 0;
    }
    /// Is this rank the one of its replica that speaks for the last stage?
    [[nodiscard]] bool leads_last_stage() {
        return schedule_.rank_of(last_stage(), 0) == pipe_->communicator().rank() && group_.rank() == 0;
    }

    /// Of the losses of a step, each rank that has the last stage knows its micro-batches'; of its group, one counts them.
    [[nodiscard]] bool counts_losses() const { return net_.holds(last_stage()) && group_.rank() == 0; }

    /// As evaluate() in train.hpp; replicas share the windows, and each scores equally often. Collective over the world.
    template <class Strategy> [[nodiscard]] double evaluate(Strategy& weights, tokens text) {
        const auto length = static_cast<std::size_t>(o_.model.context);
        const std::size_t scored = text.size() - 1, windows = scored / length;
        const auto at_once = static_cast<std::size_t>(o_.micro_batch), replicas = static_cast<std::size_t>(o_.dp);
        const auto replica = static_cast<std::size_t>(coordinate(dimension::data));
        double losses[1] = {};
        batch b;
        std::size_t next = 0;  // of the windows. Some at a time, then one by one: two shapes are all there are
        for (const std::size_t count : std::array{at_once, std::size_t{1}}) {
            while (next < windows && (count == 1 || next + replicas * count <= windows)) {
                const std::size_t first = next + replica * count;
                const bool idle = first >= windows;
                rows_.take(b, text, idle ? 0 : first * length, count, length);
                const double loss = score(weights, b, o_.model.context);
                if (!idle) { losses[0] += loss; }
                next += replicas * count;
            }
        }
        if (const std::size_t rest = scored % length; rest != 0) {
            std::vector<std::uint16_t> padded(text.end() - static_cast<std::ptrdiff_t>(rest + 1), text.end());
            padded.resize(math_of_device::wants_whole_context ? length + 1 : rest + 1);
            rows_.take(b, padded, 0, 1, padded.size() - 1);
            rows_.end(b, rest);
            const double loss = score(weights, b, static_cast<int>(padded.size() - 1));
            if (replica == 0) { losses[0] += loss; }
        }
        world_.all_reduce(tutti::view<const double>(losses, 1), tutti::view<double>(losses, 1), tutti::sum{});
        return losses[0] / static_cast<double>(scored);
    }
    /// As generate() in train.hpp, on every rank the same tokens.
    template <class Strategy>
    [[nodiscard]] std::vector<std::uint16_t> generate(Strategy& weights, std::uint16_t first, int count) {
        const auto window = static_cast<std::size_t>(o_.model.context);
        const tutti::random_stream random = random_for(o_.seed, purpose::sample);
        std::vector<std::uint16_t> text{first};
        const auto words = static_cast<std::size_t>(o_.model.vocabulary);
        batch b;
        for (int i = 0; i < count; ++i) {
            const std::size_t seen = std::min(window, text.size());
            std::vector<std::uint16_t> shown(text.end() - static_cast<std::ptrdiff_t>(seen), text.end());
            if (math_of_device::wants_whole_context) { shown.resize(window); }
            const std::size_t length = shown.size();
            shown.push_back(0);  // the target of the last one, which is not scored
            rows_.take(b, shown, 0, 1, length);
            static_cast<void>(score(weights, b, static_cast<int>(length)));
            std::vector<double> weight(words);
            const auto row = rows_.row_of(static_cast<std::int64_t>(seen) - 1);
            if (row && coordinate(dimension::data) == 0 &&
                schedule_.rank_of(last_stage(), 0) == pipe_->communicator().rank()) {
                const auto own = net_.logits_behind(weights, *row);
                const auto share_of_words = share();
                for (std::size_t w = 0; w < share_of_words.real; ++w) {
                    weight[share_of_words.first + w] = static_cast<double>(own.data()[w]);
                }
            }
            world_.all_reduce(tutti::view<const double>(weight), tutti::view<double>(weight), tutti::sum{});
            const double largest = *std::max_element(weight.begin(), weight.end());
            double total = 0;
            for (double& w : weight) { total += w = std::exp((w - largest) / 0.8); }
            double left = total * static_cast<double>(random.uniform(static_cast<std::uint64_t>(i)));
            std::size_t chosen = 0;
            while (chosen + 1 < words && left >= weight[chosen]) { left -= weight[chosen++]; }
            text.push_back(static_cast<std::uint16_t>(chosen));
        }
        return {text.begin() + 1, text.end()};
    }

    /// What ranks need to talk to each other in passes is there before the first; of tensor groups rehearsals make it.
    void connect() {
        tutti::comm::connect_all(pipe_->communicator());
        if (attention_) { attention_->connect(); }
        pipe_->communicator().synchronize();
    }
    /// Ranks that have the same parameters have the same values, or it throws. Collective over the world.
    template <class Strategy> void expect_same(Strategy& strategy) {
        net_.for_each_value(strategy, [&](std::size_t i, tutti::view<const T, M> values) {
            if (cut_of(i, o_.model) == cut::whole && group_.size() > 1) {
                group_.communicator().agree(tutti::hash_of(net_.queue(), values), net_.declared(i).name);
            }
            if constexpr (M::host_accessible) {
                if (i == token_table) { ends_.template expect_same<T>(values); }
            }
        });
    }
};

}  // namespace transformer
