// one_way: GPipe, 1F1B and interleaved 1F1B: a rank's list follows from its number, no search.
// Needs parallel/pipeline_schedule.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t

#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule

namespace tutti::parallel {

/// All forwards, then all backwards; one stage a rank.
///
/// Cost    bubble (p - 1)(F + B); holds all m micro-batches.
/// Errors  usage_error for numbers that are not positive.
/// Source  Huang et al. 2019, arXiv:1811.06965; backward in ascending order, as all schedules here.
[[nodiscard]] inline pipeline_schedule gpipe(int ranks, int micro_batches) {
    pipeline_schedule s = detail::empty_schedule("gpipe", ranks, micro_batches);
    s.routes.push_back(detail::straight_route(ranks));
    for (int r = 0; r < ranks; ++r) {
        auto& list = s.actions[static_cast<std::size_t>(r)];
        for (int b = 0; b < micro_batches; ++b) { list.push_back({pass::forward, r, b}); }
        for (int b = 0; b < micro_batches; ++b) { list.push_back({pass::backward, r, b}); }
        s.in_flight_limit[static_cast<std::size_t>(r)] = micro_batches;
    }
    return s;
}

/// One forward, one backward after p - 1 - r forwards on rank r; one stage a rank.
///
/// Cost    bubble (p - 1)(F + B); rank r holds min(m, p - r) micro-batches.
/// Errors  usage_error for numbers that are not positive.
/// Source  Narayanan et al. 2021, arXiv:2006.09503 (PipeDream-Flush).
[[nodiscard]] inline pipeline_schedule one_forward_one_backward(int ranks, int micro_batches) {
    pipeline_schedule s = detail::empty_schedule("1f1b", ranks, micro_batches);
    s.routes.push_back(detail::straight_route(ranks));
    for (int r = 0; r < ranks; ++r) {
        auto& list = s.actions[static_cast<std::size_t>(r)];
        const int ahead = std::min(ranks - 1 - r, micro_batches);
        for (int b = 0; b < ahead; ++b) { list.push_back({pass::forward, r, b}); }
        for (int b = 0; b < micro_batches; ++b) {
            if (b + ahead < micro_batches) { list.push_back({pass::forward, r, b + ahead}); }
            list.push_back({pass::backward, r, b});
        }
        s.in_flight_limit[static_cast<std::size_t>(r)] = std::min(micro_batches, ranks - r);
    }
    return s;
}

/// 1F1B over v chunks a rank: stage c * p + r is chunk c of rank r. Micro-batches go through in groups of p.
///
/// Cost    bubble (p - 1)(F + B) / v; rank 0 holds p v + p - 1 chunks, and v times the messages are sent.
/// Errors  usage_error when m is not a multiple of p, or there are fewer than two chunks a rank.
/// Source  Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
[[nodiscard]] inline pipeline_schedule interleaved(int ranks, int micro_batches, int chunks) {
    pipeline_schedule s = detail::empty_schedule("interleaved", ranks, micro_batches);
    if (chunks < 2) { throw usage_error(formatted("interleaved: {} chunks a rank; at least 2", chunks)); }
    if (micro_batches % ranks != 0) {
        throw usage_error(
            formatted("interleaved: {} micro-batches are not a multiple of {} ranks", micro_batches, ranks));
    }
    s.routes.emplace_back();
    for (int stage = 0; stage < ranks * chunks; ++stage) { s.routes[0].push_back(stage % ranks); }
    const int total = micro_batches * chunks;
    for (int r = 0; r < ranks; ++r) {
        auto& list = s.actions[static_cast<std::size_t>(r)];
        const auto nth = [&](pass what, int i) {
            const int in_group = i % (ranks * chunks);
            const int chunk = in_group / ranks;
            const int b = i / (ranks * chunks) * ranks + in_group % ranks;
            return action{what, (what == pass::forward ? chunk : chunks - 1 - chunk) * ranks + r, b};
        };
        const int ahead = std::min(2 * (ranks - 1 - r) + (chunks - 1) * ranks, total);
        for (int i = 0; i < ahead; ++i) { list.push_back(nth(pass::forward, i)); }
        for (int i = 0; i < total; ++i) {
            if (i + ahead < total) { list.push_back(nth(pass::forward, i + ahead)); }
            list.push_back(nth(pass::backward, i));
        }
        s.in_flight_limit[static_cast<std::size_t>(r)] = std::min(ahead + 1, total);
    }
    return s;
}

}  // namespace tutti::parallel
