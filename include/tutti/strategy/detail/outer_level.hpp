// outer_level: how a local-update strategy joins its replicas: what the end of a round sends, receives and adopts.
// Needs schedule/lane, an exchange and a communicator across replicas. The strategy says when, its inner strategy what
// is trained: `inner` is that strategy everywhere, x are its owned() elements.
#pragma once

#include <cstddef>      // size_t
#include <optional>     // state exists from attach on
#include <string>       // names
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // fragments

#include <tutti/comm/communicator.hpp>               // communicator
#include <tutti/core/buffer.hpp>                     // means of moments
#include <tutti/core/elementwise.hpp>                // copy
#include <tutti/core/reduce_op.hpp>                  // mean
#include <tutti/core/state.hpp>                      // state_entry
#include <tutti/core/text.hpp>                       // formatted
#include <tutti/schedule/bucket.hpp>                 // fragments
#include <tutti/schedule/lane.hpp>                   // lane
#include <tutti/schedule/overlap.hpp>                // outer_update_span
#include <tutti/schedule/span.hpp>                   // scoped_span
#include <tutti/schedule/ticket.hpp>                 // ticket
#include <tutti/schedule/timeline.hpp>               // tracks
#include <tutti/strategy/detail/fragments.hpp>       // cut_into_fragments
#include <tutti/strategy/detail/outer_state.hpp>     // copies and arithmetic
#include <tutti/strategy/detail/round_progress.hpp>  // where rounds are
#include <tutti/strategy/gradient_exchange.hpp>      // how payloads are averaged
#include <tutti/strategy/local_update_rule.hpp>      // rules
#include <tutti/strategy/strategy.hpp>               // has_moments

namespace tutti::strategy::detail {

/// Semantics  attach, then end_round for the fragment whose round ends, behind receive for the same; in the end finish.
///            Between rounds nothing of x is read: what is on its way is a copy.
/// Errors     those of the exchange and the communicator; error for a mean that is not finite. Until a round has ended
///            anchor, momentum and progress are as they were, and of a delay 1 x is, too.
template <communicator C, floating_element R, class Exchange> class outer_level {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using state_of_exchange = exchange_state_of<Exchange, C, R>;
    static constexpr std::string_view late_mean = "mean of the round", awaited_mean = "mean of parameters";

    local_update_rule rule_;
    Q queue_;  // of the inner strategy
    schedule::lane_options lanes_;
    schedule::timeline::track track_ = 0;
    std::vector<std::string> names_;  // of means on their way, by fragment
    std::optional<outer_state<R, Q>> state_;
    std::optional<state_of_exchange> exchange_;

    // Last, so that destruction ends communication before the memory it uses is released.
    C comm_;
    schedule::lane<C> lane_;
    std::vector<schedule::ticket<Q>> in_flight_;  // by fragment

public:
    outer_level(C across, Q q, const local_update_rule& rule, schedule::lane_options lanes)
        : rule_(rule)
        , queue_(q)
        , lanes_(std::move(lanes))
        , comm_(std::move(across))
        , lane_(comm_.duplicate("rounds"), lanes_) {
        if (lanes_.trace != nullptr) { track_ = lanes_.trace->track_of(lanes_.trace_rank, lanes_.consumer); }
    }

    [[nodiscard]] C& comm() noexcept { return comm_; }
    [[nodiscard]] duration timeout() const noexcept { return lanes_.timeout; }
    /// What the mean of a round is in a trace: on the track of this lane, under this name.
    [[nodiscard]] const std::string& lane_name() const { return lane_.name(); }
    [[nodiscard]] std::string_view mean_name() const noexcept { return rule_.delay == 1 ? late_mean : awaited_mean; }

    /// x becomes that of the first replica. Collective.
    template <class T, class Inner> void attach(const parameters<T, M>& list, Inner& inner, const Exchange& exchange) {
        const view<R, M> x = inner.owned();
        comm_.agree(x.size(), formatted("number of elements that the inner strategy owns (here {})", x.size()));
        together("broadcast of the start", [x](C& c) { c.broadcast(x, 0); });
        inner.publish();
        state_.emplace(queue_, rule_, comm_.size(), x);
        const auto sent = cut_into_fragments(list, x, state_->payload(), rule_.fragments);
        for (const schedule::bucket& b : sent.plan.buckets) { rounds().fragments.push_back({b.offset, b.size}); }
        for (std::size_t f = 0; f < rule_.fragments; ++f) {
            names_.push_back(rule_.fragments == 1 ? std::string(late_mean)
                                                  : formatted("{}, fragment {}", late_mean, f));
        }
        in_flight_.resize(rule_.fragments);
        exchange_.emplace(exchange.template make_state<C, R>(comm_, sent.tensors, sent.plan, lanes_));
    }

    [[nodiscard]] round_progress<Q>& rounds() noexcept { return state_->rounds; }
    [[nodiscard]] const round_progress<Q>& rounds() const noexcept { return state_->rounds; }
    [[nodiscard]] view<R, M> anchor() const noexcept { return state_->anchor(); }
    [[nodiscard]] view<R, M> momentum() const noexcept { return state_->momentum(); }
    [[nodiscard]] state_of_exchange& exchange() noexcept { return *exchange_; }

    /// Collective work that all wait for, in the order of the lane.
    template <class Work> void together(std::string_view name, Work work) {
        const schedule::ticket<Q> done = lane_.submit(name, std::move(work), queue_);
        done.wait(queue_);
    }
    void average(view<R, M> in, view<R, M> out) {
        together(awaited_mean, [in, out](C& c) { c.all_reduce(in, out, mean{}); });
    }

    /// The first round begins with x.
    void start(view<R, M> x) { state_->start(x); }
    /// Waits for the mean of fragment f that is due, and looks at it.
    template <class Inner> void receive(std::size_t f, Inner& inner) {
        const fragment& own = rounds().fragments[f];
        if (!own.arriving) { return; }
        in_flight_[f].wait(queue_);
        state_->arrived(own, shards_of(inner));
    }
    /// The mean that was due is there; the replica has made the last step of its round.
    template <class Inner> void end_round(std::size_t f, Inner& inner) {
        const view<R, M> x = inner.owned();
        fragment& own = rounds().fragments[f];
        if (rule_.delay == 0) {
            state_->snapshot(own, x);
            exchange_->begin(1, 1);  // what is sent is in units of updates
            together(awaited_mean, exchange_->average(f, state_->payload()));
            state_->arrived(own, shards_of(inner));
        }
        const auto moments = mean_moments(inner);  // the last that can fail: nothing has changed so far
        {
            const schedule::scoped_span adopting(lanes_.trace, track_, schedule::outer_update_span, queue_);
            if (rule_.delay == 0) {
                state_->adopt(own, x, shards_of(inner));
            } else {
                state_->turn(own, x, shards_of(inner));
                own.arriving = false;
            }
            set_moments(inner, moments);
        }
        if (rule_.delay == 1) {
            exchange_->begin(1, 1);  // what is sent is in units of updates
            // nvcc takes the reference that an assignment gives for a ticket thrown away.
            static_cast<void>(in_flight_[f] =
                                  lane_.submit(names_[f], exchange_->average(f, state_->payload()), queue_));
            own.arriving = true;
        }
        own.steps = 0;
        ++own.rounds;
    }
    /// Behind the last round: adopts the means on their way, in order, and leaves in x what replicas have in common.
    template <class Inner> void finish(Inner& inner) {
        for (std::size_t f = 0; f < rule_.fragments; ++f) {
            receive(f, inner);
            fragment& own = rounds().fragments[f];
            if (own.arriving && rule_.has_outer()) { state_->settle(own, inner.owned(), shards_of(inner)); }
            own.arriving = false;
        }
        const view<R, M> x = inner.owned();
        to_common(x);
        if (rule_.keeps_anchor() && !rule_.common_anchor()) { copy(queue_, x, anchor()); }
    }
    /// x becomes what replicas have in common: the anchor, for merges with a common one; else the mean of their x.
    void to_common(view<R, M> x) {
        if (rounds().replicas_equal()) { return; }
        if (rule_.common_anchor()) {
            copy(queue_, anchor(), x);
        } else {
            average(x, x);
        }
    }

    void drain() { lane_.drain(); }
    void flush() {
        lane_.drain();
        if (exchange_) { exchange_->flush(); }
    }
    /// Adds all entries, written.
    void list_state(std::vector<state_entry<M>>& all) {
        rounds().save();
        for (const state_entry<M>& e : state_->entries()) { all.push_back(e); }
        for (state_entry<M> e : exchange_->entries()) {
            e.name = "local_update/" + e.name;  // the inner strategy's exchange may have the same names
            all.push_back(std::move(e));
        }
    }
    void restored() {
        lane_.drain();
        rounds().restored();
        exchange_->restored();
    }

private:
    template <class Inner> [[nodiscard]] static auto shards_of(Inner& inner) {
        return [&inner](view<double, M> x) { inner.sum_over_shards(x); };
    }
    /// For a rule that averages moments: their means, apart from the moments themselves.
    template <class Inner> [[nodiscard]] std::vector<buffer<R, Q>> mean_moments(Inner& inner) {
        std::vector<buffer<R, Q>> means;
        if constexpr (has_moments<Inner>) {
            if (rule_.inner == inner_state::average) {
                for (const view<R, M> m : inner.moments()) {
                    means.emplace_back(queue_, m.size());
                    average(m, means.back().view());
                }
            }
        }
        return means;
    }
    template <class Inner> void set_moments(Inner& inner, const std::vector<buffer<R, Q>>& means) {
        if constexpr (has_moments<Inner>) {
            if (rule_.inner == inner_state::reset) { inner.reset_moments(); }
            const auto moments = inner.moments();
            for (std::size_t i = 0; i < means.size(); ++i) { copy(queue_, means[i].view(), moments[i]); }
        }
    }
};

}  // namespace tutti::strategy::detail
