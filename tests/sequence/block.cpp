// Attention of blocks on the host, the merge of partial results, the tokens of a ring's members, and packed calls.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // count
#include <cmath>      // exp, log
#include <cstddef>    // size_t
#include <cstdint>    // positions
#include <limits>     // infinity
#include <numeric>    // iota
#include <set>        // shapes of calls
#include <vector>     // data

#include <sequence/problem.hpp>                    // direct solution
#include <tutti/sequence/detail/packed_calls.hpp>  // under test
#include <tutti/sequence/detail/ring_share.hpp>    // member_tokens
#include <tutti/sequence/host_attention.hpp>       // under test
#include <tutti/sequence/token_operations.hpp>     // merge

using namespace tutti;
using namespace tutti::test;
using namespace tutti::sequence;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// PrimeIntellect-ai/prime-rl#1305: padding by len % m instead of up to the next multiple.
static_assert(sequence::detail::fused_rows(1) == 128 && sequence::detail::fused_rows(128) == 128);
static_assert(sequence::detail::fused_rows(129) == 256 && sequence::detail::fused_rows(1024) == 1024);
static_assert(sequence::detail::fused_rows(1025) == 1280 && sequence::detail::fused_rows(2048) == 2048);
static_assert(sequence::detail::fused_rows(2049) == 2560 && sequence::detail::fused_rows(32768) == 32768);

// One sequence of a problem as blocks of rows, and what comes of it.
struct block_data {
    problem of;
    std::vector<double> out, log_sum_exp, d_query, d_key, d_value, delta;
    explicit block_data(problem p) : of(std::move(p)) {
        const std::size_t tokens = at(of.lengths[0]);
        out.assign(tokens * of.heads.query * of.heads.width, std::numeric_limits<double>::quiet_NaN());
        log_sum_exp.assign(tokens * of.heads.query, std::numeric_limits<double>::quiet_NaN());
        delta = log_sum_exp;
        d_query.assign(out.size(), 0);
        d_key.assign(tokens * of.heads.kv * of.heads.width, 0);
        d_value = d_key;
    }
    token_view<double> rows(std::vector<double>& of_all, std::size_t heads) {
        return {view<double>(of_all), at(of.lengths[0]), heads, of.heads.width};
    }
    token_view<double> queries(std::vector<double>& all) { return rows(all, of.heads.query); }
    token_view<double> keys(std::vector<double>& all) { return rows(all, of.heads.kv); }
    token_view<double> numbers(std::vector<double>& all) {
        return numbers_by_head(view<double>(all), at(of.lengths[0]), of.heads.query);
    }
    // Queries [a, b) to keys [c, d).
    forward_block<double, host_memory> forward(std::size_t a, std::size_t b, std::size_t c, std::size_t d) {
        return {queries(of.query[0]).rows(a, b - a),
                keys(of.key[0]).rows(c, d - c),
                keys(of.value[0]).rows(c, d - c),
                {of.rule, static_cast<std::int64_t>(a), static_cast<std::int64_t>(c)},
                of.scale,
                queries(out).rows(a, b - a),
                numbers(log_sum_exp).rows(a, b - a)};
    }
    backward_block<double, host_memory> backward(std::size_t a, std::size_t b, std::size_t c, std::size_t d) {
        const auto f = forward(a, b, c, d);
        return {f.query,
                f.key,
                f.value,
                f.seen,
                f.scale,
                queries(of.d_out[0]).rows(a, b - a),
                {},
                f.log_sum_exp,
                numbers(delta).rows(a, b - a),
                queries(d_query).rows(a, b - a),
                keys(d_key).rows(c, d - c),
                keys(d_value).rows(c, d - c)};
    }
    solution solved() const {
        solution s(of);
        s.out[0] = out;
        s.d_query[0] = d_query;
        s.d_key[0] = d_key;
        s.d_value[0] = d_value;
        for (std::size_t h = 0; h < of.heads.query; ++h) {
            for (std::size_t t = 0; t < at(of.lengths[0]); ++t) {
                s.log_sum_exp[0][t * of.heads.query + h] = log_sum_exp[h * at(of.lengths[0]) + t];
            }
        }
        return s;
    }
};

// Attends in the given cuts of the keys, merged in the given order, then differentiates in the same cuts.
solution in_cuts(block_data& b, const std::vector<std::size_t>& cuts, const std::vector<std::size_t>& order) {
    host_attention<double> kernel;
    const host_queue q;
    const std::size_t tokens = at(b.of.lengths[0]);
    std::vector<double> out(b.out.size(), 0);
    std::vector<double> sums(b.log_sum_exp.size(), -infinity);
    for (const std::size_t i : order) {
        kernel.forward(q, b.forward(0, tokens, cuts[i], cuts[i + 1]));
        merge_operation<double, host_memory>{b.queries(b.out), b.numbers(b.log_sum_exp), b.queries(out),
                                             b.numbers(sums), b.queries(out)}();
    }
    b.out = out;
    b.log_sum_exp = sums;
    dot_tokens_operation<double, host_memory>{b.queries(b.of.d_out[0]), b.queries(b.out), b.numbers(b.delta)}();
    for (const std::size_t i : order) { kernel.backward(q, b.backward(0, tokens, cuts[i], cuts[i + 1])); }
    return b.solved();
}

}  // namespace

TEST_CASE("any cuts of the keys, merged in any order, give the attention to all of them") {
    for (const mask rule : {mask::causal, mask::full}) {
        for (const attention_heads heads : {attention_heads{1, 1, 5}, attention_heads{6, 2, 3}}) {
            const problem p(heads, {97}, rule, 3);
            const solution reference = solved_directly(p);
            for (std::size_t parts : {1u, 2u, 7u, 64u}) {
                CAPTURE(parts);
                std::vector<std::size_t> cuts{0};
                for (std::size_t i = 1; i < parts; ++i) { cuts.push_back(mixed(parts * 100 + i) % 98); }
                cuts.push_back(97);
                std::sort(cuts.begin(), cuts.end());  // some parts are empty
                std::vector<std::size_t> order(parts);
                std::iota(order.begin(), order.end(), 0u);
                for (std::size_t i = parts; i > 1; --i) { std::swap(order[i - 1], order[mixed(i) % i]); }
                block_data b(p);
                CHECK(between(in_cuts(b, cuts, order), reference).absolute <= 1e-13);
            }
        }
    }
}

TEST_CASE("merged parts are finite and right, however far apart their sums are, and where some saw nothing") {
    // jzhang38/EasyContext#14, zhuzilin/ring-flash-attention#34: exponentials of differences overflowed.
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
        const std::size_t parts = 1 + mixed(seed) % 64;
        const double range = seed % 4 == 0 ? 1e4 : seed % 4 == 1 ? 88 : seed % 4 == 2 ? 1e3 : 1;
        std::vector<double> sums(parts), values(parts);
        double largest = -infinity;
        for (std::size_t i = 0; i < parts; ++i) {
            const bool nothing = mixed(seed * 977 + i) % 3 == 0;
            sums[i] = nothing ? -infinity : range * random_element<double>(seed + 1, i);
            values[i] = nothing ? 0 : random_element<double>(seed + 2, i);
            largest = std::max(largest, sums[i]);
        }
        long double total = 0, weighted = 0;
        for (std::size_t i = 0; i < parts; ++i) {
            if (sums[i] == -infinity) { continue; }
            const long double w = std::exp(static_cast<long double>(sums[i]) - largest);
            total += w;
            weighted += w * values[i];
        }
        double out = 0;
        double log_sum = -infinity;
        const token_view<double> y(view<double>(&out, 1), 1, 1, 1);
        const token_view<double> l(view<double>(&log_sum, 1), 1, 1, 1);
        for (std::size_t i = 0; i < parts; ++i) {
            merge_operation<double, host_memory>{token_view<double>(view<double>(&values[i], 1), 1, 1, 1),
                                                 token_view<double>(view<double>(&sums[i], 1), 1, 1, 1), y, l, y}();
        }
        if (total == 0) {
            CHECK(out == 0);
            CHECK(log_sum == -infinity);
            continue;
        }
        // A sum is rounded at each merge, which is what its weight is then wrong by.
        const double of_sums = static_cast<double>(parts) * std::numeric_limits<double>::epsilon() / 2 * range;
        CHECK(std::fabs(out - static_cast<double>(weighted / total)) <= std::max(1e-14, of_sums));
        const double expected = largest + static_cast<double>(std::log(total));
        CHECK(std::fabs(log_sum - expected) <= std::max(1e-14, of_sums));
    }
}

TEST_CASE("a merge is one pass over what it reads and writes") {
    // zhuzilin/ring-flash-attention#60: merges of several passes took longer than attention in some steps.
    const auto bytes_of = [](auto other, auto kept, auto to) {
        using M = host_memory;
        sequence::merge_operation<float, M, decltype(other), decltype(kept), decltype(to)> m;
        m.other_out.tokens = m.kept.tokens = m.out.tokens = m.log_sum_exp.tokens = 10;
        m.other_out.heads = m.kept.heads = m.out.heads = m.log_sum_exp.heads = 3;
        m.other_out.width = m.kept.width = m.out.width = 8;
        m.log_sum_exp.width = 1;
        return m.cost().bytes;
    };
    CHECK(bytes_of(float{}, float{}, float{}) == 240 * 12 + 30 * 12);
    CHECK(bytes_of(bfloat16{}, float{}, bfloat16{}) == 240 * 8 + 30 * 12);
}

TEST_CASE("a query that sees no key gets 0 and -inf, gives gradients of exactly 0, and changes nothing when merged") {
    block_data b(problem({2, 1, 4}, {40}, mask::causal));
    host_attention<double> kernel;
    const host_queue q;
    // Queries 0 ... 19 against keys 10 ... 39: the first ten see none, the others up to themselves.
    kernel.forward(q, b.forward(0, 20, 10, 40));
    for (std::size_t t = 0; t < 10; ++t) {
        for (std::size_t h = 0; h < 2; ++h) {
            CHECK(*b.numbers(b.log_sum_exp).at(t, h) == -infinity);
            for (std::size_t c = 0; c < 4; ++c) { CHECK(b.queries(b.out).at(t, h)[c] == 0); }
        }
    }
    CHECK(std::isfinite(*b.numbers(b.log_sum_exp).at(10, 1)));
    std::fill(b.delta.begin(), b.delta.end(), 0.5);
    kernel.backward(q, b.backward(0, 20, 10, 40));
    for (std::size_t t = 0; t < 10; ++t) {
        for (std::size_t h = 0; h < 2; ++h) {
            for (std::size_t c = 0; c < 4; ++c) { CHECK(b.queries(b.d_query).at(t, h)[c] == 0); }
        }
    }
    for (std::size_t t = 20; t < 40; ++t) {  // keys that nobody saw
        for (std::size_t c = 0; c < 4; ++c) { CHECK(b.keys(b.d_key).at(t, 0)[c] == 0); }
    }
    for (const double x : b.d_value) { CHECK(std::isfinite(x)); }

    // A tile of which no row sees anything, no keys at all, no queries at all: SandAI-org/MagiAttention#90 waited for one.
    block_data none(problem({1, 1, 2}, {50}, mask::causal));
    kernel.forward(q, none.forward(0, 40, 45, 50));
    kernel.backward(q, none.backward(0, 40, 45, 50));
    CHECK(none.out[0] == 0);
    CHECK(none.log_sum_exp[39] == -infinity);
    kernel.forward(q, none.forward(40, 50, 7, 7));
    kernel.backward(q, none.backward(40, 50, 7, 7));
    CHECK(none.out[2 * 49] == 0);
    CHECK(none.log_sum_exp[49] == -infinity);
    kernel.forward(q, none.forward(7, 7, 0, 50));
    kernel.backward(q, none.backward(7, 7, 0, 50));
    for (const auto* gradient : {&none.d_query, &none.d_key, &none.d_value}) {
        for (const double x : *gradient) { CHECK(x == 0); }
    }
    // Scores that overflowed to -inf, all of a row.
    problem low({1, 1, 1}, {3}, mask::full);
    low.query[0] = {1, infinity, 1};
    low.key[0] = {-1, -2, -1};
    block_data overflowed(low);
    kernel.forward(q, overflowed.forward(0, 3, 0, 3));
    CHECK(overflowed.out[1] == 0);
    CHECK(overflowed.log_sum_exp[1] == -infinity);
    CHECK(std::isfinite(overflowed.out[0]));
    // Saved sums of -inf, wherever they come from.
    block_data saved(problem({1, 1, 2}, {5}, mask::full));
    std::fill(saved.log_sum_exp.begin(), saved.log_sum_exp.end(), -infinity);
    std::fill(saved.delta.begin(), saved.delta.end(), 0.0);
    kernel.backward(q, saved.backward(0, 5, 0, 5));
    for (const auto* gradient : {&saved.d_query, &saved.d_key, &saved.d_value}) {
        for (const double x : *gradient) { CHECK(x == 0); }
    }
}

TEST_CASE("scores far below any sentinel still attend") {
    // flashinfer-ai/flashinfer#4401, ohdearquant/lattice#373, tracel-ai/burn#4697: finite stand-ins for -inf won over real
    // scores.
    problem p({1, 1, 2}, {9}, mask::causal);
    for (auto& x : p.query[0]) { x = 1e4; }
    for (std::size_t j = 0; j < 9; ++j) {
        for (std::size_t c = 0; c < 2; ++c) { p.key[0][2 * j + c] = -100 - 1e-5 * static_cast<double>(j); }
    }
    block_data b(p);
    const solution got = in_cuts(b, {0, 9}, {0});
    const solution reference = solved_directly(p);
    CHECK(between(got.out, reference.out).absolute <= 1e-9);  // scores of 1e6: the ninth digit is theirs
    CHECK(got.log_sum_exp[0][0] < -1e6);
}

TEST_CASE("sums are natural logarithms in the layout that is asked for") {
    // meta-pytorch/attention-gym#205 (base 2), zhuzilin/ring-flash-attention#46 (layouts of packed sums).
    problem p({2, 2, 1}, {3}, mask::full);
    std::fill(p.key[0].begin(), p.key[0].end(), 0.0);  // all scores 0: e to the sum is the number of keys
    block_data b(p);
    auto f = b.forward(0, 3, 0, 3);
    host_attention<double> kernel;
    kernel.forward(host_queue{}, f);
    for (const double x : b.log_sum_exp) { CHECK(x == doctest::Approx(std::log(3.0)).epsilon(1e-15)); }
    std::vector<double> by_token(7, -1);
    f.log_sum_exp = token_view<double>(view<double>(by_token), 3, 2, 1);
    kernel.forward(host_queue{}, f);
    for (std::size_t i = 0; i < 6; ++i) { CHECK(by_token[i] == b.log_sum_exp[0]); }
    CHECK(by_token[6] == -1);
}

TEST_CASE("every token of a ring belongs to one member, and members do equal work") {
    for (const std::size_t members : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 12u, 16u}) {
        for (const std::int64_t length : {0, 1, 7, 9, 12, 57, 137, 698, 1024, 2041, 4097}) {
            CAPTURE(members);
            CAPTURE(length);
            std::vector<int> owners(at(length));
            double most = 0;
            for (std::size_t j = 0; j < members; ++j) {
                const sequence::detail::member_tokens mine(length, members, j);
                std::size_t row = 0;
                double pairs = 0;
                for (const auto& s : mine.stretches()) {
                    CHECK(s.begin < s.end);
                    CHECK(s.row == row);
                    row += s.size();
                    for (std::int64_t t = s.begin; t < s.end; ++t) {
                        ++owners[at(t)];
                        pairs += static_cast<double>(t + 1);
                    }
                }
                CHECK(row == mine.tokens());
                most = std::max(most, pairs);
            }
            for (const int n : owners) { CHECK(n == 1); }
            const double average =
                static_cast<double>(length) * static_cast<double>(length + 1) / 2 / static_cast<double>(members);
            if (length >= 64 * static_cast<std::int64_t>(members)) { CHECK(most <= 1.035 * average); }
        }
    }
    // Products of lengths and chunks beyond 64 bits: SandAI-org/MagiAttention#169 counted bytes in 32.
    CHECK(sequence::detail::member_tokens(std::int64_t{1} << 40, 16, 3).tokens() == std::size_t{1} << 36);
}

TEST_CASE("packed calls are of sequences of like length, each row of which is in one of them") {
    using sequence::detail::fused_rows;
    using sequence::detail::in_steps;
    std::size_t previous = 0;
    for (std::size_t n = 1; n <= 5000; ++n) {  // at most a quarter more, and four numbers an octave
        const std::size_t m = in_steps(n);
        CHECK((m >= n && 4 * m <= 5 * n && m >= previous && in_steps(m) == m));
        previous = m;
    }
    std::set<std::size_t> numbers;
    for (std::size_t n = 65; n <= 128; ++n) { numbers.insert(in_steps(n)); }
    CHECK(numbers == std::set<std::size_t>{80, 96, 112, 128});

    const std::vector<std::size_t> lengths{300, 0, 1, 256, 257, 9000, 512, 513, 4097, 8192, 2, 3, 4, 5, 6, 7, 8};
    const auto calls = sequence::detail::packed_calls(lengths);
    std::vector<char> covered(23163, 0);
    std::size_t longest = std::numeric_limits<std::size_t>::max();
    for (const auto& c : calls) {
        CHECK(std::is_sorted(c.firsts.begin(), c.firsts.end()));
        const std::size_t most = *std::max_element(c.lengths.begin(), c.lengths.end());
        const std::size_t least = *std::min_element(c.lengths.begin(), c.lengths.end());
        CHECK(c.rows == fused_rows(most));
        CHECK(most < longest);
        CHECK((most <= 256 || 2 * least > most));
        longest = least;
        std::vector<std::int64_t> offsets;
        std::vector<std::int32_t> tokens;
        c.append_offsets(1000, offsets);
        c.append_lengths(tokens);
        REQUIRE(tokens.size() == in_steps(c.lengths.size()));
        REQUIRE(offsets.size() == tokens.size() + 1);
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            CHECK(offsets[i] % 1000 == 0);
            for (std::int64_t t = 0; t < tokens[i]; ++t) { ++covered[at(offsets[i] / 1000 + t)]; }
            if (i >= c.lengths.size()) { CHECK((tokens[i] == 0 && offsets[i] == offsets.back())); }
        }
    }
    CHECK(std::count(covered.begin(), covered.end(), 1) == 23163);
    CHECK(sequence::detail::packed_calls({}).empty());
    // Numbers beyond 32 bits.
    std::vector<std::int64_t> offsets;
    sequence::detail::packed_call{1 << 20, {1 << 20}, {1 << 20}}.append_offsets(12288, offsets);
    CHECK(offsets == std::vector<std::int64_t>{(std::int64_t{1} << 20) * 12288, (std::int64_t{2} << 20) * 12288});
}

TEST_CASE("a view of tokens that leaves its memory is refused") {
    std::vector<double> memory(24);
    const view<double> all(memory);
    CHECK_NOTHROW(token_view<double>(all, 3, 2, 4));
    CHECK_NOTHROW(token_view<double>(all, 0, 2, 400));
    CHECK_NOTHROW(token_view<double>(all, 3, 2, 4, 4, 12));
    CHECK_THROWS_WITH_AS(token_view<double>(all, 4, 2, 4),
                         "token_view: 4 tokens of 2 heads of 4, 8 and 4 apart, do not fit into 24 elements",
                         usage_error);
    CHECK_THROWS_AS(token_view<double>(all, 3, 2, 4, 4, 13), usage_error);
    // Sizes that wrap around: 2^64 elements and a few.
    const std::size_t half = std::size_t{1} << 63;
    CHECK_THROWS_AS(token_view<double>(all, half + 1, 1, 4, 2, 0), usage_error);
    CHECK_THROWS_AS(token_view<double>(all, 1, half + 1, 4, 0, 2), usage_error);
    CHECK_THROWS_AS(token_view<double>(all, 2, 3, 4, half, half / 2), usage_error);
    CHECK_THROWS_AS(token_view<double>(all, 2, 1, half + half - 4, 8, 0), usage_error);
    CHECK_THROWS_AS(token_view<double>(all, 2, half, 2), usage_error);
    CHECK_NOTHROW(token_view<double>(all, half, half, 24, 0, 0));
    CHECK_THROWS_WITH_AS(copy_tokens(host_queue{}, token_view<const double>(token_view<double>(all, 1, 2, 4)),
                                     token_view<double>(all, 1, 4, 2)),
                         "copy_tokens: shapes differ (in 1 x 2 x 4, out 1 x 4 x 2)", usage_error);
}
