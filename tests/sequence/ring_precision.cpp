// Attention over rings in float, and of 16-bit numbers with sums in float: how far from the exact result.
#include <doctest/doctest.h>  // checks

#include <cstddef>  // size_t
#include <vector>   // distances

#include <sequence/problem.hpp>               // direct solution
#include <tutti/sequence/host_attention.hpp>  // kernel
#include <tutti/sequence/ring_attention.hpp>  // under test

using namespace tutti;
using namespace tutti::test;
using namespace tutti::sequence;

namespace {

// The numbers of T that the problem is made of, solved by a ring of T and in double: how far apart.
template <class T> class errors {
    problem p_;
    solution reference_;

    static problem rounded(mask rule) {
        problem p({4, 2, 16}, {full_speed ? 128 : 64, 61}, rule, 3);
        p.round_to<T>();
        return p;
    }

public:
    explicit errors(mask rule) : p_(rounded(rule)), reference_(solved_directly(p_)) {}
    std::vector<distance> on(int ranks) const {
        const solution got = solved_together<T>(p_, on_all(ranks, p_.lengths), [](comm::threads c, const problem& q) {
            return ring_attention<comm::threads, host_attention<T>>(std::move(c), q.heads, {.rule = q.rule});
        });
        std::vector<distance> all;
        for (const auto which : {&solution::out, &solution::d_query, &solution::d_key, &solution::d_value}) {
            all.push_back(between(got.*which, reference_.*which));
        }
        all.push_back(between(got.log_sum_exp, reference_.log_sum_exp));
        return all;
    }
};

}  // namespace

TEST_CASE("float: as near as its own rounding") {
    for (const mask rule : {mask::causal, mask::full}) {
        const errors<float> of(rule);
        for (const int ranks : full_speed ? std::vector{1, 2, 4, 8} : std::vector{4}) {
            CAPTURE(ranks);
            for (const distance& d : of.on(ranks)) {
                CHECK(d.relative <= 1e-6);
                CHECK(d.absolute <= 1e-5);
            }
        }
    }
}

TEST_CASE("bfloat16: results are rounded once, and rings of any size are as good as one rank") {
    // zhuzilin/ring-flash-attention#42: errors grew with the number of ranks.
    for (const mask rule : {mask::causal, mask::full}) {
        const errors<tutti::bfloat16> of(rule);
        const std::vector<distance> alone = of.on(1);
        for (const int ranks : full_speed ? std::vector{1, 2, 8, 16} : std::vector{4}) {
            CAPTURE(ranks);
            const std::vector<distance> all = of.on(ranks);
            for (std::size_t i = 0; i < 4; ++i) {
                CHECK(all[i].relative <= 4e-3);
                CHECK(all[i].relative <= 1.25 * alone[i].relative);
                CHECK(all[i].relative >= 1e-4);  // it is numbers of 16 bits that are compared
            }
            CHECK(all[4].relative <= 1e-6);  // sums are float
        }
    }
}
