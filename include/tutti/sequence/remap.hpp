// remap: moves tokens from the layout that suits attention to one with as many tokens on every rank, and back.
// Needs sequence/token_moves and a communicator with exchange. The remapping layer of Zeppelin (Chen et al., EuroSys
// 2026): attention wants equal pairs of tokens, everything else wants equal tokens.
#pragma once

#include <algorithm>    // min
#include <cstddef>      // size_t
#include <cstdint>      // tokens
#include <limits>       // overflow
#include <span>         // rows
#include <string_view>  // which view
#include <type_traits>  // element type from the output alone
#include <utility>      // pair, move
#include <vector>       // layouts

#include <tutti/comm/call.hpp>             // transfer
#include <tutti/comm/communicator.hpp>     // can_exchange
#include <tutti/core/element.hpp>          // transportable
#include <tutti/core/error.hpp>            // usage_error
#include <tutti/core/memory.hpp>           // memory
#include <tutti/core/text.hpp>             // formatted
#include <tutti/core/view.hpp>             // views
#include <tutti/sequence/placement.hpp>    // placement
#include <tutti/sequence/token_moves.hpp>  // moves_inside_first

namespace tutti::sequence {

/// One thing that every token has: a hidden state, a position, a loss weight. Made by rows_of.
template <memory M> struct token_rows {
    view<const std::byte, M> in;
    view<std::byte, M> out;
    std::size_t bytes_per_token = 0;
};

/// Rows of `width` elements a token, in the order of tokens. In place when both views begin at the same element.
/// Errors  usage_error when the width is 0 or the bytes of a row overflow.
template <transportable T, memory M>
requires(!std::is_const_v<T>) [[nodiscard]] token_rows<M> rows_of(view<const std::type_identity_t<T>, M> in,
                                                                  view<T, M> out, std::size_t width = 1) {
    if (width == 0 || width > std::numeric_limits<std::size_t>::max() / sizeof(T)) {
        throw usage_error(formatted("remap: rows of {} elements of {} bytes", width, sizeof(T)));
    }
    return {as_bytes(in), as_bytes(out), width * sizeof(T)};
}

namespace detail {

/// The pieces cut behind their first `tokens` tokens.
[[nodiscard]] inline std::pair<std::vector<piece>, std::vector<piece>> cut(std::span<const piece> pieces,
                                                                           std::int64_t tokens) {
    std::pair<std::vector<piece>, std::vector<piece>> parts;
    for (const piece& p : pieces) {
        const std::int64_t middle = p.begin + std::min(tokens, p.end - p.begin);
        if (middle > p.begin) { parts.first.push_back({p.sequence, p.begin, middle}); }
        if (p.end > middle) { parts.second.push_back({p.sequence, middle, p.end}); }
        tokens -= middle - p.begin;
    }
    return parts;
}

[[nodiscard]] inline std::vector<std::int64_t> tokens_of(const placement& p) {
    std::vector<std::int64_t> tokens;
    for (std::size_t r = 0; r < p.pieces.size(); ++r) {
        std::int64_t sum = 0;
        for (const piece& each : p.pieces[r]) {
            if (each.begin < 0 || each.end < each.begin ||
                each.end - each.begin > std::numeric_limits<std::int64_t>::max() - sum) {
                throw usage_error(formatted("remap: rank {} holds tokens {} to {} of sequence {}", r, each.begin,
                                            each.end, each.sequence));
            }
            sum += each.end - each.begin;
        }
        tokens.push_back(sum);
    }
    return tokens;
}

}  // namespace detail

/// A permutation of tokens over ranks, known to every rank from the placement alone.
///
/// Semantics    the last tokens of a rank that has too many leave, to ranks in ascending order; what arrives stands
///              behind what was there, by source rank and then in the source's order. So both are contiguous, nothing is
///              packed, and the inverse has the same messages the other way round. A rank gives or takes, never both.
///   forward    attention layout -> balanced layout; all ranks call it, with the same kinds of rows in the same order.
///   inverse    balanced -> attention. forward then inverse, and inverse then forward, give back the same bits. A
///              permutation's transpose is its inverse: the gradient of forward is inverse of the gradient, and the
///              gradient of inverse is forward of it.
/// Shapes       `in` has the rows of tokens(rank) tokens and `out` of balanced(rank); for inverse the other way round.
/// Aliasing     `in` and `out` begin at the same element: in place, what stays is not touched. Else no two views of a
///              call overlap.
/// Determinism  data is moved, not computed: same bits on any backend.
/// Cost         one exchange: at most 2 messages a rank and kind on average. Rank r sends leaving(r) and receives
///              arriving(r) rows of each kind, and copies min(tokens(r), balanced(r)) rows unless in place. No memory.
/// Errors       usage_error on the rank whose views do not fit, before anything moved.
class remap {
    std::vector<std::int64_t> tokens_;
    std::vector<std::int64_t> balanced_;
    std::vector<token_move> moves_;

    remap(std::vector<std::int64_t> tokens, const cluster& machines)
        : tokens_(std::move(tokens))
        , balanced_(balanced_tokens(tokens_))
        , moves_(moves_inside_first(machines, tokens_, balanced_)) {}

public:
    /// As few tokens as possible leave their node (moves_inside_first).
    explicit remap(const placement& p) : remap(detail::tokens_of(p), p.machines) {}
    /// The moves whose cost [ranks][ranks] is least (moves_of_least_cost).
    remap(const placement& p, std::span<const std::int64_t> cost)
        : tokens_(detail::tokens_of(p))
        , balanced_(balanced_tokens(tokens_))
        , moves_(moves_of_least_cost(cost, tokens_, balanced_)) {}

    [[nodiscard]] int ranks() const noexcept { return static_cast<int>(tokens_.size()); }
    /// Tokens of a rank in the attention layout.
    [[nodiscard]] std::size_t tokens(int rank) const { return count(tokens_, rank); }
    /// Tokens of a rank in the balanced layout: two ranks differ by at most 1.
    [[nodiscard]] std::size_t balanced(int rank) const { return count(balanced_, rank); }
    [[nodiscard]] std::size_t leaving(int rank) const { return tokens(rank) - kept(rank); }
    [[nodiscard]] std::size_t arriving(int rank) const { return balanced(rank) - kept(rank); }
    /// Sorted by (from, to).
    [[nodiscard]] std::span<const token_move> moves() const noexcept { return moves_; }

    /// The balanced layout of the placement that this was made from: by rank, in the order of its memory.
    /// Errors  usage_error when it is another one, as far as counts tell.
    [[nodiscard]] std::vector<std::vector<piece>> balanced_pieces(const placement& p) const {
        if (detail::tokens_of(p) != tokens_) { throw usage_error("remap: made from another placement"); }
        std::vector<std::vector<piece>> after;
        std::vector<std::vector<piece>> on_the_way;
        for (int r = 0; r < ranks(); ++r) {
            auto parts = detail::cut(p.pieces[static_cast<std::size_t>(r)], static_cast<std::int64_t>(kept(r)));
            after.push_back(std::move(parts.first));
            on_the_way.push_back(std::move(parts.second));
        }
        for (const token_move& m : moves_) {
            auto& source = on_the_way[static_cast<std::size_t>(m.from)];
            auto parts = detail::cut(source, m.tokens);
            auto& target = after[static_cast<std::size_t>(m.to)];
            target.insert(target.end(), parts.first.begin(), parts.first.end());
            source = std::move(parts.second);
        }
        return after;
    }

    template <comm::can_exchange C> void forward(C& c, std::span<const token_rows<memory_of<C>>> kinds) const {
        run(c, kinds, tokens_, balanced_, &token_move::from, &token_move::to);
    }
    template <comm::can_exchange C> void inverse(C& c, std::span<const token_rows<memory_of<C>>> kinds) const {
        run(c, kinds, balanced_, tokens_, &token_move::to, &token_move::from);
    }

private:
    [[nodiscard]] std::size_t count(const std::vector<std::int64_t>& by_rank, int rank) const {
        if (rank < 0 || rank >= ranks()) {
            throw usage_error(formatted("remap: rank {} is not one of {} ranks", rank, ranks()));
        }
        return static_cast<std::size_t>(by_rank[static_cast<std::size_t>(rank)]);
    }
    [[nodiscard]] std::size_t kept(int rank) const { return std::min(tokens(rank), balanced(rank)); }

    template <memory M>
    static void expect_rows(std::string_view which, view<const std::byte, M> rows, std::size_t tokens,
                            std::size_t bytes_per_token, int rank) {
        if (tokens > std::numeric_limits<std::size_t>::max() / bytes_per_token ||
            rows.size() != tokens * bytes_per_token) {
            throw usage_error(formatted("remap: {} has {} bytes, rank {} has {} tokens of {}", which, rows.size(), rank,
                                        tokens, bytes_per_token));
        }
    }

    template <class C>
    void run(C& c, std::span<const token_rows<memory_of<C>>> kinds, const std::vector<std::int64_t>& before,
             const std::vector<std::int64_t>& after, int token_move::*from, int token_move::*to) const {
        const int me = c.rank();
        if (c.size() != ranks()) {
            throw usage_error(formatted("remap: planned for {} ranks, '{}' has {}", ranks(), c.name(), c.size()));
        }
        std::vector<comm::transfer<memory_of<C>>> messages;
        for (const auto& rows : kinds) {
            const std::size_t bytes = rows.bytes_per_token;
            expect_rows("in", rows.in, count(before, me), bytes, me);
            expect_rows("out", view<const std::byte, memory_of<C>>(rows.out), count(after, me), bytes, me);
            const std::size_t staying = kept(me) * bytes;
            if (rows.in.data() != rows.out.data()) {
                if (overlaps(rows.in.data(), rows.in.size(), rows.out.data(), rows.out.size())) {
                    throw usage_error("remap: in and out overlap, but do not begin at the same element");
                }
                if (staying > 0) {
                    messages.push_back(comm::send_to(me, rows.in.sub(0, staying)));
                    messages.push_back(comm::receive_from(me, rows.out.sub(0, staying)));
                }
            }
            std::size_t sent = staying;
            std::size_t received = staying;
            for (const token_move& m : moves_) {
                const std::size_t size = static_cast<std::size_t>(m.tokens) * bytes;
                if (m.*from == me) {
                    messages.push_back(comm::send_to(m.*to, rows.in.sub(sent, size)));
                    sent += size;
                } else if (m.*to == me) {
                    messages.push_back(comm::receive_from(m.*from, rows.out.sub(received, size)));
                    received += size;
                }
            }
        }
        c.exchange(messages);
    }
};

}  // namespace tutti::sequence
