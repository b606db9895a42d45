// nccl: ranks are GPUs, one a rank, in threads or processes. Collectives of NCCL on a CUDA stream, with deadlines.
// Needs NCCL and the CUDA runtime (tutti::nccl); any C++20 compiler, no nvcc.
// `nccl::launch(n, f)` runs a thread a GPU; `nccl::over(world)` starts from any communicator between hosts.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // identities
#include <exception>    // uncaught_exceptions
#include <memory>       // family, channel
#include <optional>     // split
#include <span>         // colors
#include <string>       // names
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // control records

#include <cuda_runtime_api.h>  // CUDA runtime
#include <nccl.h>              // NCCL

#include <tutti/comm/detail/nccl_channel.hpp>      // one communicator
#include <tutti/comm/detail/nccl_collectives.hpp>  // data movement
#include <tutti/comm/detail/nccl_family.hpp>       // abort, watchdog
#include <tutti/comm/detail/nccl_start.hpp>        // where ranks meet
#include <tutti/comm/front.hpp>                    // typed collectives
#include <tutti/comm/threads.hpp>                  // launch
#include <tutti/core/state.hpp>                    // hash_bytes
#include <tutti/core/text.hpp>                     // formatted

namespace tutti::comm {

/// A rank that is a GPU.
///
/// Semantics    collectives are enqueued on the communicator's stream and complete when it gets there; the host waits
///              in gather_control, agree, duplicate, split and synchronize alone. They may be captured into a graph,
///              except those. Reduces floats of all sizes and integers of 8, 32 and 64 bits: NCCL has no 16-bit
///              integers, and its max and min may drop a NaN.
/// Order        a family's communicators (a lane's and the main one) may be in flight together. Calls must come in the
///              same order on every rank; then so do their kernels: each communicator's starts behind the one enqueued
///              before it. With NCCL_LAUNCH_ORDER_IMPLICIT=1 in the environment (NCCL 2.26) that is left to NCCL,
///              which lets them overlap. Replays of graphs are ordered by their stream alone.
/// Determinism  NCCL orders its sums: by algorithm, which depends on size, ranks and links. All ranks get the same bits
///              with rings and trees.
/// Threads      as the concept says. A watchdog thread belongs to each root communicator.
/// Processes    a process a GPU is what NCCL is best at. Ranks that are threads of one process keep what communicators had
///              until their family ends; and when one of them loads code for its device, or frees page-locked memory,
///              CUDA may wait for the devices of all: where kernels of another rank wait for a message of that one,
///              neither goes on. So load first, for example by a rehearsal without collectives.
/// Cost         the call of NCCL, and some 0.1 us for checks, a lock and the clock; between two communicators of a
///              family also an event. reduce_scatter_v and all_gather_v of parts whose number times the largest is at
///              most 1.25 times the whole: one NCCL collective, and for parts that are not equal scratch of that size
///              while it runs and a copy of the whole. Of other parts, and of all unequal ones while a graph is
///              captured: n reduces in a group, which are n/2 times the traffic, and n broadcasts.
/// Errors       timeout_error, on the rank that finds out, when a collective takes longer than the timeout: it names
///              the ranks that did not come, or no longer answer; aborted_error with that text on the others, within
///              some 50 ms, or 2 s where a thread hangs inside NCCL. They come from the next call and from every host
///              wait for this queue or a sibling. backend_error with NCCL's code and text. A failed family has aborted
///              all its NCCL communicators, also one that the caller brought. Ranks that disagree in count or kind hang
///              or compute nonsense, as in NCCL itself: wrap in `checked` to be told.
class nccl : public front<nccl, cuda_queue> {
    std::shared_ptr<detail::nccl_family> family_;
    std::shared_ptr<detail::nccl_channel> channel_;
    int exceptions_ = std::uncaught_exceptions();

    nccl(std::shared_ptr<detail::nccl_family> f, std::shared_ptr<detail::nccl_channel> c)
        : family_(std::move(f)), channel_(std::move(c)) {
        family_->add(channel_);
        channel_->queue.watch(family_);
    }
    explicit nccl(detail::nccl_start::started s) : nccl(std::move(s.family), std::move(s.channel)) { share_pools(); }

public:
    using native_handle_type = ncclComm_t;

    /// Rank `rank` of `size`, which meet in a store that all of them see; collective over them.
    ///
    /// Semantics  one GPU a rank: the queue's. The store also serves to find out who is missing later on, and is kept.
    /// Errors     usage_error for a rank outside of [0, size) or a timeout that is not positive; timeout_error naming
    ///            the ranks that did not come; aborted_error when one of them failed while it came; backend_error.
    template <store S>
    nccl(std::shared_ptr<S> meeting, int rank, int size, cuda_queue q = {}, nccl_options o = {})
        : nccl(detail::nccl_start(std::make_unique<detail::store_link_to<S>>(std::move(meeting)), rank, size,
                                  std::move(q), std::move(o))
                   .run()) {}

    /// The caller's communicator, a blocking one, on a queue of its device; collective over its ranks. It stays the
    /// caller's, unless the family fails: then it has been aborted, and native_handle() is null. Who is missing is not
    /// known without a store.
    explicit nccl(ncclComm_t existing, cuda_queue q = {}, nccl_options o = {})
        : nccl(detail::nccl_start::adopt(existing, std::move(q), std::move(o))) {}

    /// The ranks of `world`, any communicator between hosts, such as `threads` or `mpi`; collective over them. `world`
    /// is needed only meanwhile.
    ///
    /// Errors  usage_error when ranks are on several hosts and no directory is given that all of them see, or for a
    ///         timeout that is not positive.
    template <can_gather_control World>
    [[nodiscard]] static nccl over(World& world, cuda_queue q = {}, nccl_options o = {}) {
        auto meeting = detail::meeting_of(world, o);
        return nccl(
            detail::nccl_start(std::move(meeting), world.rank(), world.size(), std::move(q), std::move(o)).run());
    }

    /// Runs f(communicator) on n threads, thread r on GPU r, and returns when all have ended.
    ///
    /// Errors  usage_error when there are fewer GPUs. A rank that throws aborts the family, so the others end by
    ///         aborted_error; the first cause is rethrown.
    template <class F> static void launch(int n, F f, const nccl_options& o = {});

    nccl(nccl&&) noexcept = default;
    nccl& operator=(nccl&& other) noexcept {
        if (this != &other) {
            leave();
            front::operator=(std::move(other));
            family_ = std::move(other.family_);
            channel_ = std::move(other.channel_);
        }
        return *this;
    }
    ~nccl() { leave(); }

    [[nodiscard]] static constexpr bool reduces(dtype t) noexcept { return detail::nccl_type(t).has_value(); }

    [[nodiscard]] int rank() const noexcept { return channel_->rank; }
    [[nodiscard]] int size() const noexcept { return static_cast<int>(channel_->members.size()); }
    [[nodiscard]] std::string_view name() const noexcept { return channel_->name; }
    [[nodiscard]] cuda_queue queue() const noexcept { return channel_->queue; }
    /// For NCCL calls of the user's own, from the thread that uses this communicator. Null after a failure.
    [[nodiscard]] ncclComm_t native_handle() const noexcept { return channel_->comm.load(); }

    [[nodiscard]] nccl duplicate(std::string_view name) {
        const std::vector<int> colors(channel_->members.size(), 0);
        return *child(colors, name, "duplicate");
    }
    [[nodiscard]] std::optional<nccl> split(std::span<const int> colors, std::string_view name) {
        if (colors.size() != channel_->members.size()) {
            throw usage_error(formatted("split: {} colors for {} ranks, on '{}'", colors.size(), size(), this->name()));
        }
        return child(colors, name, "split");
    }
    void synchronize() {
        const error_context context = context_named("synchronize", 0);
        family_->raise_if_poisoned(context);
        refuse_capture(context);
        await_queue();
    }
    void abort(std::string_view why) noexcept { family_->poison(why); }

    /// Every rank's record, by rank. Cost: a host wait for the queue.
    /// Errors  usage_error while a graph is being captured from the queue.
    [[nodiscard]] std::vector<control_record> gather_control(control_record mine) {
        return gather_control_for("gather_control", mine);
    }

    /// The byte-level core; called by the typed front.
    void execute(const call& c) { enqueue(c, context_of(c, name(), rank())); }

private:
    [[nodiscard]] error_context context_named(std::string_view operation, std::uint64_t sequence) const {
        return {std::string(operation), std::string(name()), rank(), sequence, 0, dtype::byte, 0, {}};
    }

    // work(handle) inside NCCL; an error ends the family.
    template <class Work> void attempt(const error_context& context, Work work) {
        family_->raise_if_poisoned(context);
        bool gone = false;
        try {
            const detail::nccl_channel::use inside(*channel_);
            const ncclComm_t handle = channel_->comm.load();
            gone = handle == nullptr;
            if (!gone) { work(handle); }
        } catch (const usage_error&) { throw; } catch (const std::exception& e) {
            family_->raise_if_poisoned(context);  // NCCL was cut short: the cause says more than its words
            if (family_->poison(*channel_, e)) { family_->raise(context); }
            throw;
        }
        if (gone) { family_->raise(context); }
    }
    void refuse_capture(const error_context& context) const {
        if (channel_->queue.capture() == 0) { return; }
        throw usage_error(formatted("{}: waits for the host, which a graph that is being captured cannot{}",
                                    context.operation, where(context)),
                          context);
    }
    // Past the deadline, or after a fault of the device, the family has failed: the others are told.
    void await_queue() {
        try {
            channel_->queue.record().wait_host(after(family_->timeout));
        } catch (const aborted_error&) { throw; } catch (const error& e) {
            family_->poison(e.what());
            throw;
        }
    }
    void enqueue(const call& c, const error_context& context) {
        attempt(context, [&](ncclComm_t handle) {
            channel_->begin(c.kind, c.sequence);
            family_->in_order(*channel_, [&] {
                detail::nccl_collective(handle, channel_->queue, c, context, rank(), size(), channel_->cell.data())
                    .run();
            });
        });
    }
    [[nodiscard]] std::vector<control_record> gather_control_for(const char* operation, control_record mine) {
        const cuda_queue& q = channel_->queue;
        call c;
        c.kind = collective::all_gather;
        c.element_size = sizeof(control_record);
        c.in = channel_->records.data();
        c.in_count = 1;
        c.out = channel_->records.data() + 1;
        c.out_count = channel_->members.size();
        const error_context context = context_named(operation, c.sequence = next_collective());
        family_->raise_if_poisoned(context);
        refuse_capture(context);
        const detail::nccl_channel::control doing(*channel_, operation);
        control_record* const host = channel_->page_locked.data();
        host[0] = mine;
        q.copy(channel_->records.data(), host, sizeof(control_record), cudaMemcpyHostToDevice);
        enqueue(c, context);
        q.copy(host + 1, c.out, c.out_bytes(), cudaMemcpyDeviceToHost);
        await_queue();
        return {host + 1, host + 1 + size()};
    }
    [[nodiscard]] std::optional<nccl> child(std::span<const int> colors, std::string_view name, const char* operation);

    // NCCL lets ranks of one process read each other's memory: it must be allowed to, also that of pools. And they may
    // not free what CUDA waits for all of their devices for.
    void share_pools() {
        const auto device = static_cast<std::uint64_t>(channel_->queue.device());
        const std::uint64_t process = detail::this_process();
        const auto all = gather_control_for("nccl", {process, device, 0, 0});
        for (const control_record& r : all) {
            const int peer = static_cast<int>(r[1]);
            int reachable = 0;
            if (r[0] != process || r[1] == device) { continue; }
            family_->share_process();
            tutti::detail::check_cuda(cudaDeviceCanAccessPeer(&reachable, peer, channel_->queue.device()),
                                      "cudaDeviceCanAccessPeer");
            if (reachable != 0) { tutti::detail::cuda_pool::of(channel_->queue.device()).share_with(peer); }
        }
        static_cast<void>(gather_control_for("nccl", {}));  // nobody sends before everybody has opened up
    }
    void leave() noexcept {
        if (channel_ == nullptr) { return; }
        const auto family = std::exchange(family_, nullptr);
        const auto channel = std::exchange(channel_, nullptr);
        // Whoever else holds the family may be about to say what happened.
        if (std::uncaught_exceptions() > exceptions_ && family.use_count() > 1) {
            family->leave_behind(*channel);
        } else {
            family->close(channel, std::uncaught_exceptions() > exceptions_);
        }
    }
};

// Collective. All ranks have what they need, and agree on name and table, before NCCL's own call, which then has
// everybody.
inline std::optional<nccl> nccl::child(std::span<const int> colors, std::string_view name, const char* operation) {
    const error_context context = context_named(operation, next_collective());
    family_->raise_if_poisoned(context);
    refuse_capture(context);
    const int color = colors[static_cast<std::size_t>(rank())];
    // Equal on all ranks without asking: children are numbered in the order all ranks make them.
    const std::uint64_t birth[] = {channel_->id, ++channel_->children, static_cast<std::uint64_t>(color)};
    std::shared_ptr<detail::nccl_channel> made;
    if (color >= 0) {
        std::vector<int> members;
        int place = 0;
        for (std::size_t r = 0; r < colors.size(); ++r) {
            if (colors[r] != color) { continue; }
            if (static_cast<int>(r) == rank()) { place = static_cast<int>(members.size()); }
            members.push_back(channel_->members[r]);
        }
        try {
            const tutti::detail::on_device scope(channel_->queue.device());
            made = std::make_shared<detail::nccl_channel>(channel_->queue.sibling(),
                                                          channel_->name + "/" + std::string(name), place,
                                                          std::move(members), hash_bytes(as_bytes(view(birth))));
        } catch (const std::exception& e) {
            family_->poison(e.what());
            throw;
        }
    }
    const std::uint64_t text = hash_bytes(as_bytes(view(name.data(), name.size())));
    agree(hash_bytes(as_bytes(view(colors.data(), colors.size())), text),
          formatted("{}: name or table of '{}'", operation, name));
    const detail::nccl_channel::control doing(*channel_, operation);
    attempt(context, [&](ncclComm_t handle) {
        const tutti::detail::on_device scope(channel_->queue.device());
        ncclComm_t divided = nullptr;
        detail::check_nccl(ncclCommSplit(handle, color < 0 ? NCCL_SPLIT_NOCOLOR : color, rank(), &divided, nullptr),
                           "ncclCommSplit", context);
        if (made != nullptr) { made->comm.store(divided); }
    });
    if (made == nullptr) { return std::nullopt; }
    return nccl(family_, std::move(made));
}

template <class F> void nccl::launch(int n, F f, const nccl_options& o) {
    int devices = 0;
    tutti::detail::check_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    if (n > devices) { throw usage_error(formatted("nccl: {} ranks need as many GPUs, there are {}", n, devices)); }
    threads::launch(n,
                    [&](threads& world) {
                        tutti::detail::check_cuda(cudaSetDevice(world.rank()), "cudaSetDevice");
                        nccl own = over(world, cuda_queue(world.rank()), o);
                        const auto family = own.family_;  // f may move from its communicator
                        try {
                            f(own);
                        } catch (const std::exception& e) {
                            family->poison(e.what());
                            throw;
                        } catch (...) {
                            family->poison("an exception of unknown type");
                            throw;
                        }
                    },
                    {.name = o.name, .timeout = o.timeout});
}

static_assert(communicator<nccl> && can_gather_control<nccl>);

}  // namespace tutti::comm
