// make_document_attention's definition, for the files that compile it: documents.cpp and, for GPUs, cuda/documents.cu.
// Needs document_attention.hpp and document_rules.hpp. An engine takes long to compile: one serves all pipelines.
#pragma once

#include <chrono>   // measured attention
#include <cstdint>  // lengths
#include <memory>   // result
#include <span>     // lengths
#include <utility>  // move
#include <vector>   // measured lengths

#include <tutti/comm/topology.hpp>         // machines
#include <tutti/core/buffer.hpp>           // measured attention
#include <tutti/core/elementwise.hpp>      // fill
#include <tutti/sequence/calibration.hpp>  // fitted cost
#include <tutti/sequence/routed.hpp>       // routed
#include <tutti/sequence/token_view.hpp>   // heads

#include "document_attention.hpp"
#include "document_rules.hpp"

namespace transformer {

/// The machines that --nodes and --network state, as the ranks of `comm` see them; without both those of the host names.
template <class Comm> [[nodiscard]] tutti::comm::topology machines_of(Comm& comm, const options& o, int rank) {
    using tutti::comm::topology;
    if (o.nodes == 0 && o.network.empty()) { return topology::discover(comm); }
    const int nodes = o.nodes == 0 ? o.ranks : o.nodes;
    std::vector<int> members;
    for (const auto& record : comm.gather_control({static_cast<std::uint64_t>(rank), 0, 0, 0})) {
        members.push_back(static_cast<int>(record[0]));
    }
    return topology::uniform(nodes, o.ranks / nodes, {},
                             o.network.empty() ? tutti::comm::link{} : stated_link(o.network))
        .subset(members);
}

/// Seconds of forward of one layer, fitted to three lengths.
template <class Kernel>
[[nodiscard]] tutti::sequence::attention_cost measured_attention(const typename Kernel::queue_type& q,
                                                                 tutti::sequence::attention_heads heads) {
    using namespace tutti::sequence;
    using clock = std::chrono::steady_clock;
    using T = typename Kernel::element_type;
    using P = tutti::accumulator_t<T>;
    using Q = typename Kernel::queue_type;
    using M = typename Q::memory_type;
    const std::vector<std::int64_t> lengths =
        Q::executes_inline ? std::vector<std::int64_t>{64, 128, 256} : std::vector<std::int64_t>{512, 2048, 8192};
    const auto most = static_cast<std::size_t>(lengths.back());
    tutti::buffer<T, Q> rows(q, most * heads.query * heads.width);
    tutti::buffer<P, Q> out(q, rows.size()), sums(q, most * heads.query);
    tutti::fill(q, rows.view(), static_cast<T>(0.5f));
    Kernel attention;
    const auto settle = [&] {
        if constexpr (!Q::executes_inline) { q.record().wait_host(tutti::after(tutti::default_timeout())); }
    };
    settle();
    return calibrated("this rank", lengths, 3,
                      [&](std::int64_t length) {
                          const auto count = static_cast<std::size_t>(length);
                          const token_view<const T, M> in(rows.view(), count, heads.query, heads.width);
                          const token_view<P, M> result(out.view(), count, heads.query, heads.width);
                          const auto begin = clock::now();
                          attention.forward(q,
                                            forward_block<T, M>{in, in, in, visibility{mask::causal, 0, 0}, 1, result,
                                                                numbers_by_head(sums.view(), count, heads.query)});
                          settle();
                          return std::chrono::duration<double>(clock::now() - begin).count();
                      })
        .cost;
}

/// The same for kernels of their own: Kernel is one of Comm's queue.
template <class Kernel, class Comm>
[[nodiscard]] std::unique_ptr<document_attention<typename Kernel::element_type>> make_document_attention_with(
    Comm& comm, const options& o, tutti::schedule::timeline* trace, int rank, int heads) {
    using namespace tutti::sequence;
    using shared_engine = engine<Comm, decltype(document_rules::partition), routed, chosen_layout, Kernel>;
    if (!o.shares_attention()) { return nullptr; }
    document_rules how = rules_of(o);
    const auto count = static_cast<std::size_t>(heads);
    const attention_heads own_heads{count, count, static_cast<std::size_t>(o.model.width / o.model.heads)};
    auto machines = machines_of(comm, o, rank);
    Comm own = comm.duplicate("sequence");
    const auto queue = own.queue();
    return std::make_unique<engine_attention<shared_engine>>(
        comm.queue(), queue,
        shared_engine(std::move(own), own_heads,
                      {.partition = std::move(how.partition),
                       .machines = std::move(machines),
                       .capacity = o.tokens_held(),
                       .attention = {.trace = trace, .trace_rank = rank}},
                      {}, {.moves_tokens = how.spreads_rows}),
        how.most_rows, measured_attention<Kernel>);
}

}  // namespace transformer
