// cluster: virtual times exactly, by closed forms; links that are shared; who is named when ranks disagree.
#include <doctest/doctest.h>

#include <cstdint>  // tokens
#include <string>   // texts
#include <vector>   // tables

#include <tutti/comm/cost.hpp>                   // the model
#include <tutti/schedule/lane.hpp>               // lanes
#include <tutti/simulate/detail/link_clock.hpp>  // order of events
#include <tutti/simulate/simulate.hpp>           // tested

using namespace tutti;
using comm::collective;
using comm::topology;
using phantom = view<float, phantom_memory>;
using rank = simulate::communicator;

namespace {

constexpr comm::link inside{1e-6, 1e9};
constexpr comm::link between{1e-5, 1e8};

phantom floats(std::size_t n) { return {nullptr, n}; }
// One byte a second: what is charged in bytes are seconds.
simulate::cluster on(const topology& t) { return simulate::cluster(t, {1, 1}); }

template <class F> double seconds_of(const topology& t, F f) { return on(t).run(f).seconds; }
template <class Error = mismatch_error, class F> std::string error_of(const topology& t, F f) {
    try {
        static_cast<void>(on(t).run(f));
    } catch (const Error& e) { return e.what(); }
    return "no error";
}
doctest::Approx exactly(double x) { return doctest::Approx(x).epsilon(1e-12); }

}  // namespace

TEST_CASE("a collective takes what the model says, from when its last rank comes") {
    const topology flat = topology::uniform(6, 1, {}, between);
    // 2 L latencies of L = ceil(log2 6), 2 5/6 of the bytes.
    CHECK(seconds_of(flat, [](rank& c) { c.all_reduce(floats(600), floats(600), sum{}); }) ==
          exactly(2 * 3 * 1e-5 + 2 * 5.0 / 6 * 2400 / 1e8));
    const auto late = [](rank& c) {
        c.queue().charge("before", {double(c.rank()), 0});
        c.all_reduce(floats(600), floats(600), sum{});
    };
    const auto o = on(flat).run(late);
    CHECK(o.seconds == exactly(5 + 6e-5 + 4e-5));
    CHECK(o.ranks[2].work == 2);
    CHECK(o.ranks[2].waiting == exactly(3));
    CHECK(o.ranks[2].communication == exactly(1e-4));
    CHECK(o.ranks[5].waiting == 0);
    CHECK(o.operations == 1);
    CHECK(o.passes == 1);

    // A call that is like the last one but for its size is another.
    const auto twice = on(flat).run([](rank& c) {
        c.gather(floats(5), c.rank() == 0 ? floats(30) : floats(0), 0);
        c.gather(floats(7), c.rank() == 0 ? floats(42) : floats(0), 0);
    });
    CHECK(twice.ranks[3].traffic[collective::gather] == comm::traffic{2, 4 * 12});

    // Two levels: each part of the model on its own links.
    const topology nodes = topology::uniform(3, 4, inside, between, 2);
    const auto modelled = [&](collective kind, double bytes) { return comm::time_of(kind, bytes, nodes).seconds(); };
    CHECK(seconds_of(nodes, [](rank& c) { c.all_reduce(floats(999), floats(999), sum{}); }) ==
          exactly(modelled(collective::all_reduce, 4 * 999)));
    // Reduce-scatter inside, all_reduce of a quarter between, through half a NIC, all-gather inside.
    CHECK(modelled(collective::all_reduce, 4 * 999) ==
          exactly(2 * (2e-6 + 0.75 * 3996 / 1e9) + 4 * 1e-5 + 2 * 2.0 / 3 * 999 / 5e7));
    CHECK(seconds_of(nodes, [](rank& c) { c.all_gather(floats(10), floats(120)); }) ==
          exactly(modelled(collective::all_gather, 480)));
    const std::vector<std::size_t> uneven{0, 0, 5, 5, 10, 10, 20, 10, 10, 10, 20, 20};
    CHECK(seconds_of(nodes, [&](rank& c) {
              c.reduce_scatter_v(floats(120), floats(uneven[std::size_t(c.rank())]), uneven, sum{});
          }) == exactly(modelled(collective::reduce_scatter_v, 480)));
    CHECK(seconds_of(nodes, [](rank& c) { c.broadcast(floats(70), 3); }) ==
          exactly(modelled(collective::broadcast, 280)));
    CHECK(seconds_of(nodes, [](rank& c) { c.gather(floats(5), c.rank() == 0 ? floats(60) : floats(0), 0); }) ==
          exactly(modelled(collective::gather, 240)));
    CHECK(seconds_of(nodes, [](rank& c) { c.barrier(); }) == exactly(modelled(collective::barrier, 0)));
    CHECK(seconds_of(topology::one_node(1), [](rank& c) {
              c.all_reduce(floats(9), floats(9), sum{});
              c.exchange(std::vector{comm::send_to(0, floats(1)), comm::receive_from(0, floats(1))});
          }) == 0);

    // all_to_all_v is as long as for the rank that has most to send or to receive: rank 0, to which 3 x 10 floats come.
    const topology four = topology::uniform(4, 1, {}, between);
    CHECK(seconds_of(four, [](rank& c) {
              const bool root = c.rank() == 0;
              const std::vector<std::size_t> send{root ? 0u : 10u, 0, 0, 0}, come{0, 10, 10, 10};
              const std::vector<std::size_t> none(4, 0);
              c.all_to_all_v(floats(root ? 0 : 10), send, floats(root ? 30 : 0), root ? come : none);
          }) == exactly(3 * 1e-5 + 120 / 1e8));
}

TEST_CASE("messages: a ring of exchanges takes its closed form") {
    // all_reduce as a ring: 2 (n - 1) steps, in each of which every rank sends and receives a share at once.
    constexpr int n = 5;
    const auto ring = [](rank& c) {
        for (int step = 0; step < 2 * (n - 1); ++step) {
            c.exchange(std::vector{comm::send_to((c.rank() + 1) % n, floats(100)),
                                   comm::receive_from((c.rank() + n - 1) % n, floats(100))});
        }
    };
    const auto o = on(topology::uniform(n, 1, {}, between)).run(ring);
    CHECK(o.seconds == exactly(2 * (n - 1) * (1e-5 + 400 / 1e8)));
    CHECK(o.operations == 2 * (n - 1) * n);
    for (const auto& r : o.ranks) {
        CHECK(r.traffic[collective::exchange] == comm::traffic{2 * (n - 1), 2 * (n - 1) * 400});
    }
    // Inside a node and between: each message has its own link.
    const topology nodes = topology::uniform(2, 2, inside, between, 2);
    CHECK(seconds_of(nodes, [](rank& c) {
              if (c.rank() == 0) { c.exchange(std::vector{comm::send_to(1, floats(1000))}); }
              if (c.rank() == 1) { c.exchange(std::vector{comm::receive_from(0, floats(1000))}); }
          }) == exactly(1e-6 + 4000 / 1e9));
    // A message begins when both its ends are there; a call ends with its last message.
    const auto o2 = on(nodes).run([](rank& c) {
        if (c.rank() == 0) {
            c.exchange(std::vector{comm::send_to(1, floats(1000)), comm::send_to(2, floats(1000))});
        } else if (c.rank() < 3) {
            c.queue().charge("late", {double(c.rank()), 0});
            c.exchange(std::vector{comm::receive_from(0, floats(1000))});
        }
    });
    CHECK(o2.ranks[1].end == exactly(1 + 1e-6 + 4000 / 1e9));
    CHECK(o2.ranks[0].end == exactly(2 + 1e-5 + 4000 / 1e8));
    CHECK(o2.ranks[0].waiting == exactly(2));
    CHECK(o2.ranks[3].end == 0);
    // Messages of a pair match in order, whatever calls they are in.
    CHECK(seconds_of(nodes, [](rank& c) {
              if (c.rank() == 0) {
                  c.exchange(std::vector{comm::send_to(1, floats(10)), comm::send_to(1, floats(20))});
              } else if (c.rank() == 1) {
                  c.exchange(std::vector{comm::receive_from(0, floats(10))});
                  c.exchange(std::vector{comm::receive_from(0, floats(20))});
              }
          }) < 1);
}

TEST_CASE("operations that meet on a link share it evenly") {
    // Two nodes of two ranks behind one NIC each, no latency: 100 MB/s.
    const topology nodes = topology::uniform(2, 2, {0, 1e9}, {0, 1e8}, 1);
    const auto across = [](std::size_t first, std::size_t second) {
        return [=](rank& world) {
            const std::vector<int> colors{0, 1, 0, 1};
            auto c = *world.split(colors, "across");
            c.broadcast(floats(world.rank() % 2 == 0 ? first : second), 0);
        };
    };
    // Alike: twice as long as alone. One of three times the size has the rest of its way alone.
    CHECK(seconds_of(nodes, across(1000, 0)) == exactly(4000 / 1e8));
    CHECK(seconds_of(nodes, across(1000, 1000)) == exactly(2 * 4000 / 1e8));
    const auto o = on(nodes).run(across(1000, 3000));
    CHECK(o.ranks[0].end == exactly(2 * 4000 / 1e8));
    CHECK(o.ranks[1].end == exactly(4 * 4000 / 1e8));
    // One that comes later: alone for 10 us, then half speed.
    const auto later = on(nodes).run([](rank& world) {
        const std::vector<int> colors{0, 1, 0, 1};
        auto c = *world.split(colors, "across");
        if (world.rank() % 2 == 1) { c.queue().charge("late", {1e-5, 0}); }
        c.broadcast(floats(1000), 0);
    });
    CHECK(later.ranks[0].end == exactly(1e-5 + 2 * 3e-5));
    CHECK(later.ranks[1].end == exactly(8e-5));
    // Both directions of a link at once: they do not meet. Two messages in one direction do.
    const auto pair = [&](bool opposite) {
        return seconds_of(nodes, [=](rank& c) {
            const int peer = (c.rank() + 2) % 4;
            const bool sends = (c.rank() < 2) != (opposite && c.rank() % 2 == 1);
            const auto m = sends ? comm::send_to(peer, floats(1000)) : comm::receive_from(peer, floats(1000));
            c.exchange(std::vector{m});
        });
    };
    CHECK(pair(true) == exactly(4000 / 1e8));
    CHECK(pair(false) == exactly(2 * 4000 / 1e8));
    // One message inside the node and one between nodes have nothing in common.
    CHECK(seconds_of(nodes, [](rank& c) {
              if (c.rank() == 0) {
                  c.exchange(std::vector{comm::send_to(1, floats(9000)), comm::send_to(2, floats(1000))});
              } else if (c.rank() < 3) {
                  c.exchange(std::vector{comm::receive_from(0, floats(c.rank() == 1 ? 9000 : 1000))});
              }
          }) == exactly(4000 / 1e8));
    // Other NICs, other links: nobody meets.
    const topology wide = topology::uniform(2, 2, {0, 1e9}, {0, 1e8}, 2);
    CHECK(seconds_of(wide, across(1000, 1000)) == exactly(4000 / 1e8));
}

TEST_CASE("of things that happen at one time the one that was announced first comes first") {
    simulate::detail::link_clock clock(2);
    const std::vector<std::uint32_t> first{0}, second{1};
    clock.at(3, 7);
    clock.use(1, 2, second, 9);
    clock.at(3, 4);
    clock.use(1, 2, first, 2);
    clock.at(2, 8);
    std::vector<std::uint32_t> tokens;
    while (const auto next = clock.next()) { tokens.push_back(next->token); }
    CHECK(tokens == std::vector<std::uint32_t>{8, 7, 9, 4, 2});
}

TEST_CASE("lanes overlap: a collective beside computing shows only what is longer") {
    const topology two = topology::uniform(2, 1, {}, {0, 1});
    const auto step = [](double compute) {
        return [=](rank& c) {
            schedule::lane<rank> lane(c.duplicate("lane"));
            virtual_queue q = c.queue();
            const auto done = lane.submit(
                "mean", [](rank& own) { own.all_reduce(floats(2), floats(2), mean{}); }, q);
            q.charge("beside", {compute, 0});
            done.wait(q);
            q.charge("behind", {1, 0});
        };
    };
    CHECK(seconds_of(two, step(20)) == 21);  // 8 s of all_reduce: hidden
    CHECK(seconds_of(two, step(3)) == 9);
    // The same on a timeline: the main stream is held up for five seconds.
    schedule::timeline trace{deadline{}};
    const auto o = on(two).run(
        [&](rank& c) {
            schedule::lane_options options;
            if (c.rank() == 1) { options.trace = &trace; }
            schedule::lane<rank> lane(c.duplicate("lane"), options);
            virtual_queue q = c.queue();
            const auto done = lane.submit(
                "mean", [](rank& own) { own.all_reduce(floats(2), floats(2), mean{}); }, q);
            q.charge("beside", {3, 0});
            done.wait(q);
        },
        {&trace, {0}});
    CHECK(o.seconds == 8);
    for (const int missing : {-1, 2}) {
        CHECK_THROWS_WITH_AS(static_cast<void>(on(two).run([](rank&) { FAIL("recorded"); }, {&trace, {missing}})),
                             formatted("simulate: no rank {} to trace of 2", missing).c_str(), usage_error);
    }
    CHECK(trace.exposed(1) == exactly(5));
    CHECK(trace.pending() == 0);
    CHECK(trace.dropped() == 0);
    const auto spans = trace.spans(0);
    REQUIRE(spans.size() == 2);
    CHECK(spans[0].track == "world");
    CHECK(spans[0].name == "beside");
    CHECK(spans[1].track == "world/lane");
    CHECK(spans[1].name == "all_reduce");
    CHECK(spans[1].kind == schedule::span_kind::communication);
    CHECK(spans[1].end - spans[1].begin == std::chrono::seconds(8));
    CHECK(trace.chrome_trace().find(
              R"("name":"all_reduce","cat":"communication","ph":"X","ts":0.000,"dur":8000000.000)") !=
          std::string::npos);
}

TEST_CASE("the control plane tells what all ranks gave, though they are recorded one by one") {
    const topology four = topology::uniform(4, 1, {}, between);
    // What a rank does depends on what others said, twice over.
    std::vector<int> sizes(4);
    const auto o = on(four).run([&](rank& world) {
        auto half = *comm::split_by_color(world, world.rank() % 2, "half");
        const auto given = half.gather_control({std::uint64_t(10 * world.rank()), 0, 0, 0});
        if (given.size() != 2) { return; }  // not the truth yet: nobody has said otherwise
        sizes[std::size_t(world.rank())] = int(given[0][0] + given[1][0]);
        half.all_reduce(floats(given[1][0]), floats(given[1][0]), sum{});
    });
    CHECK(sizes == std::vector<int>{20, 40, 20, 40});
    CHECK(o.passes == 3);
    CHECK(o.operations == 2);
    CHECK(o.ranks[1].traffic.total() == comm::traffic{1, 4 * 30});
    // Marks of recordings that were thrown away are dropped.
    schedule::timeline trace{deadline{}};
    const auto marked = on(four).run([&](rank& world) {
        virtual_queue q = world.queue();
        const auto begin = q.mark();
        static_cast<void>(world.gather_control({std::uint64_t(world.rank()), 0, 0, 0}));
        q.charge("work", {1, 0});
        trace.add(trace.track_of(world.rank(), "main"), "step", schedule::span_kind::step, begin, q.mark());
    });
    CHECK(marked.passes == 2);
    CHECK(trace.dropped() == 4);
    CHECK(trace.steps(3).size() == 1);
    std::vector<topology> discovered(4, topology::one_node(1));
    static_cast<void>(on(four).run([&](rank& world) {
        discovered[std::size_t(world.rank())] = topology::discover(world, {}, {}, 1, world.rank() < 2 ? "a" : "b");
        world.agree(7, "seven");
    }));
    CHECK(discovered == std::vector<topology>(4, topology::uniform(2, 2)));
    int calls = 0;
    CHECK(error_of<usage_error>(four, [&](rank& world) {
              static_cast<void>(world.gather_control({std::uint64_t(++calls), 0, 0, 0}));
          }).ends_with("the program is not repeatable"));
}

TEST_CASE("ranks that disagree are named") {
    const topology four = topology::uniform(4, 1, {}, between);
    CHECK(error_of(four, [](rank& c) { c.agree(c.rank() == 2 ? 5 : 4, "the plan"); }) ==
          "agree: the plan differs (rank 0: 0000000000000004, rank 2: 0000000000000005), call 1 on 'world', rank 0");
    CHECK(error_of(four, [](rank& c) {
              const std::size_t n = c.rank() == 3 ? 11 : 10;
              c.all_reduce(floats(n), floats(n), sum{});
          }) == "all_reduce: count differs (rank 0: 10, rank 3: 11), call 1 on 'world'");
    CHECK(error_of(four, [](rank& c) {
              if (c.rank() == 1) {
                  c.barrier();
              } else {
                  c.broadcast(floats(1), 0);
              }
          }) == "broadcast: collective differs (rank 0: broadcast, rank 1: barrier), call 1 on 'world'");
    CHECK(error_of(four, [](rank& c) { c.broadcast(floats(1), c.rank() / 3); }) ==
          "broadcast: root differs (rank 0: 0, rank 3: 1), call 1 on 'world'");
    CHECK(error_of(four, [](rank& c) {
              const std::vector<std::size_t> send(4, 1);
              std::vector<std::size_t> come(4, 1);
              if (c.rank() == 2) { come[3] = 4; }
              c.all_to_all_v(floats(4), send, floats(c.rank() == 2 ? 7 : 4), come);
          }) == "all_to_all_v: count differs (rank 3 sends 1 to rank 2, which expects 4), call 1 on 'world'");
    CHECK(error_of(four, [](rank& c) {
              const std::vector<std::size_t> counts{1, 1, c.rank() == 1 ? 2u : 1u, c.rank() == 1 ? 0u : 1u};
              c.all_gather_v(floats(counts[std::size_t(c.rank())]), floats(4), counts);
          }).starts_with("all_gather_v: table of counts differs (rank 0: "));
    // Groups and lanes are made together, or not at all.
    CHECK(error_of(four, [](rank& c) { static_cast<void>(c.duplicate(c.rank() == 3 ? "b" : "a")); }) ==
          "duplicate: name differs from what lower ranks say, call 1 on 'world', rank 3");
    CHECK(error_of(four, [](rank& c) {
              const std::vector<int> colors{0, 0, 1, c.rank() == 3 ? 0 : 1};
              static_cast<void>(c.split(colors, "part"));
          }) == "split: colors differ from what lower ranks say, call 1 on 'world', rank 3");
    CHECK(error_of(four, [](rank& c) {
              if (c.rank() != 1) { static_cast<void>(c.duplicate("a")); }
          }) == "duplicate: ranks 1 never come, call 1 on 'world'");
    CHECK(error_of(four, [](rank& c) {
              if (c.rank() == 2) { c.barrier(); }
              static_cast<void>(c.duplicate("a"));
          }).starts_with("duplicate: ranks "));
    CHECK(error_of<usage_error>(four, [](rank& c) { static_cast<void>(c.split(std::vector<int>{0}, "x")); }) ==
          "split: 1 colors for 4 ranks, on 'world'");
}

TEST_CASE("ranks that would wait for ever are named, with where they are") {
    const topology three = topology::uniform(3, 1, {}, between);
    try {
        static_cast<void>(on(three).run([](rank& c) {
            if (c.rank() != 1) { c.barrier(); }
        }));
        FAIL("no error");
    } catch (const timeout_error& e) {
        CHECK(e.what() ==
              std::string("simulate: nothing can go on: rank 0 waits in barrier, call 1 on 'world', for 1; rank 2 "
                          "waits in barrier, call 1 on 'world', for 1"));
        CHECK(e.missing() == std::vector<int>{1});
    }
    // Everybody receives first.
    CHECK(error_of<timeout_error>(three,
                                  [](rank& c) {
                                      c.exchange(std::vector{comm::receive_from((c.rank() + 1) % 3, floats(1))});
                                      c.exchange(std::vector{comm::send_to((c.rank() + 2) % 3, floats(1))});
                                  }) ==
          "simulate: nothing can go on: rank 0 waits in exchange, call 1 on 'world', for 1; rank 1 waits in "
          "exchange, call 1 on 'world', for 2; rank 2 waits in exchange, call 1 on 'world', for 0");
    CHECK(error_of(three, [](rank& c) {
              if (c.rank() == 0) { c.exchange(std::vector{comm::send_to(1, floats(2))}); }
              if (c.rank() == 1) { c.exchange(std::vector{comm::receive_from(0, floats(3))}); }
          }) == "exchange: 12 bytes from rank 0, which sends 8, call 1 on 'world'");
    // Two communicators in opposite orders.
    const std::string crossed = error_of<timeout_error>(three, [](rank& c) {
        auto a = c.duplicate("a"), b = c.duplicate("b");
        virtual_queue first = a.queue(), second = b.queue();
        auto& one = c.rank() == 0 ? a : b;
        auto& other = c.rank() == 0 ? b : a;
        one.barrier();
        const auto done = (c.rank() == 0 ? first : second).record();
        (c.rank() == 0 ? second : first).wait(done);
        other.barrier();
    });
    CHECK(
        crossed.starts_with("simulate: nothing can go on: rank 0 waits in barrier, call 1 on 'world/a', for 1, 2; "
                            "rank 0 waits on 'world/b'; rank 1 waits on 'world/a'; rank 1 waits in barrier, call 1 on "
                            "'world/b', for 0"));
    CHECK(crossed.ends_with("; and 1 more") == false);
    // What a rank throws is thrown, with whatever the others do; an abort ends the run.
    CHECK(error_of<usage_error>(three, [](rank& c) {
              if (c.rank() == 1) { throw usage_error("rank 1 is wrong"); }
              c.barrier();
          }) == "rank 1 is wrong");
    CHECK(error_of<aborted_error>(three, [](rank& c) {
              c.barrier();
              if (c.rank() == 2) { c.abort("enough"); }
          }) == "run: aborted: enough on 'world'");
    CHECK(error_of<aborted_error>(three, [](rank& c) {
              c.abort("at once");
              c.synchronize();
          }) == "synchronize: aborted: at once on 'world', rank 0");
}

TEST_CASE("marks of a run that fails count if they were reached, and are dropped if not") {
    const topology two = topology::uniform(2, 1, {}, between);
    schedule::timeline trace{deadline{}};
    const auto step = [&](rank& c, auto what) {
        virtual_queue q = c.queue();
        const auto begin = q.mark();
        what(q);
        trace.add(trace.track_of(c.rank(), "main"), "step", schedule::span_kind::step, begin, q.mark());
    };
    const auto second = [](virtual_queue& q) { q.charge("work", {1, 0}); };
    // Recorded, never resolved: one of each rank.
    CHECK(error_of<usage_error>(two, [&](rank& c) {
              step(c, second);
              if (c.rank() == 1) { throw usage_error("rank 1 is wrong"); }
          }) == "rank 1 is wrong");
    CHECK(trace.pending() == 0);
    CHECK(trace.dropped() == 2);
    CHECK(trace.size() == 0);
    // Resolved up to where rank 0 waits for ever.
    CHECK(error_of<timeout_error>(two, [&](rank& c) {
              step(c, second);
              if (c.rank() == 0) {
                  step(c, [&](virtual_queue&) { c.barrier(); });
              }
          }).starts_with("simulate: nothing can go on: rank 0 waits in barrier"));
    CHECK(trace.pending() == 0);
    CHECK(trace.dropped() == 3);
    CHECK(trace.steps(0).size() == 1);
    CHECK(trace.steps(1).size() == 1);
}

TEST_CASE("machines of a kind") {
    plan::machine m = plan::frontier;
    m.link_efficiency = 0.5;
    const topology t = simulate::network_of(m, 16);
    CHECK(t.nodes() == 2);
    CHECK(t.ranks_per_nic() == 1);
    CHECK(t.between() == comm::link{10e-6, 6.25e9});
    CHECK(simulate::network_of(m, 4).nodes() == 1);
    CHECK(simulate::cluster(m, 16).ranks() == 16);
    CHECK(simulate::rates_of(m).flops_per_second == m.product_efficiency * 191.5e12);
    CHECK(simulate::rates_of(m).host_bytes_per_second == 18e9);
    CHECK_THROWS_WITH_AS(static_cast<void>(simulate::network_of(m, 12)), "simulate: 12 ranks on nodes of 8",
                         usage_error);
}
