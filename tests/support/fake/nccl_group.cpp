// fake_nccl: groups, and operations as work on streams that meets the other ranks.
// Needs fake/nccl_state, fake_cuda.
#include <algorithm>   // find
#include <atomic>      // count
#include <cstring>     // memcpy
#include <functional>  // starts and splits
#include <memory>      // tickets
#include <mutex>       // locks
#include <string>      // problems
#include <utility>     // move, exchange
#include <vector>      // tasks

#include <support/fake/nccl_state.hpp>  // declarations
#include <support/fake_cuda.hpp>        // enqueue

namespace tutti::test::fake_nccl {

namespace {

struct group {
    int depth = 0;
    ncclResult_t error = ncclSuccess;
    std::vector<group_launch::operation> operations;
    std::vector<std::function<ncclResult_t()>> others;  // starts and splits
};
thread_local group open;
std::atomic<std::size_t> waiting{0};

bool agree(const task& a, const task& b) {
    const auto op = [](const task& t) { return t.scale ? ncclNumOps : t.op; };
    return a.what == b.what && a.count == b.count && a.type == b.type && op(a) == op(b) && a.root == b.root;
}
std::string in_words(const task& t) {
    return std::string(t.name) + " of " + std::to_string(t.count) + " elements of type " + std::to_string(t.type) +
           ", operator " + std::to_string(t.op) + ", root " + std::to_string(t.root);
}
// Whether the ranks that met agree. Otherwise it is a problem, and `hangs` says whether they ever leave.
bool agreed(const clique& q, const std::vector<task*>& met, bool& hangs) {
    hangs = false;
    for (std::size_t r = 1; r < met.size(); ++r) {
        if (agree(*met[0], *met[r])) { continue; }
        problem("would hang: communicator " + std::to_string(q.number) + ": " + in_words(*met[0]) + " meets " +
                in_words(*met[r]));
        hangs = hangs_on_mismatch();
        return false;
    }
    return true;
}

// The clique's mutex is held. The last to come does what all came for.
void arrive(ncclComm& c, task& mine) {
    clique& q = *c.of;
    bool hangs = false;
    if (mine.what == kind::send || mine.what == kind::receive) {
        const bool sends = mine.what == kind::send;
        const std::pair pair = sends ? std::pair(c.rank, mine.root) : std::pair(mine.root, c.rank);
        auto& others = sends ? q.receives[pair] : q.sends[pair];
        if (others.empty()) {
            (sends ? q.sends : q.receives)[pair].push_back(&mine);
            return;
        }
        task& other = *others.front();
        others.pop_front();
        const task& from = sends ? mine : other;
        const task& to = sends ? other : mine;
        if (from.count != to.count || from.type != to.type) {
            problem("would hang: communicator " + std::to_string(q.number) + ": " + in_words(from) + " meets " +
                    in_words(to));
            hangs = hangs_on_mismatch();
        } else if (from.count != 0) {
            std::memcpy(to.receive, from.send, from.count * size_of(from.type));
        }
        mine.done = other.done = !hangs;
    } else {
        const std::uint64_t number = c.met++;
        auto& met = q.meetings[number];
        met.resize(static_cast<std::size_t>(q.size));
        met[static_cast<std::size_t>(c.rank)] = &mine;
        if (std::find(met.begin(), met.end(), nullptr) != met.end()) { return; }
        if (agreed(q, met, hangs)) { compute(met); }
        for (task* const t : met) { t->done = !hangs; }
        q.meetings.erase(number);
    }
    q.changed.notify_all();
}

// The clique's mutex is held: nobody will touch the buffers of this task any more. A kernel that is aborted tells its
// peers to go on: theirs get to the end, without the sums.
void withdraw(ncclComm& c, const task& mine) {
    for (auto* const queues : {&c.of->sends, &c.of->receives}) {
        for (auto& [pair, queue] : *queues) { std::erase(queue, &mine); }
    }
    for (auto& [number, met] : c.of->meetings) {
        const auto own = std::find(met.begin(), met.end(), &mine);
        if (own == met.end()) { continue; }
        *own = nullptr;
        if (!c.aborted) { continue; }
        for (task*& peer : met) {
            if (peer != nullptr) { std::exchange(peer, nullptr)->done = true; }
        }
        c.of->changed.notify_all();
    }
}

// On the thread of the stream: the operations of one communicator in one group, all at once.
void run(ncclComm& c, std::vector<task>& tasks, turnstile::ticket& in_order, turnstile::ticket* on_device) {
    const auto cancelled = [&] { return c.aborted || c.dead || fake_cuda::faulted(c.device); };
    c.running.fetch_add(1);
    in_order.enter(cancelled);
    if (on_device != nullptr) { on_device->enter(cancelled); }
    if (!cancelled()) {
        std::unique_lock lock(c.of->mutex);
        for (task& t : tasks) {
            t.done = false;  // a graph runs it again
            if (!t.stalls) { arrive(c, t); }
        }
        waiting.fetch_add(1, std::memory_order_relaxed);
        wait(
            lock, c.of->changed,
            [&] { return std::all_of(tasks.begin(), tasks.end(), [](const task& t) { return t.done; }); }, cancelled);
        for (const task& t : tasks) {
            if (!t.done) { withdraw(c, t); }
        }
        waiting.fetch_sub(1, std::memory_order_relaxed);
    }
    c.running.fetch_sub(1);
}

// All operations of `c` in the group, as one kernel on the first of their streams; the others wait for it and it for
// them.
ncclResult_t launch(ncclComm& c, const std::vector<group_launch::operation>& operations) {
    std::vector<task> tasks;
    std::vector<cudaStream_t> streams;
    for (const auto& o : operations) {
        if (o.c != &c) { continue; }
        tasks.push_back(o.what);
        const fate f = next_operation(c);
        if (f.async != ncclSuccess) { c.async = f.async; }
        tasks.back().stalls = f.stalls || c.async != ncclSuccess;
        if (std::find(streams.begin(), streams.end(), o.stream) == streams.end()) { streams.push_back(o.stream); }
    }
    for (const cudaStream_t s : streams) {
        if (fake_cuda::device_of(s) != c.device) {
            return fails(ncclUnhandledCudaError, "the stream is not of the communicator's device");
        }
    }
    cudaError_t e = cudaSuccess;
    const auto then = [&e](cudaError_t next) { e = e == cudaSuccess ? next : e; };
    for (std::size_t i = 1; i < streams.size(); ++i) { then(fake_cuda::order(streams[i], streams[0])); }
    if (e == cudaSuccess) {
        then(fake_cuda::enqueue(streams[0], [&c, tasks] {
            if (c.dead) { problem("a graph with operations of a communicator that has ended was launched"); }
            const auto in_order = std::make_shared<turnstile::ticket>(c.order);
            const auto on_device =
                is_exclusive() ? std::make_shared<turnstile::ticket>(order_of_device(c.device)) : nullptr;
            return [&c, mine = tasks, in_order, on_device]() mutable { run(c, mine, *in_order, on_device.get()); };
        }));
    }
    for (std::size_t i = 1; i < streams.size(); ++i) { then(fake_cuda::order(streams[0], streams[i])); }
    return e == cudaSuccess ? ncclSuccess : fails(ncclUnhandledCudaError, cudaGetErrorString(e));
}

ncclResult_t close_group() {
    group g = std::exchange(open, group{});
    if (g.error != ncclSuccess) { return g.error; }
    ncclResult_t result = ncclSuccess;
    for (const auto& finish : g.others) {
        const ncclResult_t r = finish();
        if (r != ncclSuccess && (result == ncclSuccess || result == ncclInProgress)) { result = r; }
    }
    if (g.operations.empty() || (result != ncclSuccess && result != ncclInProgress)) { return result; }
    const auto together = std::make_shared<group_launch>();
    together->operations = std::move(g.operations);
    bool later = false;
    for (const auto& o : together->operations) {
        if (o.c->blocking) { continue; }
        later = true;
        const std::lock_guard lock(o.c->mutex);
        o.c->waiting = together;
    }
    if (later) {
        together->polls_left = polls();
        return ncclInProgress;
    }
    launch(*together);
    return together->result;
}

}  // namespace

std::size_t waiting_operations() { return waiting.load(std::memory_order_relaxed); }

int depth() { return open.depth; }
ncclResult_t fail_group(ncclResult_t code) {
    if (open.depth > 0 && open.error == ncclSuccess) { open.error = code; }
    return code;
}
ncclResult_t add(ncclComm* c, task t, cudaStream_t stream) {
    open.operations.push_back({c, std::move(t), stream});
    return open.depth > 0 ? ncclSuccess : close_group();
}
ncclResult_t add(std::function<ncclResult_t()> finish) {
    open.others.push_back(std::move(finish));
    return open.depth > 0 ? ncclSuccess : close_group();
}

void launch(group_launch& g) {
    std::vector<ncclComm*> done;
    for (const auto& o : g.operations) {
        if (std::find(done.begin(), done.end(), o.c) != done.end()) { continue; }
        done.push_back(o.c);
        const ncclResult_t r = launch(*o.c, g.operations);
        if (g.result == ncclSuccess) { g.result = r; }
    }
    g.launched = true;
}

}  // namespace tutti::test::fake_nccl

using namespace tutti::test::fake_nccl;

namespace {

// Whether `bytes` from p are storage that the device may touch; a problem otherwise.
void check_buffer(const ncclComm& c, const task& t, const void* p, std::size_t bytes) {
    if (bytes == 0) { return; }
    const auto a = tutti::test::fake_cuda::lookup(p);
    if (!a || (a->type == cudaMemoryTypeDevice && a->device != c.device)) {
        problem(std::string(t.name) + ": a buffer is not memory of device " + std::to_string(c.device));
    } else if (static_cast<const char*>(p) + bytes > a->data + a->bytes) {
        problem(std::string(t.name) + ": a buffer is too small for " + std::to_string(bytes) + " bytes");
    }
}

// In place is where the part that is read and the part that is written are the same; other overlaps are a problem.
void check_overlap(const ncclComm& c, const task& t, std::size_t sent, std::size_t received, std::size_t part) {
    const auto* const in = static_cast<const char*>(t.send);
    const auto* const out = static_cast<const char*>(t.receive);
    if (sent == 0 || received == 0 || in + sent <= out || out + received <= in) { return; }
    const std::size_t mine = static_cast<std::size_t>(c.rank) * part;
    bool in_place = in == out;
    if (t.what == kind::all_gather || t.what == kind::gather) { in_place = in == out + mine; }
    if (t.what == kind::reduce_scatter || t.what == kind::scatter) { in_place = out == in + mine; }
    if (t.what == kind::all_to_all || !in_place) { problem(std::string(t.name) + ": buffers overlap"); }
}

ncclResult_t submit(ncclComm_t c, task t, cudaStream_t stream) {
    const std::size_t part = t.count * size_of(t.type);
    if (const ncclResult_t r = check(c, t.name); r != ncclSuccess) { return fail_group(r); }
    const use in_use(c, t.name);
    if (const ncclResult_t r = enter(t.name, c, part, stream); r != ncclSuccess) { return fail_group(r); }
    if (const ncclResult_t r = check_ready(c, t.name); r != ncclSuccess) { return fail_group(r); }
    const int n = c->of->size;
    const bool has_root = t.what == kind::broadcast || t.what == kind::reduce || t.what == kind::gather ||
                          t.what == kind::scatter || t.what == kind::send || t.what == kind::receive;
    const bool reduces = t.what == kind::all_reduce || t.what == kind::reduce_scatter || t.what == kind::reduce;
    if (has_root && (t.root < 0 || t.root >= n)) {
        return fail_group(fails(ncclInvalidArgument, std::string(t.name) + ": invalid root or peer"));
    }
    if (t.type < 0 || t.type >= ncclNumTypes) {
        return fail_group(fails(ncclInvalidArgument, std::string(t.name) + ": invalid type"));
    }
    if (reduces && t.op >= ncclNumOps) {
        const std::lock_guard lock(c->mutex);
        const auto index = static_cast<std::size_t>(t.op - ncclNumOps);
        if (index >= c->factors.size() || !c->factors[index]) {
            return fail_group(fails(ncclInvalidArgument, std::string(t.name) + ": unknown operator"));
        }
        t.scale = c->factors[index];
        t.op = ncclSum;
    }
    const bool at_root = c->rank == t.root;
    const std::size_t all = part * static_cast<std::size_t>(n);
    std::size_t sent = part, received = part;
    switch (t.what) {
    case kind::all_reduce: break;
    case kind::reduce_scatter: sent = all; break;
    case kind::all_gather: received = all; break;
    case kind::broadcast: sent = at_root ? part : 0; break;
    case kind::reduce: received = at_root ? part : 0; break;
    case kind::all_to_all: sent = received = all; break;
    case kind::gather: received = at_root ? all : 0; break;
    case kind::scatter: sent = at_root ? all : 0; break;
    case kind::send: received = 0; break;
    case kind::receive: sent = 0; break;
    }
    check_buffer(*c, t, t.send, sent);
    check_buffer(*c, t, t.receive, received);
    check_overlap(*c, t, sent, received, part);
    return add(c, std::move(t), stream);
}

}  // namespace

extern "C" {

ncclResult_t ncclGroupStart() {
    if (const ncclResult_t r = enter("ncclGroupStart", any); r != ncclSuccess) { return r; }
    ++open.depth;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    const ncclResult_t planned = enter("ncclGroupEnd", any);
    if (open.depth == 0) { return fails(ncclInvalidUsage, "ncclGroupEnd: not in a group call"); }
    if (planned != ncclSuccess) { fail_group(planned); }
    if (--open.depth > 0) { return ncclSuccess; }
    return close_group();
}

ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t c, cudaStream_t stream) {
    return submit(c, {kind::all_reduce, "ncclAllReduce", send, receive, count, type, op, -1, {}}, stream);
}
ncclResult_t ncclReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t c, cudaStream_t stream) {
    return submit(c, {kind::reduce, "ncclReduce", send, receive, count, type, op, root, {}}, stream);
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t c, cudaStream_t stream) {
    return submit(c, {kind::reduce_scatter, "ncclReduceScatter", send, receive, count, type, op, -1, {}}, stream);
}
ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t count, ncclDataType_t type, ncclComm_t c,
                           cudaStream_t stream) {
    return submit(c, {kind::all_gather, "ncclAllGather", send, receive, count, type, ncclSum, -1, {}}, stream);
}
ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count, ncclDataType_t type, int root,
                           ncclComm_t c, cudaStream_t stream) {
    return submit(c, {kind::broadcast, "ncclBroadcast", send, receive, count, type, ncclSum, root, {}}, stream);
}
ncclResult_t ncclBcast(void* data, std::size_t count, ncclDataType_t type, int root, ncclComm_t c,
                       cudaStream_t stream) {
    return submit(c, {kind::broadcast, "ncclBcast", data, data, count, type, ncclSum, root, {}}, stream);
}
ncclResult_t ncclAlltoAll(const void* send, void* receive, std::size_t count, ncclDataType_t type, ncclComm_t c,
                          cudaStream_t stream) {
    return submit(c, {kind::all_to_all, "ncclAlltoAll", send, receive, count, type, ncclSum, -1, {}}, stream);
}
ncclResult_t ncclGather(const void* send, void* receive, std::size_t count, ncclDataType_t type, int root, ncclComm_t c,
                        cudaStream_t stream) {
    return submit(c, {kind::gather, "ncclGather", send, receive, count, type, ncclSum, root, {}}, stream);
}
ncclResult_t ncclScatter(const void* send, void* receive, std::size_t count, ncclDataType_t type, int root,
                         ncclComm_t c, cudaStream_t stream) {
    return submit(c, {kind::scatter, "ncclScatter", send, receive, count, type, ncclSum, root, {}}, stream);
}
ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t stream) {
    return submit(c, {kind::send, "ncclSend", send, nullptr, count, type, ncclSum, peer, {}}, stream);
}
ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t stream) {
    return submit(c, {kind::receive, "ncclRecv", nullptr, receive, count, type, ncclSum, peer, {}}, stream);
}

}  // extern "C"
