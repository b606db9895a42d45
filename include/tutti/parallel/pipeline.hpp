// pipeline: runs a schedule over a user's stages: activations and gradients travel, weights stay.
// Needs parallel/pipeline_plan, parallel/pipeline_stage and schedule/lane. Source: Huang et al. 2019, arXiv:1811.06965.
#pragma once

#include <cstddef>    // size_t
#include <cstdint>    // hashes
#include <exception>  // errors of stages
#include <memory>     // plans
#include <optional>   // lane
#include <string>     // messages
#include <utility>    // move
#include <vector>     // hashes

#include <tutti/comm/communicator.hpp>             // can_exchange
#include <tutti/core/error.hpp>                    // usage_error
#include <tutti/core/state.hpp>                    // hash_bytes
#include <tutti/core/text.hpp>                     // formatted
#include <tutti/core/view.hpp>                     // view
#include <tutti/parallel/detail/pipeline_run.hpp>  // pipeline_run
#include <tutti/parallel/pipeline_plan.hpp>        // pipeline_plan
#include <tutti/parallel/pipeline_program.hpp>     // delivery
#include <tutti/parallel/pipeline_schedule.hpp>    // pipeline_schedule
#include <tutti/parallel/pipeline_stage.hpp>       // pipeline_stage
#include <tutti/schedule/lane.hpp>                 // lane

namespace tutti::parallel {

/// One schedule over a communicator whose rank r is rank r of the schedule.
///
/// Semantics    construction is collective and proves the schedule; `run` is one step: all micro-batches through all
///              stages and back. It may be repeated. The stages' gradients are then complete for this pipeline.
/// Determinism  each pass sees the same inputs, and gradients are summed in the same order, under every schedule of the
///              same routes, with and without overlap and recomputation.
/// Cost         an activation and a gradient for each micro-batch and border between ranks; buffers as the schedule's
///              in-flight limit says, one input and one output gradient a chunk.
/// Errors       usage_error when the schedule is not valid, is for another number of ranks, a shared plan is null, or
///              sizes do not fit the stages; mismatch_error when ranks were given different ones. An error of a stage
///              ends all ranks: the family is aborted with its text, and it is rethrown here.
template <comm::can_exchange C, transportable T> class pipeline {
    using Q = queue_of<C>;
    using M = memory_of<C>;

    C comm_;
    std::shared_ptr<const pipeline_plan> plan_;
    pipeline_options options_;
    std::optional<schedule::lane<C>> lane_;

public:
    using element_type = T;
    using queue_type = Q;

    pipeline(C own, pipeline_schedule s, pipeline_options o) : comm_(std::move(own)), options_(std::move(o)) {
        std::string why;
        try {
            plan_ = plan_pipeline(std::move(s), delivery_of(options_), options_.times);
        } catch (const usage_error& e) { why = e.what(); }
        start(std::move(why));
    }
    /// The same by a plan that ranks share; `o.times` play no part.
    pipeline(C own, std::shared_ptr<const pipeline_plan> shared, pipeline_options o)
        : comm_(std::move(own)), plan_(std::move(shared)), options_(std::move(o)) {
        start("");
    }

    [[nodiscard]] const pipeline_schedule& schedule() const noexcept { return plan_->schedule; }
    [[nodiscard]] C& communicator() noexcept { return comm_; }
    [[nodiscard]] Q queue() const noexcept { return comm_.queue(); }

    template <pipeline_stage<T, M> S> pipeline_counts run(S& stage) {
        detail::pipeline_run<C, T, S> step(comm_, lane_.has_value() ? &*lane_ : nullptr, *plan_, options_, stage);
        try {
            step.run();
        } catch (const std::exception& e) {
            comm_.abort(e.what());  // before buffers go: peers may wait for them
            throw;
        } catch (...) {
            comm_.abort("pipeline: a stage threw something that is no std::exception");
            throw;
        }
        return step.counts;
    }

private:
    void start(std::string why) {
        if (why.empty()) { why = fault(); }
        try {
            comm_.agree(why.empty() ? hash() : hash_bytes(as_bytes(view<const char>(why))), "schedule and sizes");
        } catch (const mismatch_error&) {
            if (why.empty()) { throw; }
        }
        if (!why.empty()) { throw usage_error(why); }
        if (options_.overlap) { lane_.emplace(comm_.duplicate("pipeline"), options_.lane_choice); }
    }
    // What makes this pipeline impossible; "" if nothing does. Fills in sizes.
    [[nodiscard]] std::string fault() {
        if (plan_ == nullptr) { return "pipeline: the shared plan is null; make one by plan_pipeline"; }
        const pipeline_schedule& s = plan_->schedule;
        if (comm_.size() != s.ranks) {
            return formatted("pipeline: {} for {} ranks on a communicator of {}, '{}'", s.name, s.ranks, comm_.size(),
                             comm_.name());
        }
        if (plan_->when != delivery_of(options_)) {
            return formatted("pipeline: the plan is for messages {} computations, overlap is {}",
                             plan_->when == delivery::ahead ? "beside" : "between", options_.overlap ? "on" : "off");
        }
        const auto borders = static_cast<std::size_t>(s.stages() - 1);
        if (options_.elements.size() == 1) { options_.elements.assign(borders, options_.elements[0]); }
        if (options_.elements.size() != borders) {
            return formatted("pipeline: sizes of {} activations for {} borders between stages",
                             options_.elements.size(), borders);
        }
        return "";
    }
    [[nodiscard]] static delivery delivery_of(const pipeline_options& o) noexcept {
        return o.overlap ? delivery::ahead : delivery::between;
    }
    [[nodiscard]] std::uint64_t hash() const {
        std::vector<std::uint64_t> words{plan_->hash, sizeof(T)};
        words.insert(words.end(), options_.elements.begin(), options_.elements.end());
        return hash_bytes(as_bytes(view<const std::uint64_t>(words)));
    }
};

}  // namespace tutti::parallel
