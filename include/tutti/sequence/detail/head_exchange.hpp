// head_exchange: one tensor on its way between all heads of some tokens and some heads of all tokens.
// Needs sequence/detail/ring_share and sequence/token_operations.
#pragma once

#include <cstddef>      // size_t
#include <type_traits>  // type_identity
#include <vector>       // places

#include <tutti/comm/call.hpp>                   // transfer
#include <tutti/core/buffer.hpp>                 // storage
#include <tutti/sequence/detail/ring_share.hpp>  // ring_share
#include <tutti/sequence/token_operations.hpp>   // copy_tokens

namespace tutti::sequence::detail {

/// A tensor of the sequences of a rank, in both forms.
///
/// Semantics  whole(i): this rank's part of the heads for all tokens of share i, in the order of the sequence. It is
///            filled by the messages of give_heads, from the rows of all members; or by who computes it, after place,
///            and then the messages of return_tokens bring to each member its rows, which take_tokens puts where they
///            belong.
/// Messages   between two ranks in the order of shares, then of stretches; each is contiguous at both ends. None is
///            empty.
template <transportable T, queue Q> class head_exchange {
    using M = typename Q::memory_type;
    using transfers = std::vector<comm::transfer<M>>;
    template <class U> using tensor = token_view<U, M>;

    Q queue_;
    std::size_t heads_;
    std::size_t width_;
    std::vector<std::size_t> first_;            // share -> number in `wholes_`
    std::vector<std::size_t> lengths_, parts_;  // share -> tokens, heads of a part
    buffer<T, Q> wholes_;                       // parts of heads of whole sequences
    buffer<T, Q> packed_;                       // this rank's rows of a share, member by member

public:
    head_exchange(Q q, std::size_t heads, std::size_t width)
        : queue_(q), heads_(heads), width_(width), wholes_(q, 0), packed_(q, 0) {}

    /// Room for these shares, whose members divide the heads.
    void place(const std::vector<ring_share>& shares) {
        first_.clear();
        lengths_.clear();
        parts_.clear();
        std::size_t all = 0;
        std::size_t rows = 0;
        for (const ring_share& s : shares) {
            first_.push_back(all);
            lengths_.push_back(static_cast<std::size_t>(s.length));
            parts_.push_back(heads_ / s.members());
            all += lengths_.back() * parts_.back() * width_;
            rows += s.mine.tokens();
        }
        if (wholes_.size() < all) {
            wholes_ = buffer<T, Q>(queue_, 0);
            wholes_ = buffer<T, Q>(queue_, all);
        }
        if (packed_.size() < rows * heads_ * width_) {
            packed_ = buffer<T, Q>(queue_, 0);
            packed_ = buffer<T, Q>(queue_, rows * heads_ * width_);
        }
    }
    [[nodiscard]] tensor<T> whole(std::size_t i) const {
        const std::size_t numbers = lengths_[i] * parts_[i] * width_;
        return tensor<T>(wholes_.view().sub(first_[i], numbers), lengths_[i], parts_[i], width_);
    }

    void give_heads(const std::vector<ring_share>& shares, std::type_identity_t<tensor<const T>> all,
                    transfers& messages) {
        place(shares);
        for (std::size_t i = 0; i < shares.size(); ++i) {
            const ring_share& s = shares[i];
            for (std::size_t p = 0; p < s.members(); ++p) {
                const tensor<const T> part = s.rows_of(all).some_heads(p * parts_[i], parts_[i]);
                if (p == s.place) {
                    for (const stretch& a : s.mine.stretches()) {
                        copy_tokens(queue_, part.rows(a.row, a.size()), in_sequence(i, a));
                    }
                    continue;
                }
                copy_tokens(queue_, part, packed(s, i, p));
                for (const stretch& a : s.mine.stretches()) {
                    messages.push_back(comm::send_to(s.ranks[p], numbers_of(packed(s, i, p).rows(a.row, a.size()))));
                }
                const member_tokens theirs = s.of(p);
                for (const stretch& b : theirs.stretches()) {
                    messages.push_back(comm::receive_from(s.ranks[p], numbers_of(in_sequence(i, b))));
                }
            }
        }
    }

    void return_tokens(const std::vector<ring_share>& shares, transfers& messages) {
        for (std::size_t i = 0; i < shares.size(); ++i) {
            const ring_share& s = shares[i];
            for (std::size_t p = 0; p < s.members(); ++p) {
                if (p == s.place) { continue; }
                const member_tokens theirs = s.of(p);
                for (const stretch& b : theirs.stretches()) {
                    messages.push_back(comm::send_to(s.ranks[p], numbers_of(in_sequence(i, b))));
                }
                for (const stretch& a : s.mine.stretches()) {
                    messages.push_back(
                        comm::receive_from(s.ranks[p], numbers_of(packed(s, i, p).rows(a.row, a.size()))));
                }
            }
        }
    }
    void take_tokens(const std::vector<ring_share>& shares, std::type_identity_t<tensor<T>> all) {
        for (std::size_t i = 0; i < shares.size(); ++i) {
            const ring_share& s = shares[i];
            for (std::size_t p = 0; p < s.members(); ++p) {
                const tensor<T> part = s.rows_of(all).some_heads(p * parts_[i], parts_[i]);
                if (p != s.place) {
                    copy_tokens(queue_, packed(s, i, p), part);
                    continue;
                }
                for (const stretch& a : s.mine.stretches()) {
                    copy_tokens(queue_, in_sequence(i, a), part.rows(a.row, a.size()));
                }
            }
        }
    }

private:
    [[nodiscard]] tensor<T> in_sequence(std::size_t i, const stretch& a) const {
        return whole(i).rows(static_cast<std::size_t>(a.begin), a.size());
    }
    // This rank's rows for, or from, member p.
    [[nodiscard]] tensor<T> packed(const ring_share& s, std::size_t i, std::size_t p) const {
        const std::size_t rows = s.mine.tokens();
        const std::size_t first = (s.first_row * heads_ + p * rows * parts_[i]) * width_;
        return tensor<T>(packed_.view().sub(first, rows * parts_[i] * width_), rows, parts_[i], width_);
    }
    [[nodiscard]] static view<T, M> numbers_of(const tensor<T>& rows) { return {rows.data, rows.size()}; }
};

}  // namespace tutti::sequence::detail
