// Causal self-attention by cuDNN, in 16 bits: its interface, free of cuDNN, whose C++ headers take a minute to compile.
// Needs tutti/core/cuda_queue and attention_cudnn.cpp, which is built where cuDNN and its frontend are found.
#pragma once

#include <memory>  // what cuDNN needs

#include <tutti/core/cuda_queue.hpp>  // cuda_queue
#include <tutti/core/element.hpp>     // bfloat16, float16

#include "../matrix.hpp"

namespace transformer::gpu {

/// cuDNN's attention on one queue.
///
/// Semantics    forward leaves the logarithm of each row's sum of exponentials, which backward reads; both as
///              attention.cuh has it. Matrices are whole rows: the stride is the width.
/// Determinism  the same bits in every run on the same kind of device.
/// Cost         a plan is built when a shape is first seen (tenths of a second), with a workspace of its own.
/// Errors       backend_error with cuDNN's text.
class cudnn_attention {
    struct implementation;
    std::unique_ptr<implementation> implementation_;

public:
    explicit cudnn_attention(const tutti::cuda_queue& q);
    cudnn_attention(cudnn_attention&&) noexcept;
    cudnn_attention& operator=(cudnn_attention&&) noexcept;
    ~cudnn_attention();

    /// Does it have a kernel for heads of that width, and sequences of that length?
    [[nodiscard]] static bool takes(const attention_shape& s) {
        return s.head_width % 8 == 0 && s.head_width <= 128 && s.length > 1;
    }

    void forward(const attention_shape& s, const tutti::bfloat16* qkv, tutti::bfloat16* out, float* log_sum_exp);
    void forward(const attention_shape& s, const tutti::float16* qkv, tutti::float16* out, float* log_sum_exp);
    void backward(const attention_shape& s, const tutti::bfloat16* d_out, const tutti::bfloat16* qkv,
                  const tutti::bfloat16* out, const float* log_sum_exp, tutti::bfloat16* d_qkv);
};

}  // namespace transformer::gpu
