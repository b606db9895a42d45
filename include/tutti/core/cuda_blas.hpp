// cuda_blas: a cuBLASLt handle and its workspace, tied to a cuda_queue; checked calls.
// Needs core/cuda_queue and cuBLAS (tutti::cublas); any C++20 compiler, no nvcc. Products are cublasLtMatmul's.
#pragma once

#include <cstddef>      // size_t
#include <memory>       // shared by copies
#include <string_view>  // names of calls
#include <utility>      // move

#include <cublasLt.h>  // cuBLASLt

#include <tutti/core/buffer.hpp>      // workspace
#include <tutti/core/cuda_queue.hpp>  // cuda_queue
#include <tutti/core/error.hpp>       // backend_error
#include <tutti/core/text.hpp>        // formatted

namespace tutti {

/// Throws backend_error, with cuBLAS's name and text, unless `code` is success.
inline void check_cublas(cublasStatus_t code, std::string_view call) {
    if (code == CUBLAS_STATUS_SUCCESS) { return; }
    error_context context;
    context.operation = call;
    context.backend_code = static_cast<int>(code);
    context.backend_text = formatted("{}: {}", cublasLtGetStatusName(code), cublasLtGetStatusString(code));
    throw backend_error(formatted("{}: {} ({})", call, context.backend_text, context.backend_code), context);
}

/// What matrix products on a queue need: the library's handle, and scratch that products on that queue share.
///
/// Semantics    a handle; copies share both. Products given handle(), workspace() and queue().stream() run in the
///              queue's order, one after the other, and so may use the same scratch; work on another queue needs a
///              cuda_blas of its own.
/// Determinism  products whose reduction scheme is none or compute_type give the same bits on the same kind of device.
/// Cost         making one takes milliseconds and the workspace's memory, counted in the queue's account.
/// Errors       backend_error with cuBLAS's name and text.
class cuda_blas {
    struct library {
        cublasLtHandle_t handle = nullptr;
        buffer<std::byte, cuda_queue> workspace;

        library(const cuda_queue& q, std::size_t bytes) : workspace(q, bytes) {
            const detail::on_device scope(q.device());
            check_cublas(cublasLtCreate(&handle), "cublasLtCreate");
        }
        library(const library&) = delete;
        library& operator=(const library&) = delete;
        ~library() { cublasLtDestroy(handle); }
    };
    cuda_queue queue_;
    std::shared_ptr<library> library_;

public:
    /// NVIDIA's advice for Hopper; older devices need less.
    static constexpr std::size_t default_workspace = std::size_t{32} << 20;

    explicit cuda_blas(cuda_queue q, std::size_t workspace_bytes = default_workspace)
        : queue_(std::move(q)), library_(std::make_shared<library>(queue_, workspace_bytes)) {}

    [[nodiscard]] cublasLtHandle_t handle() const noexcept { return library_->handle; }
    [[nodiscard]] view<std::byte, device_memory> workspace() const noexcept { return library_->workspace.view(); }
    [[nodiscard]] const cuda_queue& queue() const noexcept { return queue_; }
};

}  // namespace tutti
