// gather_attention: attention of sequences that are spread over ranks: every rank gets all keys and values at once.
// Needs what ring_attention does. Source: Llama team 2024, arXiv:2407.21783, section 3.3.2.
#pragma once

#include <cstddef>  // size_t
#include <utility>  // move
#include <vector>   // places in buffers

#include <tutti/comm/communicator.hpp>                 // can_exchange
#include <tutti/core/buffer.hpp>                       // storage
#include <tutti/schedule/ticket.hpp>                   // messages in flight
#include <tutti/sequence/attention_options.hpp>        // options
#include <tutti/sequence/block_attention.hpp>          // kernels
#include <tutti/sequence/detail/attention_engine.hpp>  // attention_engine
#include <tutti/sequence/placement.hpp>                // placement
#include <tutti/sequence/token_operations.hpp>         // fill, add

namespace tutti::sequence {

/// Attention over the rings of a placement, of which it takes the members alone: keys and values are gathered in one
/// grouped call, gradients of them return in another.
///
/// Semantics    as ring_attention. A rank attends to its own keys, and computes the sequences that it has alone, while
///              the others arrive. Fewer and larger messages than a ring's, for memory that grows with whole sequences.
/// Shapes, Aliasing, Errors  as ring_attention.
/// Determinism  attends, merges and sums in the order of the ring's steps: the same bits as ring_attention.
/// Cost         a rank of G on one sequence of s tokens, of which n are its own, sends (G - 1) n blocks of kappa bytes
///              forward, as many and s - n gradients backward, in P, or in T where the kernel rounds blocks. Memory: keys
///              and values of all tokens of its sequences, backward also their gradients and G - 1 times those of its own,
///              and the sums of these in P.
template <comm::can_exchange C, block_attention Block>
class gather_attention : public detail::attention_engine<C, Block> {
    using base = detail::attention_engine<C, Block>;
    using typename base::M;
    using typename base::P;
    using typename base::Q;
    using typename base::R;
    using typename base::T;
    using typename base::transfers;
    template <class U> using tensor = token_view<U, M>;

    std::vector<std::vector<std::size_t>> first_;  // share -> member -> token of its block in the buffers
    std::vector<std::size_t> first_returned_;      // share -> token of the gradients that return to it
    std::size_t gathered_ = 0;
    std::size_t returned_ = 0;
    buffer<T, Q> blocks_;
    buffer<R, Q> gradients_, returns_;
    buffer<P, Q> sums_;  // of what returns

public:
    explicit gather_attention(C comm, attention_heads heads, attention_options options = {}, Block block = {})
        : base(std::move(comm), heads, options, std::move(block))
        , blocks_(this->queue_, 0)
        , gradients_(this->queue_, 0)
        , returns_(this->queue_, 0)
        , sums_(this->queue_, 0) {}

    void plan(const placement& p) {
        this->adopt(p, "gather");
        first_.clear();
        first_returned_.clear();
        gathered_ = 0;
        returned_ = 0;
        for (const auto& s : this->shares_) {
            first_.emplace_back();
            for (std::size_t j = 0; s.members() > 1 && j < s.members(); ++j) {
                first_.back().push_back(gathered_);
                gathered_ += s.of(j).tokens();
            }
            first_returned_.push_back(returned_);
            returned_ += (s.members() - 1) * s.mine.tokens();
        }
    }

    void forward(tensor<const T> query, tensor<const T> key, tensor<const T> value, tensor<T> out,
                 tensor<P> log_sum_exp) {
        this->expect_forward(query, key, value, out, log_sum_exp);
        const tensor<P> sums = this->out_for(out, log_sum_exp);
        const schedule::ticket<Q> gathered = gather(key, value);
        for_each_step(
            gathered,
            [&](std::size_t i) { this->attend_own(this->shares_[i], query, key, value, out, sums, log_sum_exp); },
            [&](std::size_t i, std::size_t t) {
                const auto& s = this->shares_[i];
                this->attend(s, t, query, block_of(blocks_.view(), i, s.before(t)), out, sums, log_sum_exp);
            },
            [&](std::size_t first, std::size_t count) {
                this->attend_alone(first, count, query, key, value, out, log_sum_exp);
            });
        this->finish_shared(sums, out);
    }

    void backward(tensor<const T> d_out, tensor<const T> query, tensor<const T> key, tensor<const T> value,
                  tensor<const T> out, tensor<const P> log_sum_exp, tensor<T> d_query, tensor<T> d_key,
                  tensor<T> d_value) {
        this->backward_around(d_out, query, key, value, out, log_sum_exp, {d_query, d_key, d_value},
                              [&](const typename base::backward_rows& rows, const typename base::gradient_tensors& to,
                                  const own_rows& own) {
                                  this->reserve(gradients_, gathered_ * this->block_width());
                                  this->reserve(returns_, returned_ * this->block_width());
                                  const schedule::ticket<Q> gathered = gather(key, value);
                                  for_each_step(
                                      gathered,
                                      [&](std::size_t i) {
                                          this->differentiate_own(this->shares_[i], rows, key, value, to, own,
                                                                  this->early_heads_[i], false);
                                      },
                                      [&](std::size_t i, std::size_t t) {
                                          const auto& s = this->shares_[i];
                                          this->differentiate(s, t, rows, block_of(blocks_.view(), i, s.before(t)),
                                                              block_of(gradients_.view(), i, s.before(t)));
                                      },
                                      [&](std::size_t first, std::size_t count) {
                                          this->differentiate_alone(first, count, rows, key, value, to);
                                      });
                                  return_gradients(rows, key, value, own, to);
                              });
    }

private:
    using own_rows = typename base::template block_rows<R>;

    template <class U> [[nodiscard]] view<U, M> flat(view<U, M> memory, std::size_t i, std::size_t j) const {
        return this->block_memory(memory, first_[i][j], this->shares_[i].of(j).tokens());
    }
    template <class U> [[nodiscard]] auto block_of(view<U, M> memory, std::size_t i, std::size_t j) const {
        return this->block_at(memory, first_[i][j], this->shares_[i].of(j).tokens());
    }
    // Gradients of this rank's keys and values by the member `steps` places behind it.
    [[nodiscard]] view<R, M> returned(std::size_t i, std::size_t steps) const {
        const std::size_t tokens = this->shares_[i].mine.tokens();
        return this->block_memory(returns_.view(), first_returned_[i] + (steps - 1) * tokens, tokens);
    }
    // Gradients of what others have, to them; the sums of what is this rank's own.
    // Meanwhile the rest of what it has to do with its own keys.
    void return_gradients(const typename base::backward_rows& rows, const tensor<const T>& key,
                          const tensor<const T>& value, const own_rows& own,
                          const typename base::gradient_tensors& to) {
        transfers messages;
        for_each_other([&](std::size_t i, std::size_t steps, std::size_t there) {
            const auto& s = this->shares_[i];
            send(messages, s.ranks[there], flat(gradients_.view(), i, there));
            receive(messages, s.ranks[there], returned(i, steps));
        });
        const schedule::ticket<Q> home = this->carry("gradients", std::move(messages));
        for (std::size_t i = 0; i < this->shares_.size(); ++i) {
            if (this->shares_[i].members() == 1) { continue; }
            this->differentiate_own(this->shares_[i], rows, key, value, to, own, this->early_heads_[i], true);
        }
        home.wait(this->queue_);
        for (std::size_t i = 0; i < this->shares_.size(); ++i) {
            const auto& s = this->shares_[i];
            if (s.members() == 1) { continue; }
            // The member t places behind this rank had its keys in step t.
            const auto part = [&](std::size_t t) { return this->block_at(returned(i, t), 0, s.mine.tokens()); };
            const auto add_own = [&](const auto& others) {
                sum_tokens(this->queue_, others.key, s.rows_of(own.key), s.rows_of(to.key));
                sum_tokens(this->queue_, others.value, s.rows_of(own.value), s.rows_of(to.value));
            };
            if (s.members() == 2) {
                add_own(part(1));
                continue;
            }
            this->reserve(sums_, s.mine.tokens() * this->block_width());
            const auto sums = this->block_at(sums_.view(), 0, s.mine.tokens());
            sum_tokens(this->queue_, part(1).key, part(2).key, sums.key);
            sum_tokens(this->queue_, part(1).value, part(2).value, sums.value);
            for (std::size_t t = 3; t < s.members(); ++t) {
                add_tokens(this->queue_, part(t).key, sums.key);
                add_tokens(this->queue_, part(t).value, sums.value);
            }
            add_own(sums);
        }
    }
    // f(share, steps, member that many places behind this rank)
    template <class F> void for_each_other(F f) const {
        for (std::size_t i = 0; i < this->shares_.size(); ++i) {
            const auto& s = this->shares_[i];
            for (std::size_t t = 1; t < s.members(); ++t) { f(i, t, (s.place + t) % s.members()); }
        }
    }
    template <class U> static void send(transfers& messages, int rank, view<U, M> data) {
        if (!data.empty()) { messages.push_back(comm::send_to(rank, data)); }
    }
    template <class U> static void receive(transfers& messages, int rank, view<U, M> data) {
        if (!data.empty()) { messages.push_back(comm::receive_from(rank, data)); }
    }

    [[nodiscard]] schedule::ticket<Q> gather(const tensor<const T>& key, const tensor<const T>& value) {
        this->reserve(blocks_, gathered_ * this->block_width());
        transfers messages;
        for (std::size_t i = 0; i < this->shares_.size(); ++i) {
            const auto& s = this->shares_[i];
            if (s.members() > 1) { this->pack(s, key, value, block_of(blocks_.view(), i, s.place)); }
        }
        for_each_other([&](std::size_t i, std::size_t, std::size_t there) {
            const auto& s = this->shares_[i];
            send(messages, s.ranks[there], flat(blocks_.view(), i, s.place));
            receive(messages, s.ranks[there], flat(blocks_.view(), i, there));
        });
        return this->carry("keys and values", std::move(messages));
    }
    // own(share): its own keys; alone(first, count): shares that have no other members. other(share, step): once the keys of others
    // are there.
    template <class Own, class Other, class Alone>
    void for_each_step(const schedule::ticket<Q>& gathered, Own own, Other other, Alone alone) {
        for (std::size_t i = 0; i < this->first_alone_; ++i) { own(i); }
        alone(this->first_alone_, this->shares_.size() - this->first_alone_);
        gathered.wait(this->queue_);
        for (std::size_t i = 0; i < this->shares_.size(); ++i) {
            for (std::size_t t = 1; t < this->shares_[i].members(); ++t) { other(i, t); }
        }
    }
};

}  // namespace tutti::sequence
