// What levels lose, measured on a device: the host's tables, to rounding, and the same bits each time.
#include <tutti/compress/level_errors.cuh>  // under test

#include <cmath>    // fabs
#include <cstring>  // memcmp
#include <vector>   // storage

#include <doctest/doctest.h>  // checks

#include "compress/level_measures.hpp"  // gradients
#include "device.hpp"                   // require_device

using namespace tutti;
using namespace tutti::test;
using compress::segment;
using D = device_memory;

namespace {

template <class X, class T>
void same_as_host(const X& x, const std::vector<segment>& all, const std::vector<int>& levels, const std::vector<T>& in,
                  double tolerance, bool relative = false) {
    const cuda_queue q;
    const std::size_t width = compress::error_row(levels);
    const buffer<T, cuda_queue> device_in(q, in.size());
    upload(q, view<const T>(in), device_in.view());
    std::vector<double> expected(all.size() * width);
    compress::squared_errors(host_queue(), x, all, levels, view<const T>(in), view<double>(expected));
    std::vector<double> before;
    for (int time = 0; time < 2; ++time) {
        const buffer<double, cuda_queue> out(q, expected.size());
        fill(q, out.view(), -1.0);
        compress::squared_errors(q, x, all, levels, view<const T, D>(device_in.view()), out.view());
        std::vector<double> rows(expected.size());
        download(q, view<const double, D>(out.view()), view<double>(rows));
        for (std::size_t i = 0; i < rows.size(); ++i) {
            CAPTURE(i);
            const double norm = expected[i / width * width];
            if (std::isnan(expected[i])) {
                CHECK(std::isnan(rows[i]));
            } else {
                CHECK(std::fabs(rows[i] - expected[i]) <= tolerance * (relative ? expected[i] : norm));
            }
        }
        if (time == 1) { CHECK(std::memcmp(rows.data(), before.data(), rows.size() * sizeof(double)) == 0); }
        before = rows;
    }
}

// Of many blocks, and as many as need a second launch.
std::vector<segment> many_tensors() {
    std::vector<segment> all{{0, 0, 0, 0, 700, 501}};
    for (std::uint32_t t = 1; t < 500; ++t) {
        all.push_back({t, 0, all.back().offset + all.back().size(), 0, 3 + t % 7, 5 + t % 11});
    }
    return all;
}

}  // namespace

TEST_CASE_TEMPLATE("a device measures what the host does", T, float, bfloat16) {
    require_device();
    for (const auto& all : {three_tensors(), many_tensors()}) {
        const auto in = heavy_tailed<T>(elements_of(all));
        same_as_host(compress::top_k(), all, {1, 50, 100, 2000, 10000}, in, 1e-12);
        // A bucket's losses are floats that add up in another order: 512 of them, none above a quarter of a unit.
        same_as_host(compress::quantize(), all, {1, 2, 3, 4, 5, 6, 7, 8}, in, 1e-5, true);
        same_as_host(compress::quantize(64, compress::rounding::nearest), all, {2, 4}, in, 1e-5, true);
        same_as_host(compress::power_sgd(), all, {1, 2, 4, 16}, in, 1e-4);
    }
}

TEST_CASE("what is not finite, on a device") {
    require_device();
    const auto all = three_tensors();
    auto in = heavy_tailed<float>(elements_of(all));
    in[all[1].offset + 5] = std::numeric_limits<float>::infinity();
    same_as_host(compress::top_k(), all, {10, 1000}, in, 1e-12);
    same_as_host(compress::power_sgd(), all, {1, 4}, in, 1e-4);
    in[all[1].offset + 5] = std::numeric_limits<float>::quiet_NaN();
    same_as_host(compress::top_k(), all, {10, 1000}, in, 1e-12);
    const std::size_t width = 3;
    const cuda_queue q;
    const buffer<float, cuda_queue> device_in(q, in.size());
    upload(q, view<const float>(in), device_in.view());
    const buffer<double, cuda_queue> out(q, all.size() * width);
    compress::squared_errors(q, compress::quantize(), all, std::vector<int>{2, 4},
                             view<const float, D>(device_in.view()), out.view());
    std::vector<double> rows(out.size());
    download(q, view<const double, D>(out.view()), view<double>(rows));
    for (std::size_t l = 1; l < width; ++l) {
        CHECK(std::isfinite(rows[l]));
        CHECK(std::isnan(rows[width + l]));
        CHECK(std::isfinite(rows[2 * width + l]));
    }
}
