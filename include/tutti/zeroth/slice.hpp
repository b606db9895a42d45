// whole, sliced: who moves a block between host and device: one rank all of it, or each rank its part, which all then
// gather. Needs schedule/lane. Every rank keeps, uploads, updates and stores 1/N of a block alone.
// Source: Wang et al., DistZO2, arXiv:2507.03211 (parameter slicing over PCIe and NVLink); Rajbhandari et al.,
// ZeRO-Infinity, arXiv:2104.07857.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <string_view>  // texts
#include <utility>      // move
#include <vector>       // messages

#include <tutti/comm/communicator.hpp>  // can_all_gather
#include <tutti/core/partition.hpp>     // part
#include <tutti/core/state.hpp>         // hash_bytes
#include <tutti/core/view.hpp>          // view
#include <tutti/schedule/lane.hpp>      // lane

namespace tutti::zeroth {

/// One rank moves whole blocks over its own link.
struct whole {
    static constexpr bool gathers = false;
    [[nodiscard]] std::size_t rank() const noexcept { return 0; }
    [[nodiscard]] std::size_t ranks() const noexcept { return 1; }
    [[nodiscard]] std::uint64_t hash(std::uint64_t own) noexcept { return own; }
    void abort(std::string_view) noexcept {}  // nobody waits for it
};

/// Parts of a block reach all ranks by one all-gather: NCCL's kernels, which take some multiprocessors.
struct gather_collectively {
    template <communicator C, class T> static void gather(C& c, view<T, memory_of<C>> all, part own) {
        c.all_gather(view<const T, memory_of<C>>(all.sub(own.first, own.count)), all);
    }
};

/// Parts of a block reach every other rank by a message of their own: with a communicator that sends by copy engines,
/// such as NCCL with NCCL_P2P_USE_CUDA_MEMCPY=1, they take no multiprocessors.
struct gather_by_messages {
    template <communicator C, class T> static void gather(C& c, view<T, memory_of<C>> all, part own) {
        std::vector<comm::transfer<memory_of<C>>> messages;
        const int n = c.size();
        for (int step = 1; step < n; ++step) {  // each to another rank than all others
            const int to = (c.rank() + step) % n;
            const int from = (c.rank() + n - step) % n;
            messages.push_back(comm::send_to(to, all.sub(own.first, own.count)));
            messages.push_back(
                comm::receive_from(from, all.sub(static_cast<std::size_t>(from) * own.count, own.count)));
        }
        c.exchange(messages);
    }
};

/// Each rank of `C` moves its part: 1/N of a block up and down its own link, (N-1)/N received from the others.
///
/// Semantics    ranks are replicas on one host: the same layout, updates and calls. The pending update is applied to
///              the part before it is gathered, so it costs 1/N and offloads need not wait for the computation. Owns
///              the communicator moved into it, beside which others may be in use.
/// Determinism  the bits of `whole`: a number depends on its tensor and place alone.
/// Errors       those of the lane: a rank that fails, also in its model, ends all by aborted_error.
template <communicator C, class Gather = gather_collectively> class sliced {
    std::size_t rank_;
    std::size_t ranks_;
    C control_;
    schedule::lane<C> lane_;

public:
    static constexpr bool gathers = true;
    using communicator_type = C;

    explicit sliced(C own, schedule::lane_options options = {})
        : rank_(static_cast<std::size_t>(own.rank()))
        , ranks_(static_cast<std::size_t>(own.size()))
        , control_(std::move(own))
        , lane_(control_.duplicate("gather"), std::move(options)) {}

    [[nodiscard]] std::size_t rank() const noexcept { return rank_; }
    [[nodiscard]] std::size_t ranks() const noexcept { return ranks_; }
    [[nodiscard]] schedule::lane<C>& lane() noexcept { return lane_; }

    template <class T> static void gather(C& c, view<T, memory_of<C>> all, part own) { Gather::gather(c, all, own); }

    /// Ends the other ranks too, which would wait for parts.
    void abort(std::string_view why) noexcept { lane_.abort(why); }

    /// The parts' hashes as one, the same on every rank. Collective.
    [[nodiscard]] std::uint64_t hash(std::uint64_t own) {
        const auto all = control_.gather_control({own, 0, 0, 0});
        return hash_bytes(as_bytes(view<const comm::control_record>(all)));
    }
};

}  // namespace tutti::zeroth
