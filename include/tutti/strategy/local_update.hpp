// local_update<Comm, Inner, Method, Exchange>: replicas train by themselves and meet once a round, overlapped or not.
// Needs a shardable inner strategy, schedule/lane and a communicator across replicas. The named methods: local_sgd,
// slow_mo, co2, diloco, delayed_diloco, eager_diloco, co_co_d, overlap_local_sgd; their sources: local_update_rule.
#pragma once

#include <algorithm>  // min, max
#include <bit>        // figures among ranks
#include <concepts>   // same_as
#include <cstdint>    // rounds
#include <exception>  // errors of attach
#include <limits>     // what is not measured
#include <memory>     // state exists from attach on
#include <optional>   // the exchange's state, a round that ends
#include <span>       // state
#include <string>     // texts
#include <utility>    // move, exchange
#include <vector>     // entries

#include <tutti/comm/communicator.hpp>               // can_all_reduce
#include <tutti/core/buffer.hpp>                     // what a consensus hides
#include <tutti/core/elementwise.hpp>                // copy
#include <tutti/core/error.hpp>                      // usage_error
#include <tutti/core/hash.hpp>                       // hash_operation
#include <tutti/core/run.hpp>                        // fetch
#include <tutti/core/text.hpp>                       // formatted
#include <tutti/schedule/lane.hpp>                   // lane
#include <tutti/schedule/overlap.hpp>                // overlap_of, shortest_period
#include <tutti/schedule/span.hpp>                   // moment_of
#include <tutti/schedule/timeline.hpp>               // steps
#include <tutti/strategy/detail/fragments.hpp>       // cut_into_fragments
#include <tutti/strategy/detail/outer_state.hpp>     // copies and arithmetic
#include <tutti/strategy/detail/parameter_list.hpp>  // agree_on, hash
#include <tutti/strategy/gradient_exchange.hpp>      // how payloads are averaged
#include <tutti/strategy/local_update_rule.hpp>      // rules
#include <tutti/strategy/strategy.hpp>               // shardable

namespace tutti::strategy {

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
requires std::same_as < queue_of<C>,
typename Inner::queue_type >
    &&comm::can_broadcast<C, master_t<typename Inner::element_type>>&&
        comm::can_all_reduce<C, master_t<typename Inner::element_type>, mean>&&
            gradient_exchange<Exchange, C, master_t<typename Inner::element_type>> class local_update {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using T = typename Inner::element_type;
    using master = master_t<T>;
    using outer_type = detail::outer_state<master, Q>;
    using state_of_exchange = exchange_state_of<Exchange, C, master>;

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
        , own_trace_(rule_.automatic && options.trace == nullptr ? std::make_unique<schedule::timeline>() : nullptr)
        , trace_(own_trace_ ? own_trace_.get() : options.trace)
        , trace_rank_(options.trace_rank < 0 ? across.rank() : options.trace_rank)
        , lanes_{options.timeout, trace_, trace_rank_, "main"}
        , comm_(std::move(across))
        , lane_(comm_.duplicate("rounds"), lanes_) {
        if (trace_ != nullptr) {
            step_track_ = trace_->track_of(trace_rank_, "steps");
            outer_track_ = trace_->track_of(trace_rank_, "main");
        }
    }
    local_update(local_update&& other) = default;
    local_update& operator=(local_update&&) = delete;  // communication in flight belongs to one object all its life

    void attach(parameters<T, M>& list) {
        if (outer_) { throw usage_error("attach: parameters are attached already"); }
        try {
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
        } catch (const std::exception& e) {
            comm_.abort(e.what());  // the other replicas are about to wait for this one
            throw;
        }
        detail::agree_on(comm_, list, rule_.describe() + ", " + exchange_.describe());
        const view<master, M> x = inner_.owned();
        comm_.agree(x.size(), formatted("number of elements that the inner strategy owns (here {})", x.size()));
        together("broadcast of the start", [x](C& c) { c.broadcast(x, 0); });
        inner_.publish();
        auto outer = std::make_unique<outer_type>(queue_, rule_, comm_.size(), x);
        const auto sent = detail::cut_into_fragments(list, x, outer->payload(), rule_.fragments);
        for (const schedule::bucket& b : sent.plan.buckets) { outer->fragments.push_back({b.offset, b.size}); }
        for (std::size_t f = 0; f < rule_.fragments; ++f) {
            const bool whole = rule_.fragments == 1;
            names_.push_back(whole ? std::string(late_mean) : formatted("{}, fragment {}", late_mean, f));
        }
        in_flight_.resize(rule_.fragments);
        exchanged_.emplace(exchange_.template make_state<C, master>(comm_, sent.tensors, sent.plan, lanes_));
        outer_ = std::move(outer);
    }

    void begin(micro_batch m) {
        expect_running("begin");
        inner_.begin(m);
        if (trace_ != nullptr && m.index == 0) { step_begin_ = schedule::moment_of(queue_); }
        in_step_ = true;
    }
    [[nodiscard]] view<const T, M> before_use(std::size_t i) { return inner_.before_use(i); }
    void after_use(std::size_t i) { inner_.after_use(i); }
    [[nodiscard]] view<T, M> gradient(std::size_t i) { return inner_.gradient(i); }
    void gradient_ready(std::size_t i) { inner_.gradient_ready(i); }

    step_result step(hyper h) {
        expect_running("step");
        const bool synchronous = in_synchronous_steps();
        const std::optional<std::size_t> last = synchronous ? std::nullopt : ending();
        if (last) {
            expect_rate("step", h.learning_rate);
            receive(*last);
        }
        const step_result result = synchronous ? synchronous_update(h) : last ? inner_.update(h) : inner_.step(h);
        in_step_ = false;
        outer_->learning_rate = h.learning_rate;
        ++outer_->made;
        if (synchronous) {
            if (!in_synchronous_steps()) { outer_->start(inner_.owned()); }
            inner_.publish();
        } else {
            for (auto& f : outer_->fragments) { ++f.steps; }
        }
        if (last) {
            end_round(*last);
            inner_.publish();
        }
        if (trace_ != nullptr) {
            trace_->add(step_track_, "step", schedule::span_kind::step, step_begin_, schedule::moment_of(queue_));
            ++traced_;
            if (synchronous) { traced_before_ = traced_; }
            if (last && rule_.automatic) { measure(); }
        }
        return result;
    }

    void flush() {
        lane_.drain();
        if (exchanged_) { exchanged_->flush(); }
        inner_.flush();
        comm_.synchronize();
    }

    void finish() {
        expect_between_steps("finish");
        if (finished_) { throw usage_error("finish: the strategy is finished"); }
        comm_.agree(outer_->made,
                    formatted("number of steps (here {}) at finish; replicas must make the same number", outer_->made));
        const view<master, M> x = inner_.owned();
        if (in_synchronous_steps()) { outer_->start(x); }
        for (std::size_t f = 0; f < rule_.fragments; ++f) {
            if (outer_->fragments[f].steps != 0 && rule_.has_outer()) {
                expect_rate("finish", outer_->learning_rate);
                receive(f);
                end_round(f);
            }
            receive(f);
            auto& own = outer_->fragments[f];
            if (own.arriving && rule_.has_outer()) { outer_->settle(own, x, shards()); }
            own.arriving = false;
        }
        if (rule_.common_anchor()) {
            copy(queue_, outer_->anchor(), x);
        } else if (!equal()) {
            average(x, outer_->payload());
            copy(queue_, outer_->payload(), x);
            if (rule_.keeps_anchor()) { copy(queue_, x, outer_->anchor()); }
        }
        inner_.publish();
        const buffer<std::uint64_t, Q> hash(queue_, 1);
        run(queue_, hash_operation<M>{as_bytes(view<const master, M>(x)), hash.view()});
        comm_.agree(fetch(queue_, hash.view(), std::uint64_t{0}), "the hash of all parameters at finish");
        flush();
        inner_.finish();
        finished_ = true;
    }

    [[nodiscard]] std::span<const state_entry<M>> state() {
        expect_free("state");
        lane_.drain();
        outer_->save();
        state_.clear();
        for (const state_entry<M>& e : inner_.state()) { state_.push_back(e); }
        for (const state_entry<M>& e : outer_->entries()) { state_.push_back(e); }
        for (const state_entry<M>& e : exchanged_->entries()) { state_.push_back(e); }
        for (state_entry<M>& e : state_) { e.whose = ownership::local; }  // replicas differ
        return state_;
    }
    void restored() {
        expect_between_steps("restored");
        lane_.drain();
        outer_->restored();
        exchanged_->restored();
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
            if (equal()) {
                // as they are
            } else if (rule_.common_anchor()) {
                copy(queue_, outer_->anchor(), x);
            } else {
                average(own.view(), x);
            }
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
    [[nodiscard]] std::size_t period() const { return static_cast<std::size_t>(attached("period").period); }
    [[nodiscard]] schedule::overlap_metrics overlap() const {
        const outer_type& outer = attached("overlap");
        if (trace_ == nullptr || own_trace_) {
            throw usage_error("overlap: nothing is recorded; give a timeline to local_update_options::trace");
        }
        return schedule::overlap_of(
            *trace_, trace_rank_, {static_cast<std::size_t>(outer.period), traced_before_, lane_.name(), quiet_step_});
    }
    /// The exchange's own controls, such as levels; between steps.
    [[nodiscard]] state_of_exchange& exchange() {
        expect_between_steps("exchange");
        return *exchanged_;
    }
    /// Rounds that have ended, of all fragments, which is the number of means asked for.
    [[nodiscard]] std::uint64_t rounds() const {
        std::uint64_t all = 0;
        for (const auto& f : attached("rounds").fragments) { all += f.rounds; }
        return all;
    }
    /// What the last mean was divided by.
    [[nodiscard]] double gap() const { return attached("gap").gap; }
    /// Where this round began; empty where the rule keeps none. Stands after errors.
    [[nodiscard]] view<const master, M> anchor() const { return attached("anchor").anchor(); }
    /// The outer momentum; empty without one. Stands after errors.
    [[nodiscard]] view<const master, M> momentum() const { return attached("momentum").momentum(); }

private:
    static constexpr bool averages_gradients = shows_gradients<Inner> && comm::can_all_reduce<C, T, mean>;
    static constexpr std::size_t measured_rounds = 3;  // before an automatic period is chosen
    static constexpr std::string_view late_mean = "mean of the round", awaited_mean = "mean of parameters";

    void validate() const {
        rule_.validate();
        if (!std::same_as<Exchange, plain_mean> && rule_.payload != round_payload::pseudo_gradient) {
            throw usage_error(
                formatted("local update: parameters go as they are, not by '{}'; send pseudo-gradients, set "
                          "the payload",
                          exchange_.describe()));
        }
    }

    [[nodiscard]] const outer_type& attached(std::string_view operation) const {
        if (!outer_) { throw usage_error(formatted("{}: no parameters are attached", operation)); }
        return *outer_;
    }
    void expect_free(std::string_view operation) const {
        static_cast<void>(attached(operation));
        if (in_consensus_) { throw usage_error(formatted("{}: inside a consensus, end its scope first", operation)); }
    }
    void expect_between_steps(std::string_view operation) const {
        expect_free(operation);
        if (in_step_) { throw usage_error(formatted("{}: in the middle of a step", operation)); }
    }
    void expect_running(std::string_view operation) const {
        expect_free(operation);
        if (finished_) { throw usage_error(formatted("{}: the strategy is finished", operation)); }
    }
    void expect_rate(std::string_view operation, double rate) const {
        if (rule_.outer.units == outer_units::gradients && !(static_cast<master>(rate) > 0)) {
            throw usage_error(
                formatted("{}: learning rate {} at the end of a round, by which outer momentum in units of "
                          "gradients is divided; keep the rate above 0 or take units of parameters",
                          operation, rate));
        }
    }

    [[nodiscard]] bool in_synchronous_steps() const noexcept { return outer_->made < rule_.synchronous_steps; }
    step_result synchronous_update(hyper h) {
        if constexpr (averages_gradients) {
            return inner_.update(
                h, [this](view<T, M> g) { together("mean of gradients", [g](C& c) { c.all_reduce(g, g, mean{}); }); });
        } else {
            return inner_.update(h);  // never: attach refuses
        }
    }

    /// The fragment whose round the coming step ends, if it ends one. No two rounds end together.
    [[nodiscard]] std::optional<std::size_t> ending() const noexcept {
        for (std::size_t f = 0; f < rule_.fragments; ++f) {
            const auto& own = outer_->fragments[f];
            const bool first = own.rounds == 0;
            const std::uint64_t length = first ? (f + 1) * outer_->period / rule_.fragments : outer_->period;
            if (own.steps + 1 >= length) { return f; }
        }
        return std::nullopt;
    }

    /// At the end of a round, with a trace: chooses the period once enough rounds are there. Collective then.
    void measure() {
        if (!outer_->chosen && ++measured_ == measured_rounds) {
            if constexpr (!Q::executes_inline) {
                auto reached = queue_.record();  // and with it the marks of steps
                reached.wait_host(after(lanes_.timeout));
            }
            double mean_time = std::numeric_limits<double>::infinity();
            for (const schedule::timed_span& s : trace_->spans(trace_rank_)) {
                if (s.kind == schedule::span_kind::communication && s.track == lane_.name() &&
                    s.name == (rule_.delay == 1 ? late_mean : awaited_mean)) {
                    mean_time = std::min(mean_time, seconds(s.end - s.begin));
                }
            }
            const double step_time =
                schedule::overlap_of(*trace_, trace_rank_, {rule_.period, traced_before_, lane_.name()}).step;
            choose(step_time, mean_time);
            quiet_step_ = step_time;
            traced_before_ = traced_;
        }
        if (own_trace_ && outer_->chosen) { own_trace_->clear(); }
    }
    void choose(double step_time, double mean_time) {
        // Inside a replica the mean over its ranks; over replicas the mean step, and the mean that waited for nobody.
        buffer<double, Q> inside(queue_, 3);
        const double own[] = {step_time, mean_time, 1};
        for (std::size_t i = 0; i < 3; ++i) { fill(queue_, inside.view().sub(i, 1), own[i]); }
        inner_.sum_over_shards(inside.view());
        const auto total = [&](std::size_t i) { return fetch(queue_, inside.view().sub(i, 1), 0.0); };
        const auto all = comm_.gather_control({std::bit_cast<std::uint64_t>(total(0) / total(2)),
                                               std::bit_cast<std::uint64_t>(total(1) / total(2)), 0, 0});
        double step_mean = 0, least = std::numeric_limits<double>::infinity();
        for (const auto& replica : all) {
            step_mean += std::bit_cast<double>(replica[0]) / static_cast<double>(all.size());
            least = std::min(least, std::bit_cast<double>(replica[1]));
        }
        const automatic_period& wanted = *rule_.automatic;
        outer_->period =
            std::min(wanted.most, schedule::shortest_period(step_mean, least, wanted.exposed_share, rule_.delay == 1));
        outer_->chosen = true;
    }

    [[nodiscard]] auto shards() {
        return [this](view<double, M> x) { inner_.sum_over_shards(x); };
    }
    /// Collective work that all wait for, in the order of the lane.
    template <class Work> void together(std::string_view name, Work work) {
        const schedule::ticket<Q> done = lane_.submit(name, std::move(work), queue_);
        done.wait(queue_);
    }
    void average(view<master, M> in, view<master, M> out) {
        together(awaited_mean, [in, out](C& c) { c.all_reduce(in, out, mean{}); });
    }

    /// Replicas are equal as they are.
    [[nodiscard]] bool equal() const noexcept {
        return finished_ || std::all_of(outer_->fragments.begin(), outer_->fragments.end(), [this](const auto& f) {
                   return f.steps == 0 && (f.rounds == 0 || rule_.takes_mean());
               });
    }

    /// Waits for the mean of fragment f that is due, and looks at it.
    void receive(std::size_t f) {
        if (!outer_->fragments[f].arriving) { return; }
        in_flight_[f].wait(queue_);
        outer_->arrived(outer_->fragments[f], shards());
    }

    /// The mean of fragment f that was due is there; the replica has made its last step.
    void end_round(std::size_t f) {
        const view<master, M> x = inner_.owned();
        auto& own = outer_->fragments[f];
        if (rule_.delay == 0) {
            outer_->snapshot(own, x);
            exchanged_->begin(0, 1);
            together(awaited_mean, exchanged_->average(f, outer_->payload()));
            outer_->arrived(own, shards());
        }
        const auto moments = mean_moments();  // the last that can fail: nothing has changed so far
        {
            const schedule::scoped_span adopting(trace_, outer_track_, schedule::outer_update_span, queue_);
            if (rule_.delay == 0) {
                outer_->adopt(own, x, shards());
            } else {
                outer_->turn(own, x, shards());
                own.arriving = false;
            }
            set_moments(moments);
        }
        if (rule_.delay == 1) {
            exchanged_->begin(0, 1);
            // nvcc takes the reference that an assignment gives for a ticket thrown away.
            static_cast<void>(in_flight_[f] =
                                  lane_.submit(names_[f], exchanged_->average(f, outer_->payload()), queue_));
            own.arriving = true;
        }
        own.steps = 0;
        ++own.rounds;
    }

    /// For a rule that averages moments: their means, apart from the moments themselves.
    [[nodiscard]] std::vector<buffer<master, Q>> mean_moments() {
        std::vector<buffer<master, Q>> means;
        if constexpr (has_moments<Inner>) {
            if (rule_.inner == inner_state::average) {
                for (const view<master, M> m : inner_.moments()) {
                    means.emplace_back(queue_, m.size());
                    average(m, means.back().view());
                }
            }
        }
        return means;
    }
    void set_moments(const std::vector<buffer<master, Q>>& means) {
        if constexpr (has_moments<Inner>) {
            if (rule_.inner == inner_state::reset) { inner_.reset_moments(); }
            const auto moments = inner_.moments();
            for (std::size_t i = 0; i < means.size(); ++i) { copy(queue_, means[i].view(), moments[i]); }
        }
    }

    void end_consensus(view<master, M> own) noexcept {
        in_consensus_ = false;
        try {
            copy(queue_, own, inner_.owned());
            inner_.publish();
        } catch (const std::exception& e) {
            comm_.abort(e.what());  // a destructor cannot throw: the next call says it
        }
    }

    local_update_rule rule_;
    Exchange exchange_;
    Inner inner_;
    Q queue_;
    std::unique_ptr<schedule::timeline> own_trace_;  // of an automatic period, if there is no other
    schedule::timeline* trace_;
    int trace_rank_;
    schedule::lane_options lanes_;  // this one's lane, and those of the exchange
    schedule::timeline::track step_track_ = 0, outer_track_ = 0;
    std::size_t traced_ = 0, traced_before_ = 0;  // steps; those before the rounds of the period in use
    std::size_t measured_ = 0;                    // rounds
    double quiet_step_ = schedule::not_measured;  // as measured for an automatic period
    schedule::moment<Q> step_begin_{};
    std::unique_ptr<outer_type> outer_;
    std::vector<std::string> names_;  // of means on their way, by fragment
    std::optional<state_of_exchange> exchanged_;
    std::vector<state_entry<M>> state_;
    bool in_step_ = false, in_consensus_ = false, finished_ = false;

    // Last, so that destruction ends communication before the memory it uses is released.
    C comm_;
    schedule::lane<C> lane_;
    std::vector<schedule::ticket<Q>> in_flight_;  // by fragment
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
