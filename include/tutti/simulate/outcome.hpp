// outcome: what a run of a virtual cluster says: how long it took, and where each rank spent its time.
// Needs comm/counted for traffic. Plain values: reports and pictures are made from it.
#pragma once

#include <cstddef>  // bytes
#include <cstdint>  // counts
#include <vector>   // ranks

#include <tutti/comm/counted.hpp>  // traffic_snapshot

namespace tutti::simulate {

/// One rank of a run.
///
/// Units  seconds, bytes. Sums are over the rank's streams, which may overlap: together they can exceed `end`.
struct rank_outcome {
    double end = 0;            ///< when its last stream ended
    double work = 0;           ///< that its streams computed, or moved data within the rank
    double communication = 0;  ///< in operations that had begun
    double waiting = 0;        ///< in operations for other ranks, before they began
    std::size_t peak_bytes = 0;
    comm::traffic_snapshot traffic{};  ///< as comm/counted counts
};

struct outcome {
    double seconds = 0;            ///< until the last rank had ended
    std::uint64_t operations = 0;  ///< collectives and messages, each once
    std::uint64_t steps = 0;       ///< recorded on all streams
    int passes = 0;                ///< in which ranks were recorded, until what they were told was true
    std::vector<rank_outcome> ranks{};
};

}  // namespace tutti::simulate
