// Every operation that has a device side: the bits of the host's, for every element type, around the edges of blocks
// and of packs, at every alignment; and nothing is written beside the views.
#include <tutti/core/cuda_run.cuh>           // under test
#include <tutti/core/philox.cuh>             // under test
#include <tutti/optimize/clip.cuh>           // under test
#include <tutti/strategy/data_parallel.cuh>  // under test: hash

#include <algorithm>  // fill
#include <array>      // offsets
#include <cstdint>    // words
#include <cstring>    // memcmp
#include <string>     // messages
#include <tuple>      // arrays
#include <utility>    // index_sequence
#include <vector>     // arrays

#include <doctest/doctest.h>  // checks

#include <tutti/core/buffer.hpp>               // storage
#include <tutti/core/stochastic_rounding.hpp>  // operation
#include <tutti/optimize/adamw.hpp>            // operation
#include <tutti/optimize/publication.hpp>      // operation
#include <tutti/optimize/sgd.hpp>              // operation

#include "device.hpp"  // require_device

using namespace tutti;
using optimize::adamw_operation;
using optimize::momentum_kind;
using optimize::ordered_sum_operation;
using optimize::publishing_operation;
using optimize::sgd_operation;
using optimize::square_sums_operation;

namespace {

// Around packs, blocks of threads, blocks of sums; the last gives every thread of several blocks all it can have.
const std::vector<std::size_t> sizes{0, 1, 2, 7, 255, 256, 257, 4095, 4096, 4097, 100003};

// Elements in front of each array's view. Equal offsets are those of one tensor's state, and let packs be used.
constexpr std::size_t margin = 8;
using offsets = std::array<std::size_t, 5>;
std::vector<offsets> placements(std::size_t n) {
    std::vector<offsets> all;
    for (std::size_t k = 0; k < margin; ++k) { all.push_back({k, k, k, k, k}); }
    all.push_back({0, 1, 2, 3, 4});
    all.push_back({2, 0, 2, 0, 4});
    if (n > 5000) { all = {all[0], all[3], all[8]}; }
    return all;
}

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

template <class Make, std::size_t... I, class... T>
void same_bits_at(const offsets& at, const Make& make, std::index_sequence<I...>, const std::vector<T>&... arrays) {
    CAPTURE(at[0]);
    CAPTURE(at[1]);
    const auto padded = [](const auto& a, std::size_t before) {
        auto p = a;
        p.resize(a.size() + margin);
        std::rotate(p.begin(), p.end() - static_cast<std::ptrdiff_t>(before), p.end());
        return p;
    };
    auto expected = std::make_tuple(padded(arrays, at[I])...);
    const cuda_queue q(0);
    const auto on_device = std::make_tuple(buffer<T, cuda_queue>(q, arrays.size() + margin)...);
    (upload(q, view<const T>(std::get<I>(expected)), std::get<I>(on_device).view()), ...);
    run(q, make(std::get<I>(on_device).view().sub(at[I], arrays.size())...));
    run(host_queue{}, make(view<T>(std::get<I>(expected)).sub(at[I], arrays.size())...));
    const auto check = [&](const auto& b, const auto& wanted) {
        auto got = wanted;
        std::fill(got.begin(), got.end(), typename std::decay_t<decltype(got)>::value_type{});
        download(q, b.view(), view(got));
        CHECK(std::memcmp(got.data(), wanted.data(), b.size_bytes()) == 0);
    };
    (check(std::get<I>(on_device), std::get<I>(expected)), ...);
}

// Runs make(views...) on host and device over copies of the arrays, and compares all arrays afterwards.
template <class Make, class... T> void same_bits(const std::string& what, Make make, const std::vector<T>&... arrays) {
    CAPTURE(what);
    for (const offsets& at : placements(std::max({arrays.size()...}))) {
        same_bits_at(at, make, std::index_sequence_for<T...>(), arrays...);
    }
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

template <class T, memory M>
adamw_operation<T, M> some_adamw(view<master_t<T>, M> x, view<T, M> g, view<master_t<T>, M> m, view<master_t<T>, M> v) {
    using real = master_t<T>;
    return {x,         g,          m,          v,          real(0.7), real(0.999), real(0.9),
            real(0.1), real(0.99), real(0.01), real(1e-3), real(1.2), real(1e-8)};
}

template <class T, momentum_kind kind> void momenta(std::size_t n) {
    using real = master_t<T>;
    same_bits(
        "sgd with momentum",
        []<memory M>(view<real, M> x, view<T, M> g, view<real, M> u) {
            return sgd_operation<T, M, kind>{x, g, u, real(0.7), real(0.01), real(0.9), real(0.1)};
        },
        normals<real>(n, 1), normals<T>(n, 2), normals<real>(n, 3));
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
                return some_adamw<T>(x, g, m, v);
            },
            normals<real>(n, 1), normals<T>(n, 2), normals<real>(n, 3), squares(normals<real>(n, 4)));
        same_bits(
            "adamw, published",
            []<memory M>(view<real, M> x, view<T, M> g, view<real, M> m, view<real, M> v, view<T, M> out) {
                using copy = copy_operation<real, T, M>;
                return publishing_operation<adamw_operation<T, M>, copy>{some_adamw<T>(x, g, m, v), {x, out}};
            },
            normals<real>(n, 1), normals<T>(n, 2), normals<real>(n, 3), squares(normals<real>(n, 4)),
            std::vector<T>(n));
        momenta<T, momentum_kind::classic>(n);
        momenta<T, momentum_kind::nesterov>(n);
        same_bits(
            "sgd",
            []<memory M>(view<real, M> x, view<T, M> g) {
                return sgd_operation<T, M, momentum_kind::none>{x, g, {}, real(0.7), real(0.01), real(0), real(0.1)};
            },
            normals<real>(n, 1), normals<T>(n, 2));
        same_bits(
            "sgd, published",
            []<memory M>(view<real, M> x, view<T, M> g, view<T, M> out) {
                using sgd = sgd_operation<T, M, momentum_kind::none>;
                using copy = copy_operation<real, T, M>;
                return publishing_operation<sgd, copy>{{x, g, {}, real(0.7), real(0.01), real(0), real(0.1)}, {x, out}};
            },
            normals<real>(n, 1), normals<T>(n, 2), std::vector<T>(n));
        same_bits(
            "square_sums",
            []<memory M>(view<T, M> a, view<double, M> b) {
                return square_sums_operation<T, M>{a, b};
            },
            normals<T>(n, 1), std::vector<double>(optimize::norm_blocks(n)));
    }
}

TEST_CASE_TEMPLATE("stochastic rounding", T, float16, bfloat16) {
    test::require_device();
    for (const std::size_t n : sizes) {
        CAPTURE(n);
        auto in = normals<float>(n, 1, 1000);
        for (std::size_t i = 0; i < n; i += 3) { in[i] *= 1e-9f; }  // subnormal in float16
        for (const std::uint64_t first : {std::uint64_t{0}, (std::uint64_t{1} << 35) + 3}) {
            same_bits(
                "stochastic_copy",
                [&]<memory M>(view<float, M> a, view<T, M> b) {
                    return stochastic_copy_operation<T, M>{a, b, random_stream{.seed = 3, .stream = 4}, first};
                },
                in, std::vector<T>(n));
        }
        same_bits(
            "adamw, published stochastically",
            []<memory M>(view<float, M> x, view<T, M> g, view<float, M> m, view<float, M> v, view<T, M> out) {
                using copy = stochastic_copy_operation<T, M>;
                return publishing_operation<adamw_operation<T, M>, copy>{
                    some_adamw<T>(x, g, m, v), {x, out, random_stream{.seed = 3, .stream = 4, .step = 5}, 6}};
            },
            normals<float>(n, 1), normals<T>(n, 2), normals<float>(n, 3), squares(normals<float>(n, 4)),
            std::vector<T>(n));
    }
}

TEST_CASE_TEMPLATE("conversions of every 16-bit pattern", T, float16, bfloat16) {
    test::require_device();
    std::vector<T> all(1 << 16);
    for (std::size_t i = 0; i < all.size(); ++i) { all[i].bits = static_cast<std::uint16_t>(i); }
    same_bits(
        "to float",
        []<memory M>(view<T, M> a, view<float, M> b) {
            return copy_operation<T, float, M>{a, b};
        },
        all, std::vector<float>(all.size()));
    // Around every pattern: the middles to the next, their neighbors, and what lies beyond the largest; NaN as well.
    std::vector<float> around;
    for (std::uint32_t high = 0; high < 1 << 16; ++high) {
        for (const std::uint32_t low : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u}) {
            around.push_back(__builtin_bit_cast(float, high << 16 | low));
        }
    }
    same_bits(
        "from float",
        []<memory M>(view<float, M> a, view<T, M> b) {
            return copy_operation<float, T, M>{a, b};
        },
        around, std::vector<T>(around.size()));
    same_bits(
        "from float, stochastically",
        []<memory M>(view<float, M> a, view<T, M> b) {
            return stochastic_copy_operation<T, M>{a, b, random_stream{.seed = 1}, 0};
        },
        around, std::vector<T>(around.size()));
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
                return hash_operation<M>{as_bytes(view<const std::uint8_t, M>(a)), b};
            },
            [&] {
                std::vector<std::uint8_t> bytes(n);
                for (std::size_t i = 0; i < n; ++i) { bytes[i] = static_cast<std::uint8_t>(i * 131 + i / 256); }
                return bytes;
            }(),
            std::vector<std::uint64_t>(1));
    }
}
