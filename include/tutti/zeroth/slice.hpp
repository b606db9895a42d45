// whole, sliced: who moves a block between host and device: one rank all of it, or each rank its part, which all then
// gather. Needs schedule/lane. Every rank keeps, uploads, updates and stores 1/N of a block alone.
// Source: Wang et al., DistZO2, arXiv:2507.03211 (parameter slicing over PCIe and NVLink); Rajbhandari et al.,
// ZeRO-Infinity, arXiv:2104.07857.
#pragma once

#include <algorithm>    // max, min_element, transform
#include <array>        // times
#include <bit>          // times as records
#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <limits>       // not available
#include <string_view>  // texts
#include <tuple>        // ways
#include <utility>      // move
#include <vector>       // messages

#include <tutti/comm/communicator.hpp>  // can_all_gather
#include <tutti/core/buffer.hpp>        // what is measured
#include <tutti/core/deadline.hpp>      // clock_type
#include <tutti/core/elementwise.hpp>   // fill
#include <tutti/core/error.hpp>         // usage_error
#include <tutti/core/partition.hpp>     // part
#include <tutti/core/state.hpp>         // hash_bytes
#include <tutti/core/text.hpp>          // formatted
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
// What not all ranks can do everywhere says so.
template <class Gather> [[nodiscard]] bool is_available(const Gather& gather) noexcept {
    if constexpr (requires { gather.available(); }) {
        return gather.available();
    } else {
        return true;
    }
}
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

/// One of several ways, which is known when the program runs.
///
/// Determinism  of what is gathered: the same bits each way.
/// Errors       usage_error for a way that is not there, or not available.
template <class... Ways> class gather_by_one_of {
    static_assert(sizeof...(Ways) >= 1 && sizeof...(Ways) <= 4, "between one and four ways are compared");
    std::tuple<Ways...> ways_;
    std::array<double, sizeof...(Ways)> times_{};
    std::size_t chosen_ = 0;

public:
    /// Way `which` of them; `times` are the seconds of each, where they were measured. The same on all ranks.
    explicit gather_by_one_of(std::tuple<Ways...> ways, std::size_t which,
                              const std::array<double, sizeof...(Ways)>& times = {})
        : ways_(std::move(ways)), times_(times), chosen_(which) {
        bool there = false;
        std::apply(
            [&, i = std::size_t{0}](const auto&... way) mutable {
                ((there = there || (i++ == which && detail::is_available(way))), ...);
            },
            ways_);
        if (!there) { throw usage_error(formatted("gather_by_one_of: way {} is not available here", which)); }
    }
    [[nodiscard]] std::size_t chosen() const noexcept { return chosen_; }
    [[nodiscard]] const std::array<double, sizeof...(Ways)>& times() const noexcept { return times_; }

    void abort(std::string_view why) const noexcept {
        std::apply([&](const auto&... way) { (detail::abort_gather(way, why), ...); }, ways_);
    }
    template <communicator C, class T> void operator()(C& c, view<T, memory_of<C>> all, part own) const {
        std::apply([&, i = std::size_t{0}](
                       const auto&... way) mutable { ((i++ == chosen_ ? way(c, all, own) : void()), ...); },
                   ways_);
    }
};

/// The fastest of several ways for blocks of a size: each that is available is measured.
///
/// Semantics    collective; all ranks take the same way, that whose slowest rank takes least. `times` of what is returned
///              are of the slowest rank, infinite where a way is not available.
/// Determinism  of what is gathered. Which way it is depends on the machine, and may on the day.
/// Cost         a block's memory while it measures; five gathers each way.
template <communicator C, class... Ways>
[[nodiscard]] gather_by_one_of<Ways...> fastest_gather(C& c, std::size_t block_bytes, Ways... ways) {
    constexpr int repeats = 4;
    const auto n = static_cast<std::size_t>(c.size());
    const std::size_t each = std::max<std::size_t>(block_bytes / sizeof(float) / n, 1);
    const buffer<float, queue_of<C>> all(c.queue(), n * each);
    fill(c.queue(), all.view(), 0.0f);
    const part own{static_cast<std::size_t>(c.rank()) * each, each};
    const auto measure = [&](const auto& way) {
        if (!detail::is_available(way)) { return std::numeric_limits<double>::infinity(); }
        way(c, all.view(), own);
        c.synchronize();
        const auto begin = clock_type::now();
        for (int i = 0; i < repeats; ++i) { way(c, all.view(), own); }
        c.synchronize();
        return seconds(clock_type::now() - begin) / repeats;
    };
    const std::array<double, sizeof...(Ways)> mine{measure(ways)...};
    comm::control_record told{};
    std::transform(mine.begin(), mine.end(), told.begin(), [](double t) { return std::bit_cast<std::uint64_t>(t); });
    std::array<double, sizeof...(Ways)> times{};
    for (const comm::control_record& r : c.gather_control(told)) {
        for (std::size_t i = 0; i < times.size(); ++i) { times[i] = std::max(times[i], std::bit_cast<double>(r[i])); }
    }
    const auto best = static_cast<std::size_t>(std::min_element(times.begin(), times.end()) - times.begin());
    return gather_by_one_of<Ways...>(std::tuple<Ways...>(std::move(ways)...), best, times);
}

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
