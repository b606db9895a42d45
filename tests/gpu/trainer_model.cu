// The whole model on a GPU: twenty steps against the CPU in double, levels of recomputation and repetition to the bit.
#include "cuda/math.cuh"  // under test

#include <algorithm>  // max
#include <cmath>      // abs
#include <cstring>    // memcmp
#include <string>     // messages
#include <vector>     // results

#include <doctest/doctest.h>  // checks

#include <tutti/comm/self.hpp>               // one rank
#include <tutti/core/philox.hpp>             // tokens
#include <tutti/optimize/adamw.hpp>          // optimizer
#include <tutti/strategy/data_parallel.cuh>  // strategy

#include "device.hpp"     // require_device
#include "host_math.hpp"  // reference

namespace {

using namespace transformer;
using gpu::cuda_math;

[[maybe_unused]] const bool one_thread = (one_thread_per_rank(), true);

/// What a run leaves.
struct record {
    std::vector<double> losses;
    std::vector<std::vector<double>> gradients;  // of the first step, by tensor
    std::vector<double> values;                  // at the end
    std::vector<double> probabilities;           // of the token after a few, at the end
    std::vector<std::string> names;
};

/// Text with something to learn: each token is a function of the one before, most of the time.
std::vector<tokens::value_type> some_text(const configuration& c) {
    std::vector<tokens::value_type> text(5000);
    std::uint64_t last = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const auto r = tutti::random_stream{.seed = 8}.below(i, 1000);
        last = (r < 800 ? 7 * last + 3 : r) % static_cast<std::uint64_t>(c.vocabulary);
        text[i] = static_cast<tokens::value_type>(last);
    }
    return text;
}

/// `steps` steps of two micro-batches of `sequences` of `length` tokens.
template <class Math>
record train(const configuration& c, int sequences, int length, int steps, Math math, recompute level) {
    using Q = typename Math::queue_type;
    using T = typename Math::element;
    const Q queue = math.queue();
    model<Math> net(c, sequences, 1, std::move(math), level);
    tutti::strategy::local<tutti::optimize::adamw, T, Q> strategy{tutti::comm::self<Q>(queue)};
    strategy.attach(net.parameters());
    const auto text = some_text(c);
    const double scored = 2.0 * sequences * length;
    std::vector<tokens::value_type> in, targets;
    std::size_t at = 0;
    record r;
    const auto on_host = [&](auto view) {
        std::vector<T> copy(view.size());
        if constexpr (Q::executes_inline) {
            std::copy(view.begin(), view.end(), copy.begin());
        } else {
            tutti::download(queue, view, tutti::view<T>(copy));
        }
        std::vector<double> numbers(copy.size());
        for (std::size_t i = 0; i < copy.size(); ++i) { numbers[i] = static_cast<double>(copy[i]); }
        return numbers;
    };
    for (int step = 0; step < steps; ++step) {
        for (int m = 0; m < 2; ++m) {
            in.clear();
            targets.clear();
            for (int k = 0; k < sequences; ++k, at = (at + 411) % (text.size() - 200)) {
                for (int i = 0; i < length; ++i) {
                    in.push_back(text[at + static_cast<std::size_t>(i)]);
                    targets.push_back(text[at + static_cast<std::size_t>(i) + 1]);
                }
            }
            strategy.begin({m, 2});
            net.forward_training(strategy, in, targets, length, static_cast<typename Math::real>(1 / scored));
            net.backward(strategy);
        }
        if (step == 0) {
            for (std::size_t i = 0; i < net.parameters().size(); ++i) {
                r.gradients.push_back(on_host(strategy.gradient(i)));
                r.names.push_back(net.parameters()[i].name);
            }
        }
        (void)strategy.step({.learning_rate = 2e-3, .clip_norm = 1});
        r.losses.push_back(net.take_loss() / scored);
    }
    strategy.flush();
    r.values = on_host(net.values());
    const auto p = net.predict(strategy, tokens(in).first(static_cast<std::size_t>(std::min(5, length))));
    r.probabilities.assign(p.begin(), p.end());
    // What is scored without a gradient is what is trained on, up to the order in which a row's sum was made.
    net.forward_training(strategy, in, targets, length, 1);
    const double scored_alone = net.forward(strategy, in, targets, length);
    CHECK(net.take_loss() == doctest::Approx(scored_alone).epsilon(1e-6));
    return r;
}

template <class T> record on_gpu(const configuration& c, int length, int steps, recompute level = recompute::nothing) {
    return train(c, 3, length, steps, cuda_math<T>(tutti::cuda_queue(0)), level);
}

/// || a - b || / || b ||
double relative_distance(const std::vector<double>& a, const std::vector<double>& b) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < b.size(); ++i) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        norm += b[i] * b[i];
    }
    return std::sqrt(difference / norm);
}
/// Largest difference over the largest of b.
double largest_distance(const std::vector<double>& a, const std::vector<double>& b) {
    double difference = 0, largest = 0;
    for (std::size_t i = 0; i < b.size(); ++i) {
        difference = std::abs(a[i] - b[i]) <= difference ? difference : std::abs(a[i] - b[i]);
        largest = std::max(largest, std::abs(b[i]));
    }
    return difference / largest;
}

// One that all fused kernels take, and one that none takes.
const configuration even{.vocabulary = 256, .context = 64, .layers = 3, .heads = 2, .width = 128};
const configuration odd{.vocabulary = 31, .context = 40, .layers = 2, .heads = 3, .width = 33};

}  // namespace

TEST_CASE("twenty steps in float: the losses and gradients of the CPU's double") {
    tutti::test::require_device();
    for (const configuration& c : {even, odd}) {
        CAPTURE(c.width);
        const int length = c.context - 3;
        const record cpu = train(c, 3, length, 20, host_math<double>(), recompute::gelu);
        const record gpu = on_gpu<float>(c, length, 20);
        CHECK(cpu.losses.back() < 0.9 * cpu.losses.front());  // it learns, so the weights matter
        for (std::size_t i = 0; i < cpu.losses.size(); ++i) {
            CHECK(gpu.losses[i] == doctest::Approx(cpu.losses[i]).epsilon(1e-5));
        }
        for (std::size_t i = 0; i < cpu.gradients.size(); ++i) {
            CHECK_MESSAGE(largest_distance(gpu.gradients[i], cpu.gradients[i]) <= 1e-5, cpu.names[i]);
        }
        CHECK(largest_distance(gpu.probabilities, cpu.probabilities) <= 1e-3);
    }
}

// Every number that bfloat16 stores is off by up to 2^-9 of itself, 0.001 in the mean square. A gradient has passed a
// chain of about 8 stored activations a layer on the way forward and as many on the way back, 48 in three layers, whose
// errors add up in the square: sqrt(48) * 0.001 = 0.008. The bar is four times that, since errors of activations that
// were used more than once are not independent. The loss is a mean of logits' errors over hundreds of tokens.
TEST_CASE("twenty steps in bfloat16 stay as close to the CPU's double as roundings allow") {
    tutti::test::require_device();
    for (const configuration& c : {even, odd}) {
        CAPTURE(c.width);
        const int length = c.context - 3;
        const record cpu = train(c, 3, length, 20, host_math<double>(), recompute::gelu);
        const record gpu = on_gpu<tutti::bfloat16>(c, length, 20);
        CHECK(gpu.losses.front() == doctest::Approx(cpu.losses.front()).epsilon(1e-3));
        for (std::size_t i = 0; i < cpu.losses.size(); ++i) {
            CHECK(gpu.losses[i] == doctest::Approx(cpu.losses[i]).epsilon(1e-2));
        }
        for (std::size_t i = 0; i < cpu.gradients.size(); ++i) {
            CHECK_MESSAGE(relative_distance(gpu.gradients[i], cpu.gradients[i]) <= 0.032, cpu.names[i]);
        }
    }
}

TEST_CASE_TEMPLATE("recomputation and repetition change no bit", T, float, tutti::bfloat16) {
    tutti::test::require_device();
    for (const configuration& c : {even, odd}) {
        CAPTURE(c.width);
        const record kept = on_gpu<T>(c, c.context, 5);
        const record again = on_gpu<T>(c, c.context, 5);
        CHECK(kept.losses == again.losses);
        CHECK(kept.values == again.values);
        for (const recompute level : {recompute::gelu, recompute::norms}) {
            const record less = on_gpu<T>(c, c.context, 5, level);
            CHECK(less.losses == kept.losses);
            CHECK(less.gradients == kept.gradients);
            CHECK(less.values == kept.values);
        }
    }
}
