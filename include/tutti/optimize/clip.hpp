// clip: the global gradient norm, summed in double in one fixed order, and the factor that clips it.
// Needs core/run. Sharded strategies pass how to sum over shards; the bits do not depend on the sharding.
// Source: Pascanu et al., On the difficulty of training recurrent neural networks, ICML 2013, section 3.2.
#pragma once

#include <cmath>     // sqrt, isfinite
#include <concepts>  // invocable
#include <cstddef>   // size_t

#include <tutti/core/config.hpp>       // TUTTI_EXACT
#include <tutti/core/elementwise.hpp>  // fill
#include <tutti/core/exact.hpp>        // products and sums rounded separately
#include <tutti/core/run.hpp>          // operations
#include <tutti/core/text.hpp>         // formatted

namespace tutti::optimize {

/// Elements of a block: the unit in which squares are summed. Shards that begin at multiples of it keep the bits.
inline constexpr std::size_t norm_block = 4096;

/// Blocks that so many elements have, the last of which may be shorter.
[[nodiscard]] constexpr std::size_t norm_blocks(std::size_t elements) noexcept {
    return elements / norm_block + (elements % norm_block != 0 ? 1 : 0);
}

/// out[b] = sum of squares of block b of `in`. Determinism: element j of a block goes to partial sum j mod 8, the eight
/// are added in order: vectorized or not, the same bits. Cost: reads the input once.
template <floating_element T, memory M> struct square_sums_operation {
    static constexpr std::string_view name = "square_sums";
    static constexpr std::size_t lanes = 8;
    view<const T, M> in;
    view<double, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.size_bytes() + out.size_bytes()), 2.0 * static_cast<double>(in.size())};
    }
    TUTTI_EXACT void operator()() const {
        TUTTI_EXACT_BODY
        for (std::size_t b = 0; b < out.size(); ++b) {
            const std::size_t first = b * norm_block;
            const T* const x = in.data() + first;
            const std::size_t n = in.size() - first < norm_block ? in.size() - first : norm_block;
            double partial[lanes] = {};
            std::size_t i = 0;
            for (; i + lanes <= n; i += lanes) {
                for (std::size_t j = 0; j < lanes; ++j) { partial[j] = added_square(partial[j], x[i + j]); }
            }
            for (std::size_t j = 0; i < n; ++i, ++j) { partial[j] = added_square(partial[j], x[i]); }
            double total = 0;
            for (const double p : partial) { total += p; }
            out.data()[b] = total;
        }
    }
    TUTTI_HOST_DEVICE static double added_square(double sum, T x) {
        const exact d(static_cast<double>(static_cast<master_t<T>>(x)));
#if defined(__CUDA_ARCH__)
        // Squares of at most 24 bits are exact in double: fused or not, the sum is rounded once.
        if constexpr (!std::same_as<T, double>) { return __fma_rn(d.value, d.value, sum); }
#endif
        return (exact(sum) + d * d).value;
    }
};

/// out[0] = the sum of in. Determinism: element i goes to partial sum i mod 256, the partial sums are added in order.
template <memory M> struct ordered_sum_operation {
    static constexpr std::string_view name = "ordered_sum";
    static constexpr std::size_t lanes = 256;
    view<const double, M> in;
    view<double, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.size_bytes() + out.size_bytes()), static_cast<double>(in.size())};
    }
    void operator()() const {
        double partial[lanes] = {};
        for (std::size_t i = 0; i < in.size(); ++i) { partial[i % lanes] += in.data()[i]; }
        double total = 0;
        for (const double p : partial) { total += p; }
        out.data()[0] = total;
    }
};

/// The 2-norm of all gradients of the model.
///
/// Semantics    `gradient` is this rank's range [first, first + size) of the model's flat gradient of `elements`
///              elements; first is a multiple of norm_block, or the range is empty. `scratch` holds norm_blocks(elements) + 1 doubles.
///              `sum_over_shards` adds a view of doubles over the ranks that hold the other ranges; with one range it
///              does nothing.
/// Determinism  depends on the elements alone: neither on sharding, bucketing nor timing (x + 0 is exact).
/// Cost         one read of the gradients, a sum of 8 bytes a block, one fetch.
/// Errors       usage_error when sizes do not fit.
template <queue Q, floating_element T, std::invocable<view<double, typename Q::memory_type>> Sum>
[[nodiscard]] double global_norm(Q q, view<const T, typename Q::memory_type> gradient, std::size_t first,
                                 std::size_t elements, view<double, typename Q::memory_type> scratch,
                                 Sum sum_over_shards) {
    using M = typename Q::memory_type;
    const std::size_t blocks = norm_blocks(elements);
    const bool begins_a_block = first % norm_block == 0 || gradient.empty();  // the last of many ranges may be empty
    if (!begins_a_block || first > elements || gradient.size() > elements - first) {
        throw usage_error(
            formatted("global_norm: range ({}, {}) of {} elements does not begin at a block or leaves them", first,
                      gradient.size(), elements));
    }
    if (scratch.size() != blocks + 1) {
        throw usage_error(formatted("global_norm: scratch holds {} doubles, expected {}", scratch.size(), blocks + 1));
    }
    const view<double, M> sums = scratch.sub(0, blocks);
    if (gradient.size() != elements) { fill(q, sums, 0.0); }
    run(q, square_sums_operation<T, M>{gradient, sums.sub(first / norm_block, norm_blocks(gradient.size()))});
    sum_over_shards(sums);
    const view<double, M> total = scratch.sub(blocks, 1);
    run(q, ordered_sum_operation<M>{sums, total});
    return std::sqrt(fetch(q, total, 0.0));
}

/// What multiplies gradients of that norm so that it becomes at most `limit`; 1 when limit is 0 (no clipping) or not
/// reached. PyTorch's rule, limit / (norm + 1e-6).
[[nodiscard]] inline double clip_factor(double norm, double limit) noexcept {
    if (limit == 0) { return 1; }
    const double factor = limit / (norm + 1e-6);
    return factor < 1 ? factor : 1;
}

}  // namespace tutti::optimize
