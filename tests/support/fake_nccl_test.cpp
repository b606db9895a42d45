// The fake of NCCL keeps NCCL's rules: groups, order, messages, splits, aborts, captures; and it sees wrong use.
#include <support/fake_cuda.hpp>  // streams
#include <support/fake_nccl.hpp>  // under test

#include <atomic>      // flags
#include <chrono>      // bounded times
#include <functional>  // bodies
#include <memory>      // places
#include <string>      // problems
#include <thread>      // ranks
#include <vector>      // data

#include <doctest/doctest.h>  // checks

namespace cuda = tutti::test::fake_cuda;
namespace fake = tutti::test::fake_nccl;
using namespace std::chrono_literals;

namespace {

void ok(cudaError_t e) { REQUIRE_MESSAGE(e == cudaSuccess, cudaGetErrorName(e)); }
void ok(ncclResult_t r) { REQUIRE_MESSAGE(r == ncclSuccess, ncclGetErrorString(r)); }

// One rank: a device, a stream, storage that host and device read.
struct place {
    int rank;
    ncclComm_t comm = nullptr;
    cudaStream_t stream = nullptr;
    float* data = nullptr;  // 64 elements, and 64 for results
    float* out = nullptr;

    explicit place(int r) : rank(r) {
        ok(cudaSetDevice(r));
        ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        void* p = nullptr;
        ok(cudaHostAlloc(&p, 128 * sizeof(float), cudaHostAllocPortable));
        data = static_cast<float*>(p);
        out = data + 64;
        for (int i = 0; i < 64; ++i) { data[i] = static_cast<float>(100 * r + i); }
    }
    place(const place&) = delete;
    place& operator=(const place&) = delete;
    ~place() {
        cudaStreamSynchronize(stream);
        cudaStreamDestroy(stream);
        cudaFreeHost(data);
    }
    void sync() const { ok(cudaStreamSynchronize(stream)); }
};

// body(place&) on n threads, with a communicator of all.
template <class Body> void ranks(int n, Body body, ncclResult_t (*end)(ncclComm_t) = ncclCommDestroy) {
    ncclUniqueId id;
    ok(ncclGetUniqueId(&id));
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r) {
        threads.emplace_back([&, r] {
            place p(r);
            ok(ncclCommInitRank(&p.comm, n, id, r));
            body(p);
            if (end != nullptr) { ok(end(p.comm)); }
        });
    }
    for (auto& t : threads) { t.join(); }
}

bool done(cudaStream_t s) { return cudaStreamQuery(s) == cudaSuccess; }
template <class Condition> bool soon(Condition holds) {
    for (const auto end = std::chrono::steady_clock::now() + 5s; std::chrono::steady_clock::now() < end;) {
        if (holds()) { return true; }
        std::this_thread::sleep_for(1ms);
    }
    return false;
}

struct fixture {
    std::size_t live = fake::live_communicators();
    fixture() {
        cuda::reset();
        fake::reset();
    }
    ~fixture() {
        CHECK(fake::live_communicators() == live);
        cuda::reset();
        fake::reset();
    }
};
void no_problems() {
    for (const auto& p : fake::problems()) { FAIL_CHECK(p); }
}

}  // namespace

TEST_CASE_FIXTURE(fixture, "every collective moves what NCCL says") {
    cuda::delay(3, 100us);
    ranks(3, [](place& p) {
        const auto at = [](int r, int i) { return static_cast<float>(100 * r + i); };
        const int r = p.rank;
        ok(ncclAllReduce(p.data, p.out, 6, ncclFloat32, ncclSum, p.comm, p.stream));
        p.sync();
        for (int i = 0; i < 6; ++i) { CHECK(p.out[i] == at(0, i) + at(1, i) + at(2, i)); }
        ok(ncclAllReduce(p.data, p.out, 6, ncclFloat32, ncclMax, p.comm, p.stream));
        p.sync();
        CHECK(p.out[5] == at(2, 5));
        ok(ncclReduceScatter(p.data, p.out, 2, ncclFloat32, ncclMin, p.comm, p.stream));
        p.sync();
        CHECK(p.out[1] == at(0, 2 * r + 1));
        ok(ncclAllGather(p.data, p.out, 2, ncclFloat32, p.comm, p.stream));
        p.sync();
        for (int i = 0; i < 6; ++i) { CHECK(p.out[i] == at(i / 2, i % 2)); }
        ok(ncclBroadcast(p.data, p.out, 4, ncclFloat32, 1, p.comm, p.stream));
        p.sync();
        CHECK(p.out[3] == at(1, 3));
        p.out[0] = -1;
        ok(ncclReduce(p.data, p.out, 1, ncclFloat32, ncclProd, 2, p.comm, p.stream));
        p.sync();
        CHECK(p.out[0] == (r == 2 ? 0.0f : -1.0f));
        ok(ncclAlltoAll(p.data, p.out, 2, ncclFloat32, p.comm, p.stream));
        p.sync();
        for (int i = 0; i < 6; ++i) { CHECK(p.out[i] == at(i / 2, 2 * r + i % 2)); }
        p.out[5] = -1;
        ok(ncclGather(p.data, p.out, 2, ncclFloat32, 0, p.comm, p.stream));
        p.sync();
        CHECK(p.out[5] == (r == 0 ? at(2, 1) : -1.0f));
        ok(ncclScatter(p.data, p.out, 2, ncclFloat32, 1, p.comm, p.stream));
        p.sync();
        CHECK(p.out[1] == at(1, 2 * r + 1));
        ok(ncclAllReduce(p.data, p.data, 1, ncclFloat32, ncclSum, p.comm, p.stream));  // in place
        p.sync();
        CHECK(p.data[0] == 300);
    });
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "types, means, and operators with a factor") {
    ranks(3, [](place& p) {
        auto* const sixteen = reinterpret_cast<__half*>(p.data);
        auto* const rounded = reinterpret_cast<__nv_bfloat16*>(p.out);
        sixteen[0] = __half(1.0f + static_cast<float>(p.rank));
        rounded[0] = __nv_bfloat16(1.0f + static_cast<float>(p.rank));
        ok(ncclAllReduce(sixteen, sixteen, 1, ncclFloat16, ncclProd, p.comm, p.stream));
        ok(ncclAllReduce(rounded, rounded, 1, ncclBfloat16, ncclSum, p.comm, p.stream));
        p.sync();
        CHECK(static_cast<float>(sixteen[0]) == 6);
        CHECK(static_cast<float>(rounded[0]) == 6);
        p.data[0] = static_cast<float>(p.rank);
        auto* const whole = reinterpret_cast<int*>(p.out);
        whole[0] = 10 * p.rank + 1;
        ok(ncclAllReduce(p.data, p.data, 1, ncclFloat32, ncclAvg, p.comm, p.stream));
        ok(ncclAllReduce(whole, whole, 1, ncclInt32, ncclAvg, p.comm, p.stream));
        p.sync();
        CHECK(p.data[0] == doctest::Approx(1));
        CHECK(whole[0] == 11);
        float factor = 0.5f;
        ncclRedOp_t op{};
        ok(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, p.comm));
        factor = 0;
        p.data[0] = static_cast<float>(p.rank);
        ok(ncclAllReduce(p.data, p.data, 1, ncclFloat32, op, p.comm, p.stream));
        ok(ncclRedOpDestroy(op, p.comm));
        p.sync();
        CHECK(p.data[0] == 1.5f);
        CHECK(ncclAllReduce(p.data, p.data, 1, ncclFloat32, op, p.comm, p.stream) == ncclInvalidArgument);
    });
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "one thread drives all ranks with groups, on communicators of ncclCommInitAll") {
    std::vector<ncclComm_t> all(3);
    ok(ncclCommInitAll(all.data(), 3, nullptr));
    std::vector<std::unique_ptr<place>> places;
    for (int r = 0; r < 3; ++r) { places.push_back(std::make_unique<place>(r)); }
    ok(ncclGroupStart());
    ok(ncclGroupStart());
    for (int r = 0; r < 3; ++r) {
        const auto& p = *places[static_cast<std::size_t>(r)];
        ok(ncclAllReduce(p.data, p.out, 2, ncclFloat32, ncclSum, all[static_cast<std::size_t>(r)], p.stream));
    }
    ok(ncclGroupEnd());
    for (const auto& p : places) { CHECK(done(p->stream)); }  // nothing was launched yet
    ok(ncclGroupEnd());
    for (const auto& p : places) {
        p->sync();
        CHECK(p->out[1] == 303);
    }
    const auto log = fake::log();
    CHECK(fake::calls("ncclAllReduce") == 3);
    for (const auto& c : log) {
        if (c.function == "ncclAllReduce") {
            CHECK(c.depth == 2);
            CHECK(c.bytes == 8);
            CHECK(c.stream == places[static_cast<std::size_t>(c.rank)]->stream);
        }
    }
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    for (const ncclComm_t c : all) { ok(ncclCommDestroy(c)); }
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "an error in a group is told by the call and by the end, and nothing of it is launched") {
    ranks(1, [](place& p) {
        p.out[0] = -1;
        ok(ncclGroupStart());
        ok(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream));
        CHECK(ncclBroadcast(p.data, p.out, 1, ncclFloat32, 5, p.comm, p.stream) == ncclInvalidArgument);
        CHECK(ncclGroupEnd() == ncclInvalidArgument);
        p.sync();
        CHECK(p.out[0] == -1);
        ok(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream));  // the next group is a new one
        p.sync();
        CHECK(p.out[0] == p.data[0]);
    });
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "messages of a group run at once; alone they block") {
    ranks(3, [](place& p) {
        ok(ncclGroupStart());
        for (int peer = 0; peer < 3; ++peer) {  // to itself, too
            ok(ncclSend(p.data + peer, 1, ncclFloat32, peer, p.comm, p.stream));
            ok(ncclRecv(p.out + peer, 1, ncclFloat32, peer, p.comm, p.stream));
        }
        ok(ncclGroupEnd());
        p.sync();
        for (int peer = 0; peer < 3; ++peer) { CHECK(p.out[peer] == static_cast<float>(100 * peer + p.rank)); }
    });
    no_problems();
    ranks(
        2,
        [](place& p) {  // each sends first: for good
            ok(ncclSend(p.data, 1, ncclFloat32, 1 - p.rank, p.comm, p.stream));
            ok(ncclRecv(p.out, 1, ncclFloat32, 1 - p.rank, p.comm, p.stream));
            std::this_thread::sleep_for(30ms);
            CHECK_FALSE(done(p.stream));
        },
        ncclCommAbort);
}

TEST_CASE_FIXTURE(fixture, "messages of a pair keep their order") {
    cuda::delay(11, 200us);
    ranks(2, [](place& p) {
        for (int i = 0; i < 20; ++i) {
            if (p.rank == 0) { ok(ncclSend(p.data + i, 1, ncclFloat32, 1, p.comm, p.stream)); }
            if (p.rank == 1) { ok(ncclRecv(p.out + i, 1, ncclFloat32, 0, p.comm, p.stream)); }
        }
        p.sync();
        for (int i = 0; i < 20 && p.rank == 1; ++i) { CHECK(p.out[i] == static_cast<float>(i)); }
    });
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "abort ends the wait of its own rank at once, and of nobody else") {
    std::atomic<int> aborted{0};
    ranks(
        3,
        [&](place& p) {
            if (p.rank == 2) { return; }  // never comes; its abort below is no help to the others
            ok(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream));
            std::this_thread::sleep_for(20ms);
            CHECK_FALSE(done(p.stream));
            while (p.rank == 1 && aborted == 0) { std::this_thread::sleep_for(1ms); }
            if (p.rank == 1) { CHECK_FALSE(done(p.stream)); }
            const auto start = std::chrono::steady_clock::now();
            ok(ncclCommAbort(p.comm));
            CHECK(std::chrono::steady_clock::now() - start < 2s);
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

TEST_CASE_FIXTURE(fixture, "a capture of a collective, replayed 100 times") {
    cuda::delay(5, 50us);
    ranks(2, [](place& p) {
        p.data[0] = 1 + static_cast<float>(p.rank);
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t run = nullptr;
        ok(cudaStreamBeginCapture(p.stream, cudaStreamCaptureModeThreadLocal));
        ok(ncclAllReduce(p.data, p.out, 1, ncclFloat32, ncclSum, p.comm, p.stream));
        cuda::launch(p.stream, [d = p.data, o = p.out] { d[0] = o[0] - d[0] + 1; });
        ok(cudaStreamEndCapture(p.stream, &graph));
        ok(cudaGraphInstantiate(&run, graph, 0));
        for (int i = 0; i < 100; ++i) {
            // a + b = 3 + 2 i: each rank goes on with the other's value and one.
            ok(cudaGraphLaunch(run, p.stream));
            if (i % 10 == 3) { ok(ncclAllReduce(p.data + 1, p.out + 1, 1, ncclFloat32, ncclSum, p.comm, p.stream)); }
            if (i % 7 == 0) {
                p.sync();
                CHECK(p.out[0] == static_cast<float>(3 + 2 * i));
            }
        }
        p.sync();
        CHECK(p.out[0] == 201);
        CHECK(p.out[1] == 102);
        ok(cudaGraphExecDestroy(run));
        ok(cudaGraphDestroy(graph));
    });
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "split: colors, keys, no color") {
    ranks(4, [](place& p) {
        ncclComm_t child = nullptr;
        ok(ncclCommSplit(p.comm, p.rank == 3 ? NCCL_SPLIT_NOCOLOR : 7, -p.rank, &child, nullptr));
        if (p.rank == 3) {
            CHECK(child == nullptr);
            return;
        }
        int rank = -1, size = 0, device = -1;
        ok(ncclCommUserRank(child, &rank));
        ok(ncclCommCount(child, &size));
        ok(ncclCommCuDevice(child, &device));
        CHECK(rank == 2 - p.rank);
        CHECK(size == 3);
        CHECK(device == p.rank);
        ok(ncclAllGather(p.data, p.out, 1, ncclFloat32, child, p.stream));
        p.sync();
        CHECK(p.out[0] == 200);
        CHECK(p.out[2] == 0);
        ok(ncclCommDestroy(child));
    });
    no_problems();
}

TEST_CASE_FIXTURE(fixture, "communicators that are not blocking: nothing is there before it is asked for") {
    ncclUniqueId id;
    ok(ncclGetUniqueId(&id));
    fake::polls_until_launch(2);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const auto state = [](ncclComm_t c) {
        ncclResult_t s = ncclSuccess;
        ok(ncclCommGetAsyncError(c, &s));
        return s;
    };
    place a(0), b(1);
    CHECK(ncclCommInitRankConfig(&b.comm, 2, id, 1, &config) == ncclInProgress);
    CHECK(state(b.comm) == ncclInProgress);
    CHECK(ncclAllReduce(b.data, b.out, 1, ncclFloat32, ncclSum, b.comm, b.stream) == ncclInvalidArgument);
    ok(cudaSetDevice(0));
    CHECK(ncclCommInitRankConfig(&a.comm, 2, id, 0, &config) == ncclInProgress);
    CHECK(state(a.comm) == ncclSuccess);
    CHECK(state(b.comm) == ncclSuccess);
    for (place* const p : {&a, &b}) {
        CHECK(ncclAllReduce(p->data, p->out, 1, ncclFloat32, ncclSum, p->comm, p->stream) == ncclInProgress);
        CHECK(done(p->stream));
        CHECK(ncclBroadcast(p->data, p->out, 1, ncclFloat32, 0, p->comm, p->stream) == ncclInvalidArgument);
        CHECK(state(p->comm) == ncclInProgress);
        CHECK(state(p->comm) == ncclInProgress);
        CHECK(state(p->comm) == ncclSuccess);
    }
    a.sync();
    CHECK(a.out[0] == 100);
    ncclComm_t child_a = nullptr, child_b = nullptr;
    CHECK(ncclCommSplit(a.comm, 0, 0, &child_a, nullptr) == ncclInProgress);
    CHECK(state(a.comm) == ncclInProgress);
    CHECK(ncclCommSplit(b.comm, 0, 1, &child_b, nullptr) == ncclInProgress);
    CHECK(child_a == nullptr);
    CHECK(state(a.comm) == ncclSuccess);
    CHECK(state(b.comm) == ncclSuccess);
    CHECK(child_a != nullptr);
    for (const ncclComm_t c : {child_a, child_b, a.comm, b.comm}) {
        CHECK(ncclCommFinalize(c) == ncclInProgress);
        CHECK(soon([&] { return state(c) == ncclSuccess; }));
        ok(ncclCommDestroy(c));
    }
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
                std::this_thread::sleep_for(20ms);
                if (hangs) {
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
    problem_of("too small", [](place& p) {
        fake::stall(1, {});
        ok(ncclAllReduce(p.data, p.out, 65, ncclFloat32, ncclSum, p.comm, p.stream));
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
