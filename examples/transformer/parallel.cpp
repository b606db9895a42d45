// Runs whose ranks have parts of the model over ranks on the CPU, compiled once for the trainer and its tests.
#include <tutti/core/error.hpp>                      // usage_error
#include <tutti/parallel/pipeline_check.hpp>         // validate
#include <tutti/parallel/schedules/dual_pipe.hpp>    // schedules
#include <tutti/parallel/schedules/one_way.hpp>      // schedules
#include <tutti/parallel/schedules/zero_bubble.hpp>  // schedules

#include "host_device.hpp"
#include "parallel_run.hpp"
#include "parallel_training.hpp"

namespace transformer {

tutti::parallel::pipeline_schedule schedule_of(const options& o) {
    using namespace tutti::parallel;
    const int ranks = o.pp, micro_batches = o.batch / o.dp / o.micro_batch;
    const auto made = [&] {
        try {
            if (o.pipeline_schedule == "gpipe") { return gpipe(ranks, micro_batches); }
            if (o.pipeline_schedule == "interleaved") { return interleaved(ranks, micro_batches, 2); }
            if (o.pipeline_schedule == "zb-h1") { return zero_bubble(ranks, micro_batches); }
            if (o.pipeline_schedule == "zb-v") { return zero_bubble_v(ranks, micro_batches); }
            if (o.pipeline_schedule == "dualpipe") { return dual_pipe(ranks, micro_batches); }
            return one_forward_one_backward(ranks, micro_batches);
        } catch (const tutti::usage_error& e) {
            throw bad_input(fmt::format("--pipeline-schedule: {}; --batch {}, --dp {} and --micro-batch {} make {} "
                                        "micro-batches",
                                        e.what(), o.batch, o.dp, o.micro_batch, micro_batches));
        }
    }();
    if (o.model.layers % made.stages() != 0) {
        throw bad_input(fmt::format("--layers: {} layers cannot be divided among the {} stages of {} on {} ranks",
                                    o.model.layers, made.stages(), o.pipeline_schedule, o.pp));
    }
    return made;
}

template <class T>
result train_in_parts_on_cpu(any_ranks& world, const options& o, const corpus& text, tutti::deadline origin) {
    host_device<T> cpu;
    return train_in_parts(world, cpu, o, text, origin);
}

template result train_in_parts_on_cpu<float>(any_ranks&, const options&, const corpus&, tutti::deadline);
template result train_in_parts_on_cpu<double>(any_ranks&, const options&, const corpus&, tutti::deadline);

}  // namespace transformer
