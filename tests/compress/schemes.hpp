// Small compressors of each kind for tests of the collectives: plain loops on host memory, easy to check by eye.
// Needs compress/compressor. They keep to the contract; nothing here is fast.
#pragma once

#include <algorithm>  // nth_element, clamp
#include <cmath>      // floor, isfinite, fabs
#include <cstddef>    // size_t
#include <cstdint>    // codes
#include <cstring>    // memcpy
#include <limits>     // NaN
#include <numeric>    // iota
#include <vector>     // scratch

#include <tutti/compress/compressor.hpp>  // the concepts
#include <tutti/core/buffer.hpp>          // state
#include <tutti/core/state.hpp>           // entries

namespace tutti::test {

using compress::draw_key;
using compress::layout;
using compress::segment;
template <class T> using host = view<T, host_memory>;

/// Max-min quantization in buckets of 32, to `level` bits, codes kept in whole bytes: 8 bytes a bucket and 1 an element.
struct bucketed {
    static constexpr std::size_t bucket = 32;
    bool stochastic = false;

    [[nodiscard]] std::size_t granularity() const { return bucket; }
    [[nodiscard]] std::size_t wire_bytes(const segment& s) const {
        if (s.level < 1 || s.level > 8) { throw usage_error(formatted("bucketed: {} bits", s.level)); }
        return compress::aligned_wire((s.size() + bucket - 1) / bucket * 8 + s.size());
    }

    template <class Q, class T>
    void encode(Q, layout all, host<const T> in, host<float> residual, host<std::byte> wire, draw_key key) const {
        std::size_t at = 0;
        for (const segment& s : all) {
            const std::size_t n = s.size();
            const std::size_t buckets = (n + bucket - 1) / bucket;
            std::byte* const out = wire.sub(at, wire_bytes(s)).data();
            std::fill_n(out, wire_bytes(s), std::byte{});
            const auto noise = key.stream(s.tensor, 7);
            for (std::size_t b = 0; b < buckets; ++b) {
                const std::size_t end = std::min(n, (b + 1) * bucket);
                std::vector<float> x;
                for (std::size_t i = b * bucket; i < end; ++i) {
                    x.push_back(static_cast<float>(in[s.offset + i]) +
                                (residual.empty() ? 0.0f : residual[s.offset + i]));
                }
                float low = *std::min_element(x.begin(), x.end());
                float unit = (*std::max_element(x.begin(), x.end()) - low) / static_cast<float>((1 << s.level) - 1);
                const bool finite = std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
                if (!finite) { low = unit = std::numeric_limits<float>::quiet_NaN(); }
                std::memcpy(out + 8 * b, &low, 4);
                std::memcpy(out + 8 * b + 4, &unit, 4);
                for (std::size_t i = b * bucket; i < end; ++i) {
                    const float v = x[i - b * bucket];
                    int code = 0;
                    if (finite && unit > 0) {
                        const float up = stochastic ? noise.uniform(s.first + i) : 0.5f;
                        code = std::clamp(static_cast<int>(std::floor((v - low) / unit + up)), 0, (1 << s.level) - 1);
                    }
                    out[8 * buckets + i] = static_cast<std::byte>(code);
                    if (!residual.empty()) {
                        residual[s.offset + i] = finite ? v - (low + unit * static_cast<float>(code)) : 0.0f;
                    }
                }
            }
            at += wire_bytes(s);
        }
    }
    template <class Q, class T>
    void decode(Q, layout all, host<const std::byte> wire, host<T> out, float factor) const {
        each(all, wire, [&](std::size_t i, float v) { out[i] = static_cast<T>(factor * v); });
    }
    template <class Q>
    void decode_add(Q, layout all, host<const std::byte> wires, std::size_t count, host<float> total) const {
        for (std::size_t k = 0; k < count; ++k) {
            const std::size_t one = wires.size() / count;
            each(all, wires.sub(k * one, one), [&](std::size_t i, float v) { total[i] += v; });
        }
    }

private:
    template <class F> void each(layout all, host<const std::byte> wire, F f) const {
        std::size_t at = 0;
        for (const segment& s : all) {
            const std::byte* const from = wire.sub(at, wire_bytes(s)).data();
            const std::size_t buckets = (s.size() + bucket - 1) / bucket;
            for (std::size_t i = 0; i < s.size(); ++i) {
                float low = 0;
                float unit = 0;
                std::memcpy(&low, from + 8 * (i / bucket), 4);
                std::memcpy(&unit, from + 8 * (i / bucket) + 4, 4);
                f(s.offset + i, low + unit * static_cast<float>(from[8 * buckets + i]));
            }
            at += wire_bytes(s);
        }
    }
};

/// The largest `level` in 10,000 elements of a tensor, at least one: index and value, 8 bytes each.
struct largest {
    [[nodiscard]] std::size_t granularity() const { return 0; }
    [[nodiscard]] static std::size_t kept(const segment& s) {
        return std::min(s.size(), std::max<std::size_t>(1, s.size() * static_cast<std::size_t>(s.level) / 10000));
    }
    [[nodiscard]] std::size_t wire_bytes(const segment& s) const { return compress::aligned_wire(8 * kept(s)); }

    template <class Q, class T>
    void encode(Q, layout all, host<const T> in, host<float> residual, host<std::byte> wire, draw_key) const {
        std::size_t at = 0;
        for (const segment& s : all) {
            std::vector<float> x(s.size());
            std::vector<std::uint32_t> order(s.size());
            std::iota(order.begin(), order.end(), 0u);
            for (std::size_t i = 0; i < s.size(); ++i) {
                x[i] = static_cast<float>(in[s.offset + i]) + (residual.empty() ? 0.0f : residual[s.offset + i]);
                if (!residual.empty()) { residual[s.offset + i] = x[i]; }
            }
            std::stable_sort(order.begin(), order.end(),
                             [&](auto a, auto b) { return std::fabs(x[a]) > std::fabs(x[b]); });
            std::byte* const out = wire.sub(at, wire_bytes(s)).data();
            std::fill_n(out, wire_bytes(s), std::byte{});
            for (std::size_t k = 0; k < kept(s); ++k) {
                std::memcpy(out + 8 * k, &order[k], 4);
                std::memcpy(out + 8 * k + 4, &x[order[k]], 4);
                if (!residual.empty()) { residual[s.offset + order[k]] = 0; }
            }
            at += wire_bytes(s);
        }
    }
    template <class Q, class T>
    void decode(Q q, layout all, host<const std::byte> wire, host<T> out, float factor) const {
        std::vector<float> total(out.size());
        decode_add(q, all, wire, 1, host<float>(total));
        for (const segment& s : all) {
            for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) { out[i] = static_cast<T>(factor * total[i]); }
        }
    }
    template <class Q>
    void decode_add(Q, layout all, host<const std::byte> wires, std::size_t count, host<float> total) const {
        std::size_t at = 0;
        for (std::size_t w = 0; w < count; ++w) {
            for (const segment& s : all) {
                for (std::size_t k = 0; k < kept(s); ++k) {
                    std::uint32_t index = 0;
                    float value = 0;
                    std::memcpy(&index, wires.sub(at + 8 * k, 4).data(), 4);
                    std::memcpy(&value, wires.sub(at + 8 * k + 4, 4).data(), 4);
                    total[s.offset + index] += value;
                }
                at += wire_bytes(s);
            }
        }
    }
};

/// Linear, in two rounds: every `level`-th element, from one on that all ranks draw alike; the first half of them in
/// round 0, the others in round 1.
struct sampled {
    static constexpr int rounds = 2;

    template <class Q> struct state_type {
        std::vector<std::vector<float>> means;  // by round: what arrived
        std::size_t shift = 0;
        [[nodiscard]] std::span<const state_entry<host_memory>> entries() const { return {}; }
        void restored() {}
    };
    template <class Q> [[nodiscard]] state_type<Q> make_state(Q, layout) const { return {{{}, {}}, 0}; }

    [[nodiscard]] static std::size_t kept(const segment& s) {
        return s.size() / static_cast<std::size_t>(s.level);  // whole strides
    }
    [[nodiscard]] std::size_t wire_count(const segment& s, int round) const {
        return round == 0 ? kept(s) / 2 : kept(s) - kept(s) / 2;
    }
    [[nodiscard]] static std::size_t place(const segment& s, std::size_t k, std::size_t shift) {
        const auto stride = static_cast<std::size_t>(s.level);
        return s.offset + k * stride + shift % stride;
    }
    template <class Q, class T>
    void contribute(Q, layout all, state_type<Q>& state, int round, host<const T> in, host<float> residual,
                    host<float> wire, draw_key key) const {
        if (round == 0) {
            state.shift = static_cast<std::size_t>(key.shared().stream(0, 3).below(0, 1000));
            for (const segment& s : all) {
                for (std::size_t i = s.offset; i < s.offset + s.size() && !residual.empty(); ++i) {
                    residual[i] += static_cast<float>(in[i]);
                }
            }
        }
        std::size_t at = 0;
        for (const segment& s : all) {
            for (std::size_t k = 0; k < wire_count(s, round); ++k) {
                const std::size_t i = place(s, k + (round == 0 ? 0 : kept(s) / 2), state.shift);
                wire[at++] = residual.empty() ? static_cast<float>(in[i]) : residual[i];
            }
        }
    }
    template <class Q>
    void absorb(Q, layout, state_type<Q>& state, int round, host<const float> wire, int ranks) const {
        auto& means = state.means[static_cast<std::size_t>(round)];
        means.assign(wire.begin(), wire.end());
        for (float& v : means) { v /= static_cast<float>(ranks); }
    }
    template <class Q, class T>
    void finish(Q, layout all, state_type<Q>& state, host<const std::type_identity_t<T>>, host<float> residual,
                host<T> out) const {
        std::size_t read[2] = {0, 0};
        for (const segment& s : all) {
            for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) { out[i] = T{}; }
            for (std::size_t k = 0; k < kept(s); ++k) {
                const std::size_t round = k < kept(s) / 2 ? 0 : 1;
                const std::size_t i = place(s, k, state.shift);
                out[i] = static_cast<T>(state.means[round][read[round]++]);
                if (!residual.empty()) { residual[i] = 0; }
            }
        }
    }
};

static_assert(compress::compressor<bucketed, host_queue> && compress::compressor<bucketed, host_queue, bfloat16>);
static_assert(compress::compressor<largest, host_queue>);
static_assert(compress::linear_compressor<sampled, host_queue>);

}  // namespace tutti::test
