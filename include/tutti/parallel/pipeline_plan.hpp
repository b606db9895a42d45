// pipeline_plan: a schedule that has been proven, with its messages in place: what all ranks of a pipeline share.
// Needs parallel/pipeline_check.
#pragma once

#include <cstdint>  // hashes
#include <memory>   // plans are shared
#include <utility>  // move
#include <vector>   // words of a hash

#include <tutti/core/state.hpp>                  // hash_bytes
#include <tutti/core/view.hpp>                   // view
#include <tutti/parallel/pipeline_check.hpp>     // validate
#include <tutti/parallel/pipeline_program.hpp>   // program_of
#include <tutti/parallel/pipeline_replay.hpp>    // pass_times
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule

namespace tutti::parallel {

/// Made by plan_pipeline alone.
struct pipeline_plan {
    pipeline_schedule schedule{};
    delivery when = delivery::between;
    pipeline_program program{};
    std::uint64_t hash = 0;  ///< equal where all that it was made from is
};

/// Proves a schedule and puts its messages in place; `times` are what passes take, roughly: messages are put in order
/// by it.
///
/// Cost    of the whole pipeline, n log n in its actions: where one process has many of its ranks they may share a plan.
/// Errors  usage_error when the schedule is not valid.
[[nodiscard]] inline std::shared_ptr<const pipeline_plan> plan_pipeline(pipeline_schedule s,
                                                                        delivery when = delivery::between,
                                                                        const pass_times& times = {}) {
    validate(s);
    pipeline_plan plan{std::move(s), when, {}, 0};
    plan.program = program_of(plan.schedule, when, times);
    validate(plan.schedule, plan.program);
    std::vector<std::int64_t> words{plan.schedule.ranks, plan.schedule.micro_batches, when == delivery::ahead ? 1 : 0};
    for (const auto& route : plan.schedule.routes) { words.insert(words.end(), route.begin(), route.end()); }
    for (const auto& list : plan.schedule.actions) {
        words.push_back(-1);
        for (const action& a : list) {
            words.insert(words.end(), {static_cast<std::int64_t>(a.what), a.stage, a.micro_batch, a.joined ? 1 : 0});
        }
    }
    words.insert(words.end(),
                 {times.forward, times.backward_input, times.backward_weight, times.transfer, times.pair.value_or(-1)});
    plan.hash = hash_bytes(as_bytes(view<const std::int64_t>(words)));
    return std::make_shared<const pipeline_plan>(std::move(plan));
}

}  // namespace tutti::parallel
