// timeline: spans of work, waits and steps per rank and track; Chrome trace JSON for Perfetto; exposed communication.
// Needs core/deadline. A null timeline costs one branch, so lanes and strategies carry a pointer and record when it is
// set. Metrics: exposed time is what a consumer, a thread or a stream, spent held up by tickets (its wait spans).
#pragma once

#include <algorithm>    // sort
#include <cstddef>      // ptrdiff_t
#include <cstdint>      // track numbers
#include <cstdio>       // the trace file
#include <cstring>      // strerror
#include <deque>        // pending spans
#include <memory>       // pending spans
#include <mutex>        // ranks of one process share a timeline
#include <optional>     // marks
#include <span>         // pieces of a document
#include <string>       // names, JSON
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // spans

#include <cerrno>  // why a file could not be written

#include <tutti/core/deadline.hpp>                 // clock_type
#include <tutti/core/error.hpp>                    // backend_error
#include <tutti/core/text.hpp>                     // formatted
#include <tutti/schedule/detail/json.hpp>          // append_json_string
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
            spans_.push_back({begin, end, number_of(name), t, kind});
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
                {std::make_unique<between>(*std::move(begin), *std::move(end)), number_of(name), t, kind});
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
        for (const span_record& s : spans_) {
            if (tracks_[s.where].rank != rank || s.kind == span_kind::step) { continue; }
            span_total& total = all[kinds * s.name + static_cast<std::size_t>(s.kind)];
            total.name = names_[s.name];
            total.kind = s.kind;
            total.count += 1;
            total.seconds += seconds(s.end - s.begin);
        }
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
        for (const span_record& s : spans_) {
            if (tracks_[s.where].rank == rank && s.kind == span_kind::wait) { total += seconds(s.end - s.begin); }
        }
        return total;
    }

    /// The rank's steps in order. A wait belongs to the step during which it began.
    [[nodiscard]] std::vector<step_total> steps(int rank) const {
        const std::lock_guard lock(mutex_);
        settle();
        std::vector<span_record> marks;
        std::vector<span_record> waits;
        for (const span_record& s : spans_) {
            if (tracks_[s.where].rank != rank) { continue; }
            if (s.kind == span_kind::step) { marks.push_back(s); }
            if (s.kind == span_kind::wait) { waits.push_back(s); }
        }
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
        for (const span_record& s : spans_) {
            if (tracks_[s.where].rank == rank) {
                all.push_back({tracks_[s.where].name, names_[s.name], s.kind, s.begin, s.end});
            }
        }
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
        std::string out;
        out.reserve(128 * (spans_.size() + tracks_.size()));
        const auto comma = [&] {
            if (!out.empty()) { out += ",\n"; }
        };
        for (track t = 0; t < tracks_.size(); ++t) {
            comma();
            out += formatted(R"({{"name":"process_name","ph":"M","pid":{0},"tid":{1},)"
                             R"("args":{{"name":"rank {0}"}}}},)"
                             "\n"
                             R"({{"name":"thread_name","ph":"M","pid":{0},"tid":{1},"args":{{"name":)",
                             tracks_[t].rank, t);
            detail::append_json_string(out, tracks_[t].name);
            out += "}}";
        }
        for (const span_record& s : spans_) {
            if (s.end < since) { continue; }
            comma();
            out += R"({"name":)";
            detail::append_json_string(out, names_[s.name]);
            out += formatted(R"(,"cat":"{}","ph":"X","ts":{:.3f},"dur":{:.3f},"pid":{},"tid":{}}})", name_of(s.kind),
                             1e6 * seconds(s.begin - origin_), 1e6 * seconds(s.end - s.begin), tracks_[s.where].rank,
                             s.where);
        }
        return out;
    }

    /// A whole trace file from the events of one or more processes.
    [[nodiscard]] static std::string document(std::span<const std::string> events) {
        std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
        bool first = true;
        for (const std::string& e : events) {
            if (e.empty()) { continue; }
            if (!first) { out += ",\n"; }
            out += e;
            first = false;
        }
        return out + "\n]}\n";
    }

    /// This process's spans as a trace file's text.
    [[nodiscard]] std::string chrome_trace() const {
        const std::string own = events();
        return document({&own, 1});
    }

    /// Writes the trace. Errors: backend_error when the file cannot be written completely.
    void write(const std::string& path) const {
        const std::string text = chrome_trace();
        std::FILE* const file = std::fopen(path.c_str(), "wb");
        bool complete = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
        int code = complete ? 0 : errno;
        if (file != nullptr && std::fclose(file) != 0 && complete) {
            complete = false;
            code = errno;
        }
        if (!complete) {
            error_context context;
            context.operation = "timeline";
            context.backend_code = code;
            context.backend_text = std::strerror(code);
            throw backend_error(formatted("timeline: cannot write '{}': {}", path, context.backend_text), context);
        }
    }

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
    void settle() const {
        std::erase_if(pending_, [this](const pending_record& p) { return settled(p); });
    }

    // The number of a name, made at its first use. A sorted list: names are few, and a map costs every includer compile
    // time.
    [[nodiscard]] std::uint32_t number_of(std::string_view name) {
        std::size_t low = 0;
        for (std::size_t high = sorted_.size(); low < high;) {
            const std::size_t middle = (low + high) / 2;
            const int order = names_[sorted_[middle]].compare(name);
            if (order == 0) { return sorted_[middle]; }
            if (order < 0) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        const auto number = static_cast<std::uint32_t>(names_.size());
        names_.emplace_back(name);
        sorted_.insert(sorted_.begin() + static_cast<std::ptrdiff_t>(low), number);
        return number;
    }

    mutable std::mutex mutex_;
    deadline origin_;
    std::vector<track_record> tracks_;
    std::vector<std::string> names_;     // by number
    std::vector<std::uint32_t> sorted_;  // numbers in the order of their names
    mutable std::vector<span_record> spans_;
    mutable std::deque<pending_record> pending_;  // settled by whoever looks
    mutable std::size_t dropped_ = 0;
};

}  // namespace tutti::schedule
