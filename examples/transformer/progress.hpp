// The progress line: loss, tokens/s, exposed communication, time left.
// Needs fmt. A moving bar on a terminal, elsewhere a line for each tenth; on stderr, so that stdout keeps the results.
#pragma once

#include <chrono>    // refresh rate
#include <concepts>  // invocable
#include <cstdio>    // stderr
#include <string>    // bar
#include <utility>   // exchange

#include <fmt/format.h>  // numbers
#include <unistd.h>      // isatty

#include "device.hpp"

namespace transformer {

class progress {
    using clock = std::chrono::steady_clock;
    int steps_;
    double tokens_per_step_;
    bool quiet_;
    bool terminal_ = ::isatty(STDERR_FILENO) != 0;
    bool line_open_ = false;
    int taken_ = 0;           // steps of this run: a resumed one does not begin with the first
    double loss_ = 0;         // exponential mean: one batch says little
    double training_ = 0;     // seconds in steps
    double recent_rate_ = 0;  // tokens/s, exponential mean
    double flops_per_token_ = 0, peak_flops_ = 0;
    clock::time_point shown_{};

public:
    progress(int steps, double tokens_per_step, bool quiet)
        : steps_(steps), tokens_per_step_(tokens_per_step), quiet_(quiet) {}
    progress(const progress&) = delete;
    progress& operator=(const progress&) = delete;
    ~progress() { close_line(); }

    /// Shows the share of the devices' peak as well. `peak_flops` is 0 where it is not known.
    void compare_with(double flops_per_token, double peak_flops) {
        flops_per_token_ = flops_per_token;
        peak_flops_ = peak_flops;
    }

    /// After step `done` of `steps`, which took `seconds`. `exposed` gives the seconds that communication was waited
    /// for so far; it is asked only when a line is printed.
    template <std::invocable Exposed> void step(int done, double loss, double seconds, Exposed exposed) {
        training_ += seconds;
        ++taken_;
        const double rate = tokens_per_step_ / seconds;
        loss_ = taken_ == 1 ? loss : 0.95 * loss_ + 0.05 * loss;
        recent_rate_ = taken_ == 1 ? rate : 0.95 * recent_rate_ + 0.05 * rate;
        if (quiet_) { return; }
        const bool tenth = done * 10LL / steps_ != (done - 1) * 10LL / steps_;
        const auto now = clock::now();
        if (terminal_ ? now - shown_ > std::chrono::milliseconds(100) || done == steps_ : tenth) {
            shown_ = now;
            show(done, exposed());
        }
    }

    /// A line of its own, above the bar.
    void note(const std::string& text) {
        if (quiet_) { return; }
        if (std::exchange(line_open_, false)) { fmt::print(stderr, "\r\x1b[K"); }
        fmt::print(stderr, "{}\n", text);
    }

    void close_line() {
        if (std::exchange(line_open_, false)) { fmt::print(stderr, "\n"); }
    }

private:
    void show(int done, double exposed) {
        constexpr int width = 24;
        const auto filled = static_cast<int>(static_cast<long long>(width) * done / steps_);
        std::string bar;
        for (int i = 0; i < width; ++i) { bar += i < filled ? "█" : "·"; }
        const auto left = static_cast<int>(training_ / taken_ * (steps_ - done) + 0.5);
        const std::string utilization =
            flops_per_token_ > 0 ? "  " + utilization_text(flops_per_token_ * recent_rate_, peak_flops_) : "";
        fmt::print(stderr, "{}step {:>{}}/{} {} loss {:.3f}  {:>7.0f} tokens/s{}  exposed {:4.1f} %  {}:{:02} left{}",
                   terminal_ ? "\r\x1b[K" : "", done, std::to_string(steps_).size(), steps_, bar, loss_, recent_rate_,
                   utilization, training_ > 0 ? 100 * exposed / training_ : 0.0, left / 60, left % 60,
                   terminal_ ? "" : "\n");
        line_open_ = terminal_;
        std::fflush(stderr);
    }
};

}  // namespace transformer
