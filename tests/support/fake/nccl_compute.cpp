// fake_nccl: what collectives do to memory. Sums are in rank order; 16-bit and 8-bit floats accumulate in float.
// Needs fake/nccl_state.
#include <algorithm>    // min, max
#include <cstring>      // copies
#include <type_traits>  // integral
#include <vector>       // results

#include <support/fake/nccl_state.hpp>  // task

namespace tutti::test::fake_nccl {

std::size_t size_of(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 0;
    }
}

namespace {

template <class T> struct accumulator { using type = float; };
template <class T>
requires std::is_arithmetic_v<T>
struct accumulator<T> {
    using type = T;
};

template <class A> A combine(ncclRedOp_t op, A a, A b) {
    if (op == ncclMax) { return a < b ? b : a; }
    if (op == ncclMin) { return b < a ? b : a; }
    if constexpr (std::is_integral_v<A>) {  // wraps
        const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
        return static_cast<A>(op == ncclProd ? x * y : x + y);
    } else {
        return op == ncclProd ? a * b : a + b;
    }
}

// As NCCL has it: the mean of floats is a sum of x * (1/n), with 1/n rounded to their type; integers are divided after.
template <class T> void reduce(const std::vector<task*>& ranks, T* out, std::size_t count) {
    using A = typename accumulator<T>::type;
    const ncclRedOp_t op = ranks[0]->op;
    const auto n = ranks.size();
    std::vector<A> factors(n, A(1));
    for (std::size_t r = 0; r < n; ++r) {
        if (const auto& scale = ranks[r]->scale) {
            T value;
            std::memcpy(&value, scale->on_device != nullptr ? scale->on_device : scale->value.data(), sizeof(T));
            factors[r] = static_cast<A>(value);
        } else if (op == ncclAvg && !std::is_integral_v<T>) {
            factors[r] = static_cast<A>(static_cast<T>(A(1) / static_cast<A>(n)));
        }
    }
    for (std::size_t i = 0; i < count; ++i) {
        const auto element = [&](std::size_t r) {
            const A x = static_cast<A>(static_cast<const T*>(ranks[r]->send)[i]);
            if constexpr (std::is_integral_v<A>) {
                return static_cast<A>(static_cast<std::uint64_t>(x) * static_cast<std::uint64_t>(factors[r]));
            } else {
                return x * factors[r];
            }
        };
        A sum = element(0);
        for (std::size_t r = 1; r < n; ++r) { sum = combine(op, sum, element(r)); }
        if constexpr (std::is_integral_v<A>) {
            if (op == ncclAvg) { sum = static_cast<A>(sum / static_cast<A>(n)); }
        }
        out[i] = static_cast<T>(sum);
    }
}

template <class T> void reduce_as(const std::vector<task*>& ranks, std::vector<unsigned char>& out) {
    reduce(ranks, reinterpret_cast<T*>(out.data()), out.size() / sizeof(T));
}

std::vector<unsigned char> reduced(const std::vector<task*>& ranks, std::size_t bytes) {
    std::vector<unsigned char> out(bytes);
    switch (ranks[0]->type) {
    case ncclInt8: reduce_as<std::int8_t>(ranks, out); break;
    case ncclUint8: reduce_as<std::uint8_t>(ranks, out); break;
    case ncclInt32: reduce_as<std::int32_t>(ranks, out); break;
    case ncclUint32: reduce_as<std::uint32_t>(ranks, out); break;
    case ncclInt64: reduce_as<std::int64_t>(ranks, out); break;
    case ncclUint64: reduce_as<std::uint64_t>(ranks, out); break;
    case ncclFloat16: reduce_as<__half>(ranks, out); break;
    case ncclFloat32: reduce_as<float>(ranks, out); break;
    case ncclFloat64: reduce_as<double>(ranks, out); break;
    case ncclBfloat16: reduce_as<__nv_bfloat16>(ranks, out); break;
    case ncclFloat8e4m3: reduce_as<__nv_fp8_e4m3>(ranks, out); break;
    case ncclFloat8e5m2: reduce_as<__nv_fp8_e5m2>(ranks, out); break;
    default: break;
    }
    return out;
}

}  // namespace

void compute(const std::vector<task*>& ranks) {
    const task& first = *ranks[0];
    const std::size_t part = first.count * size_of(first.type);
    if (part == 0) { return; }
    const std::size_t n = ranks.size();
    const auto root = static_cast<std::size_t>(first.root);
    const auto to = [&](std::size_t r, std::size_t offset, const void* from, std::size_t bytes) {
        std::memcpy(static_cast<char*>(ranks[r]->receive) + offset, from, bytes);
    };
    // What is sent is taken before anything is written: outputs may be inputs.
    std::vector<unsigned char> all;
    const auto take = [&](std::size_t r, std::size_t bytes) {
        const auto* const from = static_cast<const unsigned char*>(ranks[r]->send);
        all.insert(all.end(), from, from + bytes);
    };
    switch (first.what) {
    case kind::all_reduce:
        all = reduced(ranks, part);
        for (std::size_t r = 0; r < n; ++r) { to(r, 0, all.data(), part); }
        break;
    case kind::reduce:
        all = reduced(ranks, part);
        to(root, 0, all.data(), part);
        break;
    case kind::reduce_scatter:
        all = reduced(ranks, n * part);
        for (std::size_t r = 0; r < n; ++r) { to(r, 0, all.data() + r * part, part); }
        break;
    case kind::broadcast:
        take(root, part);
        for (std::size_t r = 0; r < n; ++r) { to(r, 0, all.data(), part); }
        break;
    case kind::all_gather:
        for (std::size_t r = 0; r < n; ++r) { take(r, part); }
        for (std::size_t r = 0; r < n; ++r) { to(r, 0, all.data(), n * part); }
        break;
    case kind::gather:
        for (std::size_t r = 0; r < n; ++r) { take(r, part); }
        to(root, 0, all.data(), n * part);
        break;
    case kind::scatter:
        take(root, n * part);
        for (std::size_t r = 0; r < n; ++r) { to(r, 0, all.data() + r * part, part); }
        break;
    case kind::all_to_all:
        for (std::size_t r = 0; r < n; ++r) { take(r, n * part); }
        for (std::size_t r = 0; r < n; ++r) {
            for (std::size_t s = 0; s < n; ++s) { to(r, s * part, all.data() + (s * n + r) * part, part); }
        }
        break;
    case kind::send:
    case kind::receive: break;  // meet in pairs
    }
}

}  // namespace tutti::test::fake_nccl
