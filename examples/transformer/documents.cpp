// The attention of the pipelines of documents over ranks on the CPU, compiled once for the trainer and its tests.
#include <memory>  // result

#include <tutti/comm/counted.hpp>  // what the trainer trains over
#include <tutti/comm/shaped.hpp>   // with a network that the user states
#include <tutti/comm/threads.hpp>  // ranks as threads
#if TRANSFORMER_WITH_MPI
#include <tutti/comm/mpi.hpp>  // ranks as processes
#endif
#include <tutti/sequence/blas_products.hpp>   // the trainer's products
#include <tutti/sequence/host_attention.hpp>  // kernel

#include "make_document_attention.hpp"

namespace transformer {

template <class T, class Comm>
std::unique_ptr<document_attention<T>> make_document_attention(Comm& comm, const options& o,
                                                               tutti::schedule::timeline* trace, int rank, int heads) {
    using kernel = tutti::sequence::host_attention<T, tutti::sequence::blas_products>;
    return make_document_attention_with<kernel>(comm, o, trace, rank, heads);
}

using threads = tutti::comm::counted<tutti::comm::shaped<tutti::comm::threads>>;
template std::unique_ptr<document_attention<float>> make_document_attention<float>(threads&, const options&,
                                                                                   tutti::schedule::timeline*, int,
                                                                                   int);
template std::unique_ptr<document_attention<double>> make_document_attention<double>(threads&, const options&,
                                                                                     tutti::schedule::timeline*, int,
                                                                                     int);
#if TRANSFORMER_WITH_MPI
using mpi = tutti::comm::counted<tutti::comm::shaped<tutti::comm::mpi>>;
template std::unique_ptr<document_attention<float>> make_document_attention<float>(mpi&, const options&,
                                                                                   tutti::schedule::timeline*, int,
                                                                                   int);
template std::unique_ptr<document_attention<double>> make_document_attention<double>(mpi&, const options&,
                                                                                     tutti::schedule::timeline*, int,
                                                                                     int);
#endif

}  // namespace transformer
