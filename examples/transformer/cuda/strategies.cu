// The strategies of all pipelines over device communicators, apart from the trainer: neither is compiled for the other.
#include <tutti/comm/counted.hpp>  // what the trainer trains over
#if TRANSFORMER_WITH_NCCL
#include <tutti/comm/nccl.hpp>  // any number of GPUs
#else
#include <tutti/comm/self.hpp>  // one GPU
#endif
#include <tutti/compress/buckets.cuh>        // quantize on a GPU
#include <tutti/compress/power_sgd.cuh>      // power_sgd on a GPU
#include <tutti/compress/top_k.cuh>          // top_k on a GPU
#include <tutti/strategy/data_parallel.cuh>  // strategies on a GPU
#include <tutti/strategy/local_update.cuh>   // rounds on a GPU
#include <tutti/strategy/selected_mean.cuh>  // choices of levels on a GPU
#include <tutti/strategy/zero.cuh>           // shards on a GPU

#include "../make_strategy.hpp"

namespace transformer {

#if TRANSFORMER_WITH_NCCL
using gpus = tutti::comm::counted<tutti::comm::nccl>;
#else
using gpus = tutti::comm::counted<tutti::comm::self<tutti::cuda_queue>>;
#endif
template <class T> using on_device = any_strategy<T, tutti::cuda_queue>;
template on_device<float> make_strategy<float>(gpus, const options&, tutti::schedule::timeline*);
template on_device<float> make_strategy_of_parts<float>(gpus, const options&, tutti::schedule::timeline*, int);
template on_device<tutti::bfloat16> make_strategy<tutti::bfloat16>(gpus, const options&, tutti::schedule::timeline*);
template on_device<tutti::bfloat16> make_strategy_of_parts<tutti::bfloat16>(gpus, const options&,
                                                                            tutti::schedule::timeline*, int);

}  // namespace transformer
