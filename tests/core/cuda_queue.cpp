// cuda_queue without a device: order, storage, copies, waits and errors, over a fake of the CUDA runtime.
#include <tutti/core/cuda_queue.hpp>  // under test

#include <algorithm>  // max
#include <atomic>     // kernels that wait
#include <chrono>     // deadlines
#include <cstdlib>    // environment
#include <memory>     // what kernels wait for
#include <optional>   // marks
#include <string>     // environment
#include <thread>     // delays
#include <utility>    // move
#include <vector>     // data

#include <doctest/doctest.h>  // checks

#include <tutti/core/buffer.hpp>     // storage
#include <tutti/core/cuda_mark.hpp>  // marks
#include <tutti/core/deadline.hpp>   // after
#include <tutti/core/error.hpp>      // errors
#include <tutti/core/run.hpp>        // fetch

#include <support/fake_cuda.hpp>  // kernels, failures, counts

using namespace tutti;
namespace fake = tutti::test::fake_cuda;
using namespace std::chrono_literals;

namespace {

struct fixture {
    fixture() { fake::reset(); }
    ~fixture() { fake::reset(); }
};

void add(const cuda_queue& q, view<int, device_memory> x, int value) {
    fake::launch(q.stream(), [x, value] {
        for (std::size_t i = 0; i < x.size(); ++i) { x.data()[i] += value; }
    });
}

}  // namespace

TEST_CASE_FIXTURE(fixture, "work, copies and storage keep the queue's order, on a device that is not current") {
    fake::delay(1, 100us);
    for (int device = 0; device < 3; ++device) {
        const cuda_queue q(device);
        std::vector<int> in{1, 2, 3}, out(3);
        {
            const buffer<int, cuda_queue> x(q, 3);
            upload(q, view<const int>(in), x.view());
            add(q, x.view(), 10);
            download(q, view<const int, device_memory>(x.view()), view<int>(out));
            CHECK(out == std::vector<int>{11, 12, 13});
            add(q, x.view(), 1);
        }  // released while the queue still works on it
        CHECK(q.device() == device);
        CHECK(q.account().live() == 0);
    }
}

TEST_CASE_FIXTURE(fixture, "queues are ordered by events alone") {
    const cuda_queue a(0), b = a.sibling();
    const pinned_queue host;
    const buffer<int, pinned_queue> from(host, 1), to(host, 1);
    const buffer<int, cuda_queue> x(a, 1);
    from.data()[0] = 5;
    {
        const fake::hold held(a.stream());
        upload(a, view<const int, pinned_memory>(from.view()), x.view());
        add(a, x.view(), 2);
        const auto e = a.record();
        b.wait(e);
        download(b, view<const int, device_memory>(x.view()), to.view());
        CHECK_FALSE(e.ready());
        CHECK_THROWS_AS(e.wait_host(after(std::chrono::milliseconds(10))), timeout_error);
    }
    b.record().wait_host(after(std::chrono::seconds(10)));
    CHECK(to.data()[0] == 7);
    CHECK(fetch(a, view<const int, device_memory>(x.view()), 0) == 7);
}

TEST_CASE_FIXTURE(fixture, "a steady state neither waits nor makes anything new") {
    const cuda_queue a(0), b = a.sibling();
    const auto step = [&] {
        const buffer<int, cuda_queue> x(a, 100);
        add(a, x.view(), 1);
        b.wait(a.record());
        add(b, x.view(), 1);
        a.wait(b.record());
    };
    step();
    const auto waits = fake::host_waits();
    const auto events = fake::calls("cudaEventCreateWithFlags");
    for (int i = 0; i < 100; ++i) { step(); }
    CHECK(fake::host_waits() == waits);
    CHECK(fake::calls("cudaEventCreateWithFlags") == events);
    a.record().wait_host(after(std::chrono::seconds(10)));
    b.record().wait_host(after(std::chrono::seconds(10)));
}

TEST_CASE_FIXTURE(fixture,
                  "small page-locked memory is kept by the process, as CUDA waits for all devices to free it") {
    const pinned_queue host;
    for (const std::size_t bytes : {1u, 64u, 65u, 65536u}) {
        CAPTURE(bytes);
        void* const p = host.allocate(bytes);
        CHECK(host.account().live() == bytes);
        host.release(p, bytes);
        CHECK(host.account().live() == 0);
        void* const again = host.allocate(bytes);
        CHECK(again == p);
        void* const larger = host.allocate(2 * bytes);
        CHECK(larger != p);
        host.release(larger, 2 * bytes);
        host.release(again, bytes);
    }
    CHECK(fake::calls("cudaFreeHost") == 1);  // the largest, twice
    {
        const cuda_queue q(1);
        const buffer<int, cuda_queue> x(q, 1);
        const std::vector<int> five{5};
        upload(q, view<const int>(five), x.view());
        CHECK(fetch(q, x.view(), 0) == 5);
    }
    CHECK(fake::calls("cudaFreeHost") == 1);
}

TEST_CASE_FIXTURE(fixture, "page-locked memory that an exception passes is left to the copy that may still come") {
    const auto stays = [](auto give_up) {                            // the next who asks for memory
        const auto go = std::make_shared<std::atomic<bool>>(false);  // the stream may outlive this call
        const cuda_queue q(0);
        const buffer<int, cuda_queue> x(q, 1);
        const std::vector<int> five{5};
        upload(q, view<const int>(five), x.view());
        q.record().wait_host(after(10s));
        fake::launch(q.stream(), [go] {
            while (!*go) { std::this_thread::sleep_for(1ms); }
        });
        CHECK_THROWS_AS(give_up(q, view<const int, device_memory>(x.view())), timeout_error);
        const buffer<int, pinned_queue> next(pinned_queue{}, 1);
        next.data()[0] = 7;
        *go = true;
        q.record().wait_host(after(10s));
        return next.data()[0] == 7;
    };
    CHECK(stays([](const cuda_queue& q, view<const int, device_memory> x) {
        const buffer<int, pinned_queue> out(pinned_queue{}, 1);
        download(q, x, out.view());
        q.record().wait_host(after(1ms));
    }));
    CHECK(stays([](const cuda_queue& q, view<const int, device_memory> x) {
        const char* const text = std::getenv("TUTTI_TIMEOUT");
        const std::optional<std::string> before = text == nullptr ? std::nullopt : std::optional<std::string>(text);
        ::setenv("TUTTI_TIMEOUT", "0.001", 1);
        try {
            static_cast<void>(fetch(q, x, 0));
        } catch (const timeout_error&) {
            before ? ::setenv("TUTTI_TIMEOUT", before->c_str(), 1) : ::unsetenv("TUTTI_TIMEOUT");
            throw;
        }
    }));
}

TEST_CASE_FIXTURE(fixture, "each call's error is told once, with CUDA's words, and the queue goes on") {
    const cuda_queue q(0);
    const auto failing = [&](const char* function, auto act) {
        CAPTURE(function);
        fake::fail(function, 1, cudaErrorMemoryAllocation);
        try {
            act();
            FAIL("not told");
        } catch (const backend_error& e) {
            CHECK(e.context().operation == function);
            CHECK(e.context().backend_code == static_cast<int>(cudaErrorMemoryAllocation));
            CHECK(e.context().backend_text == "cudaErrorMemoryAllocation: out of memory");
        }
        CHECK(cudaPeekAtLastError() == cudaSuccess);
    };
    failing("cudaEventRecord", [&] { static_cast<void>(q.record()); });
    static_cast<void>(q.mark());
    failing("cudaEventRecord", [&] { static_cast<void>(q.mark()); });
    const auto e = q.record();
    failing("cudaEventQuery", [&] { static_cast<void>(e.ready()); });
    failing("cudaStreamWaitEvent", [&] { q.wait(e); });
    failing("cudaMallocFromPoolAsync", [&] { static_cast<void>(q.allocate(8)); });
    failing("cudaStreamCreateWithPriority", [&] { static_cast<void>(q.sibling()); });
    failing("cudaHostAlloc", [&] { static_cast<void>(pinned_queue().allocate(65537)); });
    failing("cudaGetDevice", [&] { static_cast<void>(cuda_queue()); });
    CHECK_THROWS_AS(cuda_queue(99), backend_error);
    const buffer<int, cuda_queue> x(q, 1);
    failing("cudaMemcpyAsync", [&] { q.copy(x.data(), x.data(), 4, cudaMemcpyDeviceToDevice); });
    q.record().wait_host(after(std::chrono::seconds(10)));
    CHECK(q.account().live() == 4);
}

TEST_CASE_FIXTURE(fixture, "what there is no room for is told with what is held and what is free") {
    const cuda_queue q(1);
    const buffer<std::byte, cuda_queue> held(q, std::size_t{1} << 20);
    const auto told = [&](const char* text) {
        fake::fail("cudaMallocFromPoolAsync", 1, cudaErrorMemoryAllocation);
        CHECK_THROWS_WITH_AS(static_cast<void>(q.allocate(std::size_t{5} << 29)), text, memory_error);
        CHECK(cudaPeekAtLastError() == cudaSuccess);
        CHECK(q.account().live() == std::size_t{1} << 20);
    };
    told("cudaMallocFromPoolAsync: device 1 has no room for 2.5 GiB: 0.0009766 GiB are held here, 3.5 of 80 GiB are "
         "free (cudaErrorMemoryAllocation: out of memory)");
    fake::fail("cudaMemGetInfo", 1, cudaErrorInvalidValue);
    told("cudaMallocFromPoolAsync: device 1 has no room for 2.5 GiB: 0.0009766 GiB are held here "
         "(cudaErrorMemoryAllocation: out of memory)");
    // Another error is none of memory.
    fake::fail("cudaMallocFromPoolAsync", 1, cudaErrorInvalidValue);
    try {
        static_cast<void>(q.allocate(8));
        FAIL("not told");
    } catch (const memory_error&) { FAIL("told as one of memory"); } catch (const backend_error&) {
    }
}

TEST_CASE_FIXTURE(fixture, "a mark knows when it was reached, on the host's clock and after an earlier one") {
    const cuda_queue q(0);
    q.record().wait_host(after(10s));
    const duration exact = detail::cuda_clock::of(0).uncertainty() + 1us;
    const deadline before = clock_type::now();
    const auto begin = q.mark();
    REQUIRE(begin.has_value());
    q.record().wait_host(after(10s));
    const deadline between = clock_type::now();
    std::optional<cuda_mark> end;
    {
        const fake::hold held(q.stream());
        end = q.mark();
        CHECK(begin->ready());
        CHECK_FALSE(end->ready());
        std::this_thread::sleep_for(5ms);
    }
    q.record().wait_host(after(10s));
    const deadline done = clock_type::now();
    REQUIRE(end->ready());
    CHECK(begin->when() >= before - exact);
    CHECK(begin->when() <= between + exact);
    CHECK(end->when() >= between + 5ms - exact);
    CHECK(end->when() <= done + exact);
    const duration off = end->since(*begin) - (end->when() - begin->when());
    CHECK(off <= 1us);
    CHECK(off >= -1us);
}

TEST_CASE_FIXTURE(fixture, "after hours of marks neighbors still fit each other to the microsecond") {
    const cuda_queue q(3);  // whose clock no other case sees
    const auto first = q.mark();
    q.record().wait_host(after(10s));
    deadline before = first->when();
    const fake::virtual_time virtual_time;
    duration worst{0};
    for (int i = 0; i < 20000; ++i) {  // 5.5 hours, after which floats of milliseconds are 2 ms apart
        fake::spend(q.stream(), 1000003us);
        const auto m = q.mark();
        q.record().wait_host(after(10s));
        const deadline now = m->when();
        if (i > 0) { worst = std::max(worst, std::chrono::abs(now - before - 1000003us)); }
        before = now;
    }
    CHECK(worst < 1us);
}

TEST_CASE_FIXTURE(fixture, "marks take events with timing from a pool, records take others") {
    const cuda_queue q(0);
    std::vector<cuda_mark> marks;
    const auto take = [&] {
        for (int i = 0; i < 8; ++i) { marks.push_back(*q.mark()); }
        marks.clear();
    };
    take();
    const auto timed = fake::calls("cudaEventCreate"), untimed = fake::calls("cudaEventCreateWithFlags");
    const auto waits = fake::host_waits();
    for (int i = 0; i < 100; ++i) { take(); }
    CHECK(fake::calls("cudaEventCreate") == timed);
    CHECK(fake::calls("cudaEventCreateWithFlags") == untimed);
    CHECK(fake::host_waits() == waits);
    static_cast<void>(q.record());
    CHECK(fake::calls("cudaEventCreateWithFlags") == untimed + 1);
    q.record().wait_host(after(10s));
}

TEST_CASE_FIXTURE(fixture, "there are no marks in a capture, and those beside it may be asked") {
    const cuda_queue q(0), beside = q.sibling();
    const auto before = q.mark();
    q.record().wait_host(after(10s));
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(q.stream(), cudaStreamCaptureModeGlobal) == cudaSuccess);
    CHECK_FALSE(q.mark().has_value());
    const auto other = beside.mark();
    REQUIRE(other.has_value());
    while (!other->ready()) { std::this_thread::yield(); }
    CHECK(before->ready());
    CHECK(other->since(*before) > 0s);
    CHECK(other->when() > before->when());
    REQUIRE(cudaStreamEndCapture(q.stream(), &graph) == cudaSuccess);  // not spoiled
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(q.mark().has_value());
}

TEST_CASE_FIXTURE(fixture, "after a fault every call fails, and nothing is thrown where things end") {
    const auto before = fake::live_allocations();
    {
        const cuda_queue q(0);
        const buffer<int, cuda_queue> x(q, 1);
        const auto e = q.record();
        const auto m = q.mark();
        fake::fault(0);
        CHECK_THROWS_AS(static_cast<void>(m->ready()), backend_error);
        CHECK_THROWS_AS(static_cast<void>(q.mark()), backend_error);
        CHECK_THROWS_AS(e.wait_host(after(std::chrono::seconds(10))), backend_error);
        CHECK_THROWS_AS(static_cast<void>(q.record()), backend_error);
        CHECK_THROWS_AS(static_cast<void>(q.allocate(8)), backend_error);
        CHECK_THROWS_AS(q.copy(x.data(), x.data(), 4, cudaMemcpyDeviceToDevice), backend_error);
    }
    CHECK(fake::live_allocations() == before);
}
