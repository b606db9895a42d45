// tied_weights: weights that several stages of a pipeline have: the embedding of the first and the last, or a stage of
// which there are two copies. Needs parallel/pipeline_schedule. Source: Narayanan et al. 2021, arXiv:2104.04473.
#pragma once

#include <cstddef>   // size_t
#include <optional>  // ranks that hold nothing
#include <vector>    // ranks, stages

#include <tutti/comm/communicator.hpp>           // communicator
#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/reduce_op.hpp>              // sum
#include <tutti/core/state.hpp>                  // hash_bytes
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/core/view.hpp>                   // view
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule

namespace tutti::parallel {

/// The ranks of a pipeline that hold one of some stages, on any route.
///
/// Semantics  construction is collective over the pipeline. Chunks of one rank share its memory: their gradients meet
///            there, and the ranks' are added up here. Each rank's update is then the same, if their values were.
///   held         whether this rank has any of the stages; the others call nothing.
///   counts       whether it is the one of them that counts the weights in sums over the model.
///   add_up       the sum of all holders' gradients, on each of them, in the order of the pipeline's queue; nothing to do
///                where one rank has all.
///   expect_same  throws mismatch_error unless the values are the same bits: to be called once, before the first step.
/// Cost       one split; add_up one all_reduce.
/// Errors     usage_error when a stage does not exist, or a rank that holds none calls.
template <communicator C> class tied_weights {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    Q queue_;
    std::optional<C> holders_;

public:
    tied_weights(C& pipeline, const pipeline_schedule& s, const std::vector<int>& stages) : queue_(pipeline.queue()) {
        if (pipeline.size() != s.ranks) {
            throw usage_error(
                formatted("tied_weights: a schedule of {} ranks on a communicator of {}", s.ranks, pipeline.size()));
        }
        std::vector<int> colors(static_cast<std::size_t>(s.ranks), -1);
        for (const int stage : stages) {
            if (stage < 0 || stage >= s.stages()) {
                throw usage_error(formatted("tied_weights: stage {} of {}", stage, s.stages()));
            }
            for (const auto& route : s.routes) {
                colors[static_cast<std::size_t>(route[static_cast<std::size_t>(stage)])] = 0;
            }
        }
        holders_ = pipeline.split(colors, "tied");
    }

    [[nodiscard]] bool held() const noexcept { return holders_.has_value(); }
    [[nodiscard]] bool counts() const noexcept { return held() && holders_->rank() == 0; }
    template <class T> void add_up(view<T, M> gradient) {
        C& c = holders("add_up");
        if (c.size() == 1) { return; }
        Q own = c.queue();
        auto before = queue_.record();
        own.wait(before);
        c.all_reduce(view<const T, M>(gradient), gradient, sum{});
        auto after = own.record();
        queue_.wait(after);
    }
    template <class T> void expect_same(view<const T, M> values) requires(M::host_accessible) {
        holders("expect_same").agree(hash_bytes(as_bytes(values)), "tied weights");
    }

private:
    [[nodiscard]] C& holders(const char* operation) {
        if (!held()) {
            throw usage_error(formatted("tied_weights: {} on a rank that holds none of the stages", operation));
        }
        return *holders_;
    }
};

}  // namespace tutti::parallel
