// shaped: makes calls take at least as long as a stated network would need, in real time.
// Needs comm/decorator and comm/cost. A two-core machine so shows what a slow network does to a pipeline.
#pragma once

#include <algorithm>     // max, min
#include <charconv>      // from_chars: numbers do not depend on the locale
#include <chrono>        // round
#include <cmath>         // isfinite
#include <cstddef>       // size_t
#include <memory>        // one link for all lanes
#include <mutex>         // lanes reserve too
#include <optional>      // flat or two levels
#include <span>          // members of a child
#include <string>        // texts
#include <string_view>   // texts
#include <system_error>  // errc
#include <utility>       // move

#include <tutti/comm/cost.hpp>       // time_of
#include <tutti/comm/decorator.hpp>  // decorator, sleeping_clock
#include <tutti/comm/topology.hpp>   // link, topology
#include <tutti/core/error.hpp>      // usage_error, timeout_error
#include <tutti/core/text.hpp>       // formatted

namespace tutti::comm {

/// The network to imitate: one kind of link between all ranks, or a topology with two.
class shaped_network {
    link flat_;
    std::optional<topology> levels_;

public:
    explicit shaped_network(link l) : flat_(l) { static_cast<void>(topology::uniform(1, 1, {}, l)); }  // checks l
    explicit shaped_network(topology t) : levels_(std::move(t)) {}

    /// From "1Gbit,50us": bandwidth per second and latency; or "1Gbit", which has none. Units are decimal: bit Kbit Mbit
    /// Gbit B KB MB GB, and ns us ms s.
    /// Errors  usage_error that names the bad part and gives an example.
    [[nodiscard]] static shaped_network parse(std::string_view text) {
        const std::size_t comma = text.find(',');
        link l;
        l.bytes_per_second = quantity(text, text.substr(0, comma), "bandwidth", bandwidth_units);
        if (comma != std::string_view::npos) {
            l.latency_seconds = quantity(text, text.substr(comma + 1), "latency", time_units);
        }
        if (l.bytes_per_second == 0) { reject(text, "has no bandwidth"); }
        return shaped_network(l);
    }

    /// As seen by `ranks` ranks. Errors: usage_error when a topology has another number of ranks.
    [[nodiscard]] topology among(int ranks) const {
        if (!levels_) { return topology::uniform(ranks, 1, {}, flat_); }
        if (levels_->ranks() != ranks) {
            throw usage_error(
                formatted("shaped: the topology has {} ranks, the communicator {}", levels_->ranks(), ranks));
        }
        return *levels_;
    }

private:
    struct unit {
        std::string_view name;
        double factor;
    };
    static constexpr unit bandwidth_units[] = {{"bit", 0.125}, {"Kbit", 0.125e3}, {"Mbit", 0.125e6}, {"Gbit", 0.125e9},
                                               {"B", 1},       {"KB", 1e3},       {"MB", 1e6},       {"GB", 1e9}};
    static constexpr unit time_units[] = {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}};

    [[noreturn]] static void reject(std::string_view text, std::string_view why) {
        throw usage_error(formatted("shaped_network: '{}' {}; write bandwidth,latency such as 1Gbit,50us", text, why));
    }
    [[nodiscard]] static double quantity(std::string_view text, std::string_view part, std::string_view what,
                                         std::span<const unit> units) {
        double number = 0;
        const auto [end, problem] = std::from_chars(part.data(), part.data() + part.size(), number);
        if (problem != std::errc{} || !std::isfinite(number) || number < 0) {
            reject(text, formatted("has '{}' for a {}, which does not start with a number >= 0", part, what));
        }
        const std::string_view name = part.substr(static_cast<std::size_t>(end - part.data()));
        std::string known;
        for (const unit& u : units) {
            if (u.name == name) { return number * u.factor; }
            known += formatted(" {}", u.name);
        }
        reject(text, formatted("has '{}' for a {}, whose unit is not one of{}", part, what, known));
    }
};

/// A communicator over a slower network.
///
/// Semantics  a call returns no sooner than its modeled time (time_of of comm/cost) after it started, while the real
///            call runs meanwhile. Each rank has one link inside its node and one between nodes, which all its
///            duplicates and splits share: calls that overlap in time queue for a link in the order in which they
///            start; latencies pass side by side, and so do an exchange's messages inside and between nodes. Control
///            traffic (duplicate, split, agree, gather_control) is not delayed. A rank's time starts when the rank
///            itself calls: ranks that wait for a late one may leave before it does.
/// Cost       the modeled time, asleep, and what the system needs to wake a thread (some 50 us); watches for aborts
///            every 2 ms.
/// Errors     timeout_error after `timeout` when the network needs longer; the family is then aborted, as by any
///            timeout. usage_error for one that is not positive.
template <decoratable C, sleeping_clock Clock = wall_clock> class shaped : public decorator<shaped<C, Clock>, C> {
    using base = decorator<shaped<C, Clock>, C>;
    friend base;
    static_assert(queue_of<C>::executes_inline, "shaped needs a queue that executes inline");

    struct links {
        std::mutex mutex;
        deadline inside_free{};  // when the last call leaves the link
        deadline between_free{};
        duration timeout;
        explicit links(duration t) : timeout(t) {}
    };
    topology topology_;
    std::shared_ptr<links> links_;
    Clock clock_;

    shaped(C inner, topology t, std::shared_ptr<links> l, Clock clock)
        : base(std::move(inner)), topology_(std::move(t)), links_(std::move(l)), clock_(std::move(clock)) {}

public:
    shaped(C inner, const shaped_network& network, duration timeout = default_timeout(), Clock clock = {})
        : base(std::move(inner))
        , topology_(network.among(this->size()))
        , links_(std::make_shared<links>((expect_timeout("shaped", timeout), timeout)))
        , clock_(std::move(clock)) {}

    /// The network as this communicator's ranks see it.
    [[nodiscard]] const topology& network() const noexcept { return topology_; }

    void execute(const call& c) {
        const deadline start = clock_.now();
        const deadline end = reserve(start, time_of(c, this->rank(), topology_));
        this->inner().execute(c);
        const bool in_time = end - start <= links_->timeout;
        sleep_watching(this->inner(), clock_, in_time ? end : start + links_->timeout);
        if (!in_time) {
            const error_context context = context_of(c, this->name(), this->rank());
            const std::string text =
                formatted("{}: needs {} s on this network, the deadline is {} s{}", name_of(c.kind),
                          seconds(end - start), seconds(links_->timeout), where(context));
            this->abort(text);
            throw timeout_error(text, {}, context);
        }
    }

private:
    void before(const typename base::control_call&) noexcept {}
    [[nodiscard]] shaped wrap(C child, std::span<const int> members) {
        return shaped(std::move(child), topology_.subset(members), links_, clock_);
    }

    // To the nearest tick of the clock.
    [[nodiscard]] static duration ticks(double s) {
        constexpr double most = 1e8;  // three years; the deadline ends the call long before
        return std::chrono::round<duration>(std::chrono::duration<double>(std::min(s, most)));
    }
    [[nodiscard]] deadline reserve(deadline start, const call_time& t) {
        const std::lock_guard lock(links_->mutex);
        const auto pass = [](deadline from, deadline& idle_from, double busy) {
            if (busy <= 0) { return from; }
            return idle_from = std::max(from, idle_from) + ticks(busy);
        };
        const deadline inside = pass(start, links_->inside_free, t.inside);
        const deadline between = pass(t.side_by_side ? start : inside, links_->between_free, t.between);
        return std::max(inside, between) + ticks(t.latency);
    }
};

}  // namespace tutti::comm
