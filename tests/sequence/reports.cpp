// Public bug reports about context parallelism, as far as they concern who has which tokens; each with its address.
#include <doctest/doctest.h>  // checks

#include <numeric>  // accumulate
#include <vector>   // lengths

#include <tutti/sequence/partition/even_ring.hpp>  // even_ring
#include <tutti/sequence/partition/hybrid.hpp>     // hybrid
#include <tutti/sequence/partition/zeppelin.hpp>   // zeppelin
#include <tutti/sequence/validate.hpp>             // validate

#include "sequence/judges.hpp"  // owners, imbalance

using namespace tutti;
using namespace tutti::test;
using sequence::cluster;
using sequence::placement;
using sequence::ring;
using sequence::zone;
using sequence::partition::even_ring;
using sequence::partition::hybrid;
using sequence::partition::zeppelin;

namespace {

// All that place sequences on rings.
template <class F> void for_partitioners(F f) {
    f(even_ring{});
    f(hybrid{});
    f(zeppelin{});
    f(zeppelin(
        sequence::partition::zeppelin_options::hiding(sequence::h100_forward, {4096, {5e-6, 300e9}, {10e-6, 25e9}})));
}

void expect_all_owned(const placement& p) {
    for (const auto& owners : owners_of(p)) { CHECK(std::count(owners.begin(), owners.end(), -1) == 0); }
}

}  // namespace

TEST_CASE("NVIDIA/TransformerEngine#1930, #1929: of length 7 on two ranks the last token was lost") {
    const placement p = even_ring{}(lengths_t{7}, cluster{1, 2});
    // Chunks of 1, 2, 2 and 2 tokens; the larger pair is on the first rank.
    CHECK(owners_of(p) == std::vector<std::vector<int>>{{1, 0, 0, 0, 0, 1, 1}});
}

TEST_CASE("NVIDIA/TransformerEngine#3331: lengths that 2G does not divide keep every row") {
    // 698 tokens, padded to 704, on four ranks.
    const placement p = even_ring{}(lengths_t{698}, cluster{1, 4});
    expect_all_owned(p);
    CHECK(p.pieces[0] == std::vector<sequence::piece>{{0, 0, 87}, {0, 610, 698}});
}

TEST_CASE("NVIDIA/TransformerEngine#2186: a rank may have nothing in its second half, or nothing at all") {
    const placement p = even_ring{}(lengths_t{9, 8, 8, 12, 8, 12, 1, 2, 3}, cluster{1, 8});
    expect_all_owned(p);
    bool one_half = false;
    bool nothing = false;
    for (const auto& pieces : p.pieces) {
        for (std::size_t i = 0; i < pieces.size(); i += 2) {
            one_half = one_half || (pieces[i].size() == 0) != (pieces[i + 1].size() == 0);
            nothing = nothing || (pieces[i].size() == 0 && pieces[i + 1].size() == 0);
        }
    }
    CHECK(one_half);
    CHECK(nothing);
}

TEST_CASE("NVIDIA-NeMo/Megatron-Bridge#4489: sequences without tokens, also at the end, change nothing") {
    for_partitioners([](const auto& partitioner) {
        const placement with = partitioner(lengths_t{0, 300, 0, 0, 40, 0, 0}, cluster{2, 2}, 200);
        const placement without = partitioner(lengths_t{300, 40}, cluster{2, 2}, 200);
        expect_kept(with, 202);
        for (std::size_t rank = 0; rank < 4; ++rank) {
            auto pieces = sequence::detail::in_memory(with.pieces[rank]);
            for (auto& q : pieces) { q.sequence = q.sequence == 1 ? 0 : 1; }
            CHECK(pieces == sequence::detail::in_memory(without.pieces[rank]));
        }
    });
}

TEST_CASE("SandAI-org/MagiAttention#9, NVIDIA/Megatron-LM#1764: ranks that get nothing have an empty list") {
    for_partitioners([](const auto& partitioner) {
        const placement p = partitioner(lengths_t{1}, cluster{2, 4}, 8);
        expect_kept(p, 8);
        CHECK(p.pieces.size() == 8);
        std::int64_t tokens = 0;
        for (const auto& pieces : p.pieces) { tokens += sequence::tokens_of(pieces); }
        CHECK(tokens == 1);
    });
}

TEST_CASE("pytorch/torchtitan#2536, zhuzilin/ring-flash-attention#51, #39: any lengths, no padding") {
    for (const lengths_t& lengths : {lengths_t{137, 2041, 89}, lengths_t{32769}, lengths_t{1, 1, 1}}) {
        for (const cluster& c : {cluster{1, 2}, cluster{1, 7}, cluster{2, 8}}) {
            const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
            for_partitioners([&](const auto& partitioner) {
                const placement p = partitioner(lengths, c, total);
                expect_kept(p, total + 2);
                std::int64_t placed = 0;
                for (const auto& pieces : p.pieces) { placed += sequence::tokens_of(pieces); }
                CHECK(placed == total);
            });
        }
    }
}

TEST_CASE("feifeibear/long-context-attention#53: rings are zigzag: the ends of a sequence are on one rank") {
    for_partitioners([](const auto& partitioner) {
        const placement p = partitioner(lengths_t{4096}, cluster{1, 4}, 1024);
        REQUIRE(p.rings[0].ranks.size() == 4);
        const auto owners = owners_of(p)[0];
        for (std::size_t t = 0; t < 4096; ++t) { CHECK(owners[t] == owners[4095 - t]); }
        CHECK(owners[0] != owners[512]);
        CHECK(imbalance_by_pairs(p) <= 1.001);
    });
}

TEST_CASE("pytorch/pytorch#189902: documents of 4 and 12 on two ranks: work is even, not only results right") {
    const placement p = even_ring{}(lengths_t{4, 12}, cluster{1, 2});
    CHECK(imbalance_by_pairs(p) == 1);
    CHECK(sequence::tokens_of(p.pieces[0]) == 8);
    // Each rank's memory is its own chunks, not a cut of a list in the order of documents.
    CHECK(p.pieces[0] == std::vector<sequence::piece>{{0, 0, 1}, {0, 3, 4}, {1, 0, 3}, {1, 9, 12}});
    CHECK(p.pieces[1] == std::vector<sequence::piece>{{0, 1, 2}, {0, 2, 3}, {1, 3, 6}, {1, 6, 9}});
}

TEST_CASE("SandAI-org/MagiAttention#196, NVIDIA/Megatron-LM#4495: positions are those in the sequence") {
    // What a rotary embedding needs: every position of every sequence once, next to its own successor within a piece.
    const placement p = zeppelin{}(lengths_t{100, 37, 3}, cluster{1, 4}, 44);
    std::vector<std::vector<int>> seen{std::vector<int>(100), std::vector<int>(37), std::vector<int>(3)};
    for (const auto& pieces : p.pieces) {
        for (const auto& q : pieces) {
            for (std::int64_t i = 0; i < q.size(); ++i) {
                ++seen[static_cast<std::size_t>(q.sequence)].at(static_cast<std::size_t>(q.begin + i));
            }
        }
    }
    for (const auto& counts : seen) { CHECK(std::count(counts.begin(), counts.end(), 1) == std::ssize(counts)); }
}

TEST_CASE("SandAI-org/MagiAttention#169: tokens and bytes beyond 32 bits") {
    const lengths_t lengths{5'000'000'000, 3'000'000'001, 7};
    for_partitioners([&](const auto& partitioner) {
        const placement p = partitioner(lengths, cluster{2, 4}, 4'000'000'000);
        sequence::validate(p, 4'000'000'002);
        std::int64_t placed = 0;
        for (const auto& pieces : p.pieces) { placed += sequence::tokens_of(pieces); }
        CHECK(placed == 8'000'000'008);
    });
}

TEST_CASE("Megatron-LM's hybrid schedule asks for more ranks than there are") {
    // megatron/core/pipeline_parallel/hybrid_cp_schedule.py of NVIDIA/Megatron-LM: a power of two of ranks, unbounded.
    for (const cluster& c : {cluster{1, 3}, cluster{3, 2}, cluster{1, 6}}) {
        const placement p = hybrid(100)(lengths_t{100 * (c.ranks() - 1) + 1}, c);
        CHECK(static_cast<int>(p.rings[0].ranks.size()) == c.ranks());
        const placement longer = hybrid(100)(lengths_t{100'000}, c);
        CHECK(static_cast<int>(longer.rings[0].ranks.size()) == c.ranks());
    }
}

TEST_CASE("NVIDIA/nccl#479, #584, #783, #1192: rings that ranks order by their own load wait for each other") {
    // Two long sequences on two ranks: each rank starts with the one of which it has more, and both wait forever.
    const std::vector<ring> rings{{0, zone::node, {0, 1}}, {1, zone::node, {1, 0}}};
    const std::vector<std::vector<std::size_t>> by_load{{0, 1}, {1, 0}};
    CHECK_THROWS_WITH_AS(sequence::validate_order(rings, by_load),
                         "placement: rings wait for each other: rank 0 runs sequence 0 before sequence 1, rank 1 runs "
                         "sequence 1 before sequence 0",
                         usage_error);
    // The order of a placement is the same for all.
    for_partitioners([](const auto& partitioner) {
        const placement p = partitioner(batch_of("wlb", 1, 16 * 4096), cluster{2, 8}, 8192);
        std::vector<std::vector<std::size_t>> orders(16);
        for (std::size_t at = 0; at < p.rings.size(); ++at) {
            for (const int rank : p.rings[at].ranks) { orders[static_cast<std::size_t>(rank)].push_back(at); }
        }
        sequence::validate_order(p.rings, orders);
    });
}
