// posted: what one rank shows the others of its call, and what is said when ranks disagree.
// Needs comm/call. Used by backends whose ranks see each other's postings.
#pragma once

#include <algorithm>    // max_element
#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <optional>     // what differs
#include <string>       // texts
#include <string_view>  // texts
#include <utility>      // pair
#include <vector>       // heads

#include <tutti/comm/call.hpp>             // call
#include <tutti/comm/detail/majority.hpp>  // whose value counts
#include <tutti/core/state.hpp>            // hash_bytes
#include <tutti/core/text.hpp>             // formatted

namespace tutti::comm::detail {

/// `agreed` is what must be equal on all ranks besides the plain fields: a count, or a hash of the counts table. What
/// ranks compare comes first; the addresses are for calls that reach into each other's memory.
struct posted {
    std::uint64_t agreed = 0;
    std::uint32_t element_size = 0;
    std::int32_t root = -1;
    collective kind = collective::barrier;
    dtype type = dtype::byte;
    op_kind op = op_kind::none;
    const void* in = nullptr;
    void* out = nullptr;
    const std::size_t* send_counts = nullptr;
    const std::size_t* recv_counts = nullptr;

    [[nodiscard]] bool agrees_with(const posted& other) const noexcept {
        return agreed == other.agreed && element_size == other.element_size && root == other.root &&
               kind == other.kind && type == other.type && op == other.op;
    }
};
static_assert(sizeof(posted) <= 56, "a posting and the word of an arrival are one cache line");

/// The number that must be the same on all ranks.
[[nodiscard]] inline std::uint64_t agreed_of(const call& c) noexcept {
    switch (c.kind) {
    case collective::all_reduce:
    case collective::reduce:
    case collective::all_gather:
    case collective::gather:
    case collective::all_to_all: return c.in_count;
    case collective::reduce_scatter:
    case collective::scatter:
    case collective::broadcast: return c.out_count;
    case collective::reduce_scatter_v:
    case collective::all_gather_v: return hash_bytes(as_bytes(view(c.send_counts.data(), c.send_counts.size())));
    case collective::all_to_all_v:  // each rank has tables of its own, compared pair by pair
    case collective::exchange:
    case collective::barrier: return 0;
    }
    return 0;
}

[[nodiscard]] inline posted post(const call& c) noexcept {
    posted h;
    h.in = c.in;
    h.out = c.out;
    h.agreed = agreed_of(c);
    h.send_counts = c.send_counts.data();
    h.recv_counts = c.recv_counts.data();
    h.element_size = static_cast<std::uint32_t>(c.element_size);
    h.root = c.root;
    h.kind = c.kind;
    h.type = c.type;
    h.op = c.op;
    return h;
}

/// The largest input of any rank in bytes, computed from what is the same on all of them.
[[nodiscard]] inline std::size_t input_bound(const call& c, std::size_t ranks) noexcept {
    switch (c.kind) {
    case collective::barrier: return 0;
    case collective::scatter: return ranks * c.out_bytes();
    case collective::broadcast: return c.out_bytes();
    case collective::all_gather_v:
        return *std::max_element(c.send_counts.begin(), c.send_counts.end()) * c.element_size;
    case collective::all_to_all_v: return static_cast<std::size_t>(-1);  // known to no rank alone
    default: return c.in_bytes();
    }
}

/// Throws the mismatch_error for postings that differ. The reference is the posting most ranks share, of several the
/// one of the lowest rank.
[[noreturn]] inline void explain_mismatch(const std::vector<const posted*>& heads, error_context context) {
    const std::size_t reference =
        majority(heads.size(), [&](std::size_t a, std::size_t b) { return heads[a]->agrees_with(*heads[b]); });
    using named = std::pair<std::string_view, std::string>;
    const auto difference = [](const posted& h, const posted& other) -> named {
        if (h.kind != other.kind) { return {"collective", std::string(name_of(h.kind))}; }
        if (h.type != other.type) { return {"type", std::string(name_of(h.type))}; }
        if (h.element_size != other.element_size) { return {"element size", std::to_string(h.element_size)}; }
        if (h.op != other.op) { return {"operator", std::string(name_of(h.op))}; }
        if (h.root != other.root) { return {"root", std::to_string(h.root)}; }
        const bool table = h.kind == collective::all_gather_v || h.kind == collective::reduce_scatter_v;
        return table ? named{"counts table", formatted("{:x}", h.agreed)} : named{"count", std::to_string(h.agreed)};
    };
    std::string what;
    std::string list;
    std::vector<int> differing;
    for (std::size_t p = 0; p < heads.size(); ++p) {
        if (heads[p]->agrees_with(*heads[reference])) { continue; }
        if (differing.empty()) {
            const auto [name, value] = difference(*heads[reference], *heads[p]);
            what = name;
            list = formatted("rank {}: {}", reference, value);
        }
        list += formatted(", rank {}: {}", p, difference(*heads[p], *heads[reference]).second);
        differing.push_back(static_cast<int>(p));
    }
    throw mismatch_error(
        formatted("{}: {} differs ({}){}", name_of(heads[reference]->kind), what, list, where(context)), differing,
        context);
}

/// all_to_all_v: what every rank sends must be what the other one expects. Reads the tables, which are the callers'.
[[nodiscard]] inline std::optional<mismatch_error> compare_tables(const std::vector<const posted*>& heads,
                                                                  const error_context& context) {
    for (std::size_t p = 0; p < heads.size(); ++p) {
        for (std::size_t q = 0; q < heads.size(); ++q) {
            const std::size_t sent = heads[p]->send_counts[q];
            const std::size_t expected = heads[q]->recv_counts[p];
            if (sent == expected) { continue; }
            return mismatch_error(
                formatted("all_to_all_v: count differs (rank {} sends {} to rank {}, which expects {}){}", p, sent, q,
                          expected, where(context)),
                {static_cast<int>(p)}, context);
        }
    }
    return std::nullopt;
}

}  // namespace tutti::comm::detail
