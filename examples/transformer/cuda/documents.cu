// The attention of the pipelines of documents over GPUs, apart from the trainer.
#include <memory>  // result

#include <tutti/comm/counted.hpp>  // what the trainer trains over
#if TRANSFORMER_WITH_NCCL
#include <tutti/comm/nccl.hpp>  // any number of GPUs
#else
#include <tutti/comm/self.hpp>  // one GPU
#endif
#include <tutti/core/cuda_run.cuh>              // fill
#include <tutti/sequence/cuda_attention.cuh>    // kernel
#include <tutti/sequence/token_operations.cuh>  // operations on rows

#include "../make_document_attention.hpp"

namespace transformer {

template <class T, class Comm>
std::unique_ptr<document_attention<T>> make_document_attention(Comm& comm, const options& o,
                                                               tutti::schedule::timeline* trace, int rank, int heads) {
    using kernel = typename tutti::sequence::default_attention<tutti::cuda_queue>::template of<T>;
    return make_document_attention_with<kernel>(comm, o, trace, rank, heads);
}

#if TRANSFORMER_WITH_NCCL
using gpus = tutti::comm::counted<tutti::comm::nccl>;
#else
using gpus = tutti::comm::counted<tutti::comm::self<tutti::cuda_queue>>;
#endif
template std::unique_ptr<document_attention<float>> make_document_attention<float>(gpus&, const options&,
                                                                                   tutti::schedule::timeline*, int,
                                                                                   int);
template std::unique_ptr<document_attention<tutti::bfloat16>> make_document_attention<tutti::bfloat16>(
    gpus&, const options&, tutti::schedule::timeline*, int, int);

}  // namespace transformer
