// call_check: what a collective demands of its arguments; throws usage_error before anything moves.
// Needs comm/call and core/text.
#pragma once

#include <algorithm>    // sort
#include <cstddef>      // size_t
#include <functional>   // less: order of unrelated pointers
#include <numeric>      // accumulate
#include <span>         // counts
#include <string_view>  // names
#include <vector>       // messages

#include <tutti/comm/call.hpp>   // call
#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted
#include <tutti/core/view.hpp>   // overlaps

namespace tutti::comm::detail {

/// Elements before those of `rank`.
[[nodiscard]] inline std::size_t offset_of(std::span<const std::size_t> counts, std::size_t rank) {
    return std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(rank), std::size_t{0});
}

/// Demands on one call of rank `rank` of `ranks` in the communicator `name`.
class call_check {
    const call& c_;
    std::string_view name_;
    int rank_;
    int ranks_;

public:
    call_check(const call& c, std::string_view name, int rank, int ranks) noexcept
        : c_(c), name_(name), rank_(rank), ranks_(ranks) {}

    /// `text` makes the words, and is called only when they are needed.
    template <class Text> void expect(bool holds, Text text) const {
        if (holds) { return; }
        const error_context context = context_of(c_, name_, rank_);
        throw usage_error(formatted("{}: {}{}", name_of(c_.kind), text(), where(context)), context);
    }
    void member(std::string_view role, int rank) const {
        expect(rank >= 0 && rank < ranks_,
               [&] { return formatted("{} {} is not one of {} ranks", role, rank, ranks_); });
    }

    void in_as_large_as_out() const {
        expect(c_.in_count == c_.out_count,
               [&] { return formatted("in has {} elements, out {}", c_.in_count, c_.out_count); });
    }
    void in_has_a_part_for_each_rank() const { parts("in", c_.in_count, "out", c_.out_count); }
    void out_has_a_part_of_each_rank() const { parts("out", c_.out_count, "in", c_.in_count); }
    void equal_parts() const {
        expect(c_.in_count == c_.out_count && c_.in_count % static_cast<std::size_t>(ranks_) == 0, [&] {
            return formatted("in has {} elements, out {}; both must be the same multiple of {} ranks", c_.in_count,
                             c_.out_count, ranks_);
        });
    }
    /// One count a rank; together they cover the view `whole_name`, and this rank's covers the view `own_name`.
    void counts(std::span<const std::size_t> n, std::string_view whole_name, std::size_t whole,
                std::string_view own_name, std::size_t own) const {
        counts(n, whole_name, whole);
        const auto me = static_cast<std::size_t>(rank_);
        expect(n[me] == own,
               [&] { return formatted("counts[{}] is {}, {} has {} elements", me, n[me], own_name, own); });
    }
    void counts(std::span<const std::size_t> n, std::string_view whole_name, std::size_t whole) const {
        expect(n.size() == static_cast<std::size_t>(ranks_),
               [&] { return formatted("{} counts for {} ranks", n.size(), ranks_); });
        for (std::size_t r = 0; r < n.size(); ++r) {  // a negative number turned count must not cancel out in the sum
            expect(n[r] <= whole,
                   [&] { return formatted("counts[{}] is {}, {} has {} elements", r, n[r], whole_name, whole); });
        }
        const std::size_t total = offset_of(n, n.size());
        expect(total == whole,
               [&] { return formatted("counts add up to {}, {} has {} elements", total, whole_name, whole); });
    }

    /// Where views overlap, element `out_at_in` of in is element `in_at_out` of out.
    void in_place_at(std::size_t in_at_out, std::size_t out_at_in) const {
        if (!overlaps(c_.in, c_.in_bytes(), c_.out, c_.out_bytes())) { return; }
        const auto* const in = static_cast<const std::byte*>(c_.in);
        const auto* const out = static_cast<const std::byte*>(c_.out);
        expect(in + out_at_in * c_.element_size == out + in_at_out * c_.element_size,
               [] { return "in and out overlap, but not as the in-place form asks"; });
    }
    void apart() const {
        expect(!overlaps(c_.in, c_.in_bytes(), c_.out, c_.out_bytes()),
               [] { return "in and out overlap; this collective has no in-place form"; });
    }
    /// No received byte is touched by another message of the group.
    void disjoint(std::span<const message> messages) const {
        std::vector<message> sorted(messages.begin(), messages.end());
        std::erase_if(sorted, [](const message& m) { return m.data == nullptr || m.bytes == 0; });
        std::sort(sorted.begin(), sorted.end(),
                  [](const message& a, const message& b) { return std::less<>{}(a.data, b.data); });
        const std::byte* written_to = nullptr;  // end of the furthest receive, and of the furthest message of any kind
        const std::byte* touched_to = nullptr;
        for (const message& m : sorted) {
            const auto* const begin = static_cast<const std::byte*>(m.data);
            const std::byte* const limit = m.sends ? written_to : touched_to;
            expect(limit == nullptr || !std::less<>{}(begin, limit),
                   [&] { return formatted("a message with rank {} overlaps one that is received", m.peer); });
            const std::byte* const end = begin + m.bytes;
            if (touched_to == nullptr || std::less<>{}(touched_to, end)) { touched_to = end; }
            if (!m.sends && (written_to == nullptr || std::less<>{}(written_to, end))) { written_to = end; }
        }
    }

private:
    void parts(std::string_view whole_name, std::size_t whole, std::string_view part_name, std::size_t part) const {
        const auto n = static_cast<std::size_t>(ranks_);
        expect(whole == n * part, [&] {
            return formatted("{} has {} elements, {} ranks times {} are {}", whole_name, whole, n, part_name, n * part);
        });
    }
};

}  // namespace tutti::comm::detail
