// whole_blocks: attention of sequences of which no other rank has a part; and what a rank computes with: kernel, memory.
// Needs sequence/block_attention, sequence/token_operations and sequence/detail/rank_shares.
#pragma once

#include <algorithm>    // max
#include <cmath>        // sqrt
#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <type_traits>  // types of results
#include <utility>      // move

#include <tutti/core/buffer.hpp>                  // scratch
#include <tutti/sequence/attention_options.hpp>   // options
#include <tutti/sequence/block_attention.hpp>     // final and packed blocks
#include <tutti/sequence/detail/rank_shares.hpp>  // rank_shares
#include <tutti/sequence/token_operations.hpp>    // fill, copy

namespace tutti::sequence::detail {

template <block_attention Block> class whole_blocks : protected rank_shares {
protected:
    using Q = typename Block::queue_type;
    using M = typename Q::memory_type;
    using T = typename Block::element_type;
    using P = accumulator_t<T>;
    static constexpr bool rounds_results = !std::same_as<T, P>;
    static constexpr bool finishes = rounds_results && final_attention<Block>;
    static constexpr bool packs = rounds_results && packed_attention<Block>;
    /// Blocks of rings have results of T, whose sums are of P where there is more than one.
    static constexpr bool rounds = rounds_results && rounds_blocks<Block>;
    using R = std::conditional_t<rounds, T, P>;  ///< of a block's results
    template <class U> using tensor = token_view<U, M>;

    whole_blocks(const Q& q, attention_heads heads, const attention_options& options, Block block)
        : rank_shares(options.rule, heads.kv)
        , queue_(q)
        , heads_(heads)
        , scale_(options.scale ? *options.scale
                               : 1 / std::sqrt(static_cast<double>(std::max<std::size_t>(heads.width, 1))))
        , block_(std::move(block))
        , key_sums_(queue_, 0)
        , value_sums_(queue_, 0)
        , whole_sums_(queue_, 0) {}
    whole_blocks(whole_blocks&&) = default;
    whole_blocks& operator=(whole_blocks&&) = delete;
    ~whole_blocks() = default;

    /// Where results of T are computed: in themselves, or beside them when they are rounded at the end.
    [[nodiscard]] tensor<P> memory_for(const tensor<T>& result, buffer<P, Q>& beside) {
        if constexpr (!rounds_results) {
            return result;
        } else {
            reserve(beside, result.size());
            return tensor<P>(beside.view(), result.tokens, result.heads, result.width);
        }
    }
    /// The same, for sums.
    [[nodiscard]] tensor<P> zeros_for(const tensor<T>& result, buffer<P, Q>& beside) {
        const tensor<P> sums = memory_for(result, beside);
        fill_tokens(queue_, sums, P{0});
        return sums;
    }
    void finish(const tensor<P>& sums, const tensor<T>& result) {
        if constexpr (rounds_results) { copy_tokens(queue_, sums, result.rows(0, sums.tokens)); }
    }

    struct gradient_tensors {
        tensor<T> query, key, value;
    };
    struct backward_rows {
        tensor<const T> query, d_out, out;
        tensor<const P> log_sum_exp, delta;
        tensor<P> d_query;      ///< sums
        tensor<R> first_query;  ///< the first of what is summed, where blocks are rounded
        [[nodiscard]] backward_rows rows(std::size_t first, std::size_t count) const {
            return {query.rows(first, count),       d_out.rows(first, count), out.rows(first, count),
                    log_sum_exp.rows(first, count), delta.rows(first, count), d_query.rows(first, count),
                    first_query.rows(first, count)};
        }
    };

    /// A sequence as a whole: nothing is merged, so results are final.
    void attend_whole(const tensor<const T>& query, const tensor<const T>& key, const tensor<const T>& value,
                      const tensor<T>& out, const tensor<P>& log_sum_exp) {
        if (query.tokens == 0) { return; }
        const visibility seen{this->rule_, 0, 0};
        if constexpr (finishes) {
            block_.forward(queue_, final_forward_block<T, M>{query, key, value, seen, scale_, out, log_sum_exp});
        } else {
            const tensor<P> sums = memory_for(out, whole_sums_);
            block_.forward(queue_, forward_block<T, M>{query, key, value, seen, scale_, sums, log_sum_exp});
            finish(sums, out);
        }
    }
    void differentiate_whole(const backward_rows& from, const tensor<const T>& key, const tensor<const T>& value,
                             const gradient_tensors& to) {
        if (from.query.tokens == 0) { return; }
        const visibility seen{this->rule_, 0, 0};
        if constexpr (finishes) {
            block_.backward(queue_,
                            final_backward_block<T, M>{from.query, key, value, seen, scale_, from.d_out, from.out,
                                                       from.log_sum_exp, from.delta, to.query, to.key, to.value});
        } else {
            const tensor<P> query_sums = zeros_for(to.query, whole_sums_);
            const tensor<P> key_sums = zeros_for(to.key, key_sums_);
            const tensor<P> value_sums = zeros_for(to.value, value_sums_);
            block_.backward(queue_,
                            backward_block<T, M>{from.query, key, value, seen, scale_, from.d_out, from.out,
                                                 from.log_sum_exp, from.delta, query_sums, key_sums, value_sums});
            finish(query_sums, to.query);
            finish(key_sums, to.key);
            finish(value_sums, to.value);
        }
    }
    /// Shares [first, first + count), of which no other rank has a part.
    void attend_alone(std::size_t first, std::size_t count, const tensor<const T>& query, const tensor<const T>& key,
                      const tensor<const T>& value, const tensor<T>& out, const tensor<P>& log_sum_exp) {
        if constexpr (packs) {
            const stretch_of_shares r = this->stretch_of(first, count);
            if (r.tokens == 0) { return; }
            block_.forward(
                queue_, packed_forward_block<T, M>{r.lengths,
                                                   {r.of(query), r.of(key), r.of(value), visibility{this->rule_, 0, 0},
                                                    scale_, r.of(out), r.of(log_sum_exp)}});
        } else {
            for (std::size_t i = first; i < first + count; ++i) {
                const ring_share& s = this->shares_[i];
                attend_whole(s.rows_of(query), s.rows_of(key), s.rows_of(value), s.rows_of(out),
                             s.rows_of(log_sum_exp));
            }
        }
    }
    void differentiate_alone(std::size_t first, std::size_t count, const backward_rows& from,
                             const tensor<const T>& key, const tensor<const T>& value, const gradient_tensors& to) {
        if constexpr (packs) {
            const stretch_of_shares r = this->stretch_of(first, count);
            if (r.tokens == 0) { return; }
            block_.backward(queue_, packed_backward_block<T, M>{
                                        r.lengths,
                                        {r.of(from.query), r.of(key), r.of(value), visibility{this->rule_, 0, 0},
                                         scale_, r.of(from.d_out), r.of(from.out), r.of(from.log_sum_exp),
                                         r.of(from.delta), r.of(to.query), r.of(to.key), r.of(to.value)}});
        } else {
            for (std::size_t i = first; i < first + count; ++i) {
                const ring_share& s = this->shares_[i];
                differentiate_whole(from.rows(s.first_row, s.mine.tokens()), s.rows_of(key), s.rows_of(value),
                                    {s.rows_of(to.query), s.rows_of(to.key), s.rows_of(to.value)});
            }
        }
    }

    /// Grows only.
    template <class U> void reserve(buffer<U, Q>& memory, std::size_t count) {
        if (memory.size() < count) {
            memory = buffer<U, Q>(queue_, 0);  // the old one goes first: peaks are counted
            memory = buffer<U, Q>(queue_, count);
        }
    }

    Q queue_;
    attention_heads heads_;
    double scale_;
    Block block_;

private:
    buffer<P, Q> key_sums_, value_sums_, whole_sums_;
};

}  // namespace tutti::sequence::detail
