// fake_cuda: capture of streams, and graphs as lists that are replayed in the order of capture.
// Needs fake/cuda_state.
#include <atomic>   // ids
#include <memory>   // captures
#include <mutex>    // locks
#include <set>      // reachable nodes
#include <thread>   // who captures
#include <utility>  // move, exchange
#include <vector>   // active captures

#include <support/fake/cuda_state.hpp>  // declarations

namespace tutti::test::fake_cuda {

namespace {

struct registry {
    std::mutex mutex;
    std::vector<std::shared_ptr<capture>> active;
    unsigned long long made = 0;
};
registry& the() {
    static auto& r = *new registry;
    return r;
}
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

// Every node of every stream that joined must come before what the origin would do next.
bool joined(const capture& c) {
    const auto& nodes = c.graph->nodes;
    std::vector<bool> before(nodes.size());
    std::vector<std::size_t> open(c.origin->frontier.begin(), c.origin->frontier.end());
    while (!open.empty()) {
        const std::size_t n = open.back();
        open.pop_back();
        if (before[n]) { continue; }
        before[n] = true;
        open.insert(open.end(), nodes[n].after.begin(), nodes[n].after.end());
    }
    for (const bool b : before) {
        if (!b) { return false; }
    }
    return true;
}

}  // namespace

cudaError_t capture_forbids() {
    if (mode_of_thread == cudaStreamCaptureModeRelaxed) { return cudaSuccess; }
    std::vector<std::shared_ptr<capture>> disturbed;
    {
        const unobserved lock(the().mutex);
        for (const auto& c : the().active) {
            const bool mine = c->thread == std::this_thread::get_id() && c->mode != cudaStreamCaptureModeRelaxed;
            const bool everybody =
                c->mode == cudaStreamCaptureModeGlobal && mode_of_thread == cudaStreamCaptureModeGlobal;
            if (mine || everybody) { disturbed.push_back(c); }
        }
    }
    for (const auto& c : disturbed) {
        const std::lock_guard lock(c->mutex);
        c->invalid = true;
    }
    return disturbed.empty() ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

}  // namespace tutti::test::fake_cuda

using namespace tutti::test;
using namespace tutti::test::fake_cuda;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    FAKE_CUDA_CALL(cudaThreadExchangeStreamCaptureMode);
    *mode = std::exchange(mode_of_thread, *mode);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    FAKE_CUDA_CALL(cudaStreamBeginCapture);
    CUstream_st* const s = resolve(stream);
    if (s == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    if (stream == nullptr || stream == cudaStreamLegacy) { return note(cudaErrorStreamCaptureUnsupported); }
    if (faulted(s->device)) { return note(fault_of(s->device)); }
    const std::lock_guard lock(s->mutex);
    if (s->capturing != nullptr) { return note(cudaErrorIllegalState); }
    const unobserved registry_lock(the().mutex);
    s->capturing = std::make_shared<capture>(++the().made, mode, s);
    s->frontier.clear();
    the().active.push_back(s->capturing);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    FAKE_CUDA_CALL(cudaStreamEndCapture);
    *graph = nullptr;
    CUstream_st* const s = resolve(stream);
    if (s == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    std::shared_ptr<capture> c;
    std::vector<cudaStream_t> streams;
    cudaError_t result = cudaSuccess;
    {
        const std::lock_guard lock(s->mutex);
        c = s->capturing;
        if (c == nullptr) { return note(cudaErrorIllegalState); }
        const std::lock_guard capture_lock(c->mutex);
        if (c->origin != s) {
            c->invalid = true;
            return note(cudaErrorStreamCaptureUnmatched);
        }
        if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != std::this_thread::get_id()) {
            return note(cudaErrorStreamCaptureWrongThread);
        }
        streams = c->streams;
        if (c->invalid) {
            result = cudaErrorStreamCaptureInvalidated;
        } else if (!joined(*c)) {
            result = cudaErrorStreamCaptureUnjoined;
        }
        c->ended = true;
    }
    for (const cudaStream_t member : streams) {
        const std::lock_guard lock(member->mutex);
        member->capturing = nullptr;
        member->frontier.clear();
    }
    {
        const unobserved lock(the().mutex);
        std::erase(the().active, c);
    }
    if (result == cudaSuccess) { *graph = new CUgraph_st{std::move(c->graph)}; }
    c->graph = nullptr;  // events may hold the capture longer
    return note(result);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    FAKE_CUDA_CALL(cudaStreamIsCapturing);
    return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, std::size_t* dependency_count) {
    FAKE_CUDA_CALL(cudaStreamGetCaptureInfo);
    // The graph of a capture cannot be edited here.
    if (graph != nullptr || dependencies != nullptr || edges != nullptr || dependency_count != nullptr) {
        return note(cudaErrorNotSupported);
    }
    CUstream_st* const s = resolve(stream);
    if (s == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    *status = cudaStreamCaptureStatusNone;
    const std::lock_guard lock(s->mutex);
    if (s->capturing == nullptr) { return cudaSuccess; }
    const std::lock_guard capture_lock(s->capturing->mutex);
    *status = s->capturing->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    if (id != nullptr) { *id = s->capturing->id; }
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    FAKE_CUDA_CALL(cudaGraphInstantiate);
    if (graph == nullptr) { return note(cudaErrorInvalidValue); }
    *executable = new CUgraphExec_st{graph->data};
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    FAKE_CUDA_CALL(cudaGraphDestroy);
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    FAKE_CUDA_CALL(cudaGraphExecDestroy);
    delete executable;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    FAKE_CUDA_CALL(cudaGraphLaunch);
    CUstream_st* const s = resolve(stream);
    if (s == nullptr || executable == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    if (faulted(s->device)) { return note(fault_of(s->device)); }
    const std::lock_guard lock(s->mutex);
    if (s->capturing != nullptr) { return note(cudaErrorNotSupported); }  // no graphs in graphs
    for (const node& n : executable->data->nodes) {
        auto* const i = new item;
        i->run = [data = executable->data, run = n.bind()] { run(); };
        s->push(i);
    }
    return cudaSuccess;
}

}  // extern "C"
