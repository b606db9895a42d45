// perturbation: weights moved along random directions: perturbed copies for a forward pass, updates, and both in one.
// Needs zeroth/pending_update and zeroth/tensor_slice; on a CUDA queue zeroth/perturbation.cuh.
// Source: MeZO, arXiv 2305.17333, algorithm 1. Pristine weights with a perturbed copy instead of perturbing in place and
// back, and lists of pending updates that can be replayed anywhere, are ours.
#pragma once

#include <array>        // four elements
#include <cmath>        // fma
#include <cstddef>      // size_t
#include <cstdint>      // groups
#include <span>         // slices, updates
#include <string_view>  // names
#include <type_traits>  // type_identity_t
#include <vector>       // prepared updates

#include <tutti/core/element.hpp>           // master_t
#include <tutti/core/elementwise.hpp>       // expect_pairs
#include <tutti/core/error.hpp>             // usage_error
#include <tutti/core/exact.hpp>             // products and sums rounded separately
#include <tutti/core/run.hpp>               // run, cost
#include <tutti/core/text.hpp>              // formatted
#include <tutti/zeroth/direction.hpp>       // direction
#include <tutti/zeroth/pending_update.hpp>  // pending_update
#include <tutti/zeroth/tensor_slice.hpp>    // tensor_slice

namespace tutti::zeroth {

namespace detail {

/// The arithmetic of one element, here alone for host and device.
template <class Real> struct arithmetic {
    [[nodiscard]] static TUTTI_HOST_DEVICE Real perturbed(Real w, Real scale, float z) {
        return std::fma(scale, static_cast<Real>(z), w);
    }
    [[nodiscard]] static TUTTI_HOST_DEVICE Real begun(Real w, Real decay) {
        return decay == Real(0) ? Real(0) : (exact<Real>(decay) * exact<Real>(w)).value;  // also of infinite weights
    }
    [[nodiscard]] static TUTTI_HOST_DEVICE Real extended(Real d, Real factor, float z) {
        return std::fma(factor, static_cast<Real>(z), d);
    }
    template <class T> [[nodiscard]] static TUTTI_HOST_DEVICE Real moved(Real w, Real d) {
        return static_cast<Real>(static_cast<T>((exact<Real>(w) - exact<Real>(d)).value));
    }
};

/// Calls body(group, lane, at) for the elements of a slice: lane of a group of four in z, place in the view. The body
/// is told with `fresh` when the group is another than before.
template <class Body> void for_each_place(const tensor_slice& s, Body body) {
    for (std::size_t i = 0; i < s.count; ++i) {
        const std::uint64_t e = s.first + i;
        body(e >> 2, static_cast<std::size_t>(e & 3), s.offset + i, i == 0 || (e & 3) == 0);
    }
}

/// w of every element of a slice after all updates.
template <class T, class Store>
void update_slice(const T* weights, const tensor_slice& s, distribution kind,
                  std::span<const prepared_update<master_t<T>>> updates, Store store) {
    using real = master_t<T>;
    using rules = arithmetic<real>;
    std::vector<std::array<float, 4>> z(updates.size());
    for_each_place(s, [&](std::uint64_t group, std::size_t lane, std::size_t at, bool fresh) {
        if (fresh) {
            for (std::size_t u = 0; u < updates.size(); ++u) { z[u] = four_of(kind, updates[u].of(s.tensor), group); }
        }
        real w = static_cast<real>(weights[at]);
        real d = 0;
        for (std::size_t u = 0; u < updates.size(); ++u) {
            if (updates[u].begins) {
                if (u != 0) { w = rules::template moved<T>(w, d); }
                d = rules::begun(w, s.decayed ? updates[u].decay : real(0));
            }
            d = rules::extended(d, updates[u].factor, z[u][lane]);
        }
        store(at, updates.empty() ? weights[at] : static_cast<T>(rules::template moved<T>(w, d)));
    });
}

/// Operations of the draw of an element.
[[nodiscard]] constexpr double draw_flops(distribution kind) noexcept {
    return kind == distribution::normal ? 45.0 : 6.0;
}
}  // namespace detail

/// out = T(in + scale z) of the elements of slices; frozen ones are copied. Aliasing: out may be in.
template <floating_element T, memory M> struct perturb_operation {
    static constexpr std::string_view name = "perturb";
    view<const T, M> in;
    view<T, M> out;
    std::span<const tensor_slice> slices;
    direction z;
    master_t<T> scale;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const double n = detail::elements_of(slices);
        return {2 * n * static_cast<double>(sizeof(T)), n * (2 + detail::draw_flops(z.kind))};
    }
    void operator()() const {
        using real = master_t<T>;
        for (const tensor_slice& s : slices) {
            const random_stream stream = z.stream(s.tensor);
            std::array<float, 4> four{};
            detail::for_each_place(s, [&](std::uint64_t group, std::size_t lane, std::size_t at, bool fresh) {
                if (s.frozen) {
                    out.data()[at] = in.data()[at];
                    return;
                }
                if (fresh) { four = detail::four_of(z.kind, stream, group); }
                out.data()[at] = static_cast<T>(
                    detail::arithmetic<real>::perturbed(static_cast<real>(in.data()[at]), scale, four[lane]));
            });
        }
    }
};

/// weights after all updates; where `out` is not empty, also out = T(weights + scale z), of the new weights.
template <floating_element T, memory M> struct update_operation {
    static constexpr std::string_view name = "zeroth_update";
    view<T, M> weights;
    view<T, M> out;
    std::span<const tensor_slice> slices;
    std::span<const pending_update> updates;
    direction z;
    master_t<T> scale;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const double n = detail::elements_of(slices);
        const double draws = static_cast<double>(updates.size()) + (out.empty() ? 0 : 1);
        return {(out.empty() ? 2 : 3) * n * static_cast<double>(sizeof(T)),
                n * draws * (4 + detail::draw_flops(z.kind))};
    }
    void operator()() const {
        const auto prepared = detail::prepared<master_t<T>>(updates);
        for (const tensor_slice& s : slices) {
            if (s.frozen) { continue; }
            detail::update_slice<T>(weights.data(), s, z.kind, std::span(prepared),
                                    [&](std::size_t at, T w) { weights.data()[at] = w; });
        }
        if (!out.empty()) { perturb_operation<T, M>{weights, out, slices, z, scale}(); }
    }
};

/// out = T(sum of gradient z over directions); zero where frozen.
template <floating_element T, memory M> struct sum_directions_operation {
    static constexpr std::string_view name = "sum_directions";
    view<T, M> out;
    std::span<const tensor_slice> slices;
    std::span<const pending_update> updates;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const double n = detail::elements_of(slices);
        return {n * static_cast<double>(sizeof(T)),
                n * static_cast<double>(updates.size()) * (2 + detail::draw_flops(detail::kind_of(updates)))};
    }
    void operator()() const {
        using real = master_t<T>;
        std::vector<std::array<float, 4>> four(updates.size());
        for (const tensor_slice& s : slices) {
            detail::for_each_place(s, [&](std::uint64_t group, std::size_t lane, std::size_t at, bool fresh) {
                real sum = 0;
                for (std::size_t u = 0; u < updates.size() && !s.frozen; ++u) {
                    const pending_update& now = updates[u];
                    if (fresh) { four[u] = detail::four_of(now.z.kind, now.z.stream(s.tensor), group); }
                    sum = detail::arithmetic<real>::extended(sum, static_cast<real>(now.gradient), four[u][lane]);
                }
                out.data()[at] = static_cast<T>(sum);
            });
        }
    }
};

/// out = T(in + scale z), rounded once, for the elements of slices; frozen ones are copied.
///
/// Semantics    scale is sigma epsilon. Elements of `out` that no slice names are not written.
/// Shapes       slices say where elements stand in `in` and, at the same place, in `out`.
/// Aliasing     out may be in, if that is what the caller wants: what was perturbed in place does not come back exactly.
///              Use a copy, and weights never drift. No other overlap.
/// Determinism  the same bits on host and device, for any cut into slices and any order of them: z by position, one fused
///              multiply-add in master_t<T>.
/// Cost         2 sizeof(T) bytes and a draw an element; on a device a launch for 32 slices.
/// Errors       usage_error for slices outside the views, sizes that differ, a scale that is not finite.
template <queue Q, floating_element T>
void perturb(Q q, view<const std::type_identity_t<T>, typename Q::memory_type> in, view<T, typename Q::memory_type> out,
             std::span<const tensor_slice> slices, const direction& z, double scale) {
    tutti::detail::expect_pairs("perturb", in, out);
    detail::expect_slices("perturb", slices, in.size());
    detail::expect_finite("perturb", "scale", scale);
    run(q, perturb_operation<T, typename Q::memory_type>{in, out, slices, z, static_cast<master_t<T>>(scale)});
}

/// w -= learning_rate (sum of gradient z + weight_decay w) for each step of the list, in order.
///
/// Semantics    neighbors of one seed and step are the directions of one update, and the decay is that of the first:
///              d = (lr wd) w;  d = fma(lr g, z, d) for each;  w = T(w - d), all in master_t<T>: one rounding to T a
///              step. So a list may be cut between steps and applied piece by piece, at any time, with the same bits.
///              Slices without decay have d = 0 at first; frozen ones are not touched.
/// Determinism  as perturb.
/// Cost         2 sizeof(T) bytes an element whatever the list's length, and a draw for each direction.
/// Errors       usage_error for slices outside the view, numbers that are not finite, more than max_directions in a
///              step, two distributions in one list.
template <queue Q, floating_element T>
void apply_updates(Q q, view<T, typename Q::memory_type> weights, std::span<const tensor_slice> slices,
                   std::span<const pending_update> updates) {
    const distribution kind = detail::kind_of(updates);
    detail::expect_slices("apply_updates", slices, weights.size());
    detail::expect_updates("apply_updates", updates, kind);
    if (updates.empty()) { return; }
    run(q, update_operation<T, typename Q::memory_type>{weights, {}, slices, updates, {.kind = kind}, 0});
}

/// apply_updates on weights, then perturb from them into out: the same bits in one pass.
///
/// Aliasing  none. Cost: 3 sizeof(T) bytes an element, and a draw for each direction and the new one.
/// Errors    those of both; the new direction is of the list's distribution.
template <queue Q, floating_element T>
void update_then_perturb(Q q, view<T, typename Q::memory_type> weights, view<T, typename Q::memory_type> out,
                         std::span<const tensor_slice> slices, std::span<const pending_update> updates,
                         const direction& z, double scale) {
    if (updates.empty()) { return perturb(q, weights, out, slices, z, scale); }
    tutti::detail::expect_pairs("update_then_perturb", weights, out);
    detail::expect_slices("update_then_perturb", slices, weights.size());
    detail::expect_updates("update_then_perturb", updates, z.kind);
    detail::expect_finite("update_then_perturb", "scale", scale);
    if (weights.data() == out.data() && !weights.empty() && weights.data() != nullptr) {
        throw usage_error("update_then_perturb: the perturbed copy may not be the weights");
    }
    run(q, update_operation<T, typename Q::memory_type>{weights, out, slices, updates, z,
                                                        static_cast<master_t<T>>(scale)});
}

/// out = T(sum of gradient z over all directions of the list); zero where frozen: the estimate itself, for optimizers
/// that keep moments. Learning rates and decays of the list are not looked at.
///
/// Determinism  as perturb. Cost: sizeof(T) bytes an element, a draw for each direction. Errors: those of apply_updates.
template <queue Q, floating_element T>
void sum_directions(Q q, view<T, typename Q::memory_type> out, std::span<const tensor_slice> slices,
                    std::span<const pending_update> updates) {
    detail::expect_slices("sum_directions", slices, out.size());
    detail::expect_updates("sum_directions", updates, detail::kind_of(updates));
    run(q, sum_directions_operation<T, typename Q::memory_type>{out, slices, updates});
}

}  // namespace tutti::zeroth
