// Public bug reports on order: communicators used in different orders, gradients that become ready in different orders.
#include <algorithm>  // shuffle
#include <numeric>    // iota
#include <random>     // orders
#include <thread>     // delays
#include <vector>     // data

#include <tutti/comm/threads.hpp>            // ranks
#include <tutti/optimize/sgd.hpp>            // optimizer
#include <tutti/schedule/lane.hpp>           // lanes
#include <tutti/strategy/data_parallel.hpp>  // buckets

#include <doctest/doctest.h>   // checks
#include <support/oracle.hpp>  // random elements, comparison by bytes

using namespace tutti;
using comm::threads;

TEST_CASE("NVIDIA/nccl#195, NVIDIA/nccl#522, NVIDIA/nccl#592, ROCm/rccl#2191, meta-pytorch/torchrec#4149: two "
          "communicators, used in another order on each rank") {
    threads::launch(3, [](threads& world) {
        schedule::lane a(world.duplicate("a"));
        schedule::lane b(world.duplicate("b"));
        const auto add = [](view<double> v) { return [v](threads& c) { c.all_reduce(v, v, sum{}); }; };
        for (int step = 0; step < 30; ++step) {
            std::vector<double> x(2000, 1.0), y(2000, 2.0);
            schedule::ticket<host_queue> on_a, on_b;
            if ((world.rank() + step) % 2 == 0) {
                on_a = a.submit("x", add(view<double>(x)));
                on_b = b.submit("y", add(view<double>(y)));
                on_a.wait(world.queue());
                on_b.wait(world.queue());
            } else {
                on_b = b.submit("y", add(view<double>(y)));
                on_a = a.submit("x", add(view<double>(x)));
                on_b.wait(world.queue());
                on_a.wait(world.queue());
            }
            if (x[1999] != 3.0 || y[1999] != 6.0) { throw std::runtime_error("sums are wrong"); }
        }
    });
}

namespace {

// Parameters after three steps, gradients being ready in the order that `seed` gives each rank; 0: backward's own
// order.
std::vector<float> trained(int ranks, std::uint32_t seed) {
    std::vector<float> result;
    threads::launch(ranks, [&](threads& world) {
        const std::vector<std::size_t> sizes{30, 1, 200, 64, 7, 90, 500, 3};
        std::vector<std::vector<float>> values;
        strategy::parameters<float> list;
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            values.emplace_back(sizes[i]);
            for (std::size_t e = 0; e < sizes[i]; ++e) { values[i][e] = test::random_element<float>(i, e); }
        }
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            list.push_back({fmt::format("p{}", i), {sizes[i]}, true, view<float>(values[i]), {}});
        }
        strategy::data_parallel<threads, optimize::sgd> s(world.duplicate("dp"), {}, {.bucket_bytes = 512});
        s.attach(list);
        std::mt19937 random(seed * 100 + static_cast<std::uint32_t>(world.rank()));
        for (std::uint64_t step = 0; step < 3; ++step) {
            s.begin({0, 1});
            std::vector<std::size_t> order(sizes.size());
            std::iota(order.rbegin(), order.rend(), std::size_t{0});
            if (seed != 0) { std::shuffle(order.begin(), order.end(), random); }
            for (const std::size_t i : order) {
                const auto g = s.gradient(i);
                const std::uint64_t stream = 1000 * step + 10 * i + static_cast<std::uint64_t>(world.rank());
                for (std::size_t e = 0; e < g.size(); ++e) { g[e] += test::random_element<float>(stream, e); }
                if (seed != 0 && random() % 4 == 0) { std::this_thread::yield(); }
                s.gradient_ready(i);
            }
            static_cast<void>(s.step({.learning_rate = 0.1}));
        }
        s.finish();  // throws when ranks differ
        if (world.rank() == 0) {
            for (const auto& v : values) { result.insert(result.end(), v.begin(), v.end()); }
        }
    });
    return result;
}

}  // namespace

TEST_CASE(
    "pytorch/pytorch#72843, pytorch/pytorch#45933, deepspeedai/DeepSpeed#1186: gradients become ready in another order "
    "on each rank") {
    for (const int ranks : {2, 3}) {
        const auto in_order = trained(ranks, 0);
        REQUIRE(in_order.size() == 895);
        for (std::uint32_t seed = 1; seed <= 10; ++seed) { CHECK(test::same_bytes(trained(ranks, seed), in_order)); }
    }
}
