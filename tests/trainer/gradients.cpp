// Every backward function against central differences in double, relative 1e-7; the whole model; float against double.
#include <array>    // shapes
#include <numeric>  // inner_product
#include <string>   // messages
#include <vector>   // tensors

#include <doctest/doctest.h>

#include "central_difference.hpp"
#include "memory_strategy.hpp"
#include "host_math.hpp"

namespace {

using namespace transformer;
using trainer_test::central_differences;
using trainer_test::memory_strategy;
using trainer_test::normals;
using trainer_test::relative_distance;

constexpr double bar = 1e-7;

/// As in the trainer; the products here are far too small for a second thread.
[[maybe_unused]] const bool one_thread = (one_thread_per_rank(), true);

matrix<double> as(std::vector<double>& v, int rows, int columns) { return {v.data(), rows, columns}; }

/// The scalar that layer tests differentiate: a fixed random weighting of the output.
double weighted(const std::vector<double>& out, const std::vector<double>& weights) {
    return std::inner_product(out.begin(), out.end(), weights.begin(), 0.0);
}

void check(const char* what, std::span<const double> analytic, std::span<const double> numeric) {
    CHECK_MESSAGE(relative_distance(analytic, numeric) <= bar, what);
}

/// Gradients that must be added to, not overwritten, start from this.
std::vector<double> started(std::size_t count) { return std::vector<double>(count, 0.25); }
std::vector<double> less_start(std::vector<double> v) {
    for (auto& x : v) { x -= 0.25; }
    return v;
}

TEST_CASE("embedding: gradients of both tables add up over repeated tokens and positions") {
    const int length = 5, width = 7, rows = 15, vocabulary = 6;
    const std::vector<std::uint16_t> in{0, 3, 3, 5, 1, 1, 1, 2, 0, 5, 5, 4, 3, 2, 1};
    std::vector<std::int64_t> places;
    for (int t = 0; t < rows; ++t) { places.push_back(t % length); }
    auto tokens_table = normals(vocabulary * width, 1), positions = normals(length * width, 2);
    auto out = normals(rows * width, 3);
    const auto weights = normals(rows * width, 4);
    const auto f = [&] {
        embedding_forward<double>(in, places, as(tokens_table, vocabulary, width), as(positions, length, width),
                                  as(out, rows, width));
        return weighted(out, weights);
    };
    auto d_tokens = started(tokens_table.size()), d_positions = started(positions.size());
    auto d_out = weights;
    embedding_backward<double>(in, places, as(d_out, rows, width), as(d_tokens, vocabulary, width),
                               as(d_positions, length, width));
    check("token table", less_start(d_tokens), central_differences(tokens_table, f));
    check("position table", less_start(d_positions), central_differences(positions, f));
}

TEST_CASE("layer normalization") {
    const int rows = 5, width = 19;
    auto in = normals(rows * width, 1), gain = normals(width, 2), bias = normals(width, 3), out = in;
    const auto weights = normals(rows * width, 4);
    std::vector<row_statistics<double>> statistics(rows);
    const auto f = [&] {
        layer_norm_forward<double>(as(in, rows, width), gain.data(), bias.data(), as(out, rows, width),
                                   statistics.data());
        return weighted(out, weights);
    };
    (void)f();
    auto d_out = weights, d_in = started(in.size()), d_gain = started(gain.size()), d_bias = started(bias.size());
    layer_norm_backward<double>(as(d_out, rows, width), as(in, rows, width), gain.data(), statistics.data(),
                                as(d_in, rows, width), d_gain.data(), d_bias.data());
    check("input", less_start(d_in), central_differences(in, f));
    check("gain", less_start(d_gain), central_differences(gain, f));
    check("bias", less_start(d_bias), central_differences(bias, f));
}

TEST_CASE("linear, with and without a residual") {
    const int rows = 5, inputs = 7, outputs = 11;
    auto in = normals(rows * inputs, 1), weight = normals(inputs * outputs, 2), bias = normals(outputs, 3);
    auto residual = normals(rows * outputs, 4), out = residual;
    const auto weights = normals(rows * outputs, 5);
    bool on_residual = false;
    const auto f = [&] {
        if (on_residual) {
            linear_forward<double>(as(in, rows, inputs), as(weight, inputs, outputs), bias.data(),
                                   as(residual, rows, outputs), as(out, rows, outputs));
        } else {
            linear_forward<double>(as(in, rows, inputs), as(weight, inputs, outputs), bias.data(),
                                   as(out, rows, outputs));
        }
        return weighted(out, weights);
    };
    auto d_out = weights, d_in = in, d_weight = started(weight.size()), d_bias = started(bias.size());
    linear_backward<double>(as(d_out, rows, outputs), as(in, rows, inputs), as(weight, inputs, outputs),
                            as(d_in, rows, inputs), as(d_weight, inputs, outputs), d_bias.data());
    for (const bool with : {false, true}) {
        on_residual = with;
        check("input", d_in, central_differences(in, f));
        check("weight", less_start(d_weight), central_differences(weight, f));
        check("bias", less_start(d_bias), central_differences(bias, f));
    }
    check("residual", d_out, central_differences(residual, f));
}

TEST_CASE("GELU: gradient, and the output computed again") {
    auto in = normals(101, 1, 2.0f), out = in;
    const auto weights = normals(in.size(), 2);
    const auto f = [&] {
        gelu_forward(in.data(), out.data(), in.size());
        return weighted(out, weights);
    };
    (void)f();
    auto again = in, gradient = weights;
    gelu_backward(in.data(), again.data(), gradient.data(), in.size());
    CHECK(again == out);
    check("input", gradient, central_differences(in, f));
}

TEST_CASE("attention: every shape of blocks, gradients of queries, keys and values; no token sees a later one") {
    // one row; part of a block; exactly one; one more; several, uneven
    for (const int length : {1, 5, attention_block, attention_block + 1, 2 * attention_block + 9}) {
        CAPTURE(length);
        const attention_shape s{.batch = 2, .length = length, .heads = 3, .head_width = 5};
        const int rows = s.batch * length, width = s.width();
        auto qkv = normals(static_cast<std::size_t>(rows * 3 * width), 1),
             out = normals(static_cast<std::size_t>(rows * width), 2);
        const auto weights = normals(out.size(), 3);
        std::vector<double> log_sum_exp(static_cast<std::size_t>(rows * s.heads));
        std::vector<double> scratch(static_cast<std::size_t>(2 * attention_block * length));
        const auto f = [&] {
            attention_forward<double>(s, as(qkv, rows, 3 * width), as(out, rows, width), log_sum_exp.data(),
                                      as(scratch, 2 * attention_block, length));
            return weighted(out, weights);
        };
        (void)f();
        auto d_out = weights, d_qkv = normals(qkv.size(), 4);
        attention_backward<double>(s, as(d_out, rows, width), as(qkv, rows, 3 * width), as(out, rows, width),
                                   log_sum_exp.data(), as(d_qkv, rows, 3 * width),
                                   as(scratch, 2 * attention_block, length));
        const std::size_t stride = length > 40 ? 7 : 1;  // coprime to the row length: every kind of element is met
        CHECK(relative_distance(d_qkv, central_differences(qkv, f, stride), stride) <= bar);

        (void)f();
        const auto before = out;
        const int changed = length / 2;
        qkv[static_cast<std::size_t>(changed * 3 * width + width)] += 1;      // one key of the first sequence
        qkv[static_cast<std::size_t>(changed * 3 * width + 2 * width)] += 1;  // and one value
        (void)f();
        for (int t = 0; t < rows; ++t) {
            bool same = true;
            for (int c = 0; c < width; ++c) {
                same = same &&
                       out[static_cast<std::size_t>(t * width + c)] == before[static_cast<std::size_t>(t * width + c)];
            }
            CHECK(same == (t < changed || t >= length));
        }
    }
}

TEST_CASE("cross-entropy") {
    const int rows = 4, classes = 17;
    const std::vector<std::uint16_t> targets{0, 16, no_target, 5};
    auto logits = normals(rows * classes, 1, 3.0f);
    std::vector<double> work;
    const auto f = [&] {
        work = logits;
        return 0.5 * cross_entropy_forward<double>(as(work, rows, classes), targets);
    };
    (void)f();
    cross_entropy_backward<double>(as(work, rows, classes), targets, 0.5);
    const auto d_logits = work;  // f overwrites it
    check("logits", d_logits, central_differences(logits, f));
}

// ---- the whole model ----------------------------------------------------------------------------------------------

std::vector<std::uint16_t> some_tokens(std::size_t count, std::uint32_t stream, std::uint64_t vocabulary) {
    std::vector<std::uint16_t> t(count);
    for (std::size_t i = 0; i < count; ++i) {
        t[i] = static_cast<std::uint16_t>(tutti::random_stream{.seed = 3, .stream = stream}.below(i, vocabulary));
    }
    return t;
}

/// Weights far from their initial values, so that no path through the model is nearly closed.
template <class T> void disturb(host_model<T>& m) {
    for (std::size_t i = 0; i < m.parameters().size(); ++i) {
        const auto value = m.parameters()[i].value;
        const auto noise = normals(value.size(), static_cast<std::uint32_t>(i), 0.25f);
        for (std::size_t k = 0; k < value.size(); ++k) { value[k] += static_cast<T>(noise[k]); }
    }
}

TEST_CASE("model: every tensor's gradient, two layers, sequences shorter than the context, two micro-batches") {
    const configuration c{.vocabulary = 31, .context = 40, .layers = 2, .heads = 3, .width = 12};
    host_model<double> m(c, 2, 1);
    disturb(m);
    memory_strategy<double> s;
    s.attach(m.parameters());
    const int length = 37;
    const auto in = some_tokens(4 * static_cast<std::size_t>(length), 1, 31), targets = some_tokens(in.size(), 2, 31);
    const auto part = [&](const std::vector<std::uint16_t>& t, int k) {
        return tokens(t).subspan(static_cast<std::size_t>(2 * length * k), static_cast<std::size_t>(2 * length));
    };
    const double scale = 1.0 / static_cast<double>(in.size());
    const auto f = [&] {
        double sum = 0;
        for (int k = 0; k < 2; ++k) { sum += m.forward(s, part(in, k), part(targets, k), length); }
        return sum * scale;
    };
    for (int k = 0; k < 2; ++k) {
        s.begin({k, 2});
        m.forward_training(s, part(in, k), part(targets, k), length, scale);
        m.backward(s);
        CHECK(m.take_loss() == doctest::Approx(m.forward(s, part(in, k), part(targets, k), length)).epsilon(1e-14));
        CHECK(s.all_ready_once());
        CHECK(s.none_in_use());
    }
    for (std::size_t i = 0; i < m.parameters().size(); ++i) {
        const auto& p = m.parameters()[i];
        const auto g = s.result(i);
        const std::size_t stride = p.value.size() > 100 ? 7 : 1;
        const auto numeric = central_differences(std::span<double>(p.value.data(), p.value.size()), f, stride);
        if (p.name.ends_with("c_attn.bias")) {
            // Softmax does not see what all keys share: the middle third is zero, and zero has no relative error.
            for (std::size_t k = 0; k < 12; ++k) { CHECK(std::abs(g[12 + k]) < 1e-15); }
        }
        CHECK_MESSAGE(relative_distance(g, numeric, stride) <= bar, p.name);
    }
}

TEST_CASE("model: float agrees with double, loss and every gradient") {
    const configuration c{.vocabulary = 256, .context = 70, .layers = 2, .heads = 2, .width = 32};
    const auto in = some_tokens(140, 1, 256), targets = some_tokens(140, 2, 256);
    const auto run = [&]<class T>(host_model<T>& m, memory_strategy<T>& s) {
        disturb(m);
        s.attach(m.parameters());
        s.begin({0, 1});
        m.forward_training(s, in, targets, 70, T{1} / T{140});
        m.backward(s);
        return m.take_loss() / 140;
    };
    host_model<double> md(c, 2, 1);
    host_model<float> mf(c, 2, 1);
    memory_strategy<double> sd;
    memory_strategy<float> sf;
    const double loss = run(md, sd);
    CHECK(run(mf, sf) == doctest::Approx(loss).epsilon(1e-6));
    for (std::size_t i = 0; i < md.parameters().size(); ++i) {
        const auto g = sd.result(i);
        const std::vector<double> rounded(sf.result(i).begin(), sf.result(i).end());
        CHECK_MESSAGE(relative_distance(rounded, g) <= 2e-6, md.parameters()[i].name);
    }
}

TEST_CASE("model: predict gives the distribution that forward scores") {
    host_model<double> m({.vocabulary = 256, .context = 8, .layers = 1, .heads = 2, .width = 16}, 1, 1);
    disturb(m);
    memory_strategy<double> s;
    s.attach(m.parameters());
    const auto text = some_tokens(6, 1, 256);
    const auto score = [&](std::size_t n) {
        return m.forward(s, tokens(text).first(n), tokens(text).subspan(1, n), static_cast<int>(n));
    };
    const double last = score(5) - score(4);
    CHECK(std::log(m.predict(s, tokens(text).first(5))[text[5]]) == doctest::Approx(-last).epsilon(1e-12));
}

TEST_CASE("exponential: float within 2 units in the last place where it is used, saturated outside, NaN kept") {
    double worst = 0;
    for (float x = -86.9f; x < 87.9f; x += 0.00137f) {
        const double exact = std::exp(static_cast<double>(x));
        const auto rounded = static_cast<float>(exact);
        const double unit = static_cast<double>(std::nextafter(rounded, INFINITY)) - static_cast<double>(rounded);
        worst = std::max(worst, std::abs(static_cast<double>(exponential(x)) - exact) / unit);
    }
    CHECK(worst <= 2);
    CHECK(exponential(0.0f) == 1.0f);
    CHECK(exponential(-INFINITY) < 1.7e-38f);
    CHECK(exponential(-1e30f) < 1.7e-38f);
    CHECK(std::isfinite(exponential(INFINITY)));
    CHECK(std::isnan(exponential(NAN)));
}

TEST_CASE_TEMPLATE("products: the linked CBLAS agrees with plain loops at the trainer's shapes", T, float, double) {
    // A BLAS picks its kernels by processor, and has picked wrong ones before.
    struct extents {
        int m, n, k;
    };
    for (const extents e : {extents{96, 384, 128},
                            {96, 128, 512},
                            {384, 128, 96},
                            {32, 64, 32},
                            {64, 32, 32},
                            {1, 256, 128},
                            {37, 41, 5}}) {
        for (const bool ta : {false, true}) {
            for (const bool tb : {false, true}) {
                CAPTURE(e.m);
                CAPTURE(e.n);
                const auto a64 = normals(static_cast<std::size_t>(e.m * e.k), 1),
                           b64 = normals(static_cast<std::size_t>(e.k * e.n), 2),
                           c64 = normals(static_cast<std::size_t>(e.m * e.n), 3);
                std::vector<T> a(a64.begin(), a64.end()), b(b64.begin(), b64.end()), c(c64.begin(), c64.end());
                const matrix<T> am = ta ? matrix<T>(a.data(), e.k, e.m) : matrix<T>(a.data(), e.m, e.k);
                const matrix<T> bm = tb ? matrix<T>(b.data(), e.n, e.k) : matrix<T>(b.data(), e.k, e.n);
                multiply<T>(ta ? transposed(am) : factor<T>(am), tb ? transposed(bm) : factor<T>(bm),
                            matrix<T>(c.data(), e.m, e.n), T{2}, T{3});
                double worst = 0;
                for (int i = 0; i < e.m; ++i) {
                    for (int j = 0; j < e.n; ++j) {
                        double sum = 0;
                        for (int k = 0; k < e.k; ++k) {
                            sum += static_cast<double>(ta ? am.row(k)[i] : am.row(i)[k]) *
                                   static_cast<double>(tb ? bm.row(j)[k] : bm.row(k)[j]);
                        }
                        const auto at = static_cast<std::size_t>(i * e.n + j);
                        worst = std::max(worst, std::abs(3 * sum + 2 * static_cast<double>(static_cast<T>(c64[at])) -
                                                         static_cast<double>(c[at])));
                    }
                }
                CHECK(worst <= 100 * std::sqrt(e.k) * static_cast<double>(std::numeric_limits<T>::epsilon()));
            }
        }
    }
}

}  // namespace
