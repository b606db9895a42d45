// Problems of attention, their direct solution in double, and how a placement's ranks solve them together.
// Needs sequence/placement and doctest. The direct solution shares no code with the library.
#pragma once

#include <algorithm>  // max
#include <chrono>     // deadline
#include <cmath>      // exp, log, sqrt
#include <cstddef>    // size_t
#include <cstdint>    // lengths
#include <limits>     // infinity, NaN
#include <mutex>      // results of ranks
#include <vector>     // tensors

#include <doctest/doctest.h>  // checks

#include <tutti/comm/threads.hpp>              // ranks
#include <tutti/sequence/block_attention.hpp>  // mask
#include <tutti/sequence/placement.hpp>        // placement
#include <tutti/sequence/token_view.hpp>       // token_view

#include <support/build.hpp>    // full_speed
#include <support/failure.hpp>  // expect
#include <support/oracle.hpp>   // random_element

namespace tutti::test {

using sequence::attention_heads;
using sequence::mask;
using sequence::placement;
using sequence::token_view;
using sequence::zone;

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// One tensor of every sequence: [token][head][c].
using tensors = std::vector<std::vector<double>>;

struct problem {
    attention_heads heads;
    mask rule = mask::causal;
    double scale = 0;
    std::vector<std::int64_t> lengths;
    tensors query, key, value, d_out;

    problem(attention_heads h, std::vector<std::int64_t> all_lengths, mask r = mask::causal, std::uint64_t seed = 1)
        : heads(h), rule(r), scale(1 / std::sqrt(static_cast<double>(h.width))), lengths(std::move(all_lengths)) {
        for (std::size_t s = 0; s < lengths.size(); ++s) {
            const auto draw = [&](tensors& into, std::uint64_t which, std::size_t head_count) {
                into.emplace_back(at(lengths[s]) * head_count * heads.width);
                for (std::size_t i = 0; i < into.back().size(); ++i) {
                    into.back()[i] = 2 * random_element<double>(seed * 1000 + s * 10 + which, i);
                }
            };
            draw(query, 0, heads.query);
            draw(key, 1, heads.kv);
            draw(value, 2, heads.kv);
            draw(d_out, 3, heads.query);
        }
    }
    /// Numbers that T can hold.
    template <class T> void round_to() {
        for (tensors* t : {&query, &key, &value, &d_out}) {
            for (auto& of_sequence : *t) {
                for (double& x : of_sequence) {
                    x = static_cast<double>(static_cast<accumulator_t<T>>(static_cast<T>(x)));
                }
            }
        }
    }
};

struct solution {
    tensors out, log_sum_exp, d_query, d_key, d_value;
    explicit solution(const problem& p) {
        for (const std::int64_t s : p.lengths) {
            const double nan = std::numeric_limits<double>::quiet_NaN();
            out.emplace_back(at(s) * p.heads.query * p.heads.width, nan);
            d_query.push_back(out.back());
            log_sum_exp.emplace_back(at(s) * p.heads.query, nan);
            d_key.emplace_back(at(s) * p.heads.kv * p.heads.width, nan);
            d_value.push_back(d_key.back());
        }
    }
};

/// One query after the other, all its keys at once.
inline solution solved_directly(const problem& p) {
    solution all(p);
    const std::size_t query_heads = p.heads.query;
    const std::size_t kv_heads = p.heads.kv;
    const std::size_t width = p.heads.width;
    for (std::size_t s = 0; s < p.lengths.size(); ++s) {
        std::fill(all.d_query[s].begin(), all.d_query[s].end(), 0.0);
        std::fill(all.d_key[s].begin(), all.d_key[s].end(), 0.0);
        std::fill(all.d_value[s].begin(), all.d_value[s].end(), 0.0);
        const std::size_t length = at(p.lengths[s]);
        std::vector<double> weight(length), d_weight(length);
        for (std::size_t i = 0; i < length; ++i) {
            for (std::size_t h = 0; h < query_heads; ++h) {
                const std::size_t from = (i * query_heads + h) * width;
                const auto to = [&](std::size_t j) { return (j * kv_heads + h * kv_heads / query_heads) * width; };
                const std::size_t seen = p.rule == mask::causal ? i + 1 : length;
                double largest = -std::numeric_limits<double>::infinity();
                for (std::size_t j = 0; j < seen; ++j) {
                    double score = 0;
                    for (std::size_t c = 0; c < width; ++c) { score += p.query[s][from + c] * p.key[s][to(j) + c]; }
                    weight[j] = p.scale * score;
                    largest = std::max(largest, weight[j]);
                }
                double total = 0;
                for (std::size_t j = 0; j < seen; ++j) { total += weight[j] = std::exp(weight[j] - largest); }
                all.log_sum_exp[s][i * query_heads + h] = largest + std::log(total);
                double along = 0;
                for (std::size_t j = 0; j < seen; ++j) {
                    weight[j] /= total;
                    d_weight[j] = 0;
                    for (std::size_t c = 0; c < width; ++c) {
                        d_weight[j] += p.d_out[s][from + c] * p.value[s][to(j) + c];
                    }
                    along += weight[j] * d_weight[j];
                }
                for (std::size_t c = 0; c < width; ++c) {
                    double sum = 0;
                    for (std::size_t j = 0; j < seen; ++j) {
                        const double d_score = weight[j] * (d_weight[j] - along) * p.scale;
                        sum += weight[j] * p.value[s][to(j) + c];
                        all.d_query[s][from + c] += d_score * p.key[s][to(j) + c];
                        all.d_key[s][to(j) + c] += d_score * p.query[s][from + c];
                        all.d_value[s][to(j) + c] += weight[j] * p.d_out[s][from + c];
                    }
                    all.out[s][from + c] = sum;
                }
            }
        }
    }
    return all;
}

/// A placement of sequences on these rings: ranks of the ring of each sequence, empty for a sequence of no ring.
inline placement placed(sequence::cluster machines, std::vector<std::int64_t> lengths,
                        const std::vector<std::vector<int>>& ranks) {
    placement p{machines, std::move(lengths), {}, {}};
    p.pieces.resize(at(machines.nodes * machines.ranks_per_node));
    for (const zone where : {zone::world, zone::node, zone::local}) {
        for (std::size_t s = 0; s < ranks.size(); ++s) {
            if (ranks[s].empty()) { continue; }
            bool one_node = true;
            for (const int r : ranks[s]) {
                one_node = one_node && r / machines.ranks_per_node == ranks[s][0] / machines.ranks_per_node;
            }
            if (where != (ranks[s].size() == 1 ? zone::local : one_node ? zone::node : zone::world)) { continue; }
            p.rings.push_back({static_cast<int>(s), where, ranks[s]});
            const auto chunks = static_cast<std::int64_t>(2 * ranks[s].size());
            for (std::int64_t i = 0; i < chunks / 2; ++i) {
                for (const std::int64_t c : {i, chunks - 1 - i}) {
                    p.pieces[at(ranks[s][at(i)])].push_back(
                        {static_cast<int>(s), c * p.lengths[s] / chunks, (c + 1) * p.lengths[s] / chunks});
                }
            }
        }
    }
    return p;
}
/// Every sequence on one ring of all ranks, on one node.
inline placement on_all(int ranks, std::vector<std::int64_t> lengths) {
    std::vector<int> all;
    for (int r = 0; r < ranks; ++r) { all.push_back(r); }
    const std::vector<std::vector<int>> rings(lengths.size(), all);
    return placed({1, ranks}, std::move(lengths), rings);
}

/// What one rank has of a problem: rows of [query | key | value | 1 unused number], and as many rows of padding, which
/// are NaN, as are everything it is to write and the numbers between the rows: NVIDIA/TransformerEngine#3205, #1012
/// (padding of results that was left as it was).
template <class T> struct rank_data {
    using P = accumulator_t<T>;
    static constexpr std::size_t padding = 3;
    const problem& of;
    const std::vector<sequence::piece>& pieces;
    std::size_t tokens = 0, rows = 0, row_width = 0;
    std::vector<T> packed, out, d_out, gradients;
    std::vector<P> log_sum_exp;

    rank_data(const problem& p, const placement& where, int rank) : of(p), pieces(where.pieces[at(rank)]) {
        for (const auto& piece : pieces) { tokens += at(piece.end - piece.begin); }
        rows = tokens + padding;
        row_width = (p.heads.query + 2 * p.heads.kv) * p.heads.width + 1;
        const T nan = static_cast<T>(std::numeric_limits<float>::quiet_NaN());
        packed.assign(rows * row_width, nan);
        gradients = packed;
        out.assign(rows * p.heads.query * p.heads.width, nan);
        d_out = out;
        log_sum_exp.assign(rows * p.heads.query, std::numeric_limits<P>::quiet_NaN());
        for_each_token([&](std::size_t s, std::size_t t, std::size_t row) {
            put(p.query[s], t, query(), row);
            put(p.key[s], t, key(), row);
            put(p.value[s], t, value(), row);
            put(p.d_out[s], t, out_gradient(), row);
        });
    }
    token_view<T> part(std::vector<T>& from, std::size_t first_head, std::size_t heads) {
        const std::size_t width = of.heads.width;
        return {view<T>(from).sub(first_head * width, from.size() - first_head * width),
                rows,
                heads,
                width,
                row_width,
                width};
    }
    token_view<T> query() { return part(packed, 0, of.heads.query); }
    token_view<T> key() { return part(packed, of.heads.query, of.heads.kv); }
    token_view<T> value() { return part(packed, of.heads.query + of.heads.kv, of.heads.kv); }
    token_view<T> d_query() { return part(gradients, 0, of.heads.query); }
    token_view<T> d_key() { return part(gradients, of.heads.query, of.heads.kv); }
    token_view<T> d_value() { return part(gradients, of.heads.query + of.heads.kv, of.heads.kv); }
    token_view<T> result() { return {view<T>(out), rows, of.heads.query, of.heads.width}; }
    /// [head][token][c]: another layout than the rest.
    token_view<T> out_gradient() {
        const std::size_t width = of.heads.width;
        return {view<T>(d_out), rows, of.heads.query, width, width, rows * width};
    }
    token_view<P> numbers() { return sequence::numbers_by_head(view<P>(log_sum_exp), rows, of.heads.query); }

    template <class Engine> void forward(Engine& e) { e.forward(query(), key(), value(), result(), numbers()); }
    template <class Engine> void backward(Engine& e) {
        e.backward(out_gradient(), query(), key(), value(), result(), numbers(), d_query(), d_key(), d_value());
    }

    /// Writes this rank's tokens, each only once, and judges its padding.
    void collect(solution& all, std::mutex& mutex, bool with_gradients) {
        const std::lock_guard lock(mutex);
        for_each_token([&](std::size_t s, std::size_t t, std::size_t row) {
            get(result(), row, all.out[s], t);
            get(numbers(), row, all.log_sum_exp[s], t);
            if (!with_gradients) { return; }
            get(d_query(), row, all.d_query[s], t);
            get(d_key(), row, all.d_key[s], t);
            get(d_value(), row, all.d_value[s], t);
        });
        for (std::size_t row = tokens; row < rows; ++row) {
            const auto all_zero = [&](const token_view<T>& v) {
                for (std::size_t h = 0; h < v.heads; ++h) {
                    for (std::size_t c = 0; c < v.width; ++c) {
                        if (static_cast<P>(v.at(row, h)[c]) != P{0}) { return false; }
                    }
                }
                return true;
            };
            expect(all_zero(result()), "padding of out is not 0");
            for (std::size_t h = 0; h < of.heads.query; ++h) {
                expect(*numbers().at(row, h) == -std::numeric_limits<P>::infinity(), "padding attended to something");
            }
            if (!with_gradients) { continue; }
            expect(all_zero(d_query()) && all_zero(d_key()) && all_zero(d_value()), "padding of a gradient is not 0");
        }
    }

private:
    template <class F> void for_each_token(F f) {
        std::size_t row = 0;
        for (const auto& piece : pieces) {
            for (std::int64_t t = piece.begin; t < piece.end; ++t) { f(at(piece.sequence), at(t), row++); }
        }
    }
    static void put(const std::vector<double>& from, std::size_t t, const token_view<T>& into, std::size_t row) {
        for (std::size_t h = 0; h < into.heads; ++h) {
            for (std::size_t c = 0; c < into.width; ++c) {
                into.at(row, h)[c] = static_cast<T>(from[(t * into.heads + h) * into.width + c]);
            }
        }
    }
    template <class U>
    static void get(const token_view<U>& from, std::size_t row, std::vector<double>& into, std::size_t t) {
        for (std::size_t h = 0; h < from.heads; ++h) {
            for (std::size_t c = 0; c < from.width; ++c) {
                double& x = into[(t * from.heads + h) * from.width + c];
                expect(std::isnan(x), "a token has two owners");
                x = static_cast<double>(static_cast<accumulator_t<U>>(from.at(row, h)[c]));
            }
        }
    }
};

/// Solves it on the ranks of the placement. make(communicator, heads, options): the engine.
template <class T, class Make>
solution solved_together(const problem& p, const placement& where, Make make, bool with_gradients = true) {
    solution all(p);
    std::mutex mutex;
    comm::threads::launch(static_cast<int>(where.pieces.size()),
                          [&](comm::threads& world) {
                              const int rank = world.rank();
                              auto engine = make(world.duplicate("attention"), p);
                              engine.plan(where);
                              rank_data<T> mine(p, where, rank);
                              expect(engine.tokens() == mine.tokens, "rank {} has {} tokens, not {}", rank,
                                     engine.tokens(), mine.tokens);
                              mine.forward(engine);
                              if (with_gradients) { mine.backward(engine); }
                              mine.collect(all, mutex, with_gradients);
                          },
                          {.timeout = std::chrono::seconds(20)});
    return all;
}

/// NaN is larger than anything.
inline double larger(double a, double b) { return std::isnan(a) || a >= b ? a : b; }

/// How far apart: largest difference, and the norm of the difference to that of the reference.
struct distance {
    double absolute = 0;
    double relative = 0;
};
inline distance between(const tensors& a, const tensors& reference) {
    distance d;
    double difference = 0;
    double norm = 0;
    for (std::size_t s = 0; s < reference.size(); ++s) {
        for (std::size_t i = 0; i < reference[s].size(); ++i) {
            const double x = a[s][i] == reference[s][i] ? 0 : std::fabs(a[s][i] - reference[s][i]);
            d.absolute = larger(d.absolute, x);
            difference += x * x;
            norm += std::isinf(reference[s][i]) ? 0 : reference[s][i] * reference[s][i];
        }
    }
    d.relative = norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
    return d;
}
/// The largest of all tensors.
inline distance between(const solution& a, const solution& reference) {
    distance worst;
    for (const auto which :
         {&solution::out, &solution::log_sum_exp, &solution::d_query, &solution::d_key, &solution::d_value}) {
        const distance d = between(a.*which, reference.*which);
        worst.absolute = larger(worst.absolute, d.absolute);
        worst.relative = larger(worst.relative, d.relative);
    }
    return worst;
}
inline bool same_bits(const solution& a, const solution& b) {
    return a.out == b.out && a.log_sum_exp == b.log_sum_exp && a.d_query == b.d_query && a.d_key == b.d_key &&
           a.d_value == b.d_value;
}

}  // namespace tutti::test
