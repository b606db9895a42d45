// A model with a layer of every kind that is cut over ranks, solved by one process's direct loops in double, and by the
// layers under test on any queue. Needs parallel/{linear,vocabulary}; on a CUDA queue their device sides.
#pragma once

#include <algorithm>    // copy, fill, max
#include <cmath>        // exp, fabs, log, tanh
#include <cstddef>      // size_t
#include <cstdint>      // words
#include <cstring>      // memcmp
#include <string_view>  // names
#include <type_traits>  // element types
#include <utility>      // move
#include <vector>       // tensors

#include <tutti/core/buffer.hpp>                        // tensors of a rank
#include <tutti/core/element.hpp>                       // master_t
#include <tutti/parallel/linear.hpp>                    // under test
#include <tutti/parallel/tensor_group.hpp>              // under test
#include <tutti/parallel/vocabulary.hpp>                // under test
#include <tutti/parallel/vocabulary_cross_entropy.hpp>  // likewise

#include <support/failure.hpp>  // expect
#include <support/oracle.hpp>   // random_element

namespace tutti::test {

using numbers = std::vector<double>;
using words = std::vector<std::int32_t>;

inline numbers drawn(std::uint64_t seed, std::size_t count, double scale) {
    numbers v(count);
    for (std::size_t i = 0; i < count; ++i) { v[i] = scale * random_element<double>(seed, i); }
    return v;
}

// A residual block between an embedding and logits by the same table, with parameters of every kind.
struct model {
    std::size_t vocabulary, width, inner;
    numbers table, gain, in_weight, in_bias, out_weight, out_bias;
    model(std::size_t v, std::size_t w, std::size_t f)
        : vocabulary(v)
        , width(w)
        , inner(f)
        , table(drawn(1, v * w, 1))
        , gain(drawn(2, w, 1))
        , in_weight(drawn(3, f * w, 0.3))
        , in_bias(drawn(4, f, 0.5))
        , out_weight(drawn(5, w * f, 0.3))
        , out_bias(drawn(6, w, 0.5)) {}
};

// The loss is the mean over targets that are words.
inline double solve(const model& m, const words& in, const words& targets, model& d) {
    for (numbers* g : {&d.table, &d.gain, &d.in_weight, &d.in_bias, &d.out_weight, &d.out_bias}) {
        std::fill(g->begin(), g->end(), 0.0);
    }
    double valid = 0;
    for (const auto t : targets) { valid += t >= 0 ? 1 : 0; }
    double loss = 0;
    const std::size_t h = m.width;
    const std::size_t f = m.inner;
    for (std::size_t i = 0; i < in.size(); ++i) {
        const double* const x = &m.table[static_cast<std::size_t>(in[i]) * h];
        numbers u(h), s(f), y(h), logit(m.vocabulary);
        for (std::size_t j = 0; j < h; ++j) { u[j] = m.gain[j] * x[j]; }
        for (std::size_t k = 0; k < f; ++k) {
            double a = m.in_bias[k];
            for (std::size_t j = 0; j < h; ++j) { a += m.in_weight[k * h + j] * u[j]; }
            s[k] = std::tanh(a);
        }
        for (std::size_t j = 0; j < h; ++j) {
            y[j] = x[j] + m.out_bias[j];
            for (std::size_t k = 0; k < f; ++k) { y[j] += m.out_weight[j * f + k] * s[k]; }
        }
        if (targets[i] < 0) { continue; }
        double total = 0;
        for (std::size_t v = 0; v < m.vocabulary; ++v) {
            for (std::size_t j = 0; j < h; ++j) { logit[v] += m.table[v * h + j] * y[j]; }
            total += std::exp(logit[v]);
        }
        loss += (std::log(total) - logit[static_cast<std::size_t>(targets[i])]) / valid;
        numbers dy(h), du(h), dx(h);
        for (std::size_t v = 0; v < m.vocabulary; ++v) {
            const double p = std::exp(logit[v]) / total;
            const double g = (p - (static_cast<std::int32_t>(v) == targets[i] ? 1 : 0)) / valid;
            for (std::size_t j = 0; j < h; ++j) {
                dy[j] += g * m.table[v * h + j];
                d.table[v * h + j] += g * y[j];
            }
        }
        for (std::size_t j = 0; j < h; ++j) {
            dx[j] = dy[j];
            d.out_bias[j] += dy[j];
        }
        for (std::size_t k = 0; k < f; ++k) {
            double ds = 0;
            for (std::size_t j = 0; j < h; ++j) {
                ds += m.out_weight[j * f + k] * dy[j];
                d.out_weight[j * f + k] += dy[j] * s[k];
            }
            const double da = ds * (1 - s[k] * s[k]);
            d.in_bias[k] += da;
            for (std::size_t j = 0; j < h; ++j) {
                du[j] += m.in_weight[k * h + j] * da;
                d.in_weight[k * h + j] += da * u[j];
            }
        }
        for (std::size_t j = 0; j < h; ++j) {
            d.gain[j] += du[j] * x[j];
            d.table[static_cast<std::size_t>(in[i]) * h + j] += dx[j] + du[j] * m.gain[j];
        }
    }
    return loss;
}

// Rows [first, first + count) of a table of `width` columns; those behind its end are padding.
inline numbers rows_of(const numbers& table, std::size_t width, part p, double padding) {
    numbers out(p.count * width, padding);
    for (std::size_t i = 0; i < out.size() && p.first * width + i < table.size(); ++i) {
        out[i] = table[p.first * width + i];
    }
    return out;
}
inline numbers columns_of(const numbers& table, std::size_t width, part p) {
    numbers out;
    for (std::size_t at = 0; at < table.size(); at += width) {
        for (std::size_t j = 0; j < p.count; ++j) { out.push_back(table[at + p.first + j]); }
    }
    return out;
}
inline void expect_close(const numbers& got, const numbers& reference, const numbers& whole, double bar,
                         std::string_view what) {
    double most = 0;
    for (const double x : whole) { most = std::max(most, std::fabs(x)); }
    for (std::size_t i = 0; i < reference.size(); ++i) {
        expect(std::fabs(got[i] - reference[i]) <= bar * most, "{}[{}]: {} is not {}", what, i, got[i], reference[i]);
    }
}

struct problem {
    model parameters;
    words in, targets;
    model gradient;
    double loss;
    /// Of parameters rounded to T.
    template <class T> static problem of(model m, std::size_t rows) {
        for (numbers* v : {&m.table, &m.gain, &m.in_weight, &m.in_bias, &m.out_weight, &m.out_bias}) {
            for (double& x : *v) { x = static_cast<double>(static_cast<T>(x)); }
        }
        return {m, rows};
    }
    problem(const model& m, std::size_t rows) : parameters(m), gradient(m) {
        for (std::size_t i = 0; i < rows; ++i) {
            in.push_back(static_cast<std::int32_t>(mixed(i) % m.vocabulary));
            targets.push_back(i % 5 == 3 ? -1 : static_cast<std::int32_t>(mixed(i + 999) % m.vocabulary));
        }
        in[0] = static_cast<std::int32_t>(m.vocabulary - 1);  // the last word, which is near the padding
        targets[0] = in[0];
        loss = solve(parameters, in, targets, gradient);
    }
};

// A rank's tensors, where its queue works.
template <class T, queue Q> class tensors_on {
    using M = typename Q::memory_type;
    Q queue_;

public:
    explicit tensors_on(Q q) : queue_(std::move(q)) {}
    [[nodiscard]] const Q& queue() const { return queue_; }
    template <class U> [[nodiscard]] buffer<T, Q> of(const std::vector<U>& values) const {
        std::vector<T> v;
        for (const U x : values) { v.push_back(static_cast<T>(x)); }
        buffer<T, Q> b(queue_, v.size());
        if constexpr (Q::executes_inline) {
            std::copy(v.begin(), v.end(), b.data());
        } else if (!v.empty()) {
            upload(queue_, view<const T>(v), b.view());
        }
        return b;
    }
    [[nodiscard]] buffer<T, Q> zeros(std::size_t count) const { return of(numbers(count)); }
    [[nodiscard]] std::vector<T> bits(const buffer<T, Q>& b) const {
        std::vector<T> v(b.size());
        if constexpr (Q::executes_inline) {
            std::copy(b.data(), b.data() + b.size(), v.begin());
        } else if (!v.empty()) {
            download(queue_, b.view(), view<T>(v));
        }
        return v;
    }
    [[nodiscard]] numbers values(const buffer<T, Q>& b) const {
        const auto v = bits(b);
        numbers n;
        for (const T x : v) { n.push_back(static_cast<double>(x)); }
        return n;
    }
    void expect_same_bits(const buffer<T, Q>& a, const buffer<T, Q>& b, std::string_view what) const {
        const auto x = bits(a), y = bits(b);
        expect(x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0),
               "{}: two calls have other bits than one", what);
    }
};

// The problem on a rank that has its part of each layer. Everything between layers is done on the host.
template <class T, communicator C, class Products>
void expect_solved(const problem& p, C c, const parallel::tensor_options& o, const Products& products, double bar) {
    using namespace parallel;
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using R = master_t<T>;
    using in = view<const T, M>;
    const model& m = p.parameters;
    const std::size_t rows = p.in.size(), h = m.width;
    tensor_group<C> group(std::move(c), o);
    const Q q = group.queue();
    const tensors_on<T, Q> on(q);
    const vocabulary_share share(group, m.vocabulary, 4);
    vocabulary_embedding<C, T> embedding(group, share, h);
    column_linear<C, T, Products> up(group, h, m.inner, products);
    row_linear<C, T, Products> down(group, m.inner, h, products);
    column_linear<C, T, Products> head(group, h, share.padded, products);
    vocabulary_cross_entropy<C, T> entropy(group, share);

    const part own = group.feature_share(m.inner, "features");
    const part own_words{share.first, share.count};
    const auto list = tensors_on<std::int32_t, Q>(q).of(p.in), targets = tensors_on<std::int32_t, Q>(q).of(p.targets);
    const auto table = on.of(rows_of(m.table, h, own_words, 1e3));  // padding that would be noticed
    const auto in_weight = on.of(rows_of(m.in_weight, h, own, 0)), in_bias = on.of(rows_of(m.in_bias, 1, own, 0));
    const auto out_weight = on.of(columns_of(m.out_weight, m.inner, own)), out_bias = on.of(m.out_bias);
    const std::size_t outer = group.outer_rows(rows);

    const auto x = on.zeros(outer * h), a = on.zeros(rows * own.count), y = on.zeros(outer * h);
    const auto logits = on.zeros(rows * share.count);
    const auto loss = tensors_on<double, Q>(q).zeros(rows);
    const auto normalizer = tensors_on<R, Q>(q).zeros(rows);
    embedding.forward(list.view(), table.view(), x.view());
    const numbers x_values = on.values(x);
    numbers u_values(x_values);
    for (std::size_t i = 0; i < u_values.size(); ++i) { u_values[i] *= m.gain[i % h]; }
    const auto u = on.of(u_values);
    up.forward(rows, u.view(), in_weight.view(), in_bias.view(), a.view());
    numbers s_values = on.values(a);
    for (double& v : s_values) { v = std::tanh(v); }
    const auto s = on.of(s_values);
    down.forward(rows, s.view(), out_weight.view(), out_bias.view(), y.view());
    numbers sum = on.values(y);
    for (std::size_t i = 0; i < sum.size(); ++i) { sum[i] += x_values[i]; }
    const auto z = on.of(sum);
    head.forward(rows, z.view(), table.view(), in(), logits.view());
    entropy.forward(logits.view(), targets.view(), loss.view(), normalizer.view());
    const numbers losses = tensors_on<double, Q>(q).values(loss);
    double total = 0, valid = 0;
    for (std::size_t i = 0; i < rows; ++i) {
        total += losses[i];
        valid += p.targets[i] >= 0 ? 1 : 0;
    }
    expect(std::fabs(total / valid - p.loss) <= bar * p.loss, "loss {} is not {}", total / valid, p.loss);

    // Gradients are added to what is there: from one call, and from two.
    constexpr double before = 0x1p-5;
    const auto begun = [&](std::size_t count) { return on.of(numbers(count, before)); };
    const auto d_table = begun(table.size()), d_in_weight = begun(in_weight.size());
    const auto d_in_bias = begun(in_bias.size()), d_out_weight = begun(out_weight.size()), d_out_bias = begun(h);
    const auto dz = on.zeros(outer * h), ds = on.zeros(a.size()), du = on.zeros(outer * h);
    const auto split = [&](auto& layer, const auto& input, const auto& weight, const auto& d_y, const auto& d_x,
                           const auto& d_weight, view<T, M> d_bias, std::string_view what) {
        const auto d_x2 = begun(d_x.size()), d_weight2 = begun(d_weight.size()), d_bias2 = begun(d_bias.size());
        layer.backward_input(rows, weight.view(), d_y.view(), d_x2.view());
        layer.backward_weight(rows, input.view(), d_y.view(), d_weight2.view(), d_bias2.view());
        layer.backward(rows, input.view(), weight.view(), d_y.view(), d_x.view(), d_weight.view(), d_bias);
        on.expect_same_bits(d_x, d_x2, what);
        on.expect_same_bits(d_weight, d_weight2, what);
        return d_bias2.size() == 0 ? std::vector<T>() : on.bits(d_bias2);
    };
    entropy.backward(logits.view(), targets.view(), normalizer.view(), static_cast<R>(1 / valid), logits.view());
    static_cast<void>(split(head, z, table, logits, dz, d_table, {}, "head"));
    const auto out_bias_again = split(down, s, out_weight, dz, ds, d_out_weight, d_out_bias.view(), "down");
    numbers ds_values = on.values(ds);
    for (std::size_t i = 0; i < ds_values.size(); ++i) { ds_values[i] *= 1 - s_values[i] * s_values[i]; }
    const auto da = on.of(ds_values);
    const auto in_bias_again = split(up, u, in_weight, da, du, d_in_weight, d_in_bias.view(), "up");
    on.expect_same_bits(d_out_bias, on.of(out_bias_again), "out_bias");
    on.expect_same_bits(d_in_bias, on.of(in_bias_again), "in_bias");
    const numbers du_values = on.values(du);
    numbers dx_values = on.values(dz), gain_values(h);
    for (std::size_t i = 0; i < du_values.size(); ++i) {
        gain_values[i % h] += du_values[i] * x_values[i];
        dx_values[i] += du_values[i] * m.gain[i % h];
    }
    const auto d_gain = on.of(gain_values);
    group.add_up_replicated(d_gain.view());
    embedding.backward(list.view(), on.of(dx_values).view(), d_table.view());

    const model& g = p.gradient;
    const auto added = [&](const buffer<T, Q>& gradient) {
        numbers v = on.values(gradient);
        for (double& e : v) { e -= before; }
        return v;
    };
    expect_close(added(d_table), rows_of(g.table, h, own_words, 0), g.table, bar, "table");
    expect_close(on.values(d_gain), g.gain, g.gain, bar, "gain");
    expect_close(added(d_in_weight), rows_of(g.in_weight, h, own, 0), g.in_weight, bar, "in_weight");
    expect_close(added(d_in_bias), rows_of(g.in_bias, 1, own, 0), g.in_bias, bar, "in_bias");
    expect_close(added(d_out_weight), columns_of(g.out_weight, m.inner, own), g.out_weight, bar, "out_weight");
    expect_close(added(d_out_bias), g.out_bias, g.out_bias, bar, "out_bias");
    // What every rank has is the same on all, to the bit.
    const auto agree = [&](const auto& replicated) {
        group.communicator().agree(hash_bytes(as_bytes(view(replicated))), "replicated");
    };
    agree(on.bits(d_gain));
    agree(on.bits(d_out_bias));
    agree(losses);
}

}  // namespace tutti::test
