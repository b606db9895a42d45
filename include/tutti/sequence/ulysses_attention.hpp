// ulysses_attention: attention of sequences that are spread over ranks: tokens are exchanged for heads and back.
// Needs what ring_attention does. Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509.
#pragma once

#include <cstddef>           // size_t
#include <initializer_list>  // loops
#include <limits>            // infinity
#include <utility>           // move

#include <tutti/comm/communicator.hpp>                 // can_exchange
#include <tutti/core/buffer.hpp>                       // storage
#include <tutti/core/error.hpp>                        // usage_error
#include <tutti/core/text.hpp>                         // formatted
#include <tutti/schedule/ticket.hpp>                   // messages in flight
#include <tutti/sequence/attention_options.hpp>        // options
#include <tutti/sequence/block_attention.hpp>          // kernels
#include <tutti/sequence/detail/attention_engine.hpp>  // attention_engine
#include <tutti/sequence/detail/head_exchange.hpp>     // head_exchange
#include <tutti/sequence/placement.hpp>                // placement
#include <tutti/sequence/token_operations.hpp>         // fill, add

namespace tutti::sequence {

/// Attention over the rings of a placement, of which it takes the members alone: member p of G gets all tokens for the
/// p-th of G equal parts of the heads, attends to whole sequences, and returns the results.
///
/// Semantics    as ring_attention. G must divide query and kv heads. Sequences that a rank has alone are computed while
///              those of several ranks arrive.
/// Shapes, Aliasing  as ring_attention.
/// Determinism  each head is computed in one call: the same bits on any number of ranks.
/// Cost         a rank of G with n tokens of a sequence of s sends, for each pair of token and head, width * sizeof(T)
///              bytes: of n (G - 1) / G tokens of all query and kv heads forward, and of s - n tokens of its part of the
///              query heads, with sizeof(P) bytes for the sum of each. Backward: n (G - 1) / G of all heads, and of query
///              heads again with two P each, or twice with one where the kernel wants out; s - n of its part of all heads.
///              Memory: its part of the heads of all tokens, and all heads of its tokens, of each tensor.
/// Errors       as ring_attention; usage_error from plan, on all ranks, when G does not divide the heads.
template <comm::can_exchange C, block_attention Block>
class ulysses_attention : public detail::attention_engine<C, Block> {
    using base = detail::attention_engine<C, Block>;
    using typename base::M;
    using typename base::P;
    using typename base::Q;
    using typename base::T;
    using typename base::transfers;
    template <class U> using tensor = token_view<U, M>;
    template <class U> using exchanged = detail::head_exchange<U, Q>;

    exchanged<T> query_, key_, value_, out_, final_out_, d_query_, d_key_, d_value_;
    exchanged<P> log_sum_exp_, delta_;

public:
    explicit ulysses_attention(C comm, attention_heads heads, attention_options options = {}, Block block = {})
        : base(std::move(comm), heads, options, std::move(block))
        , query_(this->queue_, heads.query, heads.width)
        , key_(this->queue_, heads.kv, heads.width)
        , value_(this->queue_, heads.kv, heads.width)
        , out_(this->queue_, heads.query, heads.width)
        , final_out_(this->queue_, heads.query, heads.width)
        , d_query_(this->queue_, heads.query, heads.width)
        , d_key_(this->queue_, heads.kv, heads.width)
        , d_value_(this->queue_, heads.kv, heads.width)
        , log_sum_exp_(this->queue_, heads.query, 1)
        , delta_(this->queue_, heads.query, 1) {}

    void plan(const placement& p) {
        this->adopt(p, "ulysses");
        for (const ring& r : p.rings) {
            if (this->heads_.query % r.ranks.size() != 0 || this->heads_.kv % r.ranks.size() != 0) {
                this->planned_ = false;
                throw usage_error(
                    formatted("ulysses_attention: {} ranks of sequence {} do not divide {} query heads and {} kv heads",
                              r.ranks.size(), r.sequence, this->heads_.query, this->heads_.kv));
            }
        }
    }

    void forward(tensor<const T> query, tensor<const T> key, tensor<const T> value, tensor<T> out,
                 tensor<P> log_sum_exp) {
        this->expect_forward(query, key, value, out, log_sum_exp);
        fill_tokens(this->queue_, out, T{});
        fill_tokens(this->queue_, log_sum_exp, -std::numeric_limits<P>::infinity());
        transfers messages;
        query_.give_heads(this->shares_, query, messages);
        key_.give_heads(this->shares_, key, messages);
        value_.give_heads(this->shares_, value, messages);
        out_.place(this->shares_);
        log_sum_exp_.place(this->shares_);
        for_each_share(this->carry("tokens for heads", std::move(messages)), [&](std::size_t i) {
            this->attend_whole(query_.whole(i), key_.whole(i), value_.whole(i), out_.whole(i), log_sum_exp_.whole(i));
        });
        messages.clear();
        out_.return_tokens(this->shares_, messages);
        log_sum_exp_.return_tokens(this->shares_, messages);
        this->carry("heads for tokens", std::move(messages)).wait(this->queue_);
        out_.take_tokens(this->shares_, out);
        log_sum_exp_.take_tokens(this->shares_, log_sum_exp);
    }

    void backward(tensor<const T> d_out, tensor<const T> query, tensor<const T> key, tensor<const T> value,
                  tensor<const T> out, tensor<const P> log_sum_exp, tensor<T> d_query, tensor<T> d_key,
                  tensor<T> d_value) {
        this->expect_forward(query, key, value, out, log_sum_exp);
        this->expect_gradients(d_out, d_query, d_key, d_value);
        for (const auto& gradient : {d_query, d_key, d_value}) { fill_tokens(this->queue_, gradient, T{}); }
        transfers messages;
        query_.give_heads(this->shares_, query, messages);
        key_.give_heads(this->shares_, key, messages);
        value_.give_heads(this->shares_, value, messages);
        out_.give_heads(this->shares_, d_out, messages);
        log_sum_exp_.give_heads(this->shares_, log_sum_exp, messages);
        if constexpr (wants_out<Block>) {
            final_out_.give_heads(this->shares_, out, messages);
        } else {
            delta_.give_heads(this->shares_, tensor<const P>(this->deltas_of(d_out, out)), messages);
        }
        for (exchanged<T>* gradient : {&d_query_, &d_key_, &d_value_}) { gradient->place(this->shares_); }
        for_each_share(this->carry("tokens for heads", std::move(messages)), [&](std::size_t i) {
            tensor<const T> final_out;
            tensor<const P> delta;
            if constexpr (wants_out<Block>) {
                final_out = final_out_.whole(i);
            } else {
                delta = delta_.whole(i);
            }
            this->differentiate_whole({query_.whole(i), out_.whole(i), final_out, log_sum_exp_.whole(i), delta, {}, {}},
                                      key_.whole(i), value_.whole(i),
                                      {d_query_.whole(i), d_key_.whole(i), d_value_.whole(i)});
        });
        messages.clear();
        for (exchanged<T>* gradient : {&d_query_, &d_key_, &d_value_}) {
            gradient->return_tokens(this->shares_, messages);
        }
        this->carry("heads for tokens", std::move(messages)).wait(this->queue_);
        d_query_.take_tokens(this->shares_, d_query);
        d_key_.take_tokens(this->shares_, d_key);
        d_value_.take_tokens(this->shares_, d_value);
    }

private:
    // f(share): those of one rank, then, once their messages are there, the others.
    template <class F> void for_each_share(schedule::ticket<Q> given, F f) {
        for (const bool alone : {true, false}) {
            if (!alone) { given.wait(this->queue_); }
            for (std::size_t i = 0; i < this->shares_.size(); ++i) {
                if ((this->shares_[i].members() == 1) == alone) { f(i); }
            }
        }
    }
};

}  // namespace tutti::sequence
