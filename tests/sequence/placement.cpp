// placement, validate: chunks against their definition, pieces against owners token by token, every promise broken
// once, and orders of rings against a run of them.
#include <doctest/doctest.h>  // checks

#include <algorithm>   // shuffle
#include <functional>  // ways to break a placement
#include <random>      // orders
#include <string>      // messages
#include <vector>      // placements

#include <tutti/sequence/partition/even_ring.hpp>  // a placement
#include <tutti/sequence/placement.hpp>            // placement
#include <tutti/sequence/validate.hpp>             // validate

#include "sequence/judges.hpp"  // owners

using namespace tutti;
using namespace tutti::test;
using sequence::cluster;
using sequence::no_capacity;
using sequence::piece;
using sequence::placement;
using sequence::ring;
using sequence::zone;

namespace {

__extension__ using wide = __int128;

// Two nodes of four ranks; a ring over both nodes, two inside a node, and sequences on one rank each, one empty.
placement example() {
    return sequence::assembled(cluster{2, 4}, lengths_t{7, 40, 9, 1, 0, 137},
                               {{3, zone::local, {6}},
                                {1, zone::node, {0, 1, 2}},
                                {5, zone::world, {4, 5, 6, 7, 0, 1, 2, 3}},
                                {0, zone::local, {3}},
                                {4, zone::local, {7}},
                                {2, zone::node, {5, 4}}});
}

std::string refusal(const std::function<void()>& call) {
    try {
        call();
    } catch (const usage_error& e) { return e.what(); }
    return "accepted";
}

}  // namespace

TEST_CASE("chunk boundaries are floor(c s / 2G), whatever the length") {
    const auto expect = [](std::int64_t s, std::int64_t chunks) {
        bool right = true;
        for (std::int64_t c = 0; c <= chunks; ++c) {
            const wide b = sequence::chunk_begin(s, c, chunks);
            right = right && b * chunks <= wide{c} * s && wide{c} * s < (b + 1) * chunks;
        }
        CHECK(right);
    };
    for (const std::int64_t chunks : {2, 4, 6, 8, 16, 128}) {
        for (std::int64_t s = 0; s < 400; ++s) { expect(s, chunks); }
        for (const std::int64_t s : {std::int64_t{1} << 31, (std::int64_t{1} << 40) + 7, (std::int64_t{1} << 62) - 1}) {
            expect(s, chunks);
        }
    }
}

TEST_CASE("every token is on one rank of a ring, and ranks differ by two tokens at most") {
    for (const std::int64_t s : {1, 7, 9, 12, 57, 137, 698, 2041, 4097}) {
        for (const int size : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}) {
            ring r{0, size == 1 ? zone::local : zone::node, {}};
            for (int i = 0; i < size; ++i) { r.ranks.push_back(size - 1 - i); }
            const placement p = sequence::assembled(cluster{1, size}, lengths_t{s}, {r});
            expect_kept(p, s);
            sequence::validate(p);
            std::int64_t least = s;
            std::int64_t most = 0;
            for (int i = 0; i < size; ++i) {
                const auto rank = static_cast<std::size_t>(size - 1 - i);
                const std::int64_t n = sequence::tokens_of(p.pieces[rank]);
                CHECK(n == sequence::tokens_at(s, size, i));
                least = std::min(least, n);
                most = std::max(most, n);
            }
            CHECK(most - least <= 2);
            CHECK(most <= sequence::most_tokens(s, size));
            CHECK(sequence::most_tokens(s, size) <= s / size + 2);
        }
    }
}

TEST_CASE("a zigzag ring is balanced in pairs of queries and keys") {
    for (const int size : {1, 2, 3, 4, 8, 16, 64}) {
        for (std::int64_t s = 64 * size; s < 64 * size + 40; ++s) {
            ring r{0, size == 1 ? zone::local : zone::node, {}};
            for (int i = 0; i < size; ++i) { r.ranks.push_back(i); }
            CHECK(imbalance_by_pairs(sequence::assembled(cluster{1, size}, lengths_t{s}, {r})) <= 1.035);
        }
    }
}

TEST_CASE("pairs_of counts what each query sees") {
    for (const piece& p : {piece{0, 0, 0}, piece{0, 0, 9}, piece{0, 3, 4}, piece{0, 5, 12}}) {
        double pairs = 0;
        for (std::int64_t t = p.begin; t < p.end; ++t) { pairs += static_cast<double>(t + 1); }
        CHECK(sequence::pairs_of(p) == pairs);
    }
}

TEST_CASE("rings come into their order, and pieces follow them") {
    const placement p = example();
    expect_kept(p, no_capacity);
    std::vector<int> sequences;
    for (const ring& r : p.rings) { sequences.push_back(r.sequence); }
    CHECK(sequences == std::vector<int>{5, 1, 2, 0, 3, 4});
    // Rank 4 is the first of sequence 5's ring, the last of sequence 2's.
    CHECK(p.pieces[4] == std::vector<piece>{{5, 0, 8}, {5, 128, 137}, {2, 2, 4}, {2, 4, 6}});
    CHECK(p.pieces[7] == std::vector<piece>{{5, 25, 34}, {5, 102, 111}, {4, 0, 0}, {4, 0, 0}});
}

TEST_CASE("every broken promise is refused by sequence and rank") {
    CHECK(refusal([] { sequence::validate(example(), 41); }) == "accepted");
    const auto broken = [](const std::function<void(placement&)>& breaks, std::int64_t capacity = no_capacity) {
        placement p = example();
        breaks(p);
        return refusal([&] { sequence::validate(p, capacity); });
    };
    // Pieces of rank 4: {5, 0, 8}, {5, 128, 137}, {2, 2, 4}, {2, 4, 6}
    CHECK(broken([](placement& p) { p.pieces[4][0].begin = 1; }) ==
          "placement: sequence 5: tokens [0, 1) are on no rank; rank 4 goes on");
    CHECK(broken([](placement& p) { p.pieces[4][1].end = 136; }) ==
          "placement: sequence 5: tokens [136, 137) are on no rank");
    CHECK(broken([](placement& p) { p.pieces[4][0].end = 9; }) ==
          "placement: sequence 5: token 8 is on rank 4 and on rank 5");
    CHECK(broken([](placement& p) {
              p.pieces[3].push_back({3, 0, 1});
          }) == "placement: sequence 3: token 0 is on rank 3 and on rank 6");
    CHECK(broken([](placement& p) { p.pieces[4][1].end = 138; }) ==
          "placement: rank 4: [128, 138) are no tokens of sequence 5, which has 137");
    CHECK(broken([](placement& p) { p.pieces[4][0].begin = -1; }) ==
          "placement: rank 4: [-1, 8) are no tokens of sequence 5, which has 137");
    CHECK(broken([](placement& p) { p.pieces[4][0].sequence = 6; }) ==
          "placement: rank 4 has a piece of sequence 6, of 6 sequences");
    CHECK(broken([](placement& p) { p.pieces.pop_back(); }) == "placement: pieces of 7 ranks are given for 8");
    CHECK(broken([](placement& p) { std::swap(p.pieces[4], p.pieces[5]); }) ==
          "placement: rank 4: tokens [8, 17) of sequence 5 are not where the rings put them");
    CHECK(broken([](placement& p) { std::swap(p.pieces[4][0], p.pieces[4][2]); }) ==
          "placement: rank 4: tokens [2, 4) of sequence 2 are not where the rings put them");
    CHECK(broken([](placement&) {}, 30) == "placement: rank 1 has 32 tokens, its capacity is 30");
    // Rings: 5 (world), 1 and 2 (node), 0, 3 and 4 (local)
    const auto twice = [](placement& p) { p.rings[1].ranks[2] = 0; };
    CHECK(broken(twice) == "placement: the ring of sequence 1 has rank 0 twice");
    CHECK(broken([](placement& p) { p.rings[1].ranks[2] = 8; }) ==
          "placement: the ring of sequence 1 has rank 8, of 8 ranks");
    CHECK(broken([](placement& p) { p.rings[1].ranks.clear(); }) == "placement: the ring of sequence 1 has no rank");
    CHECK(broken([](placement& p) { p.rings[1].sequence = 6; }) ==
          "placement: the ring of sequence 6 has no sequence: there are 6");
    CHECK(broken([](placement& p) { p.rings[1].where = zone::world; }) ==
          "placement: the ring of sequence 1 is said to be world, its ranks 0, 1, 2 are node");
    CHECK(broken([](placement& p) {
              p.rings[0].ranks.pop_back();
              p = sequence::assembled(p.machines, p.lengths, p.rings);
          }) == "placement: the ring of sequence 5 has rank 0 and 3 of the 4 ranks of node 0, not whole nodes");
    CHECK(broken([](placement& p) {
              std::swap(p.rings[0].ranks[3], p.rings[0].ranks[4]);
              p = sequence::assembled(p.machines, p.lengths, p.rings);
          }) == "placement: the ring of sequence 5 comes back to node 1 with rank 7");
    CHECK(
        broken([](placement& p) { std::swap(p.rings[1], p.rings[2]); }) ==
        "placement: the ring of sequence 1 (node) stands behind that of sequence 2 (node), against the order that all "
        "ranks share");
    CHECK(
        broken([](placement& p) { std::swap(p.rings[2], p.rings[3]); }) ==
        "placement: the ring of sequence 2 (node) stands behind that of sequence 0 (local), against the order that all "
        "ranks share");
    CHECK(broken([](placement& p) { p.rings[4].sequence = 0; }) == "placement: sequence 0 has two rings");
    CHECK(broken([](placement& p) { p.rings.erase(p.rings.begin() + 1); }) == "placement: sequence 1 has no ring");
    CHECK(broken([](placement& p) { p.rings.pop_back(); }) == "accepted");  // sequence 4 has no tokens
    CHECK(broken([](placement& p) { p.lengths[4] = -1; }) == "placement: sequence 4 has -1 tokens");
    CHECK(broken([](placement& p) { p.machines.nodes = 0; }) == "placement: 0 nodes of 4 ranks are no cluster");
    CHECK(broken([](placement&) {}, 0) == "placement: a capacity of 0 tokens a rank");
}

TEST_CASE("pieces may be cut and joined otherwise, as long as memory holds the same") {
    placement p = example();
    p.pieces[4] = {{5, 0, 3}, {5, 3, 8}, {5, 128, 137}, {2, 2, 6}, {4, 0, 0}};
    sequence::validate(p);
    CHECK(hash_of(p) != hash_of(example()));
}

TEST_CASE("a hash sees every part") {
    const std::uint64_t hash = hash_of(example());
    CHECK(hash == hash_of(example()));
    const std::vector<std::function<void(placement&)>> changes{
        [](placement& p) {
            p.machines = {4, 2};
        },
        [](placement& p) { ++p.lengths[0]; },
        [](placement& p) { p.lengths.push_back(0); },
        [](placement& p) { p.rings[1].where = zone::world; },
        [](placement& p) { std::swap(p.rings[1].ranks[0], p.rings[1].ranks[1]); },
        [](placement& p) { ++p.rings[5].sequence; },
        [](placement& p) { ++p.pieces[0][0].begin; },
        [](placement& p) { ++p.pieces[0][0].end; },
        [](placement& p) { p.pieces[0].pop_back(); }};
    for (const auto& change : changes) {
        placement p = example();
        change(p);
        CHECK(hash_of(p) != hash);
    }
}

TEST_CASE("clusters come from topologies of equal nodes in order") {
    CHECK(sequence::cluster_of(comm::topology::uniform(3, 4)) == cluster{3, 4});
    CHECK(
        refusal([] {
            (void)sequence::cluster_of(comm::topology({.node = {0, 0, 1}}));
        }) ==
        "placement: rank 0 is on node 0; sequences are placed on nodes of equal size, the first of which has the first "
        "ranks, and so on");
    CHECK(refusal([] {
              (void)sequence::cluster_of(comm::topology({.node = {0, 1, 0, 1}}));
          }).starts_with("placement: rank 1 is on node 1;"));
}

namespace {

// Runs rings in the given orders: one may run when it is next on all its ranks. True when all have run.
bool all_run(const std::vector<ring>& rings, const std::vector<std::vector<std::size_t>>& orders) {
    std::vector<std::size_t> next(orders.size());
    std::size_t run = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (std::size_t at = 0; at < rings.size(); ++at) {
            bool ready = true;
            for (const int r : rings[at].ranks) {
                const auto rank = static_cast<std::size_t>(r);
                ready = ready && next[rank] < orders[rank].size() && orders[rank][next[rank]] == at;
            }
            if (!ready) { continue; }
            for (const int r : rings[at].ranks) { ++next[static_cast<std::size_t>(r)]; }
            ++run;
            moved = true;
        }
    }
    return run == rings.size();
}

}  // namespace

TEST_CASE("orders that would never end are refused, and no others") {
    std::mt19937 random(3);
    int refused = 0;
    int accepted = 0;
    for (int repeat = 0; repeat < 400; ++repeat) {
        const int ranks = 2 + static_cast<int>(random() % 5);
        std::vector<ring> rings;
        std::vector<std::vector<std::size_t>> orders(static_cast<std::size_t>(ranks));
        for (int s = 0; s < 6; ++s) {
            std::vector<int> members;
            for (int r = 0; r < ranks; ++r) {
                if (random() % 2 == 0) { members.push_back(r); }
            }
            if (members.empty()) { members.push_back(0); }
            for (const int r : members) { orders[static_cast<std::size_t>(r)].push_back(rings.size()); }
            rings.push_back({s, zone::node, members});
        }
        sequence::validate_order(rings, orders);  // one order for all
        CHECK(all_run(rings, orders));
        for (auto& order : orders) {
            if (order.size() > 1) { std::swap(order[0], order[random() % order.size()]); }
        }
        const std::string said = refusal([&] { sequence::validate_order(rings, orders); });
        CHECK((said == "accepted") == all_run(rings, orders));
        ++(said == "accepted" ? accepted : refused);
        CHECK((said == "accepted" || said.starts_with("placement: rings wait for each other: rank ")));
    }
    CHECK(accepted > 50);
    CHECK(refused > 50);
}

TEST_CASE("a circle is named by sequences and ranks") {
    const std::vector<ring> rings{{7, zone::node, {0, 1}}, {8, zone::node, {1, 2}}, {9, zone::node, {0, 2}}};
    CHECK(
        refusal([&] {
            sequence::validate_order(rings, std::vector<std::vector<std::size_t>>{{0, 2}, {1, 0}, {2, 1}});
        }) ==
        "placement: rings wait for each other: rank 0 runs sequence 7 before sequence 9, rank 2 runs sequence 9 before "
        "sequence 8, rank 1 runs sequence 8 before sequence 7");
    CHECK(refusal([&] {
              sequence::validate_order(rings, std::vector<std::vector<std::size_t>>{{0, 2}, {0, 1}, {2}});
          }) == "placement: the ring of sequence 8 is listed by 1 of its 2 ranks");
    for (const auto& bad : std::vector<std::vector<std::size_t>>{{0, 2, 1}, {0, 2, 0}, {0, 3}}) {
        CHECK(refusal([&] {
                  sequence::validate_order(rings, std::vector<std::vector<std::size_t>>{bad, {0, 1}, {1, 2}});
              }) == formatted("placement: rank 0 lists ring {}, which it is not in, or lists twice", bad.back()));
    }
}

TEST_CASE("a ring that a rank has left out stays open for nobody else") {
    const std::vector<ring> rings{{0, zone::node, {0, 1}}, {1, zone::local, {0}}};
    CHECK(refusal([&] {
              sequence::validate_order(rings, std::vector<std::vector<std::size_t>>{{0}, {0, 1}});
          }) == "placement: rank 1 lists ring 1, which it is not in, or lists twice");
}

TEST_CASE("checks are linear in the sizes of the rings") {
    // What is quadratic takes hundreds of times as long, and does not end before the test's time is up.
    const int many = 1 << 20;
    std::vector<ring> rings;
    std::vector<std::vector<std::size_t>> orders(1);
    for (int s = 0; s < many; ++s) {
        orders[0].push_back(rings.size());
        rings.push_back({s, zone::local, {0}});
    }
    CHECK(refusal([&] { sequence::validate_order(rings, orders); }) == "accepted");
    ring all{0, zone::node, {}};
    for (int r = 0; r < many; ++r) { all.ranks.push_back(r); }
    CHECK(refusal([&] {
              sequence::validate_rings(sequence::assembled(cluster{1, many}, lengths_t{2 * many}, {all}));
          }) == "accepted");
}
