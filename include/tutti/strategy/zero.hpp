// zero<Stage, Comm, Optimizer, T, Exchange>: data parallelism in which the ranks share the optimizer's state (stage 1),
// also the gradients (stage 2), also the values (stage 3). Needs schedule, optimize and a communicator.
// Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, section 5.
#pragma once

#include <concepts>     // invocable
#include <cstddef>      // size_t
#include <cstdint>      // steps
#include <memory>       // plan shared with work in flight
#include <optional>     // what exists from attach on
#include <span>         // state
#include <string>       // names
#include <type_traits>  // what a stage keeps
#include <utility>      // move
#include <vector>       // buckets

#include <tutti/comm/communicator.hpp>                  // communicator, can_reduce_scatter
#include <tutti/core/buffer.hpp>                        // storage
#include <tutti/core/elementwise.hpp>                   // copy
#include <tutti/core/hash.hpp>                          // hash_of
#include <tutti/core/reduce_op.hpp>                     // mean, sum
#include <tutti/core/text.hpp>                          // formatted
#include <tutti/optimize/optimizer.hpp>                 // optimizer
#include <tutti/schedule/bucket.hpp>                    // bucket_plan
#include <tutti/schedule/lane.hpp>                      // lane_options
#include <tutti/strategy/detail/changed_gradients.hpp>  // changed
#include <tutti/strategy/detail/clipped_optimizer.hpp>  // clipped_optimizer
#include <tutti/strategy/detail/live_values.hpp>        // stage 3
#include <tutti/strategy/detail/micro_batches.hpp>      // micro_batch_order, ready_buckets
#include <tutti/strategy/detail/parameter_list.hpp>     // expect_valid, agree_on, entries_of
#include <tutti/strategy/detail/published_values.hpp>   // stages 1 and 2
#include <tutti/strategy/detail/rounding.hpp>           // describe_rounding
#include <tutti/strategy/detail/shard_plan.hpp>         // shard_plan
#include <tutti/strategy/detail/sharded_gradients.hpp>  // gradients of each stage
#include <tutti/strategy/detail/sharded_norm.hpp>       // sharded_norm
#include <tutti/strategy/detail/step_trace.hpp>         // step_trace
#include <tutti/strategy/shard_exchange.hpp>            // plain_shards
#include <tutti/strategy/strategy.hpp>                  // parameter

namespace tutti::strategy {

struct zero_options {
    /// Gradients and values are sent in messages of about this size, and each is cut into one part a rank: larger than
    /// in data_parallel, by the number of ranks. Stage 3 holds two buckets of values and two of gradients.
    std::size_t bucket_bytes = std::size_t{16} << 20;
    /// Values of 16 bits are rounded from their masters stochastically, by random numbers of this seed; without, to
    /// nearest even. All ranks give the same.
    std::optional<std::uint64_t> stochastic_rounding_seed{};
    duration timeout = 2 * default_timeout();  ///< of waits for the lanes, see lane_options
    schedule::timeline* trace = nullptr;       ///< records collectives, waits and steps; must outlive the strategy
    int trace_rank = -1;                       ///< process of the trace; -1: the communicator's rank
    bool trace_steps = true;                   ///< off where an outer strategy records them
};

/// What sharding asks of a communicator: sums of gradients are means, those of the norm sums.
template <class C, class T>
concept can_shard = comm::can_broadcast<C, T> && comm::can_reduce_scatter<C, T, mean> && comm::can_all_gather<C, T> &&
    comm::can_all_reduce<C, T, sum> && comm::can_all_reduce<C, double, sum>;

/// The ZeRO stages.
///
/// Semantics    attach broadcasts rank 0's initial values into the trainer's, and every rank takes its part of each
///              bucket as masters. Then
///     stage 1    gradients add up over the micro-batches; in the last one buckets are reduce-scattered behind
///                backward.
///     stage 2    buckets are reduce-scattered behind every micro-batch; their means add up, in T. gradient(i) is valid
///                from the call, inside a micro-batch, to gradient_ready(i).
///     stage 3    so are they, and values are gathered by bucket when before_use wants one of them, while the bucket
///                that comes next in the order of the first micro-batch is on its way. A bucket stays until
///                another one is used: the order is that of buckets, and every use needs its after_use. The trainer's
///                values are read by attach alone, may be freed after it, and are never written again. Where no
///                micro-batch is under way (evaluation, saving) any order will do.
///              The update is that of the rank's own elements. Stages 1 and 2 then gather the trainer's values, beside
///              what the main queue does next: a value is valid behind before_use(i), flush or consensus.
///              The contents of a gradient are unspecified behind gradient_ready. A norm that is not finite skips the
///              step on all ranks.
///   Exchange   how gradients become means of parts, and values come back from parts: plain_shards, among all ranks and
///              as they are, which is what this says; node_shards, inside nodes; compressed_shards, through
///              compressors; secondary_shards, in stage 3 over one of them, values inside nodes once they were there.
///              They say what differs.
/// Shapes       cuts lie at multiples of 4096 elements of the model (optimize::norm_block), so a rank owns at most one
///              such block a bucket more than another; nothing is padded. owned() is this rank's part of every
///              bucket, in the order of the model. state() lists all parameters on every rank, with what the rank owns
///              of each.
/// Determinism  on deterministic backends the bits depend on data and number of ranks, not on bucket size nor timing:
///              with one micro-batch all stages have those of data_parallel, with more stage 1 has; stages 2 and 3
///              have those of the means of micro-batches added up in their order.
/// Cost         n ranks, k micro-batches, P elements of s = sizeof(T) bytes of which this rank owns p; B buckets.
///     memory     besides the trainer's values: masters and optimizer state of p elements (12 p bytes for AdamW, in
///                float, and 8 for the number of updates); 8 bytes a block of the norm, and 8; s bytes an element of
///                blocks in which buckets of different ranks meet; and stage 1: s (P + p), gradients; stage 2:
///                s (p + 2 L), L the largest bucket; stage 3: as stage 2 and 2 s L, and s p where T is not the type of
///                the masters. The trainer's own gradients take the place of the P or 2 L where they lie one behind the
///                other; values that do not cost stages 1 and 2 s L more. With one bucket it is L, not 2 L.
///     sent       a step: s (P - p) for the gradients, in stages 2 and 3 k times; s p (n - 1) to gather values, in
///                stage 3 2k times, less the buckets that are still there: the two at the turn from forward to
///                backward, and from micro-batch to micro-batch the one where backward ends. The norm: all_reduce of
///                8 bytes a block, and of the blocks in which buckets meet.
///     passes     zero, norm and update of p elements; rounding. NCCL has no uneven collectives: parts of buckets of four
///                blocks a rank or more are nearly equal, which costs it a copy of each bucket, and scratch of 1.25 L
///                while that is on its way; parts of smaller ones are sent in n operations: see comm/nccl.
/// Errors       usage_error naming the parameter on wrong order of calls; mismatch_error from attach and finish, and
///              from stage 3 when ranks use values in different orders, or one leaves the order of its first micro-batch;
///              those of the communicator from step, flush and finish, in stage 3 from before_use too. A rank that
///              uses no value at all while backward of the first micro-batch goes through more than two buckets is
///              named by the deadline of the others.
template <int Stage, communicator C, class Optimizer, floating_element T = float, class Exchange = plain_shards>
requires(Stage >= 1 && Stage <= 3 && can_shard<C, T> && optimize::optimizer<Optimizer, T, queue_of<C>> &&
         shard_exchange<Exchange, C, T>) class zero {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using master = master_t<T>;
    using exchange_state = shard_state_of<Exchange, C, T>;
    static_assert(Stage == 3 || !gathers_again<exchange_state, C, T>,
                  "stages 1 and 2 gather values once an update, and never again");
    using gradients = std::conditional_t<Stage == 1, detail::whole_gradients<C, T, exchange_state>,
                                         detail::bucket_gradients<C, T, exchange_state>>;
    using values = std::conditional_t<Stage == 3, detail::live_values<C, T, exchange_state>,
                                      detail::published_values<C, T, exchange_state>>;

public:
    using element_type = T;
    using memory_type = M;
    using queue_type = Q;
    static constexpr int stage = Stage;

    explicit zero(C comm, Optimizer optimizer = {}, zero_options options = {}, Exchange exchange = {})
        : queue_(comm.queue())
        , optimizer_(std::move(optimizer), options.stochastic_rounding_seed)
        , exchange_((exchange.validate(), std::move(exchange)))
        , options_(options)
        , rank_(options.trace_rank < 0 ? comm.rank() : options.trace_rank)
        , steps_(options.trace_steps ? options.trace : nullptr, rank_)
        , owned_(queue_, 0)
        , comm_(std::move(comm)) {}
    zero(zero&&) = default;
    zero& operator=(zero&&) = delete;  // communication in flight belongs to one object all its life

    void attach(parameters<T, M>& list) {
        attach(list, [] {});
    }
    /// The same; stage 3 calls `values_read` as soon as it does without the trainer's values, before it takes memory for
    /// gradients and the optimizer's state: there they may be freed, in the queue's order, if the list stays as it is.
    template <std::invocable Read> void attach(parameters<T, M>& list, Read values_read) {
        order_.expect_not_attached();
        detail::check_alone(comm_, [&] {
            detail::expect_valid(list, options_.bucket_bytes, options_.stochastic_rounding_seed);
            if (options_.stochastic_rounding_seed && exchange_state::gathers_masters) {
                throw usage_error("attach: values that are compressed are rounded by their compressor; leave out "
                                  "stochastic_rounding_seed");
            }
        });
        detail::agree_on(comm_, list, describe());
        exchanged_ = std::make_shared<exchange_state>(
            exchange_.template make_state<C, T>(comm_, list, detail::plan_of(list, options_.bucket_bytes)));
        plan_ = exchanged_->plan();
        for (const auto& p : list) { comm_.broadcast(p.value, 0); }
        const auto part = [&](std::size_t i) { return plan_->part_of(i, list[i].value.size()); };
        owned_ = buffer<master, Q>(queue_, plan_->owned());
        for (std::size_t i = 0; i < list.size(); ++i) {
            const detail::tensor_part own = part(i);
            if (own.count == 0) { continue; }
            copy(queue_, list[i].value.sub(own.first, own.count), owned_.view().sub(own.place, own.count));
        }
        auto segments = detail::decay_segments(list, part);
        if constexpr (Stage == 3) { values_read(); }
        optimizer_.attach(queue_, plan_->owned(), std::move(segments));
        state_ = detail::entries_of<T, M, Q>(list, ownership::sharded, part, owned_.view(), optimizer_.state(),
                                             exchanged_->entries());
        norm_.emplace(queue_, *plan_);
        const schedule::lane_options lanes{options_.timeout, options_.trace, rank_, "main"};
        gradients_.emplace(comm_, list, exchanged_, lanes);
        values_.emplace(comm_, list, exchanged_, view<const master, M>(owned_), lanes);
        if constexpr (Stage != 3) { list_ = list; }
        // The trainer's values are those of the masters already, unless the exchange changes them.
        if constexpr (Stage == 3 || exchange_state::gathers_masters) { publish_values(); }
        order_.attach(list);  // last: attached is what nothing failed for
    }

    void begin(micro_batch m) {
        order_.expect_attached("begin");
        values_->expect_unused("begin");
        order_.begin(m);
        exchanged_->begin(m);
        if (m.index == 0) {
            steps_.begin(queue_);
        } else {
            values_->end_pass(queue_);
        }
        gradients_->begin(queue_, m.index == 0);
        values_->begin_pass(queue_, !order_.last());
        ready_.begin(plan_->buckets());
    }

    [[nodiscard]] view<const T, M> before_use(std::size_t i) {
        order_.expect_index("before_use", i);
        return values_->use(queue_, i);
    }
    void after_use(std::size_t i) {
        order_.expect_index("after_use", i);
        values_->done(i);
    }

    [[nodiscard]] view<T, M> gradient(std::size_t i) {
        if constexpr (Stage == 1) {
            order_.expect_index("gradient", i);
        } else {
            order_.expect_accumulating(i);
        }
        return gradients_->of(queue_, i);
    }

    void gradient_ready(std::size_t i) {
        order_.ready(i);
        if (Stage == 1 && !order_.last()) { return; }
        ready_.ready(plan_->buckets().bucket_of[i],
                     [this](std::size_t b) { gradients_->launch(queue_, b, order_.first(), order_.last()); });
    }

    /// update(h, change) and publish().
    template <std::invocable<view<T, M>> Change = detail::no_change> step_result step(hyper h, Change change = {}) {
        const step_result result = update(h, std::move(change));
        publish();
        steps_.end(queue_);
        return result;
    }

    /// Clips and applies the averaged gradients to owned(), and leaves the values as they are: between this and
    /// publish() an outer strategy may change owned(). `change(view)` is given the gradients first, averaged and not
    /// clipped, in the order of owned(); if it returns a number, that is the gradient's norm, of a model of which other
    /// ranks have the rest. Errors: as step.
    template <std::invocable<view<T, M>> Change = detail::no_change> step_result update(hyper h, Change change = {}) {
        detail::expect_valid(h);
        order_.expect_attached("step");
        values_->expect_unused("step");
        order_.step(h.learning_rate);
        values_->end_pass(queue_);
        values_->settle(queue_);
        gradients_->shard().wait_all(queue_);
        gradients_->reduced();
        const std::optional<double> norm = detail::changed(change, gradients_->shard().shard());
        const view<const T, M> mine = gradients_->shard().shard();
        const double own_norm =
            norm ? *norm : exchanged_->among(comm_, [&](C& group) { return (*norm_)(group, mine); });
        return optimizer_.update(queue_, owned_.view(), mine, own_norm, order_.loss_scale(), h);
    }

    /// owned() -> values, on their way when this returns. Rounds as the last update did, so that it may be called
    /// again, and after a resume, with the same result. Collective.
    void publish() {
        order_.expect_between_steps("publish");
        publish_values();
    }

    /// What the caller's queue does next may change it.
    [[nodiscard]] view<master, M> owned() {
        order_.expect_attached("owned");
        values_->settle(queue_);
        return owned_.view();
    }
    /// Adds over the ranks that own different elements. Collective.
    void sum_over_shards(view<double, M> x) {
        order_.expect_attached("sum_over_shards");
        exchanged_->among(comm_, [&](C& group) { group.all_reduce(x, x, sum{}); });
    }

    void flush() {
        if (values_) {
            gradients_->drain();
            values_->drain();
            values_->settle(queue_);
        }
        comm_.synchronize();
    }

    /// Stages 1 and 2: the trainer's values are the same on all ranks, or it throws.
    void finish() {
        order_.finish();
        flush();
        if constexpr (Stage != 3) {
            const buffer<std::uint64_t, Q> hashes(queue_, list_.size());
            for (std::size_t i = 0; i < list_.size(); ++i) {
                const view<const T, M> value = list_[i].value;
                run(queue_, hash_operation<M>{as_bytes(value), hashes.view().sub(i, 1)});
            }
            comm_.agree(hash_of(queue_, hashes.view()), "the hash of all parameters at finish");
        }
        exchanged_->expect_replicas(comm_, owned_.view());
        comm_.agree(optimizer_.state().steps(), "the number of updates at finish");
    }

    /// What the caller's queue does next may change it, followed by restored().
    [[nodiscard]] std::span<const state_entry<M>> state() {
        order_.expect_attached("state");
        values_->settle(queue_);
        return state_;
    }
    /// Collective.
    void restored() {
        order_.expect_between_steps("restored");
        optimizer_.state().restored(queue_);
        exchanged_->restored();
        publish_values();
    }

    using consensus_scope = equal_replicas;
    consensus_scope consensus() {
        order_.expect_between_steps("consensus");
        values_->settle(queue_);
        return {};
    }

    [[nodiscard]] Q queue() const { return queue_; }
    /// Steps that were skipped because the gradient was not finite.
    [[nodiscard]] std::uint64_t skipped_steps() const noexcept { return optimizer_.skipped(); }
    /// Which elements are whose; from attach on.
    [[nodiscard]] const detail::shard_plan& shards() const {
        order_.expect_attached("shards");
        return *plan_;
    }
    /// What the exchange shows of itself, such as what a rank owes; between steps.
    [[nodiscard]] const exchange_state& exchange() const {
        order_.expect_between_steps("exchange");
        return *exchanged_;
    }

private:
    /// Equal exactly when ranks do the same with the same gradients.
    [[nodiscard]] std::string describe() const {
        return formatted("zero stage {}, {} in buckets of {} bytes{}{}", Stage, optimizer_.describe(),
                         options_.bucket_bytes, detail::describe_rounding(options_.stochastic_rounding_seed),
                         exchange_.describe());
    }
    void publish_values() { values_->publish(queue_, owned_, optimizer_.noise(), optimizer_.state().steps()); }

    Q queue_;
    detail::clipped_optimizer<Optimizer, T, Q> optimizer_;
    Exchange exchange_;
    zero_options options_;
    int rank_;  // in a trace
    detail::step_trace<Q> steps_;
    detail::micro_batch_order order_;
    parameters<T, M> list_;  // what finish compares
    std::shared_ptr<const detail::shard_plan> plan_;
    std::vector<state_entry<M>> state_;
    detail::ready_buckets ready_;

    buffer<master, Q> owned_;
    std::optional<detail::sharded_norm<C, T>> norm_;

    // Last, so that destruction ends communication before the memory it uses is released.
    std::shared_ptr<exchange_state> exchanged_;
    C comm_;
    std::optional<gradients> gradients_;
    std::optional<values> values_;
};

}  // namespace tutti::strategy
