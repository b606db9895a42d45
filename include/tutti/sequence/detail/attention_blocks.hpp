// attention_blocks: what one rank does with blocks of its sequences: attends to its own keys and to those of other members
// of rings, merges, differentiates, and sums; who has which keys when is an engine's.
// Needs sequence/block_attention, sequence/token_operations and sequence/detail/ring_share.
#pragma once

#include <algorithm>    // clamp, max
#include <cmath>        // sqrt
#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <limits>       // infinity
#include <span>         // lengths
#include <type_traits>  // types of results
#include <utility>      // move
#include <vector>       // shares

#include <tutti/core/buffer.hpp>                 // scratch
#include <tutti/sequence/attention_options.hpp>  // options
#include <tutti/sequence/block_attention.hpp>    // forward_block, backward_block
#include <tutti/sequence/detail/ring_share.hpp>  // ring_share
#include <tutti/sequence/token_operations.hpp>   // merge

namespace tutti::sequence::detail {

template <block_attention Block> class attention_blocks {
protected:
    using Q = typename Block::queue_type;
    using M = typename Q::memory_type;
    using T = typename Block::element_type;
    using P = accumulator_t<T>;
    static constexpr bool rounds_results = !std::same_as<T, P>;
    static constexpr bool finishes = rounds_results && final_attention<Block>;
    /// Blocks of rings have results of T, whose sums are of P where there is more than one.
    static constexpr bool rounds = rounds_results && rounds_blocks<Block>;
    using R = std::conditional_t<rounds, T, P>;  ///< of a block's results
    template <class U> using tensor = token_view<U, M>;

    attention_blocks(const Q& q, attention_heads heads, const attention_options& options, Block block)
        : queue_(q)
        , heads_(heads)
        , rule_(options.rule)
        , scale_(options.scale ? *options.scale
                               : 1 / std::sqrt(static_cast<double>(std::max<std::size_t>(heads.width, 1))))
        , block_(std::move(block))
        , partial_(queue_, 0)
        , first_queries_(queue_, 0)
        , partial_sums_(queue_, 0)
        , deltas_(queue_, 0)
        , out_sums_(queue_, 0)
        , query_sums_(queue_, 0)
        , own_key_sums_(queue_, 0)
        , own_value_sums_(queue_, 0)
        , key_sums_(queue_, 0)
        , value_sums_(queue_, 0)
        , whole_sums_(queue_, 0) {}
    attention_blocks(attention_blocks&&) = default;
    attention_blocks& operator=(attention_blocks&&) = delete;
    ~attention_blocks() = default;

    /// Has these from now on.
    void take(std::vector<ring_share> shares) {
        shares_ = std::move(shares);
        own_tokens_.clear();
        tokens_ = 0;
        shared_ = 0;
        own_rounds_ = 1;
        std::size_t longest = 0;
        for (const ring_share& s : shares_) {
            own_tokens_.push_back(s.mine.tokens());
            tokens_ += s.mine.tokens();
            if (s.members() > 1) { shared_ = tokens_; }  // rings of one rank are behind the others
            own_rounds_ = std::max(own_rounds_, s.members());
            for (const std::size_t other : {s.before(1), s.before(s.members() - 1)}) {
                if (other != s.place) { longest = std::max(longest, pair_of(s, other).queries); }
            }
        }
        halve_own();
        reserve(partial_, longest * heads_.query * heads_.width);
        reserve(partial_sums_, longest * heads_.query);
    }

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
    /// Of a tensor of this rank's rows the rest, the padding.
    template <class U> [[nodiscard]] tensor<U> padding_of(const tensor<U>& all) const noexcept {
        return all.rows(tokens_, all.tokens - tokens_);
    }
    /// Memory for sums of several partial results of sequences that other ranks have parts of; none where there is one.
    [[nodiscard]] tensor<P> sums_for(const tensor<T>& result, buffer<P, Q>& beside) {
        if (rounds && own_rounds_ <= 2) { return {}; }
        return memory_for(result.rows(0, shared_), beside);
    }
    /// Where out of the sequences that other ranks have parts of is computed; padding is written at once.
    [[nodiscard]] tensor<P> out_for(const tensor<T>& out, const tensor<P>& log_sum_exp) {
        fill_tokens(queue_, padding_of(out), T{});
        fill_tokens(queue_, padding_of(log_sum_exp), -std::numeric_limits<P>::infinity());
        return sums_for(out, out_sums_);
    }
    void finish(const tensor<P>& sums, const tensor<T>& result) {
        if constexpr (rounds_results) { copy_tokens(queue_, sums, result.rows(0, sums.tokens)); }
    }
    /// The same of sequences that other ranks have parts of: where blocks are rounded, the last sum was.
    void finish_shared(const tensor<P>& sums, const tensor<T>& result) {
        if constexpr (!rounds) { finish(sums, result); }
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
    /// d_out * out of this rank's rows; none where the kernel computes it.
    [[nodiscard]] tensor<P> deltas_of(const tensor<const T>& d_out, const tensor<const T>& out) {
        if (wants_out<Block>) { return {}; }
        const std::size_t numbers = tokens_ * heads_.query;
        reserve(deltas_, numbers);
        const tensor<P> delta = numbers_by_head(deltas_.view().sub(0, numbers), tokens_, heads_.query);
        run(queue_, dot_tokens_operation<T, M>{d_out.rows(0, tokens_), out.rows(0, tokens_), delta});
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
        const visibility seen{rule_, 0, 0};
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
        const block_pair b = pair_of(s, s.before(step));
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
            const bool starts = results(s, b, 0, 1, step) == 0;
            for_each_chunk(s, b, [&](std::size_t i, std::size_t count) {
                const tensor<T> end = out.rows(row + i, count);
                const tensor<P> between = sums.rows(row + i, count);
                const bool stops = results(s, b, i, step + 1, s.members()) == 0;
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
        const visibility seen{rule_, 0, 0};
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
        const block_pair b = pair_of(s, s.before(step));
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
            const std::size_t before = results(s, b, 0, 1, step);
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
            for_each_chunk(s, all, [&](std::size_t i, std::size_t count) {
                const tensor<T> own = d_query.rows(i, count);
                const std::size_t others = results(s, all, i, 1, s.members());
                if (others == 1) { add_tokens(queue_, s.rows_of(from.first_query).rows(i, count), own); }
                if (others > 1) { add_tokens(queue_, s.rows_of(from.d_query).rows(i, count), own); }
            });
        } else {
            finish(s.rows_of(from.d_query), d_query);
        }
    }

    /// A sequence as a whole: nothing is merged, so results are final.
    void attend_whole(const tensor<const T>& query, const tensor<const T>& key, const tensor<const T>& value,
                      const tensor<T>& out, const tensor<P>& log_sum_exp) {
        if (query.tokens == 0) { return; }
        const visibility seen{rule_, 0, 0};
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
        const visibility seen{rule_, 0, 0};
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
        if constexpr (packed_attention<Block>) {
            const stretch_of_rows r = rows_of(first, count);
            if (r.tokens == 0) { return; }
            block_.forward(queue_,
                           packed_forward_block<T, M>{r.lengths,
                                                      {r.of(query), r.of(key), r.of(value), visibility{rule_, 0, 0},
                                                       scale_, r.of(out), r.of(log_sum_exp)}});
        } else {
            for (std::size_t i = first; i < first + count; ++i) {
                const ring_share& s = shares_[i];
                attend_whole(s.rows_of(query), s.rows_of(key), s.rows_of(value), s.rows_of(out),
                             s.rows_of(log_sum_exp));
            }
        }
    }
    void differentiate_alone(std::size_t first, std::size_t count, const backward_rows& from,
                             const tensor<const T>& key, const tensor<const T>& value, const gradient_tensors& to) {
        if constexpr (packed_attention<Block>) {
            const stretch_of_rows r = rows_of(first, count);
            if (r.tokens == 0) { return; }
            block_.backward(
                queue_, packed_backward_block<T, M>{r.lengths,
                                                    {r.of(from.query), r.of(key), r.of(value), visibility{rule_, 0, 0},
                                                     scale_, r.of(from.d_out), r.of(from.out), r.of(from.log_sum_exp),
                                                     r.of(from.delta), r.of(to.query), r.of(to.key), r.of(to.value)}});
        } else {
            for (std::size_t i = first; i < first + count; ++i) {
                const ring_share& s = shares_[i];
                differentiate_whole(from.rows(s.first_row, s.mine.tokens()), s.rows_of(key), s.rows_of(value),
                                    {s.rows_of(to.query), s.rows_of(to.key), s.rows_of(to.value)});
            }
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
            reserve(first_queries_, shared_ * heads_.query * heads_.width);
            rows.first_query = tensor<R>(first_queries_.view(), shared_, heads_.query, heads_.width);
            work(rows, to, block_rows<R>{to.key, to.value});
        } else {
            work(rows, to, block_rows<R>{sums_for(to.key, own_key_sums_), sums_for(to.value, own_value_sums_)});
        }
        for (const ring_share& s : shares_) {
            if (s.members() > 1) { finish_queries(s, rows, to); }
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
    mask rule_;
    double scale_;
    Block block_;
    std::vector<ring_share> shares_;
    std::vector<std::size_t> own_tokens_;  // by share
    std::size_t tokens_ = 0;
    std::size_t shared_ = 0;                // rows of sequences that other ranks have parts of: the first ones
    std::size_t own_rounds_ = 1;            // members of this rank's largest ring
    std::vector<std::size_t> early_heads_;  // by share: kv heads whose own keys come before those of others in backward
    buffer<R, Q> partial_, first_queries_;  // results of steps
    buffer<P, Q> partial_sums_, deltas_, out_sums_, query_sums_, own_key_sums_, own_value_sums_;
    buffer<P, Q> key_sums_, value_sums_, whole_sums_;

private:
    // Rows of shares that lie one behind the other.
    struct stretch_of_rows {
        std::size_t first_row = 0, tokens = 0;
        std::span<const std::size_t> lengths;
        template <class U> [[nodiscard]] tensor<U> of(const tensor<U>& all) const noexcept {
            return all.rows(first_row, tokens);
        }
    };
    [[nodiscard]] stretch_of_rows rows_of(std::size_t first, std::size_t count) const noexcept {
        stretch_of_rows r;
        if (count == 0) { return r; }
        r.first_row = shares_[first].first_row;
        r.lengths = std::span<const std::size_t>(own_tokens_).subspan(first, count);
        for (const std::size_t n : r.lengths) { r.tokens += n; }
        return r;
    }

    // Which of this rank's rows of a sequence see keys of a member, and which keys: its first ones.
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
            const auto heads = static_cast<double>(heads_.kv);
            early_heads_.push_back(rest >= cost ? heads_.kv : static_cast<std::size_t>(heads * rest / cost + 0.5));
            rest = std::max(0.0, rest - cost);
        }
    }
    [[nodiscard]] tensor<R> partial(std::size_t rows) const {
        return tensor<R>(partial_.view(), rows, heads_.query, heads_.width);
    }
    // each(first, count): of a pair's queries those of this rank's early chunk, then those of the late one.
    template <class Each> void for_each_chunk(const ring_share& s, const block_pair& b, Each each) const {
        const std::size_t split = std::clamp(s.early(s.place), b.first_query, b.first_query + b.queries);
        if (split != b.first_query) { each(std::size_t{0}, split - b.first_query); }
        if (split != b.first_query + b.queries) { each(split - b.first_query, b.first_query + b.queries - split); }
    }
    // Of steps [from, to) those with a result for query i of a pair. Early rows get theirs in the first steps, together
    // with the late ones: before a step as many as these, if they have a part in it.
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
};

}  // namespace tutti::sequence::detail
