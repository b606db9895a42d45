// fake_cuda: memory of devices and page-locked memory, both from the heap to the byte, so that sanitizers see its ends;
// of small page-locked memory those of the pieces that core/detail/cuda_page_locked keeps.
// Needs fake/cuda_state.
#include <algorithm>  // any_of
#include <cstdint>    // values of pools
#include <cstdlib>    // posix_memalign, free
#include <cstring>    // copies
#include <map>        // allocations by address
#include <mutex>      // registry
#include <optional>   // lookup

#include <support/fake/cuda_state.hpp>  // declarations

namespace tutti::test::fake_cuda {

namespace {

struct registry {
    std::mutex mutex;
    std::map<const char*, allocation> allocations;
    std::map<int, cudaMemPool_t> default_pools;
};
registry& the() {
    static auto& r = *new registry;
    return r;
}

cudaError_t allocate(void** p, std::size_t bytes, allocation a) {
    *p = nullptr;
    if (bytes == 0) { return cudaSuccess; }
    if (posix_memalign(p, 256, bytes) != 0) { return cudaErrorMemoryAllocation; }
    std::memset(*p, 0xa5, bytes);  // contents are unspecified: nobody finds zeros
    a.data = static_cast<char*>(*p);
    a.bytes = bytes;
    const unobserved lock(the().mutex);
    the().allocations[a.data] = a;
    return cudaSuccess;
}

// Storage of a pool is there for the pool's device and those it was shared with, seen from the current device.
bool reachable(const std::optional<allocation>& a) {
    if (!a || a->pool == nullptr) { return true; }
    const unobserved lock(the().mutex);
    return a->pool->device == current_device() || a->pool->peers.contains(current_device());
}
bool is_device(const std::optional<allocation>& a) { return a && a->type == cudaMemoryTypeDevice; }

struct copy_plan {
    cudaError_t error;
    bool waits;
};
// Whether CUDA takes the copy, and whether it returns only when the copy is done.
copy_plan plan(const void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    const auto t = lookup(to), f = lookup(from);
    const auto fits = [bytes](const std::optional<allocation>& a, const void* p) {
        return !a || static_cast<const char*>(p) + bytes <= a->data + a->bytes;
    };
    if (!reachable(t) || !reachable(f) || !fits(t, to) || !fits(f, from)) { return {cudaErrorInvalidValue, false}; }
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (to_device != is_device(t) || from_device != is_device(f))) {
        return {cudaErrorInvalidValue, false};
    }
    return {cudaSuccess, !t || !f};
}

cudaError_t copy(CUstream_st* s, void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, bool waits) {
    if (s == nullptr) { return cudaErrorInvalidResourceHandle; }
    if (bytes == 0) { return cudaSuccess; }
    const copy_plan p = plan(to, from, bytes, kind);
    if (p.error != cudaSuccess) { return p.error; }
    const work move = [=] { std::memmove(to, from, bytes); };
    if (const cudaError_t e = enqueue(s, [move] { return move; }); e != cudaSuccess) { return e; }
    {
        const std::lock_guard lock(s->mutex);
        if (s->capturing != nullptr) { return cudaSuccess; }
    }
    if (!p.waits && !waits) { return cudaSuccess; }
    host_waited();
    return wait_for(*s);
}

cudaError_t allocate_from(void** p, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
    CUstream_st* const s = resolve(stream);
    if (s == nullptr) { return cudaErrorInvalidResourceHandle; }
    if (faulted(s->device)) { return fault_of(s->device); }
    if (pool->device != s->device || pool->device != current_device()) { return cudaErrorInvalidValue; }
    allocation a{nullptr, 0, cudaMemoryTypeDevice, s->device, pool, 0};
    const std::lock_guard lock(s->mutex);
    if (s->capturing == nullptr) { return allocate(p, bytes, a); }
    const std::lock_guard capture_lock(s->capturing->mutex);
    a.capture = s->capturing->id;
    const cudaError_t e = allocate(p, bytes, a);
    if (e == cudaSuccess && *p != nullptr) { s->capturing->graph->memory.push_back(*p); }
    return e;
}

cudaMemPool_t default_pool(int device) {
    const unobserved lock(the().mutex);
    cudaMemPool_t& pool = the().default_pools[device];
    if (pool == nullptr) { pool = new CUmemPoolHandle_st{device, {}, 0}; }
    return pool;
}

}  // namespace

std::optional<allocation> lookup(const void* p) {
    const auto* const at = static_cast<const char*>(p);
    const unobserved lock(the().mutex);
    auto next = the().allocations.upper_bound(at);
    if (next == the().allocations.begin()) { return std::nullopt; }
    const allocation& a = std::prev(next)->second;
    if (at >= a.data + a.bytes) { return std::nullopt; }
    return a;
}
bool forget(void* p) {
    const unobserved lock(the().mutex);
    return the().allocations.erase(static_cast<const char*>(p)) != 0;
}
void free_memory(void* p) { std::free(p); }
std::size_t live_allocations() {
    const unobserved lock(the().mutex);
    return the().allocations.size();
}

graph_data::~graph_data() {
    for (void* const p : memory) {
        forget(p);
        free_memory(p);
    }
}

}  // namespace tutti::test::fake_cuda

using namespace tutti::test;
using namespace tutti::test::fake_cuda;

extern "C" {

cudaError_t cudaMalloc(void** p, std::size_t bytes) {
    FAKE_CUDA_CALL(cudaMalloc);
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    if (faulted(current_device())) { return note(fault_of(current_device())); }
    return note(allocate(p, bytes, {nullptr, 0, cudaMemoryTypeDevice, current_device(), nullptr, 0}));
}
cudaError_t cudaFree(void* p) {
    FAKE_CUDA_CALL(cudaFree);
    if (p == nullptr) { return note(fault_of(current_device())); }
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    const auto a = lookup(p);
    if (!is_device(a) || a->capture != 0 || !forget(p)) { return note(cudaErrorInvalidValue); }
    host_waited();  // for the whole device
    for (const cudaStream_t s : streams_of(a->device)) { static_cast<void>(wait_for(*s)); }
    free_memory(p);
    return note(fault_of(a->device));
}
cudaError_t cudaHostAlloc(void** p, std::size_t bytes, unsigned) {
    FAKE_CUDA_CALL(cudaHostAlloc);
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    if (faulted(current_device())) { return note(fault_of(current_device())); }
    return note(allocate(p, bytes, {nullptr, 0, cudaMemoryTypeHost, current_device(), nullptr, 0}));
}
cudaError_t cudaMallocHost(void** p, std::size_t bytes) {
    FAKE_CUDA_CALL(cudaMallocHost);
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    if (faulted(current_device())) { return note(fault_of(current_device())); }
    return note(allocate(p, bytes, {nullptr, 0, cudaMemoryTypeHost, current_device(), nullptr, 0}));
}
cudaError_t cudaFreeHost(void* p) {
    FAKE_CUDA_CALL(cudaFreeHost);
    if (p == nullptr) { return cudaSuccess; }
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    const auto a = lookup(p);
    if (!a || a->type != cudaMemoryTypeHost || !forget(p)) { return note(cudaErrorInvalidValue); }
    wait_for_process();
    free_memory(p);
    return note(fault_of(current_device()));
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
    FAKE_CUDA_CALL(cudaMemPoolCreate);
    if (properties->location.type != cudaMemLocationTypeDevice || properties->location.id < 0 ||
        properties->location.id >= device_count()) {
        return note(cudaErrorInvalidValue);
    }
    *pool = new CUmemPoolHandle_st{properties->location.id, {}, 0};
    return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
    FAKE_CUDA_CALL(cudaMemPoolDestroy);
    {
        const unobserved lock(the().mutex);
        for (const auto& [p, a] : the().allocations) {
            if (a.pool == pool) { return note(cudaErrorInvalidValue); }
        }
    }
    delete pool;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
    FAKE_CUDA_CALL(cudaDeviceGetDefaultMemPool);
    if (device < 0 || device >= device_count()) { return note(cudaErrorInvalidDevice); }
    *pool = default_pool(device);
    return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
    FAKE_CUDA_CALL(cudaMemPoolSetAttribute);
    if (attribute != cudaMemPoolAttrReleaseThreshold) { return note(cudaErrorNotSupported); }
    std::memcpy(&pool->threshold, value, sizeof(pool->threshold));
    return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* access, std::size_t count) {
    FAKE_CUDA_CALL(cudaMemPoolSetAccess);
    const unobserved lock(the().mutex);
    for (std::size_t i = 0; i < count; ++i) {
        const int peer = access[i].location.id;
        if (peer < 0 || peer >= device_count()) { return note(cudaErrorInvalidValue); }
        if (access[i].flags == cudaMemAccessFlagsProtReadWrite) {
            pool->peers.insert(peer);
        } else {
            pool->peers.erase(peer);
        }
    }
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    FAKE_CUDA_CALL(cudaMemGetInfo);
    *total = std::size_t{80} << 30;
    *free = std::size_t{3} << 29;
    return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr attribute, void* value) {
    FAKE_CUDA_CALL(cudaMemPoolGetAttribute);
    *static_cast<std::uint64_t*>(value) = std::uint64_t{attribute == cudaMemPoolAttrReservedMemCurrent ? 5u : 3u} << 30;
    return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) {
    FAKE_CUDA_CALL(cudaMemPoolTrimTo);
    return cudaSuccess;  // nothing that was freed is kept
}
cudaError_t cudaMallocFromPoolAsync(void** p, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
    FAKE_CUDA_CALL(cudaMallocFromPoolAsync);
    return note(allocate_from(p, bytes, pool, stream));
}
cudaError_t cudaMallocAsync(void** p, std::size_t bytes, cudaStream_t stream) {
    FAKE_CUDA_CALL(cudaMallocAsync);
    return note(allocate_from(p, bytes, default_pool(current_device()), stream));
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
    FAKE_CUDA_CALL(cudaFreeAsync);
    CUstream_st* const s = resolve(stream);
    if (s == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    if (p == nullptr) { return cudaSuccess; }
    const auto a = lookup(p);
    if (!is_device(a) || !reachable(a)) { return note(cudaErrorInvalidValue); }
    {
        const std::lock_guard lock(s->mutex);
        if (s->capturing != nullptr) {  // the graph's memory stays as long as the graph
            return note(a->capture == s->capturing->id ? cudaSuccess : cudaErrorInvalidValue);
        }
    }
    if (a->capture != 0 || !forget(p)) { return note(cudaErrorInvalidValue); }
    enqueue_always(*s, [p] { free_memory(p); });
    return note(fault_of(s->device));
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    FAKE_CUDA_CALL(cudaMemcpyAsync);
    return note(copy(resolve(stream), to, from, bytes, kind, false));
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    FAKE_CUDA_CALL(cudaMemcpy);
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    return note(copy(resolve(nullptr), to, from, bytes, kind, true));
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
    FAKE_CUDA_CALL(cudaMemsetAsync);
    const work fill = [=] { std::memset(to, value, bytes); };
    return note(enqueue(stream, [fill] { return fill; }));
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
    FAKE_CUDA_CALL(cudaMemset);
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    const work fill = [=] { std::memset(to, value, bytes); };
    return note(enqueue(nullptr, [fill] { return fill; }));
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
    FAKE_CUDA_CALL(cudaPointerGetAttributes);
    *attributes = {};
    attributes->hostPointer = const_cast<void*>(p);
    attributes->device = -2;  // CUDA's word for no device
    if (const auto a = lookup(p)) {
        attributes->type = a->type;
        attributes->device = a->device;
        attributes->devicePointer = attributes->hostPointer;
        if (is_device(a)) { attributes->hostPointer = nullptr; }
    }
    return cudaSuccess;
}

}  // extern "C"
