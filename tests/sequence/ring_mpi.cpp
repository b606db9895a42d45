// Attention over the ranks that mpirun started, by rings, by gathering, and by exchanging heads.
#include <doctest/doctest.h>  // checks

#include <chrono>   // deadline
#include <cmath>    // isnan
#include <cstddef>  // size_t
#include <mutex>    // collect's
#include <vector>   // rings

#include <sequence/problem.hpp>                  // direct solution
#include <tutti/comm/mpi.hpp>                    // ranks
#include <tutti/sequence/gather_attention.hpp>   // under test
#include <tutti/sequence/host_attention.hpp>     // kernel
#include <tutti/sequence/ring_attention.hpp>     // under test
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
