// power_sgd: gradients as products of two thin factors, found by one step of a power iteration that goes on from step
// to step. Needs compress/compressor and compress/orthogonalize; on a CUDA queue compress/power_sgd.cuh.
// Source: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019, algorithms 1 and 2.
#pragma once

#include <algorithm>    // min, lower_bound, sort
#include <cstddef>      // size_t
#include <cstdint>      // tensors
#include <optional>     // feedback
#include <span>         // layouts
#include <string_view>  // names of calls
#include <type_traits>  // type_identity, remove_const
#include <utility>      // exchange, move
#include <vector>       // places

#include <tutti/compress/compressor.hpp>       // segment, draw_key
#include <tutti/compress/detail/low_rank.hpp>  // operations
#include <tutti/compress/orthogonalize.hpp>    // orthogonalize
#include <tutti/core/buffer.hpp>               // storage
#include <tutti/core/elementwise.hpp>          // fill
#include <tutti/core/error.hpp>                // usage_error
#include <tutti/core/state.hpp>                // state_entry
#include <tutti/core/text.hpp>                 // formatted

namespace tutti::compress {

/// What PowerSGD keeps of each tensor: the right factor, with which the next step begins, and the factors of a step
/// that is under way.
///
/// Semantics    made by power_sgd::make_state. A new one is zeros, and columns of zeros are drawn at their next use; so
///              are those that a larger level adds. Columns that a smaller level does not use wait for a larger one.
/// Cost         level * (rows + 2 cols + 1) floats a tensor.
template <queue Q> class power_sgd_state {
    using M = typename Q::memory_type;
    friend class power_sgd;

    // The calls of a step that are done.
    enum class stage : unsigned char { none, contribute_0, absorb_0, contribute_1, absorb_1 };

    struct place {
        segment whole;  // as given to make_state
        std::size_t capacity = 0;
        std::size_t q = 0, p = 0, own = 0, poison = 0;  // where in the buffers
        stage done = stage::none;
        bool feedback = false;   // the step has a residual
        std::size_t rank = 0;    // of the step
        std::uint64_t call = 0;  // the last that named this tensor
    };

    std::vector<place> places_;  // by tensor
    buffer<float, Q> kept_, of_step_;
    std::vector<state_entry<M>> entries_;
    std::uint64_t calls_ = 0;

    power_sgd_state(Q q, std::vector<place> places, std::size_t kept, std::size_t of_step)
        : places_(std::move(places)), kept_(q, kept), of_step_(q, of_step) {
        fill(q, kept_.view(), 0.0f);
        for (const place& p : places_) {
            const std::size_t cols = p.whole.cols;
            entries_.push_back(state_of(formatted("power_sgd.{}", p.whole.tensor),
                                        kept_.view().sub(p.q, p.capacity * cols), ownership::replicated,
                                        {p.capacity, cols}));
        }
    }

    place& of(const segment& s) {
        const auto at = std::lower_bound(places_.begin(), places_.end(), s.tensor,
                                         [](const place& p, std::uint32_t t) { return p.whole.tensor < t; });
        if (at == places_.end() || at->whole.tensor != s.tensor) {
            throw usage_error(formatted("power_sgd: the state has no tensor {}", s.tensor));
        }
        if (at->whole.rows != s.rows || at->whole.cols != s.cols) {
            throw usage_error(formatted("power_sgd: tensor {} is {} x {}, in the state {} x {}", s.tensor, s.rows,
                                        s.cols, at->whole.rows, at->whole.cols));
        }
        return *at;
    }

public:
    /// The right factors, {largest level, cols} each: all that a bit-exact resume needs.
    [[nodiscard]] std::span<const state_entry<M>> entries() const noexcept { return entries_; }
    /// After the entries were written: a step that was under way is forgotten.
    void restored() noexcept {
        for (place& p : places_) { p.done = stage::none; }
    }
};

/// PowerSGD: a matrix M of n rows and m columns as P Q', of rank = min(level, n, m) columns each; two rounds.
///
/// Semantics
///   round 0     Q, orthonormalized, is the last step's; columns of zeros are drawn, the same on all ranks. Every rank
///               sends M Q; P is the sum, orthonormalized.
///   round 1     every rank sends M' P; Q is the sum divided by the number of ranks.
///   finish      out = P Q', the mean over the ranks of what each sent, P Q_i' with its own Q_i; residual = M - P Q_i'.
///               So a residual stays bounded. A difference to the mean would take in, step after step, by how much the
///               ranks' gradients differ.
///   tensors     whole matrices, `first` 0 and more than one column: vectors, and parts of tensors, are refused. Send
///               them uncompressed, as everything whose wire would not be much smaller than itself.
///   levels      may change from step to step, up to those the state was made with.
/// Not finite    an input that is not finite on any rank, or overflows, makes the tensor's `out` NaN on all ranks. The
///               residual becomes what it was before the step, up to rounding, and zero where that is not finite; the
///               factor is drawn anew.
/// Units         products, factors, wire and residual are float for every T.
/// Aliasing      out may be in; no other views overlap.
/// Determinism   of arguments alone, tensors one by one or together. The device adds in another order than the host:
///               they agree to rounding.
/// Cost          M is read three times: n m (2 sizeof(T) + 20) bytes with a residual, n m 3 sizeof(T) without;
///               6 n m rank flops, 8 with a residual. The wire: rank * (n + m) floats.
/// Errors        usage_error, before anything is written, for levels below 1 or above the state's, tensors that the
///               state does not have or has in another shape, views that do not fit, calls out of order.
class power_sgd {
public:
    static constexpr int rounds = 2;
    template <queue Q> using state_type = power_sgd_state<Q>;
    /// Of the draws of right factors.
    static constexpr std::uint32_t draw_purpose = 0x70736764;  // "psgd"

    /// Floats of one segment in round 0 (its left factor) or 1 (its right factor).
    [[nodiscard]] std::size_t wire_count(const segment& s, int round) const {
        expect_round(round);
        return rank_of(s) * (round == 0 ? s.rows : s.cols);
    }

    /// State for these tensors at their largest levels. Errors: usage_error also for a tensor that comes twice.
    template <queue Q> [[nodiscard]] power_sgd_state<Q> make_state(Q q, layout all) const {
        std::vector<typename power_sgd_state<Q>::place> places(all.size());
        for (std::size_t i = 0; i < all.size(); ++i) {
            places[i].whole = all[i];
            places[i].capacity = rank_of(all[i]);
        }
        std::sort(places.begin(), places.end(),
                  [](const auto& a, const auto& b) { return a.whole.tensor < b.whole.tensor; });
        std::size_t kept = 0;
        std::size_t of_step = 0;
        for (std::size_t i = 0; i < places.size(); ++i) {
            auto& p = places[i];
            if (i > 0 && places[i - 1].whole.tensor == p.whole.tensor) { refuse_twice(p.whole); }
            p.q = taken_from(kept, p.capacity * p.whole.cols);
            p.p = taken_from(of_step, p.capacity * p.whole.rows);
            p.own = taken_from(of_step, p.capacity * p.whole.cols);
            p.poison = taken_from(of_step, p.capacity);
        }
        return power_sgd_state<Q>(std::move(q), std::move(places), kept, of_step);
    }

    template <queue Q, class T>
    requires floating_element<std::remove_const_t<T>>
    void contribute(Q q, layout all, power_sgd_state<Q>& state, int round, view<T, typename Q::memory_type> in,
                    std::type_identity_t<view<float, typename Q::memory_type>> residual,
                    std::type_identity_t<view<float, typename Q::memory_type>> wire, draw_key key) const {
        using stage = typename power_sgd_state<Q>::stage;
        using M = typename Q::memory_type;
        using E = std::remove_const_t<T>;
        expect_round(round);
        expect_views("contribute", all, in, residual);
        if (overlaps(in.data(), in.size_bytes(), residual.data(), residual.size_bytes()) ||
            overlaps(in.data(), in.size_bytes(), wire.data(), wire.size_bytes()) ||
            overlaps(residual.data(), residual.size_bytes(), wire.data(), wire.size_bytes())) {
            throw usage_error("power_sgd: in, residual and wire of contribute overlap");
        }
        const bool feedback = !residual.empty();
        if (round == 1) {
            const auto matrices = taken<Q>(all, state, stage::absorb_0, stage::contribute_1, 1, wire, feedback);
            run(q, detail::right_product_operation<E, M>{matrices, in, residual});
            return;
        }
        auto matrices = taken<Q>(all, state, stage::none, stage::contribute_0, 0, wire, feedback);
        std::vector<tall_matrix<M>> right;
        for (auto& a : matrices) {
            a.draws = key.shared().stream(a.tensor, draw_purpose);
            right.push_back({a.q, a.q, a.cols, a.rank});
        }
        run(q, detail::draw_operation<M>{matrices});
        orthogonalize(q, std::span<const tall_matrix<M>>(right));
        run(q, detail::left_product_operation<E, M>{matrices, in, residual});
    }

    template <queue Q>
    void absorb(Q q, layout all, power_sgd_state<Q>& state, int round,
                std::type_identity_t<view<float, typename Q::memory_type>> wire, int ranks) const {
        using stage = typename power_sgd_state<Q>::stage;
        using M = typename Q::memory_type;
        expect_round(round);
        if (ranks < 1) { throw usage_error(formatted("power_sgd: absorb of {} ranks", ranks)); }
        if (round == 1) {
            const auto matrices = taken<Q>(all, state, stage::contribute_1, stage::absorb_1, 1, wire);
            run(q, detail::mean_factor_operation<M>{matrices, static_cast<float>(ranks)});
            return;
        }
        const auto matrices = taken<Q>(all, state, stage::contribute_0, stage::absorb_0, 0, wire);
        std::vector<tall_matrix<M>> left;
        for (const auto& a : matrices) { left.push_back({a.wire, a.p, a.rows, a.rank}); }
        orthogonalize(q, std::span<const tall_matrix<M>>(left));
    }

    template <queue Q, floating_element T>
    void finish(Q q, layout all, power_sgd_state<Q>& state,
                std::type_identity_t<view<const T, typename Q::memory_type>> in,
                std::type_identity_t<view<float, typename Q::memory_type>> residual,
                view<T, typename Q::memory_type> out) const {
        using stage = typename power_sgd_state<Q>::stage;
        using M = typename Q::memory_type;
        expect_views("finish", all, in, residual);
        detail::expect_size("power_sgd: finish", "out", out.size(), in.size());
        if (overlaps(out.data(), out.size_bytes(), residual.data(), residual.size_bytes()) ||
            (in.data() != out.data() && overlaps(in.data(), in.size_bytes(), out.data(), out.size_bytes()))) {
            throw usage_error("power_sgd: out of finish overlaps residual, or in without being it");
        }
        const auto matrices = taken<Q>(all, state, stage::absorb_1, stage::none, 1, {}, !residual.empty());
        run(q, detail::expand_operation<T, M>{matrices, in, residual, out});
    }

private:
    static void expect_round(int round) {
        if (round != 0 && round != 1) { throw usage_error(formatted("power_sgd: there is no round {}", round)); }
    }
    [[noreturn]] static void refuse_twice(const segment& s) {
        throw usage_error(formatted("power_sgd: tensor {} comes twice", s.tensor));
    }
    // The next `count` floats of a buffer: factors begin where packs of four can be read.
    static std::size_t taken_from(std::size_t& used, std::size_t count) {
        return std::exchange(used, used + (count + 3) / 4 * 4);
    }
    static std::size_t rank_of(const segment& s) {
        if (s.first != 0 || s.cols == 1) {
            throw usage_error(
                formatted("power_sgd: tensor {} comes as {} x {} from its element {} on, which is no whole "
                          "matrix of two columns or more: send it uncompressed",
                          s.tensor, s.rows, s.cols, s.first));
        }
        if (s.level < 1) {
            throw usage_error(
                formatted("power_sgd: tensor {} has level {}, expected a rank of 1 or more", s.tensor, s.level));
        }
        return std::min({s.rows, s.cols, static_cast<std::size_t>(s.level)});
    }
    template <class T, memory M>
    static void expect_views(std::string_view call, layout all, view<T, M> in, view<float, M> residual) {
        detail::expect_inside(formatted("power_sgd: {}", call), all, in.size());
        if (!residual.empty()) {
            detail::expect_size(formatted("power_sgd: {}", call), "residual", residual.size(), in.size());
        }
    }

    // The matrices of a call, for which their tensors must be at the stage `before`; they are at `after` then. A step
    // may begin at any time. `wire` is given for all calls but the last; `feedback` for those that have a residual.
    template <queue Q>
    static std::vector<detail::factored_matrix<typename Q::memory_type>> taken(
        layout all, power_sgd_state<Q>& state, typename power_sgd_state<Q>::stage before,
        typename power_sgd_state<Q>::stage after, int round, view<float, typename Q::memory_type> wire,
        std::optional<bool> feedback = {}) {
        using stage = typename power_sgd_state<Q>::stage;
        const bool begins = before == stage::none;
        const bool ends = after == stage::none;
        ++state.calls_;
        std::size_t count = 0;
        for (const segment& s : all) {
            const std::size_t r = rank_of(s);
            auto& p = state.of(s);
            if (p.call == state.calls_) { refuse_twice(s); }
            p.call = state.calls_;
            if (r > p.capacity) {
                throw usage_error(formatted("power_sgd: tensor {} at rank {}, but its state was made for {}", s.tensor,
                                            r, p.capacity));
            }
            if (!begins && (p.done != before || p.rank != r || (feedback && *feedback != p.feedback))) {
                throw usage_error(formatted(
                    "power_sgd: tensor {} at rank {}: a step is contribute, absorb, contribute, absorb and finish, of "
                    "one level, with a residual in all of them or in none",
                    s.tensor, r));
            }
            count += r * (round == 0 ? s.rows : s.cols);
        }
        if (!ends) { detail::expect_size("power_sgd", "wire", wire.size(), count); }

        std::vector<detail::factored_matrix<typename Q::memory_type>> matrices;
        matrices.reserve(all.size());
        std::size_t at = 0;
        for (const segment& s : all) {
            auto& p = state.of(s);
            p.done = after;
            p.rank = rank_of(s);
            if (begins) { p.feedback = *feedback; }
            if (p.rank == 0) { continue; }
            const auto kept = state.kept_.view();
            const auto of_step = state.of_step_.view();
            detail::factored_matrix<typename Q::memory_type> a;
            a.offset = s.offset;
            a.rows = s.rows;
            a.cols = s.cols;
            a.rank = static_cast<int>(p.rank);
            a.tensor = s.tensor;
            a.q = kept.sub(p.q, p.rank * s.cols);
            a.p = of_step.sub(p.p, p.rank * s.rows);
            a.own = of_step.sub(p.own, p.rank * s.cols);
            a.poison = of_step.sub(p.poison, p.rank);
            if (!ends) {
                a.wire = wire.sub(at, p.rank * (round == 0 ? s.rows : s.cols));
                at += a.wire.size();
            }
            matrices.push_back(a);
        }
        return matrices;
    }
};

}  // namespace tutti::compress
