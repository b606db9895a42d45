// orthogonalize: orthonormal, in the order of the columns, for every condition, scale and rank; nothing but zeros else.
#include <tutti/compress/orthogonalize.hpp>  // under test

#include <algorithm>  // max
#include <cmath>      // fabs, pow
#include <limits>     // infinity
#include <vector>     // matrices

#include <doctest/doctest.h>  // checks

#include "dense.hpp"
#include "support/oracle.hpp"            // same_bytes
#include <tutti/core/virtual_queue.hpp>  // costs

using namespace tutti;
using compress::orthogonalize;
using compress::tall_matrix;
using test::dense;

namespace {

using tall = tall_matrix<host_memory>;

// Column after column, as factors are stored.
std::vector<float> columns_of(const dense& a) { return test::rounded(test::transposed(a)); }
dense from_columns(const std::vector<float>& c, std::size_t rows) {
    return test::transposed(dense(c.size() / rows, rows, c.data()));
}

std::vector<float> orthogonalized(const std::vector<float>& in, std::size_t rows) {
    std::vector<float> out(in.size(), 7.0f);
    const std::vector<tall> all{{view<const float>(in), view<float>(out), rows, static_cast<int>(in.size() / rows)}};
    orthogonalize(host_queue{}, std::span<const tall>(all));
    return out;
}

// How far columns are from orthonormal, apart from those that are zero, which are counted.
double defect(const std::vector<float>& out, std::size_t rows, std::size_t zeros = 0) {
    const dense p = from_columns(out, rows);
    const dense gram = test::transposed(p) * p;
    double worst = 0;
    std::size_t found = 0;
    for (std::size_t i = 0; i < p.cols; ++i) {
        const bool zero = gram(i, i) == 0;
        found += zero ? 1 : 0;
        for (std::size_t j = 0; j < p.cols; ++j) {
            worst = std::max(worst, std::fabs(gram(i, j) - (i == j && !zero ? 1 : 0)));
        }
    }
    return found == zeros ? worst : 1e9;
}

}  // namespace

TEST_CASE("columns are orthonormal for condition numbers up to 1e6") {  // T23
    for (const double kappa : {1.0, 1e2, 1e4, 1e6}) {
        for (const std::size_t r : {1ul, 2ul, 3ul, 4ul, 8ul, 16ul, 32ul, 65ul}) {
            for (const std::size_t n : {r, r + 1, 769ul, 2049ul}) {
                CAPTURE(kappa);
                CAPTURE(r);
                CAPTURE(n);
                std::vector<double> values;
                for (std::size_t j = 0; j < r; ++j) {
                    values.push_back(r == 1 ? 1 : std::pow(kappa, -double(j) / double(r - 1)));
                }
                const auto in = columns_of(test::with_singular_values(n, r, values, 100));
                const auto out = orthogonalized(in, n);
                CHECK(defect(out, n) <= 1e-5);
                // It is the factor of the columns, taken from the first on: the rest of P'A is a triangle.
                const dense a = from_columns(in, n);
                const dense p = from_columns(out, n);
                const dense triangle = test::transposed(p) * a;
                double below = 0;
                bool positive = true;
                for (std::size_t j = 0; j < r; ++j) {
                    positive = positive && triangle(j, j) > 0;
                    for (std::size_t i = j + 1; i < r; ++i) { below = std::max(below, std::fabs(triangle(i, j))); }
                }
                CHECK(below <= 1e-6);
                CHECK(positive);
                CHECK(test::distance(p * triangle, a) <= 1e-6);
            }
        }
    }
}

TEST_CASE("long columns lose nothing") {
    const std::size_t n = 50257;
    const auto in = columns_of(test::normal_matrix(n, 4, 5, 1e-3));
    CHECK(defect(orthogonalized(in, n), n) <= 1e-6);
}

// PyTorch's Gram-Schmidt divides by zero unless an epsilon is asked for: github.com/pytorch/pytorch/pull/55738
TEST_CASE("dependent columns become zero, and only they") {
    const std::size_t n = 200;
    dense a = test::normal_matrix(n, 6, 7);
    for (std::size_t i = 0; i < n; ++i) {
        for (std::size_t j = 0; j < 6; ++j) { a(i, j) = std::round(8 * a(i, j)); }
        a(i, 2) = 0;
        a(i, 3) = a(i, 0);
        a(i, 5) = a(i, 0) - 2 * a(i, 1);
    }
    const auto out = orthogonalized(columns_of(a), n);
    CHECK(defect(out, n, 3) <= 1e-5);
    for (const std::size_t j : {2ul, 3ul, 5ul}) {
        for (std::size_t i = 0; i < n; ++i) { CHECK(out[j * n + i] == 0); }
    }
    CHECK(orthogonalized(std::vector<float>(30, 0.0f), 10) == std::vector<float>(30, 0.0f));
}

TEST_CASE("nearly dependent columns are orthonormal or zero") {
    const std::size_t n = 500;
    for (int digits = 5; digits <= 12; ++digits) {
        CAPTURE(digits);
        dense a = test::normal_matrix(n, 3, 11);
        const dense noise = test::normal_matrix(n, 1, 12, std::pow(10.0, -digits));
        for (std::size_t i = 0; i < n; ++i) { a(i, 2) = a(i, 0) + noise(i, 0); }
        const auto out = orthogonalized(columns_of(a), n);
        const bool dropped = std::all_of(out.begin() + 2 * n, out.end(), [](float x) { return x == 0; });
        CHECK(defect(out, n, dropped ? 1 : 0) <= 1e-5);
        CHECK((digits > 6 || !dropped));
    }
}

TEST_CASE("more columns than rows leave as many as there are rows") {
    const auto out = orthogonalized(columns_of(test::normal_matrix(3, 5, 13)), 3);
    CHECK(defect(out, 3, 2) <= 1e-5);
}

TEST_CASE("any finite scale will do, also one of each in a matrix") {  // T24
    const std::size_t n = 333;
    const dense a = test::normal_matrix(n, 5, 17);
    for (const double scale : {1e-38, 1e-30, 1e30, 1e37}) {
        CAPTURE(scale);
        auto in = columns_of(a);
        for (float& x : in) { x = static_cast<float>(static_cast<double>(x) * scale); }
        CHECK(defect(orthogonalized(in, n), n) <= 1e-5);
    }
    auto in = columns_of(a);
    const float scales[] = {1e-30f, 1e30f, 1.0f, 1e-20f, 1e35f};
    for (std::size_t i = 0; i < in.size(); ++i) { in[i] *= scales[i / n]; }
    CHECK(defect(orthogonalized(in, n), n) <= 1e-5);
}

TEST_CASE("what is not finite makes its matrix NaN, and no other") {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        auto in = columns_of(test::normal_matrix(40, 3, 19));
        const auto clean = orthogonalized(in, 40);
        std::vector<float> second = in;
        in[85] = bad;
        const std::vector<tall> all{{in, in, 40, 3}, {second, second, 40, 3}};
        orthogonalize(host_queue{}, std::span<const tall>(all));
        for (const float x : in) { CHECK(std::isnan(x)); }
        CHECK(test::same_bytes(second, clean));
    }
}

TEST_CASE("one by one, in a batch, in place: the same bits") {  // T25
    std::vector<std::vector<float>> in;
    std::vector<std::size_t> rows;
    for (std::uint32_t k = 0; k < 8; ++k) {
        rows.push_back(k < 5 ? 300 : 100 + 513 * k);
        in.push_back(columns_of(test::normal_matrix(rows[k], k < 4 ? 1 : k, 23 + k)));
    }
    auto batch = in;
    std::vector<tall> all;
    for (std::size_t k = 0; k < in.size(); ++k) {
        all.push_back({batch[k], batch[k], rows[k], static_cast<int>(in[k].size() / rows[k])});
    }
    orthogonalize(host_queue{}, std::span<const tall>(all));
    for (std::size_t k = 0; k < in.size(); ++k) { CHECK(test::same_bytes(batch[k], orthogonalized(in[k], rows[k]))); }
}

TEST_CASE("sizes that do not fit are refused, empty ones are not") {
    std::vector<float> a(12), b(11);
    const auto call = [](tall t) { orthogonalize(host_queue{}, std::span<const tall>(&t, 1)); };
    CHECK_NOTHROW(call({a, a, 4, 3}));
    CHECK_THROWS_AS(call({a, b, 4, 3}), usage_error);
    CHECK_THROWS_AS(call({b, a, 4, 3}), usage_error);
    CHECK_THROWS_AS(call({a, a, 4, -3}), usage_error);
    CHECK_NOTHROW(call({{}, {}, 0, 3}));
    CHECK_NOTHROW(call({{}, {}, 3, 0}));
    CHECK_NOTHROW(orthogonalize(host_queue{}, std::span<const tall>()));
}

TEST_CASE("a virtual call costs two passes") {
    virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
    using phantom = view<float, phantom_memory>;
    const tall_matrix<phantom_memory> a{phantom(nullptr, 400), phantom(nullptr, 400), 100, 4};
    orthogonalize(q, std::span<const tall_matrix<phantom_memory>>(&a, 1));
    CHECK(resolve(q.recording())[0] == 24 * 400);
}
