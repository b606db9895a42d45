// The fake of NCCL keeps NCCL's rules: data, groups, messages, splits, captures, communicators that do not block.
#include <chrono>  // delays
#include <memory>  // places
#include <thread>  // sleep
#include <vector>  // communicators

#include <doctest/doctest.h>  // checks

#include <support/fake/ranks.hpp>  // ranks
#include <support/fake_cuda.hpp>   // streams
#include <support/fake_nccl.hpp>   // under test

using namespace tutti::test;
namespace cuda = tutti::test::fake_cuda;
namespace fake = tutti::test::fake_nccl;
using namespace std::chrono_literals;

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
        CHECK(soon([&] { return state(c) == ncclSuccess; }, std::chrono::seconds(5)));
        ok(ncclCommDestroy(c));
    }
    no_problems();
}
