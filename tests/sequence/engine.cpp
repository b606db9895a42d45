// The engine: a whole layer on many ranks against one device, what it sends, and what it refuses.
#include <doctest/doctest.h>  // checks

#include <algorithm>   // max
#include <cmath>       // sqrt
#include <cstddef>     // size_t
#include <cstdint>     // lengths
#include <functional>  // any partitioner
#include <limits>      // results not there yet
#include <mutex>       // results of ranks
#include <string>      // messages
#include <vector>      // matrices

#include <sequence/problem.hpp>                    // direct solution
#include <tutti/comm/counted.hpp>                  // bytes on the wire
#include <tutti/core/philox.hpp>                   // random rows
#include <tutti/sequence/engine.hpp>               // under test
#include <tutti/sequence/partition/even_ring.hpp>  // partitions
#include <tutti/sequence/partition/hybrid.hpp>     // partitions
#include <tutti/sequence/partition/whole.hpp>      // partitions
#include <tutti/sequence/partition/zeppelin.hpp>   // partitions
#include <tutti/sequence/routed.hpp>               // routes

using namespace tutti;
using namespace tutti::test;
using namespace tutti::sequence;

namespace {

const comm::options soon{.timeout = std::chrono::seconds(20)};

/// Any of them as one type: an engine is compiled once for all, and for both layouts where it is told which.
struct any_partition {
    std::function<placement(std::span<const std::int64_t>, const cluster&, std::int64_t)> rule;
    placement operator()(std::span<const std::int64_t> lengths, const cluster& machines, std::int64_t capacity) const {
        return rule(lengths, machines, capacity);
    }
};

template <class T, class Route, class Layout, class C = comm::threads>
using engine_of = engine<C, any_partition, Route, Layout, host_attention<T>>;

// What a user of a GPU cluster writes, on the host: all of its parts have defaults.
using zeppelin_engine = engine<comm::threads, partition::zeppelin, routed, remapped>;
static_assert(std::is_same_v<zeppelin_engine::element_type, float>);

constexpr attention_heads heads{4, 2, 3};
constexpr std::size_t width = 5;                    // of the residual stream
constexpr std::size_t qkv_width = (4 + 2 * 2) * 3;  // of the first linear layer's rows
constexpr std::size_t out_width = 4 * 3;            // of attention's

/// linear -> attention -> linear, a loss of weight * |y|^2 / 2 a token, over the tokens of weights other than 0.
struct layer {
    std::vector<std::int64_t> lengths;
    std::vector<double> weights;  // by sequence
    double input(int sequence, std::int64_t position, std::size_t i) const {
        return random_element<double>(100 + static_cast<std::uint64_t>(sequence), at(position) * width + i);
    }
    static double first(std::size_t i) { return random_element<double>(7, i) / 2; }
    static double second(std::size_t i) { return random_element<double>(8, i) / 2; }
};

struct layer_result {
    double loss = 0;
    std::vector<double> d_first, d_second;
    tensors out;  // of attention, by sequence
};

/// y = x * w: rows of m numbers into rows of n.
template <class T>
std::vector<T> times(const std::vector<T>& x, const std::vector<T>& w, std::size_t m, std::size_t n) {
    std::vector<T> y(x.size() / m * n);
    for (std::size_t r = 0; r < x.size() / m; ++r) {
        for (std::size_t i = 0; i < m; ++i) {
            for (std::size_t j = 0; j < n; ++j) { y[r * n + j] += x[r * m + i] * w[i * n + j]; }
        }
    }
    return y;
}
/// dy * w': the gradient of the input.
template <class T>
std::vector<T> back(const std::vector<T>& dy, const std::vector<T>& w, std::size_t m, std::size_t n) {
    std::vector<T> dx(dy.size() / n * m);
    for (std::size_t r = 0; r < dy.size() / n; ++r) {
        for (std::size_t i = 0; i < m; ++i) {
            for (std::size_t j = 0; j < n; ++j) { dx[r * m + i] += dy[r * n + j] * w[i * n + j]; }
        }
    }
    return dx;
}
/// x' * dy, in double: the gradient of the weight.
template <class T>
std::vector<double> weight_gradient(const std::vector<T>& x, const std::vector<T>& dy, std::size_t m, std::size_t n) {
    std::vector<double> dw(m * n);
    for (std::size_t r = 0; r < x.size() / m; ++r) {
        for (std::size_t i = 0; i < m; ++i) {
            for (std::size_t j = 0; j < n; ++j) {
                dw[i * n + j] += static_cast<double>(x[r * m + i]) * static_cast<double>(dy[r * n + j]);
            }
        }
    }
    return dw;
}
template <class T> std::vector<T> matrix_of(double (*element)(std::size_t), std::size_t count) {
    std::vector<T> w;
    for (std::size_t i = 0; i < count; ++i) { w.push_back(static_cast<T>(element(i))); }
    return w;
}

layer_result on_one_device(const layer& l) {
    problem p(heads, l.lengths);
    const auto first = matrix_of<double>(layer::first, width * qkv_width);
    const auto second = matrix_of<double>(layer::second, out_width * width);
    std::vector<std::vector<double>> x(l.lengths.size());
    double valid = 0;
    for (std::size_t s = 0; s < l.lengths.size(); ++s) {
        for (std::int64_t t = 0; t < l.lengths[s]; ++t) {
            for (std::size_t i = 0; i < width; ++i) { x[s].push_back(l.input(static_cast<int>(s), t, i)); }
        }
        valid += l.weights[s] != 0 ? static_cast<double>(l.lengths[s]) : 0;
        const auto u = times(x[s], first, width, qkv_width);
        for (std::size_t t = 0; t < at(l.lengths[s]); ++t) {
            const double* const row = u.data() + t * qkv_width;
            std::copy(row, row + 12, p.query[s].begin() + static_cast<std::ptrdiff_t>(t * 12));
            std::copy(row + 12, row + 18, p.key[s].begin() + static_cast<std::ptrdiff_t>(t * 6));
            std::copy(row + 18, row + 24, p.value[s].begin() + static_cast<std::ptrdiff_t>(t * 6));
        }
    }
    layer_result r;
    r.out = solved_directly(p).out;
    r.d_second.assign(out_width * width, 0);
    r.d_first.assign(width * qkv_width, 0);
    const auto add = [](std::vector<double>& to, const std::vector<double>& more) {
        for (std::size_t i = 0; i < to.size(); ++i) { to[i] += more[i]; }
    };
    for (std::size_t s = 0; s < l.lengths.size(); ++s) {
        const auto y = times(r.out[s], second, out_width, width);
        std::vector<double> dy;
        for (const double v : y) {
            r.loss += valid == 0 ? 0 : l.weights[s] * v * v / 2 / valid;
            dy.push_back(valid == 0 ? 0 : l.weights[s] * v / valid);
        }
        add(r.d_second, weight_gradient(r.out[s], dy, out_width, width));
        p.d_out[s] = back(dy, second, out_width, width);
    }
    const solution all = solved_directly(p);
    for (std::size_t s = 0; s < l.lengths.size(); ++s) {
        std::vector<double> du;
        for (std::size_t t = 0; t < at(l.lengths[s]); ++t) {
            const auto append = [&](const std::vector<double>& from, std::size_t count) {
                const auto begin = from.begin() + static_cast<std::ptrdiff_t>(t * count);
                du.insert(du.end(), begin, begin + static_cast<std::ptrdiff_t>(count));
            };
            append(all.d_query[s], 12);
            append(all.d_key[s], 6);
            append(all.d_value[s], 6);
        }
        add(r.d_first, weight_gradient(x[s], du, width, qkv_width));
    }
    return r;
}

/// The same on one of the ranks, whose part is added.
template <class T, class Engine>
void on_rank(comm::threads& world, Engine& e, typename Engine::memory& kept, const layer& l, layer_result& all,
             std::mutex& mutex) {
    e.plan(l.lengths);
    const auto first = matrix_of<T>(layer::first, width * qkv_width);
    const auto second = matrix_of<T>(layer::second, out_width * width);
    std::vector<T> x;
    std::vector<double> weight;
    std::uint64_t valid = 0;
    for (std::size_t r = 0; r < e.rows(); ++r) {
        for (std::size_t i = 0; i < width; ++i) {
            x.push_back(static_cast<T>(l.input(e.sequences()[r], e.positions()[r], i)));
        }
        weight.push_back(l.weights[at(e.sequences()[r])]);
        valid += weight.back() != 0 ? 1u : 0u;
    }
    const double scale = e.loss_scale(valid);
    const auto u = times(x, first, width, qkv_width);
    const T nan = std::numeric_limits<T>::quiet_NaN();
    std::vector<T> out(e.rows() * out_width, nan), du(e.rows() * qkv_width, nan);
    e.forward(view<const T>(u), view<T>(out), kept);
    const auto y = times(out, second, out_width, width);
    std::vector<T> dy;
    double loss = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
        const auto v = static_cast<double>(y[i]);
        loss += scale * weight[i / width] * v * v / 2;
        dy.push_back(static_cast<T>(scale * weight[i / width] * v));
    }
    const auto d_second = weight_gradient(out, dy, out_width, width);
    const auto d_out = back(dy, second, out_width, width);
    e.backward(view<const T>(d_out), view<T>(du), kept);
    const auto d_first = weight_gradient(x, du, width, qkv_width);
    world.barrier();
    const std::lock_guard lock(mutex);
    all.loss += loss;
    for (std::size_t i = 0; i < d_first.size(); ++i) { all.d_first[i] += d_first[i]; }
    for (std::size_t i = 0; i < d_second.size(); ++i) { all.d_second[i] += d_second[i]; }
    for (std::size_t r = 0; r < e.rows(); ++r) {
        for (std::size_t i = 0; i < out_width; ++i) {
            double& there = all.out[at(e.sequences()[r])][at(e.positions()[r]) * out_width + i];
            expect(std::isnan(there), "a token is on two ranks");
            there = static_cast<double>(out[r * out_width + i]);
        }
    }
}

layer_result empty_result(const layer& l) {
    layer_result r;
    r.d_first.assign(width * qkv_width, 0);
    r.d_second.assign(out_width * width, 0);
    for (const std::int64_t s : l.lengths) {
        r.out.emplace_back(at(s) * out_width, std::numeric_limits<double>::quiet_NaN());
    }
    return r;
}

template <class T, class Route, class Layout>
layer_result on_ranks(const layer& l, const comm::topology& machines, const any_partition& partition,
                      std::int64_t capacity = no_capacity) {
    layer_result all = empty_result(l);
    std::mutex mutex;
    comm::threads::launch(
        machines.ranks(),
        [&](comm::threads& world) {
            engine_of<T, Route, chosen_layout> e(world.duplicate("sequence"), heads,
                                                 {.partition = partition, .machines = machines, .capacity = capacity},
                                                 {}, {Layout::moves_tokens});
            auto kept = e.make_memory();
            on_rank<T>(world, e, kept, l, all, mutex);
        },
        soon);
    return all;
}

/// Largest difference of loss and gradients; for double that of numbers, for float that of norms.
template <class T> double difference_of(const layer_result& a, const layer_result& b) {
    double worst = std::fabs(a.loss - b.loss);
    const auto compare = [&](const std::vector<double>& x, const std::vector<double>& reference) {
        double difference = 0;
        double norm = 0;
        double largest = 0;
        for (std::size_t i = 0; i < x.size(); ++i) {
            const double d = std::fabs(x[i] - reference[i]);
            largest = larger(largest, d);
            difference += d * d;
            norm += reference[i] * reference[i];
        }
        const double relative = norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
        worst = larger(worst, std::is_same_v<T, double> ? largest : relative);
    };
    compare(a.d_first, b.d_first);
    compare(a.d_second, b.d_second);
    std::vector<double> out, reference;
    for (std::size_t s = 0; s < b.out.size(); ++s) {
        out.insert(out.end(), a.out[s].begin(), a.out[s].end());
        reference.insert(reference.end(), b.out[s].begin(), b.out[s].end());
    }
    compare(out, reference);
    return worst;
}
template <class T> constexpr double bar = std::is_same_v<T, double> ? 1e-12 : 1e-6;

any_partition zeppelin() { return {partition::zeppelin()}; }
any_partition even_ring() { return {partition::even_ring()}; }
any_partition whole() { return {partition::whole()}; }
any_partition hybrid() { return {partition::hybrid(16)}; }

/// Two NICs a node, and links on which it pays to use both.
comm::topology two_nodes(int ranks_per_node) {
    return comm::topology::uniform(2, ranks_per_node, {0, 100e9}, {0, 1e9}, 2);
}

/// Sequences of all zones, of weights of their own, one of them none.
layer mixed() { return {{70, 13, 2, 9, 30, 1, 7, 0, 21}, {1, 0.5, 2, 0, 1, 3, 1, 1, 0.25}}; }

}  // namespace

// linear -> remap -> attention -> remap^-1 -> linear, gradients of weights and loss weights of sequences included.
TEST_CASE_TEMPLATE("a layer on ranks has the loss and the gradients of one device", T, double, float) {
    const layer l = mixed();
    const layer_result reference = on_one_device(l);
    REQUIRE(reference.loss > 0.01);
    const auto one_node = comm::topology::one_node(3);
    for (const auto& partition : {zeppelin(), even_ring(), whole(), hybrid()}) {
        CHECK(difference_of<T>(on_ranks<T, routed, remapped>(l, two_nodes(2), partition), reference) <= bar<T>);
        CHECK(difference_of<T>(on_ranks<T, direct_exchange, remapped>(l, one_node, partition), reference) <= bar<T>);
        CHECK(difference_of<T>(on_ranks<T, direct_exchange, in_place>(l, two_nodes(1), partition), reference) <=
              bar<T>);
    }
    CHECK(difference_of<T>(on_ranks<T, routed, in_place>(l, two_nodes(2), zeppelin()), reference) <= bar<T>);
    CHECK(difference_of<T>(on_ranks<T, routed, remapped>(l, comm::topology::one_node(1), zeppelin()), reference) <=
          bar<T>);
    CHECK(difference_of<T>(on_ranks<T, routed, remapped>(l, two_nodes(2), zeppelin(), 42), reference) <= bar<T>);
}

// NVIDIA/Megatron-LM#673, NovaSky-AI/SkyRL#1420, verl-project/verl#6609: means of means. NVIDIA/Megatron-LM#1764,
// SandAI-org/MagiAttention#9: ranks that have nothing to do, or whose tokens all count for nothing.
TEST_CASE("ranks without tokens, and ranks without valid ones, take part in the mean over all valid tokens") {
    // Whole sequences on 5 ranks: two have none, one has only what does not count. Remapped all have some.
    const layer few{{24, 9, 3}, {1, 0, 2}};
    const layer_result reference = on_one_device(few);
    const auto five = comm::topology::one_node(5);
    CHECK(difference_of<double>(on_ranks<double, direct_exchange, in_place>(few, five, whole()), reference) <=
          bar<double>);
    CHECK(difference_of<double>(on_ranks<double, direct_exchange, remapped>(few, five, whole()), reference) <=
          bar<double>);
    // More ranks than tokens.
    const layer tiny{{2, 1}, {1, 4}};
    CHECK(difference_of<double>(on_ranks<double, direct_exchange, remapped>(tiny, five, even_ring()),
                                on_one_device(tiny)) <= bar<double>);
    // Nothing counts at all, or nothing is there: the loss is 0, and so are all gradients.
    for (const layer& nothing : {layer{{7, 5}, {0, 0}}, layer{{}, {}}, layer{{0, 0}, {1, 1}}}) {
        const auto result = on_ranks<double, routed, remapped>(nothing, two_nodes(2), zeppelin());
        CHECK(result.loss == 0);
        CHECK(result.d_first == std::vector<double>(width * qkv_width));
        CHECK(result.d_second == std::vector<double>(out_width * width));
    }
}

TEST_CASE("neither routes nor layouts change a bit of attention") {
    const layer l = mixed();
    const auto reference = on_ranks<double, direct_exchange, in_place>(l, two_nodes(2), zeppelin());
    CHECK(on_ranks<double, direct_exchange, remapped>(l, two_nodes(2), zeppelin()).out == reference.out);
    CHECK(on_ranks<double, routed, remapped>(l, two_nodes(2), zeppelin()).out == reference.out);
    CHECK(on_ranks<double, routed, in_place>(l, two_nodes(2), zeppelin()).out == reference.out);
}

namespace {

// Bytes that all ranks send, by the ledger of a counting communicator and by the engine.
template <class Route, class Layout> engine_traffic expect_traffic(const layer& l, const any_partition& partition) {
    using counting = comm::counted<comm::threads>;
    const comm::topology machines = two_nodes(2);
    std::mutex mutex;
    std::uint64_t sent = 0;
    std::vector<engine_traffic> said;
    comm::threads::launch(
        machines.ranks(),
        [&](comm::threads& world) {
            counting counter(world.duplicate("sequence"));
            const auto ledger = counter.traffic_ledger();
            engine_of<double, Route, chosen_layout, counting> e(
                std::move(counter), heads, {.partition = partition, .machines = machines}, {}, {Layout::moves_tokens});
            auto kept = e.make_memory();
            layer_result ignored = empty_result(l);
            std::mutex own;
            e.plan(l.lengths);
            CHECK(ledger->total().bytes == 0);  // a plan is not negotiated
            if constexpr (std::is_same_v<Route, routed>) {
                for (const route& r : e.exchange().routes()) {
                    for (const hop& h : r.hops()) { CHECK((h.from == world.rank() || h.to == world.rank())); }
                }
            }
            on_rank<double>(world, e, kept, l, ignored, own);
            const std::lock_guard lock(mutex);
            sent += ledger->total().bytes;
            said.push_back(e.traffic());
        },
        soon);
    for (const engine_traffic& t : said) {
        CHECK(t == said[0]);
        CHECK(t.inside + t.between == sent);
    }
    return said[0];
}

}  // namespace

TEST_CASE("traffic is what is sent, to the byte") {
    const layer l = mixed();
    const engine_traffic by_even_rings = expect_traffic<direct_exchange, in_place>(l, even_ring());
    CHECK(by_even_rings.moved_tokens == 0);
    const engine_traffic by_routes = expect_traffic<routed, in_place>(l, even_ring());
    CHECK(by_routes.between == by_even_rings.between);  // spread over NICs, so on more hops inside the nodes
    CHECK(by_routes.inside > by_even_rings.inside);
    const engine_traffic placed = expect_traffic<direct_exchange, in_place>(l, zeppelin());
    CHECK(placed.between < by_even_rings.between / 2);
    CHECK(expect_traffic<routed, remapped>(l, zeppelin()).moved_tokens > 0);
    CHECK(expect_traffic<direct_exchange, remapped>(l, zeppelin()).moved_tokens > 0);
    // One sequence on one of four ranks, so that all is known: 30 tokens leave it, 20 of them their node.
    comm::threads::launch(
        4,
        [&](comm::threads& world) {
            engine_of<double, direct_exchange, chosen_layout> e(world.duplicate("sequence"), heads,
                                                                {.partition = whole(), .machines = two_nodes(2)});
            const std::int64_t lengths[] = {40};
            e.plan(lengths);
            const std::uint64_t a_token = 2 * (24 + 12) * 8;  // there and back: a row of qkv, one of out; gradients
            CHECK(e.traffic() == engine_traffic{10 * a_token, 20 * a_token, 30});
        },
        soon);
}

TEST_CASE("connecting is a byte for each of the other ranks on the engine's communicator, and on its lane's") {
    comm::threads::launch(
        3,
        [](comm::threads& world) {
            comm::counted all(world.duplicate("sequence"));
            const auto ledger = all.traffic_ledger();
            engine_of<double, direct_exchange, in_place, decltype(all)> e(std::move(all), heads,
                                                                          {.partition = even_ring()});
            e.connect();
            CHECK(ledger->total() == comm::traffic{2, 4});
            const std::int64_t lengths[] = {40};
            e.plan(lengths);
            e.connect();
            CHECK(ledger->total() == comm::traffic{4, 8});
            CHECK(e.rows() > 0);  // the plan holds
        },
        soon);
}

TEST_CASE("every token is in one row; rows are even, or where attention has them") {
    const layer l = mixed();
    const auto rows_by = [&]<class Layout>(Layout) {
        std::vector<std::vector<int>> seen;
        for (const std::int64_t s : l.lengths) { seen.emplace_back(at(s)); }
        std::vector<std::size_t> rows(4);
        std::mutex mutex;
        comm::threads::launch(
            4,
            [&](comm::threads& world) {
                engine_of<float, direct_exchange, Layout> e(world.duplicate("sequence"), heads,
                                                            {.partition = whole(), .machines = two_nodes(2)});
                e.plan(l.lengths);
                std::size_t in_pieces = 0;
                for (const piece& p : e.pieces()) { in_pieces += at(p.size()); }
                const std::lock_guard lock(mutex);
                CHECK(in_pieces == e.rows());
                CHECK(e.sequences().size() == e.rows());
                for (std::size_t r = 0; r < e.rows(); ++r) { ++seen[at(e.sequences()[r])][at(e.positions()[r])]; }
                rows[at(world.rank())] = e.rows();
            },
            soon);
        for (const auto& of_sequence : seen) {
            for (const int times_seen : of_sequence) { CHECK(times_seen == 1); }
        }
        return rows;
    };
    CHECK(rows_by(in_place{}) == std::vector<std::size_t>{70, 30, 21, 13 + 9 + 7 + 2 + 1});
    const auto even = rows_by(remapped{});
    for (const std::size_t rows : even) { CHECK((rows == 38 || rows == 39)); }
}

// NVIDIA/Megatron-LM#6816: mixed lengths that never ran from end to end.
TEST_CASE("one engine, many batches") {
    const layer first = mixed();
    const layer second{{5, 44, 0, 17}, {1, 2, 1, 1}};
    std::vector<layer_result> got;
    for (const layer* const l : {&first, &second, &first}) { got.push_back(empty_result(*l)); }
    std::mutex mutex;
    comm::threads::launch(
        4,
        [&](comm::threads& world) {
            engine_of<double, routed, chosen_layout> e(world.duplicate("sequence"), heads,
                                                       {.partition = zeppelin(), .machines = two_nodes(2)});
            auto kept = e.make_memory();
            std::size_t n = 0;
            for (const layer* const l : {&first, &second, &first}) {
                on_rank<double>(world, e, kept, *l, got[n++], mutex);
            }
        },
        soon);
    CHECK(difference_of<double>(got[0], on_one_device(first)) <= bar<double>);
    CHECK(difference_of<double>(got[1], on_one_device(second)) <= bar<double>);
    CHECK(got[2].out == got[0].out);
}

TEST_CASE("batches in flight together have the bits of one behind the other") {
    const std::vector<std::int64_t> batches[] = {{70, 13, 2, 9, 30}, {5, 44, 0, 17, 31}};
    comm::threads::launch(
        4,
        [&](comm::threads& world) {
            engine_of<double, routed, chosen_layout> e(world.duplicate("sequence"), heads,
                                                       {.partition = zeppelin(), .machines = two_nodes(2)});
            struct in_flight {
                decltype(e.make_memory()) kept;
                std::vector<double> qkv{}, out{}, d_out{}, d_qkv{};
            };
            const auto forward = [&](int b) {
                e.plan(batches[b]);
                in_flight f{e.make_memory()};
                const random_stream random{.seed = 7, .step = static_cast<std::uint32_t>(4 * b + world.rank())};
                for (std::uint64_t i = 0; i < e.rows() * qkv_width; ++i) { f.qkv.push_back(random.uniform(i)); }
                f.out.resize(e.rows() * out_width);
                e.forward(view<const double>(f.qkv), view<double>(f.out), f.kept);
                f.d_out = f.out;
                return f;
            };
            const auto backward = [&](int b, in_flight& f) {
                e.plan(batches[b]);
                f.d_qkv.resize(f.qkv.size());
                e.backward(view<const double>(f.d_out), view<double>(f.d_qkv), f.kept);
                return f.d_qkv;
            };
            std::vector<double> alone[2];
            for (const int b : {0, 1}) {
                auto f = forward(b);
                alone[b] = backward(b, f);
            }
            auto first = forward(0);
            auto second = forward(1);
            CHECK(backward(0, first) == alone[0]);
            CHECK(backward(1, second) == alone[1]);
        },
        soon);
}

TEST_CASE("a partitioner's refusal is every rank's; other lengths on one rank are a mismatch, not a wait") {
    comm::threads::launch(
        3,
        [](comm::threads& world) {
            engine_of<float, direct_exchange, remapped> e(world.duplicate("sequence"), heads,
                                                          {.partition = whole(), .capacity = 10});
            const std::int64_t too_long[] = {4, 11};
            CHECK_THROWS_WITH_AS(e.plan(too_long),
                                 "whole: sequence 1 of 11 tokens finds no rank with room; 3 hold 10 each", usage_error);
            const std::int64_t fits[] = {4, 5};
            e.plan(fits);  // it goes on
            CHECK(e.rows() == 3);
        },
        soon);
    for (const std::int64_t of_rank_1 : {5, 11}) {  // placed otherwise, or refused
        comm::threads::launch(
            3,
            [&](comm::threads& world) {
                engine_of<float, direct_exchange, remapped> e(world.duplicate("sequence"), heads,
                                                              {.partition = whole(), .capacity = 10});
                const std::int64_t lengths[] = {4, world.rank() == 1 ? of_rank_1 : 6};
                CHECK_THROWS_AS(e.plan(lengths), mismatch_error);
            },
            soon);
    }
    comm::threads::launch(
        2,
        [](comm::threads& world) {
            engine_of<double, direct_exchange, chosen_layout> e(world.duplicate("sequence"), heads,
                                                                {.partition = whole()}, {}, {world.rank() == 0});
            const std::int64_t lengths[] = {4, 6};
            CHECK_THROWS_AS(e.plan(lengths), mismatch_error);
        },
        soon);
}

TEST_CASE("what does not fit is refused before anything moved") {
    const auto expect_refused = [](auto call, const std::string& why) {
        comm::threads::launch(
            1,
            [&](comm::threads& world) {
                engine_of<float, direct_exchange, remapped> e(world.duplicate("sequence"), heads,
                                                              {.partition = whole()});
                CHECK_THROWS_WITH_AS(call(e), why.c_str(), usage_error);
                CHECK_THROWS_AS(world.barrier(), aborted_error);  // others would have waited
            },
            soon);
    };
    const std::int64_t lengths[] = {3}, others[] = {1, 2};
    const std::vector<float> qkv(3 * qkv_width);
    std::vector<float> out(3 * out_width), d_qkv(3 * qkv_width);
    const view<const float> in(qkv);
    expect_refused(
        [&](auto& e) {
            auto kept = e.make_memory();
            e.forward(in, view<float>(out), kept);
        },
        "engine: no batch is planned");
    expect_refused(
        [&](auto& e) {
            auto kept = e.make_memory();
            e.plan(lengths);
            e.forward(in.sub(0, in.size() - 1), view<float>(out), kept);
        },
        "engine: qkv has 71 elements, rank 0 has 3 rows of 24");
    expect_refused(
        [&](auto& e) {
            auto kept = e.make_memory();
            e.plan(lengths);
            std::vector<float> both(3 * qkv_width);
            e.forward(view<const float>(both), view<float>(both).sub(0, 3 * out_width), kept);
        },
        "engine: qkv and out overlap");
    expect_refused(
        [&](auto& e) {
            auto kept = e.make_memory();
            e.plan(lengths);
            e.forward(in, view<float>(out), kept);
            e.backward(view<const float>(d_qkv).sub(0, 3 * out_width), view<float>(d_qkv), kept);
        },
        "engine: d_out and d_qkv overlap");
    expect_refused(
        [&](auto& e) {
            auto kept = e.make_memory();
            e.plan(lengths);
            std::vector<float> both(3 * qkv_width);
            e.forward(view<const float>(both), view<float>(out), kept);
            e.backward(view<const float>(out), view<float>(both), kept);
        },
        "engine: qkv and d_qkv overlap");
    expect_refused(
        [&](auto& e) {
            auto kept = e.make_memory();
            e.plan(lengths);
            std::vector<float> both(3 * qkv_width);
            e.forward(in, view<float>(both).sub(0, 3 * out_width), kept);
            e.backward(view<const float>(out), view<float>(both), kept);
        },
        "engine: out and d_qkv overlap");
    expect_refused(
        [&](auto& e) {
            auto kept = e.make_memory();
            e.plan(lengths);
            e.backward(view<const float>(out), view<float>(d_qkv), kept);
        },
        "engine: backward of a batch whose forward was not made by the plan that holds");
    expect_refused(
        [&](auto& e) {
            auto kept = e.make_memory();
            e.plan(lengths);
            e.forward(in, view<float>(out), kept);
            e.plan(others);
            e.backward(view<const float>(out), view<float>(d_qkv), kept);
        },
        "engine: backward of a batch whose forward was not made by the plan that holds");
    comm::threads::launch(2, [](comm::threads& world) {
        using tried = engine_of<float, direct_exchange, remapped>;
        CHECK_THROWS_WITH_AS(
            tried(world.duplicate("sequence"), heads, {.partition = whole(), .machines = two_nodes(2)}),
            "engine: a topology of 4 ranks, 'world/sequence' has 2", usage_error);
    });
}
