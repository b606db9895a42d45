// dual_pipe: micro-batches enter at both ends, each rank holds two stages, forwards and backwards run in pairs.
// Needs parallel/pipeline_schedule. Source: DeepSeek-V3, arXiv:2412.19437, section 3.2.1.
#pragma once

#include <algorithm>  // min
#include <array>      // two routes
#include <cstddef>    // size_t
#include <deque>      // weight gradients put off
#include <vector>     // lists

#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule

namespace tutti::parallel {

namespace detail {

// The list of one rank. Side 0, near, are micro-batches that entered at the end that this rank is closer to.
class dual_pipe_rank {
    int ranks_, half_, rank_;
    std::array<int, 2> forwards_{}, backwards_{};  // next, by side: 0 near, 1 far
    std::deque<action> put_off_;
    std::vector<action>& list_;

    [[nodiscard]] int next(int side, int& of) {
        const int route = (2 * rank_ >= ranks_ ? 1 : 0) ^ side;
        return route * half_ + of++;
    }
    [[nodiscard]] int stage(int side) const {
        const int route = (2 * rank_ >= ranks_ ? 1 : 0) ^ side;
        return route == 0 ? rank_ : ranks_ - 1 - rank_;
    }
    void forward(int side, bool joined = false) {
        list_.push_back({pass::forward, stage(side), next(side, forwards_[static_cast<std::size_t>(side)]), joined});
    }
    void backward(int side, bool split = false) {
        const int b = next(side, backwards_[static_cast<std::size_t>(side)]);
        list_.push_back({split ? pass::backward_input : pass::backward, stage(side), b});
        if (split) { put_off_.push_back({pass::backward_weight, stage(side), b}); }
    }
    void weight() {
        list_.push_back(put_off_.front());
        put_off_.pop_front();
    }
    void pair(int forward_of, int backward_of, bool joined = true) {
        forward(forward_of, joined);
        backward(backward_of);
    }

public:
    dual_pipe_rank(int ranks, int micro_batches, int rank, std::vector<action>& list)
        : ranks_(ranks), half_(micro_batches / 2), rank_(rank), list_(list) {}

    void fill() {
        const int h = std::min(rank_, ranks_ - 1 - rank_);  // distance to the near end
        const int inner = ranks_ / 2 - h - 1;               // distance to the middle
        for (int i = 0; i < 2 * inner; ++i) { forward(0); }
        for (int i = 0; i < h + 1; ++i) {
            forward(0);
            forward(1);
        }
        for (int i = 0; i < inner; ++i) {
            backward(1, true);
            weight();
            forward(1);
        }
        for (int i = 0; i < half_ - ranks_ + h + 1; ++i) {
            pair(0, 1, i > 0 || inner > 0);  // the ranks in the middle have nothing to hide behind at first
            pair(1, 0);
        }
        for (int i = 0; i < inner; ++i) {
            backward(1);
            pair(1, 0);
        }
        for (int i = 0; i < 2 * (h + 1); ++i) { backward(i % 2 == 0 ? 1 : 0, i > h); }
        for (int i = 0; i < inner; ++i) {
            weight();
            backward(0, true);
        }
        while (!put_off_.empty()) { weight(); }
    }
};

}  // namespace detail

/// DualPipe: stage r and stage p - 1 - r on rank r, of one copy of the model each.
///
/// Semantics  micro-batches 0 ... m/2 - 1 enter at rank 0, the others at rank p - 1. Both copies have the same weights;
///            the owner of the stages adds up the gradients of ranks r and p - 1 - r.
/// Cost       bubble (p/2 - 1)(F&B + B - 3W); a rank holds at most p + 1 micro-batches that wait for their backward.
/// Errors     usage_error when p or m is odd, or m < 2p.
[[nodiscard]] inline pipeline_schedule dual_pipe(int ranks, int micro_batches) {
    pipeline_schedule s = detail::empty_schedule("dual_pipe", ranks, micro_batches);
    if (ranks % 2 != 0 || micro_batches % 2 != 0 || micro_batches < 2 * ranks) {
        throw usage_error(formatted("dual_pipe: {} ranks and {} micro-batches; both must be even, and twice as many "
                                    "micro-batches as ranks",
                                    ranks, micro_batches));
    }
    s.routes.push_back(detail::straight_route(ranks));
    s.routes.emplace_back(s.routes[0].rbegin(), s.routes[0].rend());
    for (int r = 0; r < ranks; ++r) {
        detail::dual_pipe_rank(ranks, micro_batches, r, s.actions[static_cast<std::size_t>(r)]).fill();
        s.in_flight_limit[static_cast<std::size_t>(r)] = ranks + 1;
    }
    return s;
}

}  // namespace tutti::parallel
