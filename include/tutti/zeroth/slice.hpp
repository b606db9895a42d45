// whole, sliced: who moves a block between host and device: one rank all of it, or each rank its part, which all then
// gather. Needs schedule/lane. Every rank keeps, uploads, updates and stores 1/N of a block alone.
// Source: Wang et al., DistZO2, arXiv:2507.03211 (parameter slicing over PCIe and NVLink); Rajbhandari et al.,
// ZeRO-Infinity, arXiv:2104.07857.
#pragma once

#include <algorithm>    // max, min_element
#include <array>        // times
#include <bit>          // times as records
#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <string_view>  // texts
#include <tuple>        // ways
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

namespace detail {
// Where ranks wait for each other by other means than their communicator.
template <class Gather> void abort_gather(const Gather& gather, std::string_view why) noexcept {
    if constexpr (requires { gather.abort(why); }) { gather.abort(why); }
}
}  // namespace detail

/// Parts of a block reach all ranks by one all-gather: NCCL's kernels, which take some multiprocessors.
struct gather_collectively {
    template <communicator C, class T> void operator()(C& c, view<T, memory_of<C>> all, part own) const {
        c.all_gather(view<const T, memory_of<C>>(all.sub(own.first, own.count)), all);
    }
};

/// Parts of a block reach every other rank by a message of their own.
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

/// Whichever of several ways is fastest for blocks of a size: all are measured when it is made.
///
/// Semantics    collective; all ranks take the same way, that whose slowest rank takes least.
/// Determinism  of what is gathered: the same bits each way. Which it is depends on the machine, and may on the day.
/// Cost         a block's memory while it measures; five gathers each way.
template <class... Ways> class gather_as_measured {
    static_assert(sizeof...(Ways) >= 1 && sizeof...(Ways) <= 4, "between one and four ways are compared");
    std::tuple<Ways...> ways_;
    std::array<double, sizeof...(Ways)> times_{};
    std::size_t best_ = 0;

public:
    template <communicator C>
    gather_as_measured(C& c, std::size_t block_bytes, Ways... ways) : ways_(std::move(ways)...) {
        constexpr int repeats = 4;
        const auto n = static_cast<std::size_t>(c.size());
        const std::size_t each = std::max<std::size_t>(block_bytes / sizeof(float) / n, 1);
        const buffer<float, queue_of<C>> all(c.queue(), n * each);
        fill(c.queue(), all.view(), 0.0f);
        const part own{static_cast<std::size_t>(c.rank()) * each, each};
        const auto measure = [&](const auto& way) {
            way(c, all.view(), own);
            c.synchronize();
            const auto begin = clock_type::now();
            for (int i = 0; i < repeats; ++i) { way(c, all.view(), own); }
            c.synchronize();
            return std::bit_cast<std::uint64_t>(seconds(clock_type::now() - begin) / repeats);
        };
        comm::control_record mine{};
        std::apply([&, i = std::size_t{0}](const auto&... way) mutable { ((mine[i++] = measure(way)), ...); }, ways_);
        for (const comm::control_record& r : c.gather_control(mine)) {
            for (std::size_t i = 0; i < times_.size(); ++i) {
                times_[i] = std::max(times_[i], std::bit_cast<double>(r[i]));
            }
        }
        best_ = static_cast<std::size_t>(std::min_element(times_.begin(), times_.end()) - times_.begin());
    }
    /// Which of them it is, and the seconds of each by its slowest rank.
    [[nodiscard]] std::size_t chosen() const noexcept { return best_; }
    [[nodiscard]] const std::array<double, sizeof...(Ways)>& times() const noexcept { return times_; }

    void abort(std::string_view why) const noexcept {
        std::apply([&](const auto&... way) { (detail::abort_gather(way, why), ...); }, ways_);
    }
    template <communicator C, class T> void operator()(C& c, view<T, memory_of<C>> all, part own) const {
        std::apply(
            [&, i = std::size_t{0}](const auto&... way) mutable { ((i++ == best_ ? way(c, all, own) : void()), ...); },
            ways_);
    }
};
template <communicator C, class... Ways> gather_as_measured(C&, std::size_t, Ways...) -> gather_as_measured<Ways...>;

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
    void abort(std::string_view why) noexcept {
        detail::abort_gather(gather_, why);
        lane_.abort(why);
    }

    /// The parts' hashes as one, the same on every rank. Collective.
    [[nodiscard]] std::uint64_t hash(std::uint64_t own) {
        const auto all = control_.gather_control({own, 0, 0, 0});
        return hash_bytes(as_bytes(view<const comm::control_record>(all)));
    }
};

}  // namespace tutti::zeroth
