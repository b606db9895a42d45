// Every operation that has a device side: the bits of the host's, for every element type, around the edges of blocks
// and of packs, at every alignment; and nothing is written beside the views. Losses over a vocabulary that is cut, whose
// sums have another order: fp64 values.
#include <tutti/core/cuda_run.cuh>                      // under test
#include <tutti/core/philox.cuh>                        // under test
#include <tutti/optimize/clip.cuh>                      // under test
#include <tutti/parallel/vocabulary_cross_entropy.cuh>  // under test
#include <tutti/strategy/data_parallel.cuh>             // under test: hash

#include <algorithm>    // fill, max
#include <array>        // offsets
#include <cmath>        // exp, log, isnan
#include <cstdint>      // words
#include <cstring>      // memcmp
#include <limits>       // infinity, epsilon
#include <string>       // messages
#include <tuple>        // arrays
#include <type_traits>  // precision
#include <utility>      // index_sequence
#include <vector>       // arrays

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

namespace {

template <class T> auto uploaded(const cuda_queue& q, const std::vector<T>& v) {
    buffer<T, cuda_queue> b(q, v.size());
    upload(q, view<const T>(v), b.view());
    return b;
}
template <class T> std::vector<T> downloaded(const cuda_queue& q, view<const T, device_memory> v) {
    std::vector<T> host(v.size());
    download(q, v, view<T>(host));
    return host;
}

// Logits of some rows over `words`, of which each of `ranks` has `count`, padding included.
template <class T> struct cut_rows {
    std::size_t words, ranks, count;
    std::vector<std::int32_t> targets;
    std::vector<std::vector<T>> whole;  // by row; words alone

    cut_rows(std::size_t all, std::size_t among, std::size_t multiple)
        : words(all), ranks(among), count((all + multiple * among - 1) / (multiple * among) * multiple) {
        const auto last = static_cast<std::int32_t>(words - 1);
        targets = {0, last, static_cast<std::int32_t>(count - 1), -1, last / 2, 1};
        for (std::uint32_t i = 0; i < targets.size(); ++i) { whole.push_back(normals<T>(words, i + 1, 3)); }
        whole[4][0] = static_cast<T>(300.0f);  // its exponential is out of range
        whole[5].back() = static_cast<T>(std::numeric_limits<float>::quiet_NaN());
    }
    [[nodiscard]] std::size_t first(std::size_t rank) const { return rank * count; }
    [[nodiscard]] std::size_t real(std::size_t rank) const {
        return words <= first(rank) ? 0 : std::min(count, words - first(rank));
    }
    // Padding that would be noticed, if it were read.
    [[nodiscard]] std::vector<T> part(std::size_t rank) const {
        std::vector<T> rows(targets.size() * count, static_cast<T>(30000.0f));
        for (std::size_t i = 0; i < targets.size(); ++i) {
            std::copy_n(whole[i].begin() + static_cast<std::ptrdiff_t>(first(rank)), real(rank),
                        rows.begin() + static_cast<std::ptrdiff_t>(i * count));
        }
        return rows;
    }
    [[nodiscard]] double log_sum(std::size_t i) const {
        double largest = -std::numeric_limits<double>::infinity(), sum = 0;
        for (const T x : whole[i]) { largest = std::max(largest, static_cast<double>(x)); }
        for (const T x : whole[i]) { sum += std::exp(static_cast<double>(x) - largest); }
        return largest + std::log(sum);
    }
};

template <class T> void losses_of_cut_rows(const cut_rows<T>& c) {
    using R = master_t<T>;
    using namespace tutti::parallel;
    CAPTURE(c.words);
    CAPTURE(c.ranks);
    const cuda_queue q(0);
    const std::size_t rows = c.targets.size();
    const auto targets = uploaded(q, c.targets);
    std::vector<buffer<T, cuda_queue>> logits;
    const auto share = [&](std::size_t r) {
        return logits_share<const T, device_memory>{logits[r].view(), c.count, c.real(r), c.first(r)};
    };
    // What the ranks' collectives do is done here: the largest of all, and sums.
    std::vector<R> largest(rows, -std::numeric_limits<R>::infinity()), sums(2 * rows);
    for (std::size_t r = 0; r < c.ranks; ++r) {
        logits.push_back(uploaded(q, c.part(r)));
        const buffer<R, cuda_queue> own(q, rows);
        run(q, logit_maxima_operation<T, device_memory>{share(r), own.view()});
        const auto found = downloaded(q, view<const R, device_memory>(own.view()));
        for (std::size_t i = 0; i < rows; ++i) {
            largest[i] = found[i] > largest[i] || std::isnan(found[i]) ? found[i] : largest[i];
        }
    }
    for (std::size_t i = 0; i + 1 < rows; ++i) {
        CHECK(largest[i] == static_cast<R>(*std::max_element(c.whole[i].begin(), c.whole[i].end(), [](T a, T b) {
                  return static_cast<double>(a) < static_cast<double>(b);
              })));
    }
    CHECK(std::isnan(largest.back()));
    const auto normalizer = uploaded(q, largest);
    for (std::size_t r = 0; r < c.ranks; ++r) {
        const buffer<R, cuda_queue> own(q, 2 * rows);
        run(q, exponential_sums_operation<T, device_memory>{share(r), targets.view(), normalizer.view(), own.view()});
        const auto found = downloaded(q, view<const R, device_memory>(own.view()));
        for (std::size_t i = 0; i < found.size(); ++i) { sums[i] += found[i]; }
    }
    const auto all_sums = uploaded(q, sums);
    const buffer<double, cuda_queue> on_device(q, rows);
    run(q, losses_operation<R, device_memory>{targets.view(), all_sums.view(), normalizer.view(), on_device.view()});
    const auto loss = downloaded(q, view<const double, device_memory>(on_device.view()));
    constexpr double small = 16 * std::numeric_limits<R>::epsilon();
    for (std::size_t i = 0; i + 1 < rows; ++i) {
        CAPTURE(i);
        const double log_sum = c.log_sum(i);
        const double expected =
            c.targets[i] < 0 ? 0 : log_sum - static_cast<double>(c.whole[i][static_cast<std::size_t>(c.targets[i])]);
        CHECK(std::fabs(loss[i] - expected) <= small * (1 + std::fabs(log_sum)));
    }
    CHECK(std::isnan(loss.back()));
    // The gradient in place of the logits, and beside them.
    const R scale = R(0.125);
    const double rounding = std::is_same_v<T, R> ? 0 : std::is_same_v<T, float16> ? 0x1p-11 : 0x1p-8;
    for (std::size_t r = 0; r < c.ranks; ++r) {
        const buffer<T, cuda_queue> beside(q, rows * c.count);
        run(q, logit_gradients_operation<T, device_memory>{share(r), targets.view(), normalizer.view(), scale,
                                                           beside.view()});
        run(q, logit_gradients_operation<T, device_memory>{share(r), targets.view(), normalizer.view(), scale,
                                                           logits[r].view()});
        const auto d = downloaded(q, view<const T, device_memory>(beside.view()));
        const auto in_place = downloaded(q, view<const T, device_memory>(logits[r].view()));
        CHECK(std::memcmp(d.data(), in_place.data(), d.size() * sizeof(T)) == 0);
        double worst = 0;
        bool padding_is_zero = true;
        for (std::size_t i = 0; i + 1 < rows; ++i) {
            const double log_sum = c.log_sum(i);
            for (std::size_t j = 0; j < c.count; ++j) {
                const double got = static_cast<double>(d[i * c.count + j]);
                if (c.targets[i] < 0 || j >= c.real(r)) {
                    padding_is_zero = padding_is_zero && got == 0;
                    continue;
                }
                const std::size_t word = c.first(r) + j;
                const bool is_target = static_cast<std::size_t>(c.targets[i]) == word;
                const double softmax = std::exp(static_cast<double>(c.whole[i][word]) - log_sum);
                const double expected = static_cast<double>(scale) * (softmax - (is_target ? 1 : 0));
                // Rounded to R, then to T; both have a smallest number.
                const double allowed =
                    rounding * std::fabs(expected) + (std::is_same_v<T, float16> ? 0x1p-25 : 0) +
                    static_cast<double>(std::numeric_limits<R>::min()) +
                    static_cast<double>(scale) * small * (1 + std::fabs(log_sum)) * (softmax + (is_target ? 1 : 0));
                worst = std::max(worst, std::fabs(got - expected) / allowed);
            }
        }
        CHECK(worst <= 1);
        CHECK(padding_is_zero);
    }
}

}  // namespace

TEST_CASE_TEMPLATE("losses over a vocabulary that is cut", T, float, bfloat16, float16, double) {
    test::require_device();
    losses_of_cut_rows(cut_rows<T>(101, 3, 8));
    losses_of_cut_rows(cut_rows<T>(9, 4, 8));  // two ranks have no words
    losses_of_cut_rows(cut_rows<T>(512, 1, 1));
    losses_of_cut_rows(cut_rows<T>(50257, 2, 128));
}
