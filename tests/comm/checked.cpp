// checked: every field that ranks can disagree in is named, on every rank, before data moves.
#include <doctest/doctest.h>

#include <chrono>       // timeouts
#include <cstdint>      // codes
#include <deque>        // scripted answers
#include <optional>     // split
#include <span>         // colors
#include <string>       // texts
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // data

#include <tutti/comm/checked.hpp>  // tested
#include <tutti/comm/counted.hpp>  // nesting
#include <tutti/comm/self.hpp>     // one rank
#include <tutti/comm/threads.hpp>  // many ranks

#include "comm/probe.hpp"  // what reaches the backend

using namespace tutti;
using comm::checked;
using comm::threads;
using tutti::test::probe;

namespace {

using probed = probe<threads>;
using tested = checked<probed>;
static_assert(comm::decoratable<tested>);

/// What one rank saw: the text without the rank at its end, the ranks named, calls that reached the backend.
struct outcome {
    std::string text = "nothing thrown";
    std::vector<int> ranks;
    std::uint64_t executed = 0;
};

/// Runs `f` on every rank of a checked communicator and collects what each saw.
template <class F> std::vector<outcome> outcomes(int n, F f) {
    std::vector<outcome> all(static_cast<std::size_t>(n));
    threads::launch(n,
                    [&](threads& t) {
                        tested c{probed(std::move(t))};
                        outcome& mine = all[static_cast<std::size_t>(c.rank())];
                        try {
                            f(c);
                        } catch (const mismatch_error& e) {
                            mine.text = e.what();
                            mine.ranks = e.ranks();
                            const std::string tail = fmt::format(", rank {}", c.rank());
                            REQUIRE(mine.text.ends_with(tail));
                            mine.text.resize(mine.text.size() - tail.size());
                            CHECK(e.context().rank == c.rank());
                            CHECK(e.context().communicator == c.name());
                            CHECK(mine.text.starts_with(e.context().operation + ": "));
                        } catch (const error& e) { mine.text = std::string("not a mismatch: ") + e.what(); }
                        mine.executed = c.inner().counts().executed;
                        // Failed stays failed, also for what was left out of the comparison.
                        CHECK_THROWS_AS(c.barrier(), aborted_error);
                        CHECK_THROWS_AS(c.exchange({}), aborted_error);
                    },
                    {.name = "dp", .timeout = std::chrono::seconds(20)});
    return all;
}

/// All ranks see the same text (after their own operation) and ranks; no collective reached the backend.
template <class F>
void expect_mismatch(int n, const std::string& text, const std::vector<int>& ranks, F f, std::uint64_t executed = 0) {
    for (const outcome& o : outcomes(n, f)) {
        CHECK(o.text == text);
        CHECK(o.ranks == ranks);
        CHECK(o.executed == executed);
    }
}

/// Gives scripted answers to gather_control; nothing else is asked of it.
class scripted : public comm::front<scripted, host_queue> {
public:
    std::deque<std::vector<comm::control_record>> answers;
    std::vector<comm::control_record> asked;
    int ranks = 3;
    std::string cause{};

    scripted() = default;

    [[nodiscard]] int rank() const noexcept { return 0; }
    [[nodiscard]] int size() const noexcept { return ranks; }
    [[nodiscard]] std::string_view name() const noexcept { return "scripted"; }
    [[nodiscard]] host_queue queue() const noexcept { return {}; }
    [[nodiscard]] scripted duplicate(std::string_view) { return scripted(); }
    [[nodiscard]] std::optional<scripted> split(std::span<const int>, std::string_view) { return std::nullopt; }
    void synchronize() {}
    void abort(std::string_view why) noexcept { cause = why; }
    void execute(const comm::call&) { FAIL("data moved"); }
    [[nodiscard]] std::vector<comm::control_record> gather_control(comm::control_record mine) {
        asked.push_back(mine);
        if (answers.empty()) { throw timeout_error("a peer is gone", {2}); }
        auto all = answers.front();
        answers.pop_front();
        all[0] = mine;
        return all;
    }
};
static_assert(comm::decoratable<scripted>);

}  // namespace

TEST_CASE("ranks that agree get the same results as without") {
    threads::launch(4, [](threads& t) {
        tested c{probed(std::move(t))};
        const auto n = static_cast<std::size_t>(c.size());
        const auto r = static_cast<std::size_t>(c.rank());
        std::vector<float> in(4 * n, static_cast<float>(r + 1));
        std::vector<float> out(4 * n);
        std::vector<float> part(4);
        const std::vector<std::size_t> counts{1, 0, 2, 3};
        const view<float> own = view<float>(part).sub(0, counts[r]);

        c.all_reduce(view<float>(in), view<float>(out), sum{});
        CHECK(out[5] == 10);
        c.reduce_scatter(view<float>(in), view<float>(part), mean{});
        CHECK(part[3] == 2.5f);
        c.all_gather(view<float>(part), view<float>(out));
        c.reduce_scatter_v(view<float>(in).sub(0, 6), own, counts, sum{});
        c.all_gather_v(own, view<float>(out).sub(0, 6), counts);
        CHECK(out[4] == 10);
        std::vector<float> root{static_cast<float>(r)};
        c.broadcast(view<float>(root), 2);
        CHECK(root[0] == 2);
        c.reduce(view<float>(in), r == 1 ? view<float>(out) : view<float>(), max{}, 1);
        c.gather(view<float>(part), r == 3 ? view<float>(out) : view<float>(), 3);
        c.scatter(r == 0 ? view<float>(in) : view<float>(), view<float>(part), 0);
        CHECK(part[0] == 1);
        c.all_to_all(view<float>(in), view<float>(out));
        CHECK(out[4] == 2);
        // Rank s sends s + 1 elements to everybody.
        const std::vector<std::size_t> sends(n, r + 1);
        const std::vector<std::size_t> expects{1, 2, 3, 4};
        std::vector<float> packed((r + 1) * n, static_cast<float>(r));
        std::vector<float> unpacked(10);
        c.all_to_all_v(view<float>(packed), sends, view<float>(unpacked), expects);
        CHECK(unpacked[9] == 3);
        c.barrier();
        CHECK(c.inner().counts().executed == 12);
        CHECK(c.inner().counts().controls == 12);  // one gather a call

        c.agree(7, "something");  // the fingerprint, then the gather itself
        CHECK(c.inner().counts().controls == 14);
        tested lane = c.duplicate("lane");
        CHECK(c.inner().counts().controls == 16);
        CHECK(lane.name() == "world/lane");
        lane.all_reduce(view<float>(in), view<float>(in), sum{});
        const std::vector<int> colors{0, -1, 0, 1};
        auto some = c.split(colors, "some");
        CHECK(some.has_value() == (r != 1));
        if (some) { some->all_reduce(view<float>(in), view<float>(in), sum{}); }
        CHECK(in[0] == (r == 0 || r == 2 ? 20 : 10));
    });
}

// NVIDIA/nccl#1417, NVIDIA/nccl#1394, pmodels/mpich#3775
TEST_CASE("count differs") {
    expect_mismatch(
        4, "all_reduce: count differs (rank 0: 1024, rank 3: 1023), call 2 on 'dp'", {3},
        [](tested& c) {
            c.barrier();
            std::vector<float> data(c.rank() == 3 ? 1023 : 1024, 1.0f);
            const std::vector<float> before = data;
            try {
                c.all_reduce(view<float>(data), view<float>(data), sum{});
            } catch (const error& e) {
                CHECK(e.context().count == data.size());
                CHECK(e.context().type == dtype::float32);
                CHECK(data == before);  // nothing moved
                throw;
            }
        },
        1);
}

TEST_CASE("the reference is the majority, not rank 0") {
    expect_mismatch(3, "broadcast: count differs (rank 1: 5, rank 0: 4), call 1 on 'dp'", {0}, [](tested& c) {
        std::vector<int> data(c.rank() == 0 ? 4 : 5);
        c.broadcast(view<int>(data), 1);
    });
    expect_mismatch(4, "broadcast: count differs (rank 0: 4, rank 1: 5, rank 3: 5), call 1 on 'dp'", {1, 3},
                    [](tested& c) {
                        std::vector<int> data(c.rank() % 2 == 0 ? 4 : 5);
                        c.broadcast(view<int>(data), 1);
                    });
}

TEST_CASE("count differs in gather and scatter, whose root has a larger view") {
    expect_mismatch(3, "gather: count differs (rank 0: 2, rank 2: 3), call 1 on 'dp'", {2}, [](tested& c) {
        std::vector<int> in(c.rank() == 2 ? 3 : 2);
        std::vector<int> out(6);
        c.gather(view<int>(in), view<int>(out), 0);
    });
    expect_mismatch(3, "scatter: count differs (rank 0: 2, rank 1: 1), call 1 on 'dp'", {1}, [](tested& c) {
        std::vector<int> in(6);
        std::vector<int> out(c.rank() == 1 ? 1 : 2);
        c.scatter(view<int>(in), view<int>(out), 0);
    });
}

TEST_CASE("type, element size and operator differ") {
    expect_mismatch(3, "all_reduce: type differs (rank 0: float32, rank 1: int32), call 1 on 'dp'", {1}, [](tested& c) {
        std::vector<float> floats(8);
        std::vector<int> ints(8);
        if (c.rank() == 1) {
            c.all_reduce(view<int>(ints), view<int>(ints), sum{});
        } else {
            c.all_reduce(view<float>(floats), view<float>(floats), sum{});
        }
    });
    struct small {
        char bytes[3];
    };
    struct large {
        char bytes[5];
    };
    expect_mismatch(2, "broadcast: element size differs (rank 0: 3, rank 1: 5), call 1 on 'dp'", {1}, [](tested& c) {
        std::vector<small> s(2);
        std::vector<large> l(2);
        if (c.rank() == 1) {
            c.broadcast(view<large>(l), 0);
        } else {
            c.broadcast(view<small>(s), 0);
        }
    });
    expect_mismatch(3, "all_reduce: operator differs (rank 1: max, rank 0: sum), call 1 on 'dp'", {0}, [](tested& c) {
        std::vector<float> x(8);
        if (c.rank() == 0) {
            c.all_reduce(view<float>(x), view<float>(x), sum{});
        } else {
            c.all_reduce(view<float>(x), view<float>(x), max{});
        }
    });
}

// pytorch/pytorch#39706
TEST_CASE("root differs") {
    expect_mismatch(3, "broadcast: root differs (rank 0: 0, rank 2: 1), call 1 on 'dp'", {2}, [](tested& c) {
        std::vector<int> data(4);
        c.broadcast(view<int>(data), c.rank() == 2 ? 1 : 0);
    });
}

TEST_CASE("ranks do different things: every rank speaks of its own") {
    const auto all = outcomes(3, [](tested& c) {
        std::vector<float> x(8);
        if (c.rank() == 1) {
            c.barrier();
        } else {
            c.all_reduce(view<float>(x), view<float>(x), sum{});
        }
    });
    const std::string tail = ": collective differs (rank 0: all_reduce, rank 1: barrier), call 1 on 'dp'";
    CHECK(all[0].text == "all_reduce" + tail);
    CHECK(all[1].text == "barrier" + tail);
    CHECK(all[2].text == "all_reduce" + tail);
    for (const outcome& o : all) {
        CHECK(o.ranks == std::vector{1});
        CHECK(o.executed == 0);
    }
}

// NVIDIA/cuDecomp#98, NVIDIA/cuDecomp#158: the decision to create a communicator was a rank's own
TEST_CASE("a control operation against a collective") {
    const auto all = outcomes(3, [](tested& c) {
        if (c.rank() == 2) {
            static_cast<void>(c.duplicate("lane"));
        } else {
            c.agree(1, "x");
        }
    });
    const std::string tail = ": collective differs (rank 0: gather_control, rank 2: duplicate), call 1 on 'dp'";
    CHECK(all[0].text == "gather_control" + tail);
    CHECK(all[2].text == "duplicate" + tail);
}

TEST_CASE("counts of uneven parts differ") {
    // Same sum and same own part: only the table can tell. The first difference is in the second gather of entries.
    expect_mismatch(6, "all_gather_v: counts[4] differs (rank 0: 2, rank 1: 1), call 1 on 'dp'", {1}, [](tested& c) {
        std::vector<std::size_t> counts{1, 1, 1, 1, 2, 1};
        if (c.rank() == 1) { counts = {1, 1, 1, 1, 1, 2}; }
        std::vector<int> in(counts[static_cast<std::size_t>(c.rank())]);
        std::vector<int> out(7);
        c.all_gather_v(view<int>(in), view<int>(out), counts);
    });
    expect_mismatch(3, "reduce_scatter_v: counts[0] differs (rank 0: 2, rank 2: 1), call 1 on 'dp'", {2},
                    [](tested& c) {
                        std::vector<std::size_t> counts{2, 2, 1};
                        if (c.rank() == 2) { counts = {1, 3, 1}; }
                        std::vector<int> in(5);
                        std::vector<int> out(counts[static_cast<std::size_t>(c.rank())]);
                        c.reduce_scatter_v(view<int>(in), view<int>(out), counts, sum{});
                    });
    expect_mismatch(3, "all_gather_v: count differs (rank 0: 3, rank 2: 4), call 1 on 'dp'", {2}, [](tested& c) {
        std::vector<std::size_t> counts{1, 1, 1};
        if (c.rank() == 2) { counts = {1, 2, 1}; }
        std::vector<int> in(1);
        std::vector<int> out(c.rank() == 2 ? 4 : 3);
        c.all_gather_v(view<int>(in), view<int>(out), counts);
    });
}

TEST_CASE("all_to_all_v: what is sent is not what is expected") {
    // sends[r][s] and the transposed table, wrong where a rank says so.
    const auto call = [](tested& c, std::vector<std::vector<std::size_t>> sends,
                         std::vector<std::vector<std::size_t>> expects) {
        const auto r = static_cast<std::size_t>(c.rank());
        const auto size = [](const std::vector<std::size_t>& counts) {
            std::size_t total = 0;
            for (const std::size_t n : counts) { total += n; }
            return total;
        };
        std::vector<int> in(size(sends[r]));
        std::vector<int> out(size(expects[r]));
        c.all_to_all_v(view<int>(in), sends[r], view<int>(out), expects[r]);
    };
    using table = std::vector<std::vector<std::size_t>>;
    const table sends{{1, 2, 3}, {4, 5, 6}, {7, 8, 9}};
    expect_mismatch(3, "all_to_all_v: count differs (rank 2 sends 8 to rank 1, which expects 9), call 1 on 'dp'", {2},
                    [&](tested& c) {
                        call(c, sends, {{1, 4, 7}, {2, 5, 9}, {3, 6, 9}});
                    });
    // Two mistakes that cancel in every total: rank 1 expects 0's part from 2 and the other way round.
    expect_mismatch(3, "all_to_all_v: count differs (rank 0 sends 2 to rank 1, which expects 8), call 1 on 'dp'", {0},
                    [&](tested& c) {
                        call(c, sends, {{1, 4, 7}, {8, 5, 2}, {3, 6, 9}});
                    });
    const auto fine = outcomes(3, [&](tested& c) {
        call(c, sends, {{1, 4, 7}, {2, 5, 8}, {3, 6, 9}});
        c.abort("end of the test");
    });
    for (const outcome& o : fine) {
        CHECK(o.text == "nothing thrown");
        CHECK(o.executed == 1);
    }
}

// meta-pytorch/torchcomms#3093
TEST_CASE("names of children and color tables differ") {
    expect_mismatch(3, "duplicate: name differs (rank 0: 'gradients', rank 1: 'parameters'), call 1 on 'dp'", {1},
                    [](tested& c) { static_cast<void>(c.duplicate(c.rank() == 1 ? "parameters" : "gradients")); });
    expect_mismatch(2,
                    "duplicate: name differs (rank 0: 'a name that is as long as the th', rank 1: 'b'), call 1 on 'dp'",
                    {1}, [](tested& c) {
                        static_cast<void>(
                            c.duplicate(c.rank() == 1 ? "b" : "a name that is as long as the thirty-two that travel"));
                    });
    expect_mismatch(3, "split: name differs (rank 1: 'y', rank 0: 'x'), call 1 on 'dp'", {0}, [](tested& c) {
        const std::vector<int> colors{0, 0, 0};
        static_cast<void>(c.split(colors, c.rank() == 0 ? "x" : "y"));
    });
    expect_mismatch(3, "split: colors[1] differs (rank 0: 0, rank 2: -1), call 1 on 'dp'", {2}, [](tested& c) {
        const std::vector<int> colors{0, c.rank() == 2 ? -1 : 0, 1};
        static_cast<void>(c.split(colors, "half"));
    });
    comm::self<> alone;
    checked c(std::move(alone));
    const std::vector<int> two{0, 0};
    CHECK_THROWS_WITH_AS(static_cast<void>(c.split(two, "x")), "split: 2 colors for 1 ranks, call 1 on 'self', rank 0",
                         usage_error);
}

TEST_CASE("a mismatch in a child ends the whole family") {
    threads::launch(2,
                    [](threads& t) {
                        checked c(std::move(t));
                        auto lane = c.duplicate("lane");
                        std::vector<int> data(static_cast<std::size_t>(c.rank()) + 1);
                        CHECK_THROWS_AS(lane.broadcast(view<int>(data), 0), mismatch_error);
                        CHECK_THROWS_AS(c.barrier(), aborted_error);
                        CHECK_THROWS_AS(c.synchronize(), aborted_error);
                    },
                    {.timeout = std::chrono::seconds(20)});
}

TEST_CASE("exchange is left to its participants") {
    threads::launch(3, [](threads& t) {
        tested c{probed(std::move(t))};
        std::vector<int> data{c.rank()};
        if (c.rank() == 0) {
            const comm::transfer<host_memory> m[] = {comm::send_to(2, view<int>(data))};
            c.exchange(m);
        } else if (c.rank() == 2) {
            const comm::transfer<host_memory> m[] = {comm::receive_from(0, view<int>(data))};
            c.exchange(m);
            CHECK(data[0] == 0);
        }
        CHECK(c.inner().counts().controls == 0);
        c.barrier();
    });
}

TEST_CASE("nested either way round, with the numbers of calls intact") {
    threads::launch(2,
                    [](threads& t) {
                        comm::counted c(checked(probed(std::move(t))));
                        c.agree(1, "x");
                        c.barrier();
                        CHECK(c.inner().inner().counts().last_sequence == 2);
                        std::vector<int> data(3);
                        auto lane = c.duplicate("lane");
                        lane.broadcast(view<int>(data), 0);
                        CHECK(c.traffic_ledger()->total() == comm::traffic{2, c.rank() == 0 ? 12u : 0u});
                        data.resize(c.rank() == 0 ? 3 : 2);
                        CHECK_THROWS_AS(lane.broadcast(view<int>(data), 0), mismatch_error);
                        CHECK(c.traffic_ledger()->total().calls == 2);  // what did not happen is not counted
                    },
                    {.timeout = std::chrono::seconds(20)});
    threads::launch(2, [](threads& t) {
        checked c(comm::counted(probed(std::move(t))));
        c.barrier();
        CHECK(c.inner().traffic_ledger()->total() == comm::traffic{1, 0});  // fingerprints are control traffic
    });
}

TEST_CASE("ranks out of step: the number of the call differs") {
    comm::control_record other{};
    scripted s;
    s.answers.push_back({{}, {}, {}});
    checked first(std::move(s));
    CHECK_THROWS_WITH_AS(first.barrier(), doctest::Contains("collective differs"), mismatch_error);
    other = first.inner().asked.at(0);  // of call 1

    scripted again;
    again.answers.push_back({{}, other, other});
    again.answers.push_back({{}, other, other});  // the farewell
    again.answers[0][1][1] += std::uint64_t{1} << 24;
    again.answers[0][2][1] += std::uint64_t{1} << 24;
    checked second(std::move(again));
    CHECK_THROWS_WITH_AS(second.barrier(),
                         "barrier: number of the call differs (rank 1: 2, rank 0: 1), call 1 on 'scripted', rank 0",
                         mismatch_error);
    CHECK(second.inner().cause ==
          "barrier: number of the call differs (rank 1: 2, rank 0: 1), call 1 on 'scripted', rank 0");
    CHECK(second.inner().asked.size() == 2);  // leaves together with the others
}

TEST_CASE("a rank that is not in a checked call is told apart") {
    scripted s;
    s.answers.push_back({{}, {123, 456, 789, 12}, {}});
    checked c(std::move(s));
    try {
        c.barrier();
        FAIL("no mismatch");
    } catch (const mismatch_error& e) {
        // Two of three are elsewhere: they are the majority.
        CHECK(e.what() ==
              std::string(
                  "barrier: collective differs (rank 1: unknown, rank 0: barrier), call 1 on 'scripted', rank 0"));
        CHECK(e.ranks() == std::vector{0});
    }
}

TEST_CASE("many differing ranks are counted, not listed, and a lost peer does not lose the finding") {
    scripted probe;
    probe.ranks = 12;
    probe.answers.push_back(std::vector<comm::control_record>(12));
    checked ask(std::move(probe));
    std::vector<int> data(12);
    CHECK_THROWS_AS(ask.broadcast(view<int>(data), 0), mismatch_error);
    const comm::control_record mine = ask.inner().asked.at(0);

    scripted s;
    s.ranks = 12;
    s.answers.push_back(std::vector<comm::control_record>(12, mine));
    for (std::size_t r = 2; r < 12; ++r) { s.answers[0][r][2] = 100 + r; }
    checked c(std::move(s));  // the farewell finds nobody
    try {
        c.broadcast(view<int>(data), 0);
        FAIL("no mismatch");
    } catch (const mismatch_error& e) {
        CHECK(e.what() ==
              std::string("broadcast: count differs (rank 0: 12, rank 2: 102, rank 3: 103, rank 4: 104, rank 5: 105, "
                          "rank 6: 106, "
                          "rank 7: 107, rank 8: 108, rank 9: 109 and 2 more), call 1 on 'scripted', rank 0"));
        CHECK(e.ranks() == std::vector{2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
    }

    // A table whose entries cannot be asked for any more is reported by its hash.
    scripted t;
    t.answers.push_back(std::vector<comm::control_record>(3));
    checked ask_table(std::move(t));
    const std::vector<std::size_t> counts{4, 4, 4};
    CHECK_THROWS_AS(ask_table.all_gather_v(view<int>(data).sub(0, 4), view<int>(data).sub(0, 12), counts),
                    mismatch_error);
    scripted u;
    u.answers.push_back(std::vector<comm::control_record>(3, ask_table.inner().asked.at(0)));
    u.answers[0][1][3] ^= 1;
    checked lost(std::move(u));
    CHECK_THROWS_WITH_AS(lost.all_gather_v(view<int>(data).sub(0, 4), view<int>(data).sub(0, 12), counts),
                         doctest::Contains("all_gather_v: counts differs (rank 0: "), mismatch_error);
}
