// compressed_mean<Compressor>: an exchange that sends gradients compressed, with or without feedback of what that lost.
// Needs strategy/gradient_exchange and compress. Levels are chosen per tensor, and may change between steps.
// Vectors, and tensors whose wire would not be much smaller than themselves, go as they are.
#pragma once

#include <cmath>        // isfinite
#include <concepts>     // copyable, same_as
#include <cstddef>      // size_t
#include <cstdint>      // seeds, steps
#include <memory>       // what work on the lane shares with the strategy
#include <optional>     // residuals
#include <span>         // levels
#include <string>       // descriptions
#include <type_traits>  // decay
#include <utility>      // move
#include <vector>       // segments

#include <tutti/comm/communicator.hpp>           // communicator
#include <tutti/comm/node_groups.hpp>            // split_inside, split_across
#include <tutti/comm/topology.hpp>               // stated network, nodes
#include <tutti/compress/all_reduce.hpp>         // all_reduce, make_state
#include <tutti/compress/compressor.hpp>         // segment
#include <tutti/compress/dense.hpp>              // dense_level
#include <tutti/compress/error_feedback.hpp>     // residuals
#include <tutti/compress/gain.hpp>               // whether it pays
#include <tutti/compress/hierarchical.hpp>       // all_reduce between nodes
#include <tutti/compress/matrix.hpp>             // which tensors are compressed
#include <tutti/compress/momentum_feedback.hpp>  // momentum
#include <tutti/core/buffer.hpp>                 // the step count as memory
#include <tutti/core/detail/detour.hpp>          // between two queues
#include <tutti/core/element.hpp>                // dtype_of
#include <tutti/core/elementwise.hpp>            // fill
#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/run.hpp>                    // fetch
#include <tutti/core/state.hpp>                  // state_entry
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/schedule/bucket.hpp>             // bucket_plan
#include <tutti/schedule/lane.hpp>               // lane_options
#include <tutti/strategy/gradient_exchange.hpp>  // gradient_exchange
#include <tutti/strategy/strategy.hpp>           // parameters

namespace tutti::strategy {

/// What decides whether compressing pays: the same on all ranks.
struct stated_network {
    comm::topology links;
    compress::kernel_rates kernels;
};

/// Sends gradients through a compressor.
///
/// Semantics    a tensor is compressed at `level` if that is worth it (compress::worth_compressing): if it is a matrix
///              whose wire is at most 1/worth of its floats; all others are summed as floats. `worth` is the rule of
///              PowerSGD's authors (2). With a `network`, all tensors of a bucket go as they are if
///              compress::expected_gain finds them no slower so, at the first level: over NVLink that is every bucket.
///              With feedback every rank keeps what its compression lost, a float an element, and adds it to its next
///              gradient. `rescale` keeps that in units of updates when the learning rate changes, for optimizers whose
///              step is proportional to the gradient; the trainer must tell begin() the rate. Where the scale of the
///              loss changes, what a rank keeps is rescaled.
///              With `momentum` a rank keeps momentum, and what it owes as momentum would have it (deep gradient
///              compression), for top_k and threshold over float gradients; the optimizer has none then. Tensors that
///              go as they are follow SGD with momentum. A limit of the norm in step() is of what arrived.
///   nodes      where the ranks are: with several ranks on each of several nodes, gradients are averaged as they are
///              inside nodes, and every rank compresses its share of its node's mean for the ranks of its place on the
///              other nodes (compress/hierarchical). What it owes is of that mean then, in its share. Ranks that are
///              all on one node, or each on a node of its own, work as without.
///              state.set_levels gives each tensor a level of its own, at most `largest_level`, from the next step on.
/// Determinism  as compress::all_reduce; random numbers are functions of (seed, step, rank, tensor, element).
/// Cost         that of compress::all_reduce; its wire instead of 2(n-1)/n * sizeof(T) bytes an element. With `nodes`
///              two communicators more, made by attach().
/// Errors       usage_error for levels that it does not have.
template <std::copyable Compressor> struct compressed_mean {
    Compressor compressor{};
    int level = 0;          ///< of every tensor at first
    int largest_level = 0;  ///< that set_levels may give; 0: `level`
    bool feedback = true;
    bool rescale = false;
    double worth = 2;
    std::uint64_t seed = 0;
    std::optional<compress::momentum_options> momentum{};
    std::optional<stated_network> network{};  ///< of the ranks that average; without one the user has decided
    std::optional<comm::topology> nodes{};    ///< likewise; all of one size

    template <communicator C, floating_element T> class state_type {
        using Q = queue_of<C>;
        using M = memory_of<C>;
        using segments = std::vector<compress::segment>;
        using compressor_state = std::decay_t<decltype(compress::make_state(
            std::declval<const Compressor&>(), std::declval<Q>(), std::declval<compress::layout>()))>;

        struct node_links {
            C inside;  // the ranks of this node
            C across;  // those of this rank's place, on all nodes
        };
        // What work on the lane shares with the strategy. Its address stays when the strategy moves.
        struct shared {
            Compressor compressor;
            compressor_state state;
            compress::residuals<Q> lost;
            std::optional<compress::momentum_feedback<Q>> momentum;  ///< in place of `lost`
            std::optional<node_links> links;

            void all_reduce(C& c, compress::layout all, view<T, M> flat, const compress::draw_key& key) {
                if constexpr (goes_by_node<C, T>) {
                    if (links) {
                        const tutti::detail::detour there(c.queue(), links->inside.queue());
                        compress::all_reduce(links->inside, links->across, compressor, state, all, flat, flat,
                                             lost.view(), key, mean{});
                        return;
                    }
                }
                compress::all_reduce(c, compressor, state, all, flat, flat, lost.view(), key, mean{});
            }
        };
        std::shared_ptr<shared> shared_;
        std::vector<std::shared_ptr<const segments>> of_bucket_;
        std::vector<compress::segment> tensors_;  // of the whole model, by parameter
        schedule::bucket_plan plan_;
        buffer<std::uint64_t, Q> counter_;  // steps_ as memory
        buffer<double, Q> kept_rate_;       // rate_ likewise, if it matters
        buffer<double, Q> kept_scale_;      // scale_ likewise
        std::vector<state_entry<M>> entries_;
        Q queue_;
        std::uint64_t seed_;
        std::uint64_t steps_ = 0;
        std::uint32_t rank_;
        int largest_;
        bool feedback_, rescale_;
        double rate_ = 0, scale_ = 1;

    public:
        state_type(const compressed_mean& own, C& comm, const parameters<T, M>& list, const schedule::bucket_plan& plan)
            : tensors_(own.segments_of(list, plan))
            , plan_(plan)
            , counter_(comm.queue(), 1)
            , kept_rate_(comm.queue(), own.rescale ? 1 : 0)
            , kept_scale_(comm.queue(), 1)
            , queue_(comm.queue())
            , seed_(own.seed)
            , rank_(static_cast<std::uint32_t>(comm.rank()))
            , largest_(own.largest())
            , feedback_(own.feedback)
            , rescale_(own.rescale) {
            const Q& q = queue_;
            segments largest;
            for (compress::segment s : tensors_) {
                if (s.level == compress::dense_level) { continue; }
                s.level = largest_;
                largest.push_back(s);
            }
            const bool kept = feedback_ && !own.momentum;
            shared_ = std::make_shared<shared>(shared{own.compressor,
                                                      compress::make_state(own.compressor, q, largest),
                                                      compress::residuals<Q>(q, kept ? plan.elements : 0),
                                                      {},
                                                      {}});
            if (own.goes_between_nodes()) {
                C inside = comm::split_inside(comm, *own.nodes);
                C across = comm::split_across(comm, *own.nodes);
                shared_->links = node_links{std::move(inside), std::move(across)};
            }
            if (own.momentum) { shared_->momentum.emplace(q, plan.elements, *own.momentum); }
            fill(q, counter_.view(), std::uint64_t{0});
            for (const auto& e : shared_->state.entries()) { entries_.push_back(e); }
            if (kept) {
                for (const auto& e : shared_->lost.entries()) { entries_.push_back(e); }
            }
            if (own.momentum) {
                for (const auto& e : shared_->momentum->entries()) { entries_.push_back(e); }
            }
            entries_.push_back(state_of("exchange/steps", counter_.view(), ownership::replicated));
            if (rescale_) {
                fill(q, kept_rate_.view(), rate_);
                entries_.push_back(state_of("exchange/rate", kept_rate_.view(), ownership::replicated));
            }
            fill(q, kept_scale_.view(), scale_);
            entries_.push_back(state_of("exchange/loss_scale", kept_scale_.view(), ownership::replicated));
            regroup();
        }

        void begin(double rate, double loss_scale) {
            if (rescale_ && std::isnan(rate)) {
                throw usage_error(
                    "compressed mean: rescale needs the learning rate of every step, as in begin({.learning_rate = "
                    "1e-3})");
            }
            if (loss_scale != scale_) {
                const double factor = loss_scale / scale_;
                shared_->momentum ? shared_->momentum->rescale(queue_, factor) : shared_->lost.rescale(factor);
                scale_ = loss_scale;
                fill(queue_, kept_scale_.view(), scale_);
            }
            if (rescale_ && rate > 0) {
                if (rate_ > 0 && rate != rate_) { shared_->lost.rescale(rate_ / rate); }
                rate_ = rate;
                fill(queue_, kept_rate_.view(), rate_);
            }
            ++steps_;
            fill(queue_, counter_.view(), steps_);
        }
        [[nodiscard]] auto average(std::size_t b, view<T, M> flat) const {
            const compress::draw_key key{seed_, static_cast<std::uint32_t>(steps_), rank_};
            return [own = shared_, all = of_bucket_[b], flat, key, first = plan_.buckets[b].offset,
                    size = plan_.buckets[b].size](C& c) {
                if constexpr (std::same_as<T, float>) {
                    if (own->momentum) {
                        own->momentum->add_part(c.queue(), flat.sub(first, size), first);
                        compress::all_reduce(c, own->compressor, own->state, compress::layout(*all),
                                             own->momentum->in(), flat, own->momentum->residual(), key, mean{});
                        own->momentum->sent(c.queue(), compress::layout(*all));
                        return;
                    }
                }
                own->all_reduce(c, compress::layout(*all), flat, key);
            };
        }
        void flush() const noexcept {}
        [[nodiscard]] std::span<const state_entry<M>> entries() const noexcept { return entries_; }
        void restored() {
            shared_->state.restored();
            steps_ = fetch(queue_, view<const std::uint64_t, M>(counter_.view()), steps_);
            if (rescale_) { rate_ = fetch(queue_, view<const double, M>(kept_rate_.view()), rate_); }
            scale_ = fetch(queue_, view<const double, M>(kept_scale_.view()), scale_);
        }

        /// What gradients of the step that has begun are multiplied by.
        [[nodiscard]] double loss_scale() const noexcept { return scale_; }
        /// Steps that have begun.
        [[nodiscard]] std::uint64_t steps() const noexcept { return steps_; }
        /// What this rank owes, flat like the gradients; empty without feedback.
        [[nodiscard]] view<float, M> owed() const noexcept {
            return shared_->momentum ? shared_->momentum->residual() : shared_->lost.view();
        }
        /// By parameter: the whole tensor as it is sent, at its level.
        [[nodiscard]] std::span<const compress::segment> tensors() const noexcept { return tensors_; }
        /// New levels, by parameter, equal on all ranks; between steps. compress::dense_level for tensors that are not
        /// compressed, and for no other. Errors: usage_error naming the parameter.
        void set_levels(std::span<const int> levels) {
            if (levels.size() != tensors_.size()) {
                throw usage_error(formatted("set_levels: {} levels for {} tensors", levels.size(), tensors_.size()));
            }
            for (std::size_t i = 0; i < levels.size(); ++i) {
                const bool dense = tensors_[i].level == compress::dense_level;
                if (dense ? levels[i] != compress::dense_level : levels[i] < 1 || levels[i] > largest_) {
                    throw usage_error(
                        formatted("set_levels: level {} for tensor {}, which {}", levels[i], i,
                                  dense ? std::string("is not compressed") : formatted("has 1 to {}", largest_)));
                }
            }
            for (std::size_t i = 0; i < levels.size(); ++i) { tensors_[i].level = levels[i]; }
            regroup();
        }

    private:
        void regroup() {
            of_bucket_.clear();
            for (const schedule::bucket& b : plan_.buckets) {
                const auto first = tensors_.begin() + static_cast<std::ptrdiff_t>(b.first);
                of_bucket_.push_back(
                    std::make_shared<const segments>(first, first + static_cast<std::ptrdiff_t>(b.count)));
            }
        }
    };

    void validate() const {
        if (level < 1) {
            throw usage_error(formatted("compressed mean: level is {}, expected bits, a rank or kept elements in "
                                        "10,000; 1 for schemes without levels",
                                        level));
        }
        if (largest_level != 0 && largest_level < level) {
            throw usage_error(formatted("compressed mean: level {} of at most {}", level, largest_level));
        }
        if (!(worth >= 1) || !std::isfinite(worth)) {
            throw usage_error(formatted("compressed mean: worth is {}, expected a number of 1 or more", worth));
        }
        if (momentum) {
            momentum->validate();
            if (!sends_elements) {
                throw usage_error(
                    "compressed mean: momentum needs top_k or threshold, which send elements as they are");
            }
            if (!feedback || rescale) {
                throw usage_error("compressed mean: with momentum, what is lost is always kept and never rescaled");
            }
        }
        if (rescale && !feedback) {
            throw usage_error("compressed mean: rescale is of what feedback keeps, which is off");
        }
        if (nodes) { comm::expect_equal_nodes(*nodes, "compressed mean"); }
        if (goes_between_nodes() && momentum) {
            throw usage_error("compressed mean: momentum is kept of what single ranks send, with `nodes` nodes send");
        }
        if (goes_between_nodes() && network) {
            throw usage_error(
                "compressed mean: `network` judges compression between all ranks; leave out it or `nodes`");
        }
        if (network) {  // refuses rates
            static_cast<void>(compress::expected_gain(compressor, {}, 4, feedback, network->links, network->kernels));
        }
    }
    [[nodiscard]] std::string describe() const {
        const std::string text = formatted(
            "mean compressed at level {} of {}{}{}{}, if {} times smaller{}, seed {}", level, largest(),
            feedback ? ", with feedback" : "", rescale ? " in units of updates" : "",
            momentum ? formatted(", momentum {}{}{}", momentum->momentum, momentum->nesterov ? ", Nesterov's" : "",
                                 momentum->masking ? ", masked" : "")
                     : std::string(),
            worth,
            network ? formatted(" and faster over {} nodes of {} ranks: {} s and {} B/s, {} s and {} B/s, "
                                "kernels {} s and {} B/s",
                                network->links.nodes(), network->links.ranks(), network->links.inside().latency_seconds,
                                network->links.inside().bytes_per_second, network->links.between().latency_seconds,
                                network->links.between().bytes_per_second, network->kernels.launch_seconds,
                                network->kernels.bytes_per_second)
                    : std::string(),
            seed);
        return goes_between_nodes() ? text + ", between nodes" + comm::list_of_nodes(*nodes) : text;
    }
    template <communicator C, floating_element T>
    [[nodiscard]] state_type<C, T> make_state(C& comm, const parameters<T, memory_of<C>>& list,
                                              const schedule::bucket_plan& plan, const schedule::lane_options&) const {
        if (momentum && !std::same_as<T, float>) {
            throw usage_error(formatted("compressed mean: momentum is kept of gradients of float, these are {}",
                                        name_of(dtype_of<T>)));
        }
        if (network && network->links.ranks() != comm.size()) {
            throw usage_error(formatted("compressed mean: the stated network has {} ranks, '{}' has {}",
                                        network->links.ranks(), comm.name(), comm.size()));
        }
        if (nodes) { comm::expect_nodes_of(comm, *nodes, "compressed mean"); }
        if (goes_between_nodes() && !goes_by_node<C, T>) {
            throw usage_error(formatted("compressed mean: '{}' cannot average inside nodes", comm.name()));
        }
        return state_type<C, T>(*this, comm, list, plan);
    }
    /// Of the wire of a whole tensor at its level.
    [[nodiscard]] std::size_t bytes_of(const compress::segment& s) const {
        if constexpr (requires { compressor.wire_bytes(s); }) {
            return compressor.wire_bytes(s);
        } else {
            std::size_t floats = 0;
            for (int round = 0; round < Compressor::rounds; ++round) { floats += compressor.wire_count(s, round); }
            return 4 * floats;
        }
    }

private:
    static constexpr bool sends_elements = requires(const compress::segment& s) { Compressor::kept(s); };

    template <class C, class T>
    static constexpr bool goes_by_node =
        compress::reducible_by<Compressor, C, T>&& comm::can_reduce_scatter<C, T, mean>&& comm::can_all_gather<C, T>;

    [[nodiscard]] int largest() const noexcept { return largest_level == 0 ? level : largest_level; }
    [[nodiscard]] bool goes_between_nodes() const { return nodes && nodes->has_two_levels(); }

    static void leave_as_it_is(compress::segment& s) noexcept {
        s.level = compress::dense_level;
        s.rows = s.size();
        s.cols = 1;
    }
    /// Whole tensors, those worth it at the first level.
    template <class T, memory M>
    [[nodiscard]] std::vector<compress::segment> segments_of(const parameters<T, M>& list,
                                                             const schedule::bucket_plan& plan) const {
        std::vector<compress::segment> all;
        for (std::size_t i = 0; i < list.size(); ++i) {
            const std::optional<compress::segment> matrix = compress::matrix_of(list[i].shape);
            compress::segment s = matrix.value_or(compress::segment{0, 0, 0, 0, list[i].value.size(), 1});
            s.tensor = static_cast<std::uint32_t>(i);
            s.level = level;
            s.offset = plan.offsets[i];
            const auto bytes = [this](const compress::segment& g) { return bytes_of(g); };
            if (!compress::worth_compressing(list[i].shape, s, bytes, worth)) { leave_as_it_is(s); }
            all.push_back(s);
        }
        for (const schedule::bucket& b : plan.buckets) {
            const std::span<compress::segment> own(all.data() + b.first, b.count);
            if (!network ||
                compress::expected_gain(compressor, own, sizeof(T), feedback, network->links, network->kernels)
                    .worth_it()) {
                continue;
            }
            for (compress::segment& s : own) { leave_as_it_is(s); }
        }
        return all;
    }
};

}  // namespace tutti::strategy
