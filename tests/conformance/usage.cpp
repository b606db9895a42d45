// Calls that are wrong on their own rank, on the backend under test: a usage_error before anything moved, and a
// communicator that works on.
#include <functional>  // calls

#include <conformance/suite.hpp>  // backend, helpers

using namespace tutti;
using namespace tutti::test;
using comm::receive_from;
using comm::send_to;

namespace {

using C = backend::communicator;
using transfers = std::vector<comm::transfer<host_memory>>;

// Every rank makes the call; all must refuse it with `text` and find the communicator usable.
template <class Call> void refused(C& c, std::string_view text, Call call) {
    std::string got = "no error";
    try {
        call();
    } catch (const usage_error& e) {
        got = e.what();
        expect(e.context().communicator == c.name() && e.context().rank == c.rank(), "'{}' was said of '{}', rank {}",
               text, e.context().communicator, e.context().rank);
    }
    expect(got.find(text) != std::string::npos, "wanted an error that says '{}', got '{}'", text, got);
}
template <class Call> void accepted(std::string_view what, Call call) {
    try {
        call();
    } catch (const error& e) { throw failure(fmt::format("{} was refused: {}", what, e.what())); }
}

}  // namespace

TEST_CASE("sizes that do not fit are refused") {
    for_ranks([](auto& c) {
        const std::size_t n = ranks_of(c), me = me_of(c);
        std::vector<float> x(4 * n + 1, 1), y(4 * n + 1, 2);
        const view<float> in = x, out = y;
        refused(c, "all_reduce: in has 3 elements, out 4", [&] { c.all_reduce(in.sub(0, 3), out.sub(0, 4), sum{}); });
        refused(c, "reduce_scatter: in has", [&] { c.reduce_scatter(in, out.sub(0, 4), sum{}); });
        refused(c, "all_gather: out has", [&] { c.all_gather(in.sub(0, 4), out); });
        refused(c, "all_to_all: in has", [&] { c.all_to_all(in.sub(0, n), out.sub(0, 2 * n)); });
        if (n > 1) {
            refused(c, "all_to_all: in has", [&] { c.all_to_all(in.sub(0, n + 1), out.sub(0, n + 1)); });
        }
        for (int root = 0; root < c.size(); ++root) {
            if (root != c.rank()) { continue; }  // only the root's second view counts
            refused(c, "reduce: in has 1 elements, out 2", [&] { c.reduce(in.sub(0, 1), out.sub(0, 2), sum{}, root); });
            refused(c, "gather: out has", [&] { c.gather(in.sub(0, 2), out, root); });
            refused(c, "scatter: in has", [&] { c.scatter(in, out.sub(0, 2), root); });
        }

        std::vector<std::size_t> table(n, 2);
        refused(c, "counts add up to", [&] { c.all_gather_v(in.sub(0, 2), out.sub(0, 2 * n + 1), table); });
        refused(c, "counts add up to", [&] { c.reduce_scatter_v(in.sub(0, 2 * n + 1), out.sub(0, 2), table, sum{}); });
        refused(c, fmt::format("counts[{}] is 2, in has 1 elements", me),
                [&] { c.all_gather_v(in.sub(0, 1), out.sub(0, 2 * n), table); });
        refused(c, fmt::format("counts[{}] is 2, out has 3 elements", me),
                [&] { c.reduce_scatter_v(in.sub(0, 2 * n), out.sub(0, 3), table, sum{}); });
        table.push_back(0);
        refused(c, fmt::format("{} counts for {} ranks", n + 1, n),
                [&] { c.all_gather_v(in.sub(0, 2), out.sub(0, 2 * n), table); });
        refused(c, "counts for", [&] { c.all_to_all_v(in.sub(0, 2 * n), table, out.sub(0, 2 * n), table); });
        table.pop_back();
        refused(c, "counts add up to", [&] { c.all_to_all_v(in.sub(0, 2 * n + 1), table, out.sub(0, 2 * n), table); });
        refused(c, "counts add up to", [&] { c.all_to_all_v(in.sub(0, 2 * n), table, out.sub(0, 2 * n + 1), table); });
        std::vector<std::size_t> other = table;
        other[me] = 3;
        refused(c, fmt::format("rank {} sends itself 2 elements and receives 3", me),
                [&] { c.all_to_all_v(in.sub(0, 2 * n), table, out.sub(0, 2 * n + 1), other); });
        c.barrier();
    });
}

TEST_CASE("counts that only add up because they wrap are refused") {
    for_ranks([](auto& c) {
        if (c.size() == 1) { return; }
        std::vector<std::size_t> table(ranks_of(c), 0);
        table[0] = static_cast<std::size_t>(-1);
        table[1] = 3;  // the sum is 2
        std::vector<char> in(2), out(2);
        refused(c, "counts[0] is 18446744073709551615", [&] { c.all_gather_v(in, view<char>(out), table); });
        refused(c, "counts[0] is 18446744073709551615", [&] { c.all_to_all_v(in, table, view<char>(out), table); });
        c.barrier();
    });
}

TEST_CASE("roots, peers and color tables outside the communicator are refused") {
    for_ranks([](auto& c) {
        std::vector<float> x(ranks_of(c)), y(ranks_of(c));
        for (const int root : {-1, c.size(), 1 << 30}) {
            const std::string text = fmt::format("root {} is not one of {} ranks", root, c.size());
            refused(c, text, [&] { c.broadcast(view<float>(x), root); });
            refused(c, text, [&] { c.reduce(x, view<float>(y), sum{}, root); });
            refused(c, text, [&] { c.gather(view<float>(x).sub(0, 1), view<float>(y), root); });
            refused(c, text, [&] { c.scatter(x, view<float>(y).sub(0, 1), root); });
            const std::string peer = fmt::format("peer {} is not one of {} ranks", root, c.size());
            refused(c, peer, [&] { c.exchange(transfers{send_to(root, view<float>(x))}); });
            refused(c, peer, [&] { c.exchange(transfers{receive_from(root, view<float>(x))}); });
        }
        try {
            static_cast<void>(c.split(std::vector<int>(ranks_of(c) + 1, 0), "part"));
            throw failure("split took a table of the wrong size");
        } catch (const usage_error& e) {
            expect(std::string(e.what()).find("colors for") != std::string::npos, "{}", e.what());
        }
        c.barrier();
    });
}

TEST_CASE("in place is positional; every other overlap is refused") {
    for_ranks([](auto& c) {
        const std::size_t n = ranks_of(c), me = me_of(c);
        std::vector<float> data(8 * n + 8, 1);
        const std::vector<float> before = data;
        const view<float> v = data;
        const std::string text = "in and out overlap, but not as the in-place form asks";
        refused(c, "all_reduce: " + text, [&] { c.all_reduce(v.sub(0, 4), v.sub(1, 4), sum{}); });
        refused(c, "all_reduce: " + text, [&] { c.all_reduce(v.sub(3, 4), v.sub(0, 4), sum{}); });
        refused(c, "reduce_scatter: " + text, [&] { c.reduce_scatter(v.sub(0, 4 * n), v.sub(4 * me + 1, 4), sum{}); });
        if (n > 1) {
            const std::size_t other = (me + 1) % n;
            refused(c, "reduce_scatter: " + text,
                    [&] { c.reduce_scatter(v.sub(0, 4 * n), v.sub(4 * other, 4), sum{}); });
            refused(c, "all_gather: " + text, [&] { c.all_gather(v.sub(4 * other, 4), v.sub(0, 4 * n)); });
        }
        refused(c, "all_gather: " + text, [&] { c.all_gather(v.sub(4 * me + 1, 4), v.sub(0, 4 * n)); });
        std::vector<std::size_t> table(n, 4);
        refused(c, "reduce_scatter_v: " + text,
                [&] { c.reduce_scatter_v(v.sub(0, 4 * n), v.sub(4 * me + 1, 4), table, sum{}); });
        refused(c, "all_gather_v: " + text, [&] { c.all_gather_v(v.sub(4 * me + 2, 4), v.sub(0, 4 * n), table); });
        refused(c, "reduce: " + text, [&] { c.reduce(v.sub(0, 4), v.sub(1, 4), sum{}, c.rank()); });
        refused(c, "gather: " + text, [&] { c.gather(v.sub(4 * me + 1, 4), v.sub(0, 4 * n), c.rank()); });
        refused(c, "scatter: " + text, [&] { c.scatter(v.sub(0, 4 * n), v.sub(4 * me + 1, 4), c.rank()); });
        const std::string none = "in and out overlap; this collective has no in-place form";
        refused(c, "all_to_all: " + none, [&] { c.all_to_all(v.sub(0, 4 * n), v.sub(0, 4 * n)); });
        refused(c, "all_to_all: " + none, [&] { c.all_to_all(v.sub(0, 4 * n), v.sub(1, 4 * n)); });
        refused(c, "all_to_all_v: " + none, [&] { c.all_to_all_v(v.sub(0, 4 * n), table, v.sub(0, 4 * n), table); });
        expect(data == before, "a refused call wrote");

        // What only looks like an overlap is not one: neighbors, and in-place forms that are right.
        accepted("neighbors", [&] { c.all_reduce(v.sub(0, 4), v.sub(4, 4), sum{}); });
        accepted("neighbors", [&] { c.all_to_all(v.sub(0, 4 * n), v.sub(4 * n, 4 * n)); });
        accepted("an empty part inside", [&] { c.all_reduce(v.sub(2, 0), v.sub(2, 0), sum{}); });
        c.barrier();
    });
}

TEST_CASE("messages of a group may not touch what is received") {
    for_ranks([](auto& c) {
        const int me = c.rank();
        std::vector<float> data(16, 1);
        const view<float> v = data;
        const std::string text = "overlaps one that is received";
        refused(c, text, [&] { c.exchange(transfers{send_to(me, v.sub(0, 4)), receive_from(me, v.sub(0, 4))}); });
        refused(c, text, [&] { c.exchange(transfers{send_to(me, v.sub(2, 4)), receive_from(me, v.sub(0, 4))}); });
        refused(c, text, [&] { c.exchange(transfers{send_to(me, v.sub(0, 4)), receive_from(me, v.sub(3, 4))}); });
        refused(c, text, [&] { c.exchange(transfers{receive_from(me, v.sub(0, 4)), receive_from(me, v.sub(3, 4))}); });
        // A long message in front, a short one between, then one that meets the long one.
        refused(c, text, [&] {
            c.exchange(transfers{receive_from(me, v.sub(0, 12)), send_to(me, v.sub(13, 1)), send_to(me, v.sub(11, 1))});
        });
        refused(c, text, [&] {
            c.exchange(transfers{send_to(me, v.sub(0, 12)), send_to(me, v.sub(1, 2)), receive_from(me, v.sub(8, 2))});
        });
        // Sends may share their source, and an empty receive touches nothing.
        accepted("sends of the same data", [&] {
            c.exchange(transfers{send_to(me, v.sub(0, 4)), send_to(me, v.sub(2, 4)), receive_from(me, v.sub(6, 4)),
                                 receive_from(me, v.sub(10, 4)), send_to(me, v.sub(0, 0)),
                                 receive_from(me, v.sub(1, 0))});
        });
        c.barrier();
    });
}
