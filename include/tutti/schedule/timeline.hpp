// timeline: spans of work, waits and steps per rank and track; Chrome trace JSON for Perfetto; exposed communication.
// Needs core/deadline. A null timeline costs one branch, so lanes and strategies carry a pointer and record when it is
// set. Metrics: exposed time is what a consumer, a thread or a stream, spent held up by tickets (its wait spans).
#pragma once

#include <algorithm>    // sort
#include <cstddef>      // size_t
#include <cstdint>      // track numbers
#include <deque>        // pending spans
#include <memory>       // pending spans
#include <mutex>        // ranks of one process share a timeline
#include <optional>     // marks
#include <span>         // pieces of a document
#include <string>       // names, JSON
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // spans

#include <tutti/core/deadline.hpp>                 // clock_type
#include <tutti/schedule/detail/chrome_trace.hpp>  // the trace
#include <tutti/schedule/detail/name_table.hpp>    // names of spans
#include <tutti/schedule/detail/pending_span.hpp>  // span_between

namespace tutti::schedule {

enum class span_kind : std::uint8_t {
    work,           ///< something ran
    communication,  ///< a lane did, beside its caller
    wait,           ///< a consumer was held up: exposed
    step            ///< one optimizer step, the unit of per-step figures
};

/// What was recorded, as it is.
struct timed_span {
    std::string track;
    std::string name;
    span_kind kind = span_kind::work;
    deadline begin{};
    deadline end{};
};

/// Count and total duration of the spans of one name.
struct span_total {
    std::string name;
    span_kind kind = span_kind::work;
    std::size_t count = 0;
    double seconds = 0;
};

/// One step: its duration and the part of it spent in waits.
struct step_total {
    deadline begin{};
    double seconds = 0;
    double exposed = 0;
    deadline end{};
};

/// Collects spans of all ranks of a process.
///
/// Semantics    a track is a row of the picture: (rank, name); rank becomes the process and name the thread of the
///              trace. Spans lie between host times, or between marks of a timed queue: those are pending until the
///              queue has got there, which later calls notice; nothing ever waits for them. What reads the timeline
///              sees what has been reached. The timeline must outlive the lanes and strategies that write to it.
/// Threads      all members may be called from any thread.
/// Units        seconds in summaries, microseconds since `origin` in the trace. Processes of one machine that pass the
///              same origin share a time axis.
/// Cost         about 0.1 us and 32 bytes a span; between marks, an allocation and a few questions to their queue more.
/// Errors       a trace never fails the run. A span is dropped, and counted by `dropped`, when memory is short, where a
///              mark is empty (its queue was being captured, or failed), and when a mark will never be reached.
class timeline {
public:
    using track = std::uint32_t;

    explicit timeline(deadline origin = clock_type::now()) : origin_(origin) {}
    timeline(const timeline&) = delete;
    timeline& operator=(const timeline&) = delete;

    /// The track of that rank and name, made at its first use.
    [[nodiscard]] track track_of(int rank, std::string_view name) {
        const std::lock_guard lock(mutex_);
        for (track t = 0; t < tracks_.size(); ++t) {
            if (tracks_[t].rank == rank && tracks_[t].name == name) { return t; }
        }
        tracks_.push_back({rank, std::string(name)});
        return static_cast<track>(tracks_.size() - 1);
    }

    void add(track t, std::string_view name, span_kind kind, deadline begin, deadline end) noexcept {
        const std::lock_guard lock(mutex_);
        try {
            spans_.push_back({begin, end, names_.number_of(name), t, kind});
        } catch (...) { ++dropped_; }
    }

    /// The span between two marks of one queue.
    template <class Mark>
    void add(track t, std::string_view name, span_kind kind, std::optional<Mark> begin,
             std::optional<Mark> end) noexcept {
        const std::lock_guard lock(mutex_);
        while (!pending_.empty() && settled(pending_.front())) { pending_.pop_front(); }
        if (!begin || !end) {
            ++dropped_;
            return;
        }
        try {
            using between = detail::span_between<Mark>;
            pending_.push_back(
                {std::make_unique<between>(*std::move(begin), *std::move(end)), names_.number_of(name), t, kind});
        } catch (...) { ++dropped_; }
    }

    /// Drops the pending spans of a track: its queue may never get there.
    void abandon(track t) noexcept {
        const std::lock_guard lock(mutex_);
        settle();
        dropped_ += std::erase_if(pending_, [t](const pending_record& p) { return p.where == t; });
    }

    /// Totals of a rank's spans, by name and kind, the longest first; steps are not among them.
    [[nodiscard]] std::vector<span_total> totals(int rank) const {
        const std::lock_guard lock(mutex_);
        settle();
        constexpr std::size_t kinds = 3;  // but steps
        std::vector<span_total> all(kinds * names_.size());
        each_of(rank, [&](const span_record& s) {
            if (s.kind == span_kind::step) { return; }
            span_total& total = all[kinds * s.name + static_cast<std::size_t>(s.kind)];
            total.name = names_[s.name];
            total.kind = s.kind;
            total.count += 1;
            total.seconds += seconds(s.end - s.begin);
        });
        std::erase_if(all, [](const span_total& total) { return total.count == 0; });
        std::sort(all.begin(), all.end(), [](const span_total& a, const span_total& b) {
            return a.seconds != b.seconds ? a.seconds > b.seconds : a.name < b.name;
        });
        return all;
    }

    /// Seconds that consumers of a rank were held up by tickets.
    [[nodiscard]] double exposed(int rank) const {
        const std::lock_guard lock(mutex_);
        settle();
        double total = 0;
        each_of(rank, [&](const span_record& s) {
            if (s.kind == span_kind::wait) { total += seconds(s.end - s.begin); }
        });
        return total;
    }

    /// The rank's steps in order. A wait belongs to the step during which it began.
    [[nodiscard]] std::vector<step_total> steps(int rank) const {
        const std::lock_guard lock(mutex_);
        settle();
        std::vector<span_record> marks;
        std::vector<span_record> waits;
        each_of(rank, [&](const span_record& s) {
            if (s.kind == span_kind::step) { marks.push_back(s); }
            if (s.kind == span_kind::wait) { waits.push_back(s); }
        });
        const auto earlier = [](const span_record& a, const span_record& b) { return a.begin < b.begin; };
        std::sort(marks.begin(), marks.end(), earlier);
        std::sort(waits.begin(), waits.end(), earlier);
        std::vector<step_total> all;
        auto wait = waits.begin();
        for (const span_record& mark : marks) {
            step_total step{mark.begin, seconds(mark.end - mark.begin), 0, mark.end};
            while (wait != waits.end() && wait->begin < mark.begin) { ++wait; }
            for (; wait != waits.end() && wait->begin < mark.end; ++wait) {
                step.exposed += seconds(wait->end - wait->begin);
            }
            all.push_back(step);
        }
        return all;
    }

    /// The rank's spans, in the order in which they ended or were noticed.
    [[nodiscard]] std::vector<timed_span> spans(int rank) const {
        const std::lock_guard lock(mutex_);
        settle();
        std::vector<timed_span> all;
        each_of(rank, [&](const span_record& s) {
            all.push_back({tracks_[s.where].name, names_[s.name], s.kind, s.begin, s.end});
        });
        return all;
    }

    /// Forgets the spans so far, also pending ones; tracks stay.
    void clear() noexcept {
        const std::lock_guard lock(mutex_);
        spans_.clear();
        pending_.clear();
    }

    [[nodiscard]] std::size_t size() const {
        const std::lock_guard lock(mutex_);
        settle();
        return spans_.size();
    }
    /// Spans that will never be among the others.
    [[nodiscard]] std::size_t dropped() const {
        const std::lock_guard lock(mutex_);
        settle();
        return dropped_;
    }
    /// Spans whose queue has not got there.
    [[nodiscard]] std::size_t pending() const {
        const std::lock_guard lock(mutex_);
        settle();
        return pending_.size();
    }

    /// The events of this process as comma-separated JSON objects, for `document`; of spans, those that end at `since`
    /// or later.
    [[nodiscard]] std::string events(deadline since = deadline::min()) const {
        const std::lock_guard lock(mutex_);
        settle();
        detail::chrome_events all(spans_.size() + tracks_.size());
        for (track t = 0; t < tracks_.size(); ++t) { all.add_track(tracks_[t].rank, t, tracks_[t].name); }
        for (const span_record& s : spans_) {
            if (s.end < since) { continue; }
            all.add_span(tracks_[s.where].rank, s.where, names_[s.name], name_of(s.kind), seconds(s.begin - origin_),
                         seconds(s.end - s.begin));
        }
        return std::move(all).take();
    }

    /// A whole trace file from the events of one or more processes.
    [[nodiscard]] static std::string document(std::span<const std::string> events) {
        return detail::chrome_document(events);
    }

    /// This process's spans as a trace file's text.
    [[nodiscard]] std::string chrome_trace() const {
        const std::string own = events();
        return document({&own, 1});
    }

    /// Writes the trace. Errors: backend_error when the file cannot be written completely.
    void write(const std::string& path) const { detail::write_trace(path, chrome_trace()); }

    [[nodiscard]] static constexpr std::string_view name_of(span_kind k) noexcept {
        constexpr std::string_view names[] = {"work", "communication", "wait", "step"};
        return names[static_cast<std::size_t>(k)];
    }

private:
    struct track_record {
        int rank;
        std::string name;
    };
    struct span_record {
        deadline begin;
        deadline end;
        std::uint32_t name;
        track where;
        span_kind kind;
    };
    struct pending_record {
        std::unique_ptr<detail::pending_span> span;
        std::uint32_t name;
        track where;
        span_kind kind;
    };

    // Is there nothing to wait for any more? Then it is among the spans, or dropped.
    [[nodiscard]] bool settled(const pending_record& p) const noexcept {
        try {
            const auto times = p.span->times();
            if (!times) { return false; }
            spans_.push_back({times->first, times->second, p.name, p.where, p.kind});
        } catch (...) { ++dropped_; }
        return true;
    }
    template <class Visit> void each_of(int rank, Visit visit) const {
        for (const span_record& s : spans_) {
            if (tracks_[s.where].rank == rank) { visit(s); }
        }
    }
    void settle() const {
        std::erase_if(pending_, [this](const pending_record& p) { return settled(p); });
    }

    mutable std::mutex mutex_;
    deadline origin_;
    std::vector<track_record> tracks_;
    detail::name_table names_;
    mutable std::vector<span_record> spans_;
    mutable std::deque<pending_record> pending_;  // settled by whoever looks
    mutable std::size_t dropped_ = 0;
};

}  // namespace tutti::schedule
