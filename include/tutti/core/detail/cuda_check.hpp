// cuda_check: CUDA's codes as exceptions.
// Needs core/error and the CUDA runtime.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // pool attributes
#include <string_view>  // names of calls

#include <cuda_runtime_api.h>  // CUDA runtime

#include <tutti/core/error.hpp>  // backend_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::detail {

[[noreturn]] inline void raise_cuda(cudaError_t code, std::string_view call) {
    cudaGetLastError();  // an error that is not sticky would be reported again by the next check
    error_context context;
    context.operation = call;
    context.backend_code = static_cast<int>(code);
    context.backend_text = formatted("{}: {}", cudaGetErrorName(code), cudaGetErrorString(code));
    throw backend_error(formatted("{}: {} ({})", call, context.backend_text, context.backend_code), context);
}
/// Throws backend_error unless `code` is success.
inline void check_cuda(cudaError_t code, std::string_view call) {
    if (code != cudaSuccess) { raise_cuda(code, call); }
}

/// Throws memory_error. `held`: bytes that the caller's queues have on the current device, which is the pool's. What the
/// pool has and nobody uses is free: what could not be had as a whole stays there in part.
[[noreturn]] inline void raise_no_room(std::size_t bytes, int device, std::size_t held, cudaMemPool_t pool,
                                       std::string_view call) {
    std::size_t free = 0, total = 0;
    std::uint64_t reserved = 0, used = 0;
    const bool known = cudaMemGetInfo(&free, &total) == cudaSuccess &&
                       cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved) == cudaSuccess &&
                       cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used) == cudaSuccess;
    free += reserved - used;
    cudaGetLastError();  // neither is to be reported again by the next check
    constexpr double gib = std::size_t{1} << 30;
    const auto in_gib = [](std::size_t n) { return static_cast<double>(n) / gib; };
    error_context context;
    context.operation = call;
    context.backend_code = static_cast<int>(cudaErrorMemoryAllocation);
    context.backend_text =
        formatted("{}: {}", cudaGetErrorName(cudaErrorMemoryAllocation), cudaGetErrorString(cudaErrorMemoryAllocation));
    throw memory_error(formatted("{}: device {} has no room for {:.3g} GiB: {:.4g} GiB are held here{} ({})", call,
                                 device, in_gib(bytes), in_gib(held),
                                 known ? formatted(", {:.4g} of {:.4g} GiB are free", in_gib(free), in_gib(total)) : "",
                                 context.backend_text),
                       context);
}

}  // namespace tutti::detail
