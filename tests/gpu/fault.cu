// A fault on the device appears as backend_error where the host waits. A program of its own: the process cannot go on.
#include <tutti/core/cuda_queue.hpp>  // under test

#include <chrono>  // deadline

#include <doctest/doctest.h>  // checks

#include "device.hpp"  // require_device

namespace {
__global__ void write_nowhere(int* p) { *p = 1; }
}  // namespace

TEST_CASE("a kernel that writes to no memory") {
    tutti::test::require_device();
    const tutti::cuda_queue q(0);
    const auto before = q.record();
    before.wait_host(tutti::after(std::chrono::seconds(10)));
    write_nowhere<<<1, 1, 0, q.stream()>>>(nullptr);
    const auto behind = q.record();
    try {
        behind.wait_host(tutti::after(std::chrono::seconds(10)));
        FAIL("the fault was not reported");
    } catch (const tutti::backend_error& e) {
        CHECK(e.context().backend_code == static_cast<int>(cudaErrorIllegalAddress));
    }
}
