// virtual_queue: records what a rank would do and charges a clock instead of doing it.
// Needs core/run. The same pipeline code that runs on hosts and devices can so be costed for thousands of ranks.
#pragma once

#include <algorithm>    // max
#include <chrono>       // virtual times as points of the clock
#include <cstdint>      // event ids
#include <deque>        // names, which stay where they are
#include <memory>       // the recording is shared by a rank's queues
#include <optional>     // marks
#include <string>       // operation names
#include <string_view>  // what names are given as
#include <type_traits>  // remove_const_t
#include <vector>       // streams of steps

#include <tutti/core/deadline.hpp>  // what a mark tells
#include <tutti/core/error.hpp>     // usage_error
#include <tutti/core/run.hpp>       // cost, charging_queue
#include <tutti/core/text.hpp>      // formatted
#include <tutti/core/view.hpp>      // what is copied

namespace tutti {

/// Speeds by which a virtual rank turns costs into time.
struct virtual_rates {
    double bytes_per_second = 3e12;
    double flops_per_second = 300e12;
    double host_bytes_per_second = 50e9;  ///< of the rank's own link to its host's memory, each way
};

/// One step of a virtual stream. Small: a large job records a hundred million of them.
struct virtual_step {
    enum class kind : std::uint8_t { work, collective, record, wait };
    kind what = kind::work;
    std::uint16_t name = 0;  ///< number of the operation's name, see virtual_recording::name_of
    std::uint32_t id = 0;    ///< event of record and wait; of a collective, what charge_collective was given
    union {
        double seconds = 0;  ///< of work
        std::uint64_t call;  ///< of a collective, likewise
    };
};
static_assert(sizeof(virtual_step) == 16);

/// Everything one virtual rank recorded: its streams, event count and memory; and once resolved, when events happened.
class virtual_recording {
    static constexpr std::uint32_t nothing = ~std::uint32_t{0};
    struct known_name {
        const char* given;  // where the caller had it: literals are found by this at once
        std::string text;
    };
    std::deque<known_name> names_;
    std::uint32_t host_behind_ = nothing;  // event for which the host has waited last
    std::vector<std::uint32_t> behind_;    // by stream: the last of those that it runs behind

public:
    virtual_rates rates;
    std::vector<std::vector<virtual_step>> streams;
    std::uint32_t events = 0;
    std::vector<double> reached;  ///< by event, seconds; negative while it lies ahead. Written by who resolves
    bool abandoned = false;       ///< will not be resolved any further
    memory_account account;

    [[nodiscard]] std::string_view name_of(const virtual_step& s) const { return names_.at(s.name).text; }
    /// The number of a name, of which a copy is kept.
    [[nodiscard]] std::uint16_t number_of(std::string_view name) {
        for (std::size_t i = 0; i < names_.size(); ++i) {
            if (names_[i].given == name.data() && names_[i].text == name) { return static_cast<std::uint16_t>(i); }
        }
        for (std::size_t i = 0; i < names_.size(); ++i) {
            if (names_[i].text == name) { return static_cast<std::uint16_t>(i); }
        }
        names_.push_back({name.data(), std::string(name)});
        return narrow<std::uint16_t>(names_.size() - 1, "virtual_queue: the number of names");
    }
    void add_stream() {
        streams.emplace_back();
        behind_.push_back(nothing);
    }
    /// The next step of a stream, behind what the host has waited for.
    void push(std::size_t stream, virtual_step s) {
        if (behind_[stream] != host_behind_) {
            behind_[stream] = host_behind_;
            streams[stream].push_back({virtual_step::kind::wait, number_of("wait"), host_behind_, {}});
        }
        streams[stream].push_back(s);
    }
    /// The host waits for an event that the stream has just recorded.
    void hold_host(std::size_t stream, std::uint32_t event) noexcept { behind_[stream] = host_behind_ = event; }
};

/// A stream of a virtual rank.
///
/// Semantics    nothing executes: `run` appends the operation's time, max(bytes / bandwidth, flops / rate). Streams of a
///              rank are as fast side by side as alone. Events and marks count as reached for whoever would wait on the
///              host: the program that records is infinitely fast. Where a value comes back (fetch) what follows may
///              depend on it: whatever stream it is given to, it runs behind that point.
///   upload     and download charge the rank's link to its host, one in each direction: those of one direction are to
///              be on one stream, as on a lane.
///   mark       when it was reached is known once the recording has been resolved: seconds from `deadline{}`, to the
///              nearest nanosecond. A timeline of virtual ranks takes that as its origin.
/// Threads      one thread records a rank.
/// Determinism  the recording depends on the program alone.
/// Cost         16 bytes a step.
class virtual_queue {
    std::shared_ptr<virtual_recording> recording_;
    std::size_t stream_ = 0;

public:
    using memory_type = phantom_memory;
    static constexpr bool executes_inline = false;

    struct event_type {
        std::uint32_t id = 0;
        [[nodiscard]] bool ready() const noexcept { return true; }
        void wait_host(deadline) const noexcept {}
    };
    class mark_type {
        friend virtual_queue;
        std::shared_ptr<const virtual_recording> recording_;
        std::uint32_t event_;
        mark_type(std::shared_ptr<const virtual_recording> r, std::uint32_t e) : recording_(std::move(r)), event_(e) {}
        [[nodiscard]] bool passed() const noexcept {
            return event_ < recording_->reached.size() && recording_->reached[event_] >= 0;
        }
        [[nodiscard]] double reached() const {
            if (!passed()) { throw usage_error("virtual_queue: a mark that is never reached"); }
            return recording_->reached[event_];
        }
        [[nodiscard]] static duration ticks(double s) {
            return std::chrono::round<duration>(std::chrono::duration<double>(s));
        }

    public:
        [[nodiscard]] bool ready() const noexcept { return recording_->abandoned || passed(); }
        [[nodiscard]] deadline when() const { return deadline{} + ticks(reached()); }
        [[nodiscard]] duration since(const mark_type& earlier) const { return when() - earlier.when(); }
    };

    virtual_queue() : virtual_queue(virtual_rates{}) {}
    explicit virtual_queue(virtual_rates rates) : recording_(std::make_shared<virtual_recording>()) {
        if (!(rates.bytes_per_second > 0) || !(rates.flops_per_second > 0) || !(rates.host_bytes_per_second > 0)) {
            throw usage_error(formatted("virtual_queue: rates must be positive (bytes/s {}, flops/s {}, host {})",
                                        rates.bytes_per_second, rates.flops_per_second, rates.host_bytes_per_second));
        }
        recording_->rates = rates;
        recording_->add_stream();
    }

    [[nodiscard]] event_type record() const {
        const event_type e{recording_->events++};
        push({virtual_step::kind::record, number("record"), e.id, {}});
        return e;
    }
    void wait(const event_type& e) { push({virtual_step::kind::wait, number("wait"), e.id, {}}); }
    [[nodiscard]] std::optional<mark_type> mark() const { return mark_type(recording_, record().id); }

    /// Errors  usage_error for a cost that is negative or no number.
    void charge(std::string_view name, cost c) {
        if (!(c.bytes >= 0) || !(c.flops >= 0)) {
            throw usage_error(formatted("virtual_queue: '{}' costs {} bytes and {} flops", name, c.bytes, c.flops));
        }
        const virtual_rates& r = recording_->rates;
        charge_seconds(name, std::max(c.bytes / r.bytes_per_second, c.flops / r.flops_per_second));
    }
    /// What passes over the link to the host. Errors: usage_error when sizes differ.
    template <class T>
    void charge_transfer(std::string_view name, view<T, phantom_memory> in,
                         view<std::remove_const_t<T>, phantom_memory> out) {
        if (in.size() != out.size()) {
            throw usage_error(formatted("{}: sizes differ (in {}, out {})", name, in.size(), out.size()));
        }
        charge_seconds(name, static_cast<double>(in.size_bytes()) / recording_->rates.host_bytes_per_second);
    }
    /// What is given to any stream of the rank from now on runs behind what this one has been given so far.
    void hold_host() {
        const event_type here = record();
        recording_->hold_host(stream_, here.id);
    }
    /// Something that other ranks take part in. `id` and `call` mean something to who resolves the recordings of all.
    void charge_collective(std::string_view name, std::uint32_t id, std::uint64_t call) {
        virtual_step s{virtual_step::kind::collective, number(name), id, {}};
        s.call = call;
        push(s);
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
        recording_->add_stream();
        return q;
    }
    /// Of all streams of the rank.
    [[nodiscard]] virtual_recording& recording() const noexcept { return *recording_; }
    [[nodiscard]] const std::shared_ptr<virtual_recording>& shared_recording() const noexcept { return recording_; }
    /// Its place among them.
    [[nodiscard]] std::size_t stream() const noexcept { return stream_; }

private:
    [[nodiscard]] std::uint16_t number(std::string_view name) const { return recording_->number_of(name); }
    void charge_seconds(std::string_view name, double seconds) const {
        virtual_step s{virtual_step::kind::work, number(name), 0, {}};
        s.seconds = seconds;
        push(s);
    }
    void push(virtual_step s) const { recording_->push(stream_, s); }
};
static_assert(timed_queue<virtual_queue> && charging_queue<virtual_queue>);

/// Copies host to device, and device to host, of a virtual rank: its host's memory has sizes alone, too.
/// Errors  usage_error when sizes differ.
template <class T>
void upload(virtual_queue q, view<T, phantom_memory> in, view<std::remove_const_t<T>, phantom_memory> out) {
    q.charge_transfer("upload", in, out);
}
template <class T>
void download(virtual_queue q, view<T, phantom_memory> in, view<std::remove_const_t<T>, phantom_memory> out) {
    q.charge_transfer("download", in, out);
}

/// Virtual time at which each stream of one rank ends, all its streams resolved against their events.
///
/// Semantics  may be called again when more has been recorded. Marks are reached afterwards.
/// Cost    linear in the number of steps.
/// Errors  usage_error when a stream waits for an event that is never recorded before it, or for other ranks
///         (simulate/cluster resolves those).
inline std::vector<double> resolve(virtual_recording& recording) {
    const std::size_t streams = recording.streams.size();
    std::vector<double> time(streams, 0.0);
    std::vector<std::size_t> next(streams, 0);
    std::vector<double>& event = recording.reached;
    event.assign(recording.events, -1.0);
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
                } else if (step.what == virtual_step::kind::work) {
                    time[s] += step.seconds;
                } else {
                    throw usage_error(
                        formatted("virtual_queue: stream {} waits for other ranks in {}", s, recording.name_of(step)));
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
