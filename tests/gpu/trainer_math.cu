// Every step of the GPU's mathematics against the CPU's in double, on the same numbers, in sizes that fit and others.
#include "cuda/math.cuh"  // under test

#include <algorithm>  // max
#include <cmath>      // abs
#include <cstdint>    // tokens
#include <string>     // messages
#include <vector>     // numbers

#include <doctest/doctest.h>  // checks

#include <tutti/core/philox.hpp>  // numbers

#include "device.hpp"     // require_device
#include "host_math.hpp"  // reference

namespace {

using namespace transformer;
using gpu::cuda_math;

[[maybe_unused]] const bool one_thread = (one_thread_per_rank(), true);

// Of a result, relative to the largest of its tensor. Sums are kept in float on both sides of the rounding to T: a
// result in float carries the error of a few hundred additions; one in bfloat16 half a unit of 2^-8, twice where a
// number was stored in between.
template <class T> constexpr double bar = std::is_same_v<T, float> ? 1e-5 : 1.0 / 128;

/// A tensor on both sides: numbers that T holds exactly.
template <class T> struct pair_of {
    std::vector<double> host;
    tutti::buffer<T, tutti::cuda_queue> device;
    int rows, columns, stride;

    pair_of(const tutti::cuda_queue& q, int r, int c, std::uint32_t stream, float deviation = 1, int padding = 0)
        : host(static_cast<std::size_t>(r) * static_cast<std::size_t>(c + padding))
        , device(q, host.size())
        , rows(r)
        , columns(c)
        , stride(c + padding) {
        std::vector<T> rounded(host.size());
        for (std::size_t i = 0; i < host.size(); ++i) {
            rounded[i] = static_cast<T>(deviation * tutti::random_stream{.seed = 4, .stream = stream}.normal(i));
            host[i] = static_cast<double>(static_cast<float>(rounded[i]));
        }
        tutti::upload(q, tutti::view<const T>(rounded), device.view());
    }
    [[nodiscard]] matrix<double> on_host() { return {host.data(), rows, columns, stride}; }
    [[nodiscard]] matrix<T> on_device() const { return {device.data(), rows, columns, stride}; }
    [[nodiscard]] std::vector<T> downloaded(const tutti::cuda_queue& q) const {
        std::vector<T> got(host.size());
        tutti::download(q, device.view(), tutti::view<T>(got));
        return got;
    }
    /// The largest difference over the largest number, the padding left out.
    [[nodiscard]] double distance(const tutti::cuda_queue& q) const {
        const std::vector<T> got = downloaded(q);
        double worst = 0, largest = 0;
        for (std::size_t i = 0; i < host.size(); ++i) {
            if (static_cast<int>(i % static_cast<std::size_t>(stride)) >= columns) { continue; }
            const double difference = std::abs(static_cast<double>(static_cast<float>(got[i])) - host[i]);
            worst = difference <= worst ? worst : difference;  // NaN is the worst
            largest = std::max(largest, std::abs(host[i]));
        }
        return worst / largest;
    }
};

std::vector<tokens::value_type> some_tokens(int count, std::uint32_t stream, int vocabulary) {
    std::vector<tokens::value_type> t(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < t.size(); ++i) {
        t[i] = static_cast<tokens::value_type>(
            tutti::random_stream{.seed = 3, .stream = stream}.below(i, static_cast<std::uint64_t>(vocabulary)));
    }
    return t;
}

}  // namespace

TEST_CASE_TEMPLATE("layer normalization, in warps, in blocks, and rows that are not aligned", T, float,
                   tutti::bfloat16) {
    tutti::test::require_device();
    const tutti::cuda_queue q(0);
    cuda_math<T> device(q);
    host_math<double> host;
    for (const int width : {1, 19, 64, 768, 1024, 1280, 1600, 2056, 8192, 8193, 12288}) {
        for (const int rows : {1, 5, 4801}) {
            if (width > 2000 && rows > 1000) { continue; }
            CAPTURE(width);
            CAPTURE(rows);
            pair_of<T> in(q, rows, width, 1, 2), gain(q, 1, width, 2), bias(q, 1, width, 3), out(q, rows, width, 4);
            pair_of<T> d_out(q, rows, width, 5), d_in(q, rows, width, 6), d_gain(q, 1, width, 7),
                d_bias(q, 1, width, 8);
            std::vector<row_statistics<double>> on_host(static_cast<std::size_t>(rows));
            const tutti::buffer<gpu::norm_statistics, tutti::cuda_queue> statistics(q, on_host.size());
            host.layer_norm(in.on_host(), gain.host.data(), bias.host.data(), out.on_host(), on_host.data());
            device.layer_norm(in.on_device(), gain.device.data(), bias.device.data(), out.on_device(),
                              statistics.data());
            if (width > 1) { CHECK(out.distance(q) <= bar<T>); }
            if (width > 8192) { continue; }  // forward alone
            for (const bool adds : {true, false}) {
                CAPTURE(adds);
                host.layer_norm_backward(d_out.on_host(), in.on_host(), gain.host.data(), on_host.data(),
                                         d_in.on_host(), adds, d_gain.host.data(), d_bias.host.data());
                device.layer_norm_backward(d_out.on_device(), in.on_device(), gain.device.data(), statistics.data(),
                                           d_in.on_device(), adds, d_gain.device.data(), d_bias.device.data());
                if (width > 1) {  // of a single number nothing is left but rounding
                    CHECK(d_in.distance(q) <= bar<T>);
                    CHECK(d_gain.distance(q) <= bar<T>);
                }
                CHECK(d_bias.distance(q) <= bar<T>);
            }
        }
    }
}

TEST_CASE_TEMPLATE("linear layers with bias, residual and GELU, forward and backward", T, float, tutti::bfloat16) {
    tutti::test::require_device();
    const tutti::cuda_queue q(0);
    cuda_math<T> device(q);
    host_math<double> host;
    struct extents {
        int rows, inputs, outputs;
    };
    for (const extents e : {extents{5, 7, 11}, {64, 128, 384}, {37, 96, 40}, {700, 256, 768}, {130, 33, 64}}) {
        CAPTURE(e.rows);
        CAPTURE(e.inputs);
        const float small = 1 / std::sqrt(static_cast<float>(e.inputs));
        pair_of<T> in(q, e.rows, e.inputs, 1), weight(q, e.inputs, e.outputs, 2, small), bias(q, 1, e.outputs, 3),
            residual(q, e.rows, e.outputs, 4), out(q, e.rows, e.outputs, 5), before(q, e.rows, e.outputs, 6);
        host.linear(in.on_host(), weight.on_host(), bias.host.data(), out.on_host());
        device.linear(in.on_device(), weight.on_device(), bias.device.data(), out.on_device());
        CHECK(out.distance(q) <= bar<T>);
        host.linear_onto(in.on_host(), weight.on_host(), bias.host.data(), residual.on_host(), out.on_host());
        device.linear_onto(in.on_device(), weight.on_device(), bias.device.data(), residual.on_device(),
                           out.on_device());
        CHECK(out.distance(q) <= bar<T>);
        host.linear_gelu(in.on_host(), weight.on_host(), bias.host.data(), before.on_host(), out.on_host());
        device.linear_gelu(in.on_device(), weight.on_device(), bias.device.data(), before.on_device(), out.on_device());
        CHECK(before.distance(q) <= bar<T>);
        CHECK(out.distance(q) <= bar<T>);
        tutti::fill(q, out.device.view(), static_cast<T>(0.0f));
        device.linear_gelu(in.on_device(), weight.on_device(), bias.device.data(), out.on_device(), out.on_device());
        CHECK(out.distance(q) <= bar<T>);

        pair_of<T> d_out(q, e.rows, e.outputs, 7), d_in(q, e.rows, e.inputs, 8), d_weight(q, e.inputs, e.outputs, 9),
            d_bias(q, 1, e.outputs, 10), at(q, e.rows, e.inputs, 11), hidden(q, e.rows, e.inputs, 12);
        host.linear_backward_input(d_out.on_host(), weight.on_host(), d_in.on_host());
        device.linear_backward_input(d_out.on_device(), weight.on_device(), d_in.on_device());
        CHECK(d_in.distance(q) <= bar<T>);
        host.linear_backward_input_gelu(d_out.on_host(), weight.on_host(), at.on_host(), hidden.on_host(),
                                        d_in.on_host());
        device.linear_backward_input_gelu(d_out.on_device(), weight.on_device(), at.on_device(), hidden.on_device(),
                                          d_in.on_device());
        CHECK(d_in.distance(q) <= bar<T>);
        host.linear_backward_weight(d_out.on_host(), in.on_host(), d_weight.on_host(), d_bias.host.data());
        device.linear_backward_weight(d_out.on_device(), in.on_device(), d_weight.on_device(), d_bias.device.data());
        CHECK(d_weight.distance(q) <= bar<T>);
        CHECK(d_bias.distance(q) <= bar<T>);
    }
}

TEST_CASE_TEMPLATE("embedding: both tables, tokens that repeat a lot or never", T, float, tutti::bfloat16) {
    tutti::test::require_device();
    const tutti::cuda_queue q(0);
    cuda_math<T> device(q);
    host_math<double> host;
    for (const int width : {7, 64, 768, 1600, 8192, 12288}) {
        for (const int vocabulary : {2, 200}) {
            CAPTURE(width);
            CAPTURE(vocabulary);
            const int length = 37, rows = 9 * length;
            const auto in = some_tokens(rows, 1, vocabulary);
            pair_of<T> token(q, vocabulary, width, 1), position(q, length + 3, width, 2), out(q, rows, width, 3);
            host.take(in, in, length);
            device.take(in, in, length);
            host.embed(token.on_host(), position.on_host(), out.on_host());
            device.embed(token.on_device(), position.on_device(), out.on_device());
            CHECK(out.distance(q) <= bar<T>);
            if (width > 8192) { continue; }  // forward alone
            pair_of<T> d_out(q, rows, width, 4);
            host.embed_backward(d_out.on_host(), token.on_host(), position.on_host());
            device.embed_backward(d_out.on_device(), token.on_device(), position.on_device());
            CHECK(token.distance(q) <= bar<T>);
            CHECK(position.distance(q) <= bar<T>);
        }
    }
    // Rows of documents: a position of its own for each, some often; and no rows at all.
    const int rows = 150, width = 64;
    const auto in = some_tokens(rows, 5, 30);
    std::vector<std::int64_t> places;
    for (int r = 0; r < rows; ++r) { places.push_back(r < 90 ? r % 11 : 40 - r % 3); }
    pair_of<T> token(q, 30, width, 1), position(q, 50, width, 2), out(q, rows, width, 3), d_out(q, rows, width, 4);
    host.take(in, in, places);
    device.take(in, in, places);
    host.embed(token.on_host(), position.on_host(), out.on_host());
    device.embed(token.on_device(), position.on_device(), out.on_device());
    CHECK(out.distance(q) <= bar<T>);
    host.embed_backward(d_out.on_host(), token.on_host(), position.on_host());
    device.embed_backward(d_out.on_device(), token.on_device(), position.on_device());
    CHECK(token.distance(q) <= bar<T>);
    CHECK(position.distance(q) <= bar<T>);
    device.take(tokens(), tokens(), std::span<const std::int64_t>());
    device.embed(token.on_device(), position.on_device(), out.on_device().top(0));
    device.embed_backward(d_out.on_device().top(0), token.on_device(), position.on_device());
    CHECK(token.distance(q) <= bar<T>);
    CHECK(position.distance(q) <= bar<T>);
}

TEST_CASE_TEMPLATE("classifier: padded vocabularies, the loss, gradients in place", T, float, tutti::bfloat16) {
    tutti::test::require_device();
    const tutti::cuda_queue q(0);
    cuda_math<T> device(q);
    host_math<double> host;
    for (const int vocabulary : {2, 31, 256, 5000, 50257, 60001}) {
        CAPTURE(vocabulary);
        const int rows = 70, width = 64;
        const int padding = (vocabulary + 127) / 128 * 128 - vocabulary;
        auto targets = some_tokens(rows, 2, vocabulary);
        targets[0] = targets[rows - 1] = no_target;
        pair_of<T> in(q, rows, width, 1), table(q, vocabulary, width, 2, 0.3f),
            logits(q, rows, vocabulary, 3, 1, padding), d_in(q, rows, width, 4),
            d_table(q, vocabulary, width, 5, 1e-3f);
        host.take(targets, targets, rows);
        device.take(targets, targets, rows);
        host.classify(in.on_host(), table.on_host(), logits.on_host());
        device.classify(in.on_device(), table.on_device(), logits.on_device());
        CHECK(logits.distance(q) <= bar<T>);
        // From here on from the device's logits, so that each check is of one step.
        const auto stored = logits.downloaded(q);
        for (std::size_t i = 0; i < stored.size(); ++i) {
            logits.host[i] = static_cast<double>(static_cast<float>(stored[i]));
        }
        auto kept = logits.host;
        const double loss = host.loss(logits.on_host());
        CHECK(device.loss(logits.on_device()) == doctest::Approx(loss).epsilon(1e-5));
        CHECK(device.take_loss() == 0);  // that is for training alone
        logits.host = kept;
        host.loss_and_gradient(logits.on_host(), 0.25);
        device.loss_and_gradient(logits.on_device(), 0.25f);
        CHECK(logits.distance(q) <= bar<T>);
        CHECK(device.take_loss() == doctest::Approx(loss).epsilon(1e-5));
        CHECK(host.take_loss() == doctest::Approx(loss).epsilon(1e-12));
        const auto gradient = logits.downloaded(q);
        bool padding_is_zero = true;
        for (std::size_t i = 0; i < gradient.size(); ++i) {
            const bool pads = static_cast<int>(i % static_cast<std::size_t>(logits.stride)) >= vocabulary;
            padding_is_zero = padding_is_zero && (!pads || static_cast<float>(gradient[i]) == 0);
        }
        CHECK(padding_is_zero);
        host.classify_backward_input(logits.on_host(), table.on_host(), d_in.on_host());
        device.classify_backward_input(logits.on_device(), table.on_device(), d_in.on_device());
        CHECK(d_in.distance(q) <= bar<T>);
        host.classify_backward_table(logits.on_host(), in.on_host(), d_table.on_host());
        device.classify_backward_table(logits.on_device(), in.on_device(), d_table.on_device());
        CHECK(d_table.distance(q) <= bar<T>);
    }
}

TEST_CASE_TEMPLATE("attention: any length and head width; by cuDNN where it can", T, float, tutti::bfloat16) {
    tutti::test::require_device();
    const tutti::cuda_queue q(0);
    cuda_math<T> device(q);
    host_math<double> host;
    for (const int head_width : {5, 16, 64, 128, 136}) {
        for (const int length : {1, 5, 32, 33, 100, 256}) {
            CAPTURE(head_width);
            CAPTURE(length);
            const attention_shape s{.batch = 3, .length = length, .heads = 2, .head_width = head_width};
            const int rows = s.batch * length, width = s.width();
            pair_of<T> qkv(q, rows, 3 * width, 1), out(q, rows, width, 2), d_out(q, rows, width, 3),
                d_qkv(q, rows, 3 * width, 4);
            std::vector<double> log_sums(static_cast<std::size_t>(rows * s.heads));
            const tutti::buffer<float, tutti::cuda_queue> on_device(q, log_sums.size());
            host.attention(s, qkv.on_host(), out.on_host(), log_sums.data());
            device.attention(s, qkv.on_device(), out.on_device(), on_device.data());
            CHECK(out.distance(q) <= bar<T>);
            std::vector<float> got(log_sums.size());
            tutti::download(q, on_device.view(), tutti::view<float>(got));
            double worst = 0;
            for (std::size_t i = 0; i < got.size(); ++i) {
                worst = std::max(worst, std::abs(static_cast<double>(got[i]) - log_sums[i]));
            }
            CHECK(worst <= 1e-4);
            host.attention_backward(s, d_out.on_host(), qkv.on_host(), out.on_host(), log_sums.data(), d_qkv.on_host());
            device.attention_backward(s, d_out.on_device(), qkv.on_device(), out.on_device(), on_device.data(),
                                      d_qkv.on_device());
            CHECK(d_qkv.distance(q) <= 2 * bar<T>);  // probabilities are stored in T in between
        }
    }
}

#if TRANSFORMER_WITH_CUDNN
TEST_CASE("cuDNN's attention agrees with this project's own, and with itself to the last bit") {
    tutti::test::require_device();
    const tutti::cuda_queue q(0);
    gpu::cudnn_attention cudnn(q);
    for (const int length : {64, 1000, 1024}) {
        CAPTURE(length);
        const attention_shape s{.batch = 2, .length = length, .heads = 12, .head_width = 64};
        const int rows = s.batch * length, width = s.width();
        pair_of<tutti::bfloat16> qkv(q, rows, 3 * width, 1), d_out(q, rows, width, 2), out(q, rows, width, 3),
            own(q, rows, width, 3), d_qkv(q, rows, 3 * width, 4), d_own(q, rows, 3 * width, 4);
        const std::size_t count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(s.heads);
        const tutti::buffer<float, tutti::cuda_queue> sums(q, count), own_sums(q, count), along(q, count);
        gpu::attention<tutti::bfloat16>(q, s, qkv.on_device(), own.on_device(), own_sums.data());
        gpu::attention_backward<tutti::bfloat16>(q, s, d_out.on_device(), qkv.on_device(), own.on_device(),
                                                 own_sums.data(), along.data(), d_own.on_device());
        const auto compare = [&](pair_of<tutti::bfloat16>& a, const pair_of<tutti::bfloat16>& b, double limit) {
            const auto values = b.downloaded(q);
            for (std::size_t i = 0; i < values.size(); ++i) {
                a.host[i] = static_cast<double>(static_cast<float>(values[i]));
            }
            CHECK(a.distance(q) <= limit);
        };
        std::vector<tutti::bfloat16> first;
        for (int run = 0; run < 2; ++run) {
            cudnn.forward(s, qkv.device.data(), out.device.data(), sums.data());
            compare(out, own, bar<tutti::bfloat16>);
            cudnn.backward(s, d_out.device.data(), qkv.device.data(), out.device.data(), sums.data(),
                           d_qkv.device.data());
            compare(d_qkv, d_own, 2 * bar<tutti::bfloat16>);
            const auto now = d_qkv.downloaded(q);
            if (run == 0) { first = now; }
            bool same = true;
            for (std::size_t i = 0; i < now.size(); ++i) { same = same && now[i].bits == first[i].bits; }
            CHECK(same);
        }
    }
}
#endif

TEST_CASE("more than 2^31 logits: the last row is as right as the first") {
    tutti::test::require_device();
    const tutti::cuda_queue q(0);
    const int rows = 42'800, columns = 50'257, stride = 50'304;
    std::size_t free_bytes = 0, all = 0;
    tutti::detail::check_cuda(cudaMemGetInfo(&free_bytes, &all), "cudaMemGetInfo");
    const std::size_t count = static_cast<std::size_t>(rows) * stride;
    REQUIRE(count > (std::size_t{1} << 31));
    if (free_bytes < 5 * (std::size_t{1} << 30)) { return; }
    const tutti::buffer<tutti::bfloat16, tutti::cuda_queue> storage(q, count);
    tutti::fill(q, storage.view(), static_cast<tutti::bfloat16>(0.0f));
    const matrix<tutti::bfloat16> logits(storage.data(), rows, columns, stride);
    const tutti::buffer<std::int32_t, tutti::cuda_queue> targets(q, static_cast<std::size_t>(rows));
    tutti::fill(q, targets.view(), 7);
    // The last row's target has a logit of 11, all others 0.
    tutti::fill(q, storage.view().sub(count - stride + 7, 1), static_cast<tutti::bfloat16>(11.0f));
    const tutti::buffer<float, tutti::cuda_queue> losses(q, static_cast<std::size_t>(rows));
    const tutti::buffer<double, tutti::cuda_queue> total(q, 1);
    tutti::fill(q, total.view(), 0.0);
    gpu::cross_entropy<tutti::bfloat16>(q, logits, targets.data(), true, 1.0f, losses.data(), total.data());
    const double uniform = std::log(50257.0), last = std::log(50256.0 + std::exp(11.0)) - 11;
    CHECK(tutti::fetch(q, losses.view(), 0.0f) == doctest::Approx(uniform).epsilon(1e-5));
    CHECK(tutti::fetch(q, losses.view().sub(losses.size() - 1, 1), 0.0f) == doctest::Approx(last).epsilon(1e-5));
    CHECK(tutti::fetch(q, total.view(), 0.0) == doctest::Approx((rows - 1) * uniform + last).epsilon(1e-6));
    const float gradient = tutti::fetch(q, storage.view().sub(count - stride + 7, 1), tutti::bfloat16{});
    CHECK(gradient == doctest::Approx(std::exp(-last) - 1).epsilon(1.0 / 128));
}
