// What tests over fake_nccl share: ranks as threads, each with a device, a stream and storage that the host reads.
// Needs fake_cuda, fake_nccl, doctest.
#pragma once

#include <thread>  // ranks
#include <vector>  // ranks

#include <doctest/doctest.h>  // checks

#include <support/fake_cuda.hpp>  // streams
#include <support/fake_nccl.hpp>  // communicators
#include <support/soon.hpp>       // bounded waits

namespace tutti::test {

inline void ok(cudaError_t e) { REQUIRE_MESSAGE(e == cudaSuccess, cudaGetErrorName(e)); }
inline void ok(ncclResult_t r) { REQUIRE_MESSAGE(r == ncclSuccess, ncclGetErrorString(r)); }

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

inline bool done(cudaStream_t s) { return cudaStreamQuery(s) == cudaSuccess; }

struct fixture {
    std::size_t live = fake_nccl::live_communicators();
    fixture() {
        fake_cuda::reset();
        fake_nccl::reset();
    }
    ~fixture() {
        CHECK(fake_nccl::live_communicators() == live);
        fake_cuda::reset();
        fake_nccl::reset();
    }
};
inline void no_problems() {
    for (const auto& p : fake_nccl::problems()) { FAIL_CHECK(p); }
}

}  // namespace tutti::test
