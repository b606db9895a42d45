// local_update<Comm, Inner, Method, Exchange>: replicas train by themselves and meet once a round, overlapped or not.
// Needs a shardable inner strategy, schedule/lane and a communicator across replicas. The named methods: local_sgd,
// slow_mo, co2, diloco, delayed_diloco, eager_diloco, co_co_d, overlap_local_sgd; their sources: local_update_rule.
#pragma once

#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <cstdint>      // rounds
#include <exception>    // errors at the end of a consensus
#include <optional>     // a round that ends
#include <span>         // state
#include <string_view>  // operations
#include <utility>      // move, exchange
#include <vector>       // entries

#include <tutti/comm/communicator.hpp>               // can_all_reduce
#include <tutti/core/buffer.hpp>                     // what a consensus hides
#include <tutti/core/elementwise.hpp>                // copy
#include <tutti/core/error.hpp>                      // usage_error
#include <tutti/core/hash.hpp>                       // hash_of
#include <tutti/core/text.hpp>                       // formatted
#include <tutti/schedule/overlap.hpp>                // overlap_metrics
#include <tutti/schedule/timeline.hpp>               // timeline
#include <tutti/strategy/detail/micro_batches.hpp>   // lifecycle
#include <tutti/strategy/detail/outer_level.hpp>     // a round's end
#include <tutti/strategy/detail/parameter_list.hpp>  // agree_on, check_alone
#include <tutti/strategy/detail/round_times.hpp>     // steps, an automatic period
#include <tutti/strategy/gradient_exchange.hpp>      // how payloads are averaged
#include <tutti/strategy/local_update_rule.hpp>      // rules
#include <tutti/strategy/strategy.hpp>               // shardable

namespace tutti::strategy {

/// What joining replicas, each trained by an Inner, asks of the communicator across them.
template <class C, class Inner, class Exchange, class Master = master_t<typename Inner::element_type>>
concept can_join_replicas = (std::same_as<queue_of<C>, typename Inner::queue_type> && comm::can_broadcast<C, Master> &&
                             comm::can_all_reduce<C, Master, mean> && gradient_exchange<Exchange, C, Master>);

struct local_update_options {
    duration timeout = 2 * default_timeout();  ///< of waits for the lane, see lane_options
    schedule::timeline* trace = nullptr;       ///< records collectives, waits and steps; must outlive the strategy
    int trace_rank = -1;                       ///< process of the trace; -1: the communicator's rank
};

/// An outer level over any shardable strategy: the inner one steps, and every `period` steps the rule of the method
/// brings replicas together.
///
/// Semantics    attach broadcasts the first replica's parameters. A round is `period` calls of step, whatever the number
///              of micro-batches, and whether or not the inner strategy skipped: ranks count alike. At its end a copy of
///              what replicas send goes out on a lane, never the live parameters. With delay 0 the step waits for the
///              mean; with delay 1 the mean is adopted at the end of the next round, never earlier and never later.
///              All works on owned(), float or double masters whatever the type of the values. The moments of the inner
///              optimizer stay on their rank unless the rule resets or averages them (then everyone waits).
///              During `synchronous_steps` before the first round ranks average gradients instead, and are equal.
///              An `automatic` period is chosen behind three rounds, from the time of a step that had no mean beside it
///              and the least time that a mean took; all ranks choose the same, once.
///   fragments  more than one: rounds of fragment f of F end at the steps (f + 1) period / F, rounded down, and every
///              period behind that; its first is that much shorter. Each has its anchor, mean, gap and momentum.
///   exchange   how payloads become their mean, as gradients do in data_parallel: pseudo-gradients may be compressed, with
///              feedback of what that lost. It sees the tensors of the model, or, over an inner strategy that shards,
///              matrices made of the shard. Means of parameters, for merges without a common anchor, go as they are.
///              One that chooses levels (selected_mean) needs all tensors at once: one fragment.
///   statistics that forward passes update, such as those of batch normalization, stay on their rank, and forward sends
///              nothing. A trainer that wants their mean takes it, by an all_reduce of its own, behind a step that
///              rounds() has moved on in, and behind finish.
///   flush      waits for what is in flight and adopts nothing.
///   consensus  between steps; replicas have in common: the anchor, for merges with a common one; else the mean of
///              their parameters, one all_reduce. The scope restores the replica's own values, holds a copy of them,
///              and must end before anything but before_use and after_use is called, or the strategy moves.
///   finish     ends the round that has begun and adopts all means on their way, in order; merges without a common anchor
///              take the mean of the parameters in the end. Then replicas are equal, or it throws.
///   state      waits for the lane: call it whenever the entries are read or written. A replica resumes its own state.
///              Another number of replicas may start from the values after finish.
/// Storage      copies of owned(), beside a few scalars and what the exchange keeps. payload 1; anchor 1 unless the
///              mean of the parameters is the result or replicas are pulled back; momentum 1; delay 1 with parameters,
///              or with interpolation, 1 more; eager 1 more; elementwise_gap 2 more. So local SGD 1, SlowMo and CO2 3,
///              eager DiLoCo 4.
///   overlap    what the rounds of this rank cost so far, those of the period in use; needs a trace.
/// Determinism  on deterministic backends bits depend on data and number of ranks, not on timing, but for an automatic
///              period. With synchronous steps alone they are those of data_parallel. What is computed from
///              means is equal on all ranks of `across`. Of scalar_gap they depend on how the inner strategy shards.
/// Cost         a round: the exchange of all elements, by default an all_reduce of sizeof(master) bytes each; about ten
///              passes over owned(). A synchronous step: an all_reduce of the gradients, that everyone waits for.
/// Errors       those of the inner strategy and the communicator; usage_error for wrong order of calls. Of a delay 1,
///              a failed or not finite mean is reported by the step that ends the next round, before anything changed.
///              Of a delay 0, behind the inner update of owned(): the outer level is as before, values are not published
///              and the round has not ended.
template <communicator C, shardable Inner, local_update_method Method = local_update_rule, class Exchange = plain_mean>
requires can_join_replicas<C, Inner, Exchange>
class local_update {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using T = typename Inner::element_type;
    using master = master_t<T>;

public:
    using element_type = T;
    using memory_type = M;
    using queue_type = Q;
    using inner_type = Inner;

    /// `across` connects equal ranks of all replicas: each owns the same part of the model.
    explicit local_update(C across, Inner inner, Method method = {}, local_update_options options = {},
                          Exchange exchange = {})
        : rule_(method.rule())
        , exchange_((exchange.validate(), std::move(exchange)))
        , inner_((validate(), std::move(inner)))
        , queue_(inner_.queue())
        , times_(rule_, options.trace, options.trace_rank < 0 ? across.rank() : options.trace_rank)
        , outer_(std::move(across), queue_, rule_, {options.timeout, times_.trace(), times_.rank(), "main"}) {}
    local_update(local_update&& other) = default;
    local_update& operator=(local_update&&) = delete;  // communication in flight belongs to one object all its life

    void attach(parameters<T, M>& list) {
        life_.expect_not_attached();
        detail::check_alone(outer_.comm(), [&] {
            inner_.attach(list);
            if (rule_.inner != inner_state::keep && !has_moments<Inner>) {
                throw usage_error("attach: the inner strategy does not show its moments, so they can only be kept");
            }
            if (rule_.synchronous_steps != 0 && !averages_gradients) {
                throw usage_error(
                    formatted("attach: synchronous steps need an inner strategy that shows its gradients and a "
                              "communicator that averages {}",
                              name_of(dtype_of<T>)));
            }
        });
        detail::agree_on(outer_.comm(), list, rule_.describe() + ", " + exchange_.describe());
        outer_.attach(list, inner_, exchange_);
        life_.attach();
    }

    void begin(micro_batch m) {
        expect_running("begin");
        inner_.begin(m);
        if (m.index == 0) { times_.begin(queue_); }
        life_.begin();
    }
    [[nodiscard]] view<const T, M> before_use(std::size_t i) { return inner_.before_use(i); }
    void after_use(std::size_t i) { inner_.after_use(i); }
    [[nodiscard]] view<T, M> gradient(std::size_t i) { return inner_.gradient(i); }
    void gradient_ready(std::size_t i) { inner_.gradient_ready(i); }

    step_result step(hyper h) {
        expect_running("step");
        auto& rounds = outer_.rounds();
        const bool synchronous = rounds.in_synchronous_steps();
        const std::optional<std::size_t> last = rounds.ending();
        if (last) {
            expect_rate("step", h.learning_rate);
            outer_.receive(*last, inner_);
        }
        const step_result result = synchronous ? synchronous_update(h) : last ? inner_.update(h) : inner_.step(h);
        life_.step();
        rounds.step(h.learning_rate);
        if (synchronous && !rounds.in_synchronous_steps()) { outer_.start(inner_.owned()); }
        if (last) { outer_.end_round(*last, inner_); }
        if (synchronous || last) { inner_.publish(); }
        times_.end(queue_, synchronous);
        if (last && rule_.automatic) { times_.choose_period(outer_, inner_); }
        return result;
    }

    void flush() {
        outer_.flush();
        inner_.flush();
        outer_.comm().synchronize();
    }

    void finish() {
        expect_between_steps("finish");
        life_.expect_running("finish");
        auto& rounds = outer_.rounds();
        C& across = outer_.comm();
        across.agree(rounds.made,
                     formatted("number of steps (here {}) at finish; replicas must make the same number", rounds.made));
        if (rounds.in_synchronous_steps()) { outer_.start(inner_.owned()); }
        for (std::size_t f = 0; f < rule_.fragments; ++f) {
            if (rounds.fragments[f].steps == 0 || !rule_.has_outer()) { continue; }
            expect_rate("finish", rounds.learning_rate);
            outer_.receive(f, inner_);
            outer_.end_round(f, inner_);
        }
        outer_.finish(inner_);
        inner_.publish();
        across.agree(hash_of(queue_, inner_.owned()), "the hash of all parameters at finish");
        flush();
        inner_.finish();
        life_.finish();
    }

    [[nodiscard]] std::span<const state_entry<M>> state() {
        expect_free("state");
        outer_.drain();
        state_.clear();
        for (const state_entry<M>& e : inner_.state()) { state_.push_back(e); }
        outer_.list_state(state_);
        for (state_entry<M>& e : state_) { e.whose = ownership::local; }  // replicas differ
        return state_;
    }
    void restored() {
        expect_between_steps("restored");
        outer_.restored();
        inner_.restored();
    }

    class [[nodiscard]] consensus_scope {
        friend local_update;
        local_update* of_ = nullptr;
        buffer<master, Q> own_;  // what the scope hides
        consensus_scope(local_update* of, buffer<master, Q> own) noexcept : of_(of), own_(std::move(own)) {}

    public:
        consensus_scope(consensus_scope&& other) noexcept
            : of_(std::exchange(other.of_, nullptr)), own_(std::move(other.own_)) {}
        consensus_scope& operator=(consensus_scope&&) = delete;
        ~consensus_scope() {
            if (of_ != nullptr) { of_->end_consensus(own_.view()); }
        }
    };
    consensus_scope consensus() {
        expect_between_steps("consensus");
        const view<master, M> x = inner_.owned();
        buffer<master, Q> own(queue_, x.size());
        copy(queue_, x, own.view());
        try {
            if (!life_.finished()) { outer_.to_common(x); }
            inner_.publish();
        } catch (...) {
            copy(queue_, own.view(), x);
            throw;
        }
        in_consensus_ = true;
        return consensus_scope(this, std::move(own));
    }

    [[nodiscard]] Q queue() const { return queue_; }
    [[nodiscard]] view<master, M> owned() { return inner_.owned(); }
    [[nodiscard]] Inner& inner() noexcept { return inner_; }
    [[nodiscard]] const local_update_rule& rule() const noexcept { return rule_; }
    /// Steps of a round.
    [[nodiscard]] std::size_t period() const { return static_cast<std::size_t>(rounds_for("period").period); }
    [[nodiscard]] schedule::overlap_metrics overlap() const {
        return times_.overlap(static_cast<std::size_t>(rounds_for("overlap").period), outer_.lane_name());
    }
    /// The exchange's own controls, such as levels; between steps.
    [[nodiscard]] exchange_state_of<Exchange, C, master>& exchange() {
        expect_between_steps("exchange");
        return outer_.exchange();
    }
    /// Rounds that have ended, of all fragments, which is the number of means asked for.
    [[nodiscard]] std::uint64_t rounds() const { return rounds_for("rounds").ended(); }
    /// What the last mean was divided by.
    [[nodiscard]] double gap() const { return rounds_for("gap").gap; }
    /// Where this round began; empty where the rule keeps none. Stands after errors.
    [[nodiscard]] view<const master, M> anchor() const {
        life_.expect_attached("anchor");
        return outer_.anchor();
    }
    /// The outer momentum; empty without one. Stands after errors.
    [[nodiscard]] view<const master, M> momentum() const {
        life_.expect_attached("momentum");
        return outer_.momentum();
    }

private:
    static constexpr bool averages_gradients = shows_gradients<Inner> && comm::can_all_reduce<C, T, mean>;

    void validate() const {
        rule_.validate();
        if (!std::same_as<Exchange, plain_mean> && rule_.payload != round_payload::pseudo_gradient) {
            throw usage_error(
                formatted("local update: parameters go as they are, not by '{}'; send pseudo-gradients, set "
                          "the payload",
                          exchange_.describe()));
        }
        if constexpr (requires { Exchange::needs_all_buckets; }) {
            if (Exchange::needs_all_buckets && rule_.fragments > 1) {
                throw usage_error(
                    formatted("local update: {} fragments, whose rounds end in turn, but '{}' needs them all at once",
                              rule_.fragments, exchange_.describe()));
            }
        }
    }
    [[nodiscard]] const detail::round_progress<Q>& rounds_for(std::string_view operation) const {
        life_.expect_attached(operation);
        return outer_.rounds();
    }
    void expect_free(std::string_view operation) const {
        life_.expect_attached(operation);
        if (in_consensus_) { throw usage_error(formatted("{}: inside a consensus, end its scope first", operation)); }
    }
    void expect_between_steps(std::string_view operation) const {
        expect_free(operation);
        life_.expect_between_steps(operation);
    }
    void expect_running(std::string_view operation) const {
        expect_free(operation);
        life_.expect_running(operation);
    }
    void expect_rate(std::string_view operation, double rate) const {
        if (rule_.outer.units == outer_units::gradients && !(static_cast<master>(rate) > 0)) {
            throw usage_error(
                formatted("{}: learning rate {} at the end of a round, by which outer momentum in units of "
                          "gradients is divided; keep the rate above 0 or take units of parameters",
                          operation, rate));
        }
    }

    step_result synchronous_update(hyper h) {
        if constexpr (averages_gradients) {
            return inner_.update(h, [this](view<T, M> g) {
                outer_.together("mean of gradients", [g](C& c) { c.all_reduce(g, g, mean{}); });
            });
        } else {
            return inner_.update(h);  // never: attach refuses
        }
    }
    void end_consensus(view<master, M> own) noexcept {
        in_consensus_ = false;
        try {
            copy(queue_, own, inner_.owned());
            inner_.publish();
        } catch (const std::exception& e) {
            outer_.comm().abort(e.what());  // a destructor cannot throw: the next call says it
        }
    }

    local_update_rule rule_;
    Exchange exchange_;
    Inner inner_;
    Q queue_;
    detail::lifecycle life_;
    detail::round_times<Q> times_;
    std::vector<state_entry<M>> state_;
    bool in_consensus_ = false;
    detail::outer_level<C, master, Exchange> outer_;  // last: ends communication before the memory it uses is released
};

template <communicator C, shardable Inner> using local_sgd = local_update<C, Inner, local_sgd_method>;
template <communicator C, shardable Inner> using slow_mo = local_update<C, Inner, slow_mo_method>;
template <communicator C, shardable Inner> using co2 = local_update<C, Inner, co2_method>;
template <communicator C, shardable Inner> using diloco = local_update<C, Inner, diloco_method>;
template <communicator C, shardable Inner> using delayed_diloco = local_update<C, Inner, delayed_diloco_method>;
template <communicator C, shardable Inner> using eager_diloco = local_update<C, Inner, eager_diloco_method>;
template <communicator C, shardable Inner> using co_co_d = local_update<C, Inner, co_co_d_method>;
template <communicator C, shardable Inner> using overlap_local_sgd = local_update<C, Inner, overlap_local_sgd_method>;

}  // namespace tutti::strategy
