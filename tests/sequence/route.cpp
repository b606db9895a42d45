// Routes: bytes arrive whole whatever the way, every byte takes it once, NICs carry equal parts; the choice between
// direct and spread against the closed form; time on a stated network, in virtual time.
#include <doctest/doctest.h>

#include <algorithm>  // max, min
#include <array>      // links of ranks
#include <chrono>     // late ranks
#include <cmath>      // ceil
#include <cstdint>    // hashes
#include <iterator>   // back_inserter
#include <map>        // staging
#include <random>     // random flows
#include <string>     // messages
#include <thread>     // late ranks
#include <vector>     // data

#include <tutti/comm/cost.hpp>               // time_of
#include <tutti/comm/counted.hpp>            // bytes on the wire
#include <tutti/comm/threads.hpp>            // ranks
#include <tutti/sequence/measured_link.hpp>  // tested
#include <tutti/sequence/route.hpp>          // tested

#include "sequence/recorder.hpp"  // sizes beyond memory
#include "support/failure.hpp"    // expect

using namespace tutti;
using namespace tutti::sequence;
using comm::threads;
using comm::topology;

namespace {

const comm::options soon{.timeout = std::chrono::seconds(30)};
using flows = std::vector<flow>;
using transfers = std::vector<comm::transfer<host_memory>>;

/// Byte i of flow f, and 0xa5 around it.
std::byte byte_of(std::size_t f, std::size_t i) {
    return static_cast<std::byte>((f * 131 + i * 7 + i / 256 * 13 + i / 65536) % 251);
}
constexpr std::byte around{0xa5};
constexpr std::size_t margin = 37;  // no multiple of anything that matters

/// What one rank sends and receives of a list, and whether it got it.
struct traffic {
    std::vector<std::vector<std::byte>> memory;
    transfers messages;
    const flows& list;

    traffic(const flows& all, int me) : list(all) {
        std::size_t count = 0;
        for (const flow& f : all) { count += (f.source == me ? 1u : 0u) + (f.destination == me ? 1u : 0u); }
        memory.reserve(count);
        for (std::size_t f = 0; f < all.size(); ++f) {
            if (all[f].source == me) {
                auto& m = memory.emplace_back(all[f].bytes + 2 * margin, around);
                for (std::size_t i = 0; i < all[f].bytes; ++i) { m[margin + i] = byte_of(f, i); }
                messages.push_back(
                    comm::send_to(all[f].destination, view<const std::byte>(m).sub(margin, all[f].bytes)));
            }
            if (all[f].destination == me) {
                auto& m = memory.emplace_back(all[f].bytes + 2 * margin, around);
                messages.push_back(comm::receive_from(all[f].source, view<std::byte>(m).sub(margin, all[f].bytes)));
            }
        }
    }
    [[nodiscard]] bool arrived(int me) const {
        bool right = true;
        std::size_t next = 0;
        const auto expect = [&](std::size_t f) {
            const std::byte* const m = memory[next].data();
            const std::size_t end = memory[next++].size();
            const std::size_t bytes = list[f].bytes;
            for (std::size_t i = 0; i < end; ++i) {
                const bool inside = i >= margin && i - margin < bytes;
                right = right && m[i] == (inside ? byte_of(f, i - margin) : around);
            }
        };
        for (std::size_t f = 0; f < list.size(); ++f) {
            if (list[f].source == me) { expect(f); }
            if (list[f].destination == me) { expect(f); }
        }
        return right;
    }
};

/// What the hops of a plan say: each byte once on each of its stages, and from where it is.
void expect_each_byte_once(const route& r, const topology& t) {
    struct range {
        std::size_t begin, end;
    };
    const auto whole = [](std::vector<range> parts, std::size_t bytes) {
        std::sort(parts.begin(), parts.end(), [](const range& a, const range& b) { return a.begin < b.begin; });
        std::size_t at = 0;
        for (const range& p : parts) {
            if (p.begin != at) { return false; }
            at = p.end;
        }
        return at == bytes;
    };
    const auto list = r.flows();
    std::vector<std::vector<range>> left(list.size()), crossed(list.size()), arrived(list.size());
    struct content {
        std::size_t flow, begin, bytes, step;
    };
    std::map<std::pair<int, std::size_t>, content> staged;  // by rank and offset
    bool from_where_it_is = true;
    bool inside_staging = true;
    bool kinds_right = true;
    std::size_t last = 0;
    bool in_order = true;
    std::vector<hop> arriving;  // of this step: visible in the next
    const auto take_in = [&] {
        for (const hop& h : arriving) { staged[{h.to, h.staged_to}] = {h.flow, h.begin, h.bytes, h.step}; }
        arriving.clear();
    };
    for (const hop& h : r.hops()) {
        in_order = in_order && h.step >= last && h.bytes > 0;
        if (h.step != last) { take_in(); }
        last = h.step;
        const range bytes{h.begin, h.begin + h.bytes};
        const bool between = !t.same_node(h.from, h.to);
        const bool crosses = h.kind == hop_kind::cross || (h.kind == hop_kind::direct &&
                                                           !t.same_node(list[h.flow].source, list[h.flow].destination));
        kinds_right = kinds_right && between == crosses;
        if (h.staged_from == hop::not_staged) {
            from_where_it_is = from_where_it_is && h.from == list[h.flow].source;
            left[h.flow].push_back(bytes);
        } else {
            const auto found = staged.find({h.from, h.staged_from});
            from_where_it_is = from_where_it_is && found != staged.end() && found->second.flow == h.flow &&
                               found->second.begin == h.begin && found->second.bytes == h.bytes &&
                               found->second.step < h.step;
        }
        if (between) { crossed[h.flow].push_back(bytes); }
        if (h.staged_to == hop::not_staged) {
            from_where_it_is = from_where_it_is && h.to == list[h.flow].destination;
            arrived[h.flow].push_back(bytes);
        } else {
            inside_staging = inside_staging && h.staged_to + h.bytes <= r.staging_bytes(h.to);
            arriving.push_back(h);
        }
    }
    CHECK(in_order);
    CHECK(kinds_right);
    CHECK(from_where_it_is);
    CHECK(inside_staging);
    bool once = true;
    for (std::size_t f = 0; f < list.size(); ++f) {
        once = once && whole(left[f], list[f].bytes) && whole(arrived[f], list[f].bytes) &&
               (t.same_node(list[f].source, list[f].destination) || whole(crossed[f], list[f].bytes));
    }
    CHECK(once);
}

/// Bytes out of and into each NIC, between each pair of nodes.
struct nic_bytes {
    std::map<std::pair<int, int>, std::vector<std::size_t>> out;
    std::map<std::pair<int, int>, std::vector<std::size_t>> in;
    nic_bytes(const route& r, const topology& t) {
        for (const hop& h : r.hops()) {
            if (t.same_node(h.from, h.to)) { continue; }
            const std::pair nodes(t.node_of(h.from), t.node_of(h.to));
            const auto add = [&](auto& table, int nic) {
                auto& row = table[nodes];
                row.resize(static_cast<std::size_t>(t.nics_per_node()));
                row[static_cast<std::size_t>(nic)] += h.bytes;
            };
            add(out, t.nic_of(h.from));
            add(in, t.nic_of(h.to));
        }
    }
};

/// When all is done if every step begins for all ranks at once: the slowest rank's model of each step.
double virtual_seconds(const route& r, const topology& t) {
    double all = 0;
    for (std::size_t step = 0; step < r.steps(); ++step) {
        double slowest = 0;
        for (int rank = 0; rank < t.ranks(); ++rank) {
            std::vector<comm::message> messages;
            for (const hop& h : r.hops()) {
                if (h.step != step) { continue; }
                if (h.from == rank) { messages.push_back({true, h.to, nullptr, h.bytes}); }
                if (h.to == rank) { messages.push_back({false, h.from, nullptr, h.bytes}); }
            }
            comm::call c;
            c.kind = comm::collective::exchange;
            c.messages = messages;
            slowest = std::max(slowest, comm::time_of(c, rank, t).seconds());
        }
        all += slowest;
    }
    return all;
}

constexpr comm::link fast{2e-6, 200e9};
constexpr comm::link slow{10e-6, 20e9};

std::vector<topology> topologies() {
    return {topology::uniform(2, 4, fast, slow, 4), topology::uniform(2, 4, fast, slow, 2),  // two ranks share a NIC
            topology::uniform(2, 2, fast, slow, 1),                                          // nothing to spread over
            topology::uniform(3, 2, fast, slow, 2), topology::uniform(2, 2, fast, slow, 4),  // NICs that no rank uses
            // Uneven nodes, NICs in no order; then nodes that have no NIC in common.
            topology({.node = {0, 1, 0, 1, 1}, .nic = {2, 0, 0, 2, 1}, .nics_per_node = 3}),
            topology({.node = {0, 0, 1, 1}, .nic = {0, 0, 1, 1}, .nics_per_node = 2})};
}

}  // namespace

TEST_CASE("one message of any size, in any number of chunks: whole, each byte once, NICs carry equal parts") {
    for (const topology& t : topologies()) {
        std::vector<std::pair<flows, std::size_t>> cases;  // chunks 0: fastest
        for (const std::size_t bytes : {0u, 1u, 15u, 16u, 17u, 64u, 65u, 1000u, 4097u}) {
            for (const std::size_t chunks : {0u, 1u, 2u, 7u}) {
                cases.push_back({{{0, t.ranks() - 1, bytes}}, chunks});
                cases.push_back({{{t.ranks() - 2, 1, bytes}}, chunks});
            }
        }
        std::vector<route> routes;
        for (const auto& [list, chunks] : cases) {
            routes.push_back(chunks == 0 ? route::fastest(t, list) : route::spread(t, list, chunks));
            const route& r = routes.back();
            expect_each_byte_once(r, t);
            std::size_t common = 0;
            for (int nic = 0; nic < t.nics_per_node(); ++nic) {
                const auto has = [&](int rank) {
                    const auto on = t.ranks_on(t.node_of(rank));
                    return std::any_of(on.begin(), on.end(), [&](int p) { return t.nic_of(p) == nic; });
                };
                common += has(list[0].source) && has(list[0].destination) ? 1u : 0u;
            }
            if (chunks == 0 || common == 0) { continue; }
            const nic_bytes nics(r, t);
            for (const auto& table : {nics.out, nics.in}) {
                for (const auto& [nodes, row] : table) {
                    const std::size_t total = list[0].bytes;
                    for (const std::size_t b : row) { CHECK(b <= (total + common - 1) / common + 16); }
                    CHECK(static_cast<std::size_t>(std::count_if(row.begin(), row.end(), [](std::size_t b) {
                              return b > 0;
                          })) == std::min(common, (total + 15) / 16));
                }
            }
            CHECK(r.steps() <= chunks + 2);
        }
        threads::launch(
            t.ranks(),
            [&](threads& own) {
                comm::counted c(std::move(own));
                for (std::size_t i = 0; i < cases.size(); ++i) {
                    traffic mine(cases[i].first, c.rank());
                    const auto before = c.traffic_ledger()->total();
                    c.queue().account().reset_peak();
                    routes[i].exchange(c, mine.messages);
                    CHECK(mine.arrived(c.rank()));
                    std::size_t sent = 0;
                    for (const hop& h : routes[i].hops()) { sent += h.from == c.rank() ? h.bytes : 0; }
                    CHECK((c.traffic_ledger()->total() - before).bytes == sent);
                    CHECK(c.queue().account().peak() == routes[i].staging_bytes(c.rank()));
                    CHECK(c.queue().account().live() == 0);
                }
            },
            soon);
    }
}

TEST_CASE("a route made for one rank has its hops of the whole route, and counts what all ranks send") {
    std::mt19937 random(7);
    bool spread = false;
    std::vector<topology> machines = topologies();
    machines.push_back(topology::uniform(2, 4, {0, 1e12}, {1e-6, 1e6}, 4));  // spreading pays
    for (const topology& t : machines) {
        for (int repeat = 0; repeat < 3; ++repeat) {
            flows list;
            for (int f = 0; f < 12; ++f) {
                const auto any = [&] { return static_cast<int>(random() % static_cast<unsigned>(t.ranks())); };
                const std::size_t most = repeat == 0 ? 40 : 40000;
                list.push_back({any(), any(), random() % most});
            }
            const route whole = route::fastest(t, list);
            route_bytes sent;
            std::size_t steps = 0;
            for (const hop& h : whole.hops()) {
                (t.same_node(h.from, h.to) ? sent.inside : sent.between) += h.bytes;
                steps = std::max(steps, h.step + 1);
            }
            CHECK(whole.bytes() == sent);
            CHECK(whole.steps() == steps);
            spread = spread || steps > 1;
            std::vector<route> own;
            for (int rank = 0; rank < t.ranks(); ++rank) {
                own.push_back(route::fastest(t, list, rank));
                std::vector<hop> hops;
                std::copy_if(whole.hops().begin(), whole.hops().end(), std::back_inserter(hops),
                             [&](const hop& h) { return h.from == rank || h.to == rank; });
                CHECK(std::equal(hops.begin(), hops.end(), own.back().hops().begin(), own.back().hops().end()));
                CHECK(own.back().bytes() == sent);
                CHECK(own.back().steps() == steps);
                CHECK(own.back().staging_bytes(rank) == whole.staging_bytes(rank));
            }
            threads::launch(
                t.ranks(),
                [&](threads& c) {
                    traffic mine(list, c.rank());
                    own[static_cast<std::size_t>(c.rank())].exchange(c, mine.messages);
                    CHECK(mine.arrived(c.rank()));
                },
                soon);
        }
    }
    CHECK(spread);
    const topology pair = topology::uniform(1, 2);
    CHECK_THROWS_WITH_AS(threads::launch(2, [&](threads& c) { route::fastest(pair, flows{}, 1).exchange(c, {}); }),
                         "route: made for rank 1 alone, not for rank 0", usage_error);
    CHECK_THROWS_AS(static_cast<void>(route::fastest(pair, flows{}, 2)), usage_error);
}

TEST_CASE("a message by hand: 100 bytes over 4 NICs in 2 chunks") {
    const topology t = topology::uniform(2, 4, fast, slow, 4);
    const flows list{{1, 6, 100}};
    const route r = route::spread(t, list, 2);
    // 7 units: 2 for NICs 0, 1 and 2, 1 for NIC 3. The source's NIC has the first of them.
    const auto none = hop::not_staged;
    const std::vector<hop> expected{
        {hop_kind::dispatch, 0, 1, 0, 0, 32, 16, none, 0}, {hop_kind::dispatch, 0, 1, 2, 0, 64, 16, none, 0},
        {hop_kind::cross, 1, 1, 5, 0, 0, 16, none, 0},     {hop_kind::dispatch, 1, 1, 0, 0, 48, 16, none, 16},
        {hop_kind::cross, 1, 0, 4, 0, 32, 16, 0, 0},       {hop_kind::dispatch, 1, 1, 2, 0, 80, 16, none, 16},
        {hop_kind::cross, 1, 2, 6, 0, 64, 16, 0, none},    {hop_kind::dispatch, 1, 1, 3, 0, 96, 4, none, 4},
        {hop_kind::cross, 2, 1, 5, 0, 16, 16, none, 16},   {hop_kind::combine, 2, 5, 6, 0, 0, 16, 0, none},
        {hop_kind::cross, 2, 0, 4, 0, 48, 16, 16, 16},     {hop_kind::combine, 2, 4, 6, 0, 32, 16, 0, none},
        {hop_kind::cross, 2, 2, 6, 0, 80, 16, 16, none},   {hop_kind::cross, 2, 3, 7, 0, 96, 4, 4, 4},
        {hop_kind::combine, 3, 5, 6, 0, 16, 16, 16, none}, {hop_kind::combine, 3, 4, 6, 0, 48, 16, 16, none},
        {hop_kind::combine, 3, 7, 6, 0, 96, 4, 4, none},
    };
    CHECK(std::is_permutation(r.hops().begin(), r.hops().end(), expected.begin(), expected.end()));
    CHECK(r.staging_bytes(0) == 32);
    CHECK(r.staging_bytes(1) == 0);
    CHECK(r.staging_bytes(3) == 8);
}

TEST_CASE("many messages at once, inside and between nodes: the same bytes as in a plain exchange") {
    std::mt19937 random(3);
    for (const topology& t : topologies()) {
        std::vector<flows> lists;
        // A ring step: every rank of a node sends to a rank of the next.
        flows ring;
        for (int r = 0; r < t.ranks(); ++r) { ring.push_back({r, (r + t.ranks() / 2) % t.ranks(), 1009}); }
        lists.push_back(ring);
        for (int i = 0; i < 4; ++i) {
            flows list;
            for (int f = 0; f < 12; ++f) {
                const auto any = [&] { return static_cast<int>(random() % static_cast<unsigned>(t.ranks())); };
                list.push_back({any(), any(), random() % 4 == 0 ? random() % 3 : random() % 5000});
            }
            lists.push_back(list);
        }
        lists.push_back({});
        std::vector<route> routes;
        for (const flows& list : lists) {
            for (const std::size_t chunks : {1u, 2u, 5u}) { routes.push_back(route::spread(t, list, chunks)); }
            routes.push_back(route::fastest(t, list));
            routes.push_back(route::direct(t, list));
        }
        for (const route& r : routes) { expect_each_byte_once(r, t); }
        threads::launch(
            t.ranks(),
            [&](threads& c) {
                for (std::size_t i = 0; i < routes.size(); ++i) {
                    traffic mine(lists[i / 5], c.rank());
                    routes[i].exchange(c, mine.messages);
                    CHECK(mine.arrived(c.rank()));
                }
            },
            soon);
    }
}

TEST_CASE("several messages: each pair of nodes loads its NICs alike, and nothing moves that has room at home") {
    const topology t = topology::uniform(3, 4, fast, slow, 4);
    // Two of four ranks send 4096 bytes to the next node: half of each moves to the two other NICs.
    const route two = route::spread(t, flows{{0, 4, 4096}, {1, 5, 4096}, {8, 2, 64}}, 1);
    const nic_bytes nics(two, t);
    const std::vector<std::size_t> even(4, 2048);
    CHECK(nics.out.at({0, 1}) == even);
    CHECK(nics.in.at({0, 1}) == even);
    CHECK(nics.out.at({2, 0}) == std::vector<std::size_t>(4, 16));
    std::size_t dispatched = 0;
    for (const hop& h : two.hops()) { dispatched += h.kind == hop_kind::dispatch && h.from < 2 ? h.bytes : 0; }
    CHECK(dispatched == 4096);
    // All four: every NIC is at home, and what is fastest goes directly.
    flows all;
    for (int r = 0; r < 4; ++r) { all.push_back({r, 4 + r, 1 << 24}); }
    const route balanced = route::spread(t, all, 3);
    for (const hop& h : balanced.hops()) { CHECK(h.kind == hop_kind::cross); }
    const route fastest = route::fastest(t, all);
    for (const hop& h : fastest.hops()) { CHECK(h.kind == hop_kind::direct); }
    // Two ranks share a NIC: two flows of one NIC are spread over both.
    const topology shared = topology::uniform(2, 4, fast, slow, 2);
    const route pair = route::fastest(shared, flows{{0, 4, 1 << 24}, {1, 5, 1 << 24}});
    CHECK(nic_bytes(pair, shared).out.at({0, 1}) == std::vector<std::size_t>(2, 1 << 24));
}

TEST_CASE("direct or spread: the closed form, its boundary, and nothing but more above it") {
    for (const int nics : {2, 4, 8}) {
        for (const double ratio : {2.5, 10.0, 16.0}) {
            for (const double latency : {1e-6, 8e-6}) {
                const topology t = topology::uniform(2, 8, {latency, ratio * 20e9}, slow, nics);
                const double n = break_even_bytes(nics, t);
                const double gain = (1 - 1.0 / nics) * (1 / 20e9 - 2 / (ratio * 20e9));
                CHECK(n == doctest::Approx(2 * latency / gain).epsilon(1e-12));
                const auto faster = [&](double bytes) {
                    const crossing c = single_crossing(bytes, nics);
                    return routed_seconds(c, 1, t) < direct_seconds(c, t);
                };
                CHECK_FALSE(faster(n * (1 - 1e-6)));
                CHECK(faster(n * (1 + 1e-6)));
                bool was = false;
                bool chosen_before = false;
                for (double bytes = 16 * nics; bytes < 1e9; bytes *= 1.3) {
                    const bool is = faster(bytes);
                    CHECK(is == (bytes > n));
                    CHECK((is || !was));
                    was = is;
                    // Whatever fastest takes, it takes for everything larger, and at the latest where one chunk pays.
                    const std::size_t whole = static_cast<std::size_t>(bytes) / (16 * static_cast<std::size_t>(nics)) *
                                              (16 * static_cast<std::size_t>(nics));
                    const route r = route::fastest(t, flows{{0, 15, whole}});
                    const bool chosen = r.hops().size() > 1;
                    CHECK((chosen || !chosen_before));
                    CHECK((chosen || static_cast<double>(whole) <= n));
                    chosen_before = chosen;
                }
                CHECK(was);
                CHECK(chosen_before);
            }
        }
    }
    // Inside no faster than twice between: one chunk never pays; chunks do, until inside is slower than between.
    const topology tight = topology::uniform(2, 4, {1e-6, 30e9}, slow, 4);
    CHECK(break_even_bytes(4, tight) == std::numeric_limits<double>::infinity());
    CHECK(route::fastest(tight, flows{{0, 4, std::size_t{1} << 30}}).hops().size() > 1);
    const topology useless = topology::uniform(2, 4, {1e-6, 14e9}, slow, 4);
    CHECK(route::fastest(useless, flows{{0, 4, std::size_t{1} << 30}}).hops().size() == 1);
    // One NIC, or links that cost nothing: nothing to gain.
    CHECK(route::fastest(topology::uniform(2, 4, fast, slow), flows{{0, 4, 1 << 30}}).hops().size() == 1);
    CHECK(route::fastest(topology::uniform(2, 4, {}, {}, 4), flows{{0, 4, 1 << 30}}).hops().size() == 1);
}

TEST_CASE("virtual time is what the model says, and fastest is as fast as the best") {
    for (const double ratio : {1.5, 2.5, 10.0}) {
        const topology t = topology::uniform(2, 4, {2e-6, ratio * 20e9}, slow, 4);
        for (std::size_t bytes = 1 << 10; bytes <= std::size_t{1} << 30; bytes *= 4) {
            const flows list{{0, 5, bytes}};
            const crossing c = single_crossing(static_cast<double>(bytes), 4);
            const double direct = virtual_seconds(route::direct(t, list), t);
            CHECK(direct == doctest::Approx(direct_seconds(c, t)).epsilon(1e-9));
            double best = direct;
            for (const std::size_t chunks : {1u, 2u, 4u, 8u, 16u, 32u, 64u}) {
                const double spread = virtual_seconds(route::spread(t, list, chunks), t);
                best = std::min(best, spread);
                if (bytes / 4 / 16 % chunks == 0) {  // equal chunks
                    CHECK(spread == doctest::Approx(routed_seconds(c, chunks, t)).epsilon(1e-9));
                }
            }
            const std::size_t q = best_chunks(c, t);
            for (std::size_t chunks = 1; chunks <= 64; ++chunks) {
                CHECK(routed_seconds(c, q, t) <= routed_seconds(c, chunks, t));
            }
            CHECK(virtual_seconds(route::fastest(t, list), t) <= best * 1.001);
        }
    }
}

TEST_CASE("large messages: at least 0.9 of what links allow, min(K, B_i / ((1 - 1/K) B_x))") {
    for (const int nics : {2, 4, 8}) {
        for (const double ratio : {1.5, 2.0, 4.0, 10.0}) {
            const topology t = topology::uniform(2, 8, {2e-6, ratio * 20e9}, slow, nics);
            const flows list{{0, 13, std::size_t{1} << 30}};
            const double bound = std::min<double>(nics, ratio / (1 - 1.0 / nics));
            const double speedup =
                virtual_seconds(route::direct(t, list), t) / virtual_seconds(route::fastest(t, list), t);
            CHECK(speedup >= 0.9 * bound);
            CHECK(speedup <= bound * 1.001);
        }
    }
}

TEST_CASE("a step of a ring over two nodes: what stays inside does not hold up what crosses") {
    const topology t = topology::uniform(2, 4, {2e-6, 200e9}, slow, 4);
    flows ring;
    for (int r = 0; r < 8; ++r) { ring.push_back({r, (r + 1) % 8, std::size_t{1} << 28}); }
    const route r = route::fastest(t, ring);
    expect_each_byte_once(r, t);
    CHECK(virtual_seconds(route::direct(t, ring), t) / virtual_seconds(r, t) >= 0.9 * 4);
}

// NVIDIA/nccl#479, NVIDIA/nccl#783: unequal arrival; pytorch/pytorch#174288: more than 256 messages in a round.
TEST_CASE("ranks that come late, and 300 messages of one pair: all arrive") {
    const topology t = topology::uniform(2, 2, fast, slow, 2);
    flows list;
    for (std::size_t f = 0; f < 300; ++f) { list.push_back({0, 3, f % 50}); }
    for (int f = 0; f < 20; ++f) { list.push_back({f % 4, (f + 1) % 4, 333}); }
    const route r = route::spread(t, list, 3);
    expect_each_byte_once(r, t);
    threads::launch(
        4,
        [&](threads& c) {
            std::mt19937 random(static_cast<std::uint32_t>(c.rank()));
            for (int round = 0; round < 5; ++round) {
                traffic mine(list, c.rank());
                // Only the order of messages with one peer is given.
                std::stable_sort(mine.messages.begin(), mine.messages.end(), [&](const auto& a, const auto& b) {
                    return (a.bytes.peer + round + c.rank()) % 4 < (b.bytes.peer + round + c.rank()) % 4;
                });
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
                r.exchange(c, mine.messages);
                CHECK(mine.arrived(c.rank()));
            }
        },
        soon);
}

// SandAI-org/MagiAttention#169: byte counts that were 32-bit integers.
TEST_CASE("messages of more than 4 GiB: sizes and offsets are 64-bit throughout") {
    const topology t = topology::uniform(2, 4, fast, slow, 4);
    constexpr std::size_t large = (std::size_t{5} << 32) + 11;
    const flows list{{0, 4, large}, {1, 4, large / 3}};
    const route r = route::spread(t, list, 2);
    expect_each_byte_once(r, t);
    std::size_t sent = 0;
    std::size_t received = 0;
    for (int rank = 0; rank < 8; ++rank) {
        test::recorder c(rank, 8);
        std::vector<comm::transfer<phantom_memory>> messages;
        for (const flow& f : list) {
            const view<std::byte, phantom_memory> bytes(nullptr, f.bytes);
            if (f.source == rank) { messages.push_back(comm::send_to(f.destination, bytes)); }
            if (f.destination == rank) { messages.push_back(comm::receive_from(f.source, bytes)); }
        }
        r.exchange(c, messages);
        for (const auto& group : c.exchanges) {
            for (const comm::message& m : group) { (m.sends ? sent : received) += m.bytes; }
        }
        CHECK(c.queue().account().peak() == r.staging_bytes(rank));
    }
    CHECK(sent == received);
    CHECK(sent > std::size_t{2} << 34);
}

TEST_CASE("what does not fit is refused before anything moves") {
    const topology t = topology::uniform(2, 1, fast, slow);
    CHECK_THROWS_WITH_AS(static_cast<void>(route::spread(t, {}, 0)), "route: spread in 0 chunks", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(route::direct(t, flows{{0, 2, 1}})),
                         "topology: rank 2 is not one of 2 ranks", usage_error);
    const route r = route::direct(t, flows{{0, 1, 8}, {0, 1, 4}});
    CHECK_THROWS_WITH_AS(static_cast<void>(r.staging_bytes(2)), "route: rank 2 is not one of 2 ranks", usage_error);
    test::recorder c(0, 2);
    const view<std::byte, phantom_memory> eight(nullptr, 8);
    const view<std::byte, phantom_memory> four(nullptr, 4);
    const auto exchange = [&](std::vector<comm::transfer<phantom_memory>> messages) { r.exchange(c, messages); };
    CHECK_THROWS_WITH_AS(exchange({comm::send_to(1, eight)}),
                         "route: rank 0 does not send message 1 (rank 0 to rank 1)", usage_error);
    CHECK_THROWS_WITH_AS(exchange({comm::send_to(1, four), comm::send_to(1, eight)}),
                         "route: message 0 from rank 0 to rank 1 has 8 bytes, rank 0 sends 4", usage_error);
    CHECK_THROWS_WITH_AS(exchange({comm::send_to(1, eight), comm::send_to(1, four), comm::receive_from(1, four)}),
                         "route: rank 0 has 3 messages, the list 2 of it", usage_error);
    test::recorder other(0, 3);
    CHECK_THROWS_WITH_AS(r.exchange(other, {}), "route: planned for 2 ranks, 'recorder' has 3", usage_error);
    CHECK(c.exchanges.empty());
    exchange({comm::send_to(1, eight), comm::send_to(1, four)});
    CHECK(c.exchanges.size() == 1);
    // A chunk at a time nothing overlaps; the messages do.
    threads::launch(
        2,
        [&](threads& own) {
            const route both = route::spread(t, flows{{0, 1, 64}, {1, 0, 64}}, 4);
            std::vector<std::byte> memory(100);
            const view<std::byte> all(memory);
            const transfers messages{comm::send_to(1 - own.rank(), all.sub(0, 64)),
                                     comm::receive_from(1 - own.rank(), all.sub(36, 64))};
            CHECK_THROWS_AS(both.exchange(own, messages), usage_error);
        },
        soon);
}

TEST_CASE("a link between ranks is timed by messages that all of them send, and all have the same times") {
    using counted = comm::counted<comm::threads>;
    const auto attempt = [](std::size_t large) {
        std::array<comm::link, 6> found;
        comm::threads::launch(6, [&](comm::threads& world) {
            counted c(world.duplicate("counted"));
            const auto ledger = c.traffic_ledger();
            // Groups of three, two steps on: a message that does not count and four, three times and one.
            const std::size_t sizes[] = {100, large};
            found[static_cast<std::size_t>(world.rank())] = sequence::measured_link(c, 2, 3, sizes);
            const std::uint64_t exchanged = std::uint64_t{5} * 4 * (100 + large);
            const std::uint64_t agreed = ledger->total().bytes - exchanged;
            tutti::test::expect(agreed < 1000, "{} bytes beside messages", agreed);
            try {
                (void)sequence::measured_link(c, 3, 3, sizes);
                tutti::test::expect(false, "a message to itself is no link");
            } catch (const usage_error& e) {
                tutti::test::expect(std::string(e.what()) ==
                                        "measured_link: 4 messages of 100 bytes, 3 steps on in groups of 3 of 6 ranks",
                                    "{}", e.what());
            }
        });
        for (const comm::link& l : found) {
            CHECK(l == found[0]);
            CHECK(l.latency_seconds >= 0);
            CHECK(l.bytes_per_second > 0);
        }
    };
    std::string refused;
    for (const int exponent : {20, 22, 25}) {
        try {
            return attempt(std::size_t{1} << exponent);
        } catch (const usage_error& e) { refused = e.what(); }  // a busy machine took longer over the small ones
    }
    FAIL(refused);
}
