// Attention over ranks on GPUs: operations on tokens with the host's bits, blocks by tiles and by cuDNN, and rings over
// NCCL, on as many GPUs as there are.
#include <algorithm>    // sort
#include <array>        // bytes
#include <atomic>       // counts
#include <cmath>        // fabs
#include <cstring>      // memcmp
#include <limits>       // infinity
#include <memory>       // kernels
#include <mutex>        // results of ranks
#include <numeric>      // iota
#include <type_traits>  // element types
#include <utility>      // move
#include <vector>       // data

#include <cuda_runtime_api.h>  // devices

#include <doctest/doctest.h>  // checks

#include <sequence/problem.hpp>                   // direct solution
#include <tutti/comm/counted.hpp>                 // ledger
#include <tutti/comm/nccl.hpp>                    // ranks
#include <tutti/sequence/cuda_attention.cuh>      // under test
#include <tutti/sequence/engine.hpp>              // under test
#include <tutti/sequence/gather_attention.hpp>    // under test
#include <tutti/sequence/host_attention.hpp>      // the same on the host
#include <tutti/sequence/partition/zeppelin.hpp>  // placements
#include <tutti/sequence/measured_link.hpp>       // under test
#include <tutti/sequence/ring_attention.hpp>      // under test
#include <tutti/sequence/token_operations.cuh>    // under test
#include <tutti/sequence/ulysses_attention.hpp>   // under test

#include "device.hpp"    // require_device
#include "mirrored.hpp"  // mirrored

using namespace tutti;
using namespace tutti::test;
using namespace tutti::sequence;

#if TUTTI_TEST_CUDNN
namespace tutti::test {
std::unique_ptr<fused_attention> cudnn_kernels(std::size_t graphs, std::size_t workspace = std::size_t{1} << 31,
                                               bool deterministic = true);
}  // namespace tutti::test
#endif

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
using brief = tutti::bfloat16;

template <class T> std::vector<T> drawn(std::size_t count, std::uint64_t seed) {
    std::vector<T> v(count);
    for (std::size_t i = 0; i < count; ++i) { v[i] = random_element<T>(seed, i); }
    return v;
}
template <class T> bool same(const std::vector<T>& a, const std::vector<T>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Layouts of tokens x heads x width in 8 numbers more than it needs, from number `first` on.
struct layout {
    std::size_t tokens, heads, width, token_stride, head_stride, first;
    std::size_t size() const { return (tokens - 1) * token_stride + (heads - 1) * head_stride + width + 8; }
    template <class T> token_view<T> of(std::vector<T>& all) const {
        return {view<T>(all).sub(first, all.size() - first), tokens, heads, width, token_stride, head_stride};
    }
};
const std::vector<layout> layouts{
    {40, 6, 16, 96, 16, 0},   // one behind the other
    {40, 6, 16, 200, 16, 8},  // part of a row
    {40, 6, 16, 16, 640, 0},  // heads outside
    {40, 6, 16, 97, 16, 0},   // nothing aligned
    {40, 6, 16, 96, 16, 1},   {37, 3, 5, 15, 5, 0}, {37, 3, 130, 131, 131 * 37, 3},
    {1000, 4, 1, 1, 1000, 0},  // a number a head
    {1, 1, 1, 1, 1, 0},
};

}  // namespace

TEST_CASE("fill, copy, add and sums give the bits of the host, in all layouts") {
    require_device();
    const cuda_queue q;
    for (std::size_t from = 0; from < layouts.size(); ++from) {
        for (std::size_t to = 0; to < layouts.size(); ++to) {
            const layout& a = layouts[from];
            const layout& b = layouts[to];
            if (a.tokens != b.tokens || a.heads != b.heads || a.width != b.width) { continue; }
            CAPTURE(from);
            CAPTURE(to);
            auto wide = drawn<float>(a.size(), 1);
            auto narrow = drawn<brief>(b.size(), 2);
            auto filled = wide;
            auto summed = drawn<brief>(b.size(), 3);
            mirrored<float> w(q, wide);
            mirrored<brief> n(q, narrow);
            mirrored<float> f(q, filled);
            mirrored<brief> s(q, summed);
            copy_tokens(q, w(a.of(wide)), n(b.of(narrow)));
            add_tokens(q, n(b.of(narrow)), w(a.of(wide)));
            add_tokens(q, w(a.of(wide)), n(b.of(narrow)));
            sum_tokens(q, w(a.of(wide)), f(a.of(filled)), s(b.of(summed)));
            sum_tokens(q, s(b.of(summed)), n(b.of(narrow)), w(a.of(wide)));
            sum_tokens(q, s(b.of(summed)), n(b.of(narrow)), n(b.of(narrow)));
            fill_tokens(q, f(a.of(filled)), 3.0f);
            auto expected_wide = wide;
            auto expected_narrow = narrow;
            auto expected_filled = filled;
            auto expected_summed = summed;
            copy_tokens(host_queue{}, a.of(expected_wide), b.of(expected_narrow));
            add_tokens(host_queue{}, b.of(expected_narrow), a.of(expected_wide));
            add_tokens(host_queue{}, a.of(expected_wide), b.of(expected_narrow));
            sum_tokens(host_queue{}, a.of(expected_wide), a.of(expected_filled), b.of(expected_summed));
            sum_tokens(host_queue{}, b.of(expected_summed), b.of(expected_narrow), a.of(expected_wide));
            sum_tokens(host_queue{}, b.of(expected_summed), b.of(expected_narrow), b.of(expected_narrow));
            fill_tokens(host_queue{}, a.of(expected_filled), 3.0f);
            w.fetch();
            n.fetch();
            f.fetch();
            s.fetch();
            CHECK(same(summed, expected_summed));
            CHECK(same(wide, expected_wide));
            CHECK(same(narrow, expected_narrow));
            CHECK(same(filled, expected_filled));
        }
    }
}

TEST_CASE_TEMPLATE("dot products have the bits of the host", T, brief, float) {
    require_device();
    const cuda_queue q;
    for (std::size_t i = 0; i < layouts.size(); ++i) {
        CAPTURE(i);
        const layout& a = layouts[i];
        const std::size_t numbers = a.tokens * a.heads;
        auto x = drawn<T>(a.size(), 1);
        auto y = drawn<T>(a.size(), 2);
        std::vector<float> sums(numbers, 7);
        auto expected = sums;
        const mirrored<T> dx(q, x);
        const mirrored<T> dy(q, y);
        mirrored<float> d(q, sums);
        const auto numbers_of = [&](std::vector<float>& v) {
            return numbers_by_head(view<float>(v), a.tokens, a.heads);
        };
        run(q, dot_tokens_operation<T, device_memory>{dx(a.of(x)), dy(a.of(y)), d(numbers_of(sums))});
        dot_tokens_operation<T, host_memory>{a.of(x), a.of(y), numbers_of(expected)}();
        d.fetch();
        CHECK(same(sums, expected));
    }
}

TEST_CASE_TEMPLATE("merges are those of the host but for the last places of exp and log", T, float, double) {
    require_device();
    const cuda_queue q;
    const double bound = std::same_as<T, float> ? 1e-6 : 1e-14;
    for (std::size_t i = 0; i < layouts.size(); ++i) {
        CAPTURE(i);
        const layout& a = layouts[i];
        auto out = drawn<T>(a.size(), 1);
        auto other = drawn<T>(a.size(), 2);
        std::vector<T> sums(a.tokens * a.heads);
        auto other_sums = sums;
        for (std::size_t k = 0; k < sums.size();
             ++k) {  // near each other, far apart, nothing on a side, nothing on both
            const T nothing = static_cast<T>(-infinity);
            sums[k] = k % 5 == 1 || k % 5 == 3 ? nothing : static_cast<T>(random_element<double>(3, k) * 10000);
            other_sums[k] = k % 5 == 2 || k % 5 == 3 ? nothing : sums[k] + static_cast<T>(random_element<double>(4, k));
            if (k % 5 == 1) { other_sums[k] = static_cast<T>(k); }
            if (k % 5 == 4) { other_sums[k] = static_cast<T>(-1e4); }
        }
        const auto numbers_of = [&](std::vector<T>& v) { return numbers_by_head(view<T>(v), a.tokens, a.heads); };
        const mirrored<T> dother(q, other);
        const mirrored<T> dother_sums(q, other_sums);
        mirrored<T> dout(q, out);
        mirrored<T> dsums(q, sums);
        run(q, merge_operation<T, device_memory>{dother(a.of(other)), dother_sums(numbers_of(other_sums)),
                                                 dout(a.of(out)), dsums(numbers_of(sums)), dout(a.of(out))});
        merge_operation<T, host_memory>{a.of(other), numbers_of(other_sums), a.of(out), numbers_of(sums), a.of(out)}();
        const auto expected = out;
        const auto expected_sums = sums;
        dout.fetch();
        dsums.fetch();
        double worst = 0;
        for (std::size_t k = 0; k < out.size(); ++k) {
            worst = larger(worst, std::fabs(static_cast<double>(out[k]) - static_cast<double>(expected[k])));
        }
        for (std::size_t k = 0; k < sums.size(); ++k) {
            if (sums[k] == expected_sums[k]) { continue; }
            worst = larger(worst, std::fabs(static_cast<double>(sums[k]) / static_cast<double>(expected_sums[k]) - 1));
        }
        CHECK(worst <= bound);
    }
}

TEST_CASE("merges of 16-bit results, in all precisions that a ring asks for") {
    require_device();
    const cuda_queue q;
    const auto judge = [&]<class Kept, class To>(const layout& a, Kept, To, bool in_place) {
        auto kept = drawn<Kept>(a.size(), 1);
        auto other = drawn<brief>(a.size(), 2);
        std::vector<To> out(a.size(), To(7.0f));
        std::vector<float> sums(a.tokens * a.heads), other_sums = sums;
        for (std::size_t k = 0; k < sums.size(); ++k) {
            const float nothing = static_cast<float>(-infinity);
            sums[k] = k % 5 == 1 || k % 5 == 3 ? nothing : static_cast<float>(random_element<double>(3, k));
            other_sums[k] = k % 5 == 2 || k % 5 == 3 ? nothing : static_cast<float>(random_element<double>(4, k));
        }
        const auto numbers_of = [&](std::vector<float>& v) {
            return numbers_by_head(view<float>(v), a.tokens, a.heads);
        };
        mirrored<Kept> dkept(q, kept);
        const mirrored<brief> dother(q, other);
        mirrored<To> dout(q, out);
        mirrored<float> dsums(q, sums);
        const mirrored<float> dother_sums(q, other_sums);
        if constexpr (std::is_same_v<Kept, To>) {
            if (in_place) {
                run(q, merge_operation<float, device_memory, brief, Kept, To>{
                           dother(a.of(other)), dother_sums(numbers_of(other_sums)), dkept(a.of(kept)),
                           dsums(numbers_of(sums)), dkept(a.of(kept))});
                out = kept;
            }
        }
        if (!in_place) {
            run(q, merge_operation<float, device_memory, brief, Kept, To>{
                       dother(a.of(other)), dother_sums(numbers_of(other_sums)), dkept(a.of(kept)),
                       dsums(numbers_of(sums)), dout(a.of(out))});
        }
        auto expected = out;
        auto expected_sums = sums;
        merge_operation<float, host_memory, brief, Kept, To>{a.of(other), numbers_of(other_sums), a.of(kept),
                                                             numbers_of(expected_sums), a.of(expected)}();
        if constexpr (std::is_same_v<Kept, To>) {
            if (in_place) {
                dkept.fetch();
                out = kept;
            }
        }
        if (!in_place) { dout.fetch(); }
        double worst = 0;
        for (std::size_t k = 0; k < out.size(); ++k) {
            const double x = static_cast<double>(static_cast<float>(out[k]));
            const double y = static_cast<double>(static_cast<float>(expected[k]));
            worst = larger(worst, std::fabs(x - y) / larger(std::fabs(y), 0.0625));
        }
        // A last place of exp may turn a rounding.
        CHECK(worst <= (std::is_same_v<To, float> ? 1e-5 : 0x1p-7));
        dsums.fetch();
        for (std::size_t k = 0; k < sums.size(); ++k) {
            CHECK((sums[k] == expected_sums[k] || std::fabs(sums[k] - expected_sums[k]) <= 1e-6));
        }
    };
    for (std::size_t i = 0; i < layouts.size(); ++i) {
        CAPTURE(i);
        judge(layouts[i], brief{}, brief{}, true);
        judge(layouts[i], brief{}, float{}, false);
        judge(layouts[i], float{}, float{}, true);
        judge(layouts[i], float{}, brief{}, false);
    }
}

namespace {

// One sequence of a problem in T, as it is on one rank of one.
template <class T> struct sequence_data {
    using P = accumulator_t<T>;
    problem of;
    placement where;
    rank_data<T> rows;
    std::vector<P> out, log_sum_exp, delta, d_query, d_key, d_value;

    explicit sequence_data(const problem& p) : of(p), where(on_all(1, of.lengths)), rows(of, where, 0) {
        const std::size_t numbers = rows.tokens * of.heads.query;
        out.assign(numbers * of.heads.width, std::numeric_limits<P>::quiet_NaN());
        log_sum_exp.assign(numbers, std::numeric_limits<P>::quiet_NaN());
        delta = log_sum_exp;
        d_query.assign(out.size(), 0);
        d_key.assign(rows.tokens * of.heads.kv * of.heads.width, 0);
        d_value = d_key;
    }
    token_view<P> queries(std::vector<P>& all) { return {view<P>(all), rows.tokens, of.heads.query, of.heads.width}; }
    token_view<P> keys(std::vector<P>& all) { return {view<P>(all), rows.tokens, of.heads.kv, of.heads.width}; }
    token_view<P> numbers(std::vector<P>& all) { return numbers_by_head(view<P>(all), rows.tokens, of.heads.query); }
    solution solved() {
        solution s(of);
        const auto widened = [](const std::vector<P>& v) { return std::vector<double>(v.begin(), v.end()); };
        s.out[0] = widened(out);
        s.d_query[0] = widened(d_query);
        s.d_key[0] = widened(d_key);
        s.d_value[0] = widened(d_value);
        for (std::size_t h = 0; h < of.heads.query; ++h) {
            for (std::size_t t = 0; t < rows.tokens; ++t) {
                s.log_sum_exp[0][t * of.heads.query + h] = static_cast<double>(log_sum_exp[h * rows.tokens + t]);
            }
        }
        return s;
    }
};

// Attends by `kernel`, keys cut at `cuts`, the parts merged; then differentiates in the same cuts. `aligned`: a part in
// which queries see some keys starts with the query at its first key, as an engine asks; the queries above see none.
template <class T, class Kernel>
solution in_cuts(const cuda_queue& q, Kernel& kernel, const problem& p, const std::vector<std::size_t>& cuts,
                 bool aligned) {
    using P = accumulator_t<T>;
    using M = device_memory;
    sequence_data<T> s(p);
    const std::size_t tokens = s.rows.tokens;
    auto part_out = s.out;
    auto part_sums = s.log_sum_exp;
    s.out.assign(s.out.size(), 0);
    s.log_sum_exp.assign(s.log_sum_exp.size(), static_cast<P>(-infinity));
    const mirrored<T> packed(q, s.rows.packed), d_out(q, s.rows.d_out);
    mirrored<T> rounded(q, s.rows.out);
    mirrored<P> out(q, s.out), sums(q, s.log_sum_exp), delta(q, s.delta), d_query(q, s.d_query), d_key(q, s.d_key),
        d_value(q, s.d_value);
    const mirrored<P> other_out(q, part_out), other_sums(q, part_sums);
    const auto each = [&](auto f) {
        for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
            const std::size_t b = cuts[i];
            const std::size_t n = cuts[i + 1] - b;
            const auto position = [](std::size_t t) { return static_cast<std::int64_t>(t); };
            if (p.rule == mask::full) {
                f(0, tokens, b, n, visibility{});
            } else if (!aligned) {
                f(0, tokens, b, n, visibility{mask::causal, 0, position(b)});
            } else {
                f(b, n, b, n, visibility{mask::causal, 0, 0});
                if (b + n < tokens) { f(b + n, tokens - b - n, b, n, visibility{}); }
            }
        }
    };
    each([&](std::size_t a, std::size_t rows, std::size_t b, std::size_t n, visibility seen) {
        const auto part = other_out(s.queries(part_out)).rows(a, rows);
        const auto part_numbers = other_sums(s.numbers(part_sums)).rows(a, rows);
        kernel.forward(q, forward_block<T, M>{packed(s.rows.query()).rows(a, rows), packed(s.rows.key()).rows(b, n),
                                              packed(s.rows.value()).rows(b, n), seen, p.scale, part, part_numbers});
        const auto merged = out(s.queries(s.out)).rows(a, rows);
        run(q, merge_operation<P, M>{part, part_numbers, merged, sums(s.numbers(s.log_sum_exp)).rows(a, rows), merged});
    });
    const auto final_out = rounded(s.rows.result()).rows(0, tokens);
    const auto gradient = d_out(s.rows.out_gradient()).rows(0, tokens);
    const auto along = delta(s.numbers(s.delta));
    copy_tokens(q, out(s.queries(s.out)), final_out);
    run(q, dot_tokens_operation<T, M>{gradient, final_out, along});
    each([&](std::size_t a, std::size_t rows, std::size_t b, std::size_t n, visibility seen) {
        kernel.backward(q,
                        backward_block<T, M>{packed(s.rows.query()).rows(a, rows), packed(s.rows.key()).rows(b, n),
                                             packed(s.rows.value()).rows(b, n), seen, p.scale, gradient.rows(a, rows),
                                             final_out.rows(a, rows), sums(s.numbers(s.log_sum_exp)).rows(a, rows),
                                             along.rows(a, rows), d_query(s.queries(s.d_query)).rows(a, rows),
                                             d_key(s.keys(s.d_key)).rows(b, n), d_value(s.keys(s.d_value)).rows(b, n)});
    });
    for (mirrored<P>* m : {&out, &sums, &d_query, &d_key, &d_value}) { m->fetch(); }
    return s.solved();
}

// Counts the calls that a library takes, and those that it does not.
using tally = std::array<std::atomic<int>, 2>;
class counting final : public fused_attention {
    std::unique_ptr<fused_attention> real_;
    std::shared_ptr<tally> counts_;

public:
    counting(std::unique_ptr<fused_attention> real, std::shared_ptr<tally> counts)
        : real_(std::move(real)), counts_(std::move(counts)) {}
    bool run(const cuda_queue& q, const fused_call& c) override {
        const bool taken = real_->run(q, c);
        ++(*counts_)[taken ? 0 : 1];
        return taken;
    }
    std::size_t most_scores() const noexcept override { return real_->most_scores(); }
};

}  // namespace

TEST_CASE_TEMPLATE("tiles: any cuts, masks, heads and widths are the direct solution", T, double, float) {
    require_device();
    const cuda_queue q;
    tiled_attention<T> kernel;
    const bool wide = std::same_as<T, double>;
    for (const mask rule : {mask::causal, mask::full}) {
        for (const attention_heads heads :
             {attention_heads{1, 1, 5}, attention_heads{6, 2, 33}, attention_heads{2, 1, 130}}) {
            for (const std::int64_t length : {1, 31, 97, 256}) {
                problem p(heads, {length}, rule, 3);
                p.round_to<T>();
                const solution reference = solved_directly(p);
                const std::size_t n = at(length);
                for (const bool aligned : {false, true}) {
                    for (const auto& cuts : {std::vector<std::size_t>{0, n}, {0, n / 3, n / 3, n / 2, n}}) {
                        CAPTURE(length);
                        CAPTURE(heads.width);
                        CAPTURE(aligned);
                        const distance d = between(in_cuts<T>(q, kernel, p, cuts, aligned), reference);
                        if (length > 1) { CHECK(d.relative <= (wide ? 1e-12 : 1e-6)); }  // of one key gradients are 0
                        CHECK(d.absolute <= (wide ? 1e-12 : 1e-5));
                    }
                }
            }
        }
    }
}

TEST_CASE("tiles: queries that see nothing get 0, -inf, and gradients of 0") {
    require_device();
    const cuda_queue q;
    tiled_attention<double> kernel;
    problem p({2, 1, 4}, {40}, mask::causal);
    sequence_data<double> s(p);
    s.log_sum_exp.assign(s.log_sum_exp.size(), -infinity);
    const mirrored<double> packed(q, s.rows.packed), d_out(q, s.rows.d_out), delta(q, s.delta);
    mirrored<double> out(q, s.out), sums(q, s.log_sum_exp), d_query(q, s.d_query), d_key(q, s.d_key),
        d_value(q, s.d_value);
    const auto rows = [&](const auto& v) { return packed(v).rows(0, 40); };
    // Keys of later tokens, and none at all.
    for (const std::size_t keys : {40u, 0u}) {
        kernel.forward(q, forward_block<double, device_memory>{rows(s.rows.query()), rows(s.rows.key()).rows(0, keys),
                                                               rows(s.rows.value()).rows(0, keys),
                                                               visibility{mask::causal, 0, 100}, p.scale,
                                                               out(s.queries(s.out)), sums(s.numbers(s.log_sum_exp))});
        out.fetch();
        sums.fetch();
        CHECK(s.out == std::vector<double>(s.out.size(), 0.0));
        CHECK(s.log_sum_exp == std::vector<double>(s.log_sum_exp.size(), -infinity));
    }
    // Keys that are there, of rows that attended to nothing: their delta is 0 times something, here NaN.
    kernel.backward(q, backward_block<double, device_memory>{rows(s.rows.query()),
                                                             rows(s.rows.key()),
                                                             rows(s.rows.value()),
                                                             visibility{},
                                                             p.scale,
                                                             d_out(s.rows.out_gradient()).rows(0, 40),
                                                             {},
                                                             sums(s.numbers(s.log_sum_exp)),
                                                             delta(s.numbers(s.delta)),
                                                             d_query(s.queries(s.d_query)),
                                                             d_key(s.keys(s.d_key)),
                                                             d_value(s.keys(s.d_value))});
    for (auto* m : {&d_query, &d_key, &d_value}) { m->fetch(); }
    CHECK(s.d_query == std::vector<double>(s.d_query.size(), 0.0));
    CHECK(s.d_key == std::vector<double>(s.d_key.size(), 0.0));
    CHECK(s.d_value == std::vector<double>(s.d_value.size(), 0.0));
}

TEST_CASE("bfloat16: tiles, and cuDNN where it is, are as near as 16 bits allow") {
    require_device();
    const cuda_queue q;
    const auto judge = [&](auto& kernel, const char* name, const std::vector<attention_heads>& all_heads,
                           std::initializer_list<std::int64_t> lengths, const std::vector<mask>& rules) {
        CAPTURE(name);
        for (const mask rule : rules) {
            for (const attention_heads heads : all_heads) {
                for (const std::int64_t length : lengths) {
                    problem p(heads, {length}, rule, 5);
                    p.round_to<brief>();
                    const solution reference = solved_directly(p);
                    const std::size_t n = at(length);
                    for (const auto& cuts : {std::vector<std::size_t>{0, n}, {0, n / 2, n}}) {
                        CAPTURE(length);
                        CAPTURE(heads.query);
                        CAPTURE(heads.width);
                        CAPTURE(static_cast<int>(rule));
                        CAPTURE(cuts.size());
                        const solution got = in_cuts<brief>(q, kernel, p, cuts, true);
                        CHECK(between(got.out, reference.out).relative <= 4e-3);
                        CHECK(between(got.log_sum_exp, reference.log_sum_exp).relative <= 1e-5);
                        CHECK(between(got.d_query, reference.d_query).relative <= 4e-3);
                        CHECK(between(got.d_key, reference.d_key).relative <= 4e-3);
                        CHECK(between(got.d_value, reference.d_value).relative <= 4e-3);
                        if (cuts.size() == 3) { CHECK(same_bits(got, in_cuts<brief>(q, kernel, p, cuts, true))); }
                    }
                }
            }
        }
    };
    const std::vector<mask> both{mask::causal, mask::full};
    tiled_attention<brief> tiles;
    judge(tiles, "tiles", {{4, 2, 16}}, {100}, both);
#if TUTTI_TEST_CUDNN
    const auto counts = std::make_shared<tally>();
    cuda_attention<brief> kernel(std::make_unique<counting>(cudnn_kernels(64), counts));
    judge(kernel, "cuDNN", {{4, 2, 64}, {2, 2, 128}}, {1, 77, 256, 530}, both);
    CHECK((*counts)[0] > 0);
    CHECK((*counts)[1] == 0);
    // Few graphs are kept; odd widths are not cuDNN's, and get the same judgment.
    const auto more = std::make_shared<tally>();
    cuda_attention<brief> forgetful(std::make_unique<counting>(cudnn_kernels(1), more));
    judge(forgetful, "one graph", {{2, 1, 64}}, {130}, {mask::causal});
    CHECK((*more)[1] == 0);
    // A small workspace: backward in parts, of heads, of queries and of keys.
    cuda_attention<brief> cut(std::make_unique<counting>(cudnn_kernels(64, 256 * 256), counts));
    judge(cut, "in parts", {{4, 2, 64}}, {300, 530}, both);
    CHECK((*counts)[1] == 0);
    judge(kernel, "odd width", {{2, 1, 20}}, {64}, {mask::causal});
    CHECK((*counts)[1] > 0);
#endif
}

#if TUTTI_TEST_CUDNN
namespace {

// Forward and backward of sequences one behind the other, as one packed block. Those of the problem lie between others,
// and before rows, that are NaN in whole.
solution in_one_pack(const cuda_queue& q, cuda_attention<brief>& kernel, const problem& p) {
    using M = device_memory;
    const brief nan = static_cast<brief>(std::numeric_limits<float>::quiet_NaN());
    std::vector<std::size_t> lengths, firsts;
    std::size_t tokens = 0;
    for (const std::int64_t n : p.lengths) {
        firsts.push_back(tokens);
        lengths.insert(lengths.end(), {at(n), 70});
        tokens += at(n) + 70;
    }
    const std::size_t rows = tokens + 300;  // more than are sequences
    const std::size_t of_query = p.heads.query * p.heads.width, of_key = p.heads.kv * p.heads.width;
    const std::size_t width = of_query + 2 * of_key + 8;
    std::vector<brief> packed(rows * width, nan), gradients = packed, out(rows * of_query, nan), d_out = out;
    std::vector<float> sums(rows * p.heads.query, std::numeric_limits<float>::quiet_NaN());
    const auto part = [&](std::vector<brief>& v, std::size_t first, std::size_t heads) {
        return token_view<brief>(view<brief>(v).sub(first, v.size() - first), tokens, heads, p.heads.width, width,
                                 p.heads.width);
    };
    const auto query = [&](std::vector<brief>& v) { return part(v, 0, p.heads.query); };
    const auto key = [&](std::vector<brief>& v) { return part(v, of_query, p.heads.kv); };
    const auto value = [&](std::vector<brief>& v) { return part(v, of_query + of_key, p.heads.kv); };
    const auto result = [&](std::vector<brief>& v) {
        return token_view<brief>(view<brief>(v), tokens, p.heads.query, p.heads.width);
    };
    const auto numbers = [&](std::vector<float>& v) { return numbers_by_head(view<float>(v), tokens, p.heads.query); };
    const auto each = [&](std::size_t s, const token_view<brief>& v, auto visit) {
        for (std::size_t t = 0; t < at(p.lengths[s]); ++t) {
            for (std::size_t h = 0; h < v.heads; ++h) {
                for (std::size_t c = 0; c < v.width; ++c) {
                    visit(v.at(firsts[s] + t, h)[c], (t * v.heads + h) * v.width + c);
                }
            }
        }
    };
    for (std::size_t s = 0; s < p.lengths.size(); ++s) {
        const auto from = [](const std::vector<double>& x) {
            return [&x](brief& y, std::size_t i) { y = static_cast<brief>(static_cast<float>(x[i])); };
        };
        each(s, query(packed), from(p.query[s]));
        each(s, key(packed), from(p.key[s]));
        each(s, value(packed), from(p.value[s]));
        each(s, result(d_out), from(p.d_out[s]));
    }
    const mirrored<brief> there(q, packed), d_out_there(q, d_out);
    mirrored<brief> out_there(q, out), gradients_there(q, gradients);
    mirrored<float> sums_there(q, sums);
    const visibility seen{p.rule, 0, 0};
    kernel.forward(q,
                   packed_forward_block<brief, M>{lengths,
                                                  {there(query(packed)), there(key(packed)), there(value(packed)), seen,
                                                   p.scale, out_there(result(out)), sums_there(numbers(sums))}});
    kernel.backward(q, packed_backward_block<brief, M>{lengths,
                                                       {there(query(packed)),
                                                        there(key(packed)),
                                                        there(value(packed)),
                                                        seen,
                                                        p.scale,
                                                        d_out_there(result(d_out)),
                                                        out_there(result(out)),
                                                        sums_there(numbers(sums)),
                                                        {},
                                                        gradients_there(query(gradients)),
                                                        gradients_there(key(gradients)),
                                                        gradients_there(value(gradients))}});
    out_there.fetch();
    gradients_there.fetch();
    sums_there.fetch();
    solution s(p);
    for (std::size_t i = 0; i < p.lengths.size(); ++i) {
        const auto to = [](std::vector<double>& x) {
            return [&x](const brief& y, std::size_t k) { x[k] = static_cast<double>(static_cast<float>(y)); };
        };
        each(i, result(out), to(s.out[i]));
        each(i, query(gradients), to(s.d_query[i]));
        each(i, key(gradients), to(s.d_key[i]));
        each(i, value(gradients), to(s.d_value[i]));
        for (std::size_t t = 0; t < at(p.lengths[i]); ++t) {
            for (std::size_t h = 0; h < p.heads.query; ++h) {
                s.log_sum_exp[i][t * p.heads.query + h] = static_cast<double>(*numbers(sums).at(firsts[i] + t, h));
            }
        }
    }
    // Nothing was written beside the rows of sequences.
    bool untouched = true;
    for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t c = row < tokens ? width - 8 : 0; c < width; ++c) {
            untouched = untouched && std::memcmp(&gradients[row * width + c], &nan, sizeof nan) == 0;
        }
        for (std::size_t c = 0; row >= tokens && c < of_query; ++c) {
            untouched = untouched && std::memcmp(&out[row * of_query + c], &nan, sizeof nan) == 0;
        }
    }
    CHECK(untouched);
    return s;
}

}  // namespace

TEST_CASE("bfloat16: packed sequences are as near as 16 bits allow, in few calls, whatever lies beside them") {
    require_device();
    const cuda_queue q;
    // 3 calls a direction, of sequences of like length: NaN lies between all of them, in sequences of the first.
    const std::vector<std::int64_t> lengths{300, 1, 77, 128, 0, 257, 530, 5};
    std::array<std::shared_ptr<tally>, 2> counts{std::make_shared<tally>(), std::make_shared<tally>()};
    const auto kernel_of = [&](bool deterministic) {
        return cuda_attention<brief>(std::make_unique<counting>(cudnn_kernels(64, std::size_t{1} << 31, deterministic),
                                                                counts[deterministic ? 1 : 0]));
    };
    std::array<cuda_attention<brief>, 2> kernels{kernel_of(false), kernel_of(true)};
    for (const attention_heads heads : {attention_heads{2, 2, 128}, attention_heads{4, 2, 64}}) {
        for (const mask rule : {mask::causal, mask::full}) {
            problem p(heads, lengths, rule, 29);
            p.round_to<brief>();
            const solution reference = solved_directly(p);
            for (const std::size_t deterministic : {0u, 1u}) {
                CAPTURE(deterministic);
                CAPTURE(heads.kv);
                CAPTURE(static_cast<int>(rule));
                tally& counted = *counts[deterministic];
                counted[0] = counted[1] = 0;
                const solution got = in_one_pack(q, kernels[deterministic], p);
                CHECK(between(got.out, reference.out).relative <= 4e-3);
                CHECK(between(got.log_sum_exp, reference.log_sum_exp).relative <= 1e-5);
                CHECK(between(got.d_query, reference.d_query).relative <= 4e-3);
                CHECK(between(got.d_key, reference.d_key).relative <= 4e-3);
                CHECK(between(got.d_value, reference.d_value).relative <= 4e-3);
                CHECK(counted[0] == 6);
                CHECK(counted[1] == 0);
                if (deterministic == 1) { CHECK(same_bits(got, in_one_pack(q, kernels[deterministic], p))); }
            }
        }
    }
    // Without room for the scores of a call packed backward is refused: sequences are differentiated one after another.
    problem p({2, 2, 64}, {300, 77, 257}, mask::causal, 31);
    p.round_to<brief>();
    const auto small = std::make_shared<tally>();
    cuda_attention<brief> cut(std::make_unique<counting>(cudnn_kernels(64, 256 * 256), small));
    const solution got = in_one_pack(q, cut, p);
    CHECK((*small)[1] > 0);
    const solution reference = solved_directly(p);
    for (const auto which : {&solution::out, &solution::d_query, &solution::d_key, &solution::d_value}) {
        CHECK(between(got.*which, reference.*which).relative <= 4e-3);
    }
}
#endif

namespace {

int devices() {
    int count = 0;
    static_cast<void>(cudaGetDeviceCount(&count));
    return count;
}

// solved_together on GPUs.
template <class T, class Make>
solution solved_on_gpus(const problem& p, const placement& where, Make make,
                        std::vector<std::array<std::uint64_t, 2>>* sent = nullptr) {
    using P = accumulator_t<T>;
    using counted = comm::counted<comm::nccl>;
    solution all(p);
    std::mutex mutex;
    comm::nccl::launch(static_cast<int>(where.pieces.size()), [&](comm::nccl& world) {
        counted own(world.duplicate("attention"));
        const cuda_queue q = own.queue();
        const auto ledger = own.traffic_ledger();
        auto engine = make(std::move(own), p);
        engine.plan(where);
        rank_data<T> mine(p, where, world.rank());
        const mirrored<T> packed(q, mine.packed), d_out(q, mine.d_out);
        mirrored<T> out(q, mine.out), gradients(q, mine.gradients);
        mirrored<P> sums(q, mine.log_sum_exp);
        engine.forward(packed(mine.query()), packed(mine.key()), packed(mine.value()), out(mine.result()),
                       sums(mine.numbers()));
        const std::uint64_t forward = ledger->total().bytes;
        engine.backward(d_out(mine.out_gradient()), packed(mine.query()), packed(mine.key()), packed(mine.value()),
                        out(mine.result()), sums(mine.numbers()), gradients(mine.d_query()), gradients(mine.d_key()),
                        gradients(mine.d_value()));
        if (sent != nullptr) { (*sent)[at(world.rank())] = {forward, ledger->total().bytes - forward}; }
        out.fetch();
        sums.fetch();
        gradients.fetch();
        mine.collect(all, mutex, true);
    });
    return all;
}

// A sequence on all ranks, others on some, several on each; few tokens and none.
placement mixed_rings(int ranks) {
    std::vector<int> all(at(ranks));
    std::iota(all.begin(), all.end(), 0);
    const std::vector<int> backward(all.rbegin(), all.rend());
    const int last = ranks - 1;
    return placed({1, ranks}, {301, 64, 97, 5, 0, 1, 130}, {all, backward, {last}, all, {}, {0}, {0}});
}

}  // namespace

TEST_CASE("double: rings, gathered keys and exchanged heads on GPUs are the direct solution, twice the same, and send "
          "what is planned") {
    require_device();
    using counted = comm::counted<comm::nccl>;
    using kernel = cuda_attention<double>;
    for (const int ranks : {1, 2, 4}) {
        if (ranks > devices()) { continue; }
        CAPTURE(ranks);
        const placement where = mixed_rings(ranks);
        for (const mask rule : {mask::causal, mask::full}) {
            const problem p({8, 4, 6}, where.lengths, rule, 7);
            const solution reference = solved_directly(p);
            std::vector<std::array<std::uint64_t, 2>> sent(at(ranks));
            const auto ring = [](counted c, const problem& of) {
                return ring_attention<counted, kernel>(std::move(c), of.heads, {.rule = of.rule});
            };
            const solution got = solved_on_gpus<double>(p, where, ring, &sent);
            CHECK(between(got, reference).absolute <= 1e-12);
            CHECK(same_bits(got, solved_on_gpus<double>(p, where, ring)));
            const solution on_host = solved_together<double>(p, where, [](comm::threads c, const problem& of) {
                return ring_attention<comm::threads, host_attention<double>>(std::move(c), of.heads, {.rule = of.rule});
            });
            CHECK(between(got, on_host).absolute <= 1e-12);
            const auto calls = ring_attention<counted, kernel>::calls_of(where, p.heads);
            std::vector<std::array<std::uint64_t, 2>> planned(at(ranks));
            for (std::size_t i = 0; i < calls.size(); ++i) {
                for (const flow& f : calls[i]) { planned[at(f.source)][i < calls.size() / 2 - 1 ? 0 : 1] += f.bytes; }
            }
            CHECK(sent == planned);
            if (rule == mask::full) { continue; }
            const solution gathered = solved_on_gpus<double>(p, where, [](counted c, const problem& of) {
                return gather_attention<counted, kernel>(std::move(c), of.heads);
            });
            CHECK(between(gathered, reference).absolute <= 1e-12);
            const solution exchanged = solved_on_gpus<double>(p, where, [](counted c, const problem& of) {
                return ulysses_attention<counted, kernel>(std::move(c), of.heads);
            });
            CHECK(between(exchanged, reference).absolute <= 1e-12);
        }
    }
}

TEST_CASE("double and float: rings on GPUs of sequences of all lengths, many in a round") {
    require_device();
    using counted = comm::counted<comm::nccl>;
    for (const int ranks : {1, 2, 3, 4}) {
        if (ranks > devices()) { continue; }
        CAPTURE(ranks);
        const placement where = on_all(ranks, {1, 7, 9, 12, 57, 137, 698});
        problem p({2, 1, 8}, where.lengths, mask::causal, 19);
        const auto ring = []<class T>(counted c, const problem& of, T) {
            return ring_attention<counted, cuda_attention<T>>(std::move(c), of.heads, {.rule = of.rule});
        };
        const auto solved = [&](auto element) {
            return solved_on_gpus<decltype(element)>(
                p, where, [&](counted c, const problem& of) { return ring(std::move(c), of, element); });
        };
        CHECK(between(solved(double{}), solved_directly(p)).absolute <= 1e-12);
        p.round_to<float>();
        const distance d = between(solved(float{}), solved_directly(p));
        CHECK(d.relative <= 1e-6);
        CHECK(d.absolute <= 1e-5);
    }
}

TEST_CASE("the link between two GPUs is measured, the same for both") {
    require_device();
    if (devices() < 2) { return; }  // a link has two ends
    std::array<comm::link, 2> found;
    comm::nccl::launch(2, [&](comm::nccl& world) {
        const std::size_t sizes[] = {std::size_t{1} << 12, std::size_t{1} << 26};
        found[at(world.rank())] = measured_link(world, 1, 2, sizes);
    });
    CHECK(found[0] == found[1]);
    CHECK(found[0].latency_seconds >= 0);
    CHECK(found[0].bytes_per_second > 1e8);
}

#if TUTTI_TEST_CUDNN
TEST_CASE("bfloat16: rings on GPUs are as good as one") {
    require_device();
    using counted = comm::counted<comm::nccl>;
    problem p({4, 2, 64}, {600, 256, 77}, mask::causal, 11);
    p.round_to<brief>();
    const solution reference = solved_directly(p);
    const auto ring = [](counted c, const problem& of) {
        return ring_attention<counted, cuda_attention<brief>>(std::move(c), of.heads, {},
                                                              cuda_attention<brief>(cudnn_kernels(64)));
    };
    std::vector<distance> alone;
    for (const int ranks : {1, 2, 4}) {
        if (ranks > devices()) { continue; }
        CAPTURE(ranks);
        const placement where = on_all(ranks, p.lengths);
        const solution got = solved_on_gpus<brief>(p, where, ring);
        CHECK(same_bits(got, solved_on_gpus<brief>(p, where, ring)));
        std::size_t i = 0;
        for (const auto which : {&solution::out, &solution::d_query, &solution::d_key, &solution::d_value}) {
            const distance d = between(got.*which, reference.*which);
            if (ranks == 1) { alone.push_back(d); }
            CAPTURE(i);
            CHECK(d.relative <= 4e-3);
            CHECK(d.relative <= 1.25 * alone[i].relative);
            CHECK(d.relative >= 1e-4);  // it is numbers of 16 bits that are compared
            ++i;
        }
    }
}
#endif

namespace {

// What the engine makes of a problem, on as many of two GPUs as there are.
template <class Engine> solution solved_by_engine(const problem& p) {
    using T = typename Engine::element_type;
    const std::size_t of_query = p.heads.query * p.heads.width;
    const std::size_t of_key = p.heads.kv * p.heads.width;
    solution all(p);
    std::mutex mutex;
    comm::nccl::launch(std::min(devices(), 2), [&](comm::nccl& world) {
        comm::nccl own = world.duplicate("engine");
        const cuda_queue q = own.queue();
        Engine engine(std::move(own), p.heads);
        engine.plan(p.lengths);
        std::vector<T> qkv, out(engine.rows() * of_query), d_out, d_qkv(engine.rows() * (of_query + 2 * of_key));
        const auto each_row = [&](auto visit) {
            for (std::size_t row = 0; row < engine.rows(); ++row) {
                visit(row, at(engine.sequences()[row]), at(engine.positions()[row]));
            }
        };
        each_row([&](std::size_t, std::size_t s, std::size_t t) {
            const auto append = [&](std::vector<T>& to, const std::vector<double>& from, std::size_t width) {
                for (std::size_t c = 0; c < width; ++c) {
                    to.push_back(static_cast<T>(static_cast<accumulator_t<T>>(from[t * width + c])));
                }
            };
            append(qkv, p.query[s], of_query);
            append(qkv, p.key[s], of_key);
            append(qkv, p.value[s], of_key);
            append(d_out, p.d_out[s], of_query);
        });
        buffer<T, cuda_queue> qkv_there(q, qkv.size()), out_there(q, out.size()), d_out_there(q, d_out.size()),
            d_qkv_there(q, d_qkv.size());
        upload(q, view<const T>(qkv), qkv_there.view());
        upload(q, view<const T>(d_out), d_out_there.view());
        auto kept = engine.make_memory();
        engine.forward(qkv_there, out_there.view(), kept);
        engine.backward(d_out_there, d_qkv_there.view(), kept);
        download(q, view<const T, device_memory>(out_there), view<T>(out));
        download(q, view<const T, device_memory>(d_qkv_there), view<T>(d_qkv));
        const std::lock_guard lock(mutex);
        each_row([&](std::size_t row, std::size_t s, std::size_t t) {
            const auto take = [&](std::vector<double>& to, std::size_t width, const T* from) {
                for (std::size_t c = 0; c < width; ++c) {
                    to[t * width + c] = static_cast<double>(static_cast<accumulator_t<T>>(from[c]));
                }
            };
            const T* const gradients = d_qkv.data() + row * (of_query + 2 * of_key);
            take(all.out[s], of_query, out.data() + row * of_query);
            take(all.d_query[s], of_query, gradients);
            take(all.d_key[s], of_key, gradients + of_query);
            take(all.d_value[s], of_key, gradients + of_query + of_key);
        });
    });
    return all;
}

}  // namespace

TEST_CASE("double: an engine on GPUs that moves tokens between layouts is the direct solution") {
    require_device();
    using engine = sequence::engine<comm::nccl, partition::zeppelin, direct_exchange, remapped, cuda_attention<double>>;
    const problem p({4, 2, 8}, {300, 130, 77, 41, 1}, mask::causal, 23);
    const solution reference = solved_directly(p);
    const solution got = solved_by_engine<engine>(p);
    for (const auto which : {&solution::out, &solution::d_query, &solution::d_key, &solution::d_value}) {
        CHECK(between(got.*which, reference.*which).absolute <= 1e-12);
    }
}

TEST_CASE_TEMPLATE("16 bits: an engine on GPUs that names no kernel has the program's library", T, float16, brief) {
    require_device();
    using engine = std::conditional_t<std::is_same_v<T, brief>, sequence::engine<comm::nccl, partition::zeppelin>,
                                      sequence::engine<comm::nccl, partition::zeppelin, direct_exchange, remapped,
                                                       typename default_attention<cuda_queue>::template of<T>>>;
    static_assert(std::is_same_v<typename engine::element_type, T>);
    problem p({4, 2, 64}, {300, 130, 77, 41}, mask::causal, 17);
    p.round_to<T>();
    const solution reference = solved_directly(p);
#if TUTTI_TEST_CUDNN
    // In a program that has cuDNN it is that library; counted.
    static default_fused_attention::maker cudnn = nullptr;
    static const auto counts = std::make_shared<tally>();
    cudnn = default_fused_attention::provide(nullptr);
    const bool linked = cudnn != nullptr;
    REQUIRE(linked);
    default_fused_attention::provide(
        [] { return std::unique_ptr<fused_attention>(std::make_unique<counting>(cudnn(), counts)); });
#endif
    const solution got = solved_by_engine<engine>(p);
#if TUTTI_TEST_CUDNN
    default_fused_attention::provide(cudnn);
    CHECK((*counts)[0] > 0);
    CHECK((*counts)[1] == 0);
#endif
    const double bar = std::is_same_v<T, brief> ? 4e-3 : 1e-3;
    CHECK(between(got.out, reference.out).relative <= bar);
    CHECK(between(got.d_query, reference.d_query).relative <= bar);
    CHECK(between(got.d_key, reference.d_key).relative <= bar);
    CHECK(between(got.d_value, reference.d_value).relative <= bar);
    // Without one, tiles.
    const auto before = default_fused_attention::provide(nullptr);
    const solution in_tiles = solved_by_engine<engine>(p);
    default_fused_attention::provide(before);
    CHECK(between(in_tiles.out, reference.out).relative <= bar);
    CHECK(between(in_tiles.d_value, reference.d_value).relative <= bar);
}
