// The recipes of examples/simulate_cluster: CO2's published scaling; a small Frontier job against the planner's closed
// form; memory and traffic of the large ones' kind.
#include <doctest/doctest.h>

#include <simulate_cluster/recipes.hpp>  // tested

#include <tutti/plan/memory.hpp>       // closed forms
#include <tutti/plan/time.hpp>         // closed forms
#include <tutti/schedule/overlap.hpp>  // overlap_of

using namespace tutti;
using namespace simulate_cluster;
using comm::collective;

// Sun et al., CO2, ICLR 2024, arXiv:2401.16265, table 3: from 16 to 128 GPUs 0.86 of linear at a period of 12, all of it
// at 48; AdamW in every step 22810 of 8 x 18444 x 2 words a second.
TEST_CASE("CO2's scaling from 16 to 128 GPUs at 80 Gb/s") {
    const double one_node = steady_seconds(co2_7b(1, 48));
    const double at_12 = steady_seconds(co2_7b(2, 12)) / steady_seconds(co2_7b(16, 12));
    CHECK(at_12 >= 0.84);
    CHECK(at_12 <= 0.88);
    const replica_job wide = co2_7b(16, 48);
    CHECK(wide.network.ranks() == 128);
    CHECK(steady_seconds(co2_7b(2, 48)) / steady_seconds(wide) >= 0.98);
    CHECK(one_node / steady_seconds(wide) >= 0.98);
    CHECK(one_node / steady_seconds(co2_7b(16, 1, false)) <= 0.08);
}

TEST_CASE("what CO2 costs is seen by the timeline of a rank, as in a real run") {
    schedule::timeline trace{deadline{}};
    replica_job j = co2_7b(16, 3);
    j.trace = &trace;
    static_cast<void>(run(j, 9));
    const auto m = schedule::overlap_of(trace, 0, {.period = 3, .lane = "world/across/rounds"});
    CHECK(m.rounds == 2);
    CHECK(m.communication > 5);                             // 15/8 x 4 bytes of 6.7e9 at 10 GB/s
    CHECK(m.exposed > m.communication - 3 * m.step - 0.1);  // three steps hide a fifth of it
    CHECK(m.exposed < m.communication);
    CHECK(trace.pending() == 0);
}

TEST_CASE("a step of a small Frontier job is what the planner says") {
    parallel_job j = frontier_175b(2);
    j.model.layers = 8;
    j.how.pipeline = 4;
    j.how.micro_batches = 32;
    const auto o = run(j);
    CHECK(o.ranks.size() == 32);
    CHECK(o.seconds == doctest::Approx(plan::time_of_step(j.model, j.how, j.on).total()).epsilon(0.05));
    // A layer's collectives among tensor ranks: two forward, two again, two backward; of 4096 x 12288 / 2 numbers.
    const double rows = 2.0 * double(j.model.sequence * j.model.hidden);
    const auto& sent = o.ranks[9].traffic;
    const double sums = 32.0 * 2 * 6 * rows * 2 * 3 / 4;
    CHECK(double(sent[collective::all_reduce].bytes) >= sums);
    CHECK(double(sent[collective::all_reduce].bytes) <= sums * 1.01);  // and norms
    // Gradients to shards, values back: half of a stage's each.
    const auto parameters = double(plan::rank_parameters(j.model, j.how, 1));
    CHECK(double(sent[collective::reduce_scatter_v].bytes) == doctest::Approx(parameters).epsilon(0.001));
    CHECK(double(sent[collective::all_gather_v].bytes) == doctest::Approx(parameters).epsilon(0.001));
    // 2 + 2 + 12/2 bytes a parameter, and inputs of what is in flight: four micro-batches on the first stage.
    const double states = double(plan::state_bytes(plan::rank_parameters(j.model, j.how, 1), 1, 2));
    CHECK(double(o.ranks[9].peak_bytes) > states);
    CHECK(double(o.ranks[9].peak_bytes) < 1.2 * states + 6 * rows);
    // Interleaved, the same work and twice the messages.
    parallel_job chunks = j;
    chunks.how.schedule = plan::pipelining::interleaved;
    chunks.how.chunks = 2;
    const auto finer = run(chunks);
    CHECK(finer.ranks[9].work == doctest::Approx(o.ranks[9].work).epsilon(1e-9));
    CHECK(finer.ranks[9].traffic[collective::exchange].bytes == 2 * sent[collective::exchange].bytes);
    j.how.zero_stage = 3;
    CHECK_THROWS_AS(static_cast<void>(run(j)), usage_error);
    j.how.zero_stage = 1;
    j.how.data = 1;
    j.how.sequence = 2;
    CHECK_THROWS_AS(static_cast<void>(run(j)), usage_error);
}

TEST_CASE("two copies of its model take what the planner says, and add up their gradients") {
    parallel_job j = frontier_175b(2);
    j.model.layers = 16;
    j.how.pipeline = 4;
    j.how.micro_batches = 32;
    j.on.inside = j.on.between = {0, 1e18};  // nothing but passes and bubbles
    const auto planned = [&] { return plan::time_of_step(j.model, j.how, j.on); };
    for (const auto again : {plan::recomputation::none, plan::recomputation::full}) {
        j.how.recompute = again;
        j.how.schedule = plan::pipelining::one_forward_one_backward;
        const auto one = run(j);
        const plan::step_time planned_one = planned();
        j.how.schedule = plan::pipelining::dual_pipe;
        const auto two = run(j);
        CHECK(one.seconds == doctest::Approx(planned_one.total()).epsilon(0.03));
        CHECK(two.seconds == doctest::Approx(planned().total()).epsilon(0.03));
        CHECK(one.seconds - two.seconds == doctest::Approx(planned_one.total() - planned().total()).epsilon(0.15));
        // The same passes, and updates of twice the parameters.
        CHECK(two.ranks[9].work - one.ranks[9].work ==
              doctest::Approx(planned().updates - planned_one.updates).epsilon(0.2));
        // Each gradient once to the other copy, and a half of them to the other replica.
        const auto parameters = double(plan::rank_parameters(j.model, j.how, 1));
        const auto bytes = [](const simulate::outcome& o, collective kind) {
            return double(o.ranks[9].traffic[kind].bytes);
        };
        CHECK(bytes(two, collective::reduce_scatter_v) == doctest::Approx(parameters).epsilon(0.001));
        CHECK(bytes(two, collective::reduce_scatter_v) ==
              doctest::Approx(2 * bytes(one, collective::reduce_scatter_v)).epsilon(0.001));
        CHECK(bytes(two, collective::all_reduce) - bytes(one, collective::all_reduce) ==
              doctest::Approx(2 * parameters).epsilon(0.001));
    }
    // Between nodes are stages, whose messages are whole rows here, and copies.
    const double before = run(j).seconds;
    const plan::step_time without = planned();
    j.on.between = {0, 12.5e9};
    const double more = 4 * (planned().messages - without.messages) + planned().data - without.data;
    CHECK(run(j).seconds - before == doctest::Approx(more).epsilon(0.1));
}

TEST_CASE("ZeRO-3 in nodes under CO2: a replica's traffic stays inside, a round's shard goes out") {
    const auto first = run(co2_22b(2), 4);
    const auto second = run(co2_22b(2), 8);
    // One round more: a pseudo-gradient of 4 bytes an element of the rank's eighth, over two nodes.
    const std::uint64_t out =
        second.ranks[3].traffic[collective::all_reduce].bytes - first.ranks[3].traffic[collective::all_reduce].bytes;
    const auto parameters = double(co2_22b(2).model.parameters());
    const double norms = 4 * 8 * parameters / 4096 * 2 * 7 / 8;  // of four steps, 8 bytes a block
    CHECK(double(out) == doctest::Approx(4 * parameters / 8 + norms).epsilon(0.001));
    CHECK(second.seconds > first.seconds);
    CHECK_THROWS_AS(
        static_cast<void>(
            run(replica_job{.model = {}, .network = comm::topology::one_node(8), .rates = {}, .zero_stage = 1}, 1)),
        usage_error);
}
