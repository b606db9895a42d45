// checked: before anything moves, ranks show each other what they are about to do, and who differs is named.
// Needs comm/decorator and comm/fingerprint.
#pragma once

#include <algorithm>    // count, find
#include <array>        // fields of a record
#include <cstddef>      // size_t
#include <cstdint>      // records
#include <cstring>      // names as words
#include <span>         // tables
#include <string>       // texts
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // values by rank

#include <fmt/format.h>  // texts

#include <tutti/comm/decorator.hpp>    // decorator
#include <tutti/comm/fingerprint.hpp>  // tables become words
#include <tutti/core/error.hpp>        // mismatch_error

namespace tutti::comm {

/// A communicator on which ranks that disagree get an error instead of a hang or wrong numbers.
///
/// Semantics  ahead of every collective, duplicate, split and gather_control all ranks compare: the operation, its number,
///            root, data type, element size, reduction operator and count; the counts of the _v forms, the color table of
///            split, the names of children. all_to_all_v: what r sends to s is what s expects from r. When anything
///            differs every rank throws the same finding and the family is aborted; no data has moved.
///            exchange is not compared: only the ranks it names take part.
/// Cost       one control gather a call, which also makes a device queue wait for the host: a tool for debugging and for
///            tests. A disagreement about a table costs up to n/2 further gathers to name the entry.
/// Errors     mismatch_error, whose ranks() differ from the majority (of equal parties, the one with the lowest rank):
///            `all_reduce: count differs (rank 0: 1024, rank 3: 1023), call 17 on 'dp', rank 0`.
template <decoratable C>
class checked : public decorator<checked<C>, C> {
    using base = decorator<checked<C>, C>;
    friend base;

public:
    explicit checked(C inner) : base(std::move(inner)) {}

    void execute(const call& c) {
        if (c.kind != collective::exchange) {
            switch (c.kind) {
                case collective::all_to_all_v: compare(record_of(c), c.sequence, pairs_of(c)); break;
                case collective::all_gather_v:
                case collective::reduce_scatter_v:
                    compare(record_of(c), c.sequence, {"counts", {c.send_counts.begin(), c.send_counts.end()}});
                    break;
                default: compare(record_of(c), c.sequence, {}); break;
            }
        }
        this->inner().execute(c);
    }

private:
    using words = std::vector<std::uint64_t>;

    // What stands behind a hash; gathered only once the hashes differ.
    struct table {
        std::string_view name;
        words entries;
    };
    // The four words of a control record, unpacked.
    struct record {
        operation what = collective::barrier;
        std::uint64_t sequence = 0;
        int root = -1;
        dtype type = dtype::byte;
        std::uint64_t element_size = 0;
        op_kind op = op_kind::none;
        std::uint64_t count = 0;  // all_to_all_v: hash of what is sent
        std::uint64_t hash = 0;   // of the table; all_to_all_v: hash of what is expected

        [[nodiscard]] control_record pack() const noexcept {
            return {std::uint64_t{what.code()} | std::uint64_t{static_cast<std::uint8_t>(type)} << 8 |
                        std::uint64_t{static_cast<std::uint8_t>(op)} << 16 | std::uint64_t{static_cast<std::uint32_t>(root)} << 32,
                    sequence << size_bits | (element_size & ((std::uint64_t{1} << size_bits) - 1)), count, hash};
        }
        [[nodiscard]] static record unpack(const control_record& r) noexcept {
            return {operation::of(static_cast<std::uint8_t>(r[0])), r[1] >> size_bits, static_cast<int>(static_cast<std::uint32_t>(r[0] >> 32)),
                    static_cast<dtype>(static_cast<std::uint8_t>(r[0] >> 8)), r[1] & ((std::uint64_t{1} << size_bits) - 1),
                    static_cast<op_kind>(static_cast<std::uint8_t>(r[0] >> 16)), r[2], r[3]};
        }
        static constexpr int size_bits = 24;  // leaves the call's number 40; elements beyond 16 MiB compare by their low bits
    };
    using records = std::vector<record>;

    void before(const typename base::control_call& k) {
        record r;
        r.what = k.kind;
        r.sequence = k.sequence;
        r.hash = fingerprint().add(k.name).add(k.colors).value();
        if (k.kind == control::split) {
        }
        compare(r, k.sequence, {});
    }
    [[nodiscard]] checked wrap(C child, std::span<const int>) { return checked(std::move(child)); }
};

}  // namespace tutti::comm
