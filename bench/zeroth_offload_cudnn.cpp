// cuDNN's kernels for zeroth_offload.cu, by the C++ compiler: the headers of its frontend take long.
#include <memory>  // unique_ptr

#include <tutti/sequence/cudnn_attention.hpp>

namespace tutti::bench_cudnn {

std::unique_ptr<sequence::fused_attention> kernels() { return std::make_unique<sequence::cudnn_attention>(); }

}  // namespace tutti::bench_cudnn
