// ring_share: which tokens each member of a ring holds, what one rank has of a placement, and whether a placement is one.
// Needs sequence/placement.
#pragma once

#include <algorithm>  // max, sort
#include <array>      // stretches
#include <cstddef>    // size_t
#include <cstdint>    // positions, hashes
#include <span>       // stretches
#include <vector>     // rings

#include <tutti/core/error.hpp>           // usage_error
#include <tutti/core/state.hpp>           // hash_word
#include <tutti/core/text.hpp>            // formatted
#include <tutti/sequence/placement.hpp>   // placement
#include <tutti/sequence/token_view.hpp>  // rows

namespace tutti::sequence::detail {

/// First token of chunk c of 2 * members: floor(c * length / (2 * members)), without the product.
[[nodiscard]] constexpr std::int64_t chunk_begin(std::int64_t length, std::size_t members, std::size_t c) noexcept {
    const auto chunks = static_cast<std::int64_t>(2 * members);
    const auto i = static_cast<std::int64_t>(c);
    return i * (length / chunks) + i * (length % chunks) / chunks;
}

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
            const std::int64_t begin = chunk_begin(length, members, c);
            const std::int64_t end = chunk_begin(length, members, c + 1);
            if (begin == end) { continue; }
            if (count_ == 1 && stretches_[0].end == begin) {
                stretches_[0].end = end;
            } else {
                stretches_[count_++] = {begin, end, tokens_};
            }
            tokens_ += static_cast<std::size_t>(end - begin);
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
        return static_cast<std::size_t>(chunk_begin(length, members(), member + 1) -
                                        chunk_begin(length, members(), member));
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

[[nodiscard]] inline std::uint64_t hash_of(const placement& p, std::uint64_t h) {
    const auto add = [&h](auto number) { h = tutti::detail::hash_word(h, static_cast<std::uint64_t>(number)); };
    add(p.machines.nodes);
    add(p.machines.ranks_per_node);
    add(p.lengths.size());
    for (const std::int64_t length : p.lengths) { add(length); }
    add(p.rings.size());
    for (const ring& r : p.rings) {
        add(r.sequence);
        add(r.where);
        add(r.ranks.size());
        for (const int rank : r.ranks) { add(rank); }
    }
    add(p.pieces.size());
    for (const auto& of_rank : p.pieces) {
        add(of_rank.size());
        for (const piece& part : of_rank) {
            add(part.sequence);
            add(part.begin);
            add(part.end);
        }
    }
    return h;
}

// The pieces that hold tokens.
[[nodiscard]] inline std::vector<piece> filled(const std::vector<piece>& all) {
    std::vector<piece> kept;
    for (const piece& p : all) {
        if (p.begin != p.end) { kept.push_back(p); }
    }
    return kept;
}

inline void expect_valid(const ring& r, const placement& p, int ranks) {
    if (r.sequence < 0 || static_cast<std::size_t>(r.sequence) >= p.lengths.size()) {
        throw usage_error(formatted("placement: a ring of sequence {}, there are {}", r.sequence, p.lengths.size()));
    }
    if (r.ranks.empty()) { throw usage_error(formatted("placement: the ring of sequence {} is empty", r.sequence)); }
    std::vector<int> sorted = r.ranks;
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t i = 0; i < sorted.size(); ++i) {
        if (sorted[i] < 0 || sorted[i] >= ranks) {
            throw usage_error(formatted("placement: the ring of sequence {} has rank {}, there are {}", r.sequence,
                                        sorted[i], ranks));
        }
        if (i > 0 && sorted[i - 1] == sorted[i]) {
            throw usage_error(formatted("placement: the ring of sequence {} has rank {} twice", r.sequence, sorted[i]));
        }
    }
    const int node = sorted.front() / p.machines.ranks_per_node;
    const bool one_node = node == sorted.back() / p.machines.ranks_per_node;
    const zone reach = sorted.size() == 1 ? zone::local : one_node ? zone::node : zone::world;
    if (r.where < reach || r.where > zone::world) {
        throw usage_error(formatted("placement: the ring of sequence {} reaches beyond the zone it is in", r.sequence));
    }
}

/// Is this a placement on `ranks` ranks, every token once and in one order of rings on all ranks? The same on every
/// rank. Without that order two ranks could wait for each other in different rings.
inline void expect_valid(const placement& p, int ranks) {
    const cluster m = p.machines;
    if (m.nodes < 1 || m.ranks_per_node < 1 || ranks % m.ranks_per_node != 0 || ranks / m.ranks_per_node != m.nodes) {
        throw usage_error(formatted("placement: {} nodes of {} ranks, the communicator has {} ranks", m.nodes,
                                    m.ranks_per_node, ranks));
    }
    if (p.pieces.size() != static_cast<std::size_t>(ranks)) {
        throw usage_error(formatted("placement: pieces of {} ranks, there are {}", p.pieces.size(), ranks));
    }
    for (std::size_t s = 0; s < p.lengths.size(); ++s) {
        if (p.lengths[s] < 0) { throw usage_error(formatted("placement: sequence {} has {} tokens", s, p.lengths[s])); }
    }
    std::vector<bool> placed(p.lengths.size());
    std::vector<std::vector<piece>> expected(p.pieces.size());
    for (std::size_t i = 0; i < p.rings.size(); ++i) {
        const ring& r = p.rings[i];
        expect_valid(r, p, ranks);
        const auto sequence = static_cast<std::size_t>(r.sequence);
        if (placed[sequence]) { throw usage_error(formatted("placement: sequence {} has two rings", sequence)); }
        placed[sequence] = true;
        if (i > 0) {
            const ring& last = p.rings[i - 1];
            if (last.where < r.where || (last.where == r.where && last.sequence > r.sequence)) {
                throw usage_error(formatted("placement: the ring of sequence {} is behind that of sequence {}",
                                            r.sequence, last.sequence));
            }
        }
        for (std::size_t place = 0; place < r.ranks.size(); ++place) {
            auto& of_rank = expected[static_cast<std::size_t>(r.ranks[place])];
            for (const std::size_t c : {place, 2 * r.ranks.size() - 1 - place}) {
                of_rank.push_back({r.sequence, chunk_begin(p.lengths[sequence], r.ranks.size(), c),
                                   chunk_begin(p.lengths[sequence], r.ranks.size(), c + 1)});
            }
        }
    }
    for (std::size_t s = 0; s < placed.size(); ++s) {
        if (!placed[s] && p.lengths[s] != 0) { throw usage_error(formatted("placement: sequence {} has no ring", s)); }
    }
    for (std::size_t rank = 0; rank < expected.size(); ++rank) {
        if (filled(p.pieces[rank]) != filled(expected[rank])) {
            throw usage_error(
                formatted("placement: rank {} does not hold the chunks of its rings, in their order", rank));
        }
    }
}

}  // namespace tutti::sequence::detail
