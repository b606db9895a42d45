// pipeline_stage: what a user gives to a pipeline, stages and options, and what it tells of a run.
// Needs schedule/lane for the options of one. Source: Huang et al. 2019, arXiv:1811.06965 (with recomputation).
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // counts
#include <vector>   // sizes

#include <tutti/core/view.hpp>                 // view
#include <tutti/parallel/pipeline_replay.hpp>  // pass_times
#include <tutti/schedule/lane.hpp>             // lane_options

namespace tutti::parallel {

/// What a stage is asked for. `chunk` is its number among those of this rank.
struct stage_call {
    int stage = 0;
    int chunk = 0;
    int micro_batch = 0;
    bool keep = true;  ///< forward: the backward of this micro-batch is to come, without another forward before it
};

/// A user's part of the model on one rank, all its chunks.
///
/// Semantics  works on pipeline.queue(). The first stage has an empty `in` and `d_in` and finds its data by the
///            micro-batch; the last has an empty `out` and `d_out` and begins with the gradient of its own loss.
///   forward(call, in, out)                 writes all of out; keeps what backward needs beyond `in` if call.keep.
///   backward_input(call, in, d_out, d_in)  writes all of d_in.
///   backward_weight(call, in, d_out)       adds to the gradients of the weights, and lets go of what forward kept;
///                                          in ascending order of micro-batches for each copy of a stage.
template <class S, class T, class M>
concept pipeline_stage = requires(S& s, const stage_call& c, view<const T, M> in, view<T, M> out) {
    s.forward(c, in, out);
    s.backward_input(c, in, in, out);
    s.backward_weight(c, in, in);
};

struct pipeline_options {
    /// Elements of what stage s gives to stage s + 1; a single number is for all.
    std::vector<std::size_t> elements{};
    /// Forwards keep nothing but their inputs; each is run once more just before its backward.
    bool recompute = false;
    /// Messages travel on a lane while the next pass computes, two of a rank's results at a time; otherwise between
    /// passes, one call for all between two.
    bool overlap = false;
    pass_times times{};                    ///< what passes take, roughly: messages are put in order by it
    schedule::lane_options lane_choice{};  ///< of the lane, if there is one
};

/// What one rank did in a run.
struct pipeline_counts {
    std::uint64_t messages_sent = 0;
    std::uint64_t bytes_sent = 0;
    std::uint64_t exchanges = 0;  ///< calls; overlapped messages take one each on either side
    std::uint64_t forwards = 0;   ///< without those computed again
    std::uint64_t recomputed = 0;
    std::uint64_t backwards = 0;  ///< weight gradients
    int peak_in_flight = 0;       ///< chunks between a forward and its weight gradient, whose inputs are held
    int peak_kept = 0;            ///< chunks whose forward kept what backward needs
    friend constexpr bool operator==(const pipeline_counts&, const pipeline_counts&) = default;
};

}  // namespace tutti::parallel
