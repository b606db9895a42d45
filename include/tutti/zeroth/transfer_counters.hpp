// transfer_counters: what an offload pipeline has moved, in exact integers.
// Needs nothing.
#pragma once

#include <cstdint>  // exact counts

namespace tutti::zeroth {

/// Of one rank, since the pipeline was made; the difference of two is what happened between them.
/// Units  bytes of weights as they travel, padding included: whole slots over the link to the host, parts of other
///        ranks between devices.
struct transfer_counters {
    std::uint64_t uploads = 0;
    std::uint64_t upload_bytes = 0;
    std::uint64_t offloads = 0;
    std::uint64_t offload_bytes = 0;
    std::uint64_t gathered_bytes = 0;  ///< received from other ranks
    friend constexpr bool operator==(const transfer_counters&, const transfer_counters&) = default;
    friend constexpr transfer_counters operator-(transfer_counters a, const transfer_counters& b) noexcept {
        return {a.uploads - b.uploads, a.upload_bytes - b.upload_bytes, a.offloads - b.offloads,
                a.offload_bytes - b.offload_bytes, a.gathered_bytes - b.gathered_bytes};
    }
};

}  // namespace tutti::zeroth
