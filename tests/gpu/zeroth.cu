// Weights moved along random directions on a device: the host's bits for every type, distribution, size, alignment and
// number of slices, and nothing written beside them; and whole runs.
#include <tutti/zeroth/in_memory.cuh>     // under test
#include <tutti/zeroth/perturbation.cuh>  // under test
#include <tutti/zeroth/replicate.hpp>     // under test

#include <cstring>  // memcmp
#include <vector>   // arrays

#include <doctest/doctest.h>  // checks

#include <tutti/comm/self.hpp>       // one rank
#include <tutti/core/buffer.hpp>     // storage
#include <tutti/optimize/adamw.hpp>  // moments

#include "device.hpp"          // require_device
#include "support/oracle.hpp"  // random_element

using namespace tutti;
using namespace tutti::zeroth;

namespace {

using D = device_memory;

// An array on the host and on the device.
template <class T> struct twin {
    std::vector<T> host;
    buffer<T, cuda_queue> device;
    twin(const cuda_queue& q, std::size_t n, std::uint64_t seed) : host(n), device(q, n) {
        for (std::size_t i = 0; i < n; ++i) { host[i] = static_cast<T>(0.02f * test::random_element<float>(seed, i)); }
        upload(q, view<const T>(host), device.view());
    }
    [[nodiscard]] std::size_t differing(const cuda_queue& q) const {
        std::vector<T> got(host.size());
        download(q, device.view(), view<T>(got));
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < got.size(); ++i) { wrong += std::memcmp(&got[i], &host[i], sizeof(T)) != 0; }
        return wrong;
    }
};

// Slices with gaps between them, beginning anywhere in their tensors and in the view.
std::vector<tensor_slice> slices_of(std::size_t n, std::size_t pieces, std::uint64_t seed) {
    std::vector<tensor_slice> all;
    const random_stream draws{seed, 0, 0};
    std::size_t at = draws.below(0, 9);
    for (std::size_t k = 0; k < pieces && at < n; ++k) {
        const std::size_t count = std::min(n - at, draws.below(4 * k + 1, 2 * n / pieces));
        const std::uint64_t first = draws.below(4 * k + 2, 1000) + (k % 3 == 0 ? std::uint64_t{1} << 33 : 0);
        all.push_back({.tensor = static_cast<std::uint32_t>(k * 7),
                       .first = first,
                       .offset = at,
                       .count = count,
                       .decayed = k % 2 == 0,
                       .frozen = k % 5 == 4});
        at += count + draws.below(4 * k + 3, 11);
    }
    return all;
}

std::vector<pending_update> updates_of(std::size_t steps, std::uint32_t directions, distribution kind) {
    std::vector<pending_update> all;
    for (std::uint64_t s = 0; s < steps; ++s) {
        for (std::uint32_t d = 0; d < directions; ++d) {
            all.push_back({{.seed = 99, .step = (std::uint64_t{1} << 32) - 2 + s, .index = d, .kind = kind},
                           static_cast<double>(s) * 0.3 - 1 + d,
                           1e-2 / static_cast<double>(1 + s),
                           d == 0 ? 0.1 : 0});
        }
    }
    return all;
}

template <class T> void same_as_host(std::size_t n, std::span<const tensor_slice> slices, distribution kind) {
    const cuda_queue q(0);
    const host_queue h;
    const direction z{.seed = 4, .step = 7, .kind = kind};
    twin<T> w(q, n, 1), out(q, n, 2);
    perturb(q, w.device.view(), out.device.view(), slices, z, 1e-3);
    perturb(h, view<T>(w.host), view<T>(out.host), slices, z, 1e-3);
    CHECK(out.differing(q) == 0);
    perturb(q, w.device.view(), w.device.view(), slices, z, -2e-3);  // in place
    perturb(h, view<T>(w.host), view<T>(w.host), slices, z, -2e-3);
    CHECK(w.differing(q) == 0);
    for (const auto& [steps, directions] : {std::pair{1, 1}, {3, 2}, {40, 3}}) {
        const auto updates = updates_of(static_cast<std::size_t>(steps), static_cast<std::uint32_t>(directions), kind);
        apply_updates(q, w.device.view(), slices, updates);
        apply_updates(h, view<T>(w.host), slices, updates);
        CHECK(w.differing(q) == 0);
        update_then_perturb(q, w.device.view(), out.device.view(), slices, updates, z, 1e-3);
        update_then_perturb(h, view<T>(w.host), view<T>(out.host), slices, updates, z, 1e-3);
        CHECK(w.differing(q) == 0);
        CHECK(out.differing(q) == 0);
        if (updates.size() > max_directions) { continue; }
        sum_directions(q, out.device.view(), slices, updates);
        sum_directions(h, view<T>(out.host), slices, updates);
        CHECK(out.differing(q) == 0);
    }
}

}  // namespace

TEST_CASE_TEMPLATE("perturbed copies and updates are the host's bits", T, float, double, float16, bfloat16) {
    test::require_device();
    for (const distribution kind : {distribution::normal, distribution::rademacher}) {
        CAPTURE(zeroth::name_of(kind));
        // Packed, and each alignment of the view and of the tensor.
        for (const std::size_t offset : {0, 1, 3, 4, 8}) {
            for (const std::size_t first : {0, 1, 4, 8}) {
                const tensor_slice s{.tensor = 3, .first = first, .offset = offset, .count = 20011};
                CAPTURE(offset);
                CAPTURE(first);
                same_as_host<T>(20040, {&s, 1}, kind);
            }
        }
        for (const std::size_t pieces : {1, 5, 32, 33, 100}) {
            CAPTURE(pieces);
            const std::size_t n = 30000;
            same_as_host<T>(n, slices_of(n, pieces, pieces), kind);
        }
        same_as_host<T>(100, {}, kind);
    }
}

TEST_CASE("more than 2^32 bytes, and twice the same") {
    test::require_device();
    const cuda_queue q(0);
    constexpr std::size_t n = (std::size_t{1} << 31) + 4096;
    const buffer<bfloat16, cuda_queue> w(q, n), out(q, n), again(q, n);
    fill(q, w.view(), bfloat16(1.0f));
    const tensor_slice s{.tensor = 1, .count = n};
    const direction z{.seed = 1, .step = 1};
    perturb(q, w.view(), out.view(), {&s, 1}, z, 0.5);
    perturb(q, w.view(), again.view(), {&s, 1}, z, 0.5);
    std::vector<bfloat16> tail(4096), tail_again(4096), expected(4096, bfloat16(1.0f));
    download(q, out.view().sub(n - 4096, 4096), view<bfloat16>(tail));
    download(q, again.view().sub(n - 4096, 4096), view<bfloat16>(tail_again));
    const tensor_slice last{.tensor = 1, .first = n - 4096, .count = 4096};
    perturb(host_queue(), view<bfloat16>(expected), view<bfloat16>(expected), {&last, 1}, z, 0.5);
    CHECK(test::same_bytes(tail, expected));
    CHECK(test::same_bytes(tail_again, expected));
}

namespace {

// Steps on a queue; the loss is the host's, of weights that were fetched. Losses, derivatives, weights and their hash.
template <class T, class Q, class Optimizer = no_optimizer>
std::vector<double> run_of(const Q& q, const estimator& how, applied when, Optimizer optimizer = {}) {
    constexpr std::size_t n = 5003;
    const std::vector<tensor_slice> slices{{.tensor = 0, .offset = 0, .count = 4000},
                                           {.tensor = 1, .offset = 4000, .count = 3, .decayed = false},
                                           {.tensor = 2, .offset = 4003, .count = 500, .frozen = true},
                                           {.tensor = 3, .offset = 4503, .count = 500}};
    std::vector<T> here(n);
    for (std::size_t i = 0; i < n; ++i) { here[i] = static_cast<T>(0.1f * test::random_element<float>(1, i)); }
    const buffer<T, Q> w(q, n);
    using M = typename Q::memory_type;
    const auto fetched = [&](view<const T, M> from) {
        if constexpr (Q::executes_inline) {
            std::copy(from.begin(), from.end(), here.begin());
        } else {
            download(q, from, view<T>(here));
        }
    };
    if constexpr (Q::executes_inline) {
        std::copy(here.begin(), here.end(), w.data());
    } else {
        upload(q, view<const T>(here), w.view());
    }
    const auto loss = [&](view<const T, M> weights, std::size_t micro_batch) {
        fetched(weights);
        double sum = 0;
        for (std::size_t i = 0; i < n; ++i) {
            const double d =
                static_cast<double>(static_cast<master_t<T>>(here[i])) - 0.01 * static_cast<double>(micro_batch);
            sum += d * d;
        }
        return loss_value{sum, 7};
    };
    in_memory weights(q, w.view(), slices, loss, when, optimizer);
    replicated driver(comm::self<Q>(q), weights, how, {.shards = 2, .micro_batches = 2});
    std::vector<double> out;
    for (int k = 0; k < 6; ++k) {
        const step_result r = driver.step(1e-4);
        out.push_back(r.loss_plus);
        out.push_back(r.loss_other);
        out.insert(out.end(), r.derivatives.begin(), r.derivatives.end());
    }
    weights.flush();
    fetched(w.view());
    for (const T x : here) { out.push_back(static_cast<double>(static_cast<master_t<T>>(x))); }
    const std::uint64_t hash = weights.hash();
    out.push_back(static_cast<double>(hash >> 32));
    out.push_back(static_cast<double>(hash & 0xffffffffu));
    return out;
}

}  // namespace

TEST_CASE_TEMPLATE("steps on a device have the host's bits", T, float, bfloat16) {
    test::require_device();
    const cuda_queue q(0);
    const host_queue h;
    for (const estimate sides : {estimate::two_sided, estimate::one_sided}) {
        const estimator how{.directions = 3, .sides = sides, .seed = 2, .weight_decay = 0.1};
        const auto expected = run_of<T>(h, how, applied::at_once);
        CHECK(test::same_bytes(run_of<T>(q, how, applied::at_once), expected));
        CHECK(test::same_bytes(run_of<T>(q, how, applied::with_next_probe), expected));
    }
    const estimator careful{.rule = update_rule::conservative, .draws = distribution::rademacher};
    CHECK(test::same_bytes(run_of<T>(q, careful, applied::at_once), run_of<T>(h, careful, applied::at_once)));
    if constexpr (std::same_as<T, float>) {
        const optimize::adamw adam{};
        CHECK(test::same_bytes(run_of<T>(q, {}, applied::at_once, adam), run_of<T>(h, {}, applied::at_once, adam)));
    }
}
