// zeppelin on lengths of real corpora: every plan within 5 % of the lower bound, with room for it or hardly any.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // max

#include <tutti/sequence/partition/zeppelin.hpp>  // zeppelin

#include "sequence/judges.hpp"  // batches, imbalance
#include "support/build.hpp"    // sanitized

using namespace tutti;
using namespace tutti::test;
using sequence::cluster;
using sequence::partition::zeppelin;
using sequence::partition::zeppelin_reason;

namespace {

// The promise is about all batches; what watches every access looks at fewer.
constexpr std::uint32_t batches = sanitized ? 4 : 60;

void expect_balanced(const char* corpus) {
    sequence::partition::zeppelin_options squares;
    squares.cost = sequence::attention_cost{};
    for (const int nodes : {2, 4, 8}) {
        for (const double slack : {1.1, 1.25, 1.5}) {
            const std::int64_t average = nodes == 2 ? 4096 : 8192;
            const auto capacity = static_cast<std::int64_t>(slack * static_cast<double>(average));
            const cluster c{nodes, 8};
            double worst = 0;
            double worst_in_pairs = 0;
            int balanced = 0;
            std::int64_t most = 0;
            for (std::uint32_t number = 0; number < batches; ++number) {
                const auto lengths = batch_of(corpus, number, average * c.ranks());
                const auto plan = zeppelin{}.plan(lengths, c, capacity);
                worst = std::max(worst, imbalance_by_shares(plan.where, sequence::h100_forward));
                balanced += plan.reason == zeppelin_reason::balanced ? 1 : 0;
                for (const auto& pieces : plan.where.pieces) { most = std::max(most, sequence::tokens_of(pieces)); }
                // And by squares, counted pair by pair.
                worst_in_pairs = std::max(worst_in_pairs, imbalance_by_pairs(zeppelin(squares)(lengths, c, capacity)));
            }
            CAPTURE(nodes);
            CAPTURE(slack);
            CHECK(worst <= 1.05);
            CHECK(worst_in_pairs <= 1.05);
            CHECK(balanced == batches);
            CHECK(most <= capacity);
        }
    }
}

}  // namespace

TEST_CASE("ProLong") { expect_balanced("prolong"); }
TEST_CASE("WLB-LLM") { expect_balanced("wlb"); }
TEST_CASE("Wikipedia") { expect_balanced("wikipedia"); }
TEST_CASE("MagiAttention's corpus") { expect_balanced("magi"); }
