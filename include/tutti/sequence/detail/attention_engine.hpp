// attention_engine: what every way to share the attention of a placement has in common: the plan that ranks agree on,
// checks of what is passed in, and a lane.
// Needs sequence/detail/attention_blocks, sequence/validate and schedule/lane.
#pragma once

#include <algorithm>    // max
#include <bit>          // bit_cast of the scale
#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <span>         // messages
#include <string>       // texts
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // messages

#include <tutti/comm/communicator.hpp>                 // can_exchange
#include <tutti/comm/connect.hpp>                      // connect_all
#include <tutti/core/error.hpp>                        // usage_error
#include <tutti/core/state.hpp>                        // hash_bytes
#include <tutti/core/text.hpp>                         // formatted
#include <tutti/schedule/lane.hpp>                     // lane
#include <tutti/sequence/attention_options.hpp>        // options
#include <tutti/sequence/block_attention.hpp>          // block_attention
#include <tutti/sequence/detail/attention_blocks.hpp>  // what it computes
#include <tutti/sequence/detail/ring_share.hpp>        // shares_of
#include <tutti/sequence/placement.hpp>                // placement
#include <tutti/sequence/validate.hpp>                 // validate_rings

namespace tutti::sequence {

namespace detail {

template <comm::can_exchange C, block_attention Block>
requires std::same_as<typename Block::queue_type, queue_of<C>>
class attention_engine : protected attention_blocks<Block> {
protected:
    using base = attention_blocks<Block>;
    using typename base::M;
    using typename base::P;
    using typename base::Q;
    using typename base::T;
    using transfers = std::vector<comm::transfer<M>>;
    template <class U> using tensor = token_view<U, M>;

    attention_engine(C comm, attention_heads heads, attention_options options, Block block)
        : base(comm.queue(), heads, options, std::move(block))
        , comm_(std::move(comm))
        , lane_(comm_.duplicate("attention"), {options.timeout, options.trace, options.trace_rank, "main"}) {}

public:
    attention_engine(attention_engine&&) = default;
    attention_engine& operator=(attention_engine&&) = delete;  // its communicator must not end before its lane

    using element_type = T;
    using partial_type = P;
    using queue_type = Q;
    using memory_type = M;

    /// Rows of this rank: tokens of its pieces.
    [[nodiscard]] std::size_t tokens() const noexcept { return this->tokens_; }
    [[nodiscard]] attention_heads heads() const noexcept { return this->heads_; }
    /// For what else all ranks send, between calls and in the same queue's order.
    [[nodiscard]] C& communicator() noexcept { return comm_; }
    /// Connects all pairs of ranks, on this communicator and on the lane's. Collective, ordered on the queue.
    void connect() {
        comm::connect_all(comm_);
        const auto connect_lane = [](C& comm) { comm::connect_all(comm); };
        lane_.submit("connect", connect_lane, this->queue_).wait(this->queue_);
    }

protected:
    /// Agrees, then checks: what is wrong with the plan all ranks find alike. `kind`: of engine.
    void adopt(const placement& p, std::string_view kind) {
        std::uint64_t h = hash_bytes(tutti::as_bytes(view<const char>(kind.data(), kind.size())));
        for (const std::uint64_t word :
             {std::uint64_t{this->heads_.query}, std::uint64_t{this->heads_.kv}, std::uint64_t{this->heads_.width},
              static_cast<std::uint64_t>(this->rule_), std::bit_cast<std::uint64_t>(this->scale_),
              static_cast<std::uint64_t>(dtype_of<T>)}) {
            h = tutti::detail::hash_word(h, word);
        }
        comm_.agree(tutti::detail::hash_word(h, hash_of(p)), "the plan of attention");
        if (this->heads_.query == 0 || this->heads_.kv == 0 || this->heads_.width == 0 ||
            this->heads_.query % this->heads_.kv != 0) {
            throw usage_error(formatted("attention: {} query heads, {} key and value heads of width {}",
                                        this->heads_.query, this->heads_.kv, this->heads_.width));
        }
        if (p.machines.ranks() != comm_.size()) {
            throw usage_error(formatted("placement: {} nodes of {} ranks, the communicator has {} ranks",
                                        p.machines.nodes, p.machines.ranks_per_node, comm_.size()));
        }
        validate_rings(p);
        this->take(shares_of(p, comm_.rank()));
        rounds_ = 1;
        for (const ring& r : p.rings) { rounds_ = std::max(rounds_, r.ranks.size()); }
        planned_ = true;
    }

    void expect_forward(const tensor<const T>& query, const tensor<const T>& key, const tensor<const T>& value,
                        const tensor<const T>& out, const tensor<const P>& log_sum_exp) {
        expect_rows("query", query, this->heads_.query, this->heads_.width);
        expect_rows("key", key, this->heads_.kv, this->heads_.width);
        expect_rows("value", value, this->heads_.kv, this->heads_.width);
        expect_rows("out", out, this->heads_.query, this->heads_.width);
        expect_rows("log_sum_exp", log_sum_exp, this->heads_.query, 1);
    }
    void expect_gradients(const tensor<const T>& d_out, const tensor<const T>& d_query, const tensor<const T>& d_key,
                          const tensor<const T>& d_value) {
        expect_rows("d_out", d_out, this->heads_.query, this->heads_.width);
        expect_rows("d_query", d_query, this->heads_.query, this->heads_.width);
        expect_rows("d_key", d_key, this->heads_.kv, this->heads_.width);
        expect_rows("d_value", d_value, this->heads_.kv, this->heads_.width);
    }

    /// Backward of what travels by itself: checks, then as differentiate_around.
    template <class Work>
    void backward_around(const tensor<const T>& d_out, const tensor<const T>& query, const tensor<const T>& key,
                         const tensor<const T>& value, const tensor<const T>& out, const tensor<const P>& log_sum_exp,
                         const typename base::gradient_tensors& to, Work work) {
        expect_forward(query, key, value, out, log_sum_exp);
        expect_gradients(d_out, to.query, to.key, to.value);
        this->differentiate_around(d_out, query, out, log_sum_exp, to, std::move(work));
    }

    /// Messages as one grouped call on the lane, behind what the queue has got.
    [[nodiscard]] schedule::ticket<Q> carry(std::string_view name, transfers messages) {
        return lane_.submit(
            name,
            [messages = std::move(messages)](C& comm) { comm.exchange(std::span<const comm::transfer<M>>(messages)); },
            this->queue_);
    }

    C comm_;
    std::size_t rounds_ = 1;  // members of the largest ring of all ranks
    bool planned_ = false;

private:
    // A tensor of this rank. The other ranks are about to wait for this one, so a wrong one ends them too.
    template <class U>
    void expect_rows(std::string_view name, const tensor<U>& v, std::size_t heads, std::size_t width) {
        std::string why;
        if (!planned_) {
            why = "attention: no plan";
        } else if (v.tokens < this->tokens_ || v.heads != heads || v.width != width) {
            why = formatted("attention: {} is {} x {} x {}, expected {} x {} x {}", name, v.tokens, v.heads, v.width,
                            this->tokens_, heads, width);
        } else {
            return;
        }
        comm_.abort(why);
        throw usage_error(why);
    }

protected:
    schedule::lane<C> lane_;  // nothing is in flight outside of forward and backward, which wait for their tickets
};

}  // namespace detail
}  // namespace tutti::sequence
