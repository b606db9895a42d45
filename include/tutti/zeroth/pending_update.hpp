// pending_update: what a step does to weights, as a few numbers that can be replayed on any slice at any later time.
// Needs zeroth/direction.
// Source: the update of MeZO, arXiv 2305.17333, algorithm 1; deferring it to the next visit of a block is ZO2's, arXiv
// 2503.12668; that each update keeps its own learning rate, and lists of several, are ours.
#pragma once

#include <cmath>        // isfinite
#include <cstddef>      // size_t
#include <cstdint>      // tensors
#include <span>         // updates
#include <string_view>  // names
#include <vector>       // prepared updates

#include <tutti/core/error.hpp>        // usage_error
#include <tutti/core/philox.hpp>       // random_stream
#include <tutti/core/text.hpp>         // formatted
#include <tutti/zeroth/direction.hpp>  // direction

namespace tutti::zeroth {

/// One direction of one step: w -= learning_rate * (gradient * z + weight_decay * w).
struct pending_update {
    direction z;
    double gradient = 0;  ///< along z: a scalar
    double learning_rate = 0;
    double weight_decay = 0;
};

/// What a step may have of directions: they go to a kernel as parameters.
inline constexpr std::size_t max_directions = 64;

namespace detail {

[[nodiscard]] constexpr bool begins_step(std::span<const pending_update> updates, std::size_t i) noexcept {
    return i == 0 || updates[i - 1].z.seed != updates[i].z.seed || updates[i - 1].z.step != updates[i].z.step;
}

/// A pending update in the precision of the weights. `begins`: the first direction of its step.
template <class Real> struct prepared_update {
    random_stream stream;
    Real factor;
    Real decay;
    bool begins;

    [[nodiscard]] TUTTI_HOST_DEVICE constexpr random_stream of(std::uint32_t tensor) const noexcept {
        return {stream.seed, tensor, stream.step};
    }
};

inline void expect_finite(std::string_view operation, std::string_view what, double value) {
    if (!std::isfinite(value)) { throw usage_error(formatted("{}: the {} is {}", operation, what, value)); }
}

inline void expect_updates(std::string_view operation, std::span<const pending_update> updates, distribution kind) {
    std::size_t directions = 0;
    for (std::size_t i = 0; i < updates.size(); ++i) {
        const pending_update& u = updates[i];
        expect_finite(operation, "gradient", u.gradient);
        expect_finite(operation, "learning rate", u.learning_rate);
        expect_finite(operation, "weight decay", u.weight_decay);
        if (u.z.kind != kind) {
            throw usage_error(formatted("{}: directions of two distributions in one list", operation));
        }
        const bool begins = begins_step(updates, i);
        directions = begins ? 1 : directions + 1;
        if (directions > max_directions) {
            throw usage_error(formatted("{}: more than {} directions in step {}", operation, max_directions, u.z.step));
        }
    }
}

template <class Real>
[[nodiscard]] std::vector<prepared_update<Real>> prepared(std::span<const pending_update> updates) {
    std::vector<prepared_update<Real>> all;
    all.reserve(updates.size());
    for (std::size_t i = 0; i < updates.size(); ++i) {
        const pending_update& u = updates[i];
        all.push_back({u.z.stream(0), static_cast<Real>(u.learning_rate * u.gradient),
                       static_cast<Real>(u.learning_rate * u.weight_decay), begins_step(updates, i)});
    }
    return all;
}

[[nodiscard]] inline distribution kind_of(std::span<const pending_update> updates) noexcept {
    return updates.empty() ? distribution::normal : updates.front().z.kind;
}

}  // namespace detail

}  // namespace tutti::zeroth
