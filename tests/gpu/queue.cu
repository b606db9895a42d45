// cuda_queue: order, events and their deadlines, storage and its account, copies, the caller's own stream, errors.
#include <tutti/core/cuda_queue.hpp>  // under test

#include <algorithm>  // count
#include <chrono>     // deadlines
#include <string>     // texts
#include <vector>     // data

#include <doctest/doctest.h>  // checks

#include <tutti/core/buffer.hpp>    // storage
#include <tutti/core/cuda_run.cuh>  // fill, copy

#include "device.hpp"  // require_device

using namespace tutti;
using namespace std::chrono_literals;

namespace {

// Keeps a stream busy until the flag is up, in page-locked memory that host and device see.
__global__ void hold(const volatile int* flag) {
    while (*flag == 0) {}
}

// Holds one queue; lets go at the latest when it dies, so that no failed check hangs the device.
class holder {
    buffer<int, pinned_queue> flag_{pinned_queue(), 1};

public:
    explicit holder(const cuda_queue& q) {
        *flag_.data() = 0;
        const tutti::detail::on_device scope(q.device());
        hold<<<1, 1, 0, q.stream()>>>(flag_.data());
        tutti::detail::check_cuda(cudaGetLastError(), "hold");
    }
    void let_go() const { *const_cast<volatile int*>(flag_.data()) = 1; }
    holder(const holder&) = delete;
    holder& operator=(const holder&) = delete;
    ~holder() {
        let_go();
        cudaDeviceSynchronize();  // before the flag is freed
    }
};

using device_buffer = buffer<float, cuda_queue>;

std::vector<float> counted(std::size_t n) {
    std::vector<float> v(n);
    for (std::size_t i = 0; i < n; ++i) { v[i] = static_cast<float>(i); }
    return v;
}

}  // namespace

TEST_CASE("events tell how far a queue has come, and waits for them have a deadline") {
    test::require_device();
    const cuda_queue q(0);
    const holder held(q);
    const auto e = q.record();
    CHECK_FALSE(e.ready());
    CHECK_THROWS_AS(e.wait_host(after(20ms)), timeout_error);
    CHECK_FALSE(e.ready());
    held.let_go();
    e.wait_host(after(10s));
    CHECK(e.ready());
    e.wait_host(clock_type::now() - 1s);  // what has happened needs no time
}

TEST_CASE("a queue that waits for an event runs behind it; siblings do not wait for each other") {
    test::require_device();
    const cuda_queue first(0);
    const cuda_queue second = first.sibling();
    const device_buffer b(first, 1000);
    const device_buffer apart(second, 1);
    fill(first, b.view(), 1.0f);
    first.record().wait_host(after(10s));
    const holder held(first);
    fill(first, b.view(), 2.0f);
    const auto written = first.record();
    fill(second, apart.view(), 3.0f);
    second.record().wait_host(after(10s));  // although the first is held
    second.wait(written);
    const device_buffer copied(second, 1000);
    copy(second, b.view(), copied.view());
    const auto all = second.record();
    CHECK_FALSE(all.ready());
    held.let_go();
    all.wait_host(after(10s));
    std::vector<float> got(1000);
    download(second, copied.view(), view<float>(got));
    CHECK(std::count(got.begin(), got.end(), 2.0f) == 1000);
}

TEST_CASE("storage is counted, also that of siblings, and released in the order of its queue") {
    test::require_device();
    const cuda_queue q(0);
    const cuda_queue other = q.sibling();
    CHECK(&q.account() == &other.account());
    {
        const device_buffer a(q, 1000);
        const device_buffer b(other, 500);
        CHECK(q.account().live() == 6000);
        const device_buffer none(q, 0);
        CHECK(none.data() == nullptr);
        CHECK(reinterpret_cast<std::uintptr_t>(a.data()) % 256 == 0);
    }
    CHECK(q.account().live() == 0);
    CHECK(q.account().peak() == 6000);

    // Work that still uses a buffer when that is destroyed.
    const holder held(q);
    const device_buffer out(q, 1 << 20);
    {
        const device_buffer in(q, 1 << 20);
        fill(q, in.view(), 5.0f);
        copy(q, in.view(), out.view());
    }
    const device_buffer next(q, 1 << 20);  // may be the same memory
    fill(q, next.view(), 6.0f);
    held.let_go();
    std::vector<float> got(1 << 20);
    download(q, out.view(), view<float>(got));
    CHECK(std::count(got.begin(), got.end(), 5.0f) == 1 << 20);
    cuda_queue::trim(0);
}

TEST_CASE("copies to and from the host") {
    test::require_device();
    const cuda_queue q(0);
    const std::vector<float> in = counted(1001);
    const device_buffer b(q, 1001);
    std::vector<float> out(1001);
    {
        std::vector<float> passing = in;
        upload(q, view<const float>(passing), b.view());
        std::fill(passing.begin(), passing.end(), -1.0f);  // read already
    }
    download(q, b.view(), view<float>(out));
    CHECK(out == in);

    const buffer<float, pinned_queue> locked(pinned_queue(), 1001);
    std::fill_n(locked.data(), 1001, 7.0f);
    upload(q, locked.view(), b.view());
    const buffer<float, pinned_queue> back(pinned_queue(), 1001);
    download(q, b.view(), back.view());
    q.record().wait_host(after(10s));
    CHECK(std::count(back.data(), back.data() + 1001, 7.0f) == 1001);

    {
        const holder held(q);  // page-locked memory does not wait
        std::fill_n(locked.data(), 1001, 8.0f);
        upload(q, locked.view(), b.view());
        download(q, b.view(), back.view());
        CHECK_FALSE(q.record().ready());
    }
    q.record().wait_host(after(10s));
    CHECK(back.data()[1000] == 8.0f);

    upload(q, view<const float>(in).sub(0, 0), b.view().sub(0, 0));
    CHECK(fetch(q, b.view().sub(3, 1), 0.0f) == 8.0f);
    CHECK_THROWS_AS(upload(q, view<const float>(in).sub(0, 5), b.view()), usage_error);
    CHECK_THROWS_AS(download(q, b.view(), view<float>(out).sub(1, 5)), usage_error);
}

TEST_CASE("a queue on the caller's stream") {
    test::require_device();
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    {
        const cuda_queue q(stream);
        CHECK(q.stream() == stream);
        CHECK(q.device() == 0);
        const device_buffer b(q, 10);
        fill(q, b.view(), 4.0f);
        CHECK(fetch(q, b.view(), 0.0f) == 4.0f);
        CHECK(q.sibling().stream() != stream);
    }
    CHECK(cudaStreamQuery(stream) == cudaSuccess);  // still the caller's
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

TEST_CASE("errors carry CUDA's code, name and text") {
    test::require_device();
    int count = 0;
    REQUIRE(cudaGetDeviceCount(&count) == cudaSuccess);
    try {
        const cuda_queue q(count);
        FAIL("a device too many");
    } catch (const backend_error& e) {
        CHECK(e.context().backend_code == static_cast<int>(cudaErrorInvalidDevice));
        CHECK(std::string(e.what()).find("cudaErrorInvalidDevice") != std::string::npos);
    }
    const cuda_queue q(0);
    try {
        const device_buffer b(q, std::size_t{1} << 50);
        FAIL("four petabytes");
    } catch (const backend_error& e) { CHECK(e.context().backend_code == static_cast<int>(cudaErrorMemoryAllocation)); }
    CHECK(q.account().live() == 0);
    const device_buffer b(q, 1);  // the error is not seen again
    fill(q, b.view(), 1.0f);
    CHECK(fetch(q, b.view(), 0.0f) == 1.0f);
}

TEST_CASE("the current device is left as it was") {
    test::require_device();
    int count = 0;
    REQUIRE(cudaGetDeviceCount(&count) == cudaSuccess);
    for (int d = 0; d < count; ++d) {
        const cuda_queue q(d);
        CHECK(q.device() == d);
        const device_buffer b(q, 100);
        fill(q, b.view(), static_cast<float>(d));
        CHECK(fetch(q, b.view().sub(99, 1), -1.0f) == static_cast<float>(d));
        int current = -1;
        CHECK(cudaGetDevice(&current) == cudaSuccess);
        CHECK(current == 0);
    }
}
