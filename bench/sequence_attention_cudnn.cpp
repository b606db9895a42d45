// cuDNN's kernels for sequence_attention.cu, by the C++ compiler: the headers of its frontend take long.
#include <cstddef>  // size_t
#include <memory>   // unique_ptr

#include <tutti/sequence/cudnn_attention.hpp>

namespace bench {

std::unique_ptr<tutti::sequence::fused_attention> cudnn_kernels(bool deterministic, std::size_t workspace) {
    return std::make_unique<tutti::sequence::cudnn_attention>(
        tutti::sequence::cudnn_options{.graphs = 1024, .deterministic = deterministic, .workspace = workspace});
}

}  // namespace bench
