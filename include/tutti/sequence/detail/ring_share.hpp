// ring_share: which tokens each member of a ring holds, and what one rank has of a placement.
// Needs sequence/placement.
#pragma once

#include <algorithm>  // max
#include <array>      // stretches
#include <cstddef>    // size_t
#include <cstdint>    // positions
#include <span>       // stretches
#include <vector>     // rings

#include <tutti/core/memory.hpp>          // memory
#include <tutti/sequence/placement.hpp>   // placement
#include <tutti/sequence/token_view.hpp>  // rows

namespace tutti::sequence::detail {

/// Tokens [begin, end) of a sequence, from row `row` on of the rows that a member has of it.
struct stretch {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::size_t row = 0;
    [[nodiscard]] constexpr std::size_t size() const noexcept { return static_cast<std::size_t>(end - begin); }
};

/// The tokens of one member: its early and its late chunk, one stretch where they touch, none where they are empty.
class member_tokens {
    std::array<stretch, 2> stretches_{};
    std::size_t count_ = 0;
    std::size_t tokens_ = 0;

public:
    constexpr member_tokens() noexcept = default;
    constexpr member_tokens(std::int64_t length, std::size_t members, std::size_t place) noexcept {
        for (const std::size_t c : {place, 2 * members - 1 - place}) {
            const piece chunk = chunk_of(0, length, static_cast<int>(c), static_cast<int>(members));
            if (chunk.size() == 0) { continue; }
            if (count_ == 1 && stretches_[0].end == chunk.begin) {
                stretches_[0].end = chunk.end;
            } else {
                stretches_[count_++] = {chunk.begin, chunk.end, tokens_};
            }
            tokens_ += static_cast<std::size_t>(chunk.size());
        }
    }
    [[nodiscard]] constexpr std::span<const stretch> stretches() const& noexcept { return {stretches_.data(), count_}; }
    std::span<const stretch> stretches() const&& = delete;  // they are in here
    [[nodiscard]] constexpr std::size_t tokens() const noexcept { return tokens_; }
};

/// What one rank has to do with one ring that it is in.
struct ring_share {
    std::int64_t length = 0;
    std::vector<int> ranks;
    std::size_t place = 0;      ///< of this rank in the ring
    std::size_t first_row = 0;  ///< of this rank's rows of the sequence, among all its rows
    member_tokens mine;
    [[nodiscard]] std::size_t members() const noexcept { return ranks.size(); }
    [[nodiscard]] member_tokens of(std::size_t member) const noexcept {
        return member_tokens(length, members(), member);
    }
    /// The member `steps` places before this rank, whose keys arrive here in step `steps`.
    [[nodiscard]] std::size_t before(std::size_t steps) const noexcept {
        return (place + 2 * members() - steps % members()) % members();
    }
    [[nodiscard]] int next() const noexcept { return ranks[(place + 1) % members()]; }
    [[nodiscard]] int previous() const noexcept { return ranks[before(1)]; }
    /// This rank's rows of the sequence, of a tensor of all its rows.
    template <class U, memory M> [[nodiscard]] token_view<U, M> rows_of(const token_view<U, M>& all) const noexcept {
        return all.rows(first_row, mine.tokens());
    }
    /// Tokens of a member's early chunk: its first rows.
    [[nodiscard]] std::size_t early(std::size_t member) const noexcept {
        return static_cast<std::size_t>(
            chunk_of(0, length, static_cast<int>(member), static_cast<int>(members())).size());
    }
    /// Rows of the largest member.
    [[nodiscard]] std::size_t widest() const noexcept {
        std::size_t most = 0;
        for (std::size_t j = 0; j < members(); ++j) { most = std::max(most, of(j).tokens()); }
        return most;
    }
};

/// The rings of `rank`, in the order of the placement, which is that of its memory.
[[nodiscard]] inline std::vector<ring_share> shares_of(const placement& p, int rank) {
    std::vector<ring_share> all;
    std::size_t row = 0;
    for (const ring& r : p.rings) {
        for (std::size_t i = 0; i < r.ranks.size(); ++i) {
            if (r.ranks[i] != rank) { continue; }
            const std::int64_t length = p.lengths[static_cast<std::size_t>(r.sequence)];
            all.push_back({length, r.ranks, i, row, member_tokens(length, r.ranks.size(), i)});
            row += all.back().mine.tokens();
        }
    }
    return all;
}

}  // namespace tutti::sequence::detail
