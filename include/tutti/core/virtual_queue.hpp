// virtual_queue: records what a rank would do and charges a clock instead of doing it.
// Needs core/run. The same pipeline code that runs on hosts and devices can so be costed for thousands of ranks.
#pragma once

#include <algorithm>    // max
#include <cstdint>      // event ids
#include <memory>       // the recording is shared by a rank's queues
#include <string_view>  // operation names
#include <vector>       // streams of steps

#include <tutti/core/run.hpp>   // cost, charging_queue
#include <tutti/core/text.hpp>  // formatted

namespace tutti {

/// Speeds by which a virtual rank turns costs into time.
struct virtual_rates {
    double bytes_per_second = 3e12;
    double flops_per_second = 300e12;
};

/// One step of a virtual stream.
struct virtual_step {
    enum class kind : std::uint8_t { work, collective, record, wait };
    kind what = kind::work;
    std::string_view name;   ///< operation; points to a literal
    std::uint64_t id = 0;    ///< event of record and wait; communicator of a collective
    std::uint64_t call = 0;  ///< n-th call on that communicator
    double seconds = 0;      ///< duration of work, or of a collective once all its ranks have arrived
};

/// Everything one virtual rank recorded: its streams, event count and memory.
struct virtual_recording {
    virtual_rates rates;
    std::vector<std::vector<virtual_step>> streams;
    std::uint64_t events = 0;
    memory_account account;
};

/// A stream of a virtual rank.
///
/// Semantics    nothing executes: `run` appends the operation's time, max(bytes / bandwidth, flops / rate).
/// Threads      one thread records a rank.
/// Determinism  the recording depends on the program alone.
/// Cost         one vector append a step.
class virtual_queue {
    std::shared_ptr<virtual_recording> recording_;
    std::size_t stream_ = 0;

public:
    using memory_type = phantom_memory;
    static constexpr bool executes_inline = false;

    struct event_type {
        std::uint64_t id = 0;
        [[nodiscard]] bool ready() const noexcept { return true; }
        void wait_host(deadline) const noexcept {}
    };

    virtual_queue() : virtual_queue(virtual_rates{}) {}
    explicit virtual_queue(virtual_rates rates) : recording_(std::make_shared<virtual_recording>()) {
        if (!(rates.bytes_per_second > 0) || !(rates.flops_per_second > 0)) {
            throw usage_error(formatted("virtual_queue: rates must be positive (bytes/s {}, flops/s {})",
                                        rates.bytes_per_second, rates.flops_per_second));
        }
        recording_->rates = rates;
        recording_->streams.emplace_back();
    }

    [[nodiscard]] event_type record() {
        const event_type e{recording_->events++};
        push({virtual_step::kind::record, "record", e.id, 0, 0});
        return e;
    }
    void wait(const event_type& e) { push({virtual_step::kind::wait, "wait", e.id, 0, 0}); }

    void charge(std::string_view name, cost c) {
        const virtual_rates& r = recording_->rates;
        push({virtual_step::kind::work, name, 0, 0,
              std::max(c.bytes / r.bytes_per_second, c.flops / r.flops_per_second)});
    }
    /// A collective: lasts `seconds` from the arrival of the last rank.
    void charge_collective(std::string_view name, std::uint64_t communicator, std::uint64_t call, double seconds) {
        push({virtual_step::kind::collective, name, communicator, call, seconds});
    }

    [[nodiscard]] void* allocate(std::size_t bytes) const noexcept {
        recording_->account.allocated(bytes);
        return nullptr;
    }
    void release(void*, std::size_t bytes) const noexcept { recording_->account.released(bytes); }
    [[nodiscard]] memory_account& account() const noexcept { return recording_->account; }

    /// Another stream of the same rank.
    [[nodiscard]] virtual_queue sibling() const {
        virtual_queue q = *this;
        q.stream_ = recording_->streams.size();
        recording_->streams.emplace_back();
        return q;
    }
    [[nodiscard]] const virtual_recording& recording() const noexcept { return *recording_; }

private:
    void push(virtual_step s) { recording_->streams[stream_].push_back(s); }
};
static_assert(queue<virtual_queue> && charging_queue<virtual_queue>);

/// Virtual time at which each stream of one rank ends, all its streams resolved against their events. Collectives count
/// with their own duration: with one rank nobody has to be waited for.
///
/// Cost    linear in the number of steps.
/// Errors  usage_error when a stream waits for an event that is never recorded before it.
[[nodiscard]] inline std::vector<double> resolve(const virtual_recording& recording) {
    const std::size_t streams = recording.streams.size();
    std::vector<double> time(streams, 0.0);
    std::vector<std::size_t> next(streams, 0);
    std::vector<double> event(recording.events, -1.0);
    for (bool progress = true; progress;) {
        progress = false;
        for (std::size_t s = 0; s < streams; ++s) {
            const auto& steps = recording.streams[s];
            for (; next[s] < steps.size(); ++next[s], progress = true) {
                const virtual_step& step = steps[next[s]];
                if (step.what == virtual_step::kind::record) {
                    event[step.id] = time[s];
                } else if (step.what == virtual_step::kind::wait) {
                    if (step.id >= event.size() || event[step.id] < 0) { break; }
                    time[s] = std::max(time[s], event[step.id]);
                } else {
                    time[s] += step.seconds;
                }
            }
        }
    }
    for (std::size_t s = 0; s < streams; ++s) {
        if (next[s] != recording.streams[s].size()) {
            throw usage_error(formatted("virtual_queue: stream {} waits for event {}, which is never reached", s,
                                        recording.streams[s][next[s]].id));
        }
    }
    return time;
}

}  // namespace tutti
