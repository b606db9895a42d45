// link_clock: what happens when, where operations share links evenly: the time queue of a virtual cluster.
// Needs nothing of the library. Deterministic: of two things at one time the one that was announced first comes first.
#pragma once

#include <algorithm>   // max, find
#include <cstddef>     // size_t
#include <cstdint>     // numbers
#include <functional>  // greater
#include <optional>    // the next thing
#include <queue>       // priority_queue
#include <span>        // links
#include <tuple>       // order
#include <vector>      // flows

namespace tutti::simulate::detail {

/// Timers and flows.
///
/// Semantics    `at(time, token)` gives the token back at that time. `use(now, busy, links, token)` does when `busy`
///              seconds of all those links have been used up: a link gives each of its flows an equal share, and a flow
///              goes as fast as the fullest of its links lets it. What a flow so leaves of its other links nobody gets:
///              times are upper bounds of what max-min fairness would give, and the same where flows that meet on one
///              link are alike. `links` must outlive the flow.
/// Order        `now` and `time` never lie before what next() gave last.
/// Cost         a flow: logarithmic, and for each link that it shares, the flows there times their links.
class link_clock {
public:
    struct happening {
        double time;
        std::uint32_t token;
    };

    explicit link_clock(std::size_t links) : users_(links) {}

    void at(double time, std::uint32_t token) { push(time, token, timer); }

    void use(double now, double busy, std::span<const std::uint32_t> links, std::uint32_t token) {
        const std::uint32_t id = place();
        flow& f = flows_[id];
        f = {links, busy, 0, now, token, f.generation + 1};
        bool shared = false;
        for (const std::uint32_t l : links) {
            shared = shared || !users_[l].empty();
            users_[l].push_back(id);
        }
        settle(id, now);
        if (shared) { settle_neighbors(id, now); }
    }

    /// The earliest; nothing when there is none.
    [[nodiscard]] std::optional<happening> next() {
        while (!queue_.empty()) {
            const entry e = queue_.top();
            queue_.pop();
            if (e.flow == timer) { return happening{e.time, e.token}; }
            if (flows_[e.flow].generation != e.token) { continue; }  // its speed has changed since
            return happening{e.time, end(e.flow, e.time)};
        }
        return std::nullopt;
    }

private:
    static constexpr std::uint32_t timer = ~std::uint32_t{0};
    struct flow {
        std::span<const std::uint32_t> links{};
        double left = 0;   // seconds at full speed
        double speed = 0;  // share of it
        double since = 0;  // when `left` was so much
        std::uint32_t token = 0;
        std::uint32_t generation = 0;  // of its speed
        std::uint64_t met = 0;         // number of the last search for neighbors that met it
    };
    struct entry {
        double time;
        std::uint64_t order;
        std::uint32_t flow;
        std::uint32_t token;  // of a flow: its generation
        friend bool operator>(const entry& a, const entry& b) noexcept {
            return std::tie(a.time, a.order) > std::tie(b.time, b.order);
        }
    };

    std::priority_queue<entry, std::vector<entry>, std::greater<>> queue_;
    std::vector<flow> flows_;
    std::vector<std::uint32_t> free_;                // places in flows_
    std::vector<std::vector<std::uint32_t>> users_;  // by link
    std::vector<std::uint32_t> neighbors_;
    std::uint64_t order_ = 0;
    std::uint64_t meetings_ = 0;

    void push(double time, std::uint32_t token, std::uint32_t what) { queue_.push({time, order_++, what, token}); }

    [[nodiscard]] std::uint32_t place() {
        if (free_.empty()) {
            flows_.emplace_back();
            return static_cast<std::uint32_t>(flows_.size() - 1);
        }
        const std::uint32_t id = free_.back();
        free_.pop_back();
        return id;
    }
    [[nodiscard]] std::uint32_t end(std::uint32_t id, double now) {
        flow& f = flows_[id];
        bool shared = false;
        for (const std::uint32_t l : f.links) {
            auto& users = users_[l];
            users.erase(std::find(users.begin(), users.end(), id));
            shared = shared || !users.empty();
        }
        if (shared) { settle_neighbors(id, now); }
        ++f.generation;
        free_.push_back(id);
        return f.token;
    }
    // Those that share a link with `id`, each once, in the order in which they are met.
    void settle_neighbors(std::uint32_t id, double now) {
        neighbors_.clear();
        flows_[id].met = ++meetings_;
        for (const std::uint32_t l : flows_[id].links) {
            for (const std::uint32_t other : users_[l]) {
                if (flows_[other].met == meetings_) { continue; }
                flows_[other].met = meetings_;
                neighbors_.push_back(other);
            }
        }
        for (const std::uint32_t other : neighbors_) { settle(other, now); }
    }
    void settle(std::uint32_t id, double now) {
        flow& f = flows_[id];
        std::size_t most = 1;
        for (const std::uint32_t l : f.links) { most = std::max(most, users_[l].size()); }
        const double speed = 1 / static_cast<double>(most);
        if (speed == f.speed) { return; }
        f.left = std::max(0.0, f.left - (now - f.since) * f.speed);
        f.since = now;
        f.speed = speed;
        ++f.generation;
        push(now + f.left / speed, f.generation, id);
    }
};

}  // namespace tutti::simulate::detail
