// attention_options: what every engine of attention can be told.
// Needs sequence/block_attention and schedule/timeline.
#pragma once

#include <optional>  // scale

#include <tutti/core/deadline.hpp>             // duration
#include <tutti/schedule/timeline.hpp>         // trace
#include <tutti/sequence/block_attention.hpp>  // mask

namespace tutti::sequence {

/// The same on all ranks but for timeout, trace and trace_rank.
struct attention_options {
    mask rule = mask::causal;
    std::optional<double> scale{};             ///< of scores; 1 / sqrt(width) when not given
    duration timeout = 2 * default_timeout();  ///< of waits for the lane, see schedule::lane_options
    schedule::timeline* trace = nullptr;       ///< where transfers are recorded; must outlive the engine
    int trace_rank = -1;                       ///< process of the trace; -1: the communicator's rank
};

}  // namespace tutti::sequence
