// The umbrella of parallel: one model over many ranks, by layers and by parts of layers.
// Apart from tutti.hpp, whose users need not wait for it to compile. No source: it only re-exports.
#pragma once

// which rank does what
#include <tutti/parallel/mesh.hpp>

// pipelines: what is a schedule, where they come from, whether one can work, what it takes, and running it
#include <tutti/parallel/pipeline.hpp>
#include <tutti/parallel/pipeline_check.hpp>
#include <tutti/parallel/pipeline_plan.hpp>
#include <tutti/parallel/pipeline_program.hpp>
#include <tutti/parallel/pipeline_render.hpp>
#include <tutti/parallel/pipeline_replay.hpp>
#include <tutti/parallel/pipeline_schedule.hpp>
#include <tutti/parallel/pipeline_stage.hpp>
#include <tutti/parallel/schedules/dual_pipe.hpp>
#include <tutti/parallel/schedules/one_way.hpp>
#include <tutti/parallel/schedules/zero_bubble.hpp>

// parts of layers, and what counts once
#include <tutti/parallel/bias.hpp>
#include <tutti/parallel/gradient_norm.hpp>
#include <tutti/parallel/linear.hpp>
#include <tutti/parallel/tensor_group.hpp>
#include <tutti/parallel/tied_weights.hpp>
#include <tutti/parallel/vocabulary.hpp>
#include <tutti/parallel/vocabulary_cross_entropy.hpp>
