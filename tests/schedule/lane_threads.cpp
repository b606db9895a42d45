// Lanes over communicators of several ranks: independent orders, errors that reach everybody, memory that stays alive.
#include <doctest/doctest.h>  // checks

#include <atomic>  // counts
#include <chrono>  // delays
#include <memory>  // buffers that can be freed
#include <random>  // random points of failure
#include <vector>  // buffers

#include <tutti/comm/threads.hpp>      // ranks
#include <tutti/core/elementwise.hpp>  // fill
#include <tutti/schedule/lane.hpp>     // lane

#include <support/failure.hpp>           // expect
#include <support/growing_timeouts.hpp>  // a machine that is busy

using namespace tutti;
using namespace std::chrono_literals;
using comm::threads;
using schedule::lane;
using ticket = schedule::ticket<host_queue>;

// NVIDIA/nccl#195, NVIDIA/nccl#522, ROCm/rccl#2191, meta-pytorch/torchrec#4149
TEST_CASE("communicators used in a different order on different ranks complete") {
    for (const int n : {2, 3, 5}) {
        threads::launch(n, [n](threads& world) {
            lane a(world.duplicate("a"));
            lane b(world.duplicate("b"));
            std::vector<double> in_main(300), in_a(300), in_b(300);
            host_queue q;
            const auto add = [](std::vector<double>& v) {
                return [v = view<double>(v)](threads& c) { c.all_reduce(v, v, sum{}); };
            };
            for (int step = 0; step < 40; ++step) {
                for (auto* v : {&in_main, &in_a, &in_b}) { fill(q, view<double>(*v), 1.0 + world.rank()); }
                ticket ta, tb;
                const auto on_a = [&] { ta = a.submit("a", add(in_a), q); };
                const auto on_b = [&] { tb = b.submit("b", add(in_b), q); };
                const auto on_main = [&] { world.all_reduce(view<double>(in_main), view<double>(in_main), sum{}); };
                switch ((world.rank() + step) % 4) {
                case 0: on_a(), on_main(), on_b(); break;
                case 1: on_main(), on_b(), on_a(); break;
                case 2: on_b(), on_main(), on_a(); break;
                default: on_b(), on_a(), on_main(); break;
                }
                ta.wait(q);
                tb.wait(q);
                const double expected = n * (n + 1) / 2;
                REQUIRE(in_main[299] == expected);
                REQUIRE(in_a[299] == expected);
                REQUIRE(in_b[299] == expected);
            }
        });
    }
}

// dmlc/xgboost#11217, NVIDIA/nccl#279
TEST_CASE("an error in one rank's lane work ends all ranks with the first cause") {
    std::atomic<int> ended{0};
    const auto start = clock_type::now();
    CHECK_THROWS_WITH_AS(threads::launch(4,
                                         [&](threads& world) {
                                             lane l(world.duplicate("lane"));
                                             std::vector<float> x(1000, 1.0f);
                                             auto t = l.submit("reduce", [v = view<float>(x)](threads& c) {
                                                 if (c.rank() == 2) {
                                                     throw std::runtime_error("rank 2 has no memory");
                                                 }
                                                 c.all_reduce(v, v, sum{});
                                             });
                                             try {
                                                 t.wait(host_queue{});
                                             } catch (...) {
                                                 ++ended;
                                                 throw;
                                             }
                                         }),
                         "rank 2 has no memory", std::runtime_error);
    CHECK(ended == 4);
    CHECK(clock_type::now() - start < 30s);
}

TEST_CASE("a rank that fails with lane work in flight ends the others, and frees nothing too early") {
    // The failing rank unwinds: its ticket is dropped, the family aborted, the lanes of all ranks end, then buffers go.
    std::mt19937 random(7);
    int failures = 0;
    for (int repeat = 0; repeat < 60; ++repeat) {
        const int n = 2 + repeat % 3;
        const int failing = static_cast<int>(random() % static_cast<unsigned>(n));
        const auto delay = std::chrono::microseconds(random() % 400);
        const int at = static_cast<int>(random() % 4);
        try {
            threads::launch(n, [&](threads& world) {
                auto memory = std::make_unique<std::vector<float>>(20000, 1.0f);
                const view<float> v(*memory);
                auto other = std::make_unique<std::vector<float>>(3000, 1.0f);
                const view<float> w(*other);
                lane l(world.duplicate("lane"));
                std::vector<ticket> tickets;
                for (int i = 0; i < 4; ++i) {
                    tickets.push_back(l.submit("reduce", [v](threads& c) { c.all_reduce(v, v, sum{}); }));
                    if (world.rank() == failing && i == at) {
                        std::this_thread::sleep_for(delay);
                        throw std::runtime_error("trainer failed");
                    }
                    world.all_reduce(w, w, sum{});
                }
                for (auto& t : tickets) { t.wait(host_queue{}); }
            });
        } catch (const std::exception&) { ++failures; }
    }
    CHECK(failures == 60);
}

TEST_CASE("ranks that do not arrive are named by the communicator before the lane's own deadline") {
    test::with_growing_timeouts([](duration timeout) {
        std::atomic<bool> ended{false};
        const auto run = [&](threads& world) {
            struct ending {
                std::atomic<bool>* flag;
                ~ending() {
                    if (flag != nullptr) { *flag = true; }
                }
            } const end{world.rank() == 0 ? &ended : nullptr};
            lane l(world.duplicate("lane"), {.timeout = 60s});
            if (world.rank() == 1) {
                while (!ended) { std::this_thread::sleep_for(1ms); }
                return;
            }
            std::vector<float> x(10);
            auto t = l.submit("reduce", [v = view<float>(x)](threads& c) { c.all_reduce(v, v, sum{}); });
            t.wait(host_queue{});
        };
        try {
            threads::launch(2, run, {.timeout = timeout});
        } catch (const timeout_error& e) {
            const std::string text = e.what();
            test::expect(e.missing() == std::vector<int>{1} && text.find("rank 1") != std::string::npos &&
                             text.find("world/lane") != std::string::npos,
                         "{}", text);
            return;
        }
        test::expect(false, "nobody was missed");
    });
}

TEST_CASE("many lanes on few processors") {
    threads::launch(4, [](threads& world) {
        std::vector<lane<threads>> lanes;
        for (int i = 0; i < 3; ++i) { lanes.emplace_back(world.duplicate("lane")); }
        std::vector<std::vector<std::int64_t>> x(3, std::vector<std::int64_t>(50));
        host_queue q;
        for (std::int64_t step = 0; step < 30; ++step) {
            std::vector<ticket> tickets;
            for (std::size_t i = 0; i < 3; ++i) {
                x[i].assign(50, step + world.rank());
                tickets.push_back(lanes[i].submit(
                    "reduce", [v = view<std::int64_t>(x[i])](threads& c) { c.all_reduce(v, v, sum{}); }, q));
            }
            for (std::size_t i = 3; i-- > 0;) {
                tickets[i].wait(q);
                REQUIRE(x[i] == std::vector<std::int64_t>(50, 4 * step + 6));
            }
        }
    });
}
