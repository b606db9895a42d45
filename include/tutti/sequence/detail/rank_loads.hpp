// rank_loads: seconds and tokens that ranks have so far, and which ranks the next ring should take.
// Needs sequence/placement.
#pragma once

#include <algorithm>  // sort
#include <cstddef>    // size_t
#include <cstdint>    // tokens
#include <span>       // ranks
#include <vector>     // tables

#include <tutti/sequence/placement.hpp>  // cluster, tokens_at

namespace tutti::sequence::detail {

/// Determinism  ties go to the lower node, then to the lower rank.
class rank_loads {
    cluster machines_;
    std::int64_t capacity_;
    std::vector<double> seconds_;       // by rank
    std::vector<std::int64_t> tokens_;  // by rank
    std::vector<int> chosen_;           // ranks
    std::vector<int> candidates_;       // ranks of a node, or nodes
    std::vector<double> node_seconds_;

    [[nodiscard]] double load(int rank) const noexcept { return seconds_[static_cast<std::size_t>(rank)]; }
    [[nodiscard]] bool has_room(int rank, std::int64_t tokens) const noexcept {
        return tokens_[static_cast<std::size_t>(rank)] <= capacity_ - tokens;
    }

    // The `size` ranks of one node of which the fullest is least loaded. Cost: ranks, and a sort a node if size > 1.
    [[nodiscard]] bool choose_in_node(int size, std::int64_t tokens) {
        const int width = machines_.ranks_per_node;
        const auto before = [&](int a, int b) { return load(a) != load(b) ? load(a) < load(b) : a < b; };
        chosen_.clear();
        for (int first = 0; first < machines_.ranks(); first += width) {
            candidates_.clear();
            for (int r = first; r < first + width; ++r) {
                if (!has_room(r, tokens)) { continue; }
                if (size > 1) {
                    candidates_.push_back(r);
                } else if (candidates_.empty() || load(r) < load(candidates_.front())) {
                    candidates_.assign(1, r);
                }
            }
            if (candidates_.size() < static_cast<std::size_t>(size)) { continue; }
            std::sort(candidates_.begin(), candidates_.end(), before);
            candidates_.resize(static_cast<std::size_t>(size));
            if (chosen_.empty() || load(candidates_.back()) < load(chosen_.back())) {
                chosen_.assign(candidates_.begin(), candidates_.end());
            }
        }
        return !chosen_.empty();
    }

    // The least loaded nodes all of whose ranks have room.
    [[nodiscard]] bool choose_nodes(int nodes, std::int64_t tokens) {
        const int width = machines_.ranks_per_node;
        candidates_.clear();
        node_seconds_.assign(static_cast<std::size_t>(machines_.nodes), 0);
        for (int n = 0; n < machines_.nodes; ++n) {
            bool room = true;
            for (int r = n * width; r < (n + 1) * width; ++r) {
                room = room && has_room(r, tokens);
                node_seconds_[static_cast<std::size_t>(n)] += load(r);
            }
            if (room) { candidates_.push_back(n); }
        }
        if (candidates_.size() < static_cast<std::size_t>(nodes)) { return false; }
        std::sort(candidates_.begin(), candidates_.end(), [&](int a, int b) {
            const double of_a = node_seconds_[static_cast<std::size_t>(a)];
            const double of_b = node_seconds_[static_cast<std::size_t>(b)];
            return of_a != of_b ? of_a < of_b : a < b;
        });
        chosen_.clear();
        for (int i = 0; i < nodes; ++i) {
            const int n = candidates_[static_cast<std::size_t>(i)];
            for (int r = n * width; r < (n + 1) * width; ++r) { chosen_.push_back(r); }
        }
        return true;
    }

public:
    rank_loads(const cluster& machines, std::int64_t capacity)
        : machines_(machines)
        , capacity_(capacity)
        , seconds_(static_cast<std::size_t>(machines.ranks()))
        , tokens_(seconds_.size()) {}

    /// `size` ranks of one node, or as many whole nodes, that each have room for `tokens` more, in ascending order;
    /// none where there are too few. Valid until the next call.
    [[nodiscard]] std::span<const int> choose(int size, std::int64_t tokens) {
        const int width = machines_.ranks_per_node;
        if (!(size <= width ? choose_in_node(size, tokens) : choose_nodes(size / width, tokens))) { return {}; }
        std::sort(chosen_.begin(), chosen_.end());
        return chosen_;
    }

    /// A sequence of `length` tokens on a ring of these ranks, which adds `seconds` to each.
    void add(std::span<const int> ranks, std::int64_t length, double seconds) {
        for (std::size_t i = 0; i < ranks.size(); ++i) {
            const auto rank = static_cast<std::size_t>(ranks[i]);
            seconds_[rank] += seconds;
            tokens_[rank] += tokens_at(length, static_cast<int>(ranks.size()), static_cast<int>(i));
        }
    }
};

}  // namespace tutti::sequence::detail
