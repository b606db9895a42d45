// Attention over the ranks that mpirun started: by rings, by gathering, by exchanging heads; and by an engine, whose
// messages take routes and whose rows move.
#include <doctest/doctest.h>  // checks

#include <chrono>   // deadline
#include <cmath>    // isnan
#include <cstddef>  // size_t
#include <cstdint>  // lengths
#include <mutex>    // collect's
#include <span>     // lengths
#include <vector>   // rings

#include <sequence/problem.hpp>                  // direct solution
#include <tutti/comm/counted.hpp>                // ledger
#include <tutti/comm/mpi.hpp>                    // ranks
#include <tutti/sequence/engine.hpp>             // under test
#include <tutti/sequence/gather_attention.hpp>   // under test
#include <tutti/sequence/host_attention.hpp>     // kernel
#include <tutti/sequence/ring_attention.hpp>     // under test
#include <tutti/sequence/routed.hpp>             // under test
#include <tutti/sequence/ulysses_attention.hpp>  // under test

using namespace tutti;
using namespace tutti::test;
using namespace tutti::sequence;

namespace {

// Forward and backward twice: both right, the same bits.
template <class Engine> void expect_solved(comm::mpi& world, const problem& p, const placement& where) {
    Engine e(world.duplicate("attention"), p.heads, {.rule = p.rule});
    e.plan(where);
    const solution reference = solved_directly(p);
    std::vector<solution> got;
    for (int repeat = 0; repeat < 2; ++repeat) {
        rank_data<double> mine(p, where, world.rank());
        mine.forward(e);
        mine.backward(e);
        std::mutex mutex;
        got.emplace_back(p);
        mine.collect(got.back(), mutex, true);
    }
    std::size_t tokens = 0;
    for (const auto which :
         {&solution::out, &solution::log_sum_exp, &solution::d_query, &solution::d_key, &solution::d_value}) {
        for (std::size_t s = 0; s < p.lengths.size(); ++s) {
            for (std::size_t i = 0; i < (reference.*which)[s].size(); ++i) {
                const double x = (got[0].*which)[s][i];
                if (std::isnan(x)) { continue; }  // another rank's token
                ++tokens;
                CHECK(std::fabs(x - (reference.*which)[s][i]) <= 1e-12);
                CHECK(x == (got[1].*which)[s][i]);
            }
        }
    }
    CHECK((tokens != 0 || e.tokens() == 0));
}

}  // namespace

TEST_CASE("over MPI ranks") {
    comm::mpi world(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(60)});
    const int n = world.size();
    std::vector<int> all;
    for (int r = n; r-- > 0;) { all.push_back(r); }
    const placement where = placed({1, n}, {61, 20, 8, 1, 0, 33}, {all, {n - 1, 0}, {0}, all, {0, n - 1}, {n - 1}});
    for (const mask rule : {mask::causal, mask::full}) {
        const problem p({4, 4, 3}, where.lengths, rule);
        expect_solved<ring_attention<comm::mpi, host_attention<double>>>(world, p, where);
        expect_solved<gather_attention<comm::mpi, host_attention<double>>>(world, p, where);
        expect_solved<ulysses_attention<comm::mpi, host_attention<double>>>(world, p, where);
    }
}

namespace {

// Rings over all ranks and of one rank, which has more tokens than others.
struct uneven {
    placement operator()(std::span<const std::int64_t> lengths, const cluster& machines, std::int64_t) const {
        std::vector<ring> rings;
        for (std::size_t s = 0; s < lengths.size(); ++s) {
            std::vector<int> ranks{machines.ranks() - 1};
            if (s % 2 == 0) {
                for (int r = 0; r + 1 < machines.ranks(); ++r) { ranks.insert(ranks.end() - 1, r); }
            }
            rings.push_back({static_cast<int>(s), zone_of(machines, ranks), ranks});
        }
        return assembled(machines, lengths, rings);
    }
};

}  // namespace

TEST_CASE("over MPI ranks: an engine whose messages are spread over NICs and whose rows move") {
    using counting = comm::counted<comm::mpi>;
    comm::mpi world(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(60)});
    const int n = world.size();
    const int nodes = n % 2 == 0 && n > 2 ? 2 : 1;
    // Free inside of nodes, slow between them: what has proxies is spread.
    const auto machines = comm::topology::uniform(nodes, n / nodes, {0, 1e12}, {1e-6, 1e6}, n / nodes);
    const problem p({4, 2, 3}, {61, 33, 20, 8, 1, 0});
    counting own(world.duplicate("engine"));
    const auto ledger = own.traffic_ledger();
    engine<counting, uneven, routed, remapped, host_attention<double>> e(std::move(own), p.heads,
                                                                         {.machines = machines});
    e.plan(p.lengths);
    const std::size_t of_query = p.heads.query * p.heads.width, of_key = p.heads.kv * p.heads.width;
    std::vector<double> qkv, d_out, out(e.rows() * of_query), d_qkv(e.rows() * (of_query + 2 * of_key));
    for (std::size_t row = 0; row < e.rows(); ++row) {
        const std::size_t s = at(e.sequences()[row]), t = at(e.positions()[row]);
        const auto append = [&](std::vector<double>& to, const std::vector<double>& from, std::size_t width) {
            to.insert(to.end(), from.begin() + static_cast<std::ptrdiff_t>(t * width),
                      from.begin() + static_cast<std::ptrdiff_t>((t + 1) * width));
        };
        append(qkv, p.query[s], of_query);
        append(qkv, p.key[s], of_key);
        append(qkv, p.value[s], of_key);
        append(d_out, p.d_out[s], of_query);
    }
    auto kept = e.make_memory();
    e.forward(view<const double>(qkv), view<double>(out), kept);
    e.backward(view<const double>(d_out), view<double>(d_qkv), kept);
    const solution reference = solved_directly(p);
    double worst = 0;
    for (std::size_t row = 0; row < e.rows(); ++row) {
        const std::size_t s = at(e.sequences()[row]), t = at(e.positions()[row]);
        const auto compare = [&](const double* got, const std::vector<double>& with, std::size_t width) {
            for (std::size_t c = 0; c < width; ++c) { worst = larger(worst, std::fabs(got[c] - with[t * width + c])); }
        };
        const double* const gradients = d_qkv.data() + row * (of_query + 2 * of_key);
        compare(out.data() + row * of_query, reference.out[s], of_query);
        compare(gradients, reference.d_query[s], of_query);
        compare(gradients + of_query, reference.d_key[s], of_key);
        compare(gradients + of_query + of_key, reference.d_value[s], of_key);
    }
    CHECK(worst <= 1e-12);
    // Every row is on one rank; what was said of traffic was sent.
    std::uint64_t rows = 0, sent = 0;
    for (const auto& record : world.gather_control({e.rows(), ledger->total().bytes, 0, 0})) {
        rows += record[0];
        sent += record[1];
    }
    CHECK(rows == 123);
    CHECK(e.traffic().inside + e.traffic().between == sent);
    CHECK(e.traffic().moved_tokens > 0);
    bool spread = false;
    for (const route& r : e.exchange().routes()) { spread = spread || r.steps() > 1; }
    CHECK(spread == (nodes > 1));
}
