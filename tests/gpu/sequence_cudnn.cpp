// cuDNN's kernels for sequence.cu, by the C++ compiler: the headers of its frontend take long.
#include <memory>  // unique_ptr

#include <tutti/sequence/cudnn_attention.hpp>  // under test

namespace tutti::test {

std::unique_ptr<sequence::fused_attention> cudnn_kernels(std::size_t graphs, std::size_t workspace,
                                                         bool deterministic) {
    return std::make_unique<sequence::cudnn_attention>(
        sequence::cudnn_options{.graphs = graphs, .deterministic = deterministic, .workspace = workspace});
}

}  // namespace tutti::test
