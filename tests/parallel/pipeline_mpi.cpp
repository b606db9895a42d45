// Pipelines and layers over the ranks that mpirun started: the bits of the sequential run, and a gradient on each rank.
#include <doctest/doctest.h>  // checks

#include <chrono>  // deadline
#include <vector>  // schedules

#include <parallel/toy_stages.hpp>                   // stages
#include <tutti/comm/mpi.hpp>                        // ranks
#include <tutti/parallel/linear.hpp>                 // under test
#include <tutti/parallel/mesh.hpp>                   // groups
#include <tutti/parallel/pipeline.hpp>               // under test
#include <tutti/parallel/schedules/dual_pipe.hpp>    // schedules
#include <tutti/parallel/schedules/one_way.hpp>      // schedules
#include <tutti/parallel/schedules/zero_bubble.hpp>  // schedules

using namespace tutti;
using namespace tutti::test;
using namespace tutti::parallel;

TEST_CASE("pipelines over MPI ranks") {
    comm::mpi world(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(60)});
    const int p = world.size();
    for (const pipeline_schedule& s : {gpipe(p, 2 * p), one_forward_one_backward(p, 2 * p), interleaved(p, 2 * p, 2),
                                       zero_bubble(p, 2 * p), zero_bubble_v(p, 2 * p), dual_pipe(p, 2 * p)}) {
        toy_stages reference(s);
        reference.run_sequentially();
        for (const bool overlap : {false, true}) {
            CAPTURE(s.name);
            CAPTURE(overlap);
            pipeline_options o;
            o.elements = toy_sizes(s.stages());
            o.overlap = overlap;
            o.recompute = overlap;
            pipeline<comm::mpi, double> pipe(world.duplicate("pipe"), s, o);
            toy_stages mine(s);
            CHECK(pipe.run(mine).forwards == 2u * static_cast<unsigned>(p) *
                                                 static_cast<unsigned>(s.chunks_on(world.rank())) /
                                                 static_cast<unsigned>(s.routes.size()));
            mine.expect_same(reference, world.rank());
        }
    }
}

TEST_CASE("layers over MPI ranks, on a mesh") {
    comm::mpi world(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(60)});
    const mesh m({.pipeline = world.size() / 2, .tensor = 2}, world.size());
    for (const bool sequence : {false, true}) {
        tensor_options o;
        o.sequence_parallel = sequence;
        o.overlap = true;
        tensor_group<comm::mpi> group(split_along(world, m, dimension::tensor), o);
        REQUIRE(group.rank() == m.coordinate(world.rank(), dimension::tensor));
        // y = x W^T of whole numbers, so that sums are exact in any order.
        constexpr std::size_t rows = 3;
        column_linear<comm::mpi, double> layer(group, 4, 6);
        const auto number = [](std::size_t i) { return static_cast<double>(i * i % 7) - 3; };
        const part own = group.row_share(rows);
        const std::size_t first = sequence ? own.first : 0;
        std::vector<double> x(group.outer_rows(rows) * 4), w(layer.weights()), y(rows * layer.outputs());
        std::vector<double> dx(x.size()), dw(w.size());
        const std::size_t first_output = static_cast<std::size_t>(group.rank()) * 3;
        for (std::size_t i = 0; i < x.size(); ++i) { x[i] = number(first * 4 + i); }
        for (std::size_t i = 0; i < w.size(); ++i) { w[i] = number(50 + first_output * 4 + i); }
        layer.forward(rows, x, w, {}, y);
        layer.backward(rows, x, w, y, dx, dw, {});  // the gradient of half the sum of squares
        const auto output = [&](std::size_t i, std::size_t k) {
            double total = 0;
            for (std::size_t j = 0; j < 4; ++j) { total += number(i * 4 + j) * number(50 + k * 4 + j); }
            return total;
        };
        for (std::size_t i = 0; i < rows; ++i) {
            for (std::size_t k = 0; k < 3; ++k) { CHECK(y[i * 3 + k] == output(i, first_output + k)); }
        }
        for (std::size_t i = 0; i < group.outer_rows(rows); ++i) {
            for (std::size_t j = 0; j < 4; ++j) {
                double total = 0;
                for (std::size_t k = 0; k < 6; ++k) { total += output(first + i, k) * number(50 + k * 4 + j); }
                CHECK(dx[i * 4 + j] == total);
            }
        }
        for (std::size_t k = 0; k < 3; ++k) {
            for (std::size_t j = 0; j < 4; ++j) {
                double total = 0;
                for (std::size_t i = 0; i < rows; ++i) { total += output(i, first_output + k) * number(i * 4 + j); }
                CHECK(dw[k * 4 + j] == total);
            }
        }
    }
}
