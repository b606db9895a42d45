// cuda_queue: a CUDA stream as a queue; events, stream-ordered storage, page-locked buffers, copies to and from the
// host. Needs core/queue and the CUDA runtime (tutti::cuda); any C++20 compiler, no nvcc. Kernels are in the .cuh
// files.
#pragma once

#include <chrono>       // waits
#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <cstdint>      // captures
#include <cstring>      // memcpy
#include <memory>       // shared by handles
#include <optional>     // marks
#include <string_view>  // names of operations
#include <thread>       // waits
#include <utility>      // move

#include <cuda_runtime_api.h>  // CUDA runtime

#include <tutti/core/cuda_mark.hpp>                // cuda_mark
#include <tutti/core/deadline.hpp>                 // deadline
#include <tutti/core/detail/cuda_check.hpp>        // checks
#include <tutti/core/detail/cuda_page_locked.hpp>  // small pieces
#include <tutti/core/detail/cuda_stream.hpp>       // streams, pools
#include <tutti/core/elementwise.hpp>              // copy_operation
#include <tutti/core/error.hpp>                    // usage_error
#include <tutti/core/queue.hpp>                    // queue
#include <tutti/core/text.hpp>                     // formatted
#include <tutti/core/view.hpp>                     // view

namespace tutti {

/// Work on a GPU, in the order of a stream.
///
/// Semantics    a handle; copies share the stream. The stream does not wait for the legacy default stream. Storage is
///              allocated and released in the stream's order, from one pool a device that keeps what was released.
///   record     the point after all work so far; wait(e) orders later work behind it without blocking the host.
///   mark       a point that will know when it was reached; nothing while the stream is captured: a graph has no times.
///   sibling    another stream of the same device and account.
/// Threads      handles may be used from any thread, one at a time where the order of work matters.
/// Determinism  work of one queue runs in order; work of different queues only as events say.
/// Cost         record and wait: about a microsecond of the host's time each; allocation the same once the pool is
///              warm; mark two of the host's and one of the stream's. The first mark on a device waits for a stream of
///              its own that is idle.
/// Errors       backend_error with CUDA's code, name and text; memory_error, one of them, where there is no room for
///              storage; errors of asynchronous work appear at a later call.
///              After a fault on the device every call fails: CUDA has no way back but a new process.
class cuda_queue {
    std::shared_ptr<memory_account> account_ = std::make_shared<memory_account>();
    std::shared_ptr<detail::cuda_stream> stream_;

    cuda_queue(std::shared_ptr<memory_account> a, std::shared_ptr<detail::cuda_stream> s)
        : account_(std::move(a)), stream_(std::move(s)) {}

    [[nodiscard]] static int current_device() {
        int device = 0;
        detail::check_cuda(cudaGetDevice(&device), "cudaGetDevice");
        return device;
    }

public:
    using memory_type = device_memory;
    using mark_type = cuda_mark;
    static constexpr bool executes_inline = false;

    /// A point in the work of a stream.
    class event_type {
        friend cuda_queue;
        struct recorded {
            std::shared_ptr<detail::cuda_stream> stream;
            cudaEvent_t handle;
            explicit recorded(std::shared_ptr<detail::cuda_stream> s)
                : stream(std::move(s)), handle(stream->take_event()) {}
            recorded(const recorded&) = delete;
            recorded& operator=(const recorded&) = delete;
            ~recorded() { stream->give_event(handle); }
        };
        std::shared_ptr<recorded> recorded_;
        explicit event_type(std::shared_ptr<recorded> r) noexcept : recorded_(std::move(r)) {}

    public:
        [[nodiscard]] bool ready() const {
            const cudaError_t code = cudaEventQuery(recorded_->handle);
            if (code == cudaErrorNotReady) {
                cudaGetLastError();  // an answer, not an error
                return false;
            }
            detail::check_cuda(code, "cudaEventQuery");
            return true;
        }
        /// Polls: a CUDA wait has no deadline. Errors: timeout_error past it; those of the work; those of a
        /// communicator of this queue or a sibling that has failed meanwhile, since the work may have been cut short.
        void wait_host(deadline limit) const {
            constexpr duration yielding = std::chrono::microseconds(200);
            const deadline start = clock_type::now();
            detail::cuda_watchers& watchers = *recorded_->stream->watchers;
            bool patient = false;
            while (!ready()) {
                const deadline now = clock_type::now();
                if (now - start < yielding) {
                    std::this_thread::yield();
                    continue;
                }
                const bool watched = watchers.look();
                if (now >= limit) {
                    if (!watched || patient) {
                        throw timeout_error(
                            formatted("event: the stream did not get there within {:.3g} s", seconds(now - start)), {});
                    }
                    patient = true;  // whoever watches may be about to find out who is missing
                    limit = after(std::chrono::seconds(5));
                }
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
            static_cast<void>(watchers.look());
        }
        [[nodiscard]] cudaEvent_t native_handle() const noexcept { return recorded_->handle; }
    };

    /// A new stream on the current device.
    cuda_queue() : cuda_queue(current_device()) {}
    /// A new stream. Errors: backend_error when there is no such device.
    explicit cuda_queue(int device)
        : stream_(std::make_shared<detail::cuda_stream>(device, std::make_shared<detail::cuda_watchers>())) {}
    /// The caller's stream, which must outlive all handles and all that was allocated through them.
    explicit cuda_queue(cudaStream_t existing) {
        int device = 0;
        detail::check_cuda(cudaStreamGetDevice(existing, &device), "cudaStreamGetDevice");
        stream_ = std::make_shared<detail::cuda_stream>(existing, device);
    }

    [[nodiscard]] event_type record() const {
        event_type e(std::make_shared<typename event_type::recorded>(stream_));
        detail::check_cuda(cudaEventRecord(e.recorded_->handle, stream_->handle), "cudaEventRecord");
        return e;
    }
    [[nodiscard]] std::optional<cuda_mark> mark() const {
        if (capture() != 0) { return std::nullopt; }
        return cuda_mark(stream_->device, stream_->handle);
    }
    void wait(const event_type& e) const {
        detail::check_cuda(cudaStreamWaitEvent(stream_->handle, e.recorded_->handle, 0), "cudaStreamWaitEvent");
    }
    /// Storage aligned to 256 bytes, contents unspecified. Zero bytes give nullptr.
    [[nodiscard]] void* allocate(std::size_t bytes) const {
        if (bytes == 0) { return nullptr; }
        void* p = nullptr;
        const detail::on_device scope(stream_->device);
        constexpr std::string_view call = "cudaMallocFromPoolAsync";
        const cudaMemPool_t pool = detail::cuda_pool::of(stream_->device).handle();
        const cudaError_t code = cudaMallocFromPoolAsync(&p, bytes, pool, stream_->handle);
        if (code == cudaErrorMemoryAllocation) {
            detail::raise_no_room(bytes, stream_->device, account_->live(), pool, call);
        }
        detail::check_cuda(code, call);
        account_->allocated(bytes);
        return p;
    }
    void release(void* p, std::size_t bytes) const noexcept {
        if (p == nullptr) { return; }
        try {
            const detail::on_device scope(stream_->device);
            cudaFreeAsync(p, stream_->handle);
        } catch (const error&) {}  // after a fault, or at exit: there is nothing left to be freed
        account_->released(bytes);
    }
    [[nodiscard]] memory_account& account() const noexcept { return *account_; }
    [[nodiscard]] cuda_queue sibling() const {
        return {account_, std::make_shared<detail::cuda_stream>(stream_->device, stream_->watchers)};
    }
    /// A sibling whose kernels' blocks begin before those of other queues: for short work that others wait for.
    [[nodiscard]] cuda_queue urgent_sibling() const {
        return {account_, std::make_shared<detail::cuda_stream>(stream_->device, stream_->watchers, true)};
    }
    /// Host waits for this queue and its siblings, made and to come, ask `w` too, for as long as it lives.
    void watch(const std::shared_ptr<detail::cuda_watcher>& w) const { stream_->watchers->add(w); }
    /// The graph capture that the stream is part of; 0: none.
    [[nodiscard]] std::uint64_t capture() const {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        unsigned long long id = 0;
        detail::check_cuda(cudaStreamGetCaptureInfo(stream_->handle, &status, &id), "cudaStreamGetCaptureInfo");
        return status == cudaStreamCaptureStatusNone ? 0 : id;
    }

    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_->handle; }
    [[nodiscard]] int device() const noexcept { return stream_->device; }

    /// The device's part of `fetch`: one element by way of page-locked memory.
    /// Cost  a host wait for the queue. Errors  timeout_error after the default timeout.
    template <class T>
    [[nodiscard]] friend std::remove_const_t<T> fetch_from_device(const cuda_queue& q, view<T, device_memory> v) {
        std::remove_const_t<T> value{};
        static_assert(sizeof(value) <= detail::cuda_stream::cell_bytes, "fetch is for scalars");
        q.stream_->with_cell([&](void* cell) {
            q.copy(cell, v.data(), sizeof(value), cudaMemcpyDeviceToHost);
            q.record().wait_host(after(default_timeout()));
            std::memcpy(&value, cell, sizeof(value));
        });
        return value;
    }

    /// Bytes, in the queue's order, as cudaMemcpyAsync does it: `upload`, `download` and `tutti::copy` say when that
    /// is.
    void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) const {
        if (bytes == 0) { return; }
        const detail::on_device scope(stream_->device);  // CUDA refuses storage from a pool of another device
        detail::check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream_->handle), "cudaMemcpyAsync");
    }

    /// Lets another device read and write what queues of `device` allocate, before and after: its copy engines and
    /// kernels. Nothing for the device itself. Errors: backend_error where devices cannot reach each other.
    static void share(int device, int with) {
        if (device == with) { return; }
        cudaMemAccessDesc access{};
        access.location.type = cudaMemLocationTypeDevice;
        access.location.id = with;
        access.flags = cudaMemAccessFlagsProtReadWrite;
        detail::check_cuda(cudaMemPoolSetAccess(detail::cuda_pool::of(device).handle(), &access, 1),
                           "cudaMemPoolSetAccess");
    }

    /// Gives what the device's pool keeps unused back to the driver. Cost: may wait for the device.
    static void trim(int device) {
        detail::check_cuda(cudaMemPoolTrimTo(detail::cuda_pool::of(device).handle(), 0), "cudaMemPoolTrimTo");
    }
};
static_assert(timed_queue<cuda_queue>);

/// A host queue whose storage is page-locked: buffer<T, pinned_queue> is what copy engines reach asynchronously.
///
/// Cost    of more than 64 KiB, allocation is slow, and release waits for all devices of the process: keep buffers. Less
///         than that the process keeps, and release does not wait: copies from and to it must have ended.
/// Errors  backend_error when memory is short.
class pinned_queue {
    std::shared_ptr<memory_account> account_ = std::make_shared<memory_account>();

public:
    using memory_type = pinned_memory;
    using event_type = host_queue::event_type;
    static constexpr bool executes_inline = true;

    [[nodiscard]] event_type record() const noexcept { return {}; }
    void wait(const event_type&) const noexcept {}
    [[nodiscard]] void* allocate(std::size_t bytes) const {
        if (bytes == 0) { return nullptr; }
        void* const p = detail::cuda_page_locked::take(bytes);
        account_->allocated(bytes);
        return p;
    }
    void release(void* p, std::size_t bytes) const noexcept {
        if (p == nullptr) { return; }
        detail::cuda_page_locked::give(p, bytes);
        account_->released(bytes);
    }
    [[nodiscard]] memory_account& account() const noexcept { return *account_; }
    [[nodiscard]] pinned_queue sibling() const noexcept { return *this; }
};
static_assert(queue<pinned_queue>);
template <> struct staging_queue_of<cuda_queue> { using type = pinned_queue; };

namespace detail {
// Between host and device. CUDA blocks, without a deadline, while it copies memory that is not page-locked: so that the
// block is short, the queue is waited for before.
template <memory Host, class T, memory From, class U, memory To>
void copy_across(std::string_view operation, const cuda_queue& q, view<T, From> in, view<U, To> out,
                 cudaMemcpyKind kind) {
    if (in.size() != out.size()) {
        throw usage_error(formatted("{}: sizes differ (in {}, out {})", operation, in.size(), out.size()));
    }
    if constexpr (!std::same_as<Host, pinned_memory>) { q.record().wait_host(after(default_timeout())); }
    q.copy(out.data(), in.data(), in.size_bytes(), kind);
}
}  // namespace detail

/// Copies host to device, in the queue's order.
///
/// Semantics  page-locked memory is read when the queue gets there and must live until then. For other memory the call
///            waits for the queue; on return it has been read and may change.
/// Errors     usage_error when sizes differ; timeout_error when the queue does not get there.
template <class T, memory M>
requires(M::host_accessible) void upload(const cuda_queue& q, view<T, M> in,
                                         view<std::remove_const_t<T>, device_memory> out) {
    detail::copy_across<M>("upload", q, in, out, cudaMemcpyHostToDevice);
}

/// Copies device to host, in the queue's order.
///
/// Semantics  page-locked memory is written when the queue gets there: wait for an event before reading it. For other
///            memory the call waits for the queue; on return it has been written.
/// Errors     usage_error when sizes differ; timeout_error when the queue does not get there.
template <class T, memory M>
requires(M::host_accessible) void download(const cuda_queue& q, view<T, device_memory> in,
                                           view<std::remove_const_t<T>, M> out) {
    detail::copy_across<M>("download", q, in, out, cudaMemcpyDeviceToHost);
}

/// A copy that keeps the type needs no kernel.
template <transportable T> void launch(const cuda_queue& q, const copy_operation<T, T, device_memory>& copy) {
    if (copy.in.data() == copy.out.data()) { return; }
    q.copy(copy.out.data(), copy.in.data(), copy.out.size_bytes(), cudaMemcpyDeviceToDevice);
}

}  // namespace tutti
