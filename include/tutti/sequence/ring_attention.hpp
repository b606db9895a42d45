// ring_attention: attention of sequences that are spread over rings of ranks: keys and values travel, queries stay.
// Needs sequence/placement and sequence/block_attention, comm point-to-point, schedule/lane.
// Source: Liu, Zaharia, Abbeel 2023, arXiv:2310.01889; chunks paired for causal balance as in Zeppelin, arXiv:2509.21841.
#pragma once

#include <algorithm>    // max
#include <array>        // two of each buffer
#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <memory>       // an exchange that the lane shares
#include <span>         // messages
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // places in buffers

#include <tutti/comm/communicator.hpp>                 // can_exchange
#include <tutti/core/buffer.hpp>                       // storage
#include <tutti/schedule/ticket.hpp>                   // messages in flight
#include <tutti/sequence/attention_options.hpp>        // options
#include <tutti/sequence/block_attention.hpp>          // kernels
#include <tutti/sequence/detail/attention_engine.hpp>  // attention_engine
#include <tutti/sequence/flow.hpp>                     // flow
#include <tutti/sequence/placement.hpp>                // placement
#include <tutti/sequence/round_exchange.hpp>           // direct_exchange
#include <tutti/sequence/token_operations.hpp>         // fill, add

namespace tutti::sequence {

/// Attention over the rings of a placement, any number of them a rank.
///
/// Semantics    plan: collective, once a placement. forward and backward: all ranks, in the same order; backward takes
///              what forward got and gave. In step t a member of a ring of G has the keys and values of the member t
///              places before it, and passes them on while it attends to them. In backward the gradients of keys and
///              values travel behind them, a step later: they start with the part of step 1, and are home, where the
///              member's own part is, after G - 1 hops.
/// Rounds       in round t one grouped call carries what all rings of a rank, of all zones, have to pass on; ranks that
///              have nothing call it too, so an Exchange may let them help. All ranks run the rounds in the same order
///              and the rings of a round in the placement's (world, node, local), so no two can wait for each other.
///              Sequences of one rank fill the rounds: each round of forward computes its share of them while messages
///              travel, and the last of backward, in which gradients come home, all of them. A half of what a rank has
///              to do with its own keys waits for that round too: of rings, and of the heads of one of them.
/// Shapes       query, out, d_out, d_query: tokens() x query heads x width; key, value, d_key, d_value: kv heads;
///              log_sum_exp: query heads of width 1. Rows in the order of the placement's pieces. A tensor may have
///              more rows: they are padding, which is not read, and 0 (log_sum_exp: -inf) in what is written.
/// Aliasing     what is written overlaps nothing else.
/// Determinism  partial results are merged in the order of steps t = 0 ... G - 1, gradients of keys and values summed in
///              that of 1 ... G - 1, then 0: the bits depend on data and placement, not on timing.
/// Cost         a rank of a ring over s tokens sends, of kappa = 2 kv heads * width * sizeof(T) bytes a token: all
///              tokens but those of the next rank forward, and backward; gradients of 2 kv heads * width * sizeof(P)
///              bytes for all but its own, P = accumulator_t<T>, but of the first G - 1 hops the first of sizeof(T) where
///              the kernel rounds blocks. Memory: two blocks of keys and values of the largest member of each ring,
///              backward also three of their gradients in P; where the kernel rounds blocks, two in T, and in rings of
///              more than two ranks another and two in P.
/// Errors       mismatch_error from plan when ranks have different plans or options; usage_error from plan, on all
///              ranks, for a placement that is none, and from forward and backward, before anything moved, for shapes
///              that do not fit: those abort the communicator, since the other ranks would wait.
template <comm::can_exchange C, block_attention Block, round_exchange<C> Exchange = direct_exchange>
class ring_attention : public detail::attention_engine<C, Block> {
    using base = detail::attention_engine<C, Block>;
    using typename base::M;
    using typename base::P;
    using typename base::Q;
    using typename base::R;
    using typename base::T;
    using typename base::transfers;
    template <class U> using tensor = token_view<U, M>;

    // Where the block of a ring is in each buffer, in tokens; rings of one rank have none.
    std::vector<std::size_t> first_;
    std::size_t traveling_ = 0;              // tokens of all blocks
    std::array<buffer<T, Q>, 2> blocks_;     // keys and values
    std::array<buffer<P, Q>, 2> gradients_;  // of keys and values, as they travel
    std::array<buffer<R, Q>, 2> first_hop_;  // the same, of one step alone, where that is not P
    buffer<R, Q> contribution_;              // to them, of this rank in one step
    std::shared_ptr<const Exchange> exchange_;

public:
    explicit ring_attention(C comm, attention_heads heads, attention_options options = {}, Block block = {},
                            Exchange exchange = {})
        : base(std::move(comm), heads, options, std::move(block))
        , blocks_{empty<T>(), empty<T>()}
        , gradients_{empty<P>(), empty<P>()}
        , first_hop_{empty<R>(), empty<R>()}
        , contribution_(empty<R>())
        , exchange_(std::make_shared<const Exchange>(std::move(exchange))) {}

    /// All messages of all ranks, by grouped call: those of forward, then those of backward.
    [[nodiscard]] static std::vector<std::vector<flow>> calls_of(const placement& p, attention_heads heads) {
        const std::size_t numbers = 2 * heads.kv * heads.width;
        std::size_t rounds = 1;
        for (const ring& r : p.rings) { rounds = std::max(rounds, r.ranks.size()); }
        std::vector<std::vector<flow>> calls(rounds == 1 ? 0 : 2 * rounds);
        for (const ring& r : p.rings) {
            const std::size_t members = r.ranks.size();
            const auto pass = [&](std::vector<flow>& call, std::size_t steps, std::size_t bytes_a_token) {
                for (std::size_t i = 0; i < members; ++i) {
                    const detail::member_tokens block(p.lengths[static_cast<std::size_t>(r.sequence)], members,
                                                      (i + members - steps) % members);
                    if (block.tokens() == 0) { continue; }
                    call.push_back({r.ranks[i], r.ranks[(i + 1) % members], block.tokens() * bytes_a_token});
                }
            };
            for (std::size_t t = 0; members > 1 && t <= members; ++t) {
                if (t + 1 < members) {
                    pass(calls[t], t, numbers * sizeof(T));
                    pass(calls[rounds - 1 + t], t, numbers * sizeof(T));
                }
                if (t > 1) { pass(calls[rounds - 1 + t], t - 1, numbers * (t == 2 ? sizeof(R) : sizeof(P))); }
            }
        }
        return calls;
    }

    /// As it was planned last.
    [[nodiscard]] const Exchange& exchange() const noexcept { return *exchange_; }

    void plan(const placement& p) {
        this->adopt(p, "ring");
        first_.clear();
        traveling_ = 0;
        for (const auto& s : this->shares_) {
            first_.push_back(traveling_);
            if (s.members() > 1) { traveling_ += s.widest(); }
        }
        if constexpr (!std::same_as<Exchange, direct_exchange>) {
            exchange_ =
                std::make_shared<const Exchange>(exchange_->planned(calls_of(p, this->heads_), this->comm_.rank()));
        }
    }

    void forward(tensor<const T> query, tensor<const T> key, tensor<const T> value, tensor<T> out,
                 tensor<P> log_sum_exp) {
        this->expect_forward(query, key, value, out, log_sum_exp);
        const tensor<P> sums = this->out_for(out, log_sum_exp);
        load(key, value);
        std::size_t done = this->first_alone_;
        for (std::size_t t = 0; t < this->rounds_; ++t) {
            const schedule::ticket<Q> moved = pass_blocks(t);
            for (std::size_t i = 0; i < this->shares_.size(); ++i) {
                const auto& s = this->shares_[i];
                if (s.members() == 1 || t >= s.members()) { continue; }
                if (t == 0) {
                    this->attend_own(s, query, key, value, out, sums, log_sum_exp);
                } else {
                    this->attend(s, t, query, block_of(blocks_[t % 2].view(), i, s.of(s.before(t)).tokens()), out, sums,
                                 log_sum_exp);
                }
            }
            if (const std::size_t until = this->alone_until(t); done < until) {
                this->attend_alone(done, until - done, query, key, value, out, log_sum_exp);
                done = until;
            }
            moved.wait(this->queue_);
        }
        this->finish_shared(sums, out);
    }

    void backward(tensor<const T> d_out, tensor<const T> query, tensor<const T> key, tensor<const T> value,
                  tensor<const T> out, tensor<const P> log_sum_exp, tensor<T> d_query, tensor<T> d_key,
                  tensor<T> d_value) {
        this->backward_around(
            d_out, query, key, value, out, log_sum_exp, {d_query, d_key, d_value},
            [&](const typename base::backward_rows& rows, const typename base::gradient_tensors& to,
                const own_rows& own) {
                load(key, value);
                reserve_gradients();
                const auto each_ring = [&](auto f) {
                    for (std::size_t i = 0; i < this->shares_.size(); ++i) {
                        if (this->shares_[i].members() > 1) { f(i, this->shares_[i]); }
                    }
                };
                // One round more than steps: in the last the sums of gradients come home. Those of other rings, if any,
                // are behind that of this rank's.
                const std::size_t last = this->own_rounds_ > 1 ? this->own_rounds_ : 0;
                for (std::size_t t = 0; t < this->rounds_ + (this->rounds_ > 1 ? 1 : 0); ++t) {
                    const schedule::ticket<Q> moved = pass_blocks_and_gradients(t);
                    each_ring([&](std::size_t i, const detail::ring_share& s) {
                        if (t == 0) {
                            this->differentiate_own(s, rows, key, value, to, own, this->early_heads_[i], false);
                        } else if (t < s.members()) {
                            const std::size_t count = s.of(s.before(t)).tokens();
                            this->differentiate(s, t, rows, block_of(blocks_[t % 2].view(), i, count),
                                                block_of(part_of(t).view(), i, count));
                        } else if (t == s.members()) {
                            this->differentiate_own(s, rows, key, value, to, own, this->early_heads_[i], true);
                        }
                    });
                    if (t == last) {
                        const std::size_t alone = this->first_alone_;
                        this->differentiate_alone(alone, this->shares_.size() - alone, rows, key, value, to);
                    }
                    moved.wait(this->queue_);
                    each_ring([&](std::size_t i, const detail::ring_share& s) { take_gradients(t, i, s, own, to); });
                }
            });
    }

private:
    template <class U> [[nodiscard]] buffer<U, Q> empty() const { return buffer<U, Q>(this->queue_, 0); }
    template <class U> [[nodiscard]] view<U, M> flat(view<U, M> memory, std::size_t i, std::size_t count) const {
        return this->block_memory(memory, first_[i], count);
    }
    template <class U> [[nodiscard]] auto block_of(view<U, M> memory, std::size_t i, std::size_t count) const {
        return this->block_at(memory, first_[i], count);
    }

    using own_rows = typename base::template block_rows<R>;

    // What step t adds to the gradients of keys and values. Those of step 1 are the first that travel.
    [[nodiscard]] const buffer<R, Q>& part_of(std::size_t t) const { return t == 1 ? first_hop(1) : contribution_; }
    [[nodiscard]] const buffer<R, Q>& first_hop(std::size_t t) const {
        if constexpr (std::same_as<R, P>) {
            return gradients_[t % 2];
        } else {
            return first_hop_[t % 2];
        }
    }
    void reserve_gradients() {
        const std::size_t numbers = traveling_ * this->block_width();
        const bool several = this->own_rounds_ > 2;  // steps whose parts are summed
        const auto reserve_two = [&](auto& two) {
            for (auto& gradients : two) { this->reserve(gradients, numbers); }
        };
        if constexpr (!std::same_as<R, P>) { reserve_two(first_hop_); }
        if (std::same_as<R, P> || several) { reserve_two(gradients_); }
        if (several) { this->reserve(contribution_, numbers); }
    }
    // Behind round t: sums that have arrived get the part of this rank's step; at home, its own part.
    void take_gradients(std::size_t t, std::size_t i, const detail::ring_share& s, const own_rows& own,
                        const typename base::gradient_tensors& to) {
        if (t < 2 || t > s.members()) { return; }
        const std::size_t count = s.of(s.before(t)).tokens();
        const auto add = [&](const auto& arrived) {
            if (t < s.members()) {
                const auto part = block_of(part_of(t).view(), i, count);
                const auto sums = block_of(gradients_[t % 2].view(), i, count);
                sum_tokens(this->queue_, arrived.key, part.key, sums.key);
                sum_tokens(this->queue_, arrived.value, part.value, sums.value);
            } else {
                sum_tokens(this->queue_, arrived.key, s.rows_of(own.key), s.rows_of(to.key));
                sum_tokens(this->queue_, arrived.value, s.rows_of(own.value), s.rows_of(to.value));
            }
        };
        t == 2 ? add(block_of(first_hop(t).view(), i, count)) : add(block_of(gradients_[t % 2].view(), i, count));
    }

    // This rank's keys and values, packed for their first step.
    void load(const tensor<const T>& key, const tensor<const T>& value) {
        for (auto& b : blocks_) { this->reserve(b, traveling_ * this->block_width()); }
        for (std::size_t i = 0; i < this->shares_.size(); ++i) {
            const auto& s = this->shares_[i];
            if (s.members() > 1) { this->pack(s, key, value, block_of(blocks_[0].view(), i, s.mine.tokens())); }
        }
    }

    // Round t of forward, and of backward; nothing where no rank has messages.
    [[nodiscard]] schedule::ticket<Q> pass_blocks(std::size_t t) {
        if (t + 1 >= this->rounds_) { return {}; }
        transfers messages;
        for (std::size_t i = 0; i < this->shares_.size(); ++i) { pass_block(messages, i, t); }
        return carry("keys and values", t, std::move(messages));
    }
    [[nodiscard]] schedule::ticket<Q> pass_blocks_and_gradients(std::size_t t) {
        if (this->rounds_ == 1 || (t == 1 && this->rounds_ == 2)) { return {}; }
        transfers messages;
        for (std::size_t i = 0; i < this->shares_.size(); ++i) {
            pass_block(messages, i, t);
            pass_gradients(messages, i, t);
        }
        return carry("keys, values and gradients", this->rounds_ - 1 + t, std::move(messages));
    }
    [[nodiscard]] schedule::ticket<Q> carry(std::string_view name, std::size_t number, transfers messages) {
        return this->lane_.submit(
            name,
            [messages = std::move(messages), exchange = exchange_, number](C& comm) {
                exchange->exchange(comm, number, std::span<const comm::transfer<M>>(messages));
            },
            this->queue_);
    }

    // Both ends know how many tokens a message is of; one of none is not sent.
    template <class U>
    void pass(transfers& messages, std::size_t i, std::size_t steps, view<U, M> from, view<U, M> into) const {
        const auto& s = this->shares_[i];
        const std::size_t given = s.of(s.before(steps)).tokens();
        const std::size_t taken = s.of(s.before(steps + 1)).tokens();
        if (given != 0) { messages.push_back(comm::send_to(s.next(), flat(from, i, given))); }
        if (taken != 0) { messages.push_back(comm::receive_from(s.previous(), flat(into, i, taken))); }
    }
    // Round t: the block of step t goes on, that of step t + 1 arrives.
    void pass_block(transfers& messages, std::size_t i, std::size_t t) const {
        if (t + 1 >= this->shares_[i].members()) { return; }
        pass(messages, i, t, blocks_[t % 2].view(), blocks_[(t + 1) % 2].view());
    }
    // Round t: the sums of gradients of the block of step t - 1 go on, those of step t arrive.
    void pass_gradients(transfers& messages, std::size_t i, std::size_t t) const {
        if (t < 2 || t > this->shares_[i].members()) { return; }
        if (t == 2) {
            pass(messages, i, t - 1, first_hop(t - 1).view(), first_hop(t).view());
        } else {
            pass(messages, i, t - 1, gradients_[(t - 1) % 2].view(), gradients_[t % 2].view());
        }
    }
};

}  // namespace tutti::sequence
