// cuda_page_locked: small pieces of page-locked memory, kept by the process when they are given back.
// Needs core/detail/cuda_check; pinned_queue and streams take from it.
// To free page-locked memory CUDA waits for all devices of the process: also for one that waits for the thread that frees.
#pragma once

#include <array>      // pieces by size
#include <bit>        // sizes
#include <cstddef>    // size_t
#include <exception>  // one that passes; no memory to keep a piece
#include <mutex>      // any thread
#include <vector>     // pieces

#include <cuda_runtime_api.h>  // CUDA runtime

#include <tutti/core/detail/cuda_check.hpp>  // check_cuda

namespace tutti::detail {

/// Pieces of 64 bytes to 64 KiB, in powers of 2, which all devices reach.
///
/// Semantics  what take() gives has at least so many bytes, with unspecified contents. Larger pieces are CUDA's own. The
///            next who asks may write at once what was given back: its copies have ended. Where an exception passes,
///            nobody may have waited for them, and a small piece is left behind.
/// Threads    any.
/// Cost       pieces that nobody has are kept for the next who asks, until the process ends.
/// Errors     take: backend_error.
class cuda_page_locked {
    static constexpr std::size_t least = 64;
    static constexpr std::size_t most = std::size_t{1} << 16;
    struct spare {
        std::mutex mutex;
        std::array<std::vector<void*>, std::bit_width(most / least)> pieces;
    };
    // Never destroyed: CUDA may be gone by then.
    [[nodiscard]] static spare& all() {
        static spare& s = *new spare;
        return s;
    }
    [[nodiscard]] static constexpr std::size_t extent(std::size_t bytes) noexcept {
        return bytes > most ? bytes : std::bit_ceil(bytes < least ? least : bytes);
    }
    [[nodiscard]] static std::vector<void*>& of(spare& s, std::size_t bytes) noexcept {
        return s.pieces[static_cast<std::size_t>(std::bit_width(extent(bytes) / least)) - 1];
    }

public:
    [[nodiscard]] static void* take(std::size_t bytes) {
        if (bytes <= most) {
            spare& s = all();
            const std::lock_guard lock(s.mutex);
            std::vector<void*>& pieces = of(s, bytes);
            if (!pieces.empty()) {
                void* const p = pieces.back();
                pieces.pop_back();
                return p;
            }
        }
        void* p = nullptr;
        check_cuda(cudaHostAlloc(&p, extent(bytes), cudaHostAllocPortable), "cudaHostAlloc");
        return p;
    }
    static void give(void* p, std::size_t bytes) noexcept {
        if (p == nullptr) { return; }
        if (bytes <= most) {
            if (std::uncaught_exceptions() > 0) { return; }
            try {
                spare& s = all();
                const std::lock_guard lock(s.mutex);
                of(s, bytes).push_back(p);
                return;
            } catch (const std::exception&) {}
        }
        cudaFreeHost(p);
    }
};

}  // namespace tutti::detail
