// chrome_trace: spans as text that Perfetto and Chrome read (trace event format, JSON).
// Needs detail/json. A process's events are one text, so that those of several processes can be joined to a document.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // numbers of tracks
#include <cstdio>       // the file
#include <cstring>      // strerror
#include <span>         // pieces of a document
#include <string>       // JSON
#include <string_view>  // names
#include <utility>      // move

#include <cerrno>  // why a file could not be written

#include <tutti/core/error.hpp>            // backend_error
#include <tutti/core/text.hpp>             // formatted
#include <tutti/schedule/detail/json.hpp>  // append_json_string

namespace tutti::schedule::detail {

/// Comma-separated objects.
class chrome_events {
    std::string text_;

public:
    explicit chrome_events(std::size_t expected) { text_.reserve(128 * expected); }

    /// A row of the picture: thread `track` of process `rank`.
    void add_track(int rank, std::uint32_t track, std::string_view name) {
        separate();
        text_ += formatted(R"({{"name":"process_name","ph":"M","pid":{0},"tid":{1},)"
                           R"("args":{{"name":"rank {0}"}}}},)"
                           "\n"
                           R"({{"name":"thread_name","ph":"M","pid":{0},"tid":{1},"args":{{"name":)",
                           rank, track);
        append_json_string(text_, name);
        text_ += "}}";
    }
    void add_span(int rank, std::uint32_t track, std::string_view name, std::string_view category, double begin_seconds,
                  double seconds) {
        separate();
        text_ += R"({"name":)";
        append_json_string(text_, name);
        text_ += formatted(R"(,"cat":"{}","ph":"X","ts":{:.3f},"dur":{:.3f},"pid":{},"tid":{}}})", category,
                           1e6 * begin_seconds, 1e6 * seconds, rank, track);
    }
    [[nodiscard]] std::string take() && noexcept { return std::move(text_); }

private:
    void separate() {
        if (!text_.empty()) { text_ += ",\n"; }
    }
};

[[nodiscard]] inline std::string chrome_document(std::span<const std::string> events) {
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

/// Errors: backend_error when the file cannot be written completely.
inline void write_trace(const std::string& path, std::string_view text) {
    std::FILE* const file = std::fopen(path.c_str(), "wb");
    bool complete = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    int code = complete ? 0 : errno;
    if (file != nullptr && std::fclose(file) != 0 && complete) {
        complete = false;
        code = errno;
    }
    if (complete) { return; }
    error_context context;
    context.operation = "timeline";
    context.backend_code = code;
    context.backend_text = std::strerror(code);
    throw backend_error(formatted("timeline: cannot write '{}': {}", path, context.backend_text), context);
}

}  // namespace tutti::schedule::detail
