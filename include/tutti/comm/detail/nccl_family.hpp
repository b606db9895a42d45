// nccl_family: what the communicators that one rank derived from one root share: the abort, its cause, the watchdog.
// Needs comm/detail/{nccl_absence,nccl_watched,store_link}.
// NCCL has no deadline and tells nobody that a rank is gone: a thread looks after all of it, every 20 ms.
#pragma once

#include <algorithm>           // find
#include <atomic>              // flags
#include <chrono>              // periods
#include <condition_variable>  // watchdog's sleep
#include <cstddef>             // size_t
#include <cstdlib>             // getenv
#include <exception>           // errors
#include <memory>              // channels
#include <mutex>               // cause, channels
#include <optional>            // markers
#include <string>              // causes
#include <string_view>         // texts
#include <thread>              // watchdog
#include <utility>             // move
#include <vector>              // channels

#include <cuda_runtime_api.h>  // CUDA runtime
#include <nccl.h>              // NCCL

#include <tutti/comm/detail/nccl_absence.hpp>  // who is missing
#include <tutti/comm/detail/nccl_channel.hpp>  // channels
#include <tutti/comm/detail/nccl_end.hpp>      // aborts
#include <tutti/comm/detail/nccl_order.hpp>    // order of launches
#include <tutti/comm/detail/nccl_watched.hpp>  // health, lateness
#include <tutti/comm/detail/store_link.hpp>    // where ranks meet
#include <tutti/core/cuda_queue.hpp>           // events
#include <tutti/core/deadline.hpp>             // deadline
#include <tutti/core/error.hpp>                // errors
#include <tutti/core/text.hpp>                 // formatted

namespace tutti::comm::detail {

/// Semantics  a family that is poisoned aborts all its NCCL communicators at once, each on a thread of its own: one
///            after the other would deadlock, since freeing one waits for the kernels of the next. Then host waits of
///            its queues throw the cause (it is their watcher).
///   order    no rank aborts before all know of the failure, or 0.2 s have passed: a kernel that is aborted runs on
///            without its peers' data and tells them to do so too, and their streams get to the end as if all were
///            well. Who knows of the failure does not believe them.
///   watchdog finds a cause in NCCL's asynchronous errors, in another rank's failure (through the store), in an NCCL
///            call or in work of a stream that takes longer than the timeout. It finds out who is missing before it
///            poisons; also when NCCL lost a connection, which is all that NCCL knows of a rank that was killed.
/// Cost       a thread that wakes 50 times a second; events that it puts behind new work then; on the calling thread a
///            lock and a look at the clock per call.
class nccl_family final : public tutti::detail::cuda_watcher {
    static constexpr duration period = std::chrono::milliseconds(20);
    static constexpr duration patience = std::chrono::seconds(5);  // for the watchdog to find out who is missing
    static constexpr duration hearing = 10 * period;               // for others to hear of a failure

    const std::unique_ptr<store_link> store_;  // may be null: with a caller's communicator
    const std::string key_;
    const int device_;
    std::atomic<bool> poisoned_{false};
    std::mutex mutex_;  // all below
    std::condition_variable changed_;
    std::string cause_;
    std::optional<timeout_error> overdue_;  // found by this rank's watchdog, not thrown yet
    std::vector<nccl_watched> channels_;
    std::vector<ncclComm_t> parted_;  // handles without a channel, of ranks that are threads
    bool ranks_share_process_ = false;
    std::optional<deadline> cause_due_;  // a communicator was left by an exception, whose text is to come
    std::string left_;
    std::size_t additions_ = 0;
    bool aborted_ = false;  // all of channels_
    bool looking_ = false;  // at a copy of channels_
    bool ending_ = false;
    bool heard_ = false;                 // others know that this rank knows; the watchdog's
    std::atomic<std::size_t> count_{0};  // of channels

    const bool nccl_orders_launches_ = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT") != nullptr &&
                                       std::string_view(std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT")) == "1";
    nccl_order order_;

    std::thread watchdog_;

public:
    const int rank;  ///< in the root
    const int ranks;
    const duration timeout;

    nccl_family(std::unique_ptr<store_link> store, std::string key, int root_rank, int root_ranks, int device,
                duration t)
        : store_(std::move(store))
        , key_(std::move(key))
        , device_(device)
        , rank(root_rank)
        , ranks(root_ranks)
        , timeout(t) {
        watchdog_ = std::thread([this] { watch(); });
    }
    nccl_family(const nccl_family&) = delete;
    nccl_family& operator=(const nccl_family&) = delete;
    ~nccl_family() override {
        {
            const std::lock_guard lock(mutex_);
            ending_ = true;
        }
        changed_.notify_all();
        watchdog_.join();
        if (!channels_.empty()) {  // left by an exception, and nobody said more
            poison(left_);
            await_others();
            abort_all(all_of(channels_), device_);
        }
        try {
            if (store_ != nullptr) {
                store_->leave(key_, rank);  // first: nobody shall wait for this rank
                if (heard_) { store_->leave(heard(), rank); }
            }
        } catch (const std::exception&) {}  // the directory is gone: nothing is left to be taken back
        end_handles(parted_, device_, poisoned() ? ncclCommAbort : ncclCommDestroy);
    }

    void add(std::shared_ptr<nccl_channel> c) {
        {
            const std::lock_guard lock(mutex_);
            channels_.emplace_back(std::move(c));
            count_ = channels_.size();
            ++additions_;
            aborted_ = false;  // a family that has failed meanwhile aborts it too
        }
        changed_.notify_all();
    }

    /// From now on the handles of communicators that end are kept until the family does: NCCL waits for all devices of the
    /// process to free one, and the device of another rank may be waiting for this one.
    void share_process() {
        const std::lock_guard lock(mutex_);
        ranks_share_process_ = true;
    }

    /// The first cause stays. Never blocks for longer than the store does.
    void poison(std::string_view why) noexcept { poison(why, std::nullopt, true); }
    /// After NCCL failed on channel `c`. A lost connection is traced to the rank that is gone, which takes the grace of
    /// an inquiry. True when the cause says more than `e`.
    bool poison(const nccl_channel& c, const std::exception& e) noexcept {
        try {
            const auto* const failed = dynamic_cast<const backend_error*>(&e);
            const int code = failed == nullptr ? 0 : failed->context().backend_code;
            if (store_ != nullptr && (code == ncclRemoteError || code == ncclSystemError)) {
                nccl_absence found(*store_, key_, rank, c.members, c.id, timeout);
                if (const auto cause = store_->failure(key_)) {
                    poison(*cause, std::nullopt, false);
                    return true;
                }
                found.judge_failed(e.what());
                poison(found.text());
                return !found.missing().empty();
            }
        } catch (const std::exception&) {}  // the store is gone: NCCL's words have to do
        poison(e.what());
        return false;
    }
    [[nodiscard]] bool poisoned() const noexcept { return poisoned_.load(std::memory_order_acquire); }
    /// Waits until NCCL has let go of streams and buffers, then throws.
    /// Errors  timeout_error, once, when this rank found that somebody is missing; aborted_error otherwise.
    [[noreturn]] void raise(const error_context& context) {
        await_abort();
        std::unique_lock lock(mutex_);
        if (overdue_) {
            const timeout_error found = *std::exchange(overdue_, std::nullopt);
            throw found;
        }
        throw aborted_error(formatted("{}: aborted: {}{}", context.operation, cause_, where(context)), context);
    }
    void raise_if_poisoned(const error_context& context) {
        if (poisoned()) { raise(context); }
    }

    /// For host waits.
    void look() override {
        if (!poisoned()) { return; }
        error_context context;
        context.operation = "wait";
        {
            const std::lock_guard lock(mutex_);
            if (!channels_.empty()) { context = channels_.front().channel->context(); }
        }
        context.sequence = 0;
        raise(context);
    }

    /// enqueue() puts NCCL operations on the channel's stream. With more than one communicator each starts behind the
    /// one enqueued before it, so that the order of calls, which is the same on all ranks, is that on all devices.
    template <class Enqueue> void in_order(nccl_channel& c, Enqueue enqueue) {
        if (nccl_orders_launches_ || count_.load(std::memory_order_relaxed) < 2) { return enqueue(); }
        order_.run(c.queue, std::move(enqueue));
    }

    /// An exception passes the channel's communicator. The family fails with its cause, if somebody names it within a
    /// tenth of a second, and then aborts the channel with all others.
    void leave_behind(const nccl_channel& c) noexcept {
        const std::lock_guard lock(mutex_);
        if (cause_due_) { return; }
        cause_due_ = after(std::chrono::milliseconds(100));
        left_ = formatted("'{}' was left by an exception", c.name);
    }

    /// The channel's end: its work is waited for, unless the family has failed, and its handle given back, or kept until
    /// the family ends.
    void close(const std::shared_ptr<nccl_channel>& c, bool by_exception) noexcept {
        try {
            if (by_exception) { poison(formatted("'{}' was left by an exception", c->name)); }
            await_work(*c);
        } catch (const std::exception& e) { poison(e.what()); }
        if (poisoned()) {
            await_abort();
        } else if (const ncclComm_t handle = c->take(); handle != nullptr && c->owned) {
            part_from(handle);
        }
        std::unique_lock lock(mutex_);
        std::erase_if(channels_, [&](const nccl_watched& w) { return w.channel == c; });
        count_ = channels_.size();
        // The stream may be the caller's, who may destroy it next. And the watchdog must not be the one who frees
        // memory, for which CUDA may wait for the device.
        changed_.wait_for(lock, 2 * longest_end, [&] { return !looking_; });
    }

private:
    void part_from(ncclComm_t handle) noexcept {
        {
            const std::lock_guard lock(mutex_);
            if (ranks_share_process_) {
                try {
                    parted_.push_back(handle);
                } catch (const std::exception&) {}  // no memory: it is left behind
                return;
            }
        }
        end_handles({handle}, device_, ncclCommDestroy);
    }
    [[nodiscard]] static std::vector<std::shared_ptr<nccl_channel>> all_of(const std::vector<nccl_watched>& channels) {
        std::vector<std::shared_ptr<nccl_channel>> all;
        for (const nccl_watched& w : channels) { all.push_back(w.channel); }
        return all;
    }

    void poison(std::string_view why, std::optional<timeout_error> found, bool tell) noexcept {
        try {
            {
                const std::lock_guard lock(mutex_);
                if (poisoned()) { return; }
                cause_ = tell && !found ? formatted("rank {}: {}", rank, why) : std::string(why);
                overdue_ = std::move(found);
                poisoned_.store(true, std::memory_order_release);
            }
            changed_.notify_all();
            if (tell && store_ != nullptr) { store_->fail(key_, rank, why); }
        } catch (const std::exception&) { poisoned_.store(true, std::memory_order_release); }  // the abort stands
    }

    [[nodiscard]] std::string heard() const { return formatted("{}/heard", key_); }
    // Until all ranks that are still here know that the family has failed.
    void await_others() noexcept {
        if (store_ == nullptr || heard_) { return; }
        try {
            heard_ = true;
            store_->arrive(heard(), rank);
            for (const deadline limit = after(hearing); clock_type::now() < limit;) {
                std::vector<int> deaf = store_->missing(heard(), ranks);
                if (deaf.empty()) { return; }
                const std::vector<int> gone = store_->missing(key_, ranks);
                std::erase_if(deaf, [&](int r) { return std::find(gone.begin(), gone.end(), r) != gone.end(); });
                if (deaf.empty()) { return; }
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        } catch (const std::exception&) {}  // the store is gone: nobody can be told
    }

    void await_abort() noexcept {
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, 2 * longest_end, [&] { return aborted_; });
    }
    // Throws nothing that the watchdog has found: that is for a caller, and this is for destructors.
    void await_work(const nccl_channel& c) {
        if (poisoned()) { return; }
        const auto end = c.queue.record();
        const deadline limit = after(timeout);
        while (!poisoned() && !end.ready()) {
            if (clock_type::now() - patience > limit) {
                return poison(formatted("'{}': its work did not end within {:.3g} s", c.name, seconds(timeout)));
            }
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }

    void watch() noexcept {
        cudaSetDevice(device_);
        cudaStreamCaptureMode relaxed = cudaStreamCaptureModeRelaxed;  // queries here must not break a capture there
        cudaThreadExchangeStreamCaptureMode(&relaxed);
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait_for(lock, period, [&] { return ending_ || (poisoned() && !aborted_); });
            if (ending_) { return; }
            if (aborted_) { continue; }
            std::vector<nccl_watched> now = channels_;
            const std::size_t known = additions_;
            looking_ = true;
            const bool left = cause_due_ && clock_type::now() >= *cause_due_;
            lock.unlock();
            if (left) { poison(left_); }
            if (!poisoned()) {
                try {
                    look_around(now);
                } catch (const std::exception& e) { poison(e.what()); }
            }
            const bool failed = poisoned();  // who poisons from here on is heard at the next look
            if (failed) {
                for (nccl_watched& w : now) { w.marker.reset(); }
                await_others();
                abort_all(all_of(now), device_);
            }
            lock.lock();
            for (nccl_watched& w : channels_) {  // the list may have changed
                for (nccl_watched& seen : now) {
                    if (seen.channel == w.channel) { w = std::move(seen); }
                }
            }
            now.clear();
            aborted_ = failed && additions_ == known;
            looking_ = false;
            changed_.notify_all();
        }
    }

    void look_around(std::vector<nccl_watched>& channels) {
        if (store_ != nullptr) {
            if (const auto cause = store_->failure(key_)) { return poison(*cause, std::nullopt, false); }
            if (store_->failure(nccl_absence::question(key_))) { publish(channels); }
        }
        for (nccl_watched& w : channels) {
            nccl_channel& c = *w.channel;
            const deadline now = clock_type::now();
            const auto since = c.inside_since.load(std::memory_order_relaxed);
            const bool inside = since != 0 && now - deadline(duration(since)) > timeout;
            bool late = false;
            try {
                if (std::unique_lock in_use(c.in_use, std::try_to_lock); in_use.owns_lock()) {
                    w.expect_healthy();
                    late = w.is_late(now, timeout);
                }
            } catch (const backend_error& e) {
                publish(channels);
                static_cast<void>(poison(c, e));
                return;
            }
            if (inside || late) { return explain(c, late ? w.marked : c.progress(), channels); }
        }
    }
    void publish(const std::vector<nccl_watched>& channels) {
        if (store_ == nullptr) { return; }
        std::vector<nccl_position> positions;
        for (const nccl_watched& w : channels) { positions.push_back(w.channel->position()); }
        nccl_absence::answer(*store_, key_, rank, positions);
    }
    void explain(const nccl_channel& c, const nccl_progress& stuck, const std::vector<nccl_watched>& channels) {
        if (store_ == nullptr) {
            const std::string text =
                formatted("{}: did not complete within {:.3g} s; who is missing is known only with a store{}",
                          stuck.context.operation, seconds(timeout), where(stuck.context));
            return poison(text, timeout_error(text, {}, stuck.context), true);
        }
        publish(channels);
        nccl_absence found(*store_, key_, rank, c.members, stuck.at.id, timeout);
        if (found.failed_elsewhere()) { return; }  // the next look hears of it
        found.judge_late(stuck, timeout);
        poison(found.text(), timeout_error(found.text(), found.missing(), stuck.context), true);
    }
};

}  // namespace tutti::comm::detail
