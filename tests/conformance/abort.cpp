// Failure on the backend under test, where the process survives it: disagreement, abort, and what comes after.
#include <atomic>  // outcomes
#include <chrono>  // deadlines

#include <tutti/core/deadline.hpp>  // deadline

#include <conformance/suite.hpp>  // backend, helpers

using namespace tutti;
using namespace tutti::test;

namespace {

// The call must throw aborted_error with the cause in its text.
template <class Call> void aborted(std::string_view cause, Call call) {
    try {
        call();
    } catch (const aborted_error& e) {
        expect(std::string_view(e.what()).find(cause) != std::string_view::npos, "the cause is missing in '{}'",
               e.what());
        return;
    }
    throw failure(fmt::format("no aborted_error after '{}'", cause));
}

// Everything that a communicator can do, tried after the failure.
template <class Comm> void stays_failed(Comm& c, std::string_view cause) {
    const std::size_t n = ranks_of(c);
    std::vector<float> x(n), y(n);
    std::vector<std::size_t> ones(n, 1);
    const view<float> in = x, out = y;
    for (int again = 0; again < 2; ++again) {
        aborted(cause, [&] { c.barrier(); });
        aborted(cause, [&] { c.all_reduce(in, out, sum{}); });
        aborted(cause, [&] { c.reduce(in, out, sum{}, 0); });
        aborted(cause, [&] { c.reduce_scatter(in, out.sub(0, 1), sum{}); });
        aborted(cause, [&] { c.reduce_scatter_v(in, out.sub(0, 1), ones, sum{}); });
        aborted(cause, [&] { c.all_gather(in.sub(0, 1), out); });
        aborted(cause, [&] { c.all_gather_v(in.sub(0, 1), out, ones); });
        aborted(cause, [&] { c.broadcast(out, 0); });
        aborted(cause, [&] { c.gather(in.sub(0, 1), out, 0); });
        aborted(cause, [&] { c.scatter(in, out.sub(0, 1), 0); });
        aborted(cause, [&] { c.all_to_all(in, out); });
        aborted(cause, [&] { c.all_to_all_v(in, ones, out, ones); });
        aborted(cause, [&] { c.exchange(std::vector{comm::send_to(0, in)}); });
        aborted(cause, [&] { c.exchange(std::vector<comm::transfer<host_memory>>{}); });
        aborted(cause, [&] { c.synchronize(); });
        aborted(cause, [&] { c.agree(1, "hash"); });
        aborted(cause, [&] { static_cast<void>(c.gather_control({})); });
        aborted(cause, [&] { static_cast<void>(c.duplicate("late")); });
        aborted(cause, [&] { static_cast<void>(c.split(std::vector<int>(n, 0), "late")); });
    }
}

}  // namespace

TEST_CASE("agree names the ranks that differ, on every rank") {
    for_ranks([](auto& c) {
        if (c.size() == 1) { return; }
        // The last rank differs; with two ranks it is rank 0's word against it, and the lower rank is the reference.
        const int odd_one = c.size() - 1;
        bool thrown = false;
        try {
            c.agree(c.rank() == odd_one ? 0xbadu : 0x900du, "parameter list");
        } catch (const mismatch_error& e) {
            thrown = true;
            expect(e.ranks() == std::vector<int>{odd_one}, "{} ranks named, first {}", e.ranks().size(),
                   e.ranks().at(0));
            const std::string want = fmt::format(
                "agree: parameter list differs (rank 0: 000000000000900d, rank {}: 0000000000000bad), call", odd_one);
            expect(std::string(e.what()).starts_with(want), "'{}'", e.what());
            expect(e.context().operation == "agree" && e.context().rank == c.rank(), "{}", e.context().operation);
        }
        expect(thrown, "rank {} did not notice", c.rank());
        stays_failed(c, "parameter list differs");
    });
}

TEST_CASE("agree takes the side of the majority") {
    for_ranks([](auto& c) {
        if (c.size() < 3) { return; }
        try {
            c.agree(c.rank() == 0 ? 1 : 2, "hash");
            throw failure("nobody noticed");
        } catch (const mismatch_error& e) {
            expect(e.ranks() == std::vector<int>{0}, "rank {} named", e.ranks().at(0));
        }
    });
}

namespace {
// The last rank's call differs: every rank must be told so, before anything was written.
template <class Call> void differs(std::string_view text, Call call) {
    for_ranks([&](auto& c) {
        if (c.size() == 1) { return; }
        const int odd_one = c.size() - 1;
        guarded<float> out(20000);
        const std::vector<float> in(20000, 1.0f);
        try {
            call(c, view<const float>(in), out.all(), c.rank() == odd_one);
            throw failure(fmt::format("rank {} was not told: {}", c.rank(), text));
        } catch (const mismatch_error& e) {
            expect(e.ranks() == std::vector<int>{odd_one}, "'{}' names rank {}", e.what(), e.ranks().at(0));
            expect(std::string_view(e.what()).find(text) != std::string_view::npos, "'{}' does not say '{}'", e.what(),
                   text);
        }
        expect(out.untouched(), "{}: something was written", text);
    });
}
}  // namespace

TEST_CASE("ranks that disagree in a call are told, all of them") {
    for (const std::size_t count : {std::size_t{8}, std::size_t{10000}}) {
        differs("count differs (rank 0: ", [&](auto& c, auto in, auto out, bool odd) {
            c.all_reduce(in.sub(0, count + odd), out.sub(0, count + odd), sum{});
        });
        differs("operator differs (rank 0: sum", [&](auto& c, auto in, auto out, bool odd) {
            if (odd) {
                c.all_reduce(in.sub(0, count), out.sub(0, count), tutti::max{});
            } else {
                c.all_reduce(in.sub(0, count), out.sub(0, count), sum{});
            }
        });
        differs("root differs (rank 0: 0", [&](auto& c, auto in, auto out, bool odd) {
            c.reduce(in.sub(0, count), out.sub(0, count), sum{}, odd ? 1 : 0);
        });
        differs("type differs (rank 0: float32", [&](auto& c, auto in, auto out, bool odd) {
            std::vector<int> whole(count), result(count);
            if (odd) {
                c.all_reduce(whole, view<int>(result), sum{});
            } else {
                c.all_reduce(in.sub(0, count), out.sub(0, count), sum{});
            }
        });
        differs(" differs (rank 0: ", [&](auto& c, auto in, auto out, bool odd) {
            if (odd) {
                c.barrier();
            } else {
                c.all_gather(in.sub(0, count / ranks_of(c)), out.sub(0, count / ranks_of(c) * ranks_of(c)));
            }
        });
        differs("count", [&](auto& c, auto in, auto out, bool odd) {
            // The sum and the own part agree, the order of two others does not; with two ranks the sums differ.
            std::vector<std::size_t> table(ranks_of(c), count / ranks_of(c));
            if (ranks_of(c) > 2) {
                table[0] += odd ? 1 : 0, table[1] -= odd ? 1 : 0;
            } else {
                table[me_of(c)] += odd ? 1 : 0;
            }
            c.all_gather_v(in.sub(0, table[me_of(c)]), out.sub(0, total(table)), table);
        });
    }
}

TEST_CASE("an abort reaches the root, its children, and every later call") {
    for_ranks([](auto& c) {
        auto lane = c.duplicate("lane");
        std::vector<int> colors;
        for (int r = 0; r < c.size(); ++r) { colors.push_back(r % 2); }
        auto halves = c.split(colors, "half");
        auto deep = halves->duplicate("deep");
        if (c.rank() == c.size() - 1) {
            c.barrier();
            deep.abort("the disk is full");
        }
        // The others are told while they wait, perhaps still for the first barrier.
        else {
            aborted("the disk is full", [&] {
                for (;;) { c.barrier(); }
            });
        }
        stays_failed(c, "the disk is full");
        stays_failed(lane, "the disk is full");
        stays_failed(*halves, "the disk is full");
        stays_failed(deep, "the disk is full");
        c.abort("another cause");  // the first one stands
        stays_failed(c, "the disk is full");
    });
}

namespace {
// How many ranks are told the cause when one throws; what the caller is told goes to `thrown`.
int told_of_failure(int n, int culprit, std::string& thrown) {
    std::atomic<int> told = 0;
    try {
        backend::run(n, [&](auto& c) {
            c.barrier();
            if (c.rank() == culprit) { throw std::domain_error("no such token"); }
            std::vector<float> x(5000);
            aborted("no such token", [&] {  // a rank that hears late may find its work done first
                for (const deadline limit = after(std::chrono::seconds(20)); clock_type::now() < limit;) {
                    c.all_reduce(x, view<float>(x), sum{});
                }
            });
            ++told;
        });
    } catch (const std::exception& e) { thrown = e.what(); }
    return told;
}
}  // namespace

TEST_CASE("a rank that fails ends the wait of all others, with the cause") {
    for (const int n : backend::sizes()) {
        CAPTURE(n);
        for (int culprit = 0; culprit < n; ++culprit) {
            std::string thrown;
            int told = 0;
            // A culprit that stands still for a tenth of a second on its way out is known to have left, and no more.
            const deadline limit = after(std::chrono::seconds(20));
            do {
                told = told_of_failure(n, culprit, thrown);
            } while ((told != n - 1 || thrown != "no such token") && clock_type::now() < limit);
            CHECK(told == n - 1);
            CHECK(thrown == "no such token");
        }
    }
}
