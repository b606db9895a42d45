// Pipelines `packed`, `even-ring` and `zeppelin`: data parallel over documents of all lengths; ranks share their attention.
// Needs sequence/engine, and pipelines/ddp for the gradients.
#pragma once

#include <algorithm>    // min
#include <cstdint>      // tokens
#include <string_view>  // names

#include <tutti/sequence/cost.hpp>                 // attention_cost
#include <tutti/sequence/engine.hpp>               // engine
#include <tutti/sequence/partition/even_ring.hpp>  // even_ring
#include <tutti/sequence/partition/whole.hpp>      // whole
#include <tutti/sequence/partition/zeppelin.hpp>   // zeppelin
#include <tutti/sequence/routed.hpp>               // routed

#include "options.hpp"
#include "pipelines/ddp.hpp"

namespace transformer::pipelines {

namespace sequence = tutti::sequence;

/// A pipeline of documents has an engine of attention, the partition that it places with, and `most_rows`: what a rank
/// may have outside of attention of a step's `tokens`.
struct packed : ddp {
    static constexpr std::string_view name = "packed";
    static constexpr std::string_view summary =
        "documents of --lengths, whole ones packed into ranks; gradients as ddp";
    using partition = sequence::partition::whole;
    template <class Comm, class Kernel>
    using engine = sequence::engine<Comm, partition, sequence::direct_exchange, sequence::in_place, Kernel>;
    [[nodiscard]] static partition make_partition() { return partition(); }
    [[nodiscard]] static std::int64_t most_rows(const options& o, std::int64_t tokens) {
        return std::min(tokens, o.tokens_held());
    }
};
struct even_ring : ddp {
    static constexpr std::string_view name = "even-ring";
    static constexpr std::string_view summary = "the same, every document on a ring over all ranks";
    using partition = sequence::partition::even_ring;
    template <class Comm, class Kernel>
    using engine = sequence::engine<Comm, partition, sequence::direct_exchange, sequence::in_place, Kernel>;
    [[nodiscard]] static partition make_partition() { return partition(); }
    [[nodiscard]] static std::int64_t most_rows(const options& o, std::int64_t tokens) { return tokens / o.ranks + 2; }
};
struct zeppelin : ddp {
    static constexpr std::string_view name = "zeppelin";
    static constexpr std::string_view summary =
        "the same, each document on as many ranks as suits it, tokens even elsewhere";
    using partition = sequence::partition::zeppelin;
    template <class Comm, class Kernel>
    using engine = sequence::engine<Comm, partition, sequence::routed, sequence::remapped, Kernel>;
    /// By squares of lengths: a cost that was measured would differ from run to run, and so would the plans.
    [[nodiscard]] static partition make_partition() {
        sequence::partition::zeppelin_options how;
        how.cost = sequence::attention_cost{};
        return partition(std::move(how));
    }
    [[nodiscard]] static std::int64_t most_rows(const options& o, std::int64_t tokens) { return tokens / o.ranks + 1; }
};

/// What such a pipeline has more than others.
template <class P>
concept of_documents = requires {
    typename P::partition;
};

}  // namespace transformer::pipelines
