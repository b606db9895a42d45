// rank_shares: what one rank has of a placement, which of its rows see which keys of others, and in what order it works.
// Needs sequence/detail/ring_share and sequence/block_attention. Pure host arithmetic on indices.
#pragma once

#include <algorithm>  // clamp, max
#include <cstddef>    // size_t
#include <span>       // lengths
#include <utility>    // move
#include <vector>     // shares

#include <tutti/sequence/block_attention.hpp>    // mask, visibility
#include <tutti/sequence/detail/ring_share.hpp>  // ring_share
#include <tutti/sequence/token_view.hpp>         // rows

namespace tutti::sequence::detail {

class rank_shares {
protected:
    rank_shares(mask rule, std::size_t kv_heads) noexcept : rule_(rule), kv_heads_(kv_heads) {}
    rank_shares(rank_shares&&) = default;
    rank_shares& operator=(rank_shares&&) = delete;
    ~rank_shares() = default;

    /// These from now on. Rings of one rank are behind the others.
    void take(std::vector<ring_share> shares) {
        shares_ = std::move(shares);
        own_tokens_.clear();
        tokens_ = 0;
        shared_ = 0;
        own_rounds_ = 1;
        first_alone_ = 0;
        for (const ring_share& s : shares_) {
            own_tokens_.push_back(s.mine.tokens());
            tokens_ += own_tokens_.back();
            own_rounds_ = std::max(own_rounds_, s.members());
            if (s.members() == 1) { continue; }
            shared_ = tokens_;
            ++first_alone_;
        }
        halve_own();
        spread_alone();
    }

    /// Which of this rank's rows of a sequence see keys of a member, and which keys: its first ones.
    struct block_pair {
        std::size_t first_query, queries, keys;
        visibility seen;
    };
    // Rows are in the order of positions. So of a rank's own keys a row sees those up to itself. The early chunk of a
    // member with a lower place is before all rows, its late chunk behind them; a member with a higher place is between
    // the early rows and the late.
    [[nodiscard]] block_pair pair_of(const ring_share& s, std::size_t member) const noexcept {
        const std::size_t mine = s.mine.tokens();
        if (rule_ == mask::full) { return {0, mine, s.of(member).tokens(), {}}; }
        if (member == s.place) { return {0, mine, mine, {mask::causal, 0, 0}}; }
        if (member < s.place) { return {0, mine, s.early(member), {}}; }
        const std::size_t early = s.early(s.place);
        return {early, mine - early, s.of(member).tokens(), {}};
    }
    /// each(first, count): of a pair's queries those of this rank's early chunk, then those of the late one.
    template <class Each> static void for_each_chunk(const ring_share& s, const block_pair& b, Each each) {
        const std::size_t split = std::clamp(s.early(s.place), b.first_query, b.first_query + b.queries);
        if (split != b.first_query) { each(std::size_t{0}, split - b.first_query); }
        if (split != b.first_query + b.queries) { each(split - b.first_query, b.first_query + b.queries - split); }
    }
    /// Of steps [from, to) those with a result for query i of a pair. Early rows get theirs in the first steps, together
    /// with the late ones: before a step as many as these, if they have a part in it.
    [[nodiscard]] std::size_t results(const ring_share& s, const block_pair& b, std::size_t i, std::size_t from,
                                      std::size_t to) const {
        const std::size_t row = b.first_query + i;
        std::size_t count = 0;
        for (std::size_t t = from; t < to; ++t) {
            const block_pair other = pair_of(s, s.before(t));
            count += other.keys != 0 && other.first_query <= row && row < other.first_query + other.queries ? 1 : 0;
        }
        return count;
    }
    /// Queries of the largest pair with keys of another member.
    [[nodiscard]] std::size_t most_queries() const {
        std::size_t most = 0;
        for (const ring_share& s : shares_) {
            for (const std::size_t other : {s.before(1), s.before(s.members() - 1)}) {
                if (other != s.place) { most = std::max(most, pair_of(s, other).queries); }
            }
        }
        return most;
    }

    /// Rows of shares that lie one behind the other.
    struct stretch_of_shares {
        std::size_t first_row = 0, tokens = 0;
        std::span<const std::size_t> lengths;
        template <class U, memory M> [[nodiscard]] token_view<U, M> of(const token_view<U, M>& all) const noexcept {
            return all.rows(first_row, tokens);
        }
    };
    [[nodiscard]] stretch_of_shares stretch_of(std::size_t first, std::size_t count) const noexcept {
        stretch_of_shares r;
        if (count == 0) { return r; }
        r.first_row = shares_[first].first_row;
        r.lengths = std::span<const std::size_t>(own_tokens_).subspan(first, count);
        for (const std::size_t n : r.lengths) { r.tokens += n; }
        return r;
    }
    /// Shares that no other rank has a part of and that are done behind round t of forward: [first_alone_, this).
    [[nodiscard]] std::size_t alone_until(std::size_t t) const noexcept {
        return t < own_rounds_ ? alone_until_[t] : shares_.size();
    }

    mask rule_;
    std::vector<ring_share> shares_;
    std::size_t tokens_ = 0;
    std::size_t shared_ = 0;                // rows of sequences that other ranks have parts of: the first ones
    std::size_t first_alone_ = 0;           // share: it and those behind it are this rank's alone
    std::size_t own_rounds_ = 1;            // members of this rank's largest ring
    std::vector<std::size_t> early_heads_;  // by share: kv heads whose own keys come before those of others in backward

private:
    std::size_t kv_heads_;
    std::vector<std::size_t> own_tokens_;   // by share
    std::vector<std::size_t> alone_until_;  // by round

    // Of what backward has to do with own keys the first half of the cost comes before those of others.
    void halve_own() {
        const auto cost_of = [](const ring_share& s) {
            const auto tokens = static_cast<double>(s.mine.tokens());
            return s.members() > 1 ? tokens * tokens : 0;
        };
        double rest = 0;
        for (const auto& s : shares_) { rest += cost_of(s) / 2; }
        early_heads_.clear();
        for (const auto& s : shares_) {
            const double cost = cost_of(s);
            const auto heads = static_cast<double>(kv_heads_);
            early_heads_.push_back(rest >= cost ? kv_heads_ : static_cast<std::size_t>(heads * rest / cost + 0.5));
            rest = std::max(0.0, rest - cost);
        }
    }
    // By their cost, which is quadratic: round t of forward ends behind a share of (t + 1) / rounds.
    void spread_alone() {
        const auto cost_of = [&](std::size_t i) {
            const auto s = static_cast<double>(shares_[i].length);
            return s * s;
        };
        double total = 0;
        for (std::size_t i = first_alone_; i < shares_.size(); ++i) { total += cost_of(i); }
        alone_until_.assign(own_rounds_, shares_.size());
        double done = 0;
        std::size_t next = first_alone_;
        for (std::size_t t = 0; t + 1 < own_rounds_; ++t) {
            const double until = total * static_cast<double>(t + 1) / static_cast<double>(own_rounds_);
            while (next < shares_.size() && done < until) { done += cost_of(next++); }
            alone_until_[t] = next;
        }
    }
};

}  // namespace tutti::sequence::detail
