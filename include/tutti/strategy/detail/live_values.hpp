// live_values: values of which every rank keeps its shard, gathered by bucket for as long as they are used.
// Needs schedule/lane, strategy/shard_exchange, strategy/detail/rounding. What stage 3 does around forward and backward.
// Source: Rajbhandari et al., ZeRO, SC 2020, section 5.3; prefetching in recorded order as DeepSpeed's stage 3.
#pragma once

#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <cstdint>      // flags
#include <memory>       // shared with work in flight
#include <optional>     // noise
#include <string>       // names
#include <string_view>  // operations
#include <utility>      // move, exchange
#include <vector>       // buckets

#include <tutti/comm/communicator.hpp>           // communicator
#include <tutti/core/buffer.hpp>                 // storage
#include <tutti/core/error.hpp>                  // mismatch_error
#include <tutti/core/philox.hpp>                 // random_stream
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/schedule/lane.hpp>               // lane
#include <tutti/strategy/detail/rounding.hpp>    // round_values
#include <tutti/strategy/detail/shard_plan.hpp>  // shard_plan
#include <tutti/strategy/shard_exchange.hpp>     // shard_exchange_state
#include <tutti/strategy/strategy.hpp>           // parameters

namespace tutti::strategy::detail {

/// Semantics    a pass is a micro-batch. use(i) gathers the bucket of parameter i unless it is there; done(i) ends that
///              use. When another bucket is used than last, those that are not in use go, except the one that comes
///              next, which is gathered beside what the main queue does. What comes next is known from the first pass,
///              the record: in it, and outside of passes, ranks agree on every bucket before they gather it. A later
///              pass that leaves the record is an error: the other ranks are about to gather what it says.
///              publish() rounds the masters; what was gathered before is forgotten. Between two of these, an exchange
///              that gathers again is asked to from the second gather of a bucket on.
/// Storage      as many buckets' worth of memory as were there at once: two, if uses of different buckets do not
///              overlap. The shard in T, unless masters are gathered, of that type or by the exchange.
/// Errors       usage_error naming the parameter for uses without end; mismatch_error naming the ranks.
template <communicator C, floating_element T, shard_exchange_state<C, T> S> class live_values {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using master = master_t<T>;
    static constexpr bool rounds = !S::gathers_masters && !std::same_as<T, master>;
    static constexpr bool again = gathers_again<S, C, T>;
    static constexpr std::size_t none = static_cast<std::size_t>(-1);
    enum class mode : std::uint8_t { free, recording, following };
    struct visit {
        std::size_t bucket;
        std::size_t parameter;  // for messages
    };

    std::vector<std::string> names_;  // by parameter
    std::vector<std::size_t> sizes_;
    std::vector<std::string> gather_names_;  // by bucket
    std::shared_ptr<const S> exchange_;
    std::shared_ptr<const shard_plan> plan_;
    int rank_;  // for messages
    buffer<T, Q> shard_;
    view<gathered_t<S, T>, M> kept_;  // what is gathered
    std::uint64_t updates_ = 0;       // that were published
    std::size_t largest_ = 0;
    std::vector<buffer<T, Q>> memory_;
    std::vector<std::size_t> free_;       // indices of memory_
    std::vector<std::size_t> memory_of_;  // by bucket; none: not there
    std::vector<std::uint8_t> pending_;   // by bucket: on its way
    std::vector<std::uint8_t> gathered_;  // by bucket: since the last publish
    std::vector<std::size_t> uses_;       // by parameter
    std::vector<std::size_t> in_use_;     // by bucket: uses of its parameters

    mode mode_ = mode::free;
    bool recorded_ = false;
    bool another_pass_ = false;  // before the masters change
    std::vector<visit> record_;
    std::size_t position_ = 0;  // in the record
    std::size_t last_ = none;   // bucket

    schedule::lane<C> lane_;  // behind the memory it uses
    std::vector<schedule::ticket<Q>> in_flight_;

public:
    live_values(C& comm, const parameters<T, M>& list, std::shared_ptr<const S> exchange, view<const master, M> masters,
                const schedule::lane_options& options)
        : exchange_(std::move(exchange))
        , plan_(exchange_->plan())
        , rank_(comm.rank())
        , shard_(comm.queue(), rounds ? plan_->owned() : 0)
        , largest_(plan_->largest_bucket())
        , memory_of_(plan_->size(), none)
        , pending_(plan_->size(), 0)
        , gathered_(plan_->size(), 0)
        , uses_(list.size(), 0)
        , in_use_(plan_->size(), 0)
        , lane_(exchange_->duplicate(comm, "values"), options)
        , in_flight_(plan_->size()) {
        if constexpr (rounds) {
            kept_ = shard_.view();
        } else {
            kept_ = masters;
        }
        for (const auto& p : list) {
            names_.push_back(p.name);
            sizes_.push_back(p.value.size());
        }
        for (std::size_t b = 0; b < plan_->size(); ++b) {
            gather_names_.push_back(formatted("all_gather bucket {}", b));
        }
    }

    /// Errors: usage_error naming a parameter that is in use.
    void expect_unused(std::string_view operation) const {
        for (std::size_t i = 0; i < uses_.size(); ++i) {
            if (uses_[i] != 0) { throw usage_error(formatted("{}: '{}' is still in use", operation, names_[i])); }
        }
    }
    void begin_pass(Q, bool another) {
        mode_ = recorded_ ? mode::following : mode::recording;
        another_pass_ = another;
        position_ = 0;
        last_ = none;
    }
    void end_pass(Q q) {
        if (mode_ == mode::recording) {
            lane_
                .submit("agree on the order of use",
                        [](C& c) { c.agree(none, "what is used next (here nothing: the micro-batch ends)"); })
                .wait(q);
            recorded_ = true;
        } else if (mode_ == mode::following && position_ != record_.size()) {
            leaves_record("ends its micro-batch");
        }
        mode_ = mode::free;
        last_ = none;
    }

    [[nodiscard]] view<const T, M> use(Q q, std::size_t i) {
        const std::size_t b = plan_->buckets().bucket_of[i];
        const schedule::bucket& at = plan_->bucket(b);
        if (at.size != 0) {
            if (b != last_) { enter(q, b, i); }
            if (std::exchange(pending_[b], std::uint8_t{0}) != 0) { in_flight_[b].wait(q); }
        }
        ++uses_[i];
        ++in_use_[b];
        if (sizes_[i] == 0) { return {}; }
        return memory_[memory_of_[b]].view().sub(plan_->buckets().offsets[i] - at.offset, sizes_[i]);
    }
    void done(std::size_t i) {
        if (uses_[i] == 0) { throw usage_error(formatted("after_use: '{}' is not in use", names_[i])); }
        --uses_[i];
        --in_use_[plan_->buckets().bucket_of[i]];
    }

    void publish(Q q, view<const master, M> masters, const std::optional<random_stream>& noise, std::uint64_t updates) {
        expect_unused("publish");
        settle(q);
        updates_ = updates;
        for (std::size_t b = 0; b < plan_->size(); ++b) { release(b); }
        gathered_.assign(gathered_.size(), 0);
        last_ = none;
        if constexpr (rounds) {
            for (std::size_t b = 0; b < plan_->size(); ++b) {
                round_values<Q, T>(q, plan_->kept_part(b, masters), plan_->kept_part(b, shard_.view()), noise,
                                   plan_->own(b).first);
            }
        }
        if (!record_.empty()) { gather(q, record_.front().bucket); }
    }
    /// What q does next may change the masters.
    void settle(Q q) {
        for (const auto& t : in_flight_) { t.wait(q); }  // also of buckets that went before they were used
        pending_.assign(pending_.size(), 0);
    }
    void drain() { lane_.drain(); }

private:
    /// Bucket b is used, and was not the one used last.
    void enter(Q q, std::size_t b, std::size_t i) {
        std::size_t next = none;
        if (mode_ == mode::recording) { record_.push_back({b, i}); }
        if (mode_ == mode::following) {
            if (position_ == record_.size() || record_[position_].bucket != b) {
                leaves_record(formatted("uses '{}'", names_[i]));
            }
            ++position_;
            if (position_ < record_.size()) {
                next = record_[position_].bucket;
            } else if (another_pass_) {
                next = record_.front().bucket;
            }
        } else {
            // Nothing is known of the other ranks: they might gather something else of the same size.
            lane_
                .submit("agree on the order of use",
                        [b, text = formatted("what is used next (here '{}')", names_[i])](C& c) { c.agree(b, text); })
                .wait(q);
        }
        last_ = b;
        for (std::size_t other = 0; other < plan_->size(); ++other) {
            if (other != b && other != next && in_use_[other] == 0) { release(other); }
        }
        if (memory_of_[b] == none) { gather(q, b); }
        if (next != none && memory_of_[next] == none) { gather(q, next); }
    }
    void gather(Q q, std::size_t b) {
        if (free_.empty()) {
            memory_.emplace_back(q, largest_);
            free_.push_back(memory_.size() - 1);
        }
        memory_of_[b] = free_.back();
        free_.pop_back();
        const view<T, M> whole = memory_[memory_of_[b]].view().sub(0, plan_->bucket(b).size);
        const bool before = std::exchange(gathered_[b], std::uint8_t{1}) != 0;
        if constexpr (again) {
            if (before) {
                submit(q, b, [gather = exchange_->gather_again(b), whole](C& c) { gather(c, whole); });
                return;
            }
        }
        submit(q, b, [gather = exchange_->gather(b, updates_), whole, mine = plan_->kept_part(b, kept_)](C& c) {
            gather(c, mine, whole);
        });
    }
    template <class Work> void submit(Q q, std::size_t b, Work work) {
        // nvcc takes the reference that an assignment gives for a ticket thrown away.
        static_cast<void>(in_flight_[b] = lane_.submit(gather_names_[b], std::move(work), q));
        pending_[b] = 1;
    }
    /// Its memory may be gathered into again: behind what the main queue and the lane have been given so far.
    void release(std::size_t b) {
        if (memory_of_[b] == none) { return; }
        free_.push_back(std::exchange(memory_of_[b], none));
        pending_[b] = 0;
    }
    [[noreturn]] void leaves_record(const std::string& what) {
        const std::string expected = position_ == record_.size()
                                         ? std::string("the end of the micro-batch")
                                         : formatted("'{}'", names_[record_[position_].parameter]);
        const std::string text =
            formatted("order of use: rank {} {} where its first micro-batch has {}, at place {} of {}", rank_, what,
                      expected, position_, record_.size());
        lane_.abort(text);  // the other ranks are gathering, or about to
        throw mismatch_error(text, {rank_}, {"order of use", {}, rank_, 0, 0, dtype_of<T>, 0, {}});
    }
};

}  // namespace tutti::strategy::detail
