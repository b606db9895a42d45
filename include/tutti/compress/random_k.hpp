// random_k: k random elements of each tensor, the same ones on all ranks, so that their values can be summed as they
// are and no index travels. Needs compress/detail/sparse_wire; on a CUDA queue compress/random_k.cuh.
// Source: Stich, Cordonnier and Jaggi, Sparsified SGD with memory, NeurIPS 2018; Wangni et al., Gradient sparsification
// for communication-efficient distributed optimization, NeurIPS 2018 (unbiased).
#pragma once

#include <algorithm>    // fill
#include <cstddef>      // size_t
#include <cstdint>      // purposes
#include <span>         // entries
#include <string_view>  // names
#include <type_traits>  // remove_const_t

#include <tutti/compress/compressor.hpp>          // segment, layout, draw_key
#include <tutti/compress/detail/magnitude.hpp>    // formed, sent_value
#include <tutti/compress/detail/sparse_wire.hpp>  // kept
#include <tutti/core/buffer.hpp>                  // the sum
#include <tutti/core/element.hpp>                 // floating_element
#include <tutti/core/elementwise.hpp>             // copy
#include <tutti/core/error.hpp>                   // usage_error
#include <tutti/core/exact.hpp>                   // the mean
#include <tutti/core/partition.hpp>               // cells
#include <tutti/core/philox.hpp>                  // random_stream
#include <tutti/core/run.hpp>                     // run, cost
#include <tutti/core/state.hpp>                   // state_entry
#include <tutti/core/text.hpp>                    // formatted
#include <tutti/core/view.hpp>                    // view

namespace tutti::compress {

namespace detail {

/// k distinct places of n. The places, turned by a random distance, are cut into k cells, as equal as can be; each
/// gives one of its own. A place is in a certain cell of c elements with a probability of c / n, and is chosen there
/// with 1 / c: over the k cells that is k / n, whatever n and k.
struct random_places {
    random_stream draws;
    std::size_t n = 0;
    std::size_t k = 0;
    std::size_t turn = 0;

    [[nodiscard]] static random_places of(draw_key key, const segment& s, std::size_t kept) noexcept {
        const random_stream places = key.shared().stream(s.tensor, 0x706c6163u);  // "plac"
        const random_stream turns = key.shared().stream(s.tensor, 0x7475726eu);   // "turn"
        return {places, s.size(), kept, static_cast<std::size_t>(turns.below(0, s.size()))};
    }
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr std::size_t operator[](std::size_t j) const noexcept {
        const part cell = partition(n, k, j);
        const std::size_t at = cell.first + static_cast<std::size_t>(draws.below(j, cell.count));
        return at < n - turn ? at + turn : at - (n - turn);
    }
};

/// wire = factor * x at the chosen places, NaN where anything of the segment is not finite; residual = x, finite.
template <class C, floating_element T, memory M> struct random_gather_operation {
    static constexpr std::string_view name = "random_k_contribute";
    C scheme;
    layout all;  ///< read while the call runs
    view<const T, M> in;
    view<float, M> residual;
    view<float, M> wire;
    draw_key key;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const double each = static_cast<double>(sizeof(T)) + (residual.empty() ? 0 : 8);
        return {elements_of(all) * each + 2.0 * static_cast<double>(wire.size_bytes()), elements_of(all)};
    }
    void operator()() const {
        float* to = wire.data();
        for (const segment& s : all) {
            const std::size_t k = scheme.wire_count(s, 0);
            if (k == 0) { continue; }
            const T* const from = in.data() + s.offset;
            float* const owed = residual.empty() ? nullptr : residual.data() + s.offset;
            const auto x = [&](std::size_t i) { return owed == nullptr ? formed(from[i]) : formed(from[i], owed[i]); };
            std::uint32_t most = 0;
            for (std::size_t i = 0; i < s.size(); ++i) {
                const float value = x(i);
                const std::uint32_t m = magnitude(value);
                most = most < m ? m : most;
                if (owed != nullptr) { owed[i] = m < infinite_magnitude ? value : 0; }
            }
            const auto places = random_places::of(key, s, k);
            const float factor = scheme.factor(s);
            for (std::size_t j = 0; j < k; ++j) {
                const std::size_t i = places[j];
                to[j] = most < infinite_magnitude ? factor * (owed == nullptr ? formed(from[i]) : owed[i])
                                                  : __builtin_bit_cast(float, infinite_magnitude | 0x400000u);
            }
            to += k;
        }
    }
};

[[nodiscard]] TUTTI_HOST_DEVICE inline float mean_of(float sum, float ranks) noexcept {
    return (exact(sum) / exact(ranks)).value;
}

/// out = zeros, and the means at the chosen places, where nothing is owed any longer.
template <class C, floating_element T, memory M> struct random_scatter_operation {
    static constexpr std::string_view name = "random_k_finish";
    C scheme;
    layout all;  ///< read while the call runs
    view<const float, M> sum;
    view<float, M> residual;
    view<T, M> out;
    draw_key key;
    float ranks;

    [[nodiscard]] tutti::cost cost() const noexcept {
        return {elements_of(all) * static_cast<double>(sizeof(T)) + 2.0 * static_cast<double>(sum.size_bytes()),
                static_cast<double>(sum.size())};
    }
    void operator()() const {
        const float* from = sum.data();
        for (const segment& s : all) {
            const std::size_t k = scheme.wire_count(s, 0);
            if (k == 0) { continue; }
            T* const to = out.data() + s.offset;
            std::fill(to, to + s.size(), T(0.0f));
            const auto places = random_places::of(key, s, k);
            for (std::size_t j = 0; j < k; ++j) {
                const std::size_t i = places[j];
                to[i] = static_cast<T>(mean_of(from[j], ranks));
                if (!residual.empty()) { residual.data()[s.offset + i] = 0; }
            }
            from += k;
        }
    }
};

}  // namespace detail

/// A linear_compressor (see the concept) of one round. `segment::level`: kept elements in 10,000.
///
/// Semantics    k as for top_k. The k places are distinct, drawn for each tensor and step from what all ranks share;
///              each element is chosen with a probability of k / size, exactly (up to size / 2^64, by which draws are
///              not uniform).
///   unbiased   false: values are sent as they are. |x - decoded|^2 is (1 - k / size) |x|^2 in the mean: a contraction,
///              for error feedback, with decoded + residual == x in every bit for one rank. true: they are multiplied
///              by size / k, so that the mean over all draws is x and the mean of |decoded|^2 is size / k |x|^2; what
///              this leaves would grow from step to step, so there is no residual.
/// Not finite   makes all that its segment sends NaN; the residual gets 0 in its place.
/// Determinism  a function of elements, seed, step and tensor. The same bits on host and device.
/// Cost         contribute reads x once and writes it where there is a residual; finish writes the output once.
/// Errors       usage_error for a level that is not in 1 to 10000, a segment that does not begin its tensor, sizes that
///              do not fit, a residual for an unbiased one, a layout that is larger than that of the state.
struct random_k {
    static constexpr std::string_view name = "random_k";
    static constexpr int rounds = 1;
    bool unbiased = false;

    /// Between the calls of a step. Nothing lasts from step to step.
    template <queue Q> class state_type {
        friend random_k;
        buffer<float, Q> sum_;
        draw_key key_{};
        int ranks_ = 1;

        state_type(Q q, std::size_t count) : sum_(q, count) {}

    public:
        [[nodiscard]] std::span<const state_entry<typename Q::memory_type>> entries() const noexcept { return {}; }
        void restored() const noexcept {}
    };

    [[nodiscard]] static std::size_t wire_count(const segment& s, int) { return detail::kept(name, s); }
    /// What values are multiplied by.
    [[nodiscard]] float factor(const segment& s) const {
        return unbiased ? static_cast<float>(static_cast<double>(s.size()) / static_cast<double>(wire_count(s, 0))) : 1;
    }

    template <queue Q> [[nodiscard]] state_type<Q> make_state(Q q, layout all) const {
        return {q, detail::wire_count(*this, all, 0)};
    }
    template <queue Q, class T, class M = typename Q::memory_type>
    void contribute(Q q, layout all, state_type<Q>& state, int round, view<T, M> in, view<float, M> residual,
                    view<float, M> wire, draw_key key) const {
        expect_round(round);
        expect_sizes(all, state, residual, in.size());
        detail::expect_size(name, "the wire", wire.size(), detail::wire_count(*this, all, 0));
        state.key_ = key;
        run(q,
            detail::random_gather_operation<random_k, std::remove_const_t<T>, M>{*this, all, in, residual, wire, key});
    }
    template <queue Q, class M = typename Q::memory_type>
    void absorb(Q q, layout all, state_type<Q>& state, int round, view<float, M> wire, int ranks) const {
        expect_round(round);
        const std::size_t count = detail::wire_count(*this, all, 0);
        detail::expect_size(name, "the wire", wire.size(), count);
        if (ranks < 1) { throw usage_error(formatted("random_k: {} ranks cannot have sent", ranks)); }
        copy(q, wire, state.sum_.view().sub(0, count));
        state.ranks_ = ranks;
    }
    template <queue Q, class U, floating_element T, class M = typename Q::memory_type>
    void finish(Q q, layout all, state_type<Q>& state, view<U, M>, view<float, M> residual, view<T, M> out) const {
        expect_sizes(all, state, residual, out.size());
        const std::size_t count = detail::wire_count(*this, all, 0);
        run(q, detail::random_scatter_operation<random_k, T, M>{*this, all, state.sum_.view().sub(0, count), residual,
                                                                out, state.key_, static_cast<float>(state.ranks_)});
    }

private:
    static void expect_round(int round) {
        if (round != 0) { throw usage_error(formatted("random_k: round {} of 1", round)); }
    }
    template <class S, class M>
    void expect_sizes(layout all, const S& state, view<float, M> residual, std::size_t elements) const {
        detail::expect_inside(name, all, elements);
        const std::size_t count = detail::wire_count(*this, all, 0);
        if (count > state.sum_.size()) {
            throw usage_error(formatted("random_k: {} kept elements for a state of {}: make it for the largest levels",
                                        count, state.sum_.size()));
        }
        if (residual.empty()) { return; }
        if (unbiased) {
            throw usage_error(
                "random_k: an unbiased one leaves more than it was given: without residual, or unbiased off");
        }
        detail::expect_size(name, "the residual", residual.size(), elements);
    }
};

}  // namespace tutti::compress
