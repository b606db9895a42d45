// mesh: positions, groups, topologies, and what is refused before anything moves.
#include <doctest/doctest.h>  // checks

#include <utility>  // pair
#include <vector>   // groups

#include <tutti/comm/self.hpp>      // one rank
#include <tutti/comm/threads.hpp>   // ranks
#include <tutti/parallel/mesh.hpp>  // under test

#include <support/failure.hpp>  // expect

using namespace tutti;
using namespace tutti::test;
using comm::threads;
using comm::topology;
using parallel::dimension;
using parallel::mesh;
using parallel::mesh_sizes;

namespace {

std::vector<int> group_of(const mesh& m, int rank, std::initializer_list<dimension> along) {
    const auto colors = m.colors(along);
    std::vector<int> members;
    for (int r = 0; r < m.ranks(); ++r) {
        if (colors[static_cast<std::size_t>(r)] == colors[static_cast<std::size_t>(rank)]) { members.push_back(r); }
    }
    return members;
}

topology dealt(std::vector<int> nodes) { return topology(topology::layout{std::move(nodes), {}, 1, {}, {}}); }

}  // namespace

TEST_CASE("the stated order: tensor fastest, then sequence, data, replicate, pipeline") {
    const mesh m({.pipeline = 2, .replicate = 2, .data = 2, .sequence = 1, .tensor = 2}, 16);
    CHECK(m.position(0) == mesh::coordinates{0, 0, 0, 0, 0});
    CHECK(m.position(1) == mesh::coordinates{0, 0, 0, 0, 1});
    CHECK(m.position(6) == mesh::coordinates{0, 1, 1, 0, 0});
    CHECK(m.position(15) == mesh::coordinates{1, 1, 1, 0, 1});
    CHECK(m.coordinate(9, dimension::pipeline) == 1);
    CHECK(m.describe() == "pipeline 2, replicate 2, data 2, tensor 2");
    CHECK(group_of(m, 5, {dimension::tensor}) == std::vector{4, 5});
    CHECK(group_of(m, 5, {dimension::sequence}) == std::vector{5});
    CHECK(group_of(m, 5, {dimension::data}) == std::vector{5, 7});
    CHECK(group_of(m, 5, {dimension::replicate}) == std::vector{1, 5});
    CHECK(group_of(m, 5, {dimension::pipeline}) == std::vector{5, 13});
    CHECK(group_of(m, 5, {dimension::replicate, dimension::data}) == std::vector{1, 3, 5, 7});
    CHECK(group_of(m, 5, {}) == std::vector{5});
    for (int r = 0; r < 16; ++r) { CHECK(m.rank_at(m.position(r)) == r); }
    CHECK(mesh({}, 1).describe() == "one rank");
}

TEST_CASE("tensor groups are inside nodes however ranks were dealt to them") {
    const mesh_sizes sizes{.pipeline = 2, .tensor = 4};
    const mesh in_blocks(sizes, topology::uniform(2, 4));
    CHECK(in_blocks == mesh(sizes, 8));
    const mesh in_turn(sizes, dealt({0, 1, 0, 1, 0, 1, 0, 1}));
    CHECK(group_of(in_turn, 0, {dimension::tensor}) == std::vector{0, 2, 4, 6});
    CHECK(group_of(in_turn, 3, {dimension::tensor}) == std::vector{1, 3, 5, 7});
    CHECK(group_of(in_turn, 2, {dimension::pipeline}) == std::vector{2, 3});
    CHECK(in_turn.position(3) == mesh::coordinates{1, 0, 0, 0, 1});
    // The node of rank 0 comes first, whatever its number.
    CHECK(mesh({.pipeline = 2, .tensor = 2}, dealt({1, 1, 0, 0})) == mesh({.pipeline = 2, .tensor = 2}, 4));
    // A group may fill several nodes.
    CHECK(mesh({.tensor = 8}, topology::uniform(4, 2)).size(dimension::tensor) == 8);
}

TEST_CASE("what does not fit is refused with the numbers") {
    const auto make = [](mesh_sizes s, int ranks) { return mesh(s, ranks).ranks(); };
    CHECK_THROWS_WITH_AS(make({.data = 2, .tensor = 3}, 8), "mesh: data 2, tensor 3 does not multiply to 8 ranks",
                         usage_error);
    CHECK_THROWS_WITH_AS(make({.data = 2}, 1), "mesh: data 2 does not multiply to 1 ranks", usage_error);
    CHECK_THROWS_WITH_AS(make({}, 2), "mesh: one rank does not multiply to 2 ranks", usage_error);
    CHECK_THROWS_WITH_AS(make({.data = -2, .tensor = -4}, 8), "mesh: size -2 along data is not positive", usage_error);
    CHECK_THROWS_WITH_AS(make({.sequence = 0}, 1), "mesh: size 0 along sequence is not positive", usage_error);
    const int huge = 1 << 30;
    CHECK_THROWS_AS(make({.pipeline = huge, .replicate = huge, .data = huge, .sequence = huge, .tensor = huge}, 1),
                    usage_error);
    CHECK_THROWS_WITH_AS(mesh({.data = 2, .tensor = 3}, topology::uniform(3, 2)),
                         "mesh: tensor groups of 3 ranks and the 2 ranks of node 0 do not divide one another",
                         usage_error);
    // All counts and the group divide one another, but the first group would reach into node 1.
    CHECK_THROWS_WITH_AS(
        mesh({.data = 2, .tensor = 4}, dealt({0, 0, 1, 1, 1, 1, 2, 2})),
        "mesh: a tensor group of 4 ranks has 2 on nodes before and would take a part of the 4 of node 1; "
        "let nodes that fill a group follow one another",
        usage_error);
    CHECK_THROWS_AS(mesh({.data = 2, .tensor = 6}, dealt({0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4})), usage_error);
    CHECK(mesh({.data = 2, .tensor = 4}, dealt({0, 0, 1, 1, 2, 2, 2, 2})).ranks() == 8);
    CHECK(mesh({.tensor = 4}, dealt({0, 1, 1, 2})).ranks() == 4);
    const mesh m({.data = 4, .tensor = 2}, 8);
    CHECK_THROWS_WITH_AS(static_cast<void>(m.position(8)), "mesh: rank 8 is not one of 8 ranks", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(m.rank_at({0, 0, 4, 0, 0})), "mesh: data 4 of 4", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(m.colors({dimension::data, dimension::data})),
                         "mesh: the dimension data is named twice", usage_error);
    // Nodes {0, 3} and {1, 2}: the second members of the two nodes are in the wrong order.
    const mesh twisted({.pipeline = 2, .tensor = 2}, dealt({0, 1, 1, 0}));
    CHECK(group_of(twisted, 0, {dimension::tensor}) == std::vector{0, 3});
    CHECK_THROWS_WITH_AS(static_cast<void>(twisted.colors({dimension::pipeline})),
                         "mesh: in a group of pipeline, rank 2 would come behind rank 3; start ranks node by node",
                         usage_error);
}

TEST_CASE("groups of threads: a rank there is the coordinate, members are those that differ in nothing else") {
    for (const mesh_sizes sizes : {mesh_sizes{.pipeline = 2, .replicate = 2, .data = 2, .tensor = 2},
                                   mesh_sizes{.data = 3, .sequence = 2, .tensor = 2}, mesh_sizes{.pipeline = 5}}) {
        const int n = sizes.pipeline * sizes.replicate * sizes.data * sizes.sequence * sizes.tensor;
        threads::launch(n, [&](threads& world) {
            const mesh m(sizes, n);
            const auto check_group = [&](std::initializer_list<dimension> along) {
                threads group = split_along(world, m, along);
                std::vector<int> ranks(static_cast<std::size_t>(group.size()));
                const int mine = world.rank();
                group.all_gather(view<const int>(&mine, 1), view<int>(ranks));
                expect(ranks == group_of(m, mine, along), "{}: other members", mesh::names_of(along));
                return group.rank();
            };
            for (const dimension d :
                 {dimension::pipeline, dimension::replicate, dimension::data, dimension::sequence, dimension::tensor}) {
                expect(check_group({d}) == m.coordinate(world.rank(), d), "{}: not the coordinate", name_of(d));
            }
            const auto at = m.position(world.rank());
            expect(check_group({dimension::data, dimension::sequence}) == at[2] * sizes.sequence + at[3], "two");
            static_cast<void>(check_group({}));
        });
    }
    comm::self<> alone;
    CHECK(split_along(alone, mesh({}, 1), dimension::tensor).size() == 1);
    CHECK_THROWS_WITH_AS(static_cast<void>(split_along(alone, mesh({.data = 2}, 2), dimension::data)),
                         "mesh: 2 ranks on a communicator of 1, 'self'", usage_error);
}

TEST_CASE("ranks that have other meshes, or ask for other groups, are told instead of hanging") {
    CHECK_THROWS_AS(threads::launch(4,
                                    [](threads& world) {
                                        const bool odd = world.rank() == 3;
                                        const mesh m(odd ? mesh_sizes{.data = 4} : mesh_sizes{.data = 2, .tensor = 2},
                                                     4);
                                        static_cast<void>(split_along(world, m, dimension::data));
                                    }),
                    mismatch_error);
    CHECK_THROWS_AS(threads::launch(4,
                                    [](threads& world) {
                                        const mesh m({.data = 2, .tensor = 2}, 4);
                                        const auto d = world.rank() == 0 ? dimension::tensor : dimension::data;
                                        static_cast<void>(split_along(world, m, d));
                                    }),
                    mismatch_error);
    // The same groups under another name.
    CHECK_THROWS_AS(threads::launch(4,
                                    [](threads& world) {
                                        const bool odd = world.rank() == 3;
                                        const mesh m(odd ? mesh_sizes{.data = 4} : mesh_sizes{.tensor = 4}, 4);
                                        const auto d = odd ? dimension::data : dimension::tensor;
                                        static_cast<void>(split_along(world, m, d));
                                    }),
                    mismatch_error);
}
