// cuda_run: the device side of the door: elementwise operations on a cuda_queue.
// Needs core/cuda_queue and nvcc.
// Not cub::DeviceTransform: it writes one sequence (an optimizer writes up to four) and tells a function no position.
#pragma once

#include <algorithm>    // max, min
#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <cstdint>      // addresses, pairs
#include <cstring>      // memcpy
#include <string_view>  // names
#include <tuple>        // inputs and outputs
#include <utility>      // index_sequence

#include <tutti/core/cuda_queue.hpp>   // cuda_queue
#include <tutti/core/element.hpp>      // bfloat16
#include <tutti/core/elementwise.hpp>  // elementwise_operation
#include <tutti/core/text.hpp>         // formatted

namespace tutti {

namespace detail {

/// Starts `kernel` with a thread for each of `items`; the last block may have more. Without items, nothing.
/// Errors: usage_error beyond what a grid holds; backend_error.
template <class... Parameters, class... Arguments>
void start(const cuda_queue& q, std::string_view name, void (*kernel)(Parameters...), std::size_t items,
           unsigned threads, const Arguments&... arguments) {
    if (items == 0) { return; }
    const std::size_t blocks = (items - 1) / threads + 1;
    if (blocks > 0x7fffffff) {
        throw usage_error(formatted("{}: {} elements are too many for one launch", name, items));
    }
    const on_device scope(q.device());
    kernel<<<static_cast<unsigned>(blocks), threads, 0, q.stream()>>>(arguments...);
    check_cuda(cudaGetLastError(), name);
}

// Neighbors that one instruction loads or stores: as one word, and by an intrinsic, since nvcc splits some assignments.
template <std::size_t bytes> struct word_of;
template <> struct word_of<2> { using type = std::uint16_t; };
template <> struct word_of<4> { using type = std::uint32_t; };
template <> struct word_of<8> { using type = uint2; };
template <> struct word_of<16> { using type = uint4; };

template <class T, unsigned width> struct pack {
    T of[width];

    __device__ void load(const T* from) {
        if constexpr (width == 1) {
            of[0] = *from;
        } else {
            using word = typename word_of<width * sizeof(T)>::type;
            const word w = *reinterpret_cast<const word*>(from);
            memcpy(of, &w, sizeof(w));
        }
    }
    __device__ void store(T* to) const {
        if constexpr (width == 1) {
            *to = of[0];
        } else {
            using word = typename word_of<width * sizeof(T)>::type;
            word w;
            memcpy(&w, of, sizeof(w));
            __stwb(reinterpret_cast<word*>(to), w);
        }
    }
};

/// Two floats rounded to a word of two 16-bit floats, the lower half first, in one instruction. It gives all NaN the same
/// bits, and so does arithmetic: elements one by one would have them, too.
template <class T> __device__ inline std::uint32_t rounded_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
    std::uint32_t pair = 0;
    if constexpr (std::same_as<T, bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
#else
    return T(low).bits | std::uint32_t{T(high).bits} << 16;
#endif
}

template <class Views> struct packs_of;
template <class... V> struct packs_of<std::tuple<V...>> {
    template <unsigned width> using type = std::tuple<pack<typename V::value_type, width>...>;
    static constexpr std::size_t element_bytes = (std::size_t{0} + ... + sizeof(typename V::value_type));
    static constexpr std::size_t widest = std::max({std::size_t{1}, sizeof(typename V::value_type)...});
    static constexpr bool powers_of_two =
        (... && ((sizeof(typename V::value_type) & (sizeof(typename V::value_type) - 1)) == 0));
};

// 16 bytes of the widest element: the most that an instruction moves.
template <class O>
inline constexpr unsigned pack_width = [] {
    using in = packs_of<inputs_of<O>>;
    using out = packs_of<outputs_of<O>>;
    constexpr std::size_t widest = std::max(in::widest, out::widest);
    return in::powers_of_two && out::powers_of_two && widest <= 16 ? static_cast<unsigned>(16 / widest) : 1u;
}();

// Packs that a thread loads before it stores the first. 64 bytes a thread keep the memory of the fastest cards busy.
template <class O, unsigned width>
inline constexpr unsigned packs_per_thread = [] {
    constexpr std::size_t bytes =
        width * std::max(packs_of<inputs_of<O>>::element_bytes, packs_of<outputs_of<O>>::element_bytes);
    return static_cast<unsigned>(std::clamp<std::size_t>(64 / bytes, 1, 8));
}();

inline constexpr unsigned transform_threads = 256;

template <class Packs, class Views, std::size_t... I>
__device__ inline void load_packs(Packs& to, const Views& from, std::size_t at, std::index_sequence<I...>) {
    (std::get<I>(to).load(std::get<I>(from).data() + at), ...);
}
template <class Packs, class Views, std::size_t... I>
__device__ inline void store_packs(const Packs& from, const Views& to, std::size_t at, std::index_sequence<I...>) {
    (std::get<I>(from).store(std::get<I>(to).data() + at), ...);
}
template <class O, class Key, class In, class Out, std::size_t... I, std::size_t... J>
__device__ inline void compute(const O& op, Key key, unsigned lane, const In& in, Out& out, std::index_sequence<I...>,
                               std::index_sequence<J...>) {
    if constexpr (std::tuple_size_v<Out> == 1) {
        std::get<0>(out).of[lane] = op.result(key, std::get<I>(in).of[lane]...);
    } else {
        const auto r = op.result(key, std::get<I>(in).of[lane]...);
        ((std::get<J>(out).of[lane] = std::get<J>(r)), ...);
    }
}

template <unsigned width, class O, class In, class Out>
__device__ inline void compute_pack(const O& op, std::size_t at, const In& in, Out& out) {
    constexpr input_indices<O> in_indices;
    constexpr output_indices<O> out_indices;
    if constexpr (drawing_operation<O> && width == 4) {
        const auto words = op.words(at);
#pragma unroll
        for (unsigned lane = 0; lane < width; ++lane) {
            compute(op, words[lane], lane, in, out, in_indices, out_indices);
        }
    } else {
#pragma unroll
        for (unsigned lane = 0; lane < width; ++lane) {
            compute(op, key_of(op, at + lane), lane, in, out, in_indices, out_indices);
        }
    }
}

// Elements [0, head) and what is left behind the last whole pack are done one by one, by the first block.
template <class O, unsigned width>
__global__ void __launch_bounds__(transform_threads) transform(const O op, std::size_t head, std::size_t count) {
    using in_packs = typename packs_of<inputs_of<O>>::template type<width>;
    using out_packs = typename packs_of<outputs_of<O>>::template type<width>;
    constexpr unsigned each = packs_per_thread<O, width>;
    constexpr input_indices<O> in_indices;
    constexpr output_indices<O> out_indices;
    const auto in = op.inputs();
    const auto out = op.outputs();
    const std::size_t packs = (count - head) / width;
    const std::size_t first = std::size_t{blockIdx.x} * (transform_threads * each) + threadIdx.x;
    in_packs loaded[each];
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
        const std::size_t p = first + k * transform_threads;
        if (p < packs) { load_packs(loaded[k], in, head + p * width, in_indices); }
    }
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
        const std::size_t p = first + k * transform_threads;
        if (p < packs) {
            out_packs computed;
            compute_pack<width>(op, head + p * width, loaded[k], computed);
            store_packs(computed, out, head + p * width, out_indices);
        }
    }
    if constexpr (width > 1) {
        const std::size_t alone = count - packs * width;
        if (blockIdx.x == 0 && threadIdx.x < alone) {
            const std::size_t i = threadIdx.x < head ? threadIdx.x : threadIdx.x + packs * width;
            do_element(op, in, out, i, in_indices, out_indices);
        }
    }
}

// Elements before the first at which all views are aligned to packs; `width` when there is none.
template <unsigned width, class Views> std::size_t head_of(const Views& views) {
    return std::apply(
        [](const auto&... v) {
            const std::size_t heads[] = {
                (width - reinterpret_cast<std::uintptr_t>(v.data()) / sizeof(*v.data()) % width) % width...};
            for (const std::size_t h : heads) {
                if (h != heads[0]) { return std::size_t{width}; }
            }
            return heads[0];
        },
        views);
}

template <unsigned width, class O>
void start_transform(const cuda_queue& q, const O& op, std::size_t head, std::size_t count) {
    const std::size_t packs = std::max<std::size_t>((count - head) / width, 1);
    constexpr unsigned each = packs_per_thread<O, width>;
    start(q, O::name, transform<O, width>, (packs - 1) / each + 1, transform_threads, op, head, count);
}

}  // namespace detail

/// Elements go in packs of up to 16 bytes where all views agree on where packs begin, which views of one offset in
/// aligned storage do; elsewhere one by one. Results do not depend on it.
///
/// Determinism  the bits of the host's loop, as far as result() uses `exact` or single operations.
/// Cost         one launch; none without elements.
template <elementwise_operation O> void launch(const cuda_queue& q, const O& op) {
    constexpr unsigned width = detail::pack_width<O>;
    const std::size_t count = std::get<0>(op.outputs()).size();
    if (count == 0) { return; }
    if constexpr (width > 1) {
        const std::size_t head = detail::head_of<width>(std::tuple_cat(op.inputs(), op.outputs()));
        if (head != width) {
            detail::start_transform<width>(q, op, std::min(head, count), count);
            return;
        }
    }
    detail::start_transform<1>(q, op, 0, count);
}

}  // namespace tutti
