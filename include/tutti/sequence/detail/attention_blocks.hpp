// attention_blocks: what one rank does with blocks of its sequences: attends to its own keys and to those of other members
// of rings, merges, differentiates, and sums; who has which keys when is an engine's.
// Needs sequence/detail/whole_blocks.
#pragma once

#include <cstddef>  // size_t
#include <limits>   // infinity
#include <utility>  // move

#include <tutti/core/buffer.hpp>                   // scratch
#include <tutti/sequence/attention_options.hpp>    // options
#include <tutti/sequence/block_attention.hpp>      // forward_block, backward_block
#include <tutti/sequence/detail/ring_share.hpp>    // ring_share
#include <tutti/sequence/detail/whole_blocks.hpp>  // whole_blocks
#include <tutti/sequence/token_operations.hpp>     // merge, sum

namespace tutti::sequence::detail {

template <block_attention Block> class attention_blocks : protected whole_blocks<Block> {
protected:
    using whole = whole_blocks<Block>;
    using typename whole::backward_rows;
    using typename whole::block_pair;
    using typename whole::gradient_tensors;
    using typename whole::M;
    using typename whole::P;
    using typename whole::Q;
    using typename whole::R;
    using typename whole::T;
    using whole::rounds;
    using whole::rounds_results;
    template <class U> using tensor = token_view<U, M>;

    attention_blocks(const Q& q, attention_heads heads, const attention_options& options, Block block)
        : whole(q, heads, options, std::move(block))
        , partial_(queue_, 0)
        , first_queries_(queue_, 0)
        , partial_sums_(queue_, 0)
        , deltas_(queue_, 0)
        , out_sums_(queue_, 0)
        , query_sums_(queue_, 0)
        , own_key_sums_(queue_, 0)
        , own_value_sums_(queue_, 0) {}
    attention_blocks(attention_blocks&&) = default;
    attention_blocks& operator=(attention_blocks&&) = delete;
    ~attention_blocks() = default;

    /// Of a tensor of this rank's rows the rest, the padding.
    template <class U> [[nodiscard]] tensor<U> padding_of(const tensor<U>& all) const noexcept {
        return all.rows(this->tokens_, all.tokens - this->tokens_);
    }
    /// Memory for sums of several partial results of sequences that other ranks have parts of; none where there is one.
    [[nodiscard]] tensor<P> sums_for(const tensor<T>& result, buffer<P, Q>& beside) {
        if (rounds && this->own_rounds_ <= 2) { return {}; }
        return this->memory_for(result.rows(0, this->shared_), beside);
    }
    /// Where out of the sequences that other ranks have parts of is computed; padding is written at once.
    [[nodiscard]] tensor<P> out_for(const tensor<T>& out, const tensor<P>& log_sum_exp) {
        fill_tokens(queue_, padding_of(out), T{});
        fill_tokens(queue_, padding_of(log_sum_exp), -std::numeric_limits<P>::infinity());
        reserve_partial();
        reserve(partial_sums_, this->most_queries() * heads_.query);
        return sums_for(out, out_sums_);
    }
    /// The same of sequences that other ranks have parts of: where blocks are rounded, the last sum was.
    void finish_shared(const tensor<P>& sums, const tensor<T>& result) {
        if constexpr (!rounds) { this->finish(sums, result); }
    }

    /// d_out * out of this rank's rows; none where the kernel computes it.
    [[nodiscard]] tensor<P> deltas_of(const tensor<const T>& d_out, const tensor<const T>& out) {
        if (wants_out<Block>) { return {}; }
        const std::size_t numbers = this->tokens_ * heads_.query;
        reserve(deltas_, numbers);
        const tensor<P> delta = numbers_by_head(deltas_.view().sub(0, numbers), this->tokens_, heads_.query);
        run(queue_, dot_tokens_operation<T, M>{d_out.rows(0, this->tokens_), out.rows(0, this->tokens_), delta});
        return delta;
    }

    // Keys and values, or their gradients.
    template <class U> struct block_rows {
        tensor<U> key, value;
        template <class V> operator block_rows<V>() const { return {key, value}; }
    };
    /// Numbers of a token of a block.
    [[nodiscard]] std::size_t block_width() const noexcept { return 2 * heads_.kv * heads_.width; }
    /// The keys, then the values, of `count` tokens, from token `first` on of a memory of blocks.
    template <class U>
    [[nodiscard]] view<U, M> block_memory(view<U, M> memory, std::size_t first, std::size_t count) const {
        return memory.sub(first * block_width(), count * block_width());
    }
    template <class U>
    [[nodiscard]] block_rows<U> block_at(view<U, M> memory, std::size_t first, std::size_t count) const {
        const view<U, M> all = block_memory(memory, first, count);
        const std::size_t half = all.size() / 2;
        return {tensor<U>(all.sub(0, half), count, heads_.kv, heads_.width),
                tensor<U>(all.sub(half, half), count, heads_.kv, heads_.width)};
    }
    void pack(const ring_share& s, const tensor<const T>& key, const tensor<const T>& value,
              const block_rows<T>& into) {
        copy_tokens(queue_, s.rows_of(key), into.key);
        copy_tokens(queue_, s.rows_of(value), into.value);
    }

    /// This rank's rows of a sequence attend to its own ones: the first result.
    void attend_own(const ring_share& s, const tensor<const T>& query, const tensor<const T>& key,
                    const tensor<const T>& value, const tensor<T>& out, const tensor<P>& sums,
                    const tensor<P>& log_sum_exp) {
        const std::size_t tokens = s.mine.tokens();
        if (tokens == 0) { return; }
        const visibility seen{this->rule_, 0, 0};
        if constexpr (rounds) {
            block_.forward(queue_, final_forward_block<T, M>{s.rows_of(query), s.rows_of(key), s.rows_of(value), seen,
                                                             scale_, s.rows_of(out), s.rows_of(log_sum_exp)});
        } else {
            block_.forward(queue_, forward_block<T, M>{s.rows_of(query), s.rows_of(key), s.rows_of(value), seen, scale_,
                                                       s.rows_of(sums), s.rows_of(log_sum_exp)});
        }
    }
    /// They attend to those of the member `step` places before this rank, from step 1 on; the result is merged. The
    /// order is fixed: so are the bits.
    void attend(const ring_share& s, std::size_t step, const tensor<const T>& query, const block_rows<const T>& block,
                const tensor<T>& out, const tensor<P>& sums, const tensor<P>& log_sum_exp) {
        const block_pair b = this->pair_of(s, s.before(step));
        if (b.queries == 0 || b.keys == 0) { return; }
        const std::size_t row = s.first_row + b.first_query;
        const tensor<R> part = partial(b.queries);
        const tensor<P> part_sums =
            numbers_by_head(partial_sums_.view().sub(0, b.queries * heads_.query), b.queries, heads_.query);
        const tensor<const T> key = block.key.rows(0, b.keys), value = block.value.rows(0, b.keys);
        if constexpr (rounds) {
            block_.forward(queue_, final_forward_block<T, M>{query.rows(row, b.queries), key, value, b.seen, scale_,
                                                             part, part_sums});
        } else {
            block_.forward(
                queue_, forward_block<T, M>{query.rows(row, b.queries), key, value, b.seen, scale_, part, part_sums});
        }
        const auto merge = [&]<class Kept, class To>(std::size_t i, tensor<Kept> kept, tensor<To> to) {
            run(queue_, merge_operation<P, M, R, Kept, To>{part.rows(i, to.tokens), part_sums.rows(i, to.tokens), kept,
                                                           log_sum_exp.rows(row + i, to.tokens), to});
        };
        if constexpr (rounds) {
            // What came first is in `out`, and so is what comes last; between them are sums.
            const bool starts = this->results(s, b, 0, 1, step) == 0;
            this->for_each_chunk(s, b, [&](std::size_t i, std::size_t count) {
                const tensor<T> end = out.rows(row + i, count);
                const tensor<P> between = sums.rows(row + i, count);
                const bool stops = this->results(s, b, i, step + 1, s.members()) == 0;
                if (starts) { return stops ? merge(i, end, end) : merge(i, end, between); }
                stops ? merge(i, between, end) : merge(i, between, between);
            });
        } else {
            merge(0, sums.rows(row, b.queries), sums.rows(row, b.queries));
        }
    }
    /// What this rank's rows of a sequence have to do with its own ones: of the first `early` kv heads before those of
    /// other members, of the rest behind.
    void differentiate_own(const ring_share& s, const backward_rows& from, const tensor<const T>& key,
                           const tensor<const T>& value, const gradient_tensors& to, const block_rows<R>& own,
                           std::size_t early, bool behind) {
        const std::size_t first = behind ? early : 0, heads = behind ? heads_.kv - early : early;
        const auto of_key = [&](const auto& v) { return s.rows_of(v).some_heads(first, heads); };
        const auto of_query = [&](const auto& v) {
            return s.rows_of(v).some_heads(first * heads_.group(), heads * heads_.group());
        };
        if (s.mine.tokens() == 0) { return; }
        if constexpr (!rounds) {
            // What others add to comes first.
            const std::size_t given = starts_gradients<Block> ? early * heads_.group() : 0;
            if (!behind) { fill_tokens(queue_, s.rows_of(from.d_query).some_heads(given, heads_.query - given), P{0}); }
        }
        if (heads == 0) { return; }
        const visibility seen{this->rule_, 0, 0};
        if constexpr (rounds) {
            block_.backward(queue_, final_backward_block<T, M>{of_query(from.query), of_key(key), of_key(value), seen,
                                                               scale_, of_query(from.d_out), of_query(from.out),
                                                               of_query(from.log_sum_exp), of_query(from.delta),
                                                               of_query(to.query), of_key(own.key), of_key(own.value)});
        } else {
            if (!starts_gradients<Block>) {
                fill_tokens(queue_, of_key(own.key), P{0});
                fill_tokens(queue_, of_key(own.value), P{0});
            }
            block_.backward(queue_, backward_block<T, M>{of_query(from.query), of_key(key), of_key(value), seen, scale_,
                                                         of_query(from.d_out), of_query(from.out),
                                                         of_query(from.log_sum_exp), of_query(from.delta),
                                                         of_query(from.d_query), of_key(own.key), of_key(own.value),
                                                         starts_gradients<Block> && !behind, starts_gradients<Block>});
        }
    }
    /// And with those of the member `step` places before: writes the gradients of the member's rows, adds to its own.
    void differentiate(const ring_share& s, std::size_t step, const backward_rows& from,
                       const block_rows<const T>& block, const block_rows<R>& gradients) {
        const block_pair b = this->pair_of(s, s.before(step));
        const bool empty = b.queries == 0 || b.keys == 0;
        const std::size_t written = (rounds || starts_gradients<Block>)&&!empty ? b.keys : 0;
        fill_tokens(queue_, gradients.key.rows(written, gradients.key.tokens - written), R{});
        fill_tokens(queue_, gradients.value.rows(written, gradients.value.tokens - written), R{});
        if (empty) { return; }
        const std::size_t row = s.first_row + b.first_query;
        const backward_rows part = from.rows(row, b.queries);
        const tensor<const T> key = block.key.rows(0, b.keys), value = block.value.rows(0, b.keys);
        const tensor<R> d_key = gradients.key.rows(0, b.keys), d_value = gradients.value.rows(0, b.keys);
        if constexpr (rounds) {
            const std::size_t before = this->results(s, b, 0, 1, step);
            const tensor<T> d_part = before == 0 ? part.first_query : partial(b.queries);
            block_.backward(queue_,
                            final_backward_block<T, M>{part.query, key, value, b.seen, scale_, part.d_out, part.out,
                                                       part.log_sum_exp, part.delta, d_part, d_key, d_value});
            if (before == 1) { sum_tokens(queue_, part.first_query, d_part, part.d_query); }
            if (before > 1) { add_tokens(queue_, d_part, part.d_query); }
        } else {
            block_.backward(queue_, backward_block<T, M>{part.query, key, value, b.seen, scale_, part.d_out, part.out,
                                                         part.log_sum_exp, part.delta, part.d_query, d_key, d_value,
                                                         false, starts_gradients<Block>});
        }
    }
    /// Behind both: gradients of this rank's queries of a sequence.
    void finish_queries(const ring_share& s, const backward_rows& from, const gradient_tensors& to) {
        const tensor<T> d_query = s.rows_of(to.query);
        if constexpr (rounds) {
            const block_pair all{0, s.mine.tokens(), 0, {}};
            this->for_each_chunk(s, all, [&](std::size_t i, std::size_t count) {
                const tensor<T> own = d_query.rows(i, count);
                const std::size_t others = this->results(s, all, i, 1, s.members());
                if (others == 1) { add_tokens(queue_, s.rows_of(from.first_query).rows(i, count), own); }
                if (others > 1) { add_tokens(queue_, s.rows_of(from.d_query).rows(i, count), own); }
            });
        } else {
            this->finish(s.rows_of(from.d_query), d_query);
        }
    }

    /// Backward but for messages: work(rows, to, own) writes `to`, in whole where a sequence is this rank's alone; `own` is
    /// for gradients of this rank's keys and values by its own rows.
    template <class Work>
    void differentiate_around(const tensor<const T>& d_out, const tensor<const T>& query, const tensor<const T>& out,
                              const tensor<const P>& log_sum_exp, const gradient_tensors& to, Work work) {
        fill_tokens(queue_, padding_of(to.query), T{});
        fill_tokens(queue_, padding_of(to.key), T{});
        fill_tokens(queue_, padding_of(to.value), T{});
        backward_rows rows{query, d_out, out, log_sum_exp, deltas_of(d_out, out), sums_for(to.query, query_sums_), {}};
        if constexpr (rounds) {
            reserve_partial();
            reserve(first_queries_, this->shared_ * heads_.query * heads_.width);
            rows.first_query = tensor<R>(first_queries_.view(), this->shared_, heads_.query, heads_.width);
            work(rows, to, block_rows<R>{to.key, to.value});
        } else {
            work(rows, to, block_rows<R>{sums_for(to.key, own_key_sums_), sums_for(to.value, own_value_sums_)});
        }
        for (const ring_share& s : this->shares_) {
            if (s.members() > 1) { finish_queries(s, rows, to); }
        }
    }

    using whole::block_;
    using whole::heads_;
    using whole::queue_;
    using whole::reserve;
    using whole::scale_;

private:
    buffer<R, Q> partial_, first_queries_;  // results of steps
    buffer<P, Q> partial_sums_, deltas_, out_sums_, query_sums_, own_key_sums_, own_value_sums_;

    void reserve_partial() { reserve(partial_, this->most_queries() * heads_.query * heads_.width); }
    [[nodiscard]] tensor<R> partial(std::size_t rows) const {
        return tensor<R>(partial_.view(), rows, heads_.query, heads_.width);
    }
};

}  // namespace tutti::sequence::detail
