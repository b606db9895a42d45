// The fake of the CUDA runtime keeps CUDA's rules: order in and across streams, storage, errors, captures.
#include <support/fake_cuda.hpp>  // under test

#include <atomic>   // order
#include <chrono>   // delays
#include <cstring>  // strcmp
#include <string>   // names
#include <thread>   // hosts
#include <vector>   // data

#include <doctest/doctest.h>  // checks

namespace fake = tutti::test::fake_cuda;
using namespace std::chrono_literals;

namespace {

void ok(cudaError_t e) { REQUIRE_MESSAGE(e == cudaSuccess, cudaGetErrorName(e)); }

struct stream {
    cudaStream_t handle = nullptr;
    explicit stream(int device = 0) {
        ok(cudaSetDevice(device));
        ok(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
        ok(cudaSetDevice(0));
    }
    stream(const stream&) = delete;
    stream& operator=(const stream&) = delete;
    ~stream() { cudaStreamDestroy(handle); }
};
struct event {
    cudaEvent_t handle = nullptr;
    explicit event(unsigned flags = cudaEventDisableTiming) { ok(cudaEventCreateWithFlags(&handle, flags)); }
    event(const event&) = delete;
    event& operator=(const event&) = delete;
    ~event() { cudaEventDestroy(handle); }
};
struct timed_event : event {
    explicit timed_event(int device = 0) : event((ok(cudaSetDevice(device)), cudaEventDefault)) {
        ok(cudaSetDevice(0));
    }
};
int* device_ints(std::size_t count, cudaStream_t s) {
    void* p = nullptr;
    ok(cudaMallocAsync(&p, count * sizeof(int), s));
    return static_cast<int*>(p);
}
int* pinned_ints(std::size_t count) {
    void* p = nullptr;
    ok(cudaHostAlloc(&p, count * sizeof(int), cudaHostAllocPortable));
    return static_cast<int*>(p);
}

struct fixture {
    fixture() { fake::reset(); }
    ~fixture() { fake::reset(); }
};

}  // namespace

TEST_CASE_FIXTURE(fixture, "work of a stream runs in order, on another thread, whatever the delays") {
    fake::delay(7, 200us);
    const stream s;
    std::vector<int> seen;
    std::thread::id who;
    for (int i = 0; i < 50; ++i) {
        fake::launch(s.handle, [&, i] {
            seen.push_back(i);
            who = std::this_thread::get_id();
        });
    }
    ok(cudaStreamSynchronize(s.handle));
    CHECK(who != std::this_thread::get_id());
    REQUIRE(seen.size() == 50);
    for (int i = 0; i < 50; ++i) { CHECK(seen[static_cast<std::size_t>(i)] == i); }
}

TEST_CASE_FIXTURE(fixture, "streams do not wait for each other but by events") {
    const stream a, b;
    const event e;
    std::atomic<int> reached{0};
    int value = 0;
    {
        const fake::hold held(a.handle);
        fake::launch(a.handle, [&] { value = 42; });
        ok(cudaEventRecord(e.handle, a.handle));
        fake::launch(b.handle, [&] { reached = 1; });
        ok(cudaStreamSynchronize(b.handle));
        CHECK(reached == 1);
        CHECK(cudaStreamQuery(a.handle) == cudaErrorNotReady);
        CHECK(cudaEventQuery(e.handle) == cudaErrorNotReady);
        ok(cudaStreamWaitEvent(b.handle, e.handle, 0));
        fake::launch(b.handle, [&] { reached = value; });
        std::this_thread::sleep_for(20ms);
        CHECK(reached == 1);
    }
    ok(cudaStreamSynchronize(b.handle));
    CHECK(reached == 42);
    CHECK(cudaEventQuery(e.handle) == cudaSuccess);
}

TEST_CASE_FIXTURE(fixture, "an event means its last record, and may be destroyed while it is waited for") {
    const stream a, b;
    std::atomic<bool> through{false};
    cudaEvent_t e = nullptr;
    ok(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    CHECK(cudaEventQuery(e) == cudaSuccess);  // never recorded
    ok(cudaStreamWaitEvent(b.handle, e, 0));
    ok(cudaStreamSynchronize(b.handle));
    {
        const fake::hold held(a.handle);
        ok(cudaEventRecord(e, a.handle));
        ok(cudaStreamWaitEvent(b.handle, e, 0));
        ok(cudaEventRecord(e, b.handle));  // does not change what b waits for
        ok(cudaEventDestroy(e));
        fake::launch(b.handle, [&] { through = true; });
        std::this_thread::sleep_for(20ms);
        CHECK_FALSE(through);
    }
    ok(cudaStreamSynchronize(b.handle));
    CHECK(through);
    CHECK(fake::live_events() == 0);
}

TEST_CASE_FIXTURE(fixture, "virtual time: streams have clocks of their own, and who waits takes over the later time") {
    const fake::virtual_time virtual_time;
    fake::delay(5, 200us);
    const stream a, b, there(1);
    const timed_event begin, a3, a10, b7, elsewhere(1);
    ok(cudaEventRecord(begin.handle, b.handle));
    fake::spend(a.handle, 3ms);
    ok(cudaEventRecord(a3.handle, a.handle));
    fake::spend(a.handle, 7ms);
    ok(cudaEventRecord(a10.handle, a.handle));
    fake::spend(b.handle, 4500us);
    ok(cudaStreamWaitEvent(b.handle, a3.handle, 0));  // 3 is before 4.5
    fake::spend(b.handle, 2500us);
    ok(cudaEventRecord(b7.handle, b.handle));
    ok(cudaStreamWaitEvent(b.handle, a10.handle, 0));  // 10 is after 7
    ok(cudaStreamSynchronize(b.handle));
    ok(cudaEventRecord(elsewhere.handle, there.handle));
    ok(cudaStreamSynchronize(there.handle));
    const auto elapsed = [](const timed_event& from, const timed_event& to) {
        float ms = -1;
        ok(cudaEventElapsedTime(&ms, from.handle, to.handle));
        return ms;
    };
    CHECK(elapsed(begin, a3) == 3.0f);
    CHECK(elapsed(begin, a10) == 10.0f);
    CHECK(elapsed(begin, b7) == 7.0f);
    CHECK(elapsed(a10, b7) == -3.0f);
    CHECK(elapsed(b7, b7) == 0.0f);
    const timed_event later;
    ok(cudaEventRecord(later.handle, b.handle));
    ok(cudaStreamSynchronize(b.handle));
    CHECK(elapsed(begin, later) == 10.0f);
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin.handle, elsewhere.handle) == cudaErrorInvalidResourceHandle);
    const event untimed;
    ok(cudaEventRecord(untimed.handle, a.handle));
    CHECK(cudaEventElapsedTime(&ms, begin.handle, untimed.handle) == cudaErrorInvalidResourceHandle);
    {
        const fake::hold held(a.handle);
        ok(cudaEventRecord(a10.handle, a.handle));
        CHECK(cudaEventElapsedTime(&ms, begin.handle, a10.handle) == cudaErrorNotReady);
    }
    cudaGetLastError();
}

TEST_CASE_FIXTURE(fixture, "real time passes while a stream spends it") {
    const stream s;
    const timed_event begin, end;
    ok(cudaEventRecord(begin.handle, s.handle));
    fake::spend(s.handle, 5ms);
    ok(cudaEventRecord(end.handle, s.handle));
    ok(cudaStreamSynchronize(s.handle));
    float ms = 0;
    ok(cudaEventElapsedTime(&ms, begin.handle, end.handle));
    CHECK(ms >= 5.0f);
}

TEST_CASE_FIXTURE(fixture, "a destroyed stream ends its work first") {
    std::atomic<bool> ran{false};
    {
        const stream s;
        fake::launch(s.handle, [&] {
            std::this_thread::sleep_for(20ms);
            ran = true;
        });
    }
    while (fake::live_streams() != 0) { std::this_thread::sleep_for(1ms); }
    CHECK(ran);
    cudaStream_t gone = nullptr;
    ok(cudaStreamCreate(&gone));
    ok(cudaStreamDestroy(gone));
    CHECK(cudaStreamQuery(gone) == cudaErrorInvalidResourceHandle);
    cudaGetLastError();
}

TEST_CASE_FIXTURE(fixture, "storage is freed in the order of the stream that frees it") {
    const stream s;
    int* const host = pinned_ints(4);
    const auto before = fake::live_allocations();
    {
        const fake::hold held(s.handle);
        int* const p = device_ints(4, s.handle);
        host[0] = 1, host[1] = 2, host[2] = 3, host[3] = 4;
        ok(cudaMemcpyAsync(p, host, 16, cudaMemcpyHostToDevice, s.handle));
        fake::launch(s.handle, [p] { p[0] += p[3]; });
        ok(cudaMemcpyAsync(host, p, 16, cudaMemcpyDeviceToHost, s.handle));
        ok(cudaFreeAsync(p, s.handle));  // all above still reads it, after this call
        CHECK(cudaFreeAsync(p, s.handle) == cudaErrorInvalidValue);
        CHECK(cudaMemcpyAsync(host, p, 16, cudaMemcpyDeviceToHost, s.handle) == cudaErrorInvalidValue);
    }
    ok(cudaStreamSynchronize(s.handle));
    CHECK(host[0] == 5);
    CHECK(fake::live_allocations() == before);
    ok(cudaFreeHost(host));
}

TEST_CASE_FIXTURE(fixture, "a pool belongs to its device, unless it is shared") {
    const stream there(1);
    cudaMemPool_t pool = nullptr;
    cudaMemPoolProps properties{};
    properties.location = {cudaMemLocationTypeDevice, 1};
    ok(cudaMemPoolCreate(&pool, &properties));
    void *p = nullptr, *q = nullptr;
    CHECK(cudaMallocFromPoolAsync(&p, 4, pool, there.handle) == cudaErrorInvalidValue);  // device 0 is current
    ok(cudaSetDevice(1));
    ok(cudaMallocFromPoolAsync(&p, 4, pool, there.handle));
    ok(cudaMallocFromPoolAsync(&q, 4, pool, there.handle));
    ok(cudaSetDevice(0));
    CHECK(cudaMemcpyAsync(p, q, 4, cudaMemcpyDeviceToDevice, there.handle) == cudaErrorInvalidValue);
    cudaMemAccessDesc access{{cudaMemLocationTypeDevice, 0}, cudaMemAccessFlagsProtReadWrite};
    ok(cudaMemPoolSetAccess(pool, &access, 1));
    ok(cudaMemcpyAsync(p, q, 4, cudaMemcpyDeviceToDevice, there.handle));
    CHECK(cudaMemPoolDestroy(pool) == cudaErrorInvalidValue);
    ok(cudaFreeAsync(p, there.handle));
    ok(cudaFreeAsync(q, there.handle));
    ok(cudaStreamSynchronize(there.handle));
    ok(cudaMemPoolDestroy(pool));
    cudaGetLastError();
}

TEST_CASE_FIXTURE(fixture, "copies of memory that is not page-locked block, others do not; each wait is counted") {
    const stream s;
    int* const p = device_ints(1, s.handle);
    int* const pinned = pinned_ints(1);
    int plain = 6;
    pinned[0] = 5;
    const auto before = fake::host_waits();
    {
        const fake::hold held(s.handle);
        ok(cudaMemcpyAsync(p, pinned, 4, cudaMemcpyHostToDevice, s.handle));
        CHECK(fake::host_waits() == before);
    }
    ok(cudaMemcpyAsync(&plain, p, 4, cudaMemcpyDeviceToHost, s.handle));
    CHECK(plain == 5);  // without synchronization
    CHECK(fake::host_waits() == before + 1);
    CHECK(cudaMemcpyAsync(&plain, p, 4, cudaMemcpyDeviceToDevice, s.handle) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(p, pinned, 8, cudaMemcpyHostToDevice, s.handle) == cudaErrorInvalidValue);  // too much
    cudaGetLastError();
    ok(cudaFreeAsync(p, s.handle));
    ok(cudaStreamSynchronize(s.handle));
    CHECK(fake::host_waits() == before + 2);
    ok(cudaFreeHost(pinned));
}

TEST_CASE_FIXTURE(fixture, "the device is a thread's own; errors are said once, faults for good") {
    ok(cudaSetDevice(2));
    std::thread([] {
        int device = -1;
        ok(cudaGetDevice(&device));
        CHECK(device == 0);
    }).join();
    ok(cudaSetDevice(0));
    CHECK(cudaSetDevice(4) == cudaErrorInvalidDevice);
    CHECK(cudaPeekAtLastError() == cudaErrorInvalidDevice);
    CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(std::strcmp(cudaGetErrorName(cudaErrorInvalidDevice), "cudaErrorInvalidDevice") == 0);

    const stream s, other(1);
    const event e;
    std::atomic<bool> ran{false};
    {
        const fake::hold held(s.handle);
        fake::launch(s.handle, [&] { ran = true; });
        ok(cudaEventRecord(e.handle, s.handle));
        fake::fault(0);
    }
    CHECK(cudaEventSynchronize(e.handle) == cudaErrorIllegalAddress);
    CHECK(cudaStreamSynchronize(s.handle) == cudaErrorIllegalAddress);
    CHECK(cudaEventRecord(e.handle, s.handle) == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
    CHECK_FALSE(ran);
    ok(cudaStreamSynchronize(other.handle));  // another device
}

TEST_CASE_FIXTURE(fixture, "planned failures and counts of calls") {
    const stream s;
    const event e;
    fake::fail("cudaEventRecord", 2, cudaErrorMemoryAllocation);
    const auto before = fake::calls("cudaEventRecord");
    CHECK(cudaEventRecord(e.handle, s.handle) == cudaSuccess);
    CHECK(cudaEventRecord(e.handle, s.handle) == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaEventRecord(e.handle, s.handle) == cudaSuccess);
    CHECK(fake::calls("cudaEventRecord") == before + 3);
}

TEST_CASE_FIXTURE(fixture, "CUDA may not be called from a host function") {
    const stream s;
    cudaError_t inside = cudaSuccess;
    ok(cudaLaunchHostFunc(
        s.handle, [](void* p) { *static_cast<cudaError_t*>(p) = cudaDeviceSynchronize(); }, &inside));
    ok(cudaStreamSynchronize(s.handle));
    CHECK(inside == cudaErrorNotPermitted);
}

TEST_CASE_FIXTURE(fixture, "a capture records and does not run; its graph runs each time") {
    const stream s, side;
    const event fork, join;
    int value = 0;
    ok(cudaStreamBeginCapture(s.handle, cudaStreamCaptureModeGlobal));
    fake::launch(s.handle, [&] { value += 1; });
    ok(cudaEventRecord(fork.handle, s.handle));
    ok(cudaStreamWaitEvent(side.handle, fork.handle, 0));
    cudaStreamCaptureStatus status{};
    ok(cudaStreamIsCapturing(side.handle, &status));
    CHECK(status == cudaStreamCaptureStatusActive);
    fake::launch(side.handle, [&] { value *= 2; });
    ok(cudaEventRecord(join.handle, side.handle));
    ok(cudaStreamWaitEvent(s.handle, join.handle, 0));
    cudaGraph_t graph = nullptr;
    ok(cudaStreamEndCapture(s.handle, &graph));
    ok(cudaStreamIsCapturing(side.handle, &status));
    CHECK(status == cudaStreamCaptureStatusNone);
    ok(cudaStreamSynchronize(s.handle));
    CHECK(value == 0);
    cudaGraphExec_t run = nullptr;
    ok(cudaGraphInstantiate(&run, graph, 0));
    ok(cudaGraphDestroy(graph));
    for (int i = 0; i < 3; ++i) { ok(cudaGraphLaunch(run, s.handle)); }
    ok(cudaGraphExecDestroy(run));  // launches hold what they need
    ok(cudaStreamSynchronize(s.handle));
    CHECK(value == 14);
}

TEST_CASE_FIXTURE(fixture, "what spoils a capture") {
    const stream s, side;
    const event e, inside;
    cudaGraph_t graph = nullptr;
    const auto spoiled = [&](cudaError_t at_end, auto act) {
        ok(cudaStreamBeginCapture(s.handle, cudaStreamCaptureModeGlobal));
        act();
        CHECK(cudaStreamEndCapture(s.handle, &graph) == at_end);
        CHECK(graph == nullptr);
        ok(cudaStreamSynchronize(s.handle));
        ok(cudaStreamSynchronize(side.handle));
    };
    spoiled(cudaErrorStreamCaptureInvalidated,
            [&] { CHECK(cudaStreamSynchronize(s.handle) == cudaErrorStreamCaptureUnsupported); });
    spoiled(cudaErrorStreamCaptureInvalidated,
            [&] { CHECK(cudaEventQuery(e.handle) == cudaErrorStreamCaptureUnsupported); });
    spoiled(cudaErrorStreamCaptureInvalidated, [&] {  // even another thread's query
        std::thread([&] { CHECK(cudaEventQuery(e.handle) == cudaErrorStreamCaptureUnsupported); }).join();
    });
    spoiled(cudaErrorStreamCaptureInvalidated, [&] {
        ok(cudaEventRecord(e.handle, side.handle));
        CHECK(cudaStreamWaitEvent(s.handle, e.handle, 0) == cudaErrorStreamCaptureIsolation);
    });
    spoiled(cudaErrorStreamCaptureUnjoined, [&] {
        ok(cudaEventRecord(inside.handle, s.handle));
        ok(cudaStreamWaitEvent(side.handle, inside.handle, 0));
        fake::launch(side.handle, [] {});
    });
    CHECK(cudaEventQuery(inside.handle) == cudaErrorCapturedEvent);
    ok(cudaStreamBeginCapture(s.handle, cudaStreamCaptureModeThreadLocal));
    std::thread([&] { CHECK(cudaEventQuery(e.handle) == cudaSuccess); }).join();  // nobody else is concerned
    ok(cudaStreamEndCapture(s.handle, &graph));
    ok(cudaGraphDestroy(graph));
    cudaGetLastError();
}
