// fake_nccl: the life of communicators: start, split, state, end.
// Needs fake/nccl_state, fake_cuda.
#include <algorithm>      // sort
#include <atomic>         // numbers
#include <cstring>        // ids
#include <map>            // cliques by id
#include <memory>         // cliques
#include <mutex>          // locks
#include <set>            // used ids
#include <string>         // ids
#include <unordered_set>  // handles
#include <utility>        // move
#include <vector>         // handles

#include <support/fake/cuda_state.hpp>  // wait_for_process
#include <support/fake/nccl_state.hpp>  // declarations
#include <support/fake/unobserved.hpp>  // unobserved
#include <support/fake_cuda.hpp>        // faulted

namespace tutti::test::fake_nccl {

namespace {

// Never destroyed: threads of streams may outlive main. Handles stay reachable from here.
struct registry {
    std::mutex mutex;
    std::unordered_set<ncclComm*> handles;
    std::mutex forming_mutex;
    std::map<std::string, std::shared_ptr<clique>> forming;
    std::set<std::string> used;
    std::atomic<int> ids{0}, numbers{0};
    std::atomic<std::size_t> live{0};
};
registry& the() {
    static auto& r = *new registry;
    return r;
}

ncclComm* make(std::shared_ptr<clique> of, int rank, int device, bool blocking) {
    auto* const c = new ncclComm(std::move(of), rank, device, blocking);
    the().live.fetch_add(1);
    const unobserved lock(the().mutex);
    the().handles.insert(c);
    return c;
}

void bury(ncclComm& c) {
    c.dead = true;
    the().live.fetch_sub(1);
}

// The clique's mutex is held, all have come: NCCL wants a device a rank.
void complete(clique& q) {
    std::set<int> devices;
    for (const auto& [rank, c] : q.members) {
        if (!devices.insert(c->device).second) { q.start_error = ncclInvalidUsage; }
    }
    q.number = ++the().numbers;
    q.changed.notify_all();
}

bool refused(const ncclConfig_t* config) { return config != nullptr && config->magic != 0xcafebeef; }
bool is_blocking(const ncclConfig_t* config, bool otherwise) {
    return config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT ? otherwise : config->blocking != 0;
}

// Until every rank has come. A communicator that is not blocking learns it from ncclCommGetAsyncError.
ncclResult_t await_start(ncclComm& c) {
    clique& q = *c.of;
    if (!c.blocking) { return ncclInProgress; }
    std::unique_lock lock(q.mutex);
    wait(
        lock, q.changed, [&] { return q.number != 0; }, [&] { return c.aborted.load(); });
    if (q.number == 0) { return fails(ncclInternalError, "ncclCommInitRank: aborted"); }
    if (q.start_error != ncclSuccess) { return fails(q.start_error, "ncclCommInitRank: two ranks on one device"); }
    return ncclSuccess;
}

ncclResult_t start(ncclComm_t* out, int size, const ncclUniqueId& id, int rank, const ncclConfig_t* config,
                   std::string_view function) {
    if (const ncclResult_t r = enter(function, rank); r != ncclSuccess) { return fail_group(r); }
    if (out == nullptr || size < 1 || rank < 0 || rank >= size || refused(config)) {
        return fail_group(fails(ncclInvalidArgument, std::string(function) + ": invalid rank, size or config"));
    }
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) { return fail_group(ncclUnhandledCudaError); }
    const std::string name(id.internal, sizeof(id.internal));
    std::shared_ptr<clique> q;
    {
        const std::lock_guard lock(the().forming_mutex);
        if (the().used.contains(name)) {
            problem(std::string(function) + ": the id was used before");
            return fail_group(fails(ncclInvalidUsage, std::string(function) + ": the id was used before"));
        }
        auto& known = the().forming[name];
        if (known == nullptr) { known = std::make_shared<clique>(size); }
        q = known;
        const std::lock_guard clique_lock(q->mutex);
        if (q->size != size || q->members.contains(rank)) {
            return fail_group(fails(ncclInvalidUsage, std::string(function) + ": ranks disagree"));
        }
        q->members[rank] = *out = make(q, rank, device, is_blocking(config, true));
        if (q->members.size() == static_cast<std::size_t>(size)) {
            complete(*q);
            the().used.insert(name);
            the().forming.erase(name);
        }
    }
    return add([c = *out] { return await_start(*c); });
}

// The clique's mutex is held, all have come.
void divide(clique& q, division& d) {
    std::map<int, std::vector<int>> colors;
    for (const auto& [rank, e] : d.ranks) {
        if (e.color != NCCL_SPLIT_NOCOLOR) { colors[e.color].push_back(rank); }
    }
    for (auto& [color, ranks] : colors) {
        std::stable_sort(ranks.begin(), ranks.end(),
                         [&](int a, int b) { return d.ranks.at(a).key < d.ranks.at(b).key; });
        const auto child = std::make_shared<clique>(static_cast<int>(ranks.size()));
        const std::lock_guard lock(child->mutex);
        for (const int parent : ranks) {
            const int rank = static_cast<int>(child->members.size());
            auto& e = d.ranks.at(parent);
            e.child = child->members[rank] = make(child, rank, q.members.at(parent)->device, e.blocking);
        }
        complete(*child);
    }
    d.complete = true;
    q.changed.notify_all();
}

ncclResult_t await_division(ncclComm& c, const std::shared_ptr<division>& d, ncclComm_t* out) {
    if (!c.blocking) {
        const std::lock_guard lock(c.mutex);
        c.dividing = d;
        c.child = out;
        return ncclInProgress;
    }
    std::unique_lock lock(c.of->mutex);
    wait(
        lock, c.of->changed, [&] { return d->complete; }, [&] { return c.aborted.load(); });
    if (!d->complete) { return fails(ncclInternalError, "ncclCommSplit: aborted"); }
    *out = d->ranks.at(c.rank).child;
    return ncclSuccess;
}

// `advances`: a poll of the owner, which brings things on.
ncclResult_t state(ncclComm& c, bool advances) {
    if (c.of->number == 0) { return ncclInProgress; }
    if (c.of->start_error != ncclSuccess) { return c.of->start_error; }
    std::shared_ptr<group_launch> waiting;
    {
        const std::lock_guard lock(c.mutex);
        if (c.dividing != nullptr) {
            const std::lock_guard clique_lock(c.of->mutex);
            if (!advances || !c.dividing->complete) { return ncclInProgress; }
            *c.child = c.dividing->ranks.at(c.rank).child;
            c.dividing = nullptr;
        }
        waiting = c.waiting;
    }
    if (waiting != nullptr) {
        const std::lock_guard lock(waiting->mutex);
        if (!waiting->launched) {
            if (!advances || waiting->polls_left-- > 0) { return ncclInProgress; }
            launch(*waiting);
        }
        if (waiting->result != ncclSuccess) { return waiting->result; }
    }
    if (c.finalized && !c.order.empty()) { return ncclInProgress; }
    return c.async;
}

// What the last operations of `c` still do is over, and nobody will touch their buffers.
void await_quiet(ncclComm& c) {
    while (c.running.load() != 0) { std::this_thread::sleep_for(std::chrono::microseconds(100)); }
}
void end(ncclComm& c) {
    clique& q = *c.of;
    std::unique_lock lock(q.mutex);
    ++q.ended;
    q.changed.notify_all();
    if (destroy_waits() && !c.aborted) {
        wait(
            lock, q.changed, [&] { return q.ended >= q.size; },
            [&] { return tutti::test::fake_cuda::faulted(c.device); });
    }
}

}  // namespace

std::size_t live_communicators() { return the().live.load(); }

ncclResult_t check(ncclComm* c, std::string_view function) {
    bool known = false;
    if (c != nullptr) {
        const unobserved lock(the().mutex);
        known = the().handles.contains(c);
    }
    if (!known) { return fails(ncclInvalidArgument, std::string(function) + ": not a communicator"); }
    if (c->dead) {
        problem(std::string(function) + ": the communicator was destroyed or aborted before");
        return fails(ncclInvalidArgument, std::string(function) + ": the communicator has ended");
    }
    return ncclSuccess;
}

ncclResult_t check_ready(ncclComm* c, std::string_view function) {
    if (c->finalized) {
        problem(std::string(function) + ": the communicator was finalized before");
        return fails(ncclInvalidArgument, std::string(function) + ": the communicator was finalized");
    }
    const ncclResult_t s = state(*c, false);
    if (s == ncclSuccess) { return s; }
    return fails(s == ncclInProgress ? ncclInvalidArgument : s,
                 std::string(function) + ": the communicator is not ready or has failed");
}

}  // namespace tutti::test::fake_nccl

using namespace tutti::test;
using namespace tutti::test::fake_nccl;

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    if (const ncclResult_t r = enter("ncclGetUniqueId", any); r != ncclSuccess) { return r; }
    *id = {};
    const std::string text = "fake_nccl " + std::to_string(++the().ids);
    std::memcpy(id->internal, text.data(), text.size());
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* c, int size, ncclUniqueId id, int rank) {
    return start(c, size, id, rank, nullptr, "ncclCommInitRank");
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
    return start(c, size, id, rank, config, "ncclCommInitRankConfig");
}
ncclResult_t ncclCommInitAll(ncclComm_t* all, int count, const int* devices) {
    if (const ncclResult_t r = enter("ncclCommInitAll", any); r != ncclSuccess) { return r; }
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    int before = 0;
    cudaGetDevice(&before);
    ncclGroupStart();
    for (int r = 0; r < count; ++r) {
        if (cudaSetDevice(devices == nullptr ? r : devices[r]) != cudaSuccess) { fail_group(ncclUnhandledCudaError); }
        start(&all[r], count, id, r, nullptr, "ncclCommInitRank");
    }
    cudaSetDevice(before);
    return ncclGroupEnd();
}

ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
    if (const ncclResult_t r = check(c, "ncclCommSplit"); r != ncclSuccess) { return fail_group(r); }
    const use in_use(c, "ncclCommSplit");
    if (const ncclResult_t r = enter("ncclCommSplit", c); r != ncclSuccess) { return fail_group(r); }
    if (const ncclResult_t r = check_ready(c, "ncclCommSplit"); r != ncclSuccess) { return fail_group(r); }
    if (out == nullptr || color < NCCL_SPLIT_NOCOLOR || refused(config)) {
        return fail_group(fails(ncclInvalidArgument, "ncclCommSplit: invalid color or config"));
    }
    *out = nullptr;
    clique& q = *c->of;
    std::shared_ptr<division> d;
    {
        const std::lock_guard lock(q.mutex);
        const std::uint64_t number = c->splits++;
        auto& known = q.divisions[number];
        if (known == nullptr) { known = std::make_shared<division>(); }
        d = known;
        d->ranks[c->rank] = {color, key, is_blocking(config, c->blocking), nullptr};
        if (d->ranks.size() == static_cast<std::size_t>(q.size)) {
            q.divisions.erase(number);
            divide(q, *d);
        }
    }
    return add([c, d, out] { return await_division(*c, d, out); });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* error) {
    if (const ncclResult_t r = check(c, "ncclCommGetAsyncError"); r != ncclSuccess) { return r; }
    *error = state(*c, true);
    return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t c) {
    if (const ncclResult_t r = check(c, "ncclCommFinalize"); r != ncclSuccess) { return fail_group(r); }
    const use in_use(c, "ncclCommFinalize");
    if (const ncclResult_t r = enter("ncclCommFinalize", c); r != ncclSuccess) { return fail_group(r); }
    if (const ncclResult_t r = check_ready(c, "ncclCommFinalize"); r != ncclSuccess) { return fail_group(r); }
    c->finalized = true;
    if (!c->blocking) { return ncclInProgress; }
    c->order.wait_until_empty([&] { return c->aborted || tutti::test::fake_cuda::faulted(c->device); });
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t c) {
    if (c == nullptr) { return ncclSuccess; }
    if (const ncclResult_t r = check(c, "ncclCommDestroy"); r != ncclSuccess) { return r; }
    const use in_use(c, "ncclCommDestroy");
    if (const ncclResult_t r = enter("ncclCommDestroy", c); r != ncclSuccess) { return r; }
    c->order.wait_until_empty([&] { return tutti::test::fake_cuda::faulted(c->device); });
    tutti::test::fake_cuda::wait_for_process();  // NCCL frees page-locked memory
    end(*c);
    bury(*c);
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c) {
    if (c == nullptr) { return ncclSuccess; }
    if (const ncclResult_t r = check(c, "ncclCommAbort"); r != ncclSuccess) { return r; }
    const use in_use(c, "ncclCommAbort");
    if (const ncclResult_t r = enter("ncclCommAbort", c); r != ncclSuccess) { return r; }
    c->aborted = true;
    {
        const std::lock_guard lock(c->of->mutex);
        c->of->changed.notify_all();
    }
    await_quiet(*c);
    end(*c);
    bury(*c);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t c, int* count) {
    if (const ncclResult_t r = check(c, "ncclCommCount"); r != ncclSuccess) { return r; }
    *count = c->of->size;
    return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int* device) {
    if (const ncclResult_t r = check(c, "ncclCommCuDevice"); r != ncclSuccess) { return r; }
    *device = c->device;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int* rank) {
    if (const ncclResult_t r = check(c, "ncclCommUserRank"); r != ncclSuccess) { return r; }
    *rank = c->rank;
    return ncclSuccess;
}

}  // extern "C"
