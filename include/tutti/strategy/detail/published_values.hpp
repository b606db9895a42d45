// published_values: the trainer's values, gathered from the ranks' masters by bucket beside the main queue.
// Needs schedule/lane, strategy/shard_exchange, strategy/detail/rounding. What stages 1 and 2 do after an update.
// Source: Rajbhandari et al., ZeRO, SC 2020, section 5.1.
#pragma once

#include <algorithm>    // max
#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <cstdint>      // flags
#include <memory>       // shared with work in flight
#include <optional>     // noise
#include <string>       // names
#include <string_view>  // operations
#include <utility>      // move
#include <vector>       // buckets

#include <tutti/comm/communicator.hpp>           // communicator
#include <tutti/core/buffer.hpp>                 // storage
#include <tutti/core/elementwise.hpp>            // copy
#include <tutti/core/philox.hpp>                 // random_stream
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/schedule/lane.hpp>               // lane
#include <tutti/strategy/detail/rounding.hpp>    // round_values
#include <tutti/strategy/detail/shard_plan.hpp>  // shard_plan
#include <tutti/strategy/shard_exchange.hpp>     // shard_exchange_state
#include <tutti/strategy/strategy.hpp>           // parameters

namespace tutti::strategy::detail {

/// Semantics    publish() rounds this rank's masters and gathers all ranks', the buckets that forward needs first
///              first; use(i) waits for the bucket of parameter i. The masters must not change before settle().
/// Storage      values that lie one behind the other, by bucket, are gathered in place; others go through one buffer of
///              the largest such bucket.
template <communicator C, floating_element T, shard_exchange_state<C, T> S> class published_values {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using master = master_t<T>;
    using tensors = bucket_tensors<T, M>;

    parameters<T, M> list_;
    std::shared_ptr<const S> exchange_;
    std::shared_ptr<const shard_plan> plan_;
    std::vector<std::shared_ptr<const tensors>> tensors_;
    std::vector<std::string> names_;
    std::vector<std::uint8_t> pending_;  // by bucket
    buffer<T, Q> staging_;
    schedule::lane<C> lane_;  // behind the memory it uses
    std::vector<schedule::ticket<Q>> in_flight_;

public:
    published_values(C& comm, const parameters<T, M>& list, std::shared_ptr<const S> exchange, view<const master, M>,
                     const schedule::lane_options& options)
        : list_(list)
        , exchange_(std::move(exchange))
        , plan_(exchange_->plan())
        , pending_(plan_->size(), 0)
        , staging_(comm.queue(), 0)
        , lane_(exchange_->duplicate(comm, "values"), options)
        , in_flight_(plan_->size()) {
        std::size_t largest = 0;
        for (std::size_t b = 0; b < plan_->size(); ++b) {
            tensors_.push_back(
                std::make_shared<const tensors>(tensors_of(list, &parameter<T, M>::value, plan_->buckets(), b)));
            if (tensors_[b]->together.empty()) { largest = std::max(largest, plan_->bucket(b).size); }
            names_.push_back(formatted("all_gather bucket {}", b));
        }
        staging_ = buffer<T, Q>(comm.queue(), largest);
    }

    void begin_pass(Q, bool) const noexcept {}
    void end_pass(Q) const noexcept {}
    void expect_unused(std::string_view) const noexcept {}
    [[nodiscard]] view<const T, M> use(Q q, std::size_t i) {
        wait(q, plan_->buckets().bucket_of[i]);
        return list_[i].value;
    }
    void done(std::size_t) const noexcept {}

    void publish(Q q, view<const master, M> masters, const std::optional<random_stream>& noise, std::uint64_t updates) {
        settle(q);
        for (std::size_t b = plan_->size(); b-- > 0;) {
            const std::size_t size = plan_->bucket(b).size;
            if (size == 0) { continue; }
            const view<T, M> together = tensors_[b]->together;
            const view<T, M> whole = together.empty() ? staging_.view().sub(0, size) : together;
            auto work = [gather = exchange_->gather(b, updates), from = plan_->kept_part(b, masters),
                         mine = plan_->own_part(b, whole), first = plan_->own(b).first, noise, own = tensors_[b],
                         whole](C& c) {
                const Q lane = c.queue();
                if constexpr (S::gathers_masters || std::same_as<T, master>) {
                    static_cast<void>(mine), static_cast<void>(first), static_cast<void>(noise);
                    gather(c, from, whole);
                } else {
                    round_values<Q, T>(lane, from, mine, noise, first);
                    gather(c, mine, whole);
                }
                for (const auto& t : own->apart) { copy(lane, whole.sub(t.offset, t.theirs.size()), t.theirs); }
            };
            // nvcc takes the reference that an assignment gives for a ticket thrown away.
            static_cast<void>(in_flight_[b] = lane_.submit(names_[b], std::move(work), q));
            pending_[b] = 1;
        }
    }
    /// What q does next may change the masters and reads published values.
    void settle(Q q) {
        for (std::size_t b = 0; b < pending_.size(); ++b) { wait(q, b); }
    }
    void drain() { lane_.drain(); }

private:
    void wait(Q q, std::size_t b) {
        if (pending_[b] == 0) { return; }
        in_flight_[b].wait(q);
        pending_[b] = 0;
    }
};

}  // namespace tutti::strategy::detail
