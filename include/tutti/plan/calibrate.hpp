// calibrate: a machine's efficiencies from what was measured on it: steps, or products and collectives one by one.
// Needs plan/time. The caller measures; nothing is run here.
#pragma once

#include <algorithm>  // min, max
#include <array>      // efficiencies
#include <cmath>      // isfinite
#include <cstddef>    // size_t
#include <cstdint>    // ranks
#include <span>       // measurements
#include <vector>     // products

#include <tutti/comm/cost.hpp>           // time_of
#include <tutti/core/error.hpp>          // usage_error
#include <tutti/core/least_squares.hpp>  // fitted_line
#include <tutti/core/text.hpp>           // formatted
#include <tutti/plan/time.hpp>           // time_of_step

namespace tutti::plan {

/// One measured step.
struct measured_step {
    model_shape model;
    job how;
    double seconds = 0;
    bool kept_scores = false;
};

/// The machine with the efficiencies, in whole percent, that predict `steps` with the least sum of squared relative
/// errors, of steps and of efficiencies.
///
/// Semantics    that of memory may be more than 1, at most 3: kernels that do several things at once pass over memory
///              less often than plan/time counts. An efficiency of which the steps say little stays near what it was:
///              a step is taken for right within 2 %, an efficiency within a factor of 1.3. Its origin stays, too, where
///              that factor changes the steps by less than that.
/// Determinism  a grid of 5 % over all three, then of 1 % around the best of it, until that is the best of its own
///              surroundings; of equal ones the smallest.
/// Cost         some ten thousand evaluations of a step for each.
/// Errors       usage_error without steps, or with one that took no time.
[[nodiscard]] inline machine calibrated(machine on, std::span<const measured_step> steps) {
    if (steps.empty()) { throw usage_error("plan: nothing measured to calibrate with"); }
    for (const measured_step& s : steps) {
        if (!(s.seconds > 0) || !std::isfinite(s.seconds)) {
            throw usage_error(formatted("plan: a step of {} s", s.seconds));
        }
    }
    using percents = std::array<int, 3>;  // of products, memory, links
    constexpr int most_memory = 300;
    double least = -1;
    percents best{};
    const auto efficient = [&on](const percents& e) {
        machine trial = on;
        trial.product_efficiency = e[0] / 100.0;
        trial.memory_efficiency = e[1] / 100.0;
        trial.link_efficiency = e[2] / 100.0;
        return trial;
    };
    constexpr double right = 0.02 * 0.02, loose = 1.3;
    const auto doubt = [](double now, double before) {
        const double apart = std::log(now / before) / std::log(loose);
        return apart * apart;
    };
    const auto predicted = [](const measured_step& s, const machine& m) {
        return time_of_step(s.model, s.how, m, s.kept_scores).total();
    };
    const auto look = [&](int step, const percents& from, const percents& to) {
        for (int p = from[0]; p <= to[0]; p += step) {
            for (int b = from[1]; b <= to[1]; b += step) {
                for (int l = from[2]; l <= to[2]; l += step) {
                    const machine trial = efficient({p, b, l});
                    double sum = right * (doubt(trial.product_efficiency, on.product_efficiency) +
                                          doubt(trial.memory_efficiency, on.memory_efficiency) +
                                          doubt(trial.link_efficiency, on.link_efficiency));
                    for (const measured_step& s : steps) {
                        const double error = predicted(s, trial) / s.seconds - 1;
                        sum += error * error;
                    }
                    if (least < 0 || sum < least) {
                        least = sum;
                        best = {p, b, l};
                    }
                }
            }
        }
    };
    look(5, {5, 5, 5}, {100, most_memory, 100});
    for (percents before{}; before != best;) {
        before = best;
        percents low{};
        percents high{};
        for (std::size_t i = 0; i < 3; ++i) {
            low[i] = std::max(1, best[i] - 5);
            high[i] = std::min(i == 1 ? most_memory : 100, best[i] + 5);
        }
        look(1, low, high);
    }
    machine fitted = efficient(best);
    const auto tell = [&](double machine::*efficiency, evidence machine_evidence::*from) {
        machine other = fitted;
        other.*efficiency *= loose;
        double moved = 0;
        for (const measured_step& s : steps) {
            const double change = (predicted(s, other) - predicted(s, fitted)) / s.seconds;
            moved += change * change;
        }
        if (moved > right) { fitted.known.*from = evidence::fitted; }
    };
    tell(&machine::product_efficiency, &machine_evidence::product_efficiency);
    tell(&machine::memory_efficiency, &machine_evidence::memory_efficiency);
    tell(&machine::link_efficiency, &machine_evidence::link_efficiency);
    return fitted;
}

/// One measured product of an m x k and a k x n matrix of 16 bits.
struct measured_product {
    double m = 0, n = 0, k = 0;
    double seconds = 0;
};
/// One measured collective over `ranks`, one every `stride`; `bytes` as comm::message_bytes counts them.
struct measured_collective {
    comm::collective kind = comm::collective::all_reduce;
    int ranks = 2;
    int stride = 1;
    double bytes = 0;
    double seconds = 0;
};

/// The machine whose `launch_seconds` and `product_efficiency` predict the products with the least sum of squared relative
/// errors, neither below 0.
/// Errors  usage_error without two products that differ in FLOPs, with one that took no time or whose sizes are not
///         positive, or where larger ones take no longer.
[[nodiscard]] inline machine calibrated(machine on, std::span<const measured_product> products) {
    std::vector<measured_work> points;
    for (const measured_product& p : products) {
        for (const double size : {p.m, p.n, p.k}) {
            if (!(size > 0) || !std::isfinite(size)) {
                throw usage_error(formatted("plan: a product of {} x {} and {} x {}", p.m, p.k, p.k, p.n));
            }
        }
        points.push_back({2 * p.k * (p.m * p.n + on.wave / 2) / on.flops, p.seconds});  // seconds at the peak
    }
    const work_line line = fitted_line(points, "plan: products");
    on.launch_seconds = line.start;
    on.product_efficiency = 1 / line.each;
    on.known.launch = on.known.product_efficiency = evidence::fitted;
    return on;
}

/// The machine with the link efficiency, in whole percent, that predicts the collectives with the least sum of squared
/// relative errors.
/// Errors  usage_error without collectives, or with one that took no time, of no bytes, or of fewer ranks than two or more
///         than 2^24.
[[nodiscard]] inline machine calibrated(machine on, std::span<const measured_collective> collectives) {
    if (collectives.empty()) { throw usage_error("plan: no collective was measured"); }
    double least = -1;
    double best = 0;
    for (int percent = 1; percent <= 100; ++percent) {
        on.link_efficiency = percent / 100.0;
        double sum = 0;
        for (const measured_collective& c : collectives) {
            if (!(c.seconds > 0) || !std::isfinite(c.seconds) || !(c.bytes > 0) || !std::isfinite(c.bytes) ||
                c.ranks < 2 || c.ranks > 1 << 24 || c.stride < 1) {
                throw usage_error(formatted("plan: a collective of {} bytes of {} ranks, one every {}, in {} s",
                                            c.bytes, c.ranks, c.stride, c.seconds));
            }
            const std::int64_t alone = std::int64_t{c.ranks} * c.stride;
            const double error =
                comm::time_of(c.kind, c.bytes, on.group_of(c.ranks, c.stride, alone)).seconds() / c.seconds - 1;
            sum += error * error;
        }
        if (least < 0 || sum < least) {
            least = sum;
            best = on.link_efficiency;
        }
    }
    on.link_efficiency = best;
    on.known.link_efficiency = evidence::fitted;
    return on;
}

}  // namespace tutti::plan
