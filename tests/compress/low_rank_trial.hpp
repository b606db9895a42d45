// low_rank_trial: steps of PowerSGD by ranks that live in one process, and the same step in double.
// Needs compress/power_sgd and dense.hpp.
#pragma once

#include <algorithm>  // copy
#include <cstddef>    // size_t
#include <cstdint>    // seeds
#include <cstring>    // memcpy
#include <vector>     // ranks

#include <tutti/compress/power_sgd.hpp>  // under test

#include "dense.hpp"           // judge
#include "support/oracle.hpp"  // rows

namespace tutti::test {

using compress::draw_key;
using compress::power_sgd;
using compress::segment;

inline segment matrix_segment(std::uint32_t tensor, std::size_t rows, std::size_t cols, int level,
                              std::size_t offset = 0) {
    return {.tensor = tensor, .level = level, .offset = offset, .first = 0, .rows = rows, .cols = cols};
}

/// Ranks whose wires are summed in their order.
template <class T = float> struct low_rank_trial {
    host_queue queue;
    power_sgd scheme;
    std::vector<segment> segments;
    bool feedback = true;
    std::uint64_t seed = 1;
    std::uint32_t step_count = 0;
    std::vector<compress::power_sgd_state<host_queue>> states;
    rows<float> residuals;

    low_rank_trial(std::vector<segment> s, std::size_t ranks, std::size_t elements) : segments(std::move(s)) {
        for (std::size_t r = 0; r < ranks; ++r) { states.push_back(scheme.make_state(queue, segments)); }
        residuals.resize(ranks, std::vector<float>(elements));
    }
    /// For one matrix from element 0 on.
    low_rank_trial(std::size_t n, std::size_t m, int level, std::size_t ranks = 1)
        : low_rank_trial({matrix_segment(0, n, m, level)}, ranks, n * m) {}

    /// What each rank gets. The wires' sums are left in `sums`.
    rows<T> step(const rows<T>& gradients) {
        const std::size_t ranks = states.size();
        for (int round = 0; round < power_sgd::rounds; ++round) {
            const std::size_t count = compress::detail::wire_count(scheme, segments, round);
            sums.assign(count, 0.0f);
            for (std::size_t r = 0; r < ranks; ++r) {
                std::vector<float> wire(count, 1e9f);
                scheme.contribute(queue, segments, states[r], round, view<const T>(gradients[r]), residual(r), wire,
                                  draw_key{seed, step_count, static_cast<std::uint32_t>(r)});
                for (std::size_t i = 0; i < count; ++i) { sums[i] += wire[i]; }
            }
            for (std::size_t r = 0; r < ranks; ++r) {
                std::vector<float> wire = sums;
                scheme.absorb(queue, segments, states[r], round, wire, static_cast<int>(ranks));
            }
        }
        rows<T> out = gradients;
        for (std::size_t r = 0; r < ranks; ++r) {
            scheme.finish(queue, segments, states[r], view<const T>(gradients[r]), residual(r), view<T>(out[r]));
        }
        ++step_count;
        return out;
    }
    view<float> residual(std::size_t r) { return feedback ? view<float>(residuals[r]) : view<float>(); }

    /// The right factor of a tensor at rank 0, cols x capacity.
    [[nodiscard]] dense factor(std::size_t tensor = 0) const {
        const auto& entry = states[0].entries()[tensor];
        std::vector<float> q(entry.shape[0] * entry.shape[1]);
        std::memcpy(q.data(), entry.data.data(), entry.data.size());
        return transposed(dense(entry.shape[0], entry.shape[1], q.data()));
    }

    std::vector<float> sums;
};

/// One step on one matrix in double, as the paper states it, with a local residual.
struct low_rank_reference {
    dense out{0, 0}, factor{0, 0};
    std::vector<dense> residuals;

    /// x: what each rank compresses. before: the right factor; its columns of zeros are drawn from `draws`.
    low_rank_reference(const std::vector<dense>& x, dense before, std::size_t rank, random_stream draws) {
        const std::size_t n = x[0].rows, m = x[0].cols;
        dense q(m, rank);
        for (std::size_t j = 0; j < rank; ++j) {
            bool empty = true;
            for (std::size_t k = 0; k < m; ++k) { empty = empty && before(k, j) == 0; }
            for (std::size_t k = 0; k < m; ++k) {
                q(k, j) = empty ? static_cast<double>(draws.normal(j * m + k)) : before(k, j);
            }
        }
        q = orthonormal(q);
        dense p(n, rank);
        for (const dense& a : x) { p = plus(p, a * q, 1); }
        p = orthonormal(p);
        dense mean(m, rank);
        for (const dense& a : x) {
            const dense own = transposed(a) * p;
            mean = plus(mean, own, 1.0 / static_cast<double>(x.size()));
            residuals.push_back(plus(a, p * transposed(own), -1));
        }
        out = p * transposed(mean);
        factor = before;
        for (std::size_t j = 0; j < rank; ++j) {
            for (std::size_t k = 0; k < m; ++k) { factor(k, j) = mean(k, j); }
        }
    }
};

}  // namespace tutti::test
