// The strategies of all pipelines over device communicators, apart from the trainer: neither is compiled for the other.
#include <tutti/comm/counted.hpp>  // what the trainer trains over
#if TRANSFORMER_WITH_NCCL
#include <tutti/comm/nccl.hpp>  // several GPUs
#endif
#include <tutti/comm/self.hpp>               // one GPU
#include <tutti/compress/buckets.cuh>        // quantize on a GPU
#include <tutti/compress/power_sgd.cuh>      // power_sgd on a GPU
#include <tutti/compress/top_k.cuh>          // top_k on a GPU
#include <tutti/strategy/data_parallel.cuh>  // strategies on a GPU
#include <tutti/strategy/selected_mean.cuh>  // choices of levels on a GPU

#include "../make_strategy.hpp"

namespace transformer {

template <class T> using on_device = any_strategy<T, tutti::cuda_queue>;
using alone = tutti::comm::counted<tutti::comm::self<tutti::cuda_queue>>;
template on_device<float> make_strategy<float>(alone, const options&, tutti::schedule::timeline*);
template on_device<tutti::bfloat16> make_strategy<tutti::bfloat16>(alone, const options&, tutti::schedule::timeline*);
#if TRANSFORMER_WITH_NCCL
using together = tutti::comm::counted<tutti::comm::nccl>;
template on_device<float> make_strategy<float>(together, const options&, tutti::schedule::timeline*);
template on_device<tutti::bfloat16> make_strategy<tutti::bfloat16>(together, const options&,
                                                                   tutti::schedule::timeline*);
#endif

}  // namespace transformer
