// recipes: training jobs as programs of virtual ranks, out of the library's own pipelines, tensor groups and strategies.
// Needs simulate and plan. A transformer is charged layer by layer; nothing else is known of it.
#pragma once

#include <cstddef>  // period
#include <cstdint>  // tokens

#include <tutti/comm/topology.hpp>     // topology
#include <tutti/plan/machine.hpp>      // machine
#include <tutti/plan/model.hpp>        // model_shape, job
#include <tutti/simulate/cluster.hpp>  // trace_options
#include <tutti/simulate/outcome.hpp>  // outcome

namespace simulate_cluster {

/// A pipeline of tensor groups in each replica; ZeRO-1 over replicas.
///
/// Semantics  `how` as a planner has it, of stage 1 and without sequence parallelism. Within a node there are tensor
///            groups, then replicas, then stages.
struct parallel_job {
    tutti::plan::model_shape model;
    tutti::plan::job how;
    tutti::plan::machine on;
};
/// Errors  usage_error for a job that the recipe does not have, or that does not fit its model.
[[nodiscard]] tutti::simulate::outcome run(const parallel_job& j, int steps = 1,
                                           const tutti::simulate::trace_options& trace = {});

/// ZeRO inside nodes, each of which is a replica; nodes meet every `period` steps.
struct replica_job {
    tutti::plan::model_shape model;
    tutti::comm::topology network;
    tutti::virtual_rates rates;
    int zero_stage = 2;       ///< 2 or 3
    std::int64_t tokens = 1;  ///< of a rank in a step
    std::size_t period = 48;
    bool late = true;                            ///< CO2: means arrive a round later; otherwise everyone waits for them
    tutti::schedule::timeline* trace = nullptr;  ///< of rank 0
};
[[nodiscard]] tutti::simulate::outcome run(const replica_job& j, int steps);
/// Of a step, once rounds are alike.
[[nodiscard]] double steady_seconds(const replica_job& j);

/// CO2's scaling study: 7 billion parameters on nodes of 8 A100, which share 80 Gb/s of TCP.
///
/// Semantics  the one figure fitted is the time of a step on one node, as a share of that of a mean over 16 nodes:
///            1 / 13.95, which is what the published 0.86 at a period of 12 says.
/// Source     Sun et al., CO2, ICLR 2024, arXiv:2401.16265, table 3.
[[nodiscard]] replica_job co2_7b(int nodes, std::size_t period, bool late = true);
/// 22 billion parameters, ZeRO-3 on nodes of H200, or of another machine, CO2 over nodes.
[[nodiscard]] replica_job co2_22b(int nodes, const tutti::plan::machine& on = tutti::plan::hgx_h200);

/// The jobs of Frontier, there or on another machine, with `data` replicas of 640 and 1600 sequences a step each.
///
/// Source  Dash et al. 2023, arXiv:2312.12705. Its tables could not be read: cuts and sizes of batches are those of the
///         authors' scripts, and of the abstract's numbers of ranks.
[[nodiscard]] parallel_job frontier_175b(int data, const tutti::plan::machine& on = tutti::plan::frontier);
[[nodiscard]] parallel_job frontier_1t(int data, const tutti::plan::machine& on = tutti::plan::frontier);

}  // namespace simulate_cluster
