// The run of one rank that has a part of the model: of each layer, of the layers, or both. Pipelines `tp`, `pp`, `3d`.
// Needs stages.hpp, parallel_math.hpp and train.hpp's parts. All ranks call train_in_parts() with the same options, text.
#pragma once

#include <algorithm>   // max, min
#include <array>       // messages
#include <chrono>      // step times
#include <cmath>       // exp, pow
#include <cstdint>     // tokens
#include <functional>  // passes
#include <memory>      // ledgers, attention
#include <numeric>     // accumulate, reduce
#include <optional>    // weights
#include <span>        // gradients
#include <stdexcept>   // a run that diverged
#include <string>      // names
#include <utility>     // move
#include <vector>      // micro-batches

#include <fmt/format.h>                        // messages
#include <tutti/comm/counted.hpp>              // bytes on the wire
#include <tutti/core/elementwise.hpp>          // fill
#include <tutti/core/partition.hpp>            // heads
#include <tutti/optimize/learning_rate.hpp>    // schedule
#include <tutti/parallel/gradient_norm.hpp>    // model_norm
#include <tutti/parallel/mesh.hpp>             // who does what
#include <tutti/parallel/pipeline.hpp>         // pipeline
#include <tutti/parallel/pipeline_replay.hpp>  // bubbles
#include <tutti/parallel/tied_weights.hpp>     // both ends, copies
#include <tutti/schedule/span.hpp>             // spans of the trace
#include <tutti/schedule/timeline.hpp>         // trace

#include "any_strategy.hpp"
#include "checkpoints.hpp"
#include "data.hpp"
#include "device.hpp"
#include "document_attention.hpp"
#include "masters.hpp"
#include "micro_batches.hpp"
#include "parallel_math.hpp"
#include "parallel_run.hpp"
#include "progress.hpp"
#include "stages.hpp"
#include "train.hpp"
#include "weights.hpp"

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
    // Rows that this rank has of every micro-batch.
    [[nodiscard]] batch zeros() const {
        const auto count = static_cast<std::size_t>(o_.micro_batch),
                   length = static_cast<std::size_t>(o_.model.context);
        const std::vector<std::uint16_t> text(count * length + 1);
        batch b;
        rows_.take(b, text, 0, count, length);
        return b;
    }
    [[nodiscard]] int last_stage() const { return schedule_.stages() - 1; }
    template <class U>
    [[nodiscard]] std::vector<U> part_of_file(const weights_file& file, const std::vector<declaration>& whole,
                                              std::size_t i) const {
        std::vector<U> all(whole[i].size()), own(net_.declared(i).size());
        file.read(i, tutti::view<U>(all));
        for_each_run(i, o_.model, net_.part(), whole[i], [&](std::size_t from, std::size_t to, std::size_t n) {
            std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(from), n,
                        own.begin() + static_cast<std::ptrdiff_t>(to));
        });
        return own;
    }

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
        , group_(along(device, {dimension::tensor}))
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
        const std::size_t border = zeros().in.size() * static_cast<std::size_t>(o.model.width);
        pipe_.emplace(std::move(along_pipeline_), schedule_,
                      tutti::parallel::pipeline_options{
                          .elements = {border}, .recompute = o.recompute == static_cast<int>(recompute::stages)});
    }

    [[nodiscard]] const tutti::parallel::mesh& grid() const { return mesh_; }
    [[nodiscard]] const tutti::parallel::pipeline_schedule& schedule() const { return schedule_; }
    [[nodiscard]] stages<math_type>& net() { return net_; }
    [[nodiscard]] const micro_batch_rows<T>& rows() const { return rows_; }
    template <class Strategy> void rehearse(Strategy& strategy, bool alone) { net_.rehearse(strategy, zeros(), alone); }
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

    void load(const std::string& path) {
        const weights_file file(path, o_.model);
        const auto whole = whole_model();
        for (const std::size_t i : numbers_) {
            put<T>(net_.queue(), part_of_file<T>(file, whole, i), net_.parameters()[net_.place_of(i)].value);
        }
    }

    /// The strategy is attached; its masters become the file's weights, all bits of them.
    template <class Strategy> void load_masters(const std::string& path, Strategy& strategy) {
        using R = tutti::master_t<T>;
        const weights_file file(path, o_.model);
        const auto whole = whole_model();
        const auto state = strategy.state();
        for (const std::size_t i : numbers_) {
            const auto e = detail::entry_of<R, M>(state, net_.declared(i).name + "/value");
            const tutti::view<R, M> own = detail::elements_of<R, M>(e);
            const std::vector<R> part = part_of_file<R>(file, whole, i);
            const auto first = part.begin() + static_cast<std::ptrdiff_t>(e.offset);
            put<R>(net_.queue(), std::vector<R>(first, first + static_cast<std::ptrdiff_t>(own.size())), own);
        }
        strategy.restored();
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

    /// All micro-batches forward and backward. Gradients are this replica's, complete and announced.
    template <class Strategy> void run(Strategy& strategy, const std::vector<batch>& micro_batches, real scale) {
        net_.begin(micro_batches, scale);
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
            if (net_.is_tied(*i)) { strategy.gradient_ready(net_.place_of(*i)); }
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
        const std::size_t count = b.in.size() * static_cast<std::size_t>(o_.model.width);
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

    /// As evaluate() in train.hpp; replicas share the windows. Collective over the world.
    template <class Strategy> [[nodiscard]] double evaluate(Strategy& weights, tokens text) {
        const auto length = static_cast<std::size_t>(o_.model.context);
        const std::size_t scored = text.size() - 1, windows = scored / length;
        const auto at_once = static_cast<std::size_t>(o_.micro_batch), replicas = static_cast<std::size_t>(o_.dp);
        const auto replica = static_cast<std::size_t>(coordinate(dimension::data));
        double losses[1] = {};
        batch b;
        for (std::size_t first = replica * at_once; first < windows; first += replicas * at_once) {
            rows_.take(b, text, first * length, std::min(at_once, windows - first), length);
            losses[0] += score(weights, b, o_.model.context);
        }
        if (const std::size_t rest = scored % length; rest != 0 && replica == 0) {
            rows_.take(b, text, windows * length, 1, rest);
            losses[0] += score(weights, b, static_cast<int>(rest));
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

    /// Parameter i of the whole model as the strategy's masters have it, on rank 0 of the world; empty elsewhere.
    /// Collective over the world.
    template <class Strategy> [[nodiscard]] auto gathered(Strategy& strategy, std::size_t i) {
        using R = tutti::master_t<T>;
        const auto whole = whole_model();
        const bool has = net_.place_of(i) != net_.nowhere;
        tutti::view<const R, M> own;
        std::size_t offset = 0;
        if (has) {
            const auto state = strategy.state();
            const auto e = detail::entry_of<R, M>(state, net_.declared(i).name + "/value");
            own = detail::elements_of<R, M>(e);
            offset = e.offset;
        }
        // Of what several ranks have the first one sends it.
        const auto tensor = static_cast<std::uint64_t>(group_.rank());
        const auto pieces = world_.gather_control({offset, own.size(), tensor, has ? 1u : 0u});
        std::vector<std::size_t> counts;
        for (auto piece = pieces.begin(); piece != pieces.end(); ++piece) {
            counts.push_back(std::find(pieces.begin(), piece, *piece) == piece ? (*piece)[1] : 0);
        }
        std::vector<R> mine;
        if (counts[static_cast<std::size_t>(world_.rank())] != 0) {
            const auto values = on_host<R>(net_.queue(), own);
            mine.assign(values.begin(), values.end());
        }
        std::vector<R> sent(std::reduce(counts.begin(), counts.end()));
        world_.all_gather_v(tutti::view<const R>(mine), tutti::view<R>(sent), counts);
        std::vector<R> all;
        if (world_.rank() != 0) { return all; }
        all.resize(whole[i].size());
        std::vector<tensor_part> whose(static_cast<std::size_t>(o_.tp), net_.part());
        std::vector<std::vector<R>> parts;
        for (int t = 0; t < o_.tp; ++t) {
            whose[static_cast<std::size_t>(t)].rank = t;
            parts.emplace_back(parameters_of(o_.model, whose[static_cast<std::size_t>(t)])[i].size());
        }
        auto from = sent.begin();
        for (std::size_t r = 0; r < counts.size(); ++r) {
            auto& part = parts[static_cast<std::size_t>(pieces[r][2])];
            std::copy_n(from, counts[r], part.begin() + static_cast<std::ptrdiff_t>(pieces[r][0]));
            from += static_cast<std::ptrdiff_t>(counts[r]);
        }
        for (std::size_t t = 0; t < (cut_of(i, o_.model) == cut::whole ? 1 : parts.size()); ++t) {
            for_each_run(i, o_.model, whose[t], whole[i], [&](std::size_t first, std::size_t at_part, std::size_t n) {
                std::copy_n(parts[t].begin() + static_cast<std::ptrdiff_t>(at_part), n,
                            all.begin() + static_cast<std::ptrdiff_t>(first));
            });
        }
        return all;
    }
    /// One element to and from every rank of the pipeline, so that connections are there before passes are under way.
    void connect() {
        Comm& comm = pipe_->communicator();
        const auto ranks = static_cast<std::size_t>(comm.size());
        const tutti::buffer<T, Q> out(net_.queue(), 1), in(net_.queue(), ranks);
        tutti::fill(net_.queue(), out.view(), static_cast<T>(0.0f));
        std::vector<tutti::comm::transfer<M>> all;
        for (int other = 0; other < comm.size(); ++other) {
            if (other == comm.rank()) { continue; }
            all.push_back(tutti::comm::send_to(other, tutti::view<const T, M>(out.view())));
            all.push_back(tutti::comm::receive_from(other, in.view().sub(static_cast<std::size_t>(other), 1)));
        }
        if (!all.empty()) { comm.exchange(all); }
        comm.synchronize();
    }
    /// Ranks that have the same parameters have the same values, or it throws. Collective over the world.
    void expect_same() {
        for (const std::size_t i : numbers_) {
            const tutti::view<const T, M> values = net_.parameters()[net_.place_of(i)].value;
            if (cut_of(i, o_.model) == cut::whole && group_.size() > 1) {
                group_.communicator().agree(net_.hash_of(values), net_.declared(i).name);
            }
            if constexpr (M::host_accessible) {
                if (i == token_table) { ends_.template expect_same<T>(values); }
            }
        }
    }
};

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
    if (!o.load.empty()) { rank.load(o.load); }
    strategy.attach(net.parameters());
    if constexpr (has_masters<T>) {
        if (!o.load.empty()) { rank.load_masters(o.load, strategy); }
    }
    rank.find_owned(strategy);
    rank.rehearse(strategy, true);
    world.barrier();  // before any device waits for another
    rank.rehearse(strategy, false);
    rank.connect();

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
    }
    rank.expect_same();
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
    net.time_passes_by([&](const char* name, const std::function<void()>& pass) {
        const auto begin = clock::now();
        const scoped_span span(&trace, track, name, queue);
        pass();
        passing += clock::now() - begin;
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
        strategy.begin({0, 1, now});
        {
            const auto running = clock::now();
            passing = {};
            rank.run(strategy, micro_batches, static_cast<typename rank_type::real>(of_loss));
            waiting += clock::now() - running - passing + net.math().take_adding();
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
        shown.step(step + 1, loss[0], step_seconds.back(), [&] { return trace.exposed(world.rank()); });
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
    double exposed = 0;
    const auto steps_traced = trace.steps(world.rank());
    for (const auto& step : steps_traced) { exposed += step.exposed; }
    if (Q::executes_inline) { exposed += std::chrono::duration<double>(waiting).count(); }

    strategy.finish();
    rank.expect_same();
    // A hash of all parts, in the order of ranks.
    std::vector<std::uint64_t> hashes;
    for (const auto& record : world.gather_control({net.hash(), 0, 0, 0})) { hashes.push_back(record[0]); }
    r.parameter_hash = tutti::hash_bytes(tutti::as_bytes(tutti::view<const std::uint64_t>(hashes)));
    if (!o.save.empty()) {
        const auto whole = rank.whole_model();
        if (world.rank() == 0) {
            write_weights(o.save, whole, [&](std::size_t i) { return rank.gathered(strategy, i); });
        } else {
            for (std::size_t i = 0; i < whole.size(); ++i) { static_cast<void>(rank.gathered(strategy, i)); }
        }
    }
    published<T, M> weights{net.parameters()};
    r.validation.emplace_back(last_step, rank.evaluate(weights, text.validation()));
    if (!o.quiet) {
        r.sample =
            o.token_file.empty() ? rank.generate(weights, '\n', 400) : rank.generate(weights, gpt2_end_of_text, 64);
    }

    for (std::size_t done = 0; done < losses.size(); ++done) {
        r.training.emplace_back(first_step + static_cast<int>(done) + 1, losses[done]);
    }
    detail::tell_seconds(r, world, step_seconds, exposed);
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
    const std::size_t peak = detail::peak_of(queue.account(), net.account());
    for (const auto& record : world.gather_control({peak, 0, 0, 0})) {
        r.peak_bytes = std::max<std::uint64_t>(r.peak_bytes, record[0]);
    }
    r.trace = tutti::schedule::timeline::document(
        detail::gather_texts(world, trace.events(detail::since_last(steps_traced, origin))));
    return r;
}

}  // namespace transformer
