// Pipelines `local-sgd`, `slowmo`, `co2`, `diloco`, `eager-diloco`, `cocod`: replicas train by themselves and meet every
// --tau steps. `co2-zero`: CO2 between machines whose ranks share what their replica needs.
// Needs strategy/local_update and strategy/zero.
#pragma once

#include <optional>     // communicators
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // colors

#include <tutti/comm/self.hpp>               // a replica of one rank
#include <tutti/optimize/adamw.hpp>          // optimizer
#include <tutti/schedule/timeline.hpp>       // trace
#include <tutti/strategy/data_parallel.hpp>  // strategy::local
#include <tutti/strategy/local_update.hpp>   // local_update
#include <tutti/strategy/zero.hpp>           // replicas of several ranks

#include "options.hpp"
#include "pipelines/ddp.hpp"
#include "pipelines/zero.hpp"

namespace transformer::pipelines {

/// What all of them may be told.
[[nodiscard]] inline tutti::strategy::local_update_rule with_options(tutti::strategy::local_update_rule rule,
                                                                     const options& o) {
    rule.synchronous_steps = static_cast<std::size_t>(o.synchronous_steps);
    rule.fragments = static_cast<std::size_t>(o.fragments);
    if (o.automatic_tau) { rule.automatic.emplace(); }
    return rule;
}

/// Replicas of one rank each, under the rule that Method makes of the options. One type for all methods.
template <class Method> struct local_updates {
    static constexpr bool single_rank = false;

    template <class T, class Comm>
    using replica = tutti::strategy::local<tutti::optimize::adamw, T, tutti::queue_of<Comm>>;
    template <class T, class Comm> using strategy = tutti::strategy::local_update<Comm, replica<T, Comm>>;

    template <class T, class Comm>
    [[nodiscard]] static strategy<T, Comm> make(Comm comm, const options& o, tutti::schedule::timeline* trace) {
        replica<T, Comm> own(tutti::comm::self<tutti::queue_of<Comm>>(comm.queue()), o.optimizer(), {});
        return strategy<T, Comm>(std::move(comm), std::move(own), with_options(Method::rule(o), o), {.trace = trace});
    }
};

struct local_sgd : local_updates<local_sgd> {
    static constexpr std::string_view name = "local-sgd";
    static constexpr std::string_view summary = "replicas average their parameters every --tau steps";
    [[nodiscard]] static tutti::strategy::local_update_rule rule(const options& o) {
        return tutti::strategy::local_sgd_method{.period = o.period()}.rule();
    }
};
struct slowmo : local_updates<slowmo> {
    static constexpr std::string_view name = "slowmo";
    static constexpr std::string_view summary = "local-sgd, with momentum --beta over rounds";
    [[nodiscard]] static tutti::strategy::local_update_rule rule(const options& o) {
        return tutti::strategy::slow_mo_method{.period = o.period(), .momentum = o.outer_momentum(0.5)}.rule();
    }
};
struct co2 : local_updates<co2> {
    static constexpr std::string_view name = "co2";
    static constexpr std::string_view summary = "slowmo, the average on its way during the next round";
    [[nodiscard]] static tutti::strategy::local_update_rule rule(const options& o) {
        return tutti::strategy::co2_method{
            .period = o.period(), .momentum = o.outer_momentum(0.2), .gap = o.staleness()}
            .rule();
    }
};
struct diloco : local_updates<diloco> {
    static constexpr std::string_view name = "diloco";
    static constexpr std::string_view summary = "local-sgd, Nesterov momentum --beta and rate 0.7 over rounds";
    [[nodiscard]] static tutti::strategy::local_update_rule rule(const options& o) {
        return tutti::strategy::diloco_method{.period = o.period(), .momentum = o.outer_momentum(0.9)}.rule();
    }
};
struct eager_diloco : local_updates<eager_diloco> {
    static constexpr std::string_view name = "eager-diloco";
    static constexpr std::string_view summary = "diloco, a replica's own part at once, the others' a round later";
    [[nodiscard]] static tutti::strategy::local_update_rule rule(const options& o) {
        return tutti::strategy::eager_diloco_method{.period = o.period(), .momentum = o.outer_momentum(0.9)}.rule();
    }
};
struct cocod : local_updates<cocod> {
    static constexpr std::string_view name = "cocod";
    static constexpr std::string_view summary = "local-sgd, the average a round late, replicas keep their steps since";
    [[nodiscard]] static tutti::strategy::local_update_rule rule(const options& o) {
        return tutti::strategy::co_co_d_method{.period = o.period()}.rule();
    }
};

/// Each machine is a replica.
struct co2_zero {
    static constexpr std::string_view name = "co2-zero";
    static constexpr std::string_view summary = "co2 between machines (--nodes), zero2 among the ranks of each";
    static constexpr bool single_rank = false;

    template <class T, class Comm> using replica = zero2::strategy<T, Comm>;
    template <class T, class Comm> using strategy = tutti::strategy::local_update<Comm, replica<T, Comm>>;

    template <class T, class Comm>
    [[nodiscard]] static strategy<T, Comm> make(Comm comm, const options& o, tutti::schedule::timeline* trace) {
        const int each = comm.size() / o.replicas();
        std::vector<int> machine, place;
        for (int r = 0; r < comm.size(); ++r) {
            machine.push_back(r / each);
            place.push_back(r % each);
        }
        std::optional<Comm> inside = comm.split(machine, "replica");
        std::optional<Comm> across = comm.split(place, "across");
        auto how = zero2::strategy_options<Comm>(each, trace);
        how.trace_rank = comm.rank();
        how.trace_steps = false;
        replica<T, Comm> own(*std::move(inside), o.optimizer(), how);
        return strategy<T, Comm>(*std::move(across), std::move(own), with_options(co2::rule(o), o),
                                 {.trace = trace, .trace_rank = comm.rank()});
    }
};

}  // namespace transformer::pipelines
