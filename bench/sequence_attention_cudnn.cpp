// cuDNN's kernels for sequence_attention.cu, by the C++ compiler: the headers of its frontend take long.
#include <memory>  // unique_ptr

#include <tutti/sequence/cudnn_attention.hpp>

namespace bench {

std::unique_ptr<tutti::sequence::fused_attention> cudnn_kernels(bool deterministic) {
    return std::make_unique<tutti::sequence::cudnn_attention>(
        tutti::sequence::cudnn_options{.deterministic = deterministic});
}

}  // namespace bench
