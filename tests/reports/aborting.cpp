// Public bug reports on aborts: they must reach every rank, mark every communicator before anything is freed, and
// return. For ranks that are threads; those that are processes answer the same reports in comm/mpi_failures.cpp.
#include <atomic>     // counts
#include <chrono>     // bounds
#include <stdexcept>  // causes
#include <string>     // texts
#include <thread>     // aborts from elsewhere
#include <vector>     // data

#include <tutti/comm/threads.hpp>   // under test
#include <tutti/schedule/lane.hpp>  // operations in flight on several communicators

#include <doctest/doctest.h>  // checks

using namespace tutti;
using namespace std::chrono_literals;
using comm::threads;

namespace {

constexpr int ranks = 4;
// Nothing here waits for a deadline: whoever does fails the test by the text of the error.
const comm::options patient{.name = "dp", .timeout = 100s};

std::string first_cause(auto body) {
    try {
        threads::launch(ranks, body, patient);
    } catch (const std::exception& e) { return e.what(); }
    return "no error";
}

}  // namespace

TEST_CASE(
    "NVIDIA/nccl#829, NVIDIA/nccl#549, NVIDIA/nccl#1013, pytorch/pytorch#102599: abort returns while calls hang") {
    std::atomic<int> waiting = 0, ended = 0;
    std::atomic<bool> slow = false;
    const std::string cause = first_cause([&](threads& c) {
        if (c.rank() != 0) {
            ++waiting;
            std::vector<float> v(100000);
            try {
                c.all_reduce(v, view<float>(v), sum{});  // rank 0 never comes
            } catch (const aborted_error&) {
                ++ended;
                throw;
            }
            return;
        }
        while (waiting < ranks - 1) { std::this_thread::yield(); }
        std::this_thread::sleep_for(20ms);
        const auto start = clock_type::now();
        std::thread([&] { c.abort("operator pressed the button"); }).join();
        // Rank 0 stays: the others must hear of the abort itself, not of a rank that is gone.
        while (ended < ranks - 1 && clock_type::now() - start < 20s) { std::this_thread::sleep_for(1ms); }
        slow = ended < ranks - 1;
    });
    CHECK(!slow);
    CHECK(cause.find("operator pressed the button") != std::string::npos);
}

TEST_CASE("NVIDIA/nccl#863: aborting one rank must end all") {
    for (int culprit = 0; culprit < ranks; ++culprit) {
        std::atomic<int> told = 0;
        first_cause([&](threads& c) {
            if (c.rank() == culprit) { return c.abort("rank gave up"); }
            try {
                for (;;) { c.barrier(); }
            } catch (const aborted_error& e) {
                told += std::string(e.what()).find("rank gave up") != std::string::npos ? 1 : 0;
            }
        });
        CHECK(told == ranks - 1);
    }
}

TEST_CASE("NVIDIA/nccl#564: operations pending on two communicators, one abort ends both") {
    std::atomic<int> ended = 0;
    first_cause([&](threads& c) {
        schedule::lane a(c.duplicate("a"));
        schedule::lane b(c.duplicate("b"));
        c.barrier();
        if (c.rank() == 0) {  // takes part in neither, and ends both
            std::this_thread::sleep_for(10ms);
            return c.abort("both");
        }
        std::vector<float> x(50000), y(3);
        auto on_a = a.submit("x", [v = view<float>(x)](threads& k) { k.all_reduce(v, v, sum{}); });
        auto on_b = b.submit("y", [v = view<float>(y)](threads& k) { k.broadcast(v, 0); });
        for (auto* t : {&on_a, &on_b}) {
            try {
                t->wait(c.queue());
            } catch (const aborted_error& e) {
                ended += std::string(e.what()).find("both") != std::string::npos ? 1 : 0;
            }
        }
    });
    CHECK(ended == 2 * (ranks - 1));
}

namespace {
// An operation whose arithmetic fails in the middle, on the rank that says so.
thread_local int additions_until_error = 0;
struct failing_sum {
    static constexpr op_kind kind = op_kind::sum;
    template <class A> A operator()(A a, A b) const {
        if (additions_until_error > 0 && --additions_until_error == 0) { throw std::runtime_error("ECC error"); }
        return a + b;
    }
};
}  // namespace

TEST_CASE("NVIDIA/nccl#279, NVIDIA/nccl#140: an error inside one rank's operation is seen by all ranks") {
    for (const std::size_t count : {100u, 100000u}) {
        std::atomic<int> told = 0;
        const std::string cause = first_cause([&](threads& c) {
            std::vector<float> v(count, 1.0f);
            additions_until_error = c.rank() == 2 ? 57 : 0;
            try {
                for (;;) { c.all_reduce(v, view<float>(v), failing_sum{}); }
            } catch (const aborted_error& e) {
                told += std::string(e.what()).find("ECC error") != std::string::npos ? 1 : 0;
                throw;
            }
        });
        CHECK(cause == "ECC error");
        CHECK(told == ranks - 1);
    }
}

TEST_CASE("dmlc/xgboost#11217: an exception between two collectives leaves the others waiting") {
    for (int culprit = 0; culprit < ranks; ++culprit) {
        std::atomic<int> told = 0;
        const std::string cause = first_cause([&](threads& c) {
            c.barrier();
            if (c.rank() == culprit) { throw std::invalid_argument("bad input row"); }
            try {
                c.barrier();
            } catch (const aborted_error& e) {
                told += std::string(e.what()).find("bad input row") != std::string::npos ? 1 : 0;
                throw;
            }
        });
        CHECK(cause == "bad input row");
        CHECK(told == ranks - 1);
    }
}

TEST_CASE("vllm-project/vllm#39846, pytorch/pytorch#119250: ranks that end at different times, in different orders") {
    for (int round = 0; round < 20; ++round) {
        threads::launch(
            ranks,
            [&](threads& c) {
                std::vector<threads> children;
                for (int i = 0; i < 3; ++i) { children.push_back(c.duplicate("child")); }
                for (threads& k : children) { k.barrier(); }
                if ((c.rank() + round) % 2 == 0) { children.erase(children.begin()); }
                if (c.rank() == round % ranks) { std::this_thread::sleep_for(1ms); }
            },
            patient);
    }
    // A rank that is gone for good is named; nobody waits for it until the deadline.
    CHECK_THROWS_WITH_AS(threads::launch(
                             2,
                             [](threads& c) {
                                 c.barrier();
                                 if (c.rank() == 1) { c.barrier(); }
                             },
                             patient),
                         "barrier: rank 0 has left, call 2 on 'dp', rank 1", mismatch_error);
}
