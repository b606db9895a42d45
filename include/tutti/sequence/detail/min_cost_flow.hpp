// cheapest_transport: the transportation problem, exactly, in integers. Needs nothing.
// Successive shortest paths with potentials (Ahuja, Magnanti, Orlin: Network Flows, 1993, chapter 9.7).
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t
#include <cstdint>    // amounts
#include <limits>     // unreachable
#include <span>       // costs
#include <vector>     // flows

namespace tutti::sequence::detail {

/// One run of the algorithm: Dijkstra from a row that still has supply to the nearest column that still has demand, over
/// arcs row -> column, and back where something flows. Lengths are reduced costs, which stay >= 0.
class transport {
    static constexpr std::int64_t far_away = std::numeric_limits<std::int64_t>::max();
    std::span<const std::int64_t> cost_;
    std::vector<std::int64_t> supply_;
    std::vector<std::int64_t> demand_;
    std::size_t rows_;
    std::size_t columns_;
    std::vector<std::int64_t> flow_;
    // By vertex: rows, then columns.
    std::vector<std::int64_t> potential_;
    std::vector<std::int64_t> distance_;
    std::vector<std::size_t> previous_;
    std::vector<char> settled_;

public:
    transport(std::span<const std::int64_t> cost, std::span<const std::int64_t> supply,
              std::span<const std::int64_t> demand)
        : cost_(cost)
        , supply_(supply.begin(), supply.end())
        , demand_(demand.begin(), demand.end())
        , rows_(supply.size())
        , columns_(demand.size())
        , flow_(rows_ * columns_, 0)
        , potential_(rows_ + columns_, 0)
        , distance_(rows_ + columns_)
        , previous_(rows_ + columns_)
        , settled_(rows_ + columns_) {}

    [[nodiscard]] std::vector<std::int64_t> solve() {
        for (std::size_t row = 0; row < rows_; ++row) {
            while (supply_[row] > 0) { augment(row, nearest_demand(row)); }
        }
        return flow_;
    }

private:
    [[nodiscard]] std::size_t nearest_demand(std::size_t source) {
        std::fill(distance_.begin(), distance_.end(), far_away);
        std::fill(settled_.begin(), settled_.end(), char{0});
        distance_[source] = 0;
        for (;;) {
            std::size_t next = distance_.size();
            for (std::size_t v = 0; v < distance_.size(); ++v) {
                if (settled_[v] == 0 && (next == distance_.size() || distance_[v] < distance_[next])) { next = v; }
            }
            settled_[next] = 1;
            if (next >= rows_ && demand_[next - rows_] > 0) {
                raise_potentials(distance_[next]);
                return next;
            }
            relax_from(next);
        }
    }
    void relax_from(std::size_t v) {
        const auto reach = [&](std::size_t to, std::int64_t length) {
            const std::int64_t through = distance_[v] + length + potential_[v] - potential_[to];
            if (settled_[to] == 0 && through < distance_[to]) {
                distance_[to] = through;
                previous_[to] = v;
            }
        };
        if (v < rows_) {
            for (std::size_t c = 0; c < columns_; ++c) { reach(rows_ + c, cost_[v * columns_ + c]); }
        } else {
            for (std::size_t r = 0; r < rows_; ++r) {
                const std::size_t arc = r * columns_ + (v - rows_);
                if (flow_[arc] > 0) { reach(r, -cost_[arc]); }
            }
        }
    }
    // Reduced costs stay >= 0 and become 0 along the path; vertices beyond it count as being as far.
    void raise_potentials(std::int64_t farthest) {
        for (std::size_t v = 0; v < potential_.size(); ++v) { potential_[v] += std::min(distance_[v], farthest); }
    }
    void augment(std::size_t source, std::size_t sink) {
        std::int64_t amount = std::min(supply_[source], demand_[sink - rows_]);
        for (std::size_t v = sink; v != source; v = previous_[v]) {
            if (v < rows_) { amount = std::min(amount, flow_[arc_back_to(v)]); }
        }
        for (std::size_t v = sink; v != source; v = previous_[v]) {
            if (v < rows_) {
                flow_[arc_back_to(v)] -= amount;
            } else {
                flow_[previous_[v] * columns_ + (v - rows_)] += amount;
            }
        }
        supply_[source] -= amount;
        demand_[sink - rows_] -= amount;
    }
    [[nodiscard]] std::size_t arc_back_to(std::size_t row) const { return row * columns_ + (previous_[row] - rows_); }
};

/// The flow [supply.size()][demand.size()] that uses up both at the least cost[row][column] times flow.
///
/// Requires     supply and demand positive and of equal sum; 0 <= cost, and cost times their number below 2^62.
/// Determinism  of vertices equally far the first is taken.
[[nodiscard]] inline std::vector<std::int64_t> cheapest_transport(std::span<const std::int64_t> cost,
                                                                  std::span<const std::int64_t> supply,
                                                                  std::span<const std::int64_t> demand) {
    return transport(cost, supply, demand).solve();
}

}  // namespace tutti::sequence::detail
