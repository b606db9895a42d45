// call: one collective at the byte level, the seam between the typed front and backends, decorators and mocks.
// Needs core. Backends see bytes, a dtype and a reduce function; they never see element types.
#pragma once

#include <array>        // control records
#include <cstddef>      // size_t
#include <cstdint>      // sequence numbers
#include <span>         // counts, messages
#include <string>       // names
#include <string_view>  // names
#include <type_traits>  // remove_const_t

#include <tutti/core/element.hpp>    // dtype
#include <tutti/core/error.hpp>      // error_context
#include <tutti/core/reduce_op.hpp>  // reduce_function
#include <tutti/core/view.hpp>       // views in transfers

namespace tutti::comm {

enum class collective : std::uint8_t {
    all_reduce,
    reduce_scatter,
    reduce_scatter_v,
    all_gather,
    all_gather_v,
    broadcast,
    reduce,
    gather,
    scatter,
    all_to_all,
    all_to_all_v,
    exchange,
    barrier
};

[[nodiscard]] constexpr std::string_view name_of(collective k) noexcept {
    constexpr std::string_view names[] = {
        "all_reduce", "reduce_scatter", "reduce_scatter_v", "all_gather",   "all_gather_v", "broadcast", "reduce",
        "gather",     "scatter",        "all_to_all",       "all_to_all_v", "exchange",     "barrier"};
    return names[static_cast<std::size_t>(k)];
}

/// One message of a grouped point-to-point call.
struct message {
    bool sends = false;
    int peer = -1;
    void* data = nullptr;  ///< only read when `sends`
    std::size_t bytes = 0;
};

/// A validated collective. Sizes and aliasing have been checked on this rank; ranks may still disagree with each other.
///
/// Units  counts are elements of `element_size` bytes. `in_count`/`out_count` are the sizes of the views as the caller
///        gave them (all_gather: in_count is one rank's part, out_count all of it). A view that the kind does not use
///        on this rank is null and empty.
struct call {
    collective kind = collective::barrier;
    dtype type = dtype::byte;
    std::size_t element_size = 1;
    op_kind op = op_kind::none;
    reduce_function reduce = nullptr;
    const void* in = nullptr;
    std::size_t in_count = 0;
    void* out = nullptr;
    std::size_t out_count = 0;
    int root = -1;
    std::span<const std::size_t>
        send_counts;  ///< per rank; the _v forms. all_gather_v and reduce_scatter_v use it alone
    std::span<const std::size_t> recv_counts;  ///< per rank; all_to_all_v
    std::span<const message> messages;         ///< exchange
    std::uint64_t sequence = 0;                ///< n-th collective (or n-th exchange) on this communicator, from 1

    [[nodiscard]] std::size_t in_bytes() const noexcept { return in_count * element_size; }
    [[nodiscard]] std::size_t out_bytes() const noexcept { return out_count * element_size; }
    /// The larger view, which is what messages speak of. At the root of gather and scatter it is larger than elsewhere.
    [[nodiscard]] std::size_t count() const noexcept { return in_count > out_count ? in_count : out_count; }
};

/// What an error about `c` on communicator `name`, seen by `rank`, says.
[[nodiscard]] inline error_context context_of(const call& c, std::string_view name, int rank) {
    return {std::string(name_of(c.kind)), std::string(name), rank, c.sequence, c.count(), c.type, 0, {}};
}

/// A message to or from `peer`, typed by its memory; made by send_to and receive_from.
template <memory M> struct transfer { message bytes; };

/// One message of an exchange, of which the peer has the other end. `data` stays until the exchange is complete.
template <transportable T, memory M> [[nodiscard]] transfer<M> send_to(int peer, view<T, M> data) noexcept {
    // The seam carries one pointer type; `sends` keeps the promise not to write through it.
    return {{true, peer, const_cast<std::remove_const_t<T>*>(data.data()), data.size_bytes()}};
}
template <transportable T, memory M>
requires(!std::is_const_v<T>) [[nodiscard]] transfer<M> receive_from(int peer, view<T, M> data) noexcept {
    return {{false, peer, data.data(), data.size_bytes()}};
}

/// Four words that every rank shows to every other: hashes, fingerprints, colors.
using control_record = std::array<std::uint64_t, 4>;

}  // namespace tutti::comm
