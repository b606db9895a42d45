// attention_engine: what every way to share the attention of a placement has in common: the plan that ranks agree on,
// checks of what is passed in, a lane, and the pairs of stretches that attend to each other.
// Needs sequence/block_attention, sequence/token_operations, sequence/detail/ring_share and schedule/lane.
#pragma once

#include <algorithm>    // max
#include <bit>          // bit_cast of the scale
#include <cmath>        // sqrt
#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <limits>       // infinity
#include <span>         // messages
#include <string>       // texts
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // shares, messages

#include <tutti/comm/communicator.hpp>           // can_exchange
#include <tutti/core/buffer.hpp>                 // scratch
#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/state.hpp>                  // hash_bytes
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/schedule/lane.hpp>               // lane
#include <tutti/sequence/attention_options.hpp>  // options
#include <tutti/sequence/block_attention.hpp>    // forward_block, backward_block
#include <tutti/sequence/detail/ring_share.hpp>  // ring_share
#include <tutti/sequence/token_operations.hpp>   // merge
#include <tutti/sequence/validate.hpp>           // validate_rings

namespace tutti::sequence {

namespace detail {

template <comm::can_exchange C, block_attention Block>
requires std::same_as<typename Block::queue_type, queue_of<C>>
class attention_engine {
protected:
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using T = typename Block::element_type;
    using P = accumulator_t<T>;
    using transfers = std::vector<comm::transfer<M>>;
    static constexpr bool rounds_results = !std::same_as<T, P>;
    static constexpr bool finishes = rounds_results && final_attention<Block>;
    template <class U> using tensor = token_view<U, M>;

    attention_engine(C comm, attention_heads heads, attention_options options, Block block)
        : queue_(comm.queue())
        , heads_(heads)
        , rule_(options.rule)
        , scale_(options.scale ? *options.scale
                               : 1 / std::sqrt(static_cast<double>(std::max<std::size_t>(heads.width, 1))))
        , block_(std::move(block))
        , partial_(queue_, 0)
        , deltas_(queue_, 0)
        , out_sums_(queue_, 0)
        , query_sums_(queue_, 0)
        , key_sums_(queue_, 0)
        , value_sums_(queue_, 0)
        , alone_sums_(queue_, 0)
        , comm_(std::move(comm))
        , lane_(comm_.duplicate("attention"), {options.timeout, options.trace, -1, "main"}) {}

public:
    attention_engine(attention_engine&&) = default;
    attention_engine& operator=(attention_engine&&) = delete;  // its communicator must not end before its lane

    using element_type = T;
    using partial_type = P;
    using queue_type = Q;
    using memory_type = M;

    /// Rows of this rank: tokens of its pieces.
    [[nodiscard]] std::size_t tokens() const noexcept { return tokens_; }
    [[nodiscard]] attention_heads heads() const noexcept { return heads_; }
    /// For what else all ranks send, between calls and in the same queue's order.
    [[nodiscard]] C& communicator() noexcept { return comm_; }

protected:
    /// Agrees, then checks: what is wrong with the plan all ranks find alike. `kind`: of engine.
    void adopt(const placement& p, std::string_view kind) {
        std::uint64_t h = hash_bytes(tutti::as_bytes(view<const char>(kind.data(), kind.size())));
        for (const std::uint64_t word :
             {std::uint64_t{heads_.query}, std::uint64_t{heads_.kv}, std::uint64_t{heads_.width},
              static_cast<std::uint64_t>(rule_), std::bit_cast<std::uint64_t>(scale_),
              static_cast<std::uint64_t>(dtype_of<T>)}) {
            h = tutti::detail::hash_word(h, word);
        }
        comm_.agree(tutti::detail::hash_word(h, hash_of(p)), "the plan of attention");
        if (heads_.query == 0 || heads_.kv == 0 || heads_.width == 0 || heads_.query % heads_.kv != 0) {
            throw usage_error(formatted("attention: {} query heads, {} key and value heads of width {}", heads_.query,
                                        heads_.kv, heads_.width));
        }
        if (p.machines.ranks() != comm_.size()) {
            throw usage_error(formatted("placement: {} nodes of {} ranks, the communicator has {} ranks",
                                        p.machines.nodes, p.machines.ranks_per_node, comm_.size()));
        }
        validate_rings(p);
        shares_ = shares_of(p, comm_.rank());
        rounds_ = 1;
        for (const ring& r : p.rings) { rounds_ = std::max(rounds_, r.ranks.size()); }
        tokens_ = 0;
        shared_ = 0;
        std::size_t longest = 0;
        for (const ring_share& s : shares_) {
            tokens_ += s.mine.tokens();
            if (s.members() > 1) { shared_ = tokens_; }  // rings of one rank are behind the others
            for (const std::size_t other : {s.before(1), s.before(s.members() - 1)}) {
                if (other != s.place) { longest = std::max(longest, pair_of(s, other).queries); }
            }
        }
        reserve(partial_, longest * heads_.query * (heads_.width + 1));
        planned_ = true;
    }

    void expect_forward(const tensor<const T>& query, const tensor<const T>& key, const tensor<const T>& value,
                        const tensor<const T>& out, const tensor<const P>& log_sum_exp) {
        expect_rows("query", query, heads_.query, heads_.width);
        expect_rows("key", key, heads_.kv, heads_.width);
        expect_rows("value", value, heads_.kv, heads_.width);
        expect_rows("out", out, heads_.query, heads_.width);
        expect_rows("log_sum_exp", log_sum_exp, heads_.query, 1);
    }
    void expect_gradients(const tensor<const T>& d_out, const tensor<const T>& d_query, const tensor<const T>& d_key,
                          const tensor<const T>& d_value) {
        expect_rows("d_out", d_out, heads_.query, heads_.width);
        expect_rows("d_query", d_query, heads_.query, heads_.width);
        expect_rows("d_key", d_key, heads_.kv, heads_.width);
        expect_rows("d_value", d_value, heads_.kv, heads_.width);
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
    /// Where out of the sequences that other ranks have parts of is computed; padding is written at once.
    [[nodiscard]] tensor<P> out_for(const tensor<T>& out, const tensor<P>& log_sum_exp) {
        fill_tokens(queue_, padding_of(out), T{});
        fill_tokens(queue_, padding_of(log_sum_exp), -std::numeric_limits<P>::infinity());
        return memory_for(out.rows(0, shared_), out_sums_);
    }
    void finish(const tensor<P>& sums, const tensor<T>& result) {
        if constexpr (rounds_results) { copy_tokens(queue_, sums, result.rows(0, sums.tokens)); }
    }

    struct backward_rows {
        tensor<const T> query, d_out, out;
        tensor<const P> log_sum_exp, delta;
        tensor<P> d_query;
        [[nodiscard]] backward_rows rows(std::size_t first, std::size_t count) const {
            return {query.rows(first, count),       d_out.rows(first, count), out.rows(first, count),
                    log_sum_exp.rows(first, count), delta.rows(first, count), d_query.rows(first, count)};
        }
    };
    /// d_out * out of this rank's rows.
    [[nodiscard]] tensor<P> deltas_of(const tensor<const T>& d_out, const tensor<const T>& out) {
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

    /// This rank's rows of a sequence attend to those of a member. Its own ones, which come first, give the first
    /// result; what comes of others is merged. The order is fixed: so are the bits.
    void attend(const ring_share& s, const tensor<const T>& query, std::size_t member, const block_rows<const T>& block,
                const tensor<P>& out, const tensor<P>& log_sum_exp) {
        const block_pair b = pair_of(s, member);
        if (b.queries == 0 || b.keys == 0) { return; }
        const std::size_t row = s.first_row + b.first_query;
        const tensor<P> all_out = out.rows(row, b.queries);
        const tensor<P> all_sums = log_sum_exp.rows(row, b.queries);
        const std::size_t numbers = b.queries * heads_.query;
        const bool first = member == s.place;
        const tensor<P> part = first ? all_out : tensor<P>(partial_.view(), b.queries, heads_.query, heads_.width);
        const tensor<P> sums =
            first ? all_sums
                  : numbers_by_head(partial_.view().sub(numbers * heads_.width, numbers), b.queries, heads_.query);
        block_.forward(queue_, forward_block<T, M>{query.rows(row, b.queries), block.key.rows(0, b.keys),
                                                   block.value.rows(0, b.keys), b.seen, scale_, part, sums});
        if (!first) { run(queue_, merge_operation<P, M>{part, sums, all_out, all_sums}); }
    }
    /// What this rank's rows of a sequence have to do with those of a member: written to the gradients of the member's
    /// rows, and, of its own rows, which come first, to theirs; then added to theirs.
    void differentiate(const ring_share& s, const backward_rows& from, std::size_t member,
                       const block_rows<const T>& block, const block_rows<P>& gradients) {
        const block_pair b = pair_of(s, member);
        const bool empty = b.queries == 0 || b.keys == 0;
        const bool first = member == s.place;
        const std::size_t written = starts_gradients<Block> && !empty ? b.keys : 0;
        const auto fill_rest = [&](const tensor<P>& g) {
            fill_tokens(queue_, g.rows(written, g.tokens - written), P{0});
        };
        fill_rest(gradients.key);
        fill_rest(gradients.value);
        if (first && (!starts_gradients<Block> || empty)) { fill_tokens(queue_, s.rows_of(from.d_query), P{0}); }
        if (empty) { return; }
        const backward_rows part = from.rows(s.first_row + b.first_query, b.queries);
        block_.backward(queue_,
                        backward_block<T, M>{part.query, block.key.rows(0, b.keys), block.value.rows(0, b.keys), b.seen,
                                             scale_, part.d_out, part.out, part.log_sum_exp, part.delta, part.d_query,
                                             gradients.key.rows(0, b.keys), gradients.value.rows(0, b.keys),
                                             starts_gradients<Block> && first, starts_gradients<Block>});
    }

    /// A sequence that no other rank has a part of: nothing is merged, so results are final.
    void attend_alone(const ring_share& s, const tensor<const T>& query, const tensor<const T>& key,
                      const tensor<const T>& value, const tensor<T>& out, const tensor<P>& log_sum_exp) {
        if (s.mine.tokens() == 0) { return; }
        const visibility seen{rule_, 0, 0};
        if constexpr (finishes) {
            block_.forward(queue_, final_forward_block<T, M>{s.rows_of(query), s.rows_of(key), s.rows_of(value), seen,
                                                             scale_, s.rows_of(out), s.rows_of(log_sum_exp)});
        } else {
            const tensor<P> sums = memory_for(s.rows_of(out), alone_sums_);
            block_.forward(queue_, forward_block<T, M>{s.rows_of(query), s.rows_of(key), s.rows_of(value), seen, scale_,
                                                       sums, s.rows_of(log_sum_exp)});
            finish(sums, s.rows_of(out));
        }
    }
    struct gradient_tensors {
        tensor<T> query, key, value;
    };
    void differentiate_alone(const ring_share& s, const backward_rows& from, const tensor<const T>& key,
                             const tensor<const T>& value, const gradient_tensors& to) {
        if (s.mine.tokens() == 0) { return; }
        const visibility seen{rule_, 0, 0};
        const tensor<T> d_query = s.rows_of(to.query), d_key = s.rows_of(to.key), d_value = s.rows_of(to.value);
        const backward_rows part = from.rows(s.first_row, s.mine.tokens());
        if constexpr (finishes) {
            block_.backward(queue_, final_backward_block<T, M>{part.query, s.rows_of(key), s.rows_of(value), seen,
                                                               scale_, part.d_out, part.out, part.log_sum_exp,
                                                               part.delta, d_query, d_key, d_value});
        } else {
            const tensor<P> query_sums = zeros_for(d_query, alone_sums_);
            const tensor<P> key_sums = zeros_for(d_key, key_sums_);
            const tensor<P> value_sums = zeros_for(d_value, value_sums_);
            block_.backward(queue_, backward_block<T, M>{part.query, s.rows_of(key), s.rows_of(value), seen, scale_,
                                                         part.d_out, part.out, part.log_sum_exp, part.delta, query_sums,
                                                         key_sums, value_sums});
            finish(query_sums, d_query);
            finish(key_sums, d_key);
            finish(value_sums, d_value);
        }
    }

    /// Backward of what travels by itself: checks, then work(rows, to), which adds to rows.d_query and writes the rest of
    /// `to`, then rounds.
    template <class Work>
    void backward_around(const tensor<const T>& d_out, const tensor<const T>& query, const tensor<const T>& key,
                         const tensor<const T>& value, const tensor<const T>& out, const tensor<const P>& log_sum_exp,
                         const gradient_tensors& to, Work work) {
        expect_forward(query, key, value, out, log_sum_exp);
        expect_gradients(d_out, to.query, to.key, to.value);
        fill_tokens(queue_, padding_of(to.query), T{});
        fill_tokens(queue_, padding_of(to.key), T{});
        fill_tokens(queue_, padding_of(to.value), T{});
        const backward_rows rows{
            query, d_out, out, log_sum_exp, deltas_of(d_out, out), memory_for(to.query.rows(0, shared_), query_sums_)};
        work(rows, to);
        finish(rows.d_query, to.query);
    }

    /// Messages as one grouped call on the lane, behind what the queue has got.
    [[nodiscard]] schedule::ticket<Q> carry(std::string_view name, transfers messages) {
        return lane_.submit(
            name,
            [messages = std::move(messages)](C& comm) { comm.exchange(std::span<const comm::transfer<M>>(messages)); },
            queue_);
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
    bool planned_ = false;
    std::vector<ring_share> shares_;
    std::size_t rounds_ = 1;  // members of the largest ring of all ranks
    std::size_t tokens_ = 0;
    std::size_t shared_ = 0;  // rows of sequences that other ranks have parts of: the first ones
    buffer<P, Q> partial_, deltas_, out_sums_, query_sums_, key_sums_, value_sums_, alone_sums_;
    C comm_;

private:
    // A tensor of this rank. The other ranks are about to wait for this one, so a wrong one ends them too.
    template <class U>
    void expect_rows(std::string_view name, const tensor<U>& v, std::size_t heads, std::size_t width) {
        std::string why;
        if (!planned_) {
            why = "attention: no plan";
        } else if (v.tokens < tokens_ || v.heads != heads || v.width != width) {
            why = formatted("attention: {} is {} x {} x {}, expected {} x {} x {}", name, v.tokens, v.heads, v.width,
                            tokens_, heads, width);
        } else {
            return;
        }
        comm_.abort(why);
        throw usage_error(why);
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

protected:
    schedule::lane<C> lane_;  // nothing is in flight outside of forward and backward, which wait for their tickets
};

}  // namespace detail
}  // namespace tutti::sequence
