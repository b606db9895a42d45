// The fake of NCCL fails as NCCL fails and as a test plans it: aborts, errors, hangs; and it sees wrong use.
#include <atomic>       // flags
#include <chrono>       // bounded times
#include <functional>   // wrong uses
#include <string>       // problems
#include <string_view>  // problems
#include <thread>       // sleep
#include <vector>       // data

#include <doctest/doctest.h>  // checks

#include <support/fake/ranks.hpp>  // ranks
#include <support/fake_cuda.hpp>   // streams
#include <support/fake_nccl.hpp>   // under test

using namespace tutti::test;
namespace cuda = tutti::test::fake_cuda;
namespace fake = tutti::test::fake_nccl;
using namespace std::chrono_literals;

TEST_CASE_FIXTURE(fixture,
                  "abort ends the wait of its own rank at once, and those of peers that have come, without the sum") {
    std::atomic<int> looked{0}, aborted{0};
    ranks(
        3,
        [&](place& p) {
            if (p.rank == 2) { return; }  // never comes
            p.out[0] = -1;
            ok(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream));
            REQUIRE(soon([] { return fake::waiting_operations() == 2; }, 5s));
            CHECK_FALSE(done(p.stream));
            for (++looked; looked < 2;) { std::this_thread::sleep_for(1ms); }
            if (p.rank == 1) {
                while (aborted == 0) { std::this_thread::sleep_for(1ms); }
                p.sync();
                CHECK(p.out[0] == -1);
                // The next one finds nobody.
                ok(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream));
                CHECK(soon([] { return fake::waiting_operations() == 1; }, 5s));
                CHECK_FALSE(done(p.stream));
            }
            const auto start = std::chrono::steady_clock::now();
            ok(ncclCommAbort(p.comm));
            CHECK(std::chrono::steady_clock::now() - start < 10s);
            p.sync();
            ++aborted;
            std::this_thread::sleep_for(20ms);
        },
        nullptr);
    const auto log = fake::log();
    CHECK(fake::calls("ncclCommAbort") == 2);
    CHECK(fake::live_communicators() == live + 1);
    live = fake::live_communicators();  // rank 2 left without an end: the count says so
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "planned failures: calls, asynchronous errors, operations that never come") {
    fake::fail("ncclAllReduce", 2, ncclSystemError, {.rank = 1});
    ranks(
        2,
        [](place& p) {
            const auto sum = [&] { return ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream); };
            ok(sum());
            if (p.rank == 1) { CHECK(sum() == ncclSystemError); }
            p.sync();
        },
        ncclCommAbort);
    fake::async_error(2, ncclRemoteError, {.rank = 0});
    ranks(
        2,
        [](place& p) {
            const auto sum = [&] { return ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream); };
            ok(sum());
            p.sync();
            ok(sum());
            std::this_thread::sleep_for(20ms);
            CHECK_FALSE(done(p.stream));
            ncclResult_t state = ncclSuccess;
            ok(ncclCommGetAsyncError(p.comm, &state));
            CHECK(state == (p.rank == 0 ? ncclRemoteError : ncclSuccess));
            if (p.rank == 0) { CHECK(sum() == ncclRemoteError); }
        },
        ncclCommAbort);
    fake::reset();
    fake::stall(1, {.rank = 1});
    ranks(
        2,
        [](place& p) {
            ok(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream));
            std::this_thread::sleep_for(20ms);
            CHECK_FALSE(done(p.stream));
        },
        ncclCommAbort);
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "ranks that disagree are a problem; they may hang") {
    const auto disagree = [](bool hangs, ncclResult_t (*end)(ncclComm_t)) {
        fake::reset();
        fake::mismatch_hangs(hangs);
        ranks(
            2,
            [&](place& p) {
                ok(ncclAllReduce(p.data, p.out, p.rank == 0 ? 2 : 3, ncclFloat32, ncclSum, p.comm, p.stream));
                if (hangs) {
                    CHECK(soon([] { return !fake::problems().empty(); }, 5s));  // they have met
                    CHECK_FALSE(done(p.stream));
                } else {
                    p.sync();
                }
            },
            end);
        REQUIRE(fake::problems().size() == 1);
        CHECK(fake::problems()[0].find("would hang") == 0);
    };
    disagree(false, ncclCommDestroy);
    disagree(true, ncclCommAbort);
}

TEST_CASE_FIXTURE(fixture, "two communicators in different orders on the ranks of exclusive devices never end") {
    for (const bool exclusive : {false, true}) {
        fake::exclusive_device(exclusive);
        std::atomic<int> looked{0};
        ranks(
            2,
            [&](place& p) {
                place other(p.rank);
                ncclComm_t second = nullptr;
                ok(ncclCommSplit(p.comm, 0, p.rank, &second, nullptr));
                const auto on_first = [&] {
                    ok(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream));
                };
                const auto on_second = [&] {
                    ok(ncclAllReduce(other.data, other.out, 1, ncclFloat32, ncclSum, second, other.stream));
                };
                if (p.rank == 0) { on_first(), on_second(); }
                if (p.rank == 1) { on_second(), on_first(); }
                if (exclusive) {
                    std::this_thread::sleep_for(50ms);
                    CHECK_FALSE(done(p.stream));
                    CHECK_FALSE(done(other.stream));
                } else {
                    p.sync();
                    other.sync();
                }
                ++looked;  // an abort lets the other communicator go on
                while (looked != 2) { std::this_thread::sleep_for(1ms); }
                ok(ncclCommAbort(second));
            },
            ncclCommAbort);
    }
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "operations of one communicator keep their order on all streams") {
    ranks(1, [](place& p) {
        place other(p.rank);
        {
            const cuda::hold held(p.stream);
            ok(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream));
            ok(ncclAllReduce(other.data, other.out, 1, ncclFloat32, ncclSum, p.comm, other.stream));
            std::this_thread::sleep_for(20ms);
            CHECK_FALSE(done(other.stream));
        }
        other.sync();
    });
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "wrong use is a problem") {
    const auto problem_of = [](std::string_view words, const std::function<void(place&)>& act) {
        fake::reset();
        ranks(1, act, nullptr);
        REQUIRE_MESSAGE(fake::problems().size() == 1, words);
        CHECK_MESSAGE(fake::problems()[0].find(words) != std::string::npos, fake::problems()[0]);
    };
    problem_of("destroyed or aborted before", [](place& p) {
        ok(ncclCommDestroy(p.comm));
        CHECK(ncclCommAbort(p.comm) == ncclInvalidArgument);
    });
    problem_of("destroyed or aborted before", [](place& p) {
        ok(ncclCommAbort(p.comm));
        CHECK(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream) == ncclInvalidArgument);
    });
    problem_of("not memory of device", [](place& p) {
        std::vector<float> host(4);
        ok(ncclAllReduce(host.data(), p.out, 4, ncclFloat32, ncclSum, p.comm, p.stream));
        p.sync();
        ok(ncclCommDestroy(p.comm));
    });
    problem_of("overlap", [](place& p) {
        ok(ncclAllReduce(p.data, p.data, 4, ncclFloat32, ncclSum, p.comm, p.stream));
        ok(ncclAllReduce(p.data, p.data + 4, 4, ncclFloat32, ncclSum, p.comm, p.stream));
        ok(ncclAllReduce(p.data, p.data + 3, 4, ncclFloat32, ncclSum, p.comm, p.stream));
        p.sync();
        ok(ncclCommDestroy(p.comm));
    });
    problem_of("a graph", [](place& p) {
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t run = nullptr;
        ok(cudaStreamBeginCapture(p.stream, cudaStreamCaptureModeThreadLocal));
        ok(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream));
        ok(cudaStreamEndCapture(p.stream, &graph));
        ok(cudaGraphInstantiate(&run, graph, 0));
        ok(cudaGraphDestroy(graph));
        ok(ncclCommDestroy(p.comm));
        ok(cudaGraphLaunch(run, p.stream));
        ok(cudaGraphExecDestroy(run));
    });
    problem_of("too small", [](place& p) {
        fake::stall(1, {});
        ok(ncclSend(p.out, 65, ncclFloat32, 0, p.comm, p.stream));
        ok(ncclCommAbort(p.comm));
    });
    problem_of("another thread", [](place& p) {
        fake::stall(1, {});
        ok(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream));
        std::thread waits([&] { CHECK(ncclCommFinalize(p.comm) == ncclSuccess); });
        while (fake::calls("ncclCommFinalize") == 0) { std::this_thread::sleep_for(1ms); }
        ok(ncclCommAbort(p.comm));
        waits.join();
    });
    fake::reset();
    ncclUniqueId id;
    ok(ncclGetUniqueId(&id));
    place p(0);
    ok(ncclCommInitRank(&p.comm, 1, id, 0));
    CHECK(ncclCommInitRank(&p.comm, 1, id, 0) == ncclInvalidUsage);
    CHECK(fake::problems().size() == 1);
    ok(ncclCommDestroy(p.comm));
}

TEST_CASE_FIXTURE(fixture, "destroy may wait for all ranks") {
    fake::destroy_waits_for_all(true);
    std::atomic<bool> late{false};
    ranks(2, [&](place& p) {
        if (p.rank == 1) {
            std::this_thread::sleep_for(30ms);
            late = true;
        } else {
            ok(ncclCommDestroy(p.comm));
            CHECK(late);
            p.comm = nullptr;
        }
    });
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "two ranks on one device cannot be") {
    ncclUniqueId id;
    ok(ncclGetUniqueId(&id));
    ncclComm_t a = nullptr, b = nullptr;
    ok(ncclGroupStart());
    ok(ncclCommInitRank(&a, 2, id, 0));
    ok(ncclCommInitRank(&b, 2, id, 1));
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    ok(ncclCommAbort(a));
    ok(ncclCommAbort(b));
}
