// The device side of sequence/token_operations: fill, copy, add, sums, dot products and the merge of partial attentions.
// Needs core/cuda_run and nvcc.
#pragma once

#include <algorithm>  // all_of, copy, min
#include <array>      // strides
#include <bit>        // bit_ceil
#include <cstddef>    // size_t
#include <cstdint>    // addresses
#include <limits>     // infinity

#include <tutti/core/cuda_run.cuh>              // start, pack
#include <tutti/sequence/token_operations.hpp>  // operations

namespace tutti::sequence {

namespace detail {

/// Rows of `width` numbers next to each other, in `count` token_views of one shape.
template <std::size_t count> struct token_rows {
    std::size_t rows = 0, inner = 1, width = 0;
    std::size_t outer_stride[count] = {}, inner_stride[count] = {};

    /// Row r is (token, head) in the order of the first view's memory. Where they follow each other in all views, heads
    /// or tokens are joined to longer rows, unless `whole_heads`.
    template <class... V> explicit token_rows(bool whole_heads, const V&... views) {
        static_assert(sizeof...(V) == count);
        const std::array<std::size_t, count> by_token{views.token_stride...};
        const std::array<std::size_t, count> by_head{views.head_stride...};
        const auto first = [](const auto& v, const auto&...) { return v; }(views...);
        const bool tokens_inside = first.token_stride < first.head_stride;
        std::size_t outer = tokens_inside ? first.heads : first.tokens;
        inner = tokens_inside ? first.tokens : first.heads;
        width = first.width;
        const auto& far = tokens_inside ? by_head : by_token;
        const auto& near = tokens_inside ? by_token : by_head;
        const auto follow = [&](const std::array<std::size_t, count>& strides) {
            return std::all_of(strides.begin(), strides.end(), [&](std::size_t s) { return s == width; });
        };
        std::copy(far.begin(), far.end(), outer_stride);
        std::copy(near.begin(), near.end(), inner_stride);
        if (!whole_heads && (inner == 1 || follow(near))) {
            width *= inner;
            inner = 1;
            if (outer == 1 || follow(far)) {
                width *= outer;
                outer = 1;
            }
        }
        rows = outer * inner;
    }
    /// Can all of them be read `of` numbers at a time?
    template <class... V> [[nodiscard]] bool in_packs(std::size_t of, const V&... views) const {
        if (width % of != 0) { return false; }
        for (std::size_t i = 0; i < count; ++i) {
            if (outer_stride[i] % of != 0 || inner_stride[i] % of != 0) { return false; }
        }
        return (
            ... &&
            (reinterpret_cast<std::uintptr_t>(views.data) % std::min<std::size_t>(16, of * sizeof(*views.data)) == 0));
    }
    [[nodiscard]] __device__ std::size_t offset(unsigned view, std::size_t row) const {
        if (rows <= 0xffffffffu) {  // a division of half the width takes a quarter of the time
            const auto r = static_cast<unsigned>(row);
            const auto n = static_cast<unsigned>(inner);
            return r / n * outer_stride[view] + r % n * inner_stride[view];
        }
        return row / inner * outer_stride[view] + row % inner * inner_stride[view];
    }
};

/// `size` numbers that are loaded and stored by as few instructions as there are.
template <class T, unsigned size> struct numbers {
    static constexpr unsigned each = size * sizeof(T) <= 16 ? size : 16 / sizeof(T);
    tutti::detail::pack<T, each> packs[size / each];
    __device__ void load(const T* from) {
#pragma unroll
        for (unsigned i = 0; i < size / each; ++i) { packs[i].load(from + i * each); }
    }
    __device__ void store(T* to) const {
#pragma unroll
        for (unsigned i = 0; i < size / each; ++i) { packs[i].store(to + i * each); }
    }
    __device__ T& operator[](unsigned i) { return packs[i / each].of[i % each]; }
};

// Where the numbers of a thread are: `size` of them from `column` on.
struct place {
    std::size_t row, column;
    bool inside;
    template <std::size_t count> static __device__ place of_thread(const token_rows<count>& at, unsigned size) {
        const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
        const std::size_t packs = at.width / size;
        if (at.rows == 1) { return {0, i * size, i < packs}; }
        const std::size_t row = i <= 0xffffffffu && packs <= 0xffffffffu
                                    ? static_cast<unsigned>(i) / static_cast<unsigned>(packs)
                                    : i / packs;
        return {row, (i - row * packs) * size, row < at.rows};
    }
};

template <unsigned size, class T> __global__ void fill_rows(token_rows<1> at, T* out, T value) {
    const place p = place::of_thread(at, size);
    if (!p.inside) { return; }
    numbers<T, size> y;
#pragma unroll
    for (unsigned i = 0; i < size; ++i) { y[i] = value; }
    y.store(out + at.offset(0, p.row) + p.column);
}

template <unsigned size, class O, class From, class To>
__global__ void copy_rows(token_rows<2> at, const From* in, To* out) {
    const place p = place::of_thread(at, size);
    if (!p.inside) { return; }
    numbers<From, size> x;
    numbers<To, size> y;
    x.load(in + at.offset(1, p.row) + p.column);
#pragma unroll
    for (unsigned i = 0; i < size; ++i) { y[i] = O::copied(x[i]); }
    y.store(out + at.offset(0, p.row) + p.column);
}

template <unsigned size, class O, class A, class B, class To>
__global__ void sum_rows(token_rows<3> at, const A* a, const B* b, To* out) {
    const place p = place::of_thread(at, size);
    if (!p.inside) { return; }
    numbers<A, size> x;
    numbers<B, size> y;
    numbers<To, size> z;
    x.load(a + at.offset(1, p.row) + p.column);
    y.load(b + at.offset(2, p.row) + p.column);
#pragma unroll
    for (unsigned i = 0; i < size; ++i) { z[i] = O::summed(x[i], y[i]); }
    z.store(out + at.offset(0, p.row) + p.column);
}

// A thread a row: the order of the host's sum.
template <unsigned size, class O, class T, class P>
__global__ void dot_rows(token_rows<2> at, const T* a, const T* b, P* out, std::size_t outer_stride,
                         std::size_t inner_stride) {
    const std::size_t row = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= at.rows) { return; }
    const T* const x = a + at.offset(0, row);
    const T* const y = b + at.offset(1, row);
    P total = 0;
    for (std::size_t c = 0; c < at.width; c += size) {
        numbers<T, size> u, v;
        u.load(x + c);
        v.load(y + c);
#pragma unroll
        for (unsigned i = 0; i < size; ++i) { total = O::added_product(total, u[i], v[i]); }
    }
    out[row / at.inner * outer_stride + row % at.inner * inner_stride] = total;
}

// `lanes` threads of a warp a row: all have read its log_sum_exp before one of them writes it.
template <unsigned size, class P, class Other, class Kept, class To>
__global__ void merge_rows(token_rows<3> at, merge_operation<P, device_memory, Other, Kept, To> op, unsigned lanes,
                           bool tokens_inside) {
    const std::size_t thread = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const std::size_t row = thread / lanes;
    const auto lane = static_cast<unsigned>(thread % lanes);
    const bool inside = row < at.rows;
    const std::size_t far = inside ? row / at.inner : 0;
    const std::size_t near = inside ? row % at.inner : 0;
    const std::size_t t = tokens_inside ? near : far;
    const std::size_t h = tokens_inside ? far : near;
    P* const mine = op.log_sum_exp.data + t * op.log_sum_exp.token_stride + h * op.log_sum_exp.head_stride;
    const P* const other =
        op.other_log_sum_exp.data + t * op.other_log_sum_exp.token_stride + h * op.other_log_sum_exp.head_stride;
    const P minus_infinity = -std::numeric_limits<P>::infinity();
    const typename merge_operation<P, device_memory, Other, Kept, To>::weights w(inside ? *mine : minus_infinity,
                                                                                 inside ? *other : minus_infinity);
    __syncwarp();
    if (!inside) { return; }
    To* const out = op.out.data + at.offset(0, row);
    const Kept* const kept = op.kept.data + at.offset(1, row);
    const Other* const other_out = op.other_out.data + at.offset(2, row);
    for (std::size_t c = std::size_t{lane} * size; c < at.width; c += std::size_t{lanes} * size) {
        numbers<Kept, size> y;
        numbers<Other, size> x;
        numbers<To, size> z;
        y.load(kept + c);
        x.load(other_out + c);
#pragma unroll
        for (unsigned i = 0; i < size; ++i) { z[i] = w.out(y[i], x[i]); }
        z.store(out + c);
    }
    if (lane == 0) { *mine = w.log_sum_exp(); }
}

inline constexpr unsigned token_threads = 256;

}  // namespace detail

/// Determinism  the host's bits.
template <transportable T> void launch(const cuda_queue& q, const fill_tokens_operation<T, device_memory>& op) {
    if (op.out.empty()) { return; }
    const detail::token_rows<1> at(false, op.out);
    const auto start = [&](auto kernel, std::size_t size) {
        tutti::detail::start(q, op.name, kernel, at.rows * (at.width / size), detail::token_threads, at, op.out.data,
                             op.value);
    };
    constexpr unsigned size = sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0 ? 16 / sizeof(T) : 1;
    if (at.in_packs(size, op.out)) { return start(detail::fill_rows<size, T>, size); }
    start(detail::fill_rows<1, T>, 1);
}

/// 16 bytes of the narrower type a thread, where addresses, strides and width are multiples of that; else one number.
/// Determinism  the host's bits.
template <floating_element From, floating_element To>
void launch(const cuda_queue& q, const copy_tokens_operation<From, To, device_memory>& op) {
    using operation = copy_tokens_operation<From, To, device_memory>;
    if (op.out.empty()) { return; }
    const detail::token_rows<2> at(false, op.out, op.in);
    const auto start = [&](auto kernel, std::size_t size) {
        tutti::detail::start(q, op.name, kernel, at.rows * (at.width / size), detail::token_threads, at, op.in.data,
                             op.out.data);
    };
    constexpr unsigned size = 16 / std::min(sizeof(From), sizeof(To));
    if (at.in_packs(size, op.out, op.in)) { return start(detail::copy_rows<size, operation, From, To>, size); }
    start(detail::copy_rows<1, operation, From, To>, 1);
}

/// As wide a pack a thread as copies have. Determinism  the host's bits.
template <floating_element A, floating_element B, floating_element To>
void launch(const cuda_queue& q, const sum_tokens_operation<A, B, To, device_memory>& op) {
    using operation = sum_tokens_operation<A, B, To, device_memory>;
    if (op.out.empty()) { return; }
    const detail::token_rows<3> at(false, op.out, op.a, op.b);
    const auto start = [&](auto kernel, std::size_t size) {
        tutti::detail::start(q, op.name, kernel, at.rows * (at.width / size), detail::token_threads, at, op.a.data,
                             op.b.data, op.out.data);
    };
    constexpr unsigned size = 16 / std::min({sizeof(A), sizeof(B), sizeof(To)});
    if (at.in_packs(size, op.out, op.a, op.b)) { return start(detail::sum_rows<size, operation, A, B, To>, size); }
    start(detail::sum_rows<1, operation, A, B, To>, 1);
}

/// Determinism  the host's bits, as far as its compiler does not fuse products and sums.
template <floating_element T> void launch(const cuda_queue& q, const dot_tokens_operation<T, device_memory>& op) {
    using operation = dot_tokens_operation<T, device_memory>;
    if (op.out.empty()) { return; }
    const detail::token_rows<2> at(true, op.a, op.b);
    const bool tokens_inside = op.a.token_stride < op.a.head_stride;
    const auto start = [&](auto kernel) {
        tutti::detail::start(q, op.name, kernel, at.rows, 128, at, op.a.data, op.b.data, op.out.data,
                             tokens_inside ? op.out.head_stride : op.out.token_stride,
                             tokens_inside ? op.out.token_stride : op.out.head_stride);
    };
    constexpr unsigned size = 16 / sizeof(T);
    if (at.in_packs(size, op.a, op.b)) { return start(detail::dot_rows<size, operation, T, typename operation::P>); }
    start(detail::dot_rows<1, operation, T, typename operation::P>);
}

/// Determinism  the same bits in every run. Those of the host but for exp and log, of which the device's differ in the
///              last places: by at most 1e-6 of the larger of the two merged numbers in float, 1e-14 in double.
template <floating_element P, floating_element Other, floating_element Kept, floating_element To>
void launch(const cuda_queue& q, const merge_operation<P, device_memory, Other, Kept, To>& op) {
    if (op.out.empty()) { return; }
    const detail::token_rows<3> at(true, op.out, op.kept, op.other_out);
    const auto start = [&](auto kernel, std::size_t size) {
        const auto lanes = static_cast<unsigned>(std::min<std::size_t>(32, std::bit_ceil(at.width / size)));
        tutti::detail::start(q, op.name, kernel, at.rows * lanes, detail::token_threads, at, op, lanes,
                             op.out.token_stride < op.out.head_stride);
    };
    constexpr unsigned size = 16 / std::min({sizeof(Other), sizeof(Kept), sizeof(To)});
    if (at.in_packs(size, op.out, op.kept, op.other_out)) {
        return start(detail::merge_rows<size, P, Other, Kept, To>, size);
    }
    start(detail::merge_rows<1, P, Other, Kept, To>, 1);
}

}  // namespace tutti::sequence
