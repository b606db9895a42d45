// faulty: each fault strikes the stated rank at the stated call, and nothing else.
#include <doctest/doctest.h>

#include <algorithm>  // count
#include <chrono>     // delays
#include <string>     // texts
#include <utility>    // move
#include <vector>     // plans

#include <tutti/comm/checked.hpp>  // nesting
#include <tutti/comm/faulty.hpp>   // tested
#include <tutti/comm/self.hpp>     // one rank
#include <tutti/comm/threads.hpp>  // many ranks

using namespace tutti;
using namespace std::chrono_literals;
using comm::control;
using comm::fault_rule;
using comm::faulty;
using comm::threads;
using enum comm::collective;
namespace fault = comm::fault;

namespace {

const comm::options patient{.name = "dp", .timeout = 20s};

/// The number of barriers, from 1, at which an error comes; 0: none of ten.
template <class C> int failing_barrier(C& c, std::string& text) {
    for (int i = 1; i <= 10; ++i) {
        try {
            c.barrier();
        } catch (const error& e) {
            text = e.what();
            return i;
        }
    }
    return 0;
}

comm::self<> alone() { return comm::self<>(host_queue{}, {.name = "alone"}); }

}  // namespace

TEST_CASE("a backend refuses: its rank gets the code, the others the cause") {
    const std::vector<fault_rule> plan{{.rank = 1, .on = all_reduce, .nth = 3, .action = fault::fail{42, "link down"}}};
    std::vector<std::string> texts(3);
    CHECK_THROWS_AS(threads::launch(
                        3,
                        [&](threads& t) {
                            faulty c(std::move(t), plan);
                            std::vector<float> data(5, 1.0f);
                            try {
                                for (int i = 1; i <= 3; ++i) {
                                    c.barrier();  // does not match, does not count
                                    c.all_reduce(view<float>(data), view<float>(data), sum{});
                                    CHECK(i < 3);
                                }
                            } catch (const error& e) {
                                texts[static_cast<std::size_t>(c.rank())] = e.what();
                                CHECK(data[0] == 9.0f);  // two rounds happened, the third moved nothing
                                CHECK(c.struck() == (c.rank() == 1 ? 1 : 0));
                                if (const auto* backend = dynamic_cast<const backend_error*>(&e)) {
                                    CHECK(c.rank() == 1);
                                    CHECK(backend->context().backend_code == 42);
                                    CHECK(backend->context().backend_text == "link down");
                                    CHECK(backend->context().operation == "all_reduce");
                                    CHECK(backend->context().sequence == 6);
                                    CHECK(backend->context().count == 5);
                                    CHECK(backend->context().type == dtype::float32);
                                } else {
                                    CHECK(dynamic_cast<const aborted_error*>(&e) != nullptr);
                                    CHECK(c.rank() != 1);
                                }
                                CHECK_THROWS_AS(c.barrier(), aborted_error);  // failed stays failed
                                throw;
                            }
                        },
                        patient),
                    backend_error);
    const std::string cause = "all_reduce: link down (code 42), call 6 on 'dp', rank 1";
    CHECK(texts[1] == cause);
    for (const std::size_t r : {0u, 2u}) { CHECK(texts[r].find("aborted: " + cause) != std::string::npos); }
}

TEST_CASE("the n-th match of a rank, over duplicates and splits, or on one communicator by name") {
    const auto run = [](std::vector<fault_rule> plan) {
        faulty c(alone(), std::move(plan));
        auto lane = c.duplicate("lane");
        const std::vector<int> colors{0};
        auto part = c.split(colors, "part");
        std::string text;
        try {
            c.barrier();
            lane.barrier();
            part->barrier();
            c.barrier();
            lane.barrier();
        } catch (const backend_error& e) { text = e.what(); }
        CHECK(c.struck() == (text.empty() ? 0 : 1));
        return text;
    };
    const std::string tail = ": injected failure (code 1), call ";
    CHECK(run({{.on = barrier, .nth = 1}}) ==
          "barrier" + tail + "3 on 'alone', rank 0");  // duplicate and split are 1 and 2
    CHECK(run({{.on = barrier, .nth = 2}}) == "barrier" + tail + "1 on 'alone/lane', rank 0");
    CHECK(run({{.on = barrier, .nth = 3}}) == "barrier" + tail + "1 on 'alone/part', rank 0");
    CHECK(run({{.on = barrier, .nth = 2, .communicator = "alone"}}) == "barrier" + tail + "4 on 'alone', rank 0");
    CHECK(run({{.on = barrier, .nth = 2, .communicator = "alone/lane"}}) ==
          "barrier" + tail + "2 on 'alone/lane', rank 0");
    CHECK(run({{.nth = 5}}) ==
          "barrier" + tail + "1 on 'alone/part', rank 0");  // any operation: two control calls come first
    CHECK(run({{.on = barrier, .nth = 6}}).empty());
    CHECK(run({{.on = broadcast}}).empty());
    CHECK(run({}).empty());
}

TEST_CASE("control operations fail too") {
    const auto fail_on = [](comm::operation o, std::uint64_t nth) {
        return faulty(alone(), {{.on = o, .nth = nth, .action = fault::fail{}}});
    };
    auto a = fail_on(control::duplicate, 1);
    CHECK_THROWS_WITH_AS(static_cast<void>(a.duplicate("x")),
                         "duplicate: injected failure (code 1), call 1 on 'alone', rank 0", backend_error);
    auto b = fail_on(control::split, 1);
    const std::vector<int> colors{0};
    static_cast<void>(b.duplicate("x"));
    CHECK_THROWS_WITH_AS(static_cast<void>(b.split(colors, "x")),
                         "split: injected failure (code 1), call 2 on 'alone', rank 0", backend_error);
    auto d = fail_on(control::gather_control, 2);
    d.agree(1, "x");
    CHECK_THROWS_WITH_AS(d.agree(1, "x"), "gather_control: injected failure (code 1), call 2 on 'alone', rank 0",
                         backend_error);
    auto e = fail_on(exchange, 1);
    CHECK_THROWS_WITH_AS(e.exchange({}), "exchange: injected failure (code 1), call 1 on 'alone', rank 0",
                         backend_error);
}

TEST_CASE("a rule counts on its own rank, in the numbering of the communicator with the plan") {
    // Rank 3 is rank 1 of its half; the rule follows the rank, not the number.
    const std::vector<fault_rule> plan{{.rank = 3, .on = barrier, .nth = 2, .action = fault::fail{7, "here"}}};
    std::vector<int> failed(4, -1);
    threads::launch(
        4,
        [&](threads& t) {
            faulty c(std::move(t), plan);
            const std::vector<int> colors{0, 0, 1, 1};
            auto half = c.split(colors, "half");
            std::string text;
            const int at = failing_barrier(*half, text);
            failed[static_cast<std::size_t>(c.rank())] = text.starts_with("barrier: here (code 7)") ? at : 0;
        },
        patient);
    CHECK(failed == std::vector{0, 0, 0, 2});
}

TEST_CASE("an abort reaches every rank with its text") {
    std::vector<std::string> texts(3);
    threads::launch(
        3,
        [&](threads& t) {
            faulty c(std::move(t), {{.rank = 2, .on = barrier, .nth = 2, .action = fault::abort{"power lost"}}});
            std::string& text = texts[static_cast<std::size_t>(c.rank())];
            const int at = failing_barrier(c, text);
            CHECK(at == 2);
            CHECK_THROWS_AS(c.synchronize(), aborted_error);
        },
        patient);
    for (const std::string& text : texts) { CHECK(text.find("barrier: aborted: power lost") != std::string::npos); }
}

TEST_CASE("a delay makes the rank late, once") {
    threads::launch(
        2,
        [&](threads& t) {
            faulty c(std::move(t), {{.rank = 1, .on = broadcast, .action = fault::delay{30ms}}});
            std::vector<int> data{c.rank()};
            const auto start = clock_type::now();
            c.broadcast(view<int>(data), 1);
            if (c.rank() == 1) { CHECK(clock_type::now() - start >= 30ms); }
            CHECK(data[0] == 1);
            c.broadcast(view<int>(data), 0);
            CHECK(c.struck() == static_cast<std::uint64_t>(c.rank()));
        },
        patient);
}

TEST_CASE("rules strike in the order of the plan") {
    faulty c(alone(), {{.on = barrier, .action = fault::delay{20ms}},
                       {.on = barrier, .action = fault::fail{}},
                       {.on = barrier, .action = fault::abort{}}});
    const auto start = clock_type::now();
    CHECK_THROWS_AS(c.barrier(), backend_error);
    CHECK(clock_type::now() - start >= 20ms);
    CHECK(c.struck() == 3);  // picked together; the failure ended the call
    CHECK_THROWS_WITH_AS(c.synchronize(), doctest::Contains("injected failure"), aborted_error);
}

// NVIDIA/nccl#1260: which ranks did not join?
TEST_CASE("an absent rank: peers run into their deadline and say who is missing, then it learns that it is over") {
    std::vector<std::string> texts(3);
    CHECK_THROWS_AS(
        threads::launch(3,
                        [&](threads& t) {
                            faulty c(std::move(t), {{.rank = 1, .on = all_gather, .action = fault::absence{}}}, 20s);
                            std::vector<int> data(3);
                            try {
                                c.all_gather(view<int>(data).sub(0, 0), view<int>(data).sub(0, 0));
                                FAIL("the call returned");
                            } catch (const error& e) {
                                texts[static_cast<std::size_t>(c.rank())] = e.what();
                                if (const auto* timeout = dynamic_cast<const timeout_error*>(&e)) {
                                    CHECK(std::count(timeout->missing().begin(), timeout->missing().end(), 1) == 1);
                                }
                                throw;
                            }
                        },
                        {.name = "dp", .timeout = 50ms}),
        timeout_error);
    CHECK(texts[1].starts_with("synchronize: aborted: all_gather: rank "));
    CHECK(texts[1].find(" did not arrive within 0.05 s") != std::string::npos);
}

TEST_CASE("an absent rank whose peers wait longer gives up itself") {
    std::vector<std::string> texts(2);
    CHECK_THROWS_AS(threads::launch(
                        2,
                        [&](threads& t) {
                            faulty c(std::move(t), {{.rank = 0, .on = barrier, .action = fault::absence{}}}, 30ms);
                            try {
                                c.barrier();
                                FAIL("the call returned");
                            } catch (const error& e) {
                                texts[static_cast<std::size_t>(c.rank())] = e.what();
                                if (const auto* timeout = dynamic_cast<const timeout_error*>(&e)) {
                                    CHECK(timeout->missing() == std::vector{0});
                                }
                                throw;
                            }
                        },
                        patient),
                    timeout_error);
    CHECK(texts[0] == "barrier: rank 0 stayed away for 0.03 s, call 1 on 'dp', rank 0");
    CHECK(texts[1].find("aborted: " + texts[0]) != std::string::npos);
}

TEST_CASE("a delayed rank notices the abort of its family") {
    threads::launch(
        2,
        [&](threads& t) {
            faulty c(std::move(t), {{.rank = 0, .on = barrier, .action = fault::delay{std::chrono::hours(1)}}});
            if (c.rank() == 1) { c.abort("no more waiting"); }
            CHECK_THROWS_WITH_AS(c.barrier(), doctest::Contains("no more waiting"), aborted_error);
        },
        patient);
}

TEST_CASE("inside checked, a rank that fails in the comparison ends the call everywhere") {
    std::vector<int> ended(3, 0);
    CHECK_THROWS_AS(
        threads::launch(
            3,
            [&](threads& t) {
                comm::checked c(
                    faulty(std::move(t),
                           {{.rank = 2, .on = control::gather_control, .nth = 2, .action = fault::fail{5, "lost"}}}));
                c.barrier();
                try {
                    c.barrier();
                    FAIL("the call returned");
                } catch (const error&) {
                    ended[static_cast<std::size_t>(c.rank())] = 1;
                    throw;
                }
            },
            patient),
        backend_error);
    CHECK(ended == std::vector{1, 1, 1});
}

TEST_CASE("a plan that cannot strike is rejected") {
    CHECK_THROWS_WITH_AS(faulty(alone(), {{.rank = 1}}), "faulty: rule 0 is for rank 1 of 1 ranks", usage_error);
    CHECK_THROWS_WITH_AS(faulty(alone(), {{}, {.rank = -1}}), "faulty: rule 1 is for rank -1 of 1 ranks", usage_error);
    CHECK_THROWS_AS(faulty(alone(), {}, -1s), usage_error);
    CHECK_THROWS_WITH_AS(faulty(alone(), {{.nth = 0}}), "faulty: rule 0 is for match 0; the first is 1", usage_error);
    CHECK_THROWS_WITH_AS(faulty(alone(), {{.action = fault::delay{-1s}}}), "faulty: rule 0 delays by -1 s",
                         usage_error);
}
