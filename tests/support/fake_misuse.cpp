// What the fakes are for: a program with a mistake that a device would hide most of the time, seen by a sanitizer.
// One mistake a run, named by the argument.
#include <chrono>       // deadlines
#include <cstdio>       // messages
#include <string_view>  // names
#include <thread>       // pauses

#include <tutti/core/buffer.hpp>      // storage
#include <tutti/core/cuda_queue.hpp>  // streams
#include <tutti/core/deadline.hpp>    // after
#include <tutti/core/view.hpp>        // view

#include <support/fake_cuda.hpp>  // kernels

using namespace tutti;

namespace {

// ThreadSanitizer may miss two accesses at the very same moment, so those of a mistake are made again and again.
template <class Access> void repeat(Access access) {
    for (int i = 0; i < 20; ++i) {
        access(i);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}
void fill(const cuda_queue& q, view<int, device_memory> out) {
    test::fake_cuda::launch(q.stream(), [out] { repeat([out](int i) { *out.data() = i; }); });
}

// Two streams write the same storage; only an event would order them. The event recorded too early does not.
void no_event() {
    const cuda_queue a(0), b = a.sibling();
    const buffer<int, cuda_queue> x(a, 1);
    b.wait(a.record());
    fill(a, x.view());
    fill(b, x.view());
    cudaDeviceSynchronize();
}

// The host reads what the stream still writes: enqueuing more and polling an earlier event order nothing.
void no_wait() {
    const cuda_queue q(0);
    const pinned_queue host;
    const buffer<int, pinned_queue> x(host, 1);
    const auto early = q.record();
    test::fake_cuda::launch(q.stream(), [p = x.data()] { repeat([p](int i) { *p = i; }); });
    while (!early.ready()) {}
    const auto behind = q.record();
    repeat([p = x.data()](int) { std::printf("%d\n", *p); });
    behind.wait_host(after(std::chrono::seconds(10)));
}

// Storage released through one stream while another uses it.
void freed_too_early() {
    const cuda_queue a(0), b = a.sibling();
    {
        const test::fake_cuda::hold held(b.stream());
        {
            const buffer<int, cuda_queue> x(a, 1);
            b.wait(a.record());
            fill(b, x.view());
        }
        a.record().wait_host(after(std::chrono::seconds(10)));
    }
    cudaDeviceSynchronize();
}

}  // namespace

int main(int, char** arguments) {
    const std::string_view name = arguments[1];
    if (name == "no_event") { no_event(); }
    if (name == "no_wait") { no_wait(); }
    if (name == "freed_too_early") { freed_too_early(); }
    std::puts("nobody noticed");
}
