// together: ranks work alone, then all learn what each has done, or all learn which could not and why.
// Needs a host communicator. Errors that ranks have agreed on leave the communicator usable; those of the communicator
// itself pass through.
#pragma once

#include <algorithm>    // copy_n
#include <concepts>     // same_as
#include <cstddef>      // byte
#include <cstdint>      // what failed
#include <exception>    // what failed
#include <span>         // bytes
#include <string>       // texts
#include <string_view>  // operations
#include <vector>       // ranks' bytes

#include <tutti/checkpoint/error.hpp>   // damaged_error
#include <tutti/comm/communicator.hpp>  // can_all_gather
#include <tutti/core/error.hpp>         // errors
#include <tutti/core/text.hpp>          // formatted

namespace tutti::checkpoint {

/// What checkpoints are agreed on with: bytes in host memory, calls that are complete on return.
template <class C>
concept host_communicator = comm::can_gather_control<C> && comm::can_all_gather<C, std::byte> &&
    queue_of<C>::executes_inline && std::same_as<memory_of<C>, host_memory>;

namespace detail {

enum class fault : std::uint8_t { none, usage, damaged, other };

/// What all ranks have learned: the bytes of each, or the error of the first that failed.
struct verdict {
    fault kind = fault::none;
    std::string text;
    int code = 0;
    std::vector<std::vector<std::byte>> of;  ///< by rank; of one that failed: its text

    [[nodiscard]] bool failed() const noexcept { return kind != fault::none; }
    void raise() const {
        switch (kind) {
        case fault::none: return;
        case fault::usage: throw usage_error(text);
        case fault::damaged: throw damaged_error(text);
        case fault::other: {
            error_context context;
            context.operation = "checkpoint";
            context.backend_code = code;
            throw backend_error(text, context);
        }
        }
    }
};

/// Every rank's bytes, by rank, into `of`. Returns the ranks that have no memory for them: then no rank has got any.
/// Collective.
template <host_communicator C>
[[nodiscard]] std::vector<int> gather(C& comm, std::span<const std::byte> mine,
                                      const std::vector<comm::control_record>& records,
                                      std::vector<std::vector<std::byte>>& of) {
    std::vector<std::size_t> counts;
    std::size_t sum = 0;
    bool room = true;
    for (const comm::control_record& r : records) {
        counts.push_back(static_cast<std::size_t>(r[2]));
        room = room && !__builtin_add_overflow(sum, counts.back(), &sum);
    }
    of.resize(counts.size());
    if (room && sum == 0) { return {}; }
    std::vector<std::byte> all;
    try {
        if (room) { all.resize(sum); }
        for (std::size_t rank = 0; room && rank < of.size(); ++rank) { of[rank].resize(counts[rank]); }
    } catch (const std::exception&) { room = false; }
    // Who has room must not wait for who has not.
    const auto rooms = comm.gather_control({room ? std::uint64_t{1} : 0, 0, 0, 0});
    std::vector<int> without;
    for (std::size_t rank = 0; rank < rooms.size(); ++rank) {
        if (rooms[rank][0] == 0) { without.push_back(static_cast<int>(rank)); }
    }
    if (!without.empty()) { return without; }
    comm.all_gather_v(view<const std::byte>(mine), view<std::byte>(all), counts);
    std::size_t first = 0;
    for (std::vector<std::byte>& bytes : of) {
        std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(first), bytes.size(), bytes.begin());
        first += bytes.size();
    }
    return without;
}

/// Runs `work` on every rank, which returns bytes or throws, and shares the outcome. Collective; `work` must not
/// communicate.
///
/// Cost  one control gather; where there are bytes, one more, and an all_gather of them.
template <host_communicator C, class Work>
[[nodiscard]] verdict together(C& comm, std::string_view operation, Work work) {
    std::vector<std::byte> mine;
    fault kind = fault::none;
    std::string text;
    int code = 0;
    try {
        mine = work();
    } catch (const damaged_error& e) {
        kind = fault::damaged;
        text = e.what();
    } catch (const usage_error& e) {
        kind = fault::usage;
        text = e.what();
    } catch (const error& e) {
        kind = fault::other;
        text = e.what();
        code = e.context().backend_code;
    } catch (const std::exception& e) {
        kind = fault::other;
        text = e.what();
    }
    if (kind != fault::none) {
        const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
        mine.assign(bytes.begin(), bytes.end());
    }
    const auto records =
        comm.gather_control({static_cast<std::uint64_t>(kind),
                             static_cast<std::uint64_t>(static_cast<std::uint32_t>(code)), mine.size(), 0});
    verdict all;
    if (const std::vector<int> without = gather(comm, mine, records, all.of); !without.empty()) {
        all.kind = fault::other;
        all.text = formatted("{}: no memory for what the ranks tell each other (rank {})", operation, list_of(without));
        return all;
    }
    std::vector<int> likewise;
    for (std::size_t rank = 0; rank < records.size(); ++rank) {
        if (records[rank][0] == 0) { continue; }
        if (all.failed()) {
            likewise.push_back(static_cast<int>(rank));
            continue;
        }
        all.kind = static_cast<fault>(records[rank][0]);
        all.code = static_cast<int>(static_cast<std::uint32_t>(records[rank][1]));
        const std::string_view reason(reinterpret_cast<const char*>(all.of[rank].data()), all.of[rank].size());
        all.text = records.size() == 1 ? formatted("{}: {}", operation, reason)
                                       : formatted("{}: rank {}: {}", operation, rank, reason);
    }
    if (!likewise.empty()) { all.text += formatted(" (rank {} failed too)", list_of(likewise)); }
    return all;
}

}  // namespace detail
}  // namespace tutti::checkpoint
