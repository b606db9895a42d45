// intent: what one rank is about to do, as four words for the others, and who of several ranks differs in what.
// Needs comm/decorator and core/philox. Used by checked.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // words
#include <span>         // tables
#include <string>       // texts
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // values by rank

#include <tutti/comm/call.hpp>             // call, control_record
#include <tutti/comm/decorator.hpp>        // operation
#include <tutti/comm/detail/majority.hpp>  // whose value counts
#include <tutti/core/philox.hpp>           // hash of one count between a pair of ranks
#include <tutti/core/state.hpp>            // hash_bytes
#include <tutti/core/text.hpp>             // formatted

namespace tutti::comm::detail {

/// What differs, and whose value is not the majority's.
struct finding {
    std::string text;
    std::vector<int> ranks;
};

/// `count differs (rank 0: 1024, rank 3: 1023)` when values by rank are not all equal. The reference is the value of
/// most ranks, and of several such the one that the lowest rank holds; ranks beyond the eighth are counted, not listed.
template <class Text>
[[nodiscard]] bool differ(const std::vector<std::uint64_t>& values, std::string_view what, Text text, finding& found) {
    const std::size_t reference =
        majority(values.size(), [&](std::size_t a, std::size_t b) { return values[a] == values[b]; });
    constexpr std::size_t listed = 8;
    std::vector<int> ranks;
    std::string list;
    for (std::size_t r = 0; r < values.size(); ++r) {
        if (values[r] == values[reference]) { continue; }
        ranks.push_back(static_cast<int>(r));
        if (ranks.size() <= listed) { list += formatted(", rank {}: {}", r, text(r)); }
    }
    if (ranks.empty()) { return false; }
    found.ranks = std::move(ranks);
    found.text = formatted("{} differs (rank {}: {}{}", what, reference, text(reference), list);
    if (found.ranks.size() > listed) { found.text += formatted(" and {} more", found.ranks.size() - listed); }
    found.text += ")";
    return true;
}

template <class T> [[nodiscard]] std::uint64_t hash_of(std::span<const T> table) noexcept {
    return hash_bytes(as_bytes(view(table.data(), table.size())));
}
/// "from sends `count` to to". Sums of it must not cancel when counts are swapped, so it has to mix well.
[[nodiscard]] inline std::uint64_t hash_of_pair(std::size_t from, std::size_t to, std::size_t count) noexcept {
    const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    const std::uint64_t n = count;
    const auto words = philox({low(from), low(to), low(n), low(n >> 32)}, {0, 0});
    return std::uint64_t{words[0]} << 32 | words[1];
}

/// A call as other ranks see it. Tables stay at home; their hashes travel.
struct intent {
    operation what = collective::barrier;
    std::uint64_t sequence = 0;
    int root = -1;
    dtype type = dtype::byte;
    std::uint64_t element_size = 0;
    op_kind op = op_kind::none;
    std::uint64_t first = 0;   ///< count; hash of a child's name; all_to_all_v: sum over hashes of what is sent
    std::uint64_t second = 0;  ///< hash of the table; all_to_all_v: sum over hashes of what is expected

    /// All ranks expect what is sent, and agree in everything else.
    [[nodiscard]] static bool agree(const std::vector<control_record>& all) noexcept {
        const bool pairs = intent(all[0]).what == operation(collective::all_to_all_v);
        bool same = true;
        std::uint64_t balance = 0;
        for (const control_record& r : all) {
            same =
                same && r[0] == all[0][0] && r[1] == all[0][1] && (pairs || (r[2] == all[0][2] && r[3] == all[0][3]));
            balance += r[2] - r[3];
        }
        return same && (!pairs || balance == 0);
    }

    intent(operation o, std::uint64_t number) noexcept : what(o), sequence(number) {}

    intent(const call& c, int rank) noexcept
        : what(c.kind)
        , sequence(c.sequence)
        , root(c.root)
        , type(c.type)
        , element_size(c.element_size)
        , op(c.op)
        , first(c.count()) {
        switch (c.kind) {
        case collective::gather: first = c.in_count; break;  // the root's other view is larger
        case collective::scatter: first = c.out_count; break;
        case collective::all_gather_v:
        case collective::reduce_scatter_v: second = hash_of(c.send_counts); break;
        case collective::all_to_all_v: {
            // Every count is hashed by both of its ends. All agree when the sums over all ranks are equal, so that two
            // words a rank are enough for n * n counts.
            const auto me = static_cast<std::size_t>(rank);
            first = 0;
            for (std::size_t p = 0; p < c.send_counts.size(); ++p) {
                first += hash_of_pair(me, p, c.send_counts[p]);
                second += hash_of_pair(p, me, c.recv_counts[p]);
            }
            break;
        }
        default: break;
        }
    }

    // Word 0: operation, type, operator, a tag that foreign records lack, root. Word 1: number and element size
    // (elements beyond 16 MiB compare by their low bits).
    explicit intent(const control_record& r) noexcept {
        const auto byte = [&](int at) { return static_cast<std::uint8_t>(r[0] >> at); };
        if (byte(24) != tag) {  // that rank is not in a checked call at all
            what = operation::of(0xff);
            return;
        }
        what = operation::of(byte(0));
        sequence = r[1] >> size_bits;
        root = static_cast<int>(static_cast<std::uint32_t>(r[0] >> 32));
        type = static_cast<dtype>(byte(8));
        element_size = r[1] & size_mask;
        op = static_cast<op_kind>(byte(16));
        first = r[2];
        second = r[3];
    }
    [[nodiscard]] control_record record() const noexcept {
        const auto byte = [](auto x, int at) { return std::uint64_t{static_cast<std::uint8_t>(x)} << at; };
        return {byte(what.code(), 0) | byte(type, 8) | byte(op, 16) | tag << 24 |
                    std::uint64_t{static_cast<std::uint32_t>(root)} << 32,
                sequence << size_bits | (element_size & size_mask), first, second};
    }

private:
    static constexpr int size_bits = 24;
    static constexpr std::uint64_t size_mask = (std::uint64_t{1} << size_bits) - 1;
    static constexpr std::uint64_t tag = 0xc5;
};

/// The first plain field in which `all` differ. Counts, names and tables come after these.
[[nodiscard]] inline bool differ_in_fields(const std::vector<intent>& all, finding& found) {
    const auto differs = [&](std::string_view name, auto field, auto text) {
        std::vector<std::uint64_t> values;
        for (const intent& i : all) { values.push_back(static_cast<std::uint64_t>(field(i))); }
        return differ(
            values, name, [&](std::size_t r) { return text(field(all[r])); }, found);
    };
    const auto number = [](auto x) { return formatted("{}", x); };
    const auto name = [](auto x) { return name_of(x); };
    const auto operation_name = [](std::uint8_t code) { return name_of(operation::of(code)); };
    // clang-format off
    return differs("collective", [](const intent& i) { return i.what.code(); }, operation_name) ||
           differs("number of the call", [](const intent& i) { return i.sequence; }, number) ||
           differs("root", [](const intent& i) { return i.root; }, number) ||
           differs("type", [](const intent& i) { return i.type; }, name) ||
           differs("element size", [](const intent& i) { return i.element_size; }, number) ||
           differs("operator", [](const intent& i) { return i.op; }, name);
    // clang-format on
}

}  // namespace tutti::comm::detail
