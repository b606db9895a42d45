// A toy model that is large enough to be cut: several blocks of the global norm, tensors of one element, an empty one.
// Needs toy.hpp. Its trainer runs a forward pass and a backward pass, and reads values only where a strategy allows it.
// Also what tests of several shard exchanges ask of a run.
#pragma once

#include <algorithm>    // max
#include <cmath>        // fabs
#include <cstddef>      // size_t
#include <limits>       // nan
#include <string>       // names
#include <type_traits>  // stages
#include <vector>       // storage

#include "toy.hpp"                                   // slope
#include <tutti/comm/threads.hpp>                    // ranks
#include <tutti/comm/topology.hpp>                   // nodes
#include <tutti/optimize/adamw.hpp>                  // adamw
#include <tutti/optimize/clip.hpp>                   // global_norm
#include <tutti/schedule/bucket.hpp>                 // offsets
#include <tutti/strategy/detail/micro_batches.hpp>   // micro_batch
#include <tutti/strategy/detail/parameter_list.hpp>  // decay_segments
#include <tutti/strategy/strategy.hpp>               // parameters

namespace tutti::test {

inline const std::vector<std::size_t> several_blocks{5, 9000, 1, 33, 4096, 7, 0, 6543, 12, 3000};
/// Fewer elements than ranks, and a parameter of one element.
inline const std::vector<std::size_t> tiny{1, 0, 1};

template <class T> class sized_toy {
    std::vector<std::vector<T>> memory_;

    std::vector<view<T>> place(layout how, const std::vector<std::size_t>& sizes) {
        std::vector<view<T>> views;
        std::size_t offset = 0;
        if (how == layout::together) { memory_.emplace_back(std::reduce(sizes.begin(), sizes.end())); }
        const std::size_t whole = memory_.size() - 1;
        for (const std::size_t n : sizes) {
            if (how == layout::together) { views.push_back(view<T>(memory_[whole]).sub(offset, n)); }
            if (how == layout::scattered) { views.push_back(view<T>(memory_.emplace_back(n + 3)).sub(0, n)); }
            if (how == layout::none) { views.emplace_back(); }
            offset += n;
        }
        return views;
    }

public:
    strategy::parameters<T> parameters;

    explicit sized_toy(const std::vector<std::size_t>& sizes, layout values = layout::together,
                       layout gradients = layout::none, std::uint64_t seed = 1) {
        const auto value = place(values, sizes);
        const auto gradient = place(gradients, sizes);
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            for (std::size_t e = 0; e < sizes[i]; ++e) {
                value[i][e] = static_cast<T>(random_element<float>(seed + i, e));
            }
            parameters.push_back({"p" + std::to_string(i), {sizes[i]}, i % 3 != 0, value[i], gradient[i]});
        }
    }
};

/// One micro-batch of one sample. Forward only looks at the values; backward makes the gradients, which `change` may
/// change.
template <class S, class Change>
void pass(S& s, std::size_t parameters, std::uint64_t sample, double scale, Change change) {
    using T = typename S::element_type;
    volatile double activation = 0;
    for (std::size_t i = 0; i < parameters; ++i) {
        for (const T& x : s.before_use(i)) { activation = activation + static_cast<double>(x); }
        s.after_use(i);
    }
    for (std::size_t i = parameters; i-- > 0;) {
        const auto x = s.before_use(i);
        const auto g = s.gradient(i);
        for (std::size_t e = 0; e < g.size(); ++e) {
            g[e] = static_cast<T>(static_cast<double>(g[e]) + scale * slope(sample, i, e, static_cast<double>(x[e])));
        }
        change(i, g);
        s.after_use(i);
        s.gradient_ready(i);
    }
}
template <class S> void pass(S& s, std::size_t parameters, std::uint64_t sample, double scale) {
    pass(s, parameters, sample, scale, [](std::size_t, const auto&) {});
}

struct plan_of_steps {
    int steps = 3;
    int micro = 1;
    int first_step = 0;
    double clip_norm = 20;
};
/// The norm of each step.
template <class S>
std::vector<double> train_sharded(S& s, std::size_t parameters, int rank, int ranks, const plan_of_steps& r) {
    std::vector<double> norms;
    for (int step = r.first_step; step < r.first_step + r.steps; ++step) {
        for (int m = 0; m < r.micro; ++m) {
            s.begin({m, r.micro});
            pass(s, parameters, static_cast<std::uint64_t>((step * ranks + rank) * r.micro + m), 1.0 / r.micro);
        }
        norms.push_back(s.step({0.05 / (1 + step), r.clip_norm}).norm);
    }
    return norms;
}

/// f(stage) for each stage of ZeRO, as a constant.
template <class F> void for_stages(F f) {
    f(std::integral_constant<int, 1>{});
    f(std::integral_constant<int, 2>{});
    f(std::integral_constant<int, 3>{});
}

/// Ranks by node.
inline comm::topology nodes(std::vector<int> node) { return comm::topology({.node = std::move(node)}); }

/// All values, one parameter after the other, as the strategy shows them. Collective.
template <class S> auto values_of(S& s, std::size_t parameters) {
    std::vector<typename S::element_type> all;
    const auto common = s.consensus();
    for (std::size_t i = 0; i < parameters; ++i) {
        const auto x = s.before_use(i);
        all.insert(all.end(), x.begin(), x.end());
        s.after_use(i);
    }
    return all;
}

/// What a run leaves: values, and the norm of each step.
template <class T> struct outcome {
    std::vector<T> values;
    std::vector<double> norms;
    friend bool operator==(const outcome& a, const outcome& b) {
        return same_bytes(a.values, b.values) && a.norms == b.norms;
    }
};
/// Of n ranks that run(world) each; all must end alike.
template <class T, class Run> outcome<T> of_all_ranks(int n, Run run) {
    std::vector<outcome<T>> results(static_cast<std::size_t>(n));
    comm::threads::launch(n,
                          [&](comm::threads& world) { results[static_cast<std::size_t>(world.rank())] = run(world); });
    for (const auto& other : results) { REQUIRE(other == results[0]); }
    return results[0];
}
/// Of one rank, from attach to finish.
template <class S>
outcome<typename S::element_type> train_to_the_end(S s, sized_toy<typename S::element_type>& t, comm::threads& world,
                                                   const plan_of_steps& r) {
    s.attach(t.parameters);
    outcome<typename S::element_type> all;
    all.norms = train_sharded(s, t.parameters.size(), world.rank(), world.size(), r);
    all.values = values_of(s, t.parameters.size());
    s.finish();
    return all;
}
/// The largest difference of values, relative to those above 1, and of norms.
template <class T> double distance(const outcome<T>& a, const outcome<T>& b) {
    double worst = 0;
    for (std::size_t e = 0; e < b.values.size(); ++e) {
        worst = std::max(worst, std::fabs(a.values[e] - b.values[e]) / std::max(1.0, std::fabs(b.values[e])));
    }
    for (std::size_t k = 0; k < b.norms.size(); ++k) {
        worst = std::max(worst, std::fabs(a.norms[k] - b.norms[k]) / b.norms[k]);
    }
    return worst;
}

/// A bad gradient of one rank skips the step on all, changes no value, and is not there any more in the next.
template <class S> void check_skips_bad_gradient(S& s, std::size_t parameters, int rank) {
    const auto values = values_of(s, parameters);
    s.begin({});
    pass(s, parameters, 9, 1, [&](std::size_t i, const auto& g) {
        if (rank == 2 && i == 7) { g[4000] = std::numeric_limits<double>::quiet_NaN(); }
    });
    CHECK(s.step({0.1, 1}).skipped);
    for (int again = 0; again < 2; ++again) { CHECK(same_bytes(values_of(s, parameters), values)); }
    s.begin({});
    pass(s, parameters, 9, 0);
    CHECK(s.step({0.1, 1}).norm == 0);
}

/// Data parallelism that averages the gradient of every micro-batch, all of it at once, and adds up the means: what
/// sharded gradients have to equal. Written with none of the strategies' parts.
template <class C, class T> class mean_of_every_micro_batch {
    C comm_;
    strategy::parameters<T> list_;
    std::vector<std::size_t> offsets_;
    std::vector<T> gradient_, total_;
    std::vector<master_t<T>> masters_;
    std::vector<double> scratch_;
    optimize::adamw optimizer_;
    std::vector<optimize::segment> segments_;
    std::optional<optimize::optimizer_state<T, host_queue>> state_;
    strategy::micro_batch now_;
    std::size_t left_ = 0;

public:
    using element_type = T;
    explicit mean_of_every_micro_batch(C comm, optimize::adamw o = {}) : comm_(std::move(comm)), optimizer_(o) {}

    void attach(strategy::parameters<T>& list) {
        list_ = list;
        for (const auto& p : list) {
            offsets_.push_back(masters_.size());
            for (const T& x : p.value) { masters_.push_back(static_cast<master_t<T>>(x)); }
            segments_.push_back({offsets_.back(), p.value.size(), p.decay});
        }
        gradient_.resize(masters_.size());
        total_.resize(masters_.size());
        scratch_.resize(optimize::norm_blocks(masters_.size()) + 1);
        state_.emplace(optimizer_.template make_state<T>(host_queue(), masters_.size()));
    }
    void begin(strategy::micro_batch m) {
        now_ = m;
        left_ = list_.size();
        std::fill(gradient_.begin(), gradient_.end(), T{});
    }
    view<const T> before_use(std::size_t i) { return list_[i].value; }
    void after_use(std::size_t) {}
    view<T> gradient(std::size_t i) { return view<T>(gradient_).sub(offsets_[i], list_[i].value.size()); }
    void gradient_ready(std::size_t) {
        if (--left_ != 0) { return; }
        comm_.all_reduce(view<T>(gradient_), view<T>(gradient_), mean{});
        for (std::size_t e = 0; e < total_.size(); ++e) {
            const auto sum = static_cast<master_t<T>>(total_[e]) + static_cast<master_t<T>>(gradient_[e]);
            total_[e] = now_.index == 0 ? gradient_[e] : static_cast<T>(sum);
        }
    }
    strategy::step_result step(strategy::hyper h) {
        const view<const T> total(total_);
        const double norm =
            optimize::global_norm(host_queue(), total, 0, total_.size(), view<double>(scratch_), [](view<double>) {});
        optimizer_.update(host_queue(), view<master_t<T>>(masters_), total, *state_, segments_,
                          {h.learning_rate, optimize::clip_factor(norm, h.clip_norm)});
        for (std::size_t i = 0; i < list_.size(); ++i) {
            for (std::size_t e = 0; e < list_[i].value.size(); ++e) {
                list_[i].value[e] = static_cast<T>(masters_[offsets_[i] + e]);
            }
        }
        return {false, norm};
    }
    struct [[nodiscard]] scope {
        ~scope() {}  // NOLINT: marks the scope as used
    };
    scope consensus() { return {}; }
    void finish() {}
};

}  // namespace tutti::test
