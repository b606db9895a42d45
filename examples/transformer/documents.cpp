// The attention of the pipelines of documents over ranks on the CPU, compiled once for the trainer and its tests.
#include <chrono>   // measured attention
#include <memory>   // result
#include <utility>  // move
#include <vector>   // measured attention

#include <tutti/comm/counted.hpp>   // what the trainer trains over
#include <tutti/comm/shaped.hpp>    // with a network that the user states
#include <tutti/comm/threads.hpp>   // ranks as threads
#include <tutti/comm/topology.hpp>  // machines
#if TRANSFORMER_WITH_MPI
#include <tutti/comm/mpi.hpp>  // ranks as processes
#endif
#include <tutti/sequence/blas_products.hpp>   // the trainer's products
#include <tutti/sequence/calibration.hpp>     // fitted cost
#include <tutti/sequence/host_attention.hpp>  // kernel

#include "document_attention.hpp"
#include "pipelines.hpp"

namespace transformer {

namespace {

template <class T> using kernel = tutti::sequence::host_attention<T, tutti::sequence::blas_products>;

tutti::sequence::attention_heads heads_of(const configuration& c) {
    const auto heads = static_cast<std::size_t>(c.heads);
    return {heads, heads, static_cast<std::size_t>(c.width) / heads};
}

/// The machines that --nodes and --network state; without both those of the host names.
template <class Comm> tutti::comm::topology machines_of(Comm& comm, const options& o) {
    using tutti::comm::topology;
    if (o.nodes == 0 && o.network.empty()) { return topology::discover(comm); }
    const int nodes = o.nodes == 0 ? o.ranks : o.nodes;
    return topology::uniform(nodes, o.ranks / nodes, {},
                             o.network.empty() ? tutti::comm::link{} : stated_link(o.network));
}

}  // namespace

template <class T, class Comm>
std::unique_ptr<document_attention<T>> make_document_attention(Comm& comm, const options& o,
                                                               tutti::schedule::timeline* trace) {
    std::unique_ptr<document_attention<T>> made;
    pipelines_known::with(o.pipeline, [&]<class P>(std::type_identity<P>) {
        if constexpr (pipelines::of_documents<P>) {
            using engine = typename P::template engine<Comm, kernel<T>>;
            auto machines = machines_of(comm, o);
            made = std::make_unique<engine_attention<engine>>(engine(comm.duplicate("sequence"), heads_of(o.model),
                                                                     {.partition = P::make_partition(),
                                                                      .machines = std::move(machines),
                                                                      .capacity = o.tokens_held(),
                                                                      .attention = {.trace = trace}}),
                                                              o.model.layers, P::most_rows(o, o.tokens_per_step()));
        }
    });
    return made;
}

template <class T> tutti::sequence::attention_cost measured_attention(const configuration& c) {
    using namespace tutti::sequence;
    using clock = std::chrono::steady_clock;
    const attention_heads heads = heads_of(c);
    const std::int64_t lengths[] = {64, 128, 256};
    kernel<T> attention;
    return calibrated("this rank", lengths, 3,
                      [&](std::int64_t length) {
                          const auto count = static_cast<std::size_t>(length);
                          std::vector<T> rows(count * heads.query * heads.width, T{0.5}), out(rows.size());
                          std::vector<T> sums(count * heads.query);
                          const token_view<const T> in(tutti::view<const T>(rows), count, heads.query, heads.width);
                          const auto begin = clock::now();
                          attention.forward({}, {in,
                                                 in,
                                                 in,
                                                 {mask::causal, 0, 0},
                                                 1,
                                                 token_view<T>(tutti::view<T>(out), count, heads.query, heads.width),
                                                 numbers_by_head(tutti::view<T>(sums), count, heads.query)});
                          return std::chrono::duration<double>(clock::now() - begin).count();
                      })
        .cost;
}

template tutti::sequence::attention_cost measured_attention<float>(const configuration&);
template tutti::sequence::attention_cost measured_attention<double>(const configuration&);

using threads = tutti::comm::counted<tutti::comm::shaped<tutti::comm::threads>>;
template std::unique_ptr<document_attention<float>> make_document_attention<float>(threads&, const options&,
                                                                                   tutti::schedule::timeline*);
template std::unique_ptr<document_attention<double>> make_document_attention<double>(threads&, const options&,
                                                                                     tutti::schedule::timeline*);
#if TRANSFORMER_WITH_MPI
using mpi = tutti::comm::counted<tutti::comm::shaped<tutti::comm::mpi>>;
template std::unique_ptr<document_attention<float>> make_document_attention<float>(mpi&, const options&,
                                                                                   tutti::schedule::timeline*);
template std::unique_ptr<document_attention<double>> make_document_attention<double>(mpi&, const options&,
                                                                                     tutti::schedule::timeline*);
#endif

}  // namespace transformer
