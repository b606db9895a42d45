// The attention of the pipelines of documents over ranks on the CPU, compiled once for the trainer and its tests.
#include <memory>  // result

#include <tutti/comm/counted.hpp>             // what the trainer trains over
#include <tutti/comm/shaped.hpp>              // with a network that the user states
#include <tutti/sequence/blas_products.hpp>   // the trainer's products
#include <tutti/sequence/host_attention.hpp>  // kernel

#include "any_ranks.hpp"
#include "make_document_attention.hpp"

namespace transformer {

template <class T, class Comm>
std::unique_ptr<document_attention<T>> make_document_attention(Comm& comm, const options& o,
                                                               tutti::schedule::timeline* trace, int rank, int heads) {
    using kernel = tutti::sequence::host_attention<T, tutti::sequence::blas_products>;
    return make_document_attention_with<kernel>(comm, o, trace, rank, heads);
}

using ranks = tutti::comm::counted<tutti::comm::shaped<any_ranks>>;
template std::unique_ptr<document_attention<float>> make_document_attention<float>(ranks&, const options&,
                                                                                   tutti::schedule::timeline*, int,
                                                                                   int);
template std::unique_ptr<document_attention<double>> make_document_attention<double>(ranks&, const options&,
                                                                                     tutti::schedule::timeline*, int,
                                                                                     int);

}  // namespace transformer
