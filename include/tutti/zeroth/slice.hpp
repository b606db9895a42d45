// whole, sliced: who moves a block between host and device: one rank all of it, or each rank its part, which all then
// gather. Needs schedule/lane. Every rank keeps, uploads, updates and stores 1/N of a block alone.
// Source: Wang et al., DistZO2, arXiv:2507.03211 (parameter slicing over PCIe and NVLink); Rajbhandari et al.,
// ZeRO-Infinity, arXiv:2104.07857.
#pragma once

#include <algorithm>    // max
#include <bit>          // times as records
#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <string_view>  // texts
#include <utility>      // move
#include <vector>       // messages

#include <tutti/comm/communicator.hpp>  // can_all_gather
#include <tutti/core/buffer.hpp>        // what is measured
#include <tutti/core/deadline.hpp>      // clock_type
#include <tutti/core/elementwise.hpp>   // fill
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
    template <communicator C, class T> void operator()(C& c, view<T, memory_of<C>> all, part own) const {
        c.all_gather(view<const T, memory_of<C>>(all.sub(own.first, own.count)), all);
    }
};

/// Parts of a block reach every other rank by a message of their own: with a communicator that sends by copy engines,
/// such as NCCL with NCCL_P2P_USE_CUDA_MEMCPY=1, they take no multiprocessors.
struct gather_by_messages {
    template <communicator C, class T> void operator()(C& c, view<T, memory_of<C>> all, part own) const {
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

/// Whichever of the two is faster for blocks of a size: both are measured when it is made.
///
/// Semantics    collective; all ranks take the same, that whose slowest rank takes less.
/// Determinism  of what is gathered: the same bits either way. Which it is depends on the machine, and may on the day.
/// Cost         a block's memory while it measures; each way once, and `repeats` times more for the time of one.
class gather_as_measured {
    double collectively_ = 0;
    double by_messages_ = 0;

public:
    template <communicator C> gather_as_measured(C& c, std::size_t block_bytes, int repeats = 4) {
        const auto n = static_cast<std::size_t>(c.size());
        const std::size_t each = std::max<std::size_t>(block_bytes / sizeof(float) / n, 1);
        const buffer<float, queue_of<C>> all(c.queue(), n * each);
        fill(c.queue(), all.view(), 0.0f);
        const part own{static_cast<std::size_t>(c.rank()) * each, each};
        const auto measure = [&](const auto& gather) {
            gather(c, all.view(), own);
            c.synchronize();
            const auto begin = clock_type::now();
            for (int i = 0; i < repeats; ++i) { gather(c, all.view(), own); }
            c.synchronize();
            return std::bit_cast<std::uint64_t>(seconds(clock_type::now() - begin) / repeats);
        };
        const std::uint64_t first = measure(gather_collectively());
        const std::uint64_t second = measure(gather_by_messages());
        for (const comm::control_record& r : c.gather_control({first, second, 0, 0})) {
            collectively_ = std::max(collectively_, std::bit_cast<double>(r[0]));
            by_messages_ = std::max(by_messages_, std::bit_cast<double>(r[1]));
        }
    }
    [[nodiscard]] bool by_messages() const noexcept { return by_messages_ < collectively_; }
    /// Seconds of one, by the slowest rank.
    [[nodiscard]] double collective_time() const noexcept { return collectively_; }
    [[nodiscard]] double message_time() const noexcept { return by_messages_; }

    template <communicator C, class T> void operator()(C& c, view<T, memory_of<C>> all, part own) const {
        if (by_messages()) {
            gather_by_messages()(c, all, own);
        } else {
            gather_collectively()(c, all, own);
        }
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
    Gather gather_;

public:
    static constexpr bool gathers = true;
    using communicator_type = C;

    explicit sliced(C own, Gather gather = {}, schedule::lane_options options = {})
        : rank_(static_cast<std::size_t>(own.rank()))
        , ranks_(static_cast<std::size_t>(own.size()))
        , control_(std::move(own))
        , lane_(control_.duplicate("gather"), std::move(options))
        , gather_(std::move(gather)) {}

    [[nodiscard]] std::size_t rank() const noexcept { return rank_; }
    [[nodiscard]] std::size_t ranks() const noexcept { return ranks_; }
    [[nodiscard]] schedule::lane<C>& lane() noexcept { return lane_; }

    /// Called on the lane's communicator with all of a block and the rank's part of it, which is there.
    [[nodiscard]] const Gather& gather() const noexcept { return gather_; }

    /// Ends the other ranks too, which would wait for parts.
    void abort(std::string_view why) noexcept { lane_.abort(why); }

    /// The parts' hashes as one, the same on every rank. Collective.
    [[nodiscard]] std::uint64_t hash(std::uint64_t own) {
        const auto all = control_.gather_control({own, 0, 0, 0});
        return hash_bytes(as_bytes(view<const comm::control_record>(all)));
    }
};

}  // namespace tutti::zeroth
