// virtual_queue: exact virtual times of streams with events, and waits that can never end.
#include <tutti/core/virtual_queue.hpp>  // under test

#include <chrono>  // times of marks
#include <limits>  // bad rates
#include <string>  // names
#include <vector>  // times

#include <doctest/doctest.h>  // checks

namespace {

using namespace tutti;

// One byte a second and one flop a second: costs are seconds, and sums of small integers are exact.
virtual_queue seconds_queue() { return virtual_queue({1, 1}); }

TEST_CASE("work lasts as long as the slower of its bytes and its flops") {
    virtual_queue q({4, 2});
    q.charge("bytes", {.bytes = 40, .flops = 2});
    CHECK(resolve(q.recording()) == std::vector<double>{10});
    q.charge("flops", {.bytes = 4, .flops = 6});
    CHECK(resolve(q.recording()) == std::vector<double>{13});
    q.charge("nothing", {});
    CHECK(resolve(q.recording()) == std::vector<double>{13});
    const auto& steps = q.recording().streams.at(0);
    REQUIRE(steps.size() == 3);
    CHECK(q.recording().name_of(steps[1]) == "flops");
    CHECK(steps[1].what == virtual_step::kind::work);
    CHECK(steps[1].seconds == 3);
}

TEST_CASE("names need not outlive the call, and equal ones are one") {
    virtual_queue q = seconds_queue();
    for (const int layer : {0, 1, 0}) {
        std::string name = "the backward pass of layer " + std::to_string(layer);
        q.charge(name, {.bytes = 1});
        name.assign(name.size(), '-');
    }
    const auto& steps = q.recording().streams.at(0);
    CHECK(q.recording().name_of(steps[0]) == "the backward pass of layer 0");
    CHECK(q.recording().name_of(steps[1]) == "the backward pass of layer 1");
    CHECK(steps[2].name == steps[0].name);
}

TEST_CASE("a cost that is none is refused") {
    virtual_queue q = seconds_queue();
    for (const double bad : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
        CHECK_THROWS_AS(q.charge("x", {.bytes = bad}), usage_error);
        CHECK_THROWS_AS(q.charge("x", {.flops = bad}), usage_error);
    }
}

TEST_CASE("streams run side by side and meet at events") {
    virtual_queue a = seconds_queue();
    virtual_queue b = a.sibling();
    virtual_queue c = b.sibling();
    a.charge("a1", {.bytes = 5});
    const auto after_a1 = a.record();
    a.charge("a2", {.bytes = 7});  // a ends at 12
    b.charge("b1", {.bytes = 2});
    b.wait(after_a1);              // 2 -> 5
    b.charge("b2", {.bytes = 4});  // 9
    const auto after_b2 = b.record();
    c.wait(after_a1);
    c.wait(after_b2);  // 9
    c.charge("c1", {.bytes = 1});
    c.wait(after_a1);  // long past: no time goes back
    CHECK(resolve(a.recording()) == std::vector<double>{12, 9, 10});
}

TEST_CASE("a wait may be written before the record it waits for") {
    // Stream 0 waits for stream 1, which is resolved after it.
    virtual_queue a = seconds_queue();
    virtual_queue b = a.sibling();
    b.charge("b1", {.bytes = 3});
    const auto e = b.record();
    a.wait(e);
    a.charge("a1", {.bytes = 1});
    const auto f = a.record();
    b.wait(f);
    b.charge("b2", {.bytes = 1});
    CHECK(resolve(a.recording()) == std::vector<double>{4, 5});
}

TEST_CASE("an event without work in front happens at once") {
    virtual_queue a = seconds_queue();
    virtual_queue b = a.sibling();
    const auto start = a.record();
    a.charge("a1", {.bytes = 9});
    b.wait(start);
    CHECK(resolve(a.recording()) == std::vector<double>{9, 0});
    CHECK(start.ready());
    start.wait_host(deadline{});
}

TEST_CASE("copies to and from the host take the link's time, each way on its own stream") {
    virtual_queue up({.bytes_per_second = 1, .flops_per_second = 1, .host_bytes_per_second = 8});
    virtual_queue down = up.sibling();
    const view<const double, phantom_memory> host(nullptr, 10);
    const view<double, phantom_memory> device(nullptr, 10);
    upload(up, host, device);
    download(down, view<const double, phantom_memory>(device), view<double, phantom_memory>(nullptr, 10));
    upload(up, host, device);
    CHECK(resolve(up.recording()) == std::vector<double>{20, 10});
    CHECK(up.recording().name_of(up.recording().streams[0][0]) == "upload");
    CHECK_THROWS_WITH_AS(upload(up, host, device.sub(0, 9)), "upload: sizes differ (in 10, out 9)", usage_error);
    CHECK_THROWS_WITH_AS(download(up, host, device.sub(0, 9)), "download: sizes differ (in 10, out 9)", usage_error);
}

TEST_CASE("what follows a value that has come back runs behind it, on every stream") {
    virtual_queue a = seconds_queue();
    virtual_queue b = a.sibling();
    virtual_queue c = a.sibling();
    b.charge("before", {.bytes = 2});
    a.charge("loss", {.bytes = 10});
    CHECK(fetch(a, view<double, phantom_memory>(nullptr, 1), 0.5) == 0.5);
    b.charge("update", {.bytes = 3});  // 10 -> 13
    CHECK(fetch(b, view<int, phantom_memory>(nullptr, 1), 7) == 7);
    a.charge("next", {.bytes = 1});  // 13 -> 14
    b.charge("more", {.bytes = 4});  // 17
    virtual_queue d = c.sibling();   // made behind it
    d.charge("late", {.bytes = 1});  // 14
    CHECK(resolve(a.recording()) == std::vector<double>{14, 17, 0, 14});
}

TEST_CASE("a rank alone cannot tell how long it waits for others") {
    virtual_queue a = seconds_queue();
    a.charge_collective("all_reduce", 3, 17);
    const virtual_step& s = a.recording().streams[0][0];
    CHECK(s.what == virtual_step::kind::collective);
    CHECK(a.recording().name_of(s) == "all_reduce");
    CHECK(s.id == 3);
    CHECK(s.call == 17);
    CHECK_THROWS_WITH_AS(resolve(a.recording()), "virtual_queue: stream 0 waits for other ranks in all_reduce",
                         usage_error);
}

TEST_CASE("marks are reached once the recording is resolved, to the nanosecond") {
    virtual_queue a = seconds_queue();
    a.charge("a1", {.bytes = 1.5});
    const auto first = a.mark();
    a.charge("a2", {.bytes = 0.25});
    const auto second = a.mark();
    REQUIRE(first.has_value());
    CHECK(!first->ready());
    resolve(a.recording());
    REQUIRE(second->ready());
    CHECK(first->when() - deadline{} == std::chrono::milliseconds(1500));
    CHECK(second->since(*first) == std::chrono::milliseconds(250));
    const auto third = a.mark();  // recorded since
    CHECK(!third->ready());
    a.recording().abandoned = true;
    CHECK(third->ready());
    CHECK_THROWS_WITH_AS(static_cast<void>(third->when()), "virtual_queue: a mark that is never reached", usage_error);
}

TEST_CASE("a wait that nothing ends is an error that names stream and event") {
    virtual_queue a = seconds_queue();
    virtual_queue b = a.sibling();
    // Each waits for what the other records afterwards.
    b.wait({0});
    const auto e = a.record();
    CHECK(e.id == 0);
    a.wait({1});
    const auto f = b.record();
    CHECK(f.id == 1);
    CHECK_NOTHROW(static_cast<void>(resolve(a.recording())));  // b waits for e, which is there; a then for f

    virtual_queue c = seconds_queue();
    virtual_queue d = c.sibling();
    c.wait({1});
    static_cast<void>(c.record());  // event 0, behind the wait for 1
    d.wait({0});
    static_cast<void>(d.record());  // event 1, behind the wait for 0
    CHECK_THROWS_WITH_AS(static_cast<void>(resolve(c.recording())),
                         "virtual_queue: stream 0 waits for event 1, which is never reached", usage_error);

    virtual_queue own = seconds_queue();
    own.wait({0});
    static_cast<void>(own.record());
    CHECK_THROWS_AS(static_cast<void>(resolve(own.recording())), usage_error);

    virtual_queue never = seconds_queue();
    never.wait({7});  // an event of another rank: this one has none
    CHECK_THROWS_WITH_AS(static_cast<void>(resolve(never.recording())),
                         "virtual_queue: stream 0 waits for event 7, which is never reached", usage_error);
}

TEST_CASE("rates must be positive numbers") {
    for (const double bad : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
        CHECK_THROWS_AS(virtual_queue({bad, 1}), usage_error);
        CHECK_THROWS_AS(virtual_queue({1, bad}), usage_error);
    }
    CHECK_THROWS_WITH_AS(virtual_queue({1, 0}),
                         "virtual_queue: rates must be positive (bytes/s 1, flops/s 0, host 50000000000)", usage_error);
}

TEST_CASE("copies of a handle are one stream, siblings another, all on one account") {
    virtual_queue a = seconds_queue();
    virtual_queue copy = a;
    virtual_queue b = a.sibling();
    a.charge("x", {.bytes = 1});
    copy.charge("y", {.bytes = 1});
    b.charge("z", {.bytes = 1});
    CHECK(resolve(a.recording()) == std::vector<double>{2, 1});
    CHECK(b.allocate(10) == nullptr);
    CHECK(a.account().live() == 10);
    copy.release(nullptr, 10);
    CHECK(a.account().live() == 0);
    CHECK(a.account().peak() == 10);
}

}  // namespace
