// topology: nodes, NICs, links; discovery by host name.
#include <doctest/doctest.h>

#include <algorithm>  // sort
#include <limits>     // no number
#include <string>     // host names
#include <utility>    // move
#include <vector>     // tables

#include <tutti/comm/node_groups.hpp>  // tested
#include <tutti/comm/self.hpp>         // discovery of one
#include <tutti/comm/threads.hpp>      // discovery of many
#include <tutti/comm/topology.hpp>     // tested

using namespace tutti;
using comm::threads;
using comm::topology;

namespace {

constexpr comm::link nvlink{1e-6, 300e9};
constexpr comm::link ethernet{50e-6, 1.25e9};

std::vector<int> on(const topology& t, int node) {
    const auto ranks = t.ranks_on(node);
    return {ranks.begin(), ranks.end()};
}
std::vector<int> nics(const topology& t) {
    std::vector<int> all;
    for (int r = 0; r < t.ranks(); ++r) { all.push_back(t.nic_of(r)); }
    return all;
}

}  // namespace

TEST_CASE("one node") {
    const topology t = topology::one_node(3, nvlink);
    CHECK(t.ranks() == 3);
    CHECK(t.nodes() == 1);
    CHECK(on(t, 0) == std::vector{0, 1, 2});
    CHECK(t.link(0, 2) == nvlink);
    CHECK(t.link(2, 2) == comm::link{});
    CHECK(t.largest_node() == 3);
    CHECK(t.smallest_node() == 3);
    CHECK(t.ranks_per_nic() == 3);
}

TEST_CASE("uniform nodes: ranks in blocks") {
    const topology t = topology::uniform(3, 2, nvlink, ethernet);
    CHECK(t.ranks() == 6);
    CHECK(t.nodes() == 3);
    CHECK(on(t, 1) == std::vector{2, 3});
    CHECK(t.leader(2) == 4);
    CHECK(t.node_of(5) == 2);
    CHECK(t.local_rank(5) == 1);
    CHECK(t.same_node(2, 3));
    CHECK_FALSE(t.same_node(1, 2));
    CHECK(t.link(2, 3) == nvlink);
    CHECK(t.link(3, 4) == ethernet);
    CHECK(t.inside() == nvlink);
    CHECK(t.between() == ethernet);
}

TEST_CASE("any placement: ranks of a node stay in ascending order, its leader is the lowest") {
    const topology t({.node = {1, 0, 1, 2, 0, 1}});
    CHECK(on(t, 0) == std::vector{1, 4});
    CHECK(on(t, 1) == std::vector{0, 2, 5});
    CHECK(on(t, 2) == std::vector{3});
    CHECK(t.leader(1) == 0);
    CHECK(t.local_rank(5) == 2);
    CHECK(t.largest_node() == 3);
    CHECK(t.smallest_node() == 1);
}

TEST_CASE("NICs: in blocks by default, else as given") {
    CHECK(nics(topology::uniform(1, 8, {}, {}, 4)) == std::vector{0, 0, 1, 1, 2, 2, 3, 3});
    CHECK(nics(topology::uniform(2, 3, {}, {}, 2)) == std::vector{0, 0, 1, 0, 0, 1});
    CHECK(nics(topology::uniform(1, 2, {}, {}, 4)) == std::vector{0, 2});
    CHECK(topology::uniform(1, 8, {}, {}, 4).ranks_per_nic() == 2);
    CHECK(topology::uniform(2, 3, {}, {}, 2).ranks_per_nic() == 2);
    CHECK(topology::uniform(2, 2, {}, {}, 4).ranks_per_nic() == 1);

    const topology t({.node = {0, 0, 0, 1}, .nic = {1, 1, 1, 0}, .nics_per_node = 2});
    CHECK(nics(t) == std::vector{1, 1, 1, 0});
    CHECK(t.nics_per_node() == 2);
    CHECK(t.ranks_per_nic() == 3);
}

TEST_CASE("a subset keeps nodes, NICs and links") {
    const topology t = topology::uniform(2, 4, nvlink, ethernet, 2);
    const std::vector<int> across{1, 7};
    const topology pair = t.subset(across);
    CHECK(pair.ranks() == 2);
    CHECK(pair.nodes() == 2);
    CHECK(nics(pair) == std::vector{0, 1});
    CHECK(pair.link(0, 1) == ethernet);
    CHECK(pair.ranks_per_nic() == 1);

    const std::vector<int> second_node{4, 5, 6, 7};
    const topology node = t.subset(second_node);
    CHECK(node ==
          topology(
              {.node = {0, 0, 0, 0}, .nic = {0, 0, 1, 1}, .nics_per_node = 2, .inside = nvlink, .between = ethernet}));

    const std::vector<int> all{0, 1, 2, 3, 4, 5, 6, 7};
    CHECK(t.subset(all) == t);
    CHECK_FALSE(t.subset(across) == t.subset(second_node));
}

TEST_CASE("discovery groups ranks by host name, and all ranks get the same") {
    const std::vector<std::string> hosts{"b", "a", "b", "a"};
    std::vector<topology> found(4, topology::one_node(1));
    comm::threads::launch(4, [&](comm::threads& c) {
        const auto r = static_cast<std::size_t>(c.rank());
        found[r] = topology::discover(c, nvlink, ethernet, 2, hosts[r]);
    });
    const topology expected({.node = {0, 1, 0, 1}, .nics_per_node = 2, .inside = nvlink, .between = ethernet});
    for (const topology& t : found) { CHECK(t == expected); }
}

TEST_CASE("threads of one process share a node") {
    comm::threads::launch(3, [&](comm::threads& c) { CHECK(topology::discover(c) == topology::one_node(3)); });
    comm::self<> alone;
    CHECK(topology::discover(alone) == topology::one_node(1));
    CHECK_FALSE(comm::host_name().empty());
}

TEST_CASE("errors say what makes no sense") {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    CHECK_THROWS_WITH_AS(topology({}), "topology: a topology has at least one rank", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(topology::uniform(0, 4)),
                         "topology: 0 nodes of 4 ranks; both must be positive", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(topology::uniform(2, -1)),
                         "topology: 2 nodes of -1 ranks; both must be positive", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(topology::uniform(1, 1, {}, {}, 0)), "topology: 0 NICs per node",
                         usage_error);
    CHECK_THROWS_WITH_AS(topology({.node = {0, 2}}),
                         "topology: rank 1 is on node 2; 2 ranks have at most as many nodes", usage_error);
    CHECK_THROWS_WITH_AS(topology({.node = {0, -1}}),
                         "topology: rank 1 is on node -1; 2 ranks have at most as many nodes", usage_error);
    CHECK_THROWS_WITH_AS(topology({.node = {0, 0, 2}}), "topology: node 1 of 3 has no rank", usage_error);
    CHECK_THROWS_WITH_AS(topology({.node = {0, 0}, .nic = {0}}), "topology: NICs of 1 ranks are given for 2 ranks",
                         usage_error);
    CHECK_THROWS_WITH_AS(topology({.node = {0, 0}, .nic = {0, 1}}), "topology: rank 1 uses NIC 1 of 1", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(topology::one_node(2, {-1, 1})),
                         "topology: latency -1 s inside a node is not a finite number >= 0", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(topology::one_node(2, {nan, 1})),
                         "topology: latency nan s inside a node is not a finite number >= 0", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(topology::uniform(2, 1, {}, {0, 0})),
                         "topology: bandwidth 0 B/s between nodes is not positive", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(topology::uniform(2, 1, {}, {0, nan})),
                         "topology: bandwidth nan B/s between nodes is not positive", usage_error);

    const topology t = topology::one_node(2);
    const std::vector<int> bad{0, 2};
    CHECK_THROWS_WITH_AS(static_cast<void>(t.node_of(2)), "topology: rank 2 is not one of 2 ranks", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(t.link(0, -1)), "topology: rank -1 is not one of 2 ranks", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(t.ranks_on(1)), "topology: node 1 is not one of 1 nodes", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(t.subset(bad)), "topology: rank 2 is not one of 2 ranks", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(t.subset({})), "topology: a topology has at least one rank", usage_error);
}

TEST_CASE("two levels: several nodes of several ranks, all as many") {
    CHECK(topology::uniform(2, 2).has_two_levels());
    CHECK(topology({.node = {1, 0, 0, 1}}).has_two_levels());
    CHECK_FALSE(topology::one_node(4).has_two_levels());
    CHECK_FALSE(topology::uniform(4, 1).has_two_levels());
    CHECK_FALSE(topology({.node = {0, 0, 1}}).has_two_levels());
    CHECK_FALSE(topology({.node = {0, 0, 1, 1, 1}}).has_two_levels());
}

TEST_CASE("ranks by node: those of one node, and those of one place, in their order") {
    for (const auto& node : {std::vector{0, 0, 1, 1}, std::vector{1, 0, 0, 1}, std::vector{0, 1, 0}}) {
        const topology t({.node = node});
        threads::launch(t.ranks(), [&](threads& c) {
            const auto members = [&](threads group) {
                std::vector<int> all(static_cast<std::size_t>(group.size()));
                const int own[] = {c.rank()};
                group.all_gather(own, view<int>(all));
                return all;
            };
            CHECK(members(comm::split_inside(c, t)) == on(t, t.node_of(c.rank())));
            std::vector<int> place;
            for (int n = 0; n < t.nodes(); ++n) {
                const auto ranks = on(t, n);
                const auto at = static_cast<std::size_t>(t.local_rank(c.rank()));
                if (at < ranks.size()) { place.push_back(ranks[at]); }
            }
            std::sort(place.begin(), place.end());
            CHECK(members(comm::split_across(c, t)) == place);
        });
    }
    CHECK(comm::list_of_nodes(topology({.node = {1, 0, 0, 1}})) == " 1 0 0 1");
}

TEST_CASE("nodes that are not those of the ranks, or not of one size, are refused in the name of who asked") {
    const auto refusal = [](auto f) {
        try {
            f();
        } catch (const usage_error& e) { return std::string(e.what()); }
        return std::string("no usage_error");
    };
    const comm::self<host_queue> one;
    CHECK(refusal([&] { comm::expect_nodes_of(one, topology::uniform(1, 2), "shards"); }) ==
          "shards: nodes of 2 ranks together, 'self' has 1");
    CHECK(refusal([&] {
              comm::expect_equal_nodes(topology({.node = {0, 0, 1}}), "shards");
          }) == "shards: nodes of 1 to 2 ranks; all must have as many");
    comm::expect_nodes_of(one, topology::one_node(1), "shards");
    comm::expect_equal_nodes(topology::uniform(2, 2), "shards");
}
