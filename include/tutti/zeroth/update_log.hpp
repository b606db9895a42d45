// update_log: updates that are known but not yet in every module's stored weights; each module has its own place in it.
// Needs zeroth/pending_update. An update keeps the learning rate of its own step, so a late one is the same update.
// Source: Wang et al., ZO2, arXiv:2503.12668 (the update of a step is applied when the block comes next).
#pragma once

#include <algorithm>  // min, any_of
#include <cstddef>    // size_t
#include <span>       // lists
#include <vector>     // updates

#include <tutti/zeroth/pending_update.hpp>  // pending_update

namespace tutti::zeroth {

/// The updates of steps, in order, and how many of them are in the weights of each module.
///
/// Semantics  `append` adds a step; `pending` is what a module's weights lack; `applied` says that they lack nothing.
///            Between two appends of a step nothing else happens, so lists are cut between steps alone.
/// Cost       48 bytes an update and one number a module.
class update_log {
    struct progress {
        std::size_t updates = 0;
        std::size_t steps = 0;
    };
    std::vector<pending_update> list_;
    std::size_t first_ = 0;  // updates that were in the list and are in all weights
    std::size_t steps_ = 0;
    std::vector<progress> done_;

public:
    explicit update_log(std::size_t modules) : done_(modules) {}

    /// The updates of one step. None: a step that changes nothing.
    void append(std::span<const pending_update> step) {
        if (step.empty()) { return; }
        list_.insert(list_.end(), step.begin(), step.end());
        ++steps_;
    }
    /// Valid until the next append or trim.
    [[nodiscard]] std::span<const pending_update> pending(std::size_t m) const {
        return std::span(list_).subspan(done_.at(m).updates - first_);
    }
    [[nodiscard]] std::size_t steps_behind(std::size_t m) const { return steps_ - done_.at(m).steps; }
    [[nodiscard]] bool any_behind() const {
        return std::any_of(done_.begin(), done_.end(), [&](const progress& p) { return p.steps != steps_; });
    }
    void applied(std::size_t m) { done_.at(m) = {first_ + list_.size(), steps_}; }

    /// Forgets what no module lacks.
    void trim() {
        std::size_t least = first_ + list_.size();
        for (const progress& p : done_) { least = std::min(least, p.updates); }
        list_.erase(list_.begin(), list_.begin() + static_cast<std::ptrdiff_t>(least - first_));
        first_ = least;
    }
    [[nodiscard]] const pending_update& front() const { return list_.front(); }
    [[nodiscard]] std::size_t size() const noexcept { return list_.size(); }
    [[nodiscard]] std::size_t steps() const noexcept { return steps_; }
};

}  // namespace tutti::zeroth
