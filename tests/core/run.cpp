// The door: an operation runs on a host queue, is charged on a virtual one, and is launched on a queue of devices;
// fetch brings a scalar back from each.
#include <tutti/core/run.hpp>  // under test

#include <string_view>  // names
#include <vector>       // values

#include <tutti/core/virtual_queue.hpp>  // charging

#include <doctest/doctest.h>  // checks

// A queue that runs nothing itself, with its launch and fetch found by argument-dependent lookup, as a device has it.
namespace elsewhere {

struct deferred_queue : tutti::host_queue {
    static constexpr bool executes_inline = false;
    std::vector<std::string_view>* launched;
    explicit deferred_queue(std::vector<std::string_view>& log) : launched(&log) {}
    [[nodiscard]] deferred_queue sibling() const { return *this; }
};
template <tutti::operation O> void launch(const deferred_queue& q, const O&) { q.launched->push_back(O::name); }
template <class T> T fetch_from_device(const deferred_queue&, tutti::view<T> v) { return v[0] + 1000; }

}  // namespace elsewhere

namespace {

using namespace tutti;

struct count_calls {
    [[maybe_unused]] static constexpr std::string_view name = "count_calls";
    int* calls;
    [[nodiscard]] tutti::cost cost() const noexcept { return {.bytes = 6, .flops = 8}; }
    void operator()() const { ++*calls; }
};
struct nameless {
    [[nodiscard]] tutti::cost cost() const noexcept { return {}; }
    void operator()() const {}
};
struct free_of_cost {
    [[maybe_unused]] static constexpr std::string_view name = "free";
    void operator()() const {}
};

TEST_CASE("an operation says what it is called and what it costs") {
    static_assert(operation<count_calls> && !operation<nameless> && !operation<free_of_cost> && !operation<int>);
    static_assert(charging_queue<virtual_queue> && !charging_queue<host_queue>);
    static_assert(!charging_queue<elsewhere::deferred_queue>);
    CHECK(cost{}.bytes == 0);
    CHECK(cost{}.flops == 0);
}

TEST_CASE("each queue runs in its own way") {
    int calls = 0;
    run(host_queue{}, count_calls{&calls});
    CHECK(calls == 1);

    const virtual_queue v({2, 2});
    run(v, count_calls{&calls});
    CHECK(calls == 1);
    CHECK(resolve(v.recording()) == std::vector<double>{4});
    CHECK(v.recording().name_of(v.recording().streams[0][0]) == "count_calls");

    std::vector<std::string_view> log;
    run(elsewhere::deferred_queue(log), count_calls{&calls});
    CHECK(calls == 1);
    CHECK(log == std::vector<std::string_view>{"count_calls"});
}

TEST_CASE("fetch reads the first element, predicts it, or asks the device") {
    std::vector<int> values{5, 6};
    CHECK(fetch(host_queue{}, view<int>(values), -1) == 5);
    CHECK(fetch(host_queue{}, view<const int>(values), -1) == 5);

    const virtual_queue v;
    CHECK(fetch(v, view<int, phantom_memory>(nullptr, 2), -1) == -1);
    CHECK(resolve(v.recording()) == std::vector<double>{0});

    std::vector<std::string_view> log;
    CHECK(fetch(elsewhere::deferred_queue(log), view<int>(values), -1) == 1005);
}

TEST_CASE("fetch refuses an empty view on every queue") {
    CHECK_THROWS_WITH_AS(static_cast<void>(fetch(host_queue{}, view<int>(), 0)), "fetch: the view is empty",
                         usage_error);
    CHECK_THROWS_AS(static_cast<void>(fetch(virtual_queue{}, view<int, phantom_memory>(), 0)), usage_error);
    std::vector<std::string_view> log;
    CHECK_THROWS_AS(static_cast<void>(fetch(elsewhere::deferred_queue(log), view<int>(), 0)), usage_error);
}

}  // namespace
