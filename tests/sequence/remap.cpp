// Remap: every token's rows arrive where the layout says, and come back bit for bit; bytes, memory and messages exact;
// a whole layer between two layouts against one device.
#include <doctest/doctest.h>

#include <algorithm>  // max, min
#include <chrono>     // late ranks
#include <cmath>      // exp, sin
#include <cstdint>    // positions
#include <cstring>    // memcmp
#include <random>     // random placements
#include <thread>     // late ranks
#include <vector>     // rows

#include <tutti/comm/counted.hpp>    // bytes on the wire
#include <tutti/comm/self.hpp>       // one rank
#include <tutti/comm/threads.hpp>    // many ranks
#include <tutti/core/reduce_op.hpp>  // sums of gradients
#include <tutti/sequence/remap.hpp>  // tested

#include "sequence/recorder.hpp"  // sizes beyond memory

using namespace tutti;
using namespace tutti::sequence;
using comm::threads;

namespace {

const comm::options soon{.timeout = std::chrono::seconds(30)};

std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/// Rings of random ranks: chunk i and chunk 2G - 1 - i belong to its i-th rank.
placement random_placement(const cluster& machines, std::vector<std::int64_t> lengths, std::uint32_t seed) {
    std::mt19937 random(seed);
    const int ranks = machines.nodes * machines.ranks_per_node;
    placement p{machines, std::move(lengths), {}, std::vector<std::vector<piece>>(static_cast<std::size_t>(ranks))};
    for (std::size_t i = 0; i < p.lengths.size(); ++i) {
        std::vector<int> all;
        for (int r = 0; r < ranks; ++r) { all.push_back(r); }
        std::shuffle(all.begin(), all.end(), random);
        all.resize(1 + random() % static_cast<std::size_t>(ranks));
        const auto g = static_cast<std::int64_t>(all.size());
        const auto id = static_cast<int>(i);
        const auto start = [&](std::int64_t c) { return c * p.lengths[i] / (2 * g); };
        for (std::int64_t c = 0; c < g; ++c) {
            auto& own = p.pieces[static_cast<std::size_t>(all[static_cast<std::size_t>(c)])];
            own.push_back({id, start(c), start(c + 1)});
            own.push_back({id, start(2 * g - 1 - c), start(2 * g - c)});
        }
        p.rings.push_back({id, zone::world, all});
    }
    return p;
}

struct token {
    int sequence;
    std::int64_t position;
    [[nodiscard]] std::uint64_t name() const {
        return mixed((static_cast<std::uint64_t>(sequence) << 40) + static_cast<std::uint64_t>(position) + 1);
    }
};
std::vector<token> tokens_in(const std::vector<piece>& pieces) {
    std::vector<token> all;
    for (const piece& p : pieces) {
        for (std::int64_t t = p.begin; t < p.end; ++t) { all.push_back({p.sequence, t}); }
    }
    return all;
}

/// Three kinds of rows, each a function of its token.
struct kinds {
    static constexpr std::size_t width = 5;
    std::vector<double> hidden;
    std::vector<std::int32_t> position;
    std::vector<std::uint16_t> weight;
    kinds() = default;
    explicit kinds(const std::vector<token>& tokens) {
        for (const token& t : tokens) {
            for (std::size_t i = 0; i < width; ++i) {
                std::uint64_t bits = mixed(t.name() + i);  // any bits, NaN among them
                double value = 0;
                std::memcpy(&value, &bits, sizeof(value));
                hidden.push_back(value);
            }
            position.push_back(static_cast<std::int32_t>(t.position));
            weight.push_back(static_cast<std::uint16_t>(t.sequence));
        }
    }
    static kinds room(std::size_t tokens) {
        kinds k;
        k.hidden.assign(tokens * width, -1);
        k.position.assign(tokens, -1);
        k.weight.assign(tokens, 0xffff);
        return k;
    }
    [[nodiscard]] std::vector<token_rows<host_memory>> to(kinds& out) {
        return {rows_of(view<const double>(hidden), view<double>(out.hidden), width),
                rows_of(view<const std::int32_t>(position), view<std::int32_t>(out.position)),
                rows_of(view<const std::uint16_t>(weight), view<std::uint16_t>(out.weight))};
    }
    static constexpr std::size_t bytes_per_token = width * 8 + 4 + 2;
    [[nodiscard]] bool same_bits(const kinds& other) const {
        const auto same = [](const auto& a, const auto& b) {
            return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
        };
        return same(hidden, other.hidden) && same(position, other.position) && same(weight, other.weight);
    }
};

std::vector<placement> placements(const cluster& machines, std::uint32_t seed) {
    std::vector<placement> all;
    const std::size_t ranks = static_cast<std::size_t>(machines.nodes * machines.ranks_per_node);
    // Lengths that no number of chunks divides, sequences of nothing and of one token, fewer tokens than ranks.
    all.push_back(random_placement(machines, {137, 0, 698, 1, 57, 12, 0, 333, 7, 9}, seed));
    all.push_back(random_placement(machines, {1}, seed));
    all.push_back(random_placement(machines, {0, 0}, seed));
    all.push_back(random_placement(machines, {}, seed));
    all.push_back(random_placement(machines, {2041, 89}, seed + 1));
    // One rank has all, the others have no work.
    placement one{machines, {100}, {{0, zone::local, {0}}}, std::vector<std::vector<piece>>(ranks)};
    one.pieces.back() = {{0, 0, 50}, {0, 50, 100}};
    all.push_back(one);
    return all;
}

}  // namespace

TEST_CASE("the layouts by hand") {
    // 12 tokens on 4 ranks of 2 nodes: 7, 1, 4, 0 become 3 each.
    placement p{{2, 2}, {8, 4}, {}, {{{0, 0, 3}, {0, 4, 8}}, {{0, 3, 4}}, {{1, 0, 4}}, {}}};
    const remap r(p);
    CHECK(std::vector<token_move>(r.moves().begin(), r.moves().end()) ==
          std::vector<token_move>{{0, 1, 2}, {0, 3, 2}, {2, 3, 1}});
    const std::vector<std::vector<piece>> expected{
        {{0, 0, 3}}, {{0, 3, 4}, {0, 4, 6}}, {{1, 0, 3}}, {{0, 6, 8}, {1, 3, 4}}};
    CHECK(r.balanced_pieces(p) == expected);
    CHECK(r.leaving(0) == 4);
    CHECK(r.arriving(0) == 0);
    CHECK(r.arriving(3) == 3);
    p.pieces[0].pop_back();
    CHECK_THROWS_WITH_AS(static_cast<void>(r.balanced_pieces(p)), "remap: made from another placement", usage_error);
}

// Positions travel, so that rotary embeddings know them: SandAI-org/MagiAttention#196. Lengths that nothing divides:
// pytorch/torchtitan#2536; ranks without work: SandAI-org/MagiAttention#9.
TEST_CASE("every kind of row arrives where the layout says, and comes back bit for bit; bytes are exact") {
    for (const cluster& machines : {cluster{1, 1}, cluster{1, 2}, cluster{2, 2}, cluster{3, 1}, cluster{2, 4}}) {
        const int ranks = machines.nodes * machines.ranks_per_node;
        threads::launch(
            ranks,
            [&](threads& t) {
                comm::counted c(std::move(t));
                const int me = c.rank();
                const auto own = static_cast<std::size_t>(me);
                for (const placement& p : placements(machines, 3)) {
                    const remap r(p);
                    const auto after = r.balanced_pieces(p);
                    kinds in(tokens_in(p.pieces[own]));
                    const kinds expected(tokens_in(after[own]));
                    kinds out = kinds::room(r.balanced(me));
                    const auto before = c.traffic_ledger()->total();
                    r.forward(c, in.to(out));
                    CHECK(out.same_bits(expected));
                    CHECK((c.traffic_ledger()->total() - before) ==
                          comm::traffic{1, r.leaving(me) * kinds::bytes_per_token});
                    kinds back = kinds::room(r.tokens(me));
                    r.inverse(c, out.to(back));
                    CHECK(back.same_bits(in));
                    CHECK((c.traffic_ledger()->total() - before).bytes ==
                          (r.leaving(me) + r.arriving(me)) * kinds::bytes_per_token);
                    // The other way round: any data in the balanced layout.
                    kinds again = kinds::room(r.balanced(me));
                    r.forward(c, back.to(again));
                    CHECK(again.same_bits(out));
                    CHECK(c.queue().account().peak() == 0);
                }
            },
            soon);
    }
}

TEST_CASE("in place: what stays is not touched, the larger layout's memory serves both") {
    const cluster machines{2, 2};
    threads::launch(
        4,
        [&](threads& c) {
            for (const placement& p : placements(machines, 8)) {
                const remap r(p);
                const int me = c.rank();
                const kinds expected(tokens_in(r.balanced_pieces(p)[static_cast<std::size_t>(me)]));
                const kinds original(tokens_in(p.pieces[static_cast<std::size_t>(me)]));
                std::vector<double> memory = original.hidden;
                memory.resize(std::max(r.tokens(me), r.balanced(me)) * kinds::width);
                const view<double> all(memory);
                const auto attention = all.sub(0, r.tokens(me) * kinds::width);
                const auto balanced = all.sub(0, r.balanced(me) * kinds::width);
                const std::vector<token_rows<host_memory>> there{rows_of(view<const double>(attention), balanced, 5)};
                const std::vector<token_rows<host_memory>> back{rows_of(view<const double>(balanced), attention, 5)};
                r.forward(c, there);
                CHECK((balanced.empty() ||
                       std::memcmp(balanced.data(), expected.hidden.data(), balanced.size_bytes()) == 0));
                r.inverse(c, back);
                CHECK((attention.empty() ||
                       std::memcmp(attention.data(), original.hidden.data(), attention.size_bytes()) == 0));
            }
        },
        soon);
}

TEST_CASE("the gradient of forward is inverse of the gradient, and the other way round") {
    // The whole map as a matrix, row by row: forward of unit vectors; its transpose must be what inverse does.
    const cluster machines{2, 2};
    const placement p = random_placement(machines, {9, 4, 5}, 21);
    const std::size_t all = 18;
    std::vector<std::vector<int>> forward(all, std::vector<int>(all));
    std::vector<std::vector<int>> inverse = forward;
    threads::launch(
        4,
        [&](threads& c) {
            const remap r(p);
            const int me = c.rank();
            std::size_t first = 0;
            std::size_t first_balanced = 0;
            for (int q = 0; q < me; ++q) {
                first += r.tokens(q);
                first_balanced += r.balanced(q);
            }
            std::vector<int> attention(r.tokens(me));
            std::vector<int> balanced(r.balanced(me));
            const auto unit = [](std::vector<int>& v, std::size_t at, std::size_t one) {
                for (std::size_t i = 0; i < v.size(); ++i) { v[i] = at + i == one ? 1 : 0; }
            };
            for (std::size_t one = 0; one < all; ++one) {
                unit(attention, first, one);
                const token_rows<host_memory> there[] = {rows_of(view<const int>(attention), view<int>(balanced))};
                r.forward(c, there);
                for (std::size_t i = 0; i < balanced.size(); ++i) { forward[first_balanced + i][one] = balanced[i]; }
                unit(balanced, first_balanced, one);
                const token_rows<host_memory> back[] = {rows_of(view<const int>(balanced), view<int>(attention))};
                r.inverse(c, back);
                for (std::size_t i = 0; i < attention.size(); ++i) { inverse[first + i][one] = attention[i]; }
            }
        },
        soon);
    bool transposed = true;
    int ones = 0;
    for (std::size_t i = 0; i < all; ++i) {
        for (std::size_t j = 0; j < all; ++j) {
            transposed = transposed && forward[i][j] == inverse[j][i];
            ones += forward[i][j];
        }
    }
    CHECK(transposed);
    CHECK(ones == 18);
}

TEST_CASE("a cost matrix decides: a ring of ranks, neighbors first") {
    const cluster machines{4, 1};
    std::vector<std::int64_t> cost(16);
    for (std::int64_t i = 0; i < 4; ++i) {
        for (std::int64_t j = 0; j < 4; ++j) {
            cost[static_cast<std::size_t>(4 * i + j)] = std::min((i - j + 4) % 4, (j - i + 4) % 4);
        }
    }
    placement p{machines, {16, 16}, {}, {{{0, 0, 16}}, {}, {{1, 0, 16}}, {}}};
    p.pieces[0] = {{0, 0, 12}};
    p.pieces[2] = {{0, 12, 16}};
    p.pieces[3] = {{1, 0, 16}};
    const remap r(p, cost);  // 12, 0, 4, 16 become 8 each: 4 from 0 to 1, 4 from 3 to 2, 4 from 3 over 2 steps to 1
    CHECK(std::vector<token_move>(r.moves().begin(), r.moves().end()) ==
          std::vector<token_move>{{0, 1, 4}, {3, 1, 4}, {3, 2, 4}});
    threads::launch(
        4,
        [&](threads& c) {
            const auto own = static_cast<std::size_t>(c.rank());
            kinds in(tokens_in(p.pieces[own]));
            kinds out = kinds::room(r.balanced(c.rank()));
            r.forward(c, in.to(out));
            CHECK(out.same_bits(kinds(tokens_in(r.balanced_pieces(p)[own]))));
        },
        soon);
}

// NVIDIA/nccl#479, NVIDIA/nccl#584, NVIDIA/nccl#783: sends and receives that wait for each other.
TEST_CASE("ranks that come late, and in another order each time, wait for nobody forever") {
    const placement p = random_placement({2, 2}, {137, 698, 57, 333}, 5);
    const remap r(p);
    threads::launch(
        4,
        [&](threads& c) {
            std::mt19937 random(static_cast<std::uint32_t>(c.rank()));
            const auto own = static_cast<std::size_t>(c.rank());
            const kinds original(tokens_in(p.pieces[own]));
            kinds in = original;
            kinds out = kinds::room(r.balanced(c.rank()));
            for (int round = 0; round < 30; ++round) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
                r.forward(c, in.to(out));
                r.inverse(c, out.to(in));
            }
            CHECK(in.same_bits(original));
        },
        soon);
}

namespace {

/// One layer in fp64: y = W2 a, a = causal attention inside the sequence over u = W1 x; loss = sum of weight |y|^2 / 2
/// over the number of tokens with a weight.
constexpr std::size_t d = 4;
using row = std::vector<double>;  // [tokens][d]

double value(std::uint64_t seed) { return std::sin(static_cast<double>(mixed(seed) % 100003)); }
row input_of(const std::vector<token>& tokens) {
    row x;
    for (const token& t : tokens) {
        for (std::size_t i = 0; i < d; ++i) { x.push_back(value(t.name() + i)); }
    }
    return x;
}
row weights_of(const std::vector<token>& tokens, const std::vector<std::int64_t>& lengths) {
    row w;
    for (const token& t : tokens) {
        const bool counts = t.position % 3 != 0 && t.sequence != 2;  // one sequence counts for nothing
        w.push_back(counts ? 1.0 / static_cast<double>(lengths[static_cast<std::size_t>(t.sequence)]) : 0);
    }
    return w;
}
row matrix(std::uint64_t seed) {
    row m;
    for (std::size_t i = 0; i < d * d; ++i) { m.push_back(value(seed * 1000 + i) / 2); }
    return m;
}
row linear(const row& m, const row& x) {
    row y(x.size(), 0);
    for (std::size_t t = 0; t < x.size() / d; ++t) {
        for (std::size_t i = 0; i < d; ++i) {
            for (std::size_t j = 0; j < d; ++j) { y[t * d + i] += m[i * d + j] * x[t * d + j]; }
        }
    }
    return y;
}
/// gradient of x; adds to that of m
row linear_backward(const row& m, const row& x, const row& dy, row& dm) {
    row dx(x.size(), 0);
    for (std::size_t t = 0; t < x.size() / d; ++t) {
        for (std::size_t i = 0; i < d; ++i) {
            for (std::size_t j = 0; j < d; ++j) {
                dx[t * d + j] += m[i * d + j] * dy[t * d + i];
                dm[i * d + j] += dy[t * d + i] * x[t * d + j];
            }
        }
    }
    return dx;
}
/// Attention of whole sequences, and its gradient; where a token is comes from the position that traveled with it.
struct attention {
    row out;
    row gradient;
    attention(const row& u, const std::vector<std::int32_t>& sequence, const std::vector<std::int32_t>& position,
              const row* dout)
        : out(u.size(), 0), gradient(u.size(), 0) {
        const std::size_t tokens = u.size() / d;
        const auto dot = [&](const row& a, std::size_t s, const row& b, std::size_t t) {
            double sum_of_products = 0;
            for (std::size_t i = 0; i < d; ++i) { sum_of_products += a[s * d + i] * b[t * d + i]; }
            return sum_of_products;
        };
        for (std::size_t q = 0; q < tokens; ++q) {
            std::vector<std::size_t> seen;
            for (std::size_t k = 0; k < tokens; ++k) {
                if (sequence[k] == sequence[q] && position[k] <= position[q]) { seen.push_back(k); }
            }
            row p;
            double sum_of_weights = 0;
            for (const std::size_t k : seen) { sum_of_weights += p.emplace_back(std::exp(dot(u, q, u, k))); }
            double expected = 0;
            for (std::size_t i = 0; i < seen.size(); ++i) {
                p[i] /= sum_of_weights;
                for (std::size_t j = 0; j < d; ++j) { out[q * d + j] += p[i] * u[seen[i] * d + j]; }
                if (dout != nullptr) { expected += p[i] * dot(*dout, q, u, seen[i]); }
            }
            if (dout == nullptr) { continue; }
            for (std::size_t i = 0; i < seen.size(); ++i) {
                const std::size_t k = seen[i];
                const double ds = p[i] * (dot(*dout, q, u, k) - expected);
                for (std::size_t j = 0; j < d; ++j) {
                    gradient[k * d + j] += p[i] * (*dout)[q * d + j] + ds * u[q * d + j];
                    gradient[q * d + j] += ds * u[k * d + j];
                }
            }
        }
    }
};

struct layer_result {
    double loss = 0;
    row dw1 = row(d * d, 0);
    row dw2 = row(d * d, 0);
};

/// `to_attention` and `from_attention` change the layout of rows of d numbers.
template <class To, class From>
layer_result run_layer(const row& x, const row& weight, double count, const std::vector<std::int32_t>& sequence,
                       const std::vector<std::int32_t>& position, To to_attention, From from_attention) {
    const row w1 = matrix(1);
    const row w2 = matrix(2);
    layer_result result;
    const row u = to_attention(linear(w1, x));
    const row a = from_attention(attention(u, sequence, position, nullptr).out);
    const row y = linear(w2, a);
    row dy(y.size());
    for (std::size_t i = 0; i < y.size(); ++i) {
        result.loss += weight[i / d] * y[i] * y[i] / 2 / count;
        dy[i] = weight[i / d] * y[i] / count;
    }
    const row da = to_attention(linear_backward(w2, a, dy, result.dw2));
    const row du = from_attention(attention(u, sequence, position, &da).gradient);
    linear_backward(w1, x, du, result.dw1);
    return result;
}

}  // namespace

// Weights of the loss travel with their tokens, and the loss is over all tokens' count, not a rank's:
// NovaSky-AI/SkyRL#1420, NVIDIA/Megatron-LM#673; ranks and sequences without a valid token: NVIDIA/Megatron-LM#1764.
TEST_CASE("a layer between two layouts has the loss and the gradients of one device") {
    const std::vector<std::int64_t> lengths{13, 2, 9, 30, 1, 7};
    // Whole sequences; rank 3 attends to nothing, rank 2 to a sequence that counts for nothing.
    placement p{{2, 2}, lengths, {}, {{{3, 0, 30}}, {{0, 0, 13}, {4, 0, 1}, {1, 0, 2}, {5, 0, 7}}, {{2, 0, 9}}, {}}};
    std::vector<piece> whole;
    for (std::size_t i = 0; i < lengths.size(); ++i) { whole.push_back({static_cast<int>(i), 0, lengths[i]}); }
    const auto names = [](const std::vector<token>& tokens, std::vector<std::int32_t>& sequence,
                          std::vector<std::int32_t>& position) {
        for (const token& t : tokens) {
            sequence.push_back(t.sequence);
            position.push_back(static_cast<std::int32_t>(t.position));
        }
    };
    const auto all = tokens_in(whole);
    std::vector<std::int32_t> sequence;
    std::vector<std::int32_t> position;
    names(all, sequence, position);
    const row weight = weights_of(all, lengths);
    double count = 0;
    for (const double w : weight) { count += w > 0 ? 1 : 0; }
    const auto stay = [](const row& rows) { return rows; };
    const layer_result expected = run_layer(input_of(all), weight, count, sequence, position, stay, stay);
    REQUIRE(expected.loss > 0);

    threads::launch(
        4,
        [&](threads& c) {
            const remap r(p);
            const int me = c.rank();
            const auto own = static_cast<std::size_t>(me);
            // Data is loaded in the attention layout; everything a token has travels to the balanced one at once.
            const auto mine = tokens_in(p.pieces[own]);
            const row x_there = input_of(mine);
            const row weight_there = weights_of(mine, lengths);
            row x(r.balanced(me) * d);
            row own_weight(r.balanced(me));
            const token_rows<host_memory> load[] = {
                rows_of(view<const double>(x_there), view<double>(x), d),
                rows_of(view<const double>(weight_there), view<double>(own_weight))};
            r.forward(c, load);
            std::vector<std::int32_t> own_sequence;
            std::vector<std::int32_t> own_position;
            names(mine, own_sequence, own_position);
            double valid[1] = {0};
            for (const double w : own_weight) { valid[0] += w > 0 ? 1 : 0; }
            c.all_reduce(view<double>(valid), view<double>(valid), sum{});
            const auto to_attention = [&](const row& rows) {
                row out(r.tokens(me) * d);
                const token_rows<host_memory> kind[] = {rows_of(view<const double>(rows), view<double>(out), d)};
                r.inverse(c, kind);
                return out;
            };
            const auto from_attention = [&](const row& rows) {
                row out(r.balanced(me) * d);
                const token_rows<host_memory> kind[] = {rows_of(view<const double>(rows), view<double>(out), d)};
                r.forward(c, kind);
                return out;
            };
            layer_result got =
                run_layer(x, own_weight, valid[0], own_sequence, own_position, to_attention, from_attention);
            double loss[1] = {got.loss};
            c.all_reduce(view<double>(loss), view<double>(loss), sum{});
            c.all_reduce(view<double>(got.dw1), view<double>(got.dw1), sum{});
            c.all_reduce(view<double>(got.dw2), view<double>(got.dw2), sum{});
            double worst = std::abs(loss[0] - expected.loss);
            for (std::size_t i = 0; i < d * d; ++i) {
                worst =
                    std::max({worst, std::abs(got.dw1[i] - expected.dw1[i]), std::abs(got.dw2[i] - expected.dw2[i])});
            }
            CHECK(worst <= 1e-12);
        },
        soon);
}

// SandAI-org/MagiAttention#169: byte counts that were 32-bit integers.
TEST_CASE("rows of more than 4 GiB on a rank: sizes are 64-bit throughout") {
    constexpr std::int64_t many = 3'000'000'001;
    placement p{{2, 2}, {many, 5}, {}, {{{0, 0, many}}, {{1, 0, 5}}, {}, {}}};
    const remap r(p);
    constexpr std::size_t bytes = 8192;  // a token's
    std::size_t sent = 0;
    std::size_t received = 0;
    for (int rank = 0; rank < 4; ++rank) {
        test::recorder c(rank, 4);
        const token_rows<phantom_memory> rows[] = {
            rows_of(view<const std::uint16_t, phantom_memory>(nullptr, r.tokens(rank) * bytes / 2),
                    view<std::uint16_t, phantom_memory>(nullptr, r.balanced(rank) * bytes / 2), bytes / 2)};
        r.forward(c, rows);
        REQUIRE(c.exchanges.size() == 1);
        std::size_t own = 0;
        for (const comm::message& m : c.exchanges[0]) {
            (m.sends ? sent : received) += m.bytes;
            own += m.sends ? m.bytes : 0;
        }
        CHECK(own == r.leaving(rank) * bytes);
    }
    CHECK(sent == received);
    CHECK(sent == static_cast<std::size_t>(many - (many + 5 + 3) / 4) * bytes);
    CHECK(sent > std::size_t{1} << 34);
}

TEST_CASE("what does not fit is refused before anything moves") {
    placement p{{1, 1}, {4}, {}, {{{0, 0, 4}}}};
    const remap r(p);
    comm::self<> c;
    std::vector<int> in(4);
    std::vector<int> out(5);
    const auto forward = [&](view<const int> from, view<int> to, std::size_t width = 1) {
        const token_rows<host_memory> kind[] = {rows_of(from, to, width)};
        r.forward(c, kind);
    };
    const view<const int> whole(in);
    const view<int> room(out);
    CHECK_THROWS_WITH_AS(forward(whole.sub(0, 3), room.sub(0, 4)), "remap: in has 12 bytes, rank 0 has 4 tokens of 4",
                         usage_error);
    CHECK_THROWS_WITH_AS(forward(whole, room), "remap: out has 20 bytes, rank 0 has 4 tokens of 4", usage_error);
    CHECK_THROWS_WITH_AS(forward(view<const int>(out).sub(1, 4), room.sub(0, 4)),
                         "remap: in and out overlap, but do not begin at the same element", usage_error);
    CHECK_THROWS_WITH_AS(forward(whole, room.sub(0, 4), 0), "remap: rows of 0 elements of 4 bytes", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(r.tokens(1)), "remap: rank 1 is not one of 1 ranks", usage_error);
    const remap two(placement{{1, 2}, {4}, {}, {{{0, 0, 4}}, {}}});
    const token_rows<host_memory> kind[] = {rows_of(whole, room.sub(0, 2))};
    CHECK_THROWS_WITH_AS(two.forward(c, kind), "remap: planned for 2 ranks, 'self' has 1", usage_error);
    CHECK_THROWS_WITH_AS(remap(placement{{1, 1}, {4}, {}, {{{0, 3, 1}}}}),
                         "remap: rank 0 holds tokens 3 to 1 of sequence 0", usage_error);
    CHECK_THROWS_WITH_AS(remap(placement{{2, 2}, {4}, {}, {{{0, 0, 4}}}}),
                         "token moves: 2 nodes of 2 ranks for 1 ranks", usage_error);
    forward(whole, room.sub(0, 4));
}
