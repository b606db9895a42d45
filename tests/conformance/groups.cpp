// Communicators as such, on the backend under test: barrier, agree, duplicate, split, moves, names.
#include <chrono>  // barrier times
#include <thread>  // sleep

#include <tutti/core/buffer.hpp>  // a queue's storage

#include <conformance/suite.hpp>  // backend, helpers

using namespace tutti;
using namespace tutti::test;

namespace {

// Sums the parent's ranks over c and compares with what it should be.
template <class Comm>
void expect_members(Comm& c, std::size_t mine, const std::vector<std::size_t>& members, std::string_view what) {
    expect(ranks_of(c) == members.size(), "{}: {} ranks, wanted {}", what, c.size(), members.size());
    expect(members.at(me_of(c)) == mine, "{}: parent's rank {} is rank {}", what, mine, c.rank());
    std::vector<std::uint64_t> all(members.size());
    const std::vector<std::uint64_t> own{mine};
    c.all_gather(own, view<std::uint64_t>(all));
    for (std::size_t r = 0; r < all.size(); ++r) {
        expect(all[r] == members[r], "{}: rank {} is parent's {}, wanted {}", what, r, all[r], members[r]);
    }
}

std::vector<std::size_t> members_of(const std::vector<int>& colors, int color) {
    std::vector<std::size_t> m;
    for (std::size_t r = 0; r < colors.size(); ++r) {
        if (colors[r] == color) { m.push_back(r); }
    }
    return m;
}

template <class Comm>
std::optional<Comm> split_and_check(Comm& c, const std::vector<int>& colors, std::string_view name) {
    std::optional<Comm> child = c.split(colors, name);
    const int color = colors[me_of(c)];
    expect(child.has_value() == (color >= 0), "split: rank {} of color {} got {}", c.rank(), color, child.has_value());
    if (child) {
        expect(child->name() == fmt::format("{}/{}", c.name(), name), "split: the name is '{}'", child->name());
        expect_members(*child, me_of(c), members_of(colors, color), "split");
    }
    return child;
}

using clock = std::chrono::steady_clock;

}  // namespace

TEST_CASE("the backend is a communicator with every capability") {
    using C = backend::communicator;
    static_assert(communicator<C> && comm::can_gather_control<C> && comm::can_exchange<C>);
    static_assert(comm::can_all_reduce<C, bfloat16, mean> && comm::can_reduce_scatter<C, int, sum>);
    static_assert(comm::can_all_gather<C, std::byte> && comm::can_broadcast<C, double> &&
                  comm::can_reduce<C, int, max>);
    static_assert(comm::can_gather<C, char> && comm::can_scatter<C, char> && comm::can_all_to_all<C, float>);
    static_assert(!comm::can_all_reduce<C, int, mean> && !comm::can_all_reduce<C, bool, sum>);
    static_assert(!std::is_copy_constructible_v<C> && !std::is_copy_assignable_v<C>);
    static_assert(std::is_nothrow_move_constructible_v<C> && std::is_nothrow_move_assignable_v<C>);
    for_ranks([](auto& c) {
        expect(c.size() >= 1 && c.rank() >= 0 && c.rank() < c.size(), "rank {} of {}", c.rank(), c.size());
        c.synchronize();
    });
}

TEST_CASE("nobody leaves a barrier before everybody has come") {
    for_ranks([](auto& c) {
        for (int round = 0; round < 6; ++round) {
            if (c.rank() == round % c.size()) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }
            // One steady clock serves all ranks: they are on one machine here.
            const std::int64_t before = clock::now().time_since_epoch().count();
            c.barrier();
            const std::int64_t behind = clock::now().time_since_epoch().count();
            std::vector<std::int64_t> last{before}, first{behind};
            c.all_reduce(last, view<std::int64_t>(last), max{});
            c.all_reduce(first, view<std::int64_t>(first), min{});
            expect(last[0] <= first[0], "barrier: a rank left {} ticks before the last one came", last[0] - first[0]);
        }
        for (int round = 0; round < 500; ++round) { c.barrier(); }
    });
}

TEST_CASE("control records arrive in rank order") {
    for_ranks([](auto& c) {
        for (std::uint64_t round = 0; round < 20; ++round) {
            const std::uint64_t me = me_of(c);
            const auto all = c.gather_control({me, round, ~me, 7});
            expect(all.size() == ranks_of(c), "{} records", all.size());
            for (std::uint64_t r = 0; r < all.size(); ++r) {
                expect(all[r] == comm::control_record{r, round, ~r, 7}, "record {} of round {} is wrong", r, round);
            }
        }
    });
}

TEST_CASE("agree is silent while all agree") {
    for_ranks([](auto& c) {
        for (std::uint64_t hash : {std::uint64_t{0}, std::uint64_t{42}, ~std::uint64_t{0}}) { c.agree(hash, "hash"); }
        c.barrier();
    });
}

TEST_CASE("a duplicate is a channel of its own") {
    for_ranks([](auto& c) {
        auto a = c.duplicate("a");
        auto b = a.duplicate("b");
        expect(a.name() == fmt::format("{}/a", c.name()), "the name is '{}'", a.name());
        expect(b.name() == fmt::format("{}/a/b", c.name()), "the name is '{}'", b.name());
        expect(a.rank() == c.rank() && a.size() == c.size(), "rank {} of {}", a.rank(), a.size());
        // Calls interleave freely between the three.
        for (int round = 0; round < 10; ++round) {
            std::vector<double> x{1}, y{2}, z{4};
            b.all_reduce(x, view<double>(x), sum{});
            c.all_reduce(y, view<double>(y), sum{});
            a.all_reduce(z, view<double>(z), sum{});
            expect(x[0] == c.size() && y[0] == 2 * c.size() && z[0] == 4 * c.size(), "{} {} {}", x[0], y[0], z[0]);
        }
        // Messages do not stray: the receives are of the other communicator's call.
        const std::size_t n = ranks_of(c), me = me_of(c);
        const auto next = static_cast<int>((me + 1) % n), previous = static_cast<int>((me + n - 1) % n);
        std::vector<int> one{1}, two{2}, from_c{0}, from_a{0};
        using transfers = std::vector<comm::transfer<host_memory>>;
        const auto ring = [&](auto& k, std::vector<int>& out, std::vector<int>& in) {
            k.exchange(transfers{comm::send_to(next, view<int>(out)), comm::receive_from(previous, view<int>(in))});
        };
        ring(c, one, from_c);
        ring(a, two, from_a);
        expect(from_c[0] == 1 && from_a[0] == 2, "{} {}", from_c[0], from_a[0]);
    });
}

TEST_CASE("a child may go first, or outlive its parent") {
    for_ranks([](auto& c) {
        { const auto gone = c.duplicate("gone"); }
        c.barrier();
        std::optional<backend::communicator> grandchild;
        {
            auto child = c.duplicate("child");
            grandchild.emplace(child.duplicate("grandchild"));
        }
        grandchild->barrier();
        c.barrier();
        expect(grandchild->name() == fmt::format("{}/child/grandchild", c.name()), "'{}'", grandchild->name());
    });
}

TEST_CASE("a moved communicator goes on where it was") {
    for_ranks([](auto& c) {
        auto a = c.duplicate("a");
        auto queue = a.queue();
        std::vector<float> x(10, 1.0f);
        a.all_reduce(x, view<float>(x), sum{});
        auto b = std::move(a);
        a = c.duplicate("again");  // the moved-from one can be assigned
        b.all_reduce(x, view<float>(x), sum{});
        expect(x[3] == static_cast<float>(c.size() * c.size()), "{}", x[3]);
        a.barrier();
        a = std::move(b);
        a.barrier();
        const buffer<float, queue_of<backend::communicator>> kept(queue, 4);  // the queue survives the move
        expect(&a.queue().account() == &queue.account(), "the account changed");
    });
}

TEST_CASE("split: even and odd, halves, reversed colors, one, none") {
    for_ranks([](auto& c) {
        const int n = c.size();
        std::vector<int> parity, lower, descending, lone, none(ranks_of(c), -1), same(ranks_of(c), 3), some;
        for (int r = 0; r < n; ++r) {
            parity.push_back(r % 2);
            lower.push_back(r < (n + 1) / 2 ? 1000000 : 7);
            descending.push_back(n - r);  // each rank alone
            lone.push_back(r == n - 1 ? 0 : -1);
            some.push_back(r % 3 == 1 ? -1 : r % 3);
        }
        for (const auto& colors : {parity, lower, descending, lone, none, same, some}) {
            auto child = split_and_check(c, colors, "part");
            c.barrier();
            if (child) { child->barrier(); }
        }
    });
}

TEST_CASE("split of split, and a duplicate of it") {
    for_ranks([](auto& c) {
        std::vector<int> parity;
        for (int r = 0; r < c.size(); ++r) { parity.push_back(r % 2); }
        auto child = split_and_check(c, parity, "parity");
        std::vector<int> lower;
        for (int r = 0; r < child->size(); ++r) { lower.push_back(2 * r >= child->size() ? 1 : 0); }
        auto grandchild = split_and_check(*child, lower, "lower");
        auto copy = grandchild->duplicate("copy");
        // All four work at the same time, also with sums whose mean depends on how many took part.
        std::vector<double> x{static_cast<double>(grandchild->rank())}, y{1};
        copy.all_reduce(x, view<double>(x), mean{});
        expect(x[0] == (copy.size() - 1) / 2.0, "mean over {} ranks is {}", copy.size(), x[0]);
        child->all_reduce(y, view<double>(y), sum{});
        expect(y[0] == child->size(), "sum over {} ranks is {}", child->size(), y[0]);
        c.barrier();
    });
}

TEST_CASE("split by a color that only its own rank knows") {
    for_ranks([](auto& c) {
        const int color = c.rank() % 3 == 2 ? -1 : (c.rank() % 2) * 100000;
        auto child = comm::split_by_color(c, color, "mine");
        std::vector<int> colors;
        for (int r = 0; r < c.size(); ++r) { colors.push_back(r % 3 == 2 ? -1 : (r % 2) * 100000); }
        expect(child.has_value() == (color >= 0), "rank {} of color {}", c.rank(), color);
        if (child) { expect_members(*child, me_of(c), members_of(colors, color), "split_by_color"); }
    });
}
