// Every operation that has a device side: the bits of the host's, for every element type, around the edges of blocks.
#include <tutti/core/cuda_run.cuh>           // under test
#include <tutti/core/philox.cuh>             // under test
#include <tutti/optimize/clip.cuh>           // under test
#include <tutti/strategy/data_parallel.cuh>  // under test: hash

#include <cstdint>  // words
#include <cstring>  // memcmp
#include <string>   // messages
#include <tuple>    // arrays
#include <vector>   // arrays

#include <doctest/doctest.h>  // checks

#include <tutti/core/buffer.hpp>     // storage
#include <tutti/optimize/adamw.hpp>  // operation
#include <tutti/optimize/sgd.hpp>    // operation

#include "device.hpp"  // require_device

using namespace tutti;
using optimize::adamw_operation;
using optimize::ordered_sum_operation;
using optimize::sgd_operation;
using optimize::square_sums_operation;

namespace {

const std::vector<std::size_t> sizes{0, 1, 2, 255, 256, 257, 4095, 4096, 4097, 100003};

template <class T> std::vector<T> normals(std::size_t n, std::uint32_t stream, double deviation = 1) {
    std::vector<T> v(n);
    for (std::size_t i = 0; i < n; ++i) {
        v[i] = static_cast<T>(deviation * static_cast<double>(random_stream{.seed = 9, .stream = stream}.normal(i)));
    }
    return v;
}
template <class T> std::vector<T> squares(std::vector<T> v) {
    for (T& x : v) { x = x * x; }
    return v;
}

// Runs make(views...) on host and device over copies of the arrays, and compares all arrays afterwards.
template <class Make, class... T> void same_bits(const std::string& what, Make make, std::vector<T>... arrays) {
    CAPTURE(what);
    const cuda_queue q(0);
    const auto on_device = std::make_tuple(buffer<T, cuda_queue>(q, arrays.size())...);
    std::apply([&](const auto&... b) { (upload(q, view<const T>(arrays), b.view()), ...); }, on_device);
    std::apply([&](const auto&... b) { run(q, make(b.view()...)); }, on_device);
    run(host_queue{}, make(view<T>(arrays)...));
    const auto check = [&](const auto& b, auto& expected) {
        auto got = expected;
        std::fill(got.begin(), got.end(), typename std::decay_t<decltype(got)>::value_type{});
        download(q, b.view(), view(got));
        CHECK((got.empty() || std::memcmp(got.data(), expected.data(), b.size_bytes()) == 0));
    };
    std::apply([&](const auto&... b) { (check(b, arrays), ...); }, on_device);
}

template <class To, class From> void conversions(std::size_t n) {
    std::vector<From> in = normals<From>(n, 1, 1000);
    for (std::size_t i = 0; i < n; ++i) {
        if (i % 3 == 0) { in[i] = static_cast<From>(static_cast<double>(in[i]) * 1e-9); }  // subnormal in 16 bits
    }
    same_bits(
        "copy",
        []<memory M>(view<From, M> a, view<To, M> b) {
            return copy_operation<From, To, M>{a, b};
        },
        in, std::vector<To>(n));
}

}  // namespace

TEST_CASE_TEMPLATE("elementwise operations", T, float, double, float16, bfloat16) {
    test::require_device();
    using real = master_t<T>;
    for (const std::size_t n : sizes) {
        CAPTURE(n);
        same_bits(
            "fill",
            []<memory M>(view<T, M> a) {
                return fill_operation<T, M>{a, T(1.5f)};
            },
            std::vector<T>(n));
        same_bits(
            "scale",
            []<memory M>(view<T, M> a, view<T, M> b) {
                return scale_operation<T, M>{a, b, real(1.1)};
            },
            normals<T>(n, 1), std::vector<T>(n));
        same_bits(
            "scale in place",
            []<memory M>(view<T, M> a) {
                return scale_operation<T, M>{a, a, real(1.1)};
            },
            normals<T>(n, 1));
        same_bits(
            "add_scaled",
            []<memory M>(view<T, M> a, view<T, M> b) {
                return add_scaled_operation<T, M>{a, b, real(-0.3)};
            },
            normals<T>(n, 1), normals<T>(n, 2));
        for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 35}) {
            same_bits(
                "fill_normal",
                [&]<memory M>(view<T, M> a) {
                    return fill_normal_operation<T, M>{a, random_stream{.seed = 3, .stream = 4}, first + 2, 0.02f};
                },
                std::vector<T>(n));
        }
        conversions<float, T>(n);
        conversions<double, T>(n);
        conversions<float16, T>(n);
        conversions<bfloat16, T>(n);
    }
}

TEST_CASE_TEMPLATE("optimizers", T, float, double, float16, bfloat16) {
    test::require_device();
    using real = master_t<T>;
    for (const std::size_t n : sizes) {
        CAPTURE(n);
        same_bits(
            "adamw",
            []<memory M>(view<real, M> x, view<T, M> g, view<real, M> m, view<real, M> v) {
                return adamw_operation<T, M>{x,           g,         m,         v,          real(0.7),
                                             real(0.999), real(0.9), real(0.1), real(0.99), real(0.01),
                                             real(1e-3),  real(1.2), real(1e-8)};
            },
            normals<real>(n, 1), normals<T>(n, 2), normals<real>(n, 3), squares(normals<real>(n, 4)));
        for (const bool nesterov : {false, true}) {
            same_bits(
                "sgd with momentum",
                [&]<memory M>(view<real, M> x, view<T, M> g, view<real, M> u) {
                    return sgd_operation<T, M>{x, g, u, real(0.7), real(0.01), real(0.9), real(0.1), nesterov};
                },
                normals<real>(n, 1), normals<T>(n, 2), normals<real>(n, 3));
        }
        same_bits(
            "sgd",
            []<memory M>(view<real, M> x, view<T, M> g) {
                return sgd_operation<T, M>{x, g, {}, real(0.7), real(0.01), real(0), real(0.1), false};
            },
            normals<real>(n, 1), normals<T>(n, 2));
        same_bits(
            "square_sums",
            []<memory M>(view<T, M> a, view<double, M> b) {
                return square_sums_operation<T, M>{a, b};
            },
            normals<T>(n, 1), std::vector<double>(optimize::norm_blocks(n)));
    }
}

TEST_CASE("sums and hashes") {
    test::require_device();
    for (const std::size_t n : sizes) {
        CAPTURE(n);
        same_bits(
            "ordered_sum",
            []<memory M>(view<double, M> a, view<double, M> b) {
                return ordered_sum_operation<M>{a, b};
            },
            normals<double>(n, 1), std::vector<double>(1));
        same_bits(
            "hash",
            []<memory M>(view<std::uint8_t, M> a, view<std::uint64_t, M> b) {
                return strategy::detail::hash_operation<M>{as_bytes(view<const std::uint8_t, M>(a)), b};
            },
            [&] {
                std::vector<std::uint8_t> bytes(n);
                for (std::size_t i = 0; i < n; ++i) { bytes[i] = static_cast<std::uint8_t>(i * 131 + i / 256); }
                return bytes;
            }(),
            std::vector<std::uint64_t>(1));
    }
}
