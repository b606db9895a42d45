// Public bug reports that every backend answers in the same way: mismatched calls, empty ones, aliasing, accumulators,
// the mean's divisor, bits, creation histories.
#include <conformance/suite.hpp>  // backend, helpers

#include <tutti/comm/checked.hpp>  // fingerprints

using namespace tutti;
using namespace tutti::test;
using comm::checked;

namespace {

// Every rank makes the call that `disagree` makes of it; all must name the last rank and say `text`.
template <class Disagree> void all_name_the_last(std::string_view text, Disagree disagree) {
    for_ranks([&](auto& own) {
        if (own.size() == 1) { return; }
        checked<backend::communicator> c(std::move(own));
        const bool odd_one = c.rank() == c.size() - 1;
        try {
            disagree(c, odd_one);
            throw failure(fmt::format("rank {} did not notice: {}", c.rank(), text));
        } catch (const mismatch_error& e) {
            expect(e.ranks() == std::vector<int>{c.size() - 1}, "'{}' names {} ranks", e.what(), e.ranks().size());
            expect(std::string(e.what()).find(text) != std::string::npos, "'{}' does not say '{}'", e.what(), text);
        }
    });
}

template <class T, class Comm> T one_sum(Comm& c, T mine) {
    std::vector<T> v{mine};
    c.all_reduce(v, view<T>(v), sum{});
    return v[0];
}

}  // namespace

// --- B: mismatched calls ---------------------------------------------------------------------------------------------

TEST_CASE("NVIDIA/nccl#1417, NVIDIA/nccl#1394: counts that differ sometimes hang, sometimes give wrong numbers") {
    all_name_the_last("all_reduce: count differs (rank 0: 1024", [](auto& c, bool odd_one) {
        std::vector<float> v(odd_one ? 1023 : 1024);
        c.all_reduce(v, view<float>(v), sum{});
    });
}
TEST_CASE("NVIDIA/nccl#296: types and operators that differ are not told") {
    all_name_the_last("all_reduce: type differs (rank 0: int32", [](auto& c, bool odd_one) {
        std::vector<float> f(8);
        std::vector<int> i(8);
        if (odd_one) {
            c.all_reduce(f, view<float>(f), sum{});
        } else {
            c.all_reduce(i, view<int>(i), sum{});
        }
    });
    all_name_the_last("all_reduce: operator differs (rank 0: sum", [](auto& c, bool odd_one) {
        std::vector<float> v(8);
        if (odd_one) {
            c.all_reduce(v, view<float>(v), tutti::max{});
        } else {
            c.all_reduce(v, view<float>(v), sum{});
        }
    });
}
TEST_CASE("pytorch/pytorch#39706: roots that differ") {
    all_name_the_last("broadcast: root differs (rank 0: 0", [](auto& c, bool odd_one) {
        std::vector<float> v(8);
        c.broadcast(view<float>(v), odd_one ? 1 : 0);
    });
}
TEST_CASE("open-mpi/ompi#8060, pytorch/pytorch#146468: a call with nothing to send still counts") {
    for_ranks([](auto& c) {
        std::vector<float> none;
        const auto number = [&] {  // of the next call, as an error tells it
            try {
                c.broadcast(view<float>(none), -1);
            } catch (const usage_error& e) { return e.context().sequence; }
            throw failure("root -1 was accepted");
        };
        const std::uint64_t before = number();
        c.all_reduce(none, view<float>(none), sum{});
        c.all_gather(none, view<float>(none));
        c.barrier();
        expect(number() == before + 3, "three calls moved the number from {} to {}", before, number());
        // Ranks with nothing to give take part, and stay in step.
        std::vector<std::size_t> table(ranks_of(c), 0);
        table[0] = 2;
        std::vector<int> mine(table[me_of(c)], 5), all(2);
        c.all_gather_v(mine, view<int>(all), table);
        expect(all[0] == 5 && one_sum(c, 1) == c.size(), "{} {}", all[0], all[1]);
    });
}

// --- E: sizes and aliasing -------------------------------------------------------------------------------------------

TEST_CASE("pytorch/pytorch#85234, openucx/ucc#490, pytorch/gloo#179: zero elements divide by zero or are refused") {
    for_ranks([](auto& c) {
        const std::vector<std::size_t> zeros(ranks_of(c), 0);
        const view<float> v;
        for (int root = 0; root < c.size(); ++root) {
            c.broadcast(v, root);
            c.reduce(v, v, sum{}, root);
            c.gather(v, v, root);
            c.scatter(v, v, root);
        }
        c.all_reduce(v, v, mean{});
        c.reduce_scatter(v, v, sum{});
        c.reduce_scatter_v(v, v, zeros, sum{});
        c.all_gather(v, v);
        c.all_gather_v(v, v, zeros);
        c.all_to_all(v, v);
        c.all_to_all_v(v, zeros, v, zeros);
        c.exchange(std::vector{comm::send_to(c.rank(), v), comm::receive_from(c.rank(), v)});
        expect(one_sum(c, 1) == c.size(), "out of step after empty calls");
    });
}
TEST_CASE("LLNL/Aluminum#198, openxla/xla#46982: empty parts among full ones in all_to_all_v") {
    for_ranks([](auto& c) {
        // Only neighbors talk: rank r sends r + 1 numbers to the next rank, nothing to anybody else.
        const std::size_t n = ranks_of(c), next = (me_of(c) + 1) % n, previous = (me_of(c) + n - 1) % n;
        std::vector<std::size_t> sends(n, 0), receives(n, 0);
        sends[next] = me_of(c) + 1;
        receives[previous] = previous + 1;
        const std::vector<std::uint64_t> in(sends[next], me_of(c));
        std::vector<std::uint64_t> out(receives[previous], 99);
        c.all_to_all_v(in, sends, view<std::uint64_t>(out), receives);
        expect(out == std::vector<std::uint64_t>(previous + 1, previous), "rank {} got something else", c.rank());
    });
}
TEST_CASE("aryafallahi/mithra#60, trilinos/Trilinos#850, pmodels/mpich#2049: one buffer given as input and output") {
    for_ranks([](auto& c) {
        const std::size_t n = ranks_of(c), me = me_of(c);
        std::vector<int> data(4 * n + 1);
        const view<int> v = data;
        const auto fresh = [&] {
            for (std::size_t i = 0; i < data.size(); ++i) { data[i] = static_cast<int>(i + 1); }
        };
        // The exact alias is the in-place form, and gives what two buffers give.
        fresh();
        c.all_reduce(v.sub(0, 4), v.sub(0, 4), sum{});
        expect(data[3] == 4 * c.size() && data[4] == 5, "all_reduce in place: {} {}", data[3], data[4]);
        // all_gather and reduce_scatter: the rank's own part of the larger view.
        fresh();
        c.reduce_scatter(v.sub(0, 4 * n), v.sub(4 * me, 4), sum{});
        expect(data[4 * me] == static_cast<int>(4 * me + 1) * c.size(), "reduce_scatter in place: {}", data[4 * me]);
        std::fill(data.begin(), data.end(), -1);
        for (std::size_t i = 0; i < 4; ++i) { data[4 * me + i] = static_cast<int>(4 * me + i); }
        c.all_gather(v.sub(4 * me, 4), v.sub(0, 4 * n));
        for (std::size_t i = 0; i < 4 * n; ++i) {
            expect(data[i] == static_cast<int>(i), "all_gather in place: {}", data[i]);
        }
        // Anything else is refused, with the data as it was.
        fresh();
        const std::vector<int> before = data;
        int refusals = 0;
        const auto refused = [&](auto call) {
            try {
                call();
            } catch (const usage_error&) { ++refusals; }
        };
        refused([&] { c.all_reduce(v.sub(0, 4), v.sub(1, 4), sum{}); });
        refused([&] { c.all_gather(v.sub(4 * me + 1, 4), v.sub(0, 4 * n)); });
        refused([&] { c.reduce_scatter(v.sub(0, 4 * n), v.sub(4 * me + 1, 4), sum{}); });
        refused([&] { c.all_to_all(v.sub(0, 4 * n), v.sub(0, 4 * n)); });  // pmodels/mpich#1564: no in-place form
        expect(refusals == 4 && data == before, "{} of 4 refused", refusals);
    });
}

// --- F: numbers ------------------------------------------------------------------------------------------------------

TEST_CASE_TEMPLATE("NVIDIA/nccl#1026, microsoft/mscclpp#765: 16-bit sums are kept in float", T, float16, bfloat16) {
    for_ranks([](auto& c) {
        const std::size_t count = 3000;
        rows<T> in(ranks_of(c), std::vector<T>(count));
        for (std::size_t r = 0; r < in.size(); ++r) {
            for (std::size_t i = 0; i < count; ++i) {
                // Beside the large addend of rank 0 the others would vanish one by one if each step were rounded.
                in[r][i] =
                    r == 0 ? static_cast<T>(std::is_same_v<T, float16> ? 2048.0f : 256.0f) : random_element<T>(r, i);
            }
        }
        std::vector<T> out(count);
        c.all_reduce(in[me_of(c)], view<T>(out), sum{});
        for (std::size_t i = 0; i < count; ++i) {
            const bounded b = summed_exactly(op_kind::sum, in, i, false);
            const auto got = static_cast<long double>(static_cast<float>(out[i]));
            expect(std::fabs(got - b.value) <= b.error, "element {}: {}, exact {}, bound {}", i, got, b.value, b.error);
        }
        // One rounding, of the exact sum: whole numbers that only fit together.
        const auto ones = static_cast<float>(c.size() - 1) * 2;
        const float large = std::is_same_v<T, float16> ? 2048.0f : 256.0f;
        const T got = one_sum(c, static_cast<T>(c.rank() == 0 ? large : 2.0f));
        expect(got.bits == static_cast<T>(large + ones).bits, "{} is not {}", static_cast<float>(got), large + ones);
    });
}
TEST_CASE("meta-pytorch/torchcomms#287: the mean of a split communicator divides by its own size") {
    for_ranks([](auto& c) {
        std::vector<int> colors;
        for (int r = 0; r < c.size(); ++r) { colors.push_back(r == 0 ? 0 : 1); }
        auto child = c.split(colors, "part");
        for (const std::size_t count : {1u, 5000u}) {
            std::vector<float> v(count, static_cast<float>(child->size()));
            child->all_reduce(v, view<float>(v), mean{});
            expect(v[count - 1] == static_cast<float>(child->size()), "mean over {} ranks: {}", child->size(), v[0]);
            std::vector<double> w(count * ranks_of(*child), 3.0), part(count);
            child->reduce_scatter(w, view<double>(part), mean{});
            expect(part[count - 1] == 3.0, "mean of reduce_scatter: {}", part[0]);
        }
    });
    static_assert(!reducible<int, mean> && !reducible<bool, mean>);  // integers have no one rounding
}

// --- G: bits ---------------------------------------------------------------------------------------------------------

TEST_CASE("NVIDIA/nccl#855, open-mpi/ompi#12258: all ranks hold the same bits") {
    for_ranks([](auto& c) {
        for (const std::size_t count : {1u, 1000u, 5000u, 100003u}) {
            std::vector<float> v(count);
            for (std::size_t i = 0; i < count; ++i) { v[i] = random_element<float>(me_of(c), i); }
            c.all_reduce(v, view<float>(v), sum{});
            expect_equal_on_all(c, view<float>(v), fmt::format("all_reduce of {}", count));
        }
    });
}
TEST_CASE_TEMPLATE("NVIDIA/nccl#157, ROCm/rocm-systems#11661, NVIDIA/nccl#1975: bits do not depend on bucketing", T,
                   float, bfloat16) {
    for_ranks([](auto& c) {
        // Where the backend leaves the order open, numbers whose sums are exact keep the test.
        constexpr std::size_t count = 20011;
        std::vector<T> in(count);
        for (std::size_t i = 0; i < count; ++i) {
            in[i] =
                backend::deterministic ? random_element<T>(me_of(c), i) : small_element<T>(op_kind::sum, me_of(c), i);
        }
        std::vector<T> whole(count);
        c.all_reduce(in, view<T>(whole), sum{});
        for (const std::size_t bucket : {1009u, 2049u, 4096u, 4097u, 13000u}) {
            std::vector<T> parts(count);
            for (std::size_t first = 0; first < count; first += bucket) {
                const std::size_t n = std::min(bucket, count - first);
                c.all_reduce(view<const T>(in).sub(first, n), view<T>(parts).sub(first, n), sum{});
            }
            expect_same(parts, whole, fmt::format("buckets of {}", bucket));
        }
        // The same sums by other collectives.
        std::vector<T> reduced(count);
        c.reduce(in, view<T>(reduced), sum{}, 0);
        if (c.rank() == 0) { expect_same(reduced, whole, "reduce"); }
        const std::size_t part = count / ranks_of(c);
        std::vector<T> slice(part);
        c.reduce_scatter(view<const T>(in).sub(0, part * ranks_of(c)), view<T>(slice), sum{});
        const auto first = whole.begin() + static_cast<std::ptrdiff_t>(me_of(c) * part);
        expect_same(slice, std::vector<T>(first, first + static_cast<std::ptrdiff_t>(part)), "reduce_scatter");
    });
}

// --- H: histories ----------------------------------------------------------------------------------------------------

TEST_CASE("meta-pytorch/torchcomms#3093: ranks that have made different numbers of communicators make one together") {
    for_ranks([](auto& c) {
        std::vector<int> colors;
        for (int r = 0; r < c.size(); ++r) { colors.push_back(r == 0 ? 0 : 1); }
        auto part = c.split(colors, "part");
        std::vector<backend::communicator> history;
        for (int i = 0; i < (c.rank() == 0 ? 5 : 2); ++i) { history.push_back(part->duplicate("more")); }
        auto together = c.duplicate("together");
        expect(one_sum(together, 1) == c.size(), "the communicator is not whole");
        for (auto& h : history) { expect(one_sum(h, 1) == part->size(), "a child lost its way"); }
    });
}
