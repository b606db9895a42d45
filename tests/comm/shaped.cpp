// shaped: modelled time in virtual time exactly, in real time as a lower bound; links shared by lanes; texts.
#include <doctest/doctest.h>

#include <algorithm>   // max
#include <chrono>      // time
#include <functional>  // what happens while a rank sleeps
#include <memory>      // clocks shared by children
#include <string>      // texts
#include <utility>     // move
#include <vector>      // data

#include <tutti/comm/counted.hpp>  // nesting
#include <tutti/comm/self.hpp>     // one rank
#include <tutti/comm/shaped.hpp>   // tested
#include <tutti/comm/threads.hpp>  // many ranks

using namespace tutti;
using namespace std::chrono_literals;
using comm::shaped;
using comm::shaped_network;
using comm::threads;
using comm::topology;

namespace {

/// Time passes only while somebody sleeps. Copies are one clock.
class virtual_clock {
    struct state {
        duration now{};
        int sleeps = 0;
        std::function<void()> while_asleep;
    };
    std::shared_ptr<state> state_ = std::make_shared<state>();

public:
    [[nodiscard]] deadline now() const { return deadline(state_->now); }
    void sleep_until(deadline until) const {
        state_->now = std::max(state_->now, until.time_since_epoch());
        ++state_->sleeps;
        if (state_->while_asleep) { state_->while_asleep(); }
    }
    [[nodiscard]] duration elapsed() const { return state_->now; }
    [[nodiscard]] int sleeps() const { return state_->sleeps; }
    void set(duration to) const { state_->now = to; }
    void while_asleep(std::function<void()> f) const { state_->while_asleep = std::move(f); }
};
static_assert(comm::sleeping_clock<virtual_clock>);
static_assert(comm::decoratable<shaped<comm::self<>>>);

/// A communicator that claims to have many ranks: every call is done at once, after `takes`.
class pretend : public comm::front<pretend, host_queue> {
    int ranks_;
    std::shared_ptr<bool> aborted_ = std::make_shared<bool>(false);

public:
    std::function<void()> meanwhile;
    explicit pretend(int ranks) : ranks_(ranks) {}
    [[nodiscard]] int rank() const noexcept { return 0; }
    [[nodiscard]] int size() const noexcept { return ranks_; }
    [[nodiscard]] std::string_view name() const noexcept { return "net"; }
    [[nodiscard]] host_queue queue() const noexcept { return {}; }
    [[nodiscard]] pretend duplicate(std::string_view) { return *this; }
    [[nodiscard]] std::optional<pretend> split(std::span<const int> colors, std::string_view) {
        pretend child = *this;
        child.ranks_ = static_cast<int>(std::count(colors.begin(), colors.end(), colors[0]));
        return child;
    }
    void synchronize() {
        if (*aborted_) { throw aborted_error("aborted"); }
    }
    void abort(std::string_view) noexcept { *aborted_ = true; }
    void execute(const comm::call&) {
        if (meanwhile) { meanwhile(); }
    }
    [[nodiscard]] std::vector<comm::control_record> gather_control(comm::control_record) { return {}; }
};
using modelled = shaped<pretend, virtual_clock>;

/// 1000 bytes take 1 ms on a link of 1 MB/s.
constexpr comm::link megabyte{100e-6, 1e6};

modelled make(int ranks, shaped_network network, virtual_clock clock, duration timeout = 1h) {
    return modelled(pretend(ranks), std::move(network), timeout, std::move(clock));
}
comm::link parsed(std::string_view text) { return shaped_network::parse(text).among(2).between(); }

}  // namespace

TEST_CASE("a call takes exactly its modelled time") {
    virtual_clock clock;
    auto c = make(4, shaped_network(megabyte), clock);
    std::vector<std::byte> data(4000);
    const view<std::byte> all(data);
    const view<std::byte> part = all.sub(0, 1000);
    const auto takes = [&](auto f) {
        clock.set(clock.elapsed() + 1h);  // nothing is left of the call before
        const duration start = clock.elapsed();
        f();
        return clock.elapsed() - start;
    };
    // 4 ranks: 2 log2 n = 4 latencies, 1.5 times the bytes.
    std::vector<float> floats(1000);
    CHECK(takes([&] { c.all_reduce(view<float>(floats), view<float>(floats), sum{}); }) == 400us + 6ms);
    CHECK(takes([&] { c.all_gather(part, all); }) == 200us + 3ms);
    CHECK(takes([&] { c.broadcast(all, 0); }) == 200us + 4ms);
    CHECK(takes([&] { c.gather(part, all, 0); }) == 200us + 3ms);
    CHECK(takes([&] { c.barrier(); }) == 200us);
    std::vector<std::byte> received(3000);
    const comm::transfer<host_memory> m[] = {comm::send_to(1, part), comm::receive_from(2, view<std::byte>(received))};
    CHECK(takes([&] { c.exchange(m); }) == 100us + 3ms);
    CHECK(takes([&] { c.broadcast(all.sub(0, 0), 0); }) == 200us);
    // Control traffic passes at once.
    CHECK(takes([&] { static_cast<void>(c.gather_control({})); }) == 0s);
    CHECK(takes([&] { static_cast<void>(c.duplicate("x")); }) == 0s);
}

TEST_CASE("the real call runs meanwhile, and a longer one is not prolonged") {
    virtual_clock clock;
    pretend inner(2);
    inner.meanwhile = [&] { clock.set(clock.elapsed() + 300us); };
    modelled c(std::move(inner), shaped_network(megabyte), 1h, clock);
    std::vector<std::byte> data(1000);
    c.broadcast(view<std::byte>(data), 0);
    CHECK(clock.elapsed() == 1100us);
    CHECK(clock.sleeps() == 1);
    c.barrier();  // modelled: 100 us
    CHECK(clock.elapsed() == 1400us);
    CHECK(clock.sleeps() == 1);
}

TEST_CASE("lanes share the rank's link: calls that overlap queue up, latencies do not") {
    virtual_clock clock;
    auto c = make(2, shaped_network(megabyte), clock);
    auto lane = c.duplicate("lane");
    std::vector<std::byte> data(1000);
    const auto broadcast_at = [&](modelled& on, duration start) {
        clock.set(start);
        on.broadcast(view<std::byte>(data), 0);
        return clock.elapsed();
    };
    CHECK(broadcast_at(c, 0ms) == 1100us);
    CHECK(broadcast_at(lane, 0ms) == 2100us);  // behind the first
    CHECK(broadcast_at(c, 1500us) == 3100us);  // behind the second, which leaves the link at 2 ms
    CHECK(broadcast_at(lane, 5ms) == 6100us);  // an idle link saves nothing up
    clock.set(5500us);
    lane.barrier();  // moves nothing: does not queue
    CHECK(clock.elapsed() == 5600us);
    // Another rank, or another network, has a link of its own.
    auto other = make(2, shaped_network(megabyte), clock);
    CHECK(broadcast_at(other, 0ms) == 1100us);
}

TEST_CASE("two levels: splits see their own part, and the two links of a rank do not wait for each other") {
    // 2 nodes of 2 ranks; inside 10 MB/s, between 1 MB/s through one NIC that both ranks share.
    const topology t = topology::uniform(2, 2, {10e-6, 10e6}, megabyte);
    virtual_clock clock;
    auto c = make(4, shaped_network(t), clock);
    CHECK(c.network() == t);
    std::vector<float> data(1000);
    const auto all_reduce_at = [&](modelled& on, duration start) {
        clock.set(start);
        on.all_reduce(view<float>(data), view<float>(data), sum{});
        return clock.elapsed() - start;
    };
    // Inside: 2 x 0.5 x 4000 B at 10 MB/s = 400 us, 20 us latency. Between: 2000 B at half a NIC = 4 ms, 200 us
    // latency.
    CHECK(all_reduce_at(c, 0ms) == 400us + 20us + 4ms + 200us);

    const std::vector<int> by_node{0, 0, 1, 1};
    const std::vector<int> across_nodes{0, 1, 0, 1};
    auto node = c.split(by_node, "node");
    auto across = c.split(across_nodes, "across");
    REQUIRE(node.has_value());
    REQUIRE(across.has_value());
    CHECK(node->network().nodes() == 1);
    CHECK(across->network().nodes() == 2);
    CHECK(all_reduce_at(*node, 1h) == 400us + 20us);
    CHECK(all_reduce_at(*across, 1h) == 4ms + 200us);  // the NIC is this rank's alone, the link inside is not used
    CHECK(all_reduce_at(*node, 1h) == 800us + 20us);   // behind the first on the node
    CHECK(all_reduce_at(*across, 1h) == 8ms + 200us);
}

TEST_CASE("the messages of an exchange use both links at once; each link keeps its own queue") {
    // 2 nodes of 4 ranks, a NIC each: inside 10 MB/s, between 1 MB/s.
    virtual_clock clock;
    auto c = make(8, shaped_network(topology::uniform(2, 4, {10e-6, 10e6}, megabyte, 4)), clock);
    const std::vector<std::byte> near_by(20000);
    const std::vector<std::byte> remote(1000);
    const auto exchange_at = [&](duration start, std::vector<comm::transfer<host_memory>> messages) {
        clock.set(start);
        c.exchange(messages);
        return clock.elapsed() - start;
    };
    const auto inside = comm::send_to(1, view(near_by));  // 2 ms
    const auto between = comm::send_to(4, view(remote));  // 1 ms
    CHECK(exchange_at(0ms, {inside, between}) == 2ms + 100us);
    CHECK(exchange_at(1h, {between}) == 1ms + 100us);
    CHECK(exchange_at(1h, {between, inside}) == 2ms + 100us);  // behind the first between nodes, meanwhile inside
    CHECK(exchange_at(1h, {inside}) == 4ms + 10us);            // behind the second
}

TEST_CASE("the deadline ends a call that the network cannot finish in time") {
    virtual_clock clock;
    auto c = make(2, shaped_network({0, 1e3}), clock, 10s);
    std::vector<std::byte> data(20000);
    c.broadcast(view<std::byte>(data).sub(0, 10000), 0);  // 10 s: just in time
    CHECK(clock.elapsed() == 10s);
    try {
        c.broadcast(view<std::byte>(data), 0);
        FAIL("no timeout");
    } catch (const timeout_error& e) {
        CHECK(e.what() ==
              std::string("broadcast: needs 20 s on this network, the deadline is 10 s, call 2 on 'net', rank 0"));
        CHECK(e.missing().empty());
        CHECK(e.context().count == 20000);
    }
    CHECK(clock.elapsed() == 20s);  // not at once: as a slow network would
    CHECK_THROWS_AS(c.synchronize(), aborted_error);
}

TEST_CASE("a time beyond any clock ends at the deadline too") {
    virtual_clock clock;
    auto c = make(2, shaped_network({0, 1e-300}), clock, 10s);
    std::vector<std::byte> data(1);
    CHECK_THROWS_AS(c.broadcast(view<std::byte>(data), 0), timeout_error);
    CHECK(clock.elapsed() == 10s);
}

TEST_CASE("a sleeping rank notices the abort of its family within milliseconds") {
    virtual_clock clock;
    auto c = make(2, shaped_network({0, 1e3}), clock);
    clock.while_asleep([&] {
        if (clock.elapsed() >= 1s) { c.abort("enough"); }
    });
    std::vector<std::byte> data(10000);
    CHECK_THROWS_AS(c.broadcast(view<std::byte>(data), 0), aborted_error);
    CHECK(clock.elapsed() >= 1s);
    CHECK(clock.elapsed() <= 1s + 2ms);
}

TEST_CASE("real time, real ranks: results are right and no call is early") {
    threads::launch(3,
                    [](threads& t) {
                        comm::counted c(shaped(std::move(t), shaped_network::parse("8Mbit,2ms")));
                        std::vector<int> data(1500, c.rank() + 1);
                        const auto start = clock_type::now();
                        c.all_reduce(view<int>(data), view<int>(data), sum{});  // 6000 B: 8 ms of link, 4 latencies
                        CHECK(clock_type::now() - start >= 16ms);
                        CHECK(data[0] == 6);
                        CHECK(c.traffic_ledger()->total().calls == 1);
                        auto lane = c.duplicate("lane");
                        const auto again = clock_type::now();
                        lane.broadcast(view<int>(data), 0);  // 6 ms, 2 latencies
                        CHECK(clock_type::now() - again >= 10ms);
                    },
                    {.timeout = 20s});
    threads::launch(3,
                    [](threads& t) {
                        const auto start = clock_type::now();
                        shaped c(std::move(t), shaped_network(topology::uniform(3, 1, {}, {5e-3, 1e9})));
                        c.barrier();
                        CHECK(clock_type::now() - start >= 10ms);
                    },
                    {.timeout = 20s});
}

TEST_CASE("one rank has nobody to wait for") {
    virtual_clock clock;
    shaped c(comm::self<>{}, shaped_network({1, 1}), 1h, clock);
    std::vector<float> data(1000);
    c.all_reduce(view<float>(data), view<float>(data), sum{});
    c.barrier();
    CHECK(clock.elapsed() == 0s);
}

TEST_CASE("networks as text") {
    CHECK(parsed("1Gbit,50us") == comm::link{50 * 1e-6, 0.125e9});
    CHECK(parsed("100Mbit,2ms").bytes_per_second == doctest::Approx(12.5e6));
    CHECK(parsed("8Kbit,1s") == comm::link{1, 1000});
    CHECK(parsed("16bit,0s") == comm::link{0, 2});
    CHECK(parsed("7B,0ns") == comm::link{0, 7});
    CHECK(parsed("2KB,0us") == comm::link{0, 2e3});
    CHECK(parsed("2.5MB,0us") == comm::link{0, 2.5e6});
    CHECK(parsed("3GB,250ns") == comm::link{250 * 1e-9, 3e9});
    CHECK(parsed("1Gbit") == comm::link{0, 0.125e9});
    CHECK(parsed("1e2Gbit,.5ms") == comm::link{0.5 * 1e-3, 100 * 0.125e9});
}

TEST_CASE("bad text is rejected with the bad part and an example") {
    const std::string example = "; write bandwidth,latency such as 1Gbit,50us";
    const auto rejects = [&](const std::string& text, const std::string& why) {
        CHECK_THROWS_WITH_AS(static_cast<void>(shaped_network::parse(text)),
                             ("shaped_network: '" + text + "' " + why + example).c_str(), usage_error);
    };
    const std::string bits = "whose unit is not one of bit Kbit Mbit Gbit B KB MB GB";
    const std::string times = "whose unit is not one of ns us ms s";
    const std::string number = "which does not start with a number >= 0";
    rejects("", "has '' for a bandwidth, " + number);
    rejects("50us", "has '50us' for a bandwidth, " + bits);
    rejects("1Gbps,50us", "has '1Gbps' for a bandwidth, " + bits);
    rejects("1gbit,50us", "has '1gbit' for a bandwidth, " + bits);
    rejects("1 Gbit,50us", "has '1 Gbit' for a bandwidth, " + bits);
    rejects("1,50us", "has '1' for a bandwidth, " + bits);
    rejects("1Gbit,50", "has '50' for a latency, " + times);
    rejects("1Gbit,50us,", "has '50us,' for a latency, " + times);
    rejects("1Gbit,", "has '' for a latency, " + number);
    rejects(",50us", "has '' for a bandwidth, " + number);
    rejects("Gbit,50us", "has 'Gbit' for a bandwidth, " + number);
    rejects("-1Gbit,50us", "has '-1Gbit' for a bandwidth, " + number);
    rejects("1Gbit,-50us", "has '-50us' for a latency, " + number);
    rejects("nanGbit,50us", "has 'nanGbit' for a bandwidth, " + number);
    rejects("infGbit,50us", "has 'infGbit' for a bandwidth, " + number);
    rejects("1e999Gbit,50us", "has '1e999Gbit' for a bandwidth, " + number);
    rejects("0Gbit,50us", "has no bandwidth");
}

TEST_CASE("a network that cannot be is rejected") {
    CHECK_THROWS_WITH_AS(shaped_network(comm::link{0, -1}), "topology: bandwidth -1 B/s between nodes is not positive",
                         usage_error);
    CHECK_THROWS_WITH_AS(make(4, shaped_network(topology::one_node(3)), {}),
                         "shaped: the topology has 3 ranks, the communicator 4", usage_error);
}
