// sharded_gradients: gradients of which every rank keeps the mean of its shard, reduced by bucket behind backward.
// Needs schedule/lane, strategy/shard_exchange, strategy/detail/gradient_storage. Stage 1 reduces once a step, stages 2
// and 3 once a micro-batch.
// Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, section 5.
#pragma once

#include <algorithm>  // find, max
#include <cstddef>    // size_t
#include <memory>     // shared with work in flight
#include <string>     // names
#include <utility>    // move, exchange
#include <vector>     // buckets

#include <tutti/comm/communicator.hpp>                 // communicator
#include <tutti/core/buffer.hpp>                       // storage
#include <tutti/core/elementwise.hpp>                  // fill, copy, add_scaled
#include <tutti/core/text.hpp>                         // formatted
#include <tutti/schedule/lane.hpp>                     // lane
#include <tutti/strategy/detail/gradient_storage.hpp>  // gradient_storage
#include <tutti/strategy/detail/shard_plan.hpp>        // shard_plan
#include <tutti/strategy/shard_exchange.hpp>           // shard_exchange_state
#include <tutti/strategy/strategy.hpp>                 // parameters

namespace tutti::strategy::detail {

/// The lane that reduces buckets, and the mean of what this rank owns.
///
/// Semantics    the lane runs buckets in the plan's order. The first reduction of a step writes the shard, later ones
///              are added to it, in T; behind the last one replicas average what they have.
template <communicator C, floating_element T, shard_exchange_state<C, T> S> class gradient_shard {
    using Q = queue_of<C>;
    using M = memory_of<C>;

    std::shared_ptr<const S> exchange_;
    std::shared_ptr<const shard_plan> plan_;
    buffer<T, Q> shard_;
    std::vector<std::string> names_;
    schedule::lane<C> lane_;  // behind the memory it uses
    std::vector<schedule::ticket<Q>> in_flight_;

public:
    gradient_shard(C& comm, std::shared_ptr<const S> exchange, const schedule::lane_options& options)
        : exchange_(std::move(exchange))
        , plan_(exchange_->plan())
        , shard_(comm.queue(), plan_->owned())
        , lane_(exchange_->duplicate(comm, "gradients"), options)
        , in_flight_(plan_->size()) {
        for (std::size_t b = 0; b < plan_->size(); ++b) { names_.push_back(formatted("reduce_scatter bucket {}", b)); }
    }

    [[nodiscard]] const shard_plan& plan() const noexcept { return *plan_; }
    [[nodiscard]] view<T, M> shard() const noexcept { return shard_.view(); }

    /// `whole` is the bucket, which prepare(queue) makes complete and which this overwrites if it `adds`.
    template <class Prepare> void reduce(Q q, std::size_t b, view<T, M> whole, bool adds, bool last, Prepare prepare) {
        auto work = [reduce = exchange_->reduce(b), replicate = exchange_->replicate(b), whole,
                     out = plan_->kept_part(b, shard_.view()), mine = plan_->own_part(b, whole), adds, last,
                     ready = std::move(prepare)](C& c) {
            ready(c.queue());
            reduce(c, whole, adds ? mine : out);
            if (adds && !mine.empty()) { add_scaled(c.queue(), mine, out, 1); }
            if (last) { replicate(c, out); }
        };
        // nvcc takes the reference that an assignment gives for a ticket thrown away.
        static_cast<void>(in_flight_[b] = lane_.submit(names_[b], std::move(work), q));
    }
    /// What q does next runs behind the last reduction of the bucket.
    void wait(Q q, std::size_t b) const { in_flight_[b].wait(q); }
    void wait_all(Q q) const {
        for (const auto& t : in_flight_) { t.wait(q); }
    }
    void drain() { lane_.drain(); }
};

/// Stage 1: micro-batches add up in one flat gradient.
template <communicator C, floating_element T, shard_exchange_state<C, T> S> class whole_gradients {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    gradient_storage<T, Q> storage_;
    gradient_shard<C, T, S> shard_;

public:
    whole_gradients(C& comm, const parameters<T, M>& list, std::shared_ptr<const S> exchange,
                    const schedule::lane_options& options)
        : storage_(comm.queue()), shard_(comm, std::move(exchange), options) {
        storage_.place(comm.queue(), list, shard_.plan().buckets());
    }

    void begin(Q q, bool first) {
        if (first) { storage_.zero(q); }
    }
    [[nodiscard]] view<T, M> of(Q, std::size_t i) const { return storage_.of(i); }
    void launch(Q q, std::size_t b, bool, bool) {
        const schedule::bucket& at = shard_.plan().bucket(b);
        if (at.size == 0) { return; }
        shard_.reduce(q, b, storage_.flat().sub(at.offset, at.size), false, true,
                      [apart = storage_.apart(b)](const Q& lane) { gradient_storage<T, Q>::pack(lane, *apart); });
    }
    void reduced() const noexcept {}
    [[nodiscard]] const gradient_shard<C, T, S>& shard() const noexcept { return shard_; }
    void drain() { shard_.drain(); }
};

/// Stages 2 and 3: a bucket has memory from the first use of one of its gradients until it has been reduced.
///
/// Semantics    memory is used again once a bucket is reduced. There are two buckets' worth of it, more only while
///              backward has more than one bucket open. Tensors that the trainer brings are used in place where those
///              of a bucket lie one behind the other, and else packed.
/// Determinism  which memory a bucket gets depends on the calls alone, never on timing.
template <communicator C, floating_element T, shard_exchange_state<C, T> S> class bucket_gradients {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    static constexpr std::size_t none = static_cast<std::size_t>(-1);
    using tensors = bucket_tensors<T, M>;

    parameters<T, M> list_;
    std::size_t largest_ = 0;
    std::vector<buffer<T, Q>> memory_;
    std::vector<std::size_t> free_;       // indices of memory_
    std::vector<std::size_t> in_flight_;  // buckets whose memory the lane has, oldest first
    std::vector<std::size_t> memory_of_;  // by bucket; none: not open
    std::vector<std::shared_ptr<const tensors>> tensors_;
    gradient_shard<C, T, S> shard_;

public:
    bucket_gradients(C& comm, const parameters<T, M>& list, std::shared_ptr<const S> exchange,
                     const schedule::lane_options& options)
        : list_(list), memory_of_(exchange->plan()->size(), none), shard_(comm, exchange, options) {
        const shard_plan* const plan = exchange->plan().get();
        for (std::size_t b = 0; b < plan->size(); ++b) {
            tensors_.push_back(
                std::make_shared<const tensors>(tensors_of(list, &parameter<T, M>::gradient, plan->buckets(), b)));
            if (needs_memory(b)) { largest_ = std::max(largest_, plan->bucket(b).size); }
        }
    }

    void begin(Q q, bool) {
        for (std::size_t b = 0; b < tensors_.size(); ++b) {
            const tensors& t = *tensors_[b];
            if (t.together.empty() && t.apart.empty()) { continue; }
            shard_.wait(q, b);
            if (!t.together.empty()) { fill(q, t.together, T{}); }
            for (const auto& piece : t.apart) { fill(q, piece.theirs, T{}); }
        }
    }
    [[nodiscard]] view<T, M> of(Q q, std::size_t i) {
        if (!list_[i].gradient.empty()) { return list_[i].gradient; }
        const std::size_t b = shard_.plan().buckets().bucket_of[i];
        const schedule::bucket& at = shard_.plan().bucket(b);
        if (list_[i].value.empty()) { return {}; }
        return opened(q, b).sub(shard_.plan().buckets().offsets[i] - at.offset, list_[i].value.size());
    }
    void launch(Q q, std::size_t b, bool first, bool last) {
        if (shard_.plan().bucket(b).size == 0) { return; }
        const view<T, M> whole = opened(q, b);
        shard_.reduce(q, b, whole, !first, last, [own = tensors_[b], whole](const Q& lane) {
            for (const auto& piece : own->apart) {
                copy(lane, piece.theirs, whole.sub(piece.offset, piece.theirs.size()));
            }
        });
        if (needs_memory(b)) { in_flight_.push_back(b); }
    }
    /// After the shard has been waited for: all memory is free.
    void reduced() {
        while (!in_flight_.empty()) { release_oldest(); }
    }
    [[nodiscard]] const gradient_shard<C, T, S>& shard() const noexcept { return shard_; }
    void drain() { shard_.drain(); }

private:
    [[nodiscard]] bool needs_memory(std::size_t b) const noexcept {
        return shard_.plan().bucket(b).size != 0 && tensors_[b]->together.empty();
    }
    [[nodiscard]] view<T, M> opened(Q q, std::size_t b) {
        if (!needs_memory(b)) { return tensors_[b]->together; }
        const std::size_t size = shard_.plan().bucket(b).size;
        const auto before = std::find(in_flight_.begin(), in_flight_.end(), b);
        if (before != in_flight_.end()) {  // of the last micro-batch
            shard_.wait(q, b);
            free_.push_back(std::exchange(memory_of_[b], none));
            in_flight_.erase(before);
        }
        if (memory_of_[b] == none) {
            memory_of_[b] = acquire(q);
            if (tensors_[b]->missing || tensors_[b]->apart.empty()) {
                fill(q, memory_[memory_of_[b]].view().sub(0, size), T{});
            }
        }
        return memory_[memory_of_[b]].view().sub(0, size);
    }
    [[nodiscard]] std::size_t acquire(Q q) {
        if (free_.empty() && memory_.size() >= 2 && !in_flight_.empty()) {
            shard_.wait(q, in_flight_.front());
            release_oldest();
        }
        if (free_.empty()) {
            memory_.emplace_back(q, largest_);
            return memory_.size() - 1;
        }
        const std::size_t found = free_.back();
        free_.pop_back();
        return found;
    }
    void release_oldest() {
        free_.push_back(std::exchange(memory_of_[in_flight_.front()], none));
        in_flight_.erase(in_flight_.begin());
    }
};

}  // namespace tutti::strategy::detail
