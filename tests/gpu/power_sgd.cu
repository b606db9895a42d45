// PowerSGD on a device: the host's steps to rounding, for every class of ranks, element type, shape and alignment; bits
// that do not depend on what else is in a call; no host waits, so that a step can be captured.
#include <tutti/compress/power_sgd.cuh>  // under test

#include <algorithm>  // max
#include <cmath>      // sqrt, isnan
#include <cstring>    // memcpy
#include <limits>     // infinity
#include <string>     // messages
#include <vector>     // matrices

#include <doctest/doctest.h>  // checks

#include "compress/dense.hpp"                // judges
#include "compress/low_rank_trial.hpp"       // segments
#include "device.hpp"                        // require_device
#include "support/oracle.hpp"                // same_bytes
#include <tutti/compress/orthogonalize.cuh>  // under test
#include <tutti/core/buffer.hpp>             // storage

using namespace tutti;
using compress::draw_key;
using compress::power_sgd;
using compress::power_sgd_state;
using compress::tall_matrix;
using test::dense;
using test::matrix_segment;
using test::normal_matrix;
using test::rounded;
using test::segment;

namespace {

template <class T> using array = buffer<T, cuda_queue>;

template <class T> array<T> uploaded(const cuda_queue& q, const std::vector<T>& v) {
    array<T> a(q, v.size());
    upload(q, view<const T>(v), a.view());
    return a;
}
template <class T> std::vector<T> downloaded(const cuda_queue& q, view<T, device_memory> v) {
    std::vector<std::remove_const_t<T>> to(v.size());
    download(q, v, view(to));
    return to;
}
template <class T> double value(T x) { return static_cast<double>(static_cast<master_t<T>>(x)); }

// ||a - b|| over the elements of a segment, in units of ||b||; huge where one of them is not finite.
template <class T>
double apart(const std::vector<T>& a, const std::vector<T>& b, std::size_t first, std::size_t count) {
    double difference = 0, size = 1e-300;
    for (std::size_t i = first; i < first + count; ++i) {
        difference += std::pow(value(a[i]) - value(b[i]), 2);
        size += std::pow(value(b[i]), 2);
    }
    const double ratio = std::sqrt(difference / size);
    return ratio < 1e300 ? ratio : 1e300;
}

template <class T> struct device_rank {
    cuda_queue queue{0};
    power_sgd scheme;
    power_sgd_state<cuda_queue> state;
    array<T> in, out;
    array<float> residual;

    device_rank(const std::vector<segment>& all, std::size_t elements)
        : state(scheme.make_state(queue, all)), in(queue, elements), out(queue, elements), residual(queue, elements) {
        fill(queue, residual.view(), 0.0f);
        fill(queue, out.view(), T(7.0f));
    }
    // A step of one rank; the sum over ranks is the wire itself.
    void step(const std::vector<segment>& all, bool feedback, draw_key key) {
        const view<float, device_memory> e = feedback ? residual.view() : view<float, device_memory>();
        for (int round = 0; round < 2; ++round) {
            const array<float> wire(queue, compress::detail::wire_count(scheme, all, round));
            scheme.contribute(queue, all, state, round, view<const T, device_memory>(in.view()), e, wire.view(), key);
            scheme.absorb(queue, all, state, round, wire.view(), 1);
        }
        scheme.finish(queue, all, state, view<const T, device_memory>(in.view()), e, out.view());
    }
    void load(const std::vector<T>& g) { upload(queue, view<const T>(g), in.view()); }
    [[nodiscard]] std::vector<T> result() { return downloaded(queue, out.view()); }
    [[nodiscard]] std::vector<float> left() { return downloaded(queue, residual.view()); }
    [[nodiscard]] std::vector<float> factor(std::size_t i) {
        const auto& data = state.entries()[i].data;
        return downloaded(queue, view<float, device_memory>(reinterpret_cast<float*>(data.data()), data.size() / 4));
    }
};

// Host and device take each step from the host's state. Ranks and offsets of all classes in one call.
template <class T> void steps_agree(const std::vector<segment>& all, std::size_t elements, bool feedback) {
    test::low_rank_trial<T> host(all, 1, elements);
    host.feedback = feedback;
    device_rank<T> device(all, elements);
    for (std::uint32_t step = 0; step < 3; ++step) {
        const auto g = rounded<T>(normal_matrix(1, elements, 300 + step));
        for (std::size_t i = 0; i < all.size(); ++i) {
            const auto& from = host.states[0].entries()[i].data;
            const auto& to = device.state.entries()[i].data;
            REQUIRE(from.size() == to.size());
            upload(device.queue, view<const std::byte>(from.data(), from.size()), to);
        }
        upload(device.queue, view<const float>(host.residuals[0]), device.residual.view());
        device.load(g);
        device.step(all, feedback, draw_key{host.seed, step, 0});
        const auto expected = host.step({g})[0];
        const auto out = device.result();
        const auto residual = device.left();
        for (std::size_t i = 0; i < all.size(); ++i) {
            CAPTURE(all[i].rows);
            CAPTURE(all[i].cols);
            CAPTURE(all[i].level);
            CAPTURE(step);
            const double rounding = std::same_as<T, float16> || std::same_as<T, bfloat16> ? test::roundoff<T>() : 0;
            CHECK(apart(out, expected, all[i].offset, all[i].size()) <= 1e-5 + rounding);
            if (feedback) {
                // Of what was compressed: a residual of nothing is nothing but rounding.
                double difference = 0;
                for (std::size_t k = all[i].offset; k < all[i].offset + all[i].size(); ++k) {
                    difference += std::pow(double(residual[k]) - double(host.residuals[0][k]), 2);
                }
                CHECK(std::sqrt(difference / double(all[i].size())) <= 1e-5);
            }
        }
        for (std::size_t i = 0; i < all.size(); ++i) {
            const auto& entry = host.states[0].entries()[i];
            std::vector<float> wanted(entry.data.size() / 4);
            std::memcpy(wanted.data(), entry.data.data(), entry.data.size());
            // Rounding, times the condition of the left factor before it was orthogonalized.
            CHECK(apart(device.factor(i), wanted, 0, wanted.size()) <= 1e-4);
        }
        // Elements between the segments are nobody's.
        std::vector<bool> used(elements);
        for (const segment& s : all) { std::fill_n(used.begin() + std::ptrdiff_t(s.offset), s.size(), true); }
        bool untouched = true;
        for (std::size_t i = 0; i < elements; ++i) {
            untouched = untouched && (used[i] || (value(out[i]) == 7 && residual[i] == host.residuals[0][i]));
        }
        CHECK(untouched);
    }
}

std::vector<segment> layout_of(const std::vector<segment>& list, std::size_t gap, std::size_t& elements) {
    std::vector<segment> all = list;
    elements = gap;
    for (std::size_t t = 0; t < all.size(); ++t) {
        all[t].tensor = static_cast<std::uint32_t>(t);
        all[t].offset = elements;
        elements += all[t].size() + gap;
    }
    return all;
}

std::vector<float> columns_of(const dense& a) { return rounded(test::transposed(a)); }

std::vector<float> orthogonalized(const std::vector<float>& in, std::size_t rows) {
    const cuda_queue q(0);
    const auto from = uploaded(q, in);
    const array<float> to(q, in.size());
    const tall_matrix<device_memory> a{from.view(), to.view(), rows, static_cast<int>(in.size() / rows)};
    compress::orthogonalize(q, std::span<const tall_matrix<device_memory>>(&a, 1));
    return downloaded(q, to.view());
}
double defect(const std::vector<float>& out, std::size_t rows, std::size_t zeros = 0) {
    const dense p = test::transposed(dense(out.size() / rows, rows, out.data()));
    const dense gram = test::transposed(p) * p;
    double worst = 0;
    std::size_t found = 0;
    for (std::size_t i = 0; i < p.cols; ++i) {
        const bool zero = gram(i, i) == 0;
        found += zero ? 1 : 0;
        for (std::size_t j = 0; j < p.cols; ++j) {
            const double difference = std::fabs(gram(i, j) - (i == j && !zero ? 1 : 0));
            worst = difference > worst || difference != difference ? difference : worst;
        }
    }
    return found == zeros ? worst : 1e9;
}

}  // namespace

TEST_CASE("small: columns become orthonormal") {  // T23
    test::require_device();
    for (const double kappa : {1.0, 1e3, 1e6}) {
        for (const std::size_t r : {1ul, 2ul, 4ul, 5ul, 16ul, 31ul, 65ul}) {
            for (const std::size_t n : {r, 300ul}) {
                CAPTURE(kappa);
                CAPTURE(r);
                CAPTURE(n);
                std::vector<double> values;
                for (std::size_t j = 0; j < r; ++j) {
                    values.push_back(r == 1 ? 1 : std::pow(kappa, -double(j) / double(r - 1)));
                }
                const auto out = orthogonalized(columns_of(test::with_singular_values(n, r, values, 100)), n);
                CHECK(defect(out, n) <= 1e-5);
            }
        }
    }
    dense a = normal_matrix(200, 6, 7);
    for (std::size_t i = 0; i < 200; ++i) {
        a(i, 1) = 0;
        a(i, 4) = a(i, 0);
    }
    CHECK(defect(orthogonalized(columns_of(a), 200), 200, 2) <= 1e-5);
    auto scaled = columns_of(normal_matrix(333, 4, 17));
    const float scales[] = {1e-30f, 1e30f, 1.0f, 1e-20f};
    for (std::size_t i = 0; i < scaled.size(); ++i) { scaled[i] *= scales[i / 333]; }
    CHECK(defect(orthogonalized(scaled, 333), 333) <= 1e-5);
    scaled[700] = std::numeric_limits<float>::infinity();
    for (const float x : orthogonalized(scaled, 333)) { CHECK(std::isnan(x)); }
}

TEST_CASE("long and wide columns become orthonormal") {
    test::require_device();
    CHECK(defect(orthogonalized(columns_of(normal_matrix(50257, 4, 5, 1e-3)), 50257), 50257) <= 1e-6);
    CHECK(defect(orthogonalized(columns_of(normal_matrix(20000, 32, 6)), 20000), 20000) <= 1e-6);
    CHECK(defect(orthogonalized(columns_of(normal_matrix(1000, 130, 8)), 1000), 1000) <= 1e-5);
}

TEST_CASE_TEMPLATE("small: a step is the host's", T, float, bfloat16, float16, double) {
    test::require_device();
    std::vector<segment> list;
    for (const int level : {1, 3, 4, 7, 16, 29, 40}) {
        list.push_back(matrix_segment(0, 45, 36, level));
        list.push_back(matrix_segment(0, 37, 131, level));
        list.push_back(matrix_segment(0, 3, 260, level));
        list.push_back(matrix_segment(0, 70, 2, level));
    }
    for (const std::size_t gap : {0ul, 4ul, 1ul}) {
        std::size_t elements = 0;
        const auto all = layout_of(list, gap, elements);
        steps_agree<T>(all, elements, true);
        steps_agree<T>(all, elements, false);
    }
}

TEST_CASE("large matrices, and more of them than a launch takes") {
    test::require_device();
    std::size_t elements = 0;
    const std::vector<segment> large{matrix_segment(0, 3000, 768, 4), matrix_segment(0, 768, 3072, 8),
                                     matrix_segment(0, 1111, 777, 32), matrix_segment(0, 900, 1000, 70)};
    const auto all = layout_of(large, 0, elements);
    steps_agree<float>(all, elements, true);
    std::vector<segment> many;
    for (int i = 0; i < 400; ++i) { many.push_back(matrix_segment(0, 5 + i % 7, 8 + i % 5, 1 + i % 6)); }
    const auto small = layout_of(many, 3, elements);
    steps_agree<float>(small, elements, true);
}

TEST_CASE("small: alone or together, aligned or not: the same bits") {  // T25
    test::require_device();
    for (const int level : {1, 6, 20, 40}) {
        const std::size_t n = 300, m = 132;
        const auto g = rounded(normal_matrix(n, m, 77));
        std::vector<std::vector<float>> outs, residuals;
        for (const std::size_t offset : {0ul, 1ul, 4ul}) {
            for (const bool together : {false, true}) {
                std::vector<segment> all{matrix_segment(3, n, m, level, offset)};
                if (together) {
                    all.insert(all.begin(), matrix_segment(1, n, m, level, offset + n * m));
                    all.push_back(matrix_segment(7, 55, 9, 2, offset + 2 * n * m));
                }
                const std::size_t elements = offset + 2 * n * m + 500;
                std::vector<float> data(elements, 1.0f);
                std::copy(g.begin(), g.end(), data.begin() + std::ptrdiff_t(offset));
                device_rank<float> device(all, elements);
                device.load(data);
                for (std::uint32_t step = 0; step < 2; ++step) { device.step(all, true, draw_key{1, step, 0}); }
                const auto out = device.result(), residual = device.left();
                const auto part = [&](const std::vector<float>& v) {
                    return std::vector<float>(v.begin() + std::ptrdiff_t(offset),
                                              v.begin() + std::ptrdiff_t(offset + n * m));
                };
                outs.push_back(part(out));
                residuals.push_back(part(residual));
            }
        }
        for (std::size_t k = 1; k < outs.size(); ++k) {
            CAPTURE(k);
            CHECK(test::same_bytes(outs[k], outs[0]));
            CHECK(test::same_bytes(residuals[k], residuals[0]));
        }
    }
}

TEST_CASE("small: what is not finite spoils its tensor for one step") {
    test::require_device();
    const std::vector<segment> all{matrix_segment(0, 12, 20, 4), matrix_segment(1, 12, 20, 4, 240)};
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        device_rank<float> device(all, 480);
        device.load(rounded(normal_matrix(1, 480, 1)));
        device.step(all, true, draw_key{1, 0, 0});
        const auto before = device.left();
        auto g = rounded(normal_matrix(1, 480, 2));
        g[77] = bad;
        device.load(g);
        device.step(all, true, draw_key{1, 1, 0});
        const auto out = device.result(), residual = device.left();
        for (std::size_t i = 0; i < 240; ++i) {
            CHECK(std::isnan(out[i]));
            CHECK(std::fabs(residual[i] - (i == 77 ? 0 : before[i])) <= 1e-6f);
            CHECK(std::isfinite(out[i + 240]));
        }
        CHECK(device.factor(0) == std::vector<float>(80));
        device.load(std::vector<float>(480));
        device.step(all, true, draw_key{1, 2, 0});
        for (const float x : device.result()) { CHECK(std::isfinite(x)); }
    }
}

TEST_CASE("small: zeros give zeros") {
    test::require_device();
    const std::vector<segment> all{matrix_segment(0, 50, 40, 6)};
    device_rank<float> device(all, 2000);
    device.load(std::vector<float>(2000));
    for (std::uint32_t step = 0; step < 2; ++step) { device.step(all, true, draw_key{1, step, 0}); }
    CHECK(device.result() == std::vector<float>(2000));
    CHECK(device.left() == std::vector<float>(2000));
}

TEST_CASE("a step can be captured: it waits for nothing, and replays with the same bits") {
    test::require_device();
    const std::vector<segment> all{matrix_segment(0, 300, 200, 4), matrix_segment(1, 70, 90, 20, 60000)};
    device_rank<float> direct(all, 66300), captured(all, 66300);
    const auto g = rounded(normal_matrix(1, 66300, 5));
    for (auto* d : {&direct, &captured}) {
        d->load(g);
        d->step(all, true, draw_key{1, 0, 0});
    }
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    REQUIRE(cudaStreamBeginCapture(captured.queue.stream(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    captured.step(all, true, draw_key{1, 1, 0});
    REQUIRE(cudaStreamEndCapture(captured.queue.stream(), &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
    for (int step = 0; step < 3; ++step) {
        direct.step(all, true, draw_key{1, 1, 0});
        REQUIRE(cudaGraphLaunch(executable, captured.queue.stream()) == cudaSuccess);
    }
    CHECK(test::same_bytes(direct.result(), captured.result()));
    CHECK(test::same_bytes(direct.left(), captured.left()));
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
}

// Chains of PyTorch's hook ran into each other: github.com/pytorch/pytorch/issues/49477,
// github.com/pytorch/pytorch/issues/49716, github.com/pytorch/pytorch/pull/54838
TEST_CASE("two chains of many steps, at once and without a wait: the bits of each alone") {
    test::require_device();
    const std::vector<segment> all{matrix_segment(0, 500, 300, 4), matrix_segment(1, 70, 900, 9, 150000)};
    const std::size_t elements = 213000;
    const auto chains = [&](bool at_once) {
        device_rank<float> a(all, elements), b(all, elements);
        a.load(rounded(normal_matrix(1, elements, 6)));
        b.load(rounded(normal_matrix(1, elements, 7)));
        for (std::uint32_t step = 0; step < 40; ++step) {
            a.step(all, true, draw_key{1, step, 0});
            if (at_once) { b.step(all, true, draw_key{1, step, 0}); }
        }
        if (!at_once) {
            a.queue.record().wait_host(after(default_timeout()));
            for (std::uint32_t step = 0; step < 40; ++step) { b.step(all, true, draw_key{1, step, 0}); }
        }
        std::vector<std::vector<float>> results{a.result(), a.left(), b.result(), b.left()};
        return results;
    };
    const auto alone = chains(false);
    for (int repeat = 0; repeat < 3; ++repeat) {
        const auto at_once = chains(true);
        for (std::size_t i = 0; i < alone.size(); ++i) { CHECK(test::same_bytes(at_once[i], alone[i])); }
    }
}
