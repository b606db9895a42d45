// pipeline: the same bits under every schedule, exact counters, errors that end all ranks.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // max
#include <atomic>     // ranks that ended
#include <chrono>     // deadlines
#include <cstdint>    // times
#include <memory>     // ledger
#include <stdexcept>  // a stage's error
#include <string>     // texts
#include <thread>     // sleep
#include <utility>    // move
#include <vector>     // schedules

#include <parallel/toy_stages.hpp>                   // stages
#include <tutti/comm/counted.hpp>                    // bytes
#include <tutti/comm/self.hpp>                       // one rank
#include <tutti/comm/threads.hpp>                    // ranks
#include <tutti/parallel/pipeline.hpp>               // under test
#include <tutti/parallel/schedules/dual_pipe.hpp>    // schedules
#include <tutti/parallel/schedules/one_way.hpp>      // schedules
#include <tutti/parallel/schedules/zero_bubble.hpp>  // schedules

#include <support/build.hpp>             // full_speed
#include <support/growing_timeouts.hpp>  // a machine that is busy

using namespace tutti;
using namespace tutti::test;
using namespace tutti::parallel;
using comm::threads;

namespace {

std::vector<pipeline_schedule> all_schedules(int p, int m) {
    std::vector<pipeline_schedule> all{gpipe(p, m), one_forward_one_backward(p, m), zero_bubble(p, m),
                                       zero_bubble_v(p, m)};
    if (m % p == 0) { all.push_back(interleaved(p, m, 2)); }
    if (m % p == 0) { all.push_back(interleaved(p, m, 3)); }
    if (p % 2 == 0 && m % 2 == 0 && m >= 2 * p) { all.push_back(dual_pipe(p, m)); }
    return all;
}
pipeline_options options_for(const pipeline_schedule& s, bool overlap, bool recompute) {
    pipeline_options o;
    o.elements = toy_sizes(s.stages());
    o.overlap = overlap;
    o.recompute = recompute;
    return o;
}
void expect_same_as_sequential(const pipeline_schedule& s, bool overlap, bool recompute) {
    toy_stages reference(s);
    reference.run_sequentially();
    reference.run_sequentially();
    const auto on_rank = [&](auto& c) {
        const int rank = c.rank();
        pipeline<std::remove_reference_t<decltype(c)>, double> pipe(std::move(c), s,
                                                                    options_for(s, overlap, recompute));
        toy_stages mine(s);
        static_cast<void>(pipe.run(mine));
        static_cast<void>(pipe.run(mine));  // nothing is left over from the step before
        mine.expect_same(reference, rank);
    };
    if (s.ranks == 1) {
        comm::self<> alone;
        on_rank(alone);
    } else {
        threads::launch(s.ranks, on_rank);
    }
}

}  // namespace

TEST_CASE("every schedule gives the bits of the sequential run") {
    for (const int p : {1, 2, 3, 4}) {
        for (const int m : full_speed ? std::vector{1, 2, 5, 8, 12} : std::vector{3, 8}) {
            for (const pipeline_schedule& s : all_schedules(p, m)) {
                expect_same_as_sequential(s, false, (p + m) % 2 == 0);
                expect_same_as_sequential(s, true, (p + m) % 2 == 1);
            }
        }
    }
    if (!full_speed) { return; }
    for (const pipeline_schedule& s : all_schedules(8, 16)) {
        expect_same_as_sequential(s, false, true);
        expect_same_as_sequential(s, true, false);
    }
}

TEST_CASE("schedules and modes have the same gradients as one another") {
    // Of one stage a rank: the same stages, so the same bits.
    std::vector<toy_stages> results;
    for (const auto& s : {gpipe(3, 6), one_forward_one_backward(3, 6), zero_bubble(3, 6), zero_bubble(3, 6, {}, 5)}) {
        toy_stages all(s);
        threads::launch(3, [&](threads& c) {
            toy_stages mine(s);
            const auto rank = static_cast<std::size_t>(c.rank());
            pipeline<threads, double> pipe(std::move(c), s, options_for(s, true, false));
            static_cast<void>(pipe.run(mine));
            all.gradient[rank] = mine.gradient[rank];  // each rank another element
        });
        results.push_back(all);
    }
    for (const toy_stages& r : results) {
        for (std::size_t i = 0; i < r.gradient.size(); ++i) {
            CHECK(same_bytes(r.gradient[i], results[0].gradient[i]));
        }
    }
}

TEST_CASE("counters: messages, bytes, calls, activations in flight") {
    constexpr int p = 4;
    constexpr int m = 8;
    using counted = comm::counted<threads>;
    for (const pipeline_schedule& s : all_schedules(p, m)) {
        const pipeline_replay replay = replayed(s, {});
        for (const bool overlap : {false, true}) {
            for (const bool recompute : {false, true}) {
                threads::launch(p, [&](threads& t) {
                    const auto rank = static_cast<std::size_t>(t.rank());
                    const host_queue q = t.queue();
                    counted c(std::move(t));
                    const auto ledger = c.traffic_ledger();
                    pipeline<counted, double> pipe(std::move(c), s, options_for(s, overlap, recompute));
                    toy_stages mine(s);
                    ledger->reset();
                    const std::size_t before = q.account().live();
                    const pipeline_counts n = pipe.run(mine);
                    expect(q.account().live() == before, "{}: buffers are left", s.name);

                    // What leaves this rank, from the schedule alone.
                    std::uint64_t sent = 0;
                    std::uint64_t received = 0;
                    std::uint64_t bytes = 0;
                    const auto sizes = toy_sizes(s.stages());
                    for (int stage = 0; stage + 1 < s.stages(); ++stage) {
                        for (int b = 0; b < m; ++b) {
                            const bool up = s.rank_of(stage, b) == static_cast<int>(rank);
                            const bool down = s.rank_of(stage + 1, b) == static_cast<int>(rank);
                            if (up == down) { continue; }
                            ++sent;  // an activation or a gradient; the other one comes
                            ++received;
                            bytes += 8 * sizes[static_cast<std::size_t>(stage)];
                        }
                    }
                    const auto chunks = static_cast<std::uint64_t>(s.chunks_on(static_cast<int>(rank)));
                    const std::uint64_t passes = chunks * m / s.routes.size();
                    const auto traffic = ledger->snapshot()[comm::collective::exchange];
                    expect(n.messages_sent == sent && n.bytes_sent == bytes,
                           "{}: {} messages of {} bytes, not {} of {}", s.name, n.messages_sent, n.bytes_sent, sent,
                           bytes);
                    expect(traffic.bytes == bytes && traffic.calls == n.exchanges, "{}: the ledger differs", s.name);
                    expect(n.exchanges <= sent + received && (!overlap || n.exchanges == sent + received),
                           "{}: {} calls", s.name, n.exchanges);
                    expect(n.forwards == passes && n.backwards == passes && n.recomputed == (recompute ? passes : 0),
                           "{}: {} forwards, {} again, {} backwards", s.name, n.forwards, n.recomputed, n.backwards);
                    expect(n.peak_in_flight == replay.peak_in_flight[rank], "{}: {} in flight, not {}", s.name,
                           n.peak_in_flight, replay.peak_in_flight[rank]);
                    bool split = false;
                    for (const action& a : s.actions[rank]) { split = split || a.what == pass::backward_input; }
                    expect(recompute ? n.peak_kept == 1 || (split && n.peak_kept <= n.peak_in_flight)
                                     : n.peak_kept == n.peak_in_flight,
                           "{}: {} kept of {}", s.name, n.peak_kept, n.peak_in_flight);
                });
            }
        }
    }
}

TEST_CASE("1F1B in figures: calls of one group a gap, memory of what is in flight") {
    constexpr int p = 4;
    constexpr int m = 8;
    const pipeline_schedule s = one_forward_one_backward(p, m);
    for (const bool overlap : {false, true}) {
        threads::launch(p, [&](threads& t) {
            const auto rank = static_cast<std::size_t>(t.rank());
            const host_queue q = t.queue();
            pipeline_options o;
            o.elements = {1000};
            o.overlap = overlap;
            pipeline<threads, double> pipe(std::move(t), s, o);
            struct {
                void forward(const stage_call&, view<const double>, view<double> out) {
                    for (double& x : out) { x = 0; }
                }
                void backward_input(const stage_call&, view<const double>, view<const double>, view<double> d_in) {
                    for (double& x : d_in) { x = 0; }
                }
                void backward_weight(const stage_call&, view<const double>, view<const double>) {}
            } stage;
            q.account().reset_peak();
            const std::size_t before = q.account().live();
            const pipeline_counts n = pipe.run(stage);
            constexpr std::uint64_t sent[] = {8, 16, 16, 8};
            constexpr int in_flight[] = {4, 3, 2, 1};
            expect(n.messages_sent == sent[rank] && n.bytes_sent == 8000 * sent[rank], "rank {}: messages", rank);
            expect(n.peak_in_flight == in_flight[rank], "rank {}: {} in flight", rank, n.peak_in_flight);
            // Inputs held (none on the first rank), and up to an output, a gradient each way and the next input; of results on
            // a lane two more.
            const std::size_t activations = (q.account().peak() - before) / 8000;
            const std::size_t inputs = rank == 0 ? 0 : static_cast<std::size_t>(in_flight[rank]);
            expect(activations >= inputs + 1 && activations <= inputs + (overlap ? 5 : 3), "rank {}: {} buffers", rank,
                   activations);
        });
    }
}

TEST_CASE("an error of one stage ends all ranks with its text") {
    for (const bool overlap : {false, true}) {
        for (const int guilty : {0, 2}) {
            for (const auto& s : {one_forward_one_backward(3, 6), zero_bubble_v(3, 6)}) {
                std::atomic<int> ended{0};
                struct failing : toy_stages {
                    using toy_stages::toy_stages;
                    bool fails = false;
                    void forward(const stage_call& c, view<const double> in, view<double> out) {
                        if (fails && c.micro_batch == 3) { throw std::runtime_error("out of ideas"); }
                        toy_stages::forward(c, in, out);
                    }
                };
                const auto run = [&](threads& c) {
                    failing mine(s);
                    mine.fails = c.rank() == guilty;
                    pipeline<threads, double> pipe(std::move(c), s, options_for(s, overlap, false));
                    try {
                        static_cast<void>(pipe.run(mine));
                    } catch (const aborted_error& e) {
                        ++ended;
                        expect(std::string(e.what()).find("out of ideas") != std::string::npos, "{}", e.what());
                        throw;
                    } catch (const std::runtime_error&) {
                        // Stays until the others have ended, which is not for its leaving.
                        const auto limit = clock_type::now() + std::chrono::seconds(20);
                        while (mine.fails && ended < 2 && clock_type::now() < limit) {
                            std::this_thread::sleep_for(std::chrono::milliseconds(1));
                        }
                        throw;
                    }
                };
                const comm::options o{.name = "world", .timeout = std::chrono::seconds(10)};
                CHECK_THROWS_WITH(threads::launch(3, run, o), "out of ideas");
                CHECK(ended == 2);
            }
        }
    }
}

TEST_CASE("a rank that does not come is named when the deadline passes") {
    const pipeline_schedule s = one_forward_one_backward(2, 2);
    for (const bool overlap : {false, true}) {
        with_growing_timeouts([&](duration timeout) {
            std::atomic<bool> ended{false};
            const auto run = [&](threads& c) {
                const int rank = c.rank();
                struct ending {
                    std::atomic<bool>* flag;
                    ~ending() {
                        if (flag != nullptr) { *flag = true; }
                    }
                } const end{rank == 0 ? &ended : nullptr};
                toy_stages mine(s);
                pipeline<threads, double> pipe(std::move(c), s, options_for(s, overlap, false));
                if (rank == 1) {
                    // Busy elsewhere until the other has given up.
                    while (!ended) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }
                    return;
                }
                static_cast<void>(pipe.run(mine));
            };
            try {
                threads::launch(2, run, {.name = "world", .timeout = timeout});
            } catch (const timeout_error& e) {
                expect(e.missing() == std::vector<int>{1} && e.context().operation == "exchange", "{}", e.what());
                return;
            }
            expect(false, "nobody was missed");
        });
    }
}

TEST_CASE("what cannot run is refused on all ranks before anything moves") {
    const auto made = [](int ranks, auto schedule_of, pipeline_options o) {
        threads::launch(ranks, [&](threads& c) {
            const int rank = c.rank();
            pipeline_options own = o;
            pipeline<threads, double>(std::move(c), schedule_of(rank), own);
        });
    };
    const auto good = [](int) { return one_forward_one_backward(2, 4); };
    CHECK_THROWS_WITH_AS(made(3, good, {}), "pipeline: 1f1b for 2 ranks on a communicator of 3, 'world'", usage_error);
    CHECK_THROWS_WITH_AS(made(2, good, {.elements = {5, 5}}),
                         "pipeline: sizes of 2 activations for 1 borders between stages", usage_error);
    const auto broken = [](int) {
        pipeline_schedule s = one_forward_one_backward(2, 4);
        s.actions[1].pop_back();
        return s;
    };
    CHECK_THROWS_WITH_AS(made(2, broken, {.elements = {5}}),
                         "1f1b: rank 1, backward_input of micro-batch 3 in stage 1: is missing", usage_error);
    const auto different = [](int rank) { return rank == 0 ? one_forward_one_backward(2, 4) : gpipe(2, 4); };
    CHECK_THROWS_AS(made(2, different, {.elements = {5}}), mismatch_error);
    // The same schedule, but messages that were put in another order.
    CHECK_THROWS_AS(threads::launch(2,
                                    [](threads& c) {
                                        pipeline_options o;
                                        o.elements = {5};
                                        o.times.forward = c.rank() == 0 ? 1 : 7;
                                        pipeline<threads, double>(std::move(c), one_forward_one_backward(2, 4), o);
                                    }),
                    mismatch_error);
    // The same passes in the same order, but rank 0 alone was told of pairs: they put messages in another order as well.
    const auto unpaired = [](int rank) {
        pipeline_schedule s = dual_pipe(4, 8);
        for (auto& list : s.actions) {
            for (action& a : list) { a.joined = a.joined && rank == 0; }
        }
        return s;
    };
    CHECK_THROWS_AS(made(4, unpaired, {.elements = {5}}), mismatch_error);
    const auto one_broken = [&](int rank) { return rank == 0 ? good(0) : broken(1); };
    CHECK_THROWS_AS(made(2, one_broken, {.elements = {5}}), error);
}

TEST_CASE("a shared plan that is null is refused where it was given, and no other rank waits for that one") {
    const auto plan = plan_pipeline(one_forward_one_backward(2, 4));
    for (const bool everywhere : {true, false}) {
        std::atomic<int> refused{0};
        const auto make = [&](threads& c) {
            const bool without = everywhere || c.rank() == 1;
            try {
                pipeline<threads, double>(std::move(c), without ? nullptr : plan, {.elements = {5}});
            } catch (const usage_error& e) {
                refused += std::string(e.what()) == "pipeline: the shared plan is null; make one by plan_pipeline";
                throw;
            }
        };
        CHECK_THROWS_AS(threads::launch(2, make, {.name = "world", .timeout = std::chrono::seconds(10)}), error);
        CHECK(refused == (everywhere ? 2 : 1));
    }
}

// Passes that take time on a clock which messages carry: one starts when its rank is done with the one before, and what
// it takes has been made. So waiting is measured on a run, by no clock of this machine.
struct clocked_stages {
    const pipeline_schedule& schedule;
    pass_times times{};
    double now = 0, started = -1, busy = 0;

    void forward(const stage_call&, view<const double> in, view<double> out) { pass_of(times.forward, in, out); }
    void backward_input(const stage_call& c, view<const double>, view<const double> d_out, view<double> d_in) {
        pass_of(times.of(both_at_once(c) ? pass::backward : pass::backward_input), d_out, d_in);
    }
    void backward_weight(const stage_call& c, view<const double>, view<const double>) {
        if (!both_at_once(c)) { pass_of(times.backward_weight, {}, {}); }
    }

private:
    // Then the gradient leaves behind the whole of it.
    [[nodiscard]] bool both_at_once(const stage_call& c) const {
        const auto& list = schedule.actions[static_cast<std::size_t>(schedule.rank_of(c.stage, c.micro_batch))];
        return std::any_of(list.begin(), list.end(), [&](const action& a) {
            return a.what == pass::backward && a.stage == c.stage && a.micro_batch == c.micro_batch;
        });
    }
    void pass_of(std::int64_t takes, view<const double> in, view<double> out) {
        now = std::max(now, in.empty() ? 0.0 : in[0]);
        if (started < 0) { started = now; }
        now += static_cast<double>(takes);
        busy += static_cast<double>(takes);
        if (!out.empty()) { out[0] = now; }
    }
};

TEST_CASE("ranks of a run wait for one another as long as the formulas say") {
    struct golden {
        pipeline_schedule schedule;
        pass_times times;
        double makespan, waits;  // of all ranks; the longest of a rank between its first and its last pass
    };
    // What is waited for: (p - 1)(F + B) of 3; over v with v chunks; (p - 1)(F + Bi - W); nothing.
    const pass_times uneven{10, 12, 8};
    const golden all[] = {{gpipe(4, 8), {}, 33, 9},
                          {one_forward_one_backward(4, 8), {}, 33, 9},
                          {one_forward_one_backward(4, 16), {}, 57, 9},
                          {interleaved(4, 8, 2), {}, 57, 9},
                          {zero_bubble(4, 12), {}, 0, 3},
                          {zero_bubble(4, 12, uneven), uneven, 0, 42},
                          {zero_bubble_v(4, 12), {}, 0, 0}};
    for (const golden& g : all) {
        CAPTURE(g.schedule.name);
        std::vector<clocked_stages> ranks(static_cast<std::size_t>(g.schedule.ranks),
                                          clocked_stages{g.schedule, g.times});
        threads::launch(g.schedule.ranks, [&](threads& c) {
            clocked_stages& mine = ranks[static_cast<std::size_t>(c.rank())];
            pipeline_options o;
            o.elements = {1};
            o.times = g.times;
            pipeline<threads, double> pipe(std::move(c), g.schedule, o);
            static_cast<void>(pipe.run(mine));
        });
        double makespan = 0, waits = 0;
        for (const clocked_stages& r : ranks) {
            makespan = std::max(makespan, r.now);
            waits = std::max(waits, r.now - r.started - r.busy);
        }
        CHECK(waits == g.waits);
        if (g.makespan > 0) { CHECK(makespan == g.makespan); }
    }
}
