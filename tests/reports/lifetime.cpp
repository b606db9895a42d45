// Public bug reports on lifetimes: buffers that end before the operation does, and the states of requests.
#include <chrono>     // delays
#include <memory>     // buffers that can be freed
#include <stdexcept>  // errors
#include <thread>     // delays
#include <vector>     // requests

#include <tutti/comm/self.hpp>      // one rank
#include <tutti/comm/threads.hpp>   // ranks
#include <tutti/schedule/lane.hpp>  // tickets

#include <doctest/doctest.h>  // checks

using namespace tutti;
using namespace std::chrono_literals;
using comm::threads;
using ticket = schedule::ticket<host_queue>;

// AddressSanitizer judges the memory. A temporary as a buffer does not compile: tests/compile_fail/view.cpp.
TEST_CASE(
    "pytorch/pytorch#18465, pytorch/pytorch#148590, dealii/dealii#13206: a buffer is freed while the operation runs") {
    threads::launch(3, [](threads& world) {
        schedule::lane lane(world.duplicate("lane"));
        for (int round = 0; round < 20; ++round) {
            auto data = std::make_unique<std::vector<float>>(30000, 1.0f);
            bool complete = false;
            {
                const view<float> v = *data;
                const ticket dropped =
                    lane.submit("all_reduce", [v, &complete, late = world.rank() == round % 3](threads& c) {
                        if (late) { std::this_thread::sleep_for(1ms); }
                        c.all_reduce(v, v, sum{});
                        complete = true;
                    });
            }  // nobody waited: the ticket does
            if (!complete || (*data)[29999] != 3.0f) {
                throw std::runtime_error("a dropped ticket let go of its work");
            }
            data.reset();
        }
    });
}
TEST_CASE("pytorch/pytorch#188655: an exception frees the buffer of an operation that can never complete") {
    for (int round = 0; round < 10; ++round) {
        CHECK_THROWS_WITH_AS(threads::launch(2,
                                             [](threads& world) {
                                                 schedule::lane lane(world.duplicate("lane"));
                                                 world.barrier();
                                                 if (world.rank() == 1) {  // takes no part until it is told to end
                                                     for (;;) { world.barrier(); }
                                                 }
                                                 std::vector<float> data(30000, 1.0f);
                                                 const ticket t =
                                                     lane.submit("all_reduce", [v = view<float>(data)](threads& c) {
                                                         c.all_reduce(v, v, sum{});
                                                     });
                                                 throw std::domain_error("loss is not finite");
                                             },
                                             {.name = "dp", .timeout = 100s}),
                             "loss is not finite", std::domain_error);
    }
}

TEST_CASE("kokkos/kokkos-comm#266, boostorg/mpi#84: requests, complete or not, moved, mixed, waited for in any order") {
    schedule::lane lane{comm::self<>()};
    const host_queue q;
    const auto quick = [](comm::self<>&) {};
    const auto slow = [](comm::self<>&) { std::this_thread::sleep_for(2ms); };

    const std::vector<ticket> none;
    for (const ticket& t : none) { t.wait(q); }

    const ticket nothing;  // a claim on nothing is complete
    nothing.wait(q);
    nothing.wait(q);

    ticket complete = lane.submit("quick", quick);
    lane.drain();
    complete.wait(q);
    complete.wait(q);  // waiting is repeatable

    ticket moved = std::move(complete);
    complete.wait(q);
    moved.wait(q);

    // 0, 1 and n requests, some complete, some moved from, some empty; every order of waiting, and none.
    for (const std::size_t n : {std::size_t{1}, std::size_t{2}, std::size_t{7}}) {
        for (const int order : {0, 1, 2, 3}) {
            int done = 0;
            std::vector<ticket> mix;
            for (std::size_t i = 0; i < n; ++i) {
                mix.push_back(lane.submit("work", [&done, i](comm::self<>&) {
                    if (i % 2 == 0) { std::this_thread::sleep_for(1ms); }
                    ++done;
                }));
                mix.emplace_back();
            }
            mix.push_back(std::move(mix[0]));
            if (order == 0) {
                for (const ticket& t : mix) { t.wait(q); }
            }
            if (order == 1) {
                for (std::size_t i = mix.size(); i-- > 0;) { mix[i].wait(q); }
            }
            if (order == 2) { mix[n / 2].wait(q); }  // any one, then all are dropped
            mix.clear();
            CHECK(done == static_cast<int>(n));
        }
    }
    ticket failed = lane.submit("failing", [](comm::self<>&) { throw std::runtime_error("device lost"); });
    ticket behind = lane.submit("slow", slow);
    CHECK_THROWS_WITH(behind.wait(q), "device lost");  // the lane has failed: what comes behind carries the first error
    CHECK_THROWS_WITH(failed.wait(q), "device lost");
    CHECK_THROWS_WITH(failed.wait(q), "device lost");
    const ticket taken = std::move(failed);
    failed.wait(q);
    CHECK_THROWS_WITH(taken.wait(q), "device lost");
}
