// compressed_mean<Compressor>: an exchange that sends gradients compressed, with or without feedback of what that lost.
// Needs strategy/gradient_exchange and compress. Levels are chosen per tensor, and may change between steps.
// Vectors, and tensors whose wire would not be much smaller than themselves, go as they are.
#pragma once

#include <cmath>     // isfinite
#include <concepts>  // copyable, same_as
#include <cstddef>   // size_t
#include <cstdint>   // seeds
#include <optional>  // options that may be off
#include <span>      // segments
#include <string>    // descriptions
#include <vector>    // segments

#include <tutti/comm/communicator.hpp>                      // communicator
#include <tutti/comm/node_groups.hpp>                       // expect_equal_nodes
#include <tutti/comm/topology.hpp>                          // stated network, nodes
#include <tutti/compress/compressor.hpp>                    // segment
#include <tutti/compress/dense.hpp>                         // dense_level
#include <tutti/compress/gain.hpp>                          // whether it pays
#include <tutti/compress/matrix.hpp>                        // which tensors are compressed
#include <tutti/compress/momentum_feedback.hpp>             // momentum_options
#include <tutti/core/element.hpp>                           // dtype_of
#include <tutti/core/error.hpp>                             // usage_error
#include <tutti/core/text.hpp>                              // formatted
#include <tutti/schedule/bucket.hpp>                        // bucket_plan
#include <tutti/schedule/lane.hpp>                          // lane_options
#include <tutti/strategy/detail/compressed_mean_state.hpp>  // what changes
#include <tutti/strategy/detail/describe_compressor.hpp>    // what ranks agree on
#include <tutti/strategy/gradient_exchange.hpp>             // gradient_exchange
#include <tutti/strategy/strategy.hpp>                      // parameters

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
/// Errors       usage_error for levels that it does not have, and for feedback of an unbiased compressor.
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

    template <communicator C, floating_element T>
    using state_type = detail::compressed_mean_state<compressed_mean, C, T>;

    void validate() const {
        if (level < 1) {
            throw usage_error(formatted("compressed mean: level is {}, expected bits, a rank or kept elements in "
                                        "10,000; 1 for schemes without levels",
                                        level));
        }
        if (largest_level != 0 && largest_level < level) {
            throw usage_error(formatted("compressed mean: level {} of at most {}", level, largest_level));
        }
        expect_level(level);
        expect_level(largest());
        if constexpr (requires { compressor.unbiased; }) {
            if (compressor.unbiased && feedback) {
                throw usage_error("compressed mean: what an unbiased compressor leaves would grow from step to step; "
                                  "turn feedback off, or unbiased");
            }
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
        std::string text = formatted(
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
        text +=
            formatted(", {} bytes of 1024 x 1024{}", bytes_of(probe(level)), detail::describe_compressor(compressor));
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
        if (goes_between_nodes() && !detail::goes_by_node<Compressor, C, T>) {
            throw usage_error(formatted("compressed mean: '{}' cannot average inside nodes", comm.name()));
        }
        return state_type<C, T>(*this, comm, segments_of(list, plan), plan);
    }
    /// Errors: usage_error for a level that the compressor does not have.
    void expect_level(int at) const { static_cast<void>(bytes_of(probe(at))); }
    /// The largest level that set_levels may give.
    [[nodiscard]] int largest() const noexcept { return largest_level == 0 ? level : largest_level; }
    /// Are gradients averaged as they are inside nodes?
    [[nodiscard]] bool goes_between_nodes() const { return nodes && nodes->has_two_levels(); }
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
    static constexpr compress::segment probe(int at) { return {0, at, 0, 0, 1024, 1024}; }
    static constexpr bool sends_elements = requires(const compress::segment& s) { Compressor::kept(s); };

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
