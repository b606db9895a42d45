// Products of attention through CBLAS: right, and the same on each run.
#include <doctest/doctest.h>  // checks

#include <cstddef>  // size_t
#include <vector>   // matrices

#include <sequence/problem.hpp>               // direct solution
#include <tutti/sequence/blas_products.hpp>   // under test
#include <tutti/sequence/host_attention.hpp>  // kernel
#include <tutti/sequence/ring_attention.hpp>  // engine

using namespace tutti;
using namespace tutti::test;
using namespace tutti::sequence;

namespace {

template <class T> solution solved_through_blas(const problem& p, int ranks) {
    return solved_together<T>(p, on_all(ranks, p.lengths), [](comm::threads c, const problem& q) {
        return ring_attention<comm::threads, host_attention<T, blas_products>>(std::move(c), q.heads, {.rule = q.rule});
    });
}

}  // namespace

TEST_CASE("rings of kernels whose products are CBLAS's") {
    for (const mask rule : {mask::causal, mask::full}) {
        problem p({4, 2, 8}, {129, 33, 1, 0, 70}, rule);
        const solution reference = solved_directly(p);
        for (const int ranks : {1, 2, 4}) {
            CAPTURE(ranks);
            const solution got = solved_through_blas<double>(p, ranks);
            CHECK(between(got, reference).absolute <= 1e-12);
            CHECK(same_bits(got, solved_through_blas<double>(p, ranks)));
            CHECK(between(solved_through_blas<float>(p, ranks), reference).relative <= 1e-6);
        }
        p.round_to<tutti::bfloat16>();
        CHECK(between(solved_through_blas<tutti::bfloat16>(p, 4), solved_directly(p)).relative <= 4e-3);
    }
}

TEST_CASE("products of any shape and transposition are those of plain loops") {
    for (std::size_t m : {0u, 1u, 5u}) {
        for (std::size_t n : {0u, 1u, 7u}) {
            for (std::size_t k : {0u, 1u, 6u}) {
                for (int form = 0; form < 4; ++form) {
                    const bool ta = form % 2 == 1;
                    const bool tb = form / 2 == 1;
                    std::vector<double> a(10 * 10), b(10 * 10), x(10 * 10), y;
                    for (std::size_t i = 0; i < 100; ++i) {
                        a[i] = random_element<double>(1, i);
                        b[i] = random_element<double>(2, i);
                        x[i] = random_element<double>(3, i);
                    }
                    y = x;
                    const factor<double> fa{{a.data(), ta ? k : m, ta ? m : k, 9}, ta};
                    const factor<double> fb{{b.data(), tb ? n : k, tb ? k : n, 9}, tb};
                    for (const double keep : {0.0, 1.0}) {
                        plain_products::multiply(fa, fb, {x.data(), m, n, 10}, 0.5, keep);
                        blas_products::multiply(fa, fb, {y.data(), m, n, 10}, 0.5, keep);
                        for (std::size_t i = 0; i < 100; ++i) { CHECK(std::fabs(x[i] - y[i]) <= 1e-14); }
                    }
                }
            }
        }
    }
}
