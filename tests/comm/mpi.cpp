// mpi: every kind of call, whole and in pieces, in place and not, with both failure policies; element types; foreign
// communicators; threads. What must hold when something fails is in mpi_failures.cpp and its neighbors.
#include <doctest/doctest.h>  // test cases

#include <tutti/comm/mpi.hpp>  // what is tested

#include <array>    // tables
#include <chrono>   // deadlines
#include <cmath>    // isnan
#include <cstdint>  // fixed-width integers
#include <cstring>  // memcmp
#include <limits>   // NaN, infinities
#include <memory>   // communicators that end early
#include <numeric>  // accumulate
#include <string>   // names
#include <thread>   // two communicators at once
#include <utility>  // move
#include <vector>   // data

using namespace std::chrono_literals;
using namespace tutti;
using comm::failure_policy;
using comm::mpi;
using comm::mpi_options;
using comm::receive_from;
using comm::send_to;
using comm::transfer;

namespace {

mpi_options pieces_of(std::size_t largest, failure_policy policy = failure_policy::end_job) {
    mpi_options o;
    o.timeout = 60s;
    o.largest_call = largest;
    o.on_failure = policy;
    return o;
}

// Element i of rank r's input: integers this small have exact sums in every type but the 8-bit ones.
template <class T> T value(int r, std::size_t i) {
    return static_cast<T>(static_cast<float>((r * 7 + static_cast<int>(i % 11)) % 5 - 2));
}
template <class T> std::vector<T> input(int r, std::size_t n, std::size_t from = 0) {
    std::vector<T> v(n);
    for (std::size_t i = 0; i < n; ++i) { v[i] = value<T>(r, from + i); }
    return v;
}
template <class T> std::vector<T> summed(int ranks, std::size_t n, std::size_t from = 0) {
    std::vector<T> v(n);
    for (std::size_t i = 0; i < n; ++i) {
        float s = 0;
        for (int r = 0; r < ranks; ++r) { s += static_cast<float>(value<T>(r, from + i)); }
        v[i] = static_cast<T>(s);
    }
    return v;
}
template <class T> bool same(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
template <class T> std::vector<T> part_of(const std::vector<T>& v, std::size_t first, std::size_t n) {
    return {v.begin() + static_cast<std::ptrdiff_t>(first), v.begin() + static_cast<std::ptrdiff_t>(first + n)};
}

// Calls every kind with n elements a rank. Ranks for which `in_place` holds work in place where the kind has that form.
template <class T> void every_kind(mpi& c, std::size_t n, bool in_place) {
    const int ranks = c.size();
    const int me = c.rank();
    const auto P = static_cast<std::size_t>(ranks);
    const auto r = static_cast<std::size_t>(me);
    const int root = ranks - 1;
    const bool is_root = me == root;
    CAPTURE(n);
    CAPTURE(in_place);

    std::vector<T> all;  // the inputs of all ranks
    for (int p = 0; p < ranks; ++p) {
        const auto one = input<T>(p, n);
        all.insert(all.end(), one.begin(), one.end());
    }
    {
        auto in = input<T>(me, n);
        std::vector<T> out(n);
        if (in_place) {
            c.all_reduce(view(in), view(in), sum{});
            CHECK(same(in, summed<T>(ranks, n)));
        } else {
            c.all_reduce(view(in), view(out), sum{});
            CHECK(same(out, summed<T>(ranks, n)));
            CHECK(same(in, input<T>(me, n)));
        }
    }
    {
        auto in = input<T>(me, n);
        std::vector<T> out(is_root ? n : 0);
        if (in_place && is_root) {
            c.reduce(view(in), view(in), sum{}, root);
            CHECK(same(in, summed<T>(ranks, n)));
        } else {
            c.reduce(view(in), view(out), sum{}, root);
            if (is_root) { CHECK(same(out, summed<T>(ranks, n))); }
            CHECK(same(in, input<T>(me, n)));
        }
    }
    {
        auto in = input<T>(me, n * P);
        const auto before = in;
        std::vector<T> out(n);
        if (in_place) {
            c.reduce_scatter(view(in), view(in).sub(r * n, n), sum{});
            out = part_of(in, r * n, n);
            for (std::size_t i = 0; i < n; ++i) { in[r * n + i] = before[r * n + i]; }
        } else {
            c.reduce_scatter(view(in), view(out), sum{});
        }
        CHECK(same(out, summed<T>(ranks, n, r * n)));
        CHECK(same(in, before));  // the parts of the others are as they were
    }
    std::vector<std::size_t> uneven(P);  // rank p has p mod 3 times n elements: some have none
    for (std::size_t p = 0; p < P; ++p) { uneven[p] = p % 3 * n; }
    const auto total = std::accumulate(uneven.begin(), uneven.end(), std::size_t{0});
    const auto before_me = std::accumulate(uneven.begin(), uneven.begin() + me, std::size_t{0});
    {
        auto in = input<T>(me, total);
        std::vector<T> out(uneven[r]);
        if (in_place) {
            c.reduce_scatter_v(view(in), view(in).sub(before_me, uneven[r]), uneven, sum{});
            out = part_of(in, before_me, uneven[r]);
        } else {
            c.reduce_scatter_v(view(in), view(out), uneven, sum{});
        }
        CHECK(same(out, summed<T>(ranks, uneven[r], before_me)));
    }
    {
        const auto in = input<T>(me, n);
        std::vector<T> out(n * P);
        if (in_place) {
            std::copy(in.begin(), in.end(), out.begin() + static_cast<std::ptrdiff_t>(r * n));
            c.all_gather(view(out).sub(r * n, n), view(out));
        } else {
            c.all_gather(view(in), view(out));
        }
        CHECK(same(out, all));
    }
    {
        const auto in = input<T>(me, uneven[r]);
        std::vector<T> expected;
        for (int p = 0; p < ranks; ++p) {
            const auto one = input<T>(p, uneven[static_cast<std::size_t>(p)]);
            expected.insert(expected.end(), one.begin(), one.end());
        }
        std::vector<T> out(total);
        if (in_place) {
            std::copy(in.begin(), in.end(), out.begin() + static_cast<std::ptrdiff_t>(before_me));
            c.all_gather_v(view(out).sub(before_me, uneven[r]), view(out), uneven);
        } else {
            c.all_gather_v(view(in), view(out), uneven);
        }
        CHECK(same(out, expected));
    }
    {
        auto data = is_root ? input<T>(root, n) : std::vector<T>(n);
        c.broadcast(view(data), root);
        CHECK(same(data, input<T>(root, n)));
    }
    {
        const auto in = input<T>(me, n);
        std::vector<T> out(is_root ? n * P : 0);
        if (in_place && is_root) {
            std::copy(in.begin(), in.end(), out.begin() + static_cast<std::ptrdiff_t>(r * n));
            c.gather(view(out).sub(r * n, n), view(out), root);
        } else {
            c.gather(view(in), view(out), root);
        }
        if (is_root) { CHECK(same(out, all)); }
    }
    {
        auto in = is_root ? all : std::vector<T>();
        std::vector<T> out(n);
        if (in_place && is_root) {
            c.scatter(view(in), view(in).sub(r * n, n), root);
            CHECK(same(in, all));
        } else {
            c.scatter(view(in), view(out), root);
            CHECK(same(out, input<T>(me, n)));
        }
    }
    {
        std::vector<T> in;
        std::vector<T> expected;
        for (int p = 0; p < ranks; ++p) {
            const auto sent = input<T>(me * ranks + p, n);
            const auto received = input<T>(p * ranks + me, n);
            in.insert(in.end(), sent.begin(), sent.end());
            expected.insert(expected.end(), received.begin(), received.end());
        }
        std::vector<T> out(n * P);
        c.all_to_all(view(in), view(out));
        CHECK(same(out, expected));
    }
    {
        // rank a sends (a + 2b) mod 3 times n elements to rank b
        const auto amount = [n](int a, int b) { return static_cast<std::size_t>((a + 2 * b) % 3) * n; };
        std::vector<std::size_t> sent(P);
        std::vector<std::size_t> received(P);
        std::vector<T> in;
        std::vector<T> expected;
        for (int p = 0; p < ranks; ++p) {
            sent[static_cast<std::size_t>(p)] = amount(me, p);
            received[static_cast<std::size_t>(p)] = amount(p, me);
            const auto out_part = input<T>(me * ranks + p, amount(me, p));
            const auto in_part = input<T>(p * ranks + me, amount(p, me));
            in.insert(in.end(), out_part.begin(), out_part.end());
            expected.insert(expected.end(), in_part.begin(), in_part.end());
        }
        std::vector<T> out(expected.size());
        c.all_to_all_v(view(in), sent, view(out), received);
        CHECK(same(out, expected));
    }
    {
        // two messages to the right, of different sizes, matched in order; itself when alone
        const int right = (me + 1) % ranks;
        const int left = (me + ranks - 1) % ranks;
        const auto first = input<T>(me, n);
        const auto second = input<T>(me, 2 * n, 3);
        std::vector<T> got_first(n);
        std::vector<T> got_second(2 * n);
        const std::array transfers{send_to(right, view(first)), send_to(right, view(second)),
                                   receive_from(left, view(got_first)), receive_from(left, view(got_second))};
        c.exchange(transfers);
        CHECK(same(got_first, input<T>(left, n)));
        CHECK(same(got_second, input<T>(left, 2 * n, 3)));
    }
    c.barrier();
}

void ignore_error(MPI_Comm*, int*, ...) {}

template <class T> T of(double x) { return static_cast<T>(static_cast<float>(x)); }

}  // namespace

TEST_CASE("mpi: every kind of call, whole") {
    mpi world(pieces_of(std::size_t{1} << 30));
    for (const std::size_t n : {0u, 1u, 5u, 1000u}) {
        every_kind<float>(world, n, false);
        every_kind<std::int32_t>(world, n, true);
    }
    every_kind<double>(world, 30000, true);  // above every eager limit
}

TEST_CASE("mpi: some ranks in place, others not") {
    mpi world(pieces_of(std::size_t{1} << 30));
    for (const std::size_t n : {3u, 50000u}) { every_kind<float>(world, n, world.rank() % 2 == 0); }
}

// kamping-site/kamping#113, merthidayetoglu/CommBench#2, open-mpi/ompi#9942: counts that an int does not hold, here
// with the limit brought down to where pieces are few elements
TEST_CASE("mpi: every kind of call, in pieces") {
    for (const std::size_t largest : {1u, 24u, 100u}) {
        mpi world(pieces_of(largest));
        CAPTURE(largest);
        for (const std::size_t n : {0u, 1u, 40u}) {
            every_kind<float>(world, n, false);
            every_kind<std::int64_t>(world, n, true);
        }
        every_kind<float16>(world, 40, world.rank() % 2 == 1);
    }
}

TEST_CASE("mpi: every kind of call, on copies") {
    for (const std::size_t largest : {std::size_t{24}, std::size_t{1} << 30}) {
        mpi world(pieces_of(largest, failure_policy::throw_error));
        for (const std::size_t n : {0u, 1u, 200u}) {
            every_kind<float>(world, n, false);
            every_kind<std::int32_t>(world, n, true);
            every_kind<bfloat16>(world, n, world.rank() % 2 == 0);
        }
    }
}

TEST_CASE("mpi: what is allocated for a call is given back, up to the pieces kept for the next") {
    mpi world(pieces_of(std::size_t{1} << 30));
    every_kind<float16>(world, 3000, true);
    const std::size_t kept = world.queue().account().live();
    for (int i = 0; i < 3; ++i) { every_kind<float16>(world, 3000, true); }
    CHECK(world.queue().account().live() == kept);
    std::vector<bfloat16> large(std::size_t{9} << 20);  // two pieces when widened
    world.all_reduce(view(large), view(large), sum{});
    CHECK(world.queue().account().live() <= std::size_t{32} << 20);
}

TEST_CASE_TEMPLATE("mpi: integers, every width", T, std::int8_t, std::int16_t, std::int32_t, std::int64_t, std::uint8_t,
                   std::uint16_t, std::uint32_t, std::uint64_t) {
    mpi world(pieces_of(64));
    const int ranks = world.size();
    const T low = std::numeric_limits<T>::min();
    const T high = std::numeric_limits<T>::max();
    // max and min see the sign; sums and products wrap (NVIDIA/nccl#422)
    std::array<T, 3> mine{static_cast<T>(world.rank() == 0 ? high : low), static_cast<T>(world.rank()), high};
    std::array<T, 3> out{};
    world.all_reduce(view(mine), view(out), tutti::max{});
    CHECK(out == std::array<T, 3>{high, static_cast<T>(ranks - 1), high});
    world.all_reduce(view(mine), view(out), tutti::min{});
    CHECK(out == std::array<T, 3>{ranks == 1 ? high : low, 0, high});
    std::array<T, 3> sums{};
    std::array<T, 3> products{};
    world.all_reduce(view(mine), view(sums), sum{});
    world.all_reduce(view(mine), view(products), product{});
    std::array<std::uint64_t, 3> expected_sum{};
    std::array<std::uint64_t, 3> expected_product{1, 1, 1};
    for (int r = 0; r < ranks; ++r) {
        const std::array<T, 3> theirs{static_cast<T>(r == 0 ? high : low), static_cast<T>(r), high};
        for (std::size_t i = 0; i < 3; ++i) {
            expected_sum[i] += static_cast<std::uint64_t>(theirs[i]);
            expected_product[i] *= static_cast<std::uint64_t>(theirs[i]);
        }
    }
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK(sums[i] == static_cast<T>(expected_sum[i]));
        CHECK(products[i] == static_cast<T>(expected_product[i]));
    }
}

TEST_CASE_TEMPLATE("mpi: NaN wins in max and min, whoever brings it", T, float, double, float16, bfloat16) {
    mpi world(pieces_of(64));
    const int ranks = world.size();
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const double infinity = std::numeric_limits<double>::infinity();
    // element r is a NaN of rank r; the last two are ordinary and infinite
    const auto n = static_cast<std::size_t>(ranks) + 2;
    std::vector<T> mine(n, of<T>(world.rank()));
    mine[static_cast<std::size_t>(world.rank())] = of<T>(nan);
    mine[n - 1] = of<T>(world.rank() == 0 ? -infinity : infinity);
    std::vector<T> largest(n);
    std::vector<T> smallest(n);
    world.all_reduce(view(mine), view(largest), tutti::max{});
    world.all_reduce(view(mine), view(smallest), tutti::min{});
    for (std::size_t i = 0; i + 2 < n; ++i) {
        CHECK(std::isnan(static_cast<double>(largest[i])));
        CHECK(std::isnan(static_cast<double>(smallest[i])));
    }
    CHECK(static_cast<double>(largest[n - 2]) == ranks - 1);
    CHECK(static_cast<double>(smallest[n - 2]) == 0);
    CHECK(static_cast<double>(largest[n - 1]) == (ranks == 1 ? -infinity : infinity));
    CHECK(static_cast<double>(smallest[n - 1]) == -infinity);
}

// NVIDIA/nccl#1026: in what are 16-bit floats summed
TEST_CASE_TEMPLATE("mpi: 16-bit floats are summed in float and rounded once", T, float16, bfloat16) {
    mpi world(pieces_of(std::size_t{1} << 20));
    const auto P = static_cast<std::size_t>(world.size());
    // Beside 256 the addends of a bfloat16 sum vanish one by one; beside 2048 those of a float16 sum do.
    const float large = sizeof(T) == 2 && static_cast<float>(T(257.0f)) == 257.0f ? 2048.0f : 256.0f;
    const float exact = large + static_cast<float>(P - 1);
    std::vector<T> mine(P, T(world.rank() == 0 ? large : 1.0f));
    std::vector<T> out(P);
    const T expected = T(exact);
    world.all_reduce(view(mine), view(out), sum{});
    CHECK(same(out, std::vector<T>(P, expected)));
    std::vector<T> one(1);
    world.reduce_scatter(view(mine), view(one), sum{});
    CHECK(one[0].bits == expected.bits);
    world.reduce(view(mine), view(out), sum{}, 0);
    CHECK(out[0].bits == expected.bits);

    // the mean is divided before it is rounded
    const T mean_expected = T(exact / static_cast<float>(P));
    world.all_reduce(view(mine), view(out), mean{});
    CHECK(same(out, std::vector<T>(P, mean_expected)));
    world.reduce_scatter(view(mine), view(mine).sub(static_cast<std::size_t>(world.rank()), 1), mean{});
    CHECK(mine[static_cast<std::size_t>(world.rank())].bits == mean_expected.bits);

    // a sum that overflows 16 bits on the way has a mean that does not
    const T most = sizeof(T) == 2 && large == 2048.0f ? T(65504.0f) : T(3.0e38f);
    if (large == 2048.0f) {
        std::vector<T> tall(1, most);
        world.all_reduce(view(tall), view(tall), mean{});
        CHECK(tall[0].bits == most.bits);
    }
}

TEST_CASE_TEMPLATE("mpi: mean and product of floats", T, float, double) {
    mpi world(pieces_of(64));
    const int ranks = world.size();
    std::vector<T> mine(40, static_cast<T>(world.rank() + 1));
    std::vector<T> out(40);
    world.all_reduce(view(mine), view(out), mean{});
    CHECK(same(out, std::vector<T>(40, static_cast<T>(ranks * (ranks + 1) / 2) / static_cast<T>(ranks))));
    std::vector<T> root_only(world.rank() == 0 ? 40 : 0);
    world.reduce(view(mine), view(root_only), mean{}, 0);
    if (world.rank() == 0) { CHECK(same(root_only, out)); }
    world.all_reduce(view(mine), view(out), product{});
    T factorial = 1;
    for (int r = 1; r <= ranks; ++r) { factorial *= static_cast<T>(r); }
    CHECK(same(out, std::vector<T>(40, factorial)));
}

// meta-pytorch/torchcomms#287: the mean over a part of the ranks
TEST_CASE("mpi: split, split of split, one rank, none") {
    mpi world(pieces_of(std::size_t{1} << 30));
    const int ranks = world.size();
    std::vector<int> parity(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r) { parity[static_cast<std::size_t>(r)] = r % 2; }
    auto half = world.split(parity, "half");
    REQUIRE(half.has_value());
    CHECK(half->name() == "world/half");
    CHECK(half->size() == (ranks + 1 - world.rank() % 2) / 2);
    CHECK(half->rank() == world.rank() / 2);
    float mine = static_cast<float>(world.rank());
    float out = 0;
    half->all_reduce(view(&mine, 1), view(&out, 1), mean{});
    float expected = 0;
    for (int r = world.rank() % 2; r < ranks; r += 2) { expected += static_cast<float>(r); }
    CHECK(out == expected / static_cast<float>(half->size()));

    std::vector<int> alone(static_cast<std::size_t>(half->size()));
    std::iota(alone.begin(), alone.end(), 0);
    auto self = half->split(alone, "alone");
    REQUIRE(self.has_value());
    CHECK(self->size() == 1);
    every_kind<float>(*self, 10, true);

    std::vector<int> first_only(static_cast<std::size_t>(ranks), -1);
    first_only[0] = 3;
    CHECK(world.split(first_only, "first").has_value() == (world.rank() == 0));
    const std::vector<int> none(static_cast<std::size_t>(ranks), -1);
    CHECK_FALSE(world.split(none, "none").has_value());
    CHECK_THROWS_AS(static_cast<void>(world.split(std::vector<int>(static_cast<std::size_t>(ranks) + 1), "wrong")),
                    usage_error);
    every_kind<float>(world, 10, false);  // that was caught before anything moved
}

TEST_CASE("mpi: a duplicate is a channel of its own, and outlives its parent") {
    auto world = std::make_unique<mpi>(pieces_of(std::size_t{1} << 30));
    mpi a = world->duplicate("a");
    mpi b = a.duplicate("b");
    CHECK(b.name() == "world/a/b");
    every_kind<float>(b, 10, false);
    world.reset();
    every_kind<float>(a, 10, true);
    mpi moved = std::move(a);
    every_kind<float>(moved, 10, true);
    moved = std::move(b);
    CHECK(moved.name() == "world/a/b");
    every_kind<float>(moved, 10, false);
}

// rabauke/mpl#42: attach to a communicator of the user's; rabauke/mpl#13: its error handler is left alone
TEST_CASE("mpi: an existing communicator is accepted and stays the user's") {
    MPI_Comm users = MPI_COMM_NULL;
    int world_rank = 0;
    int world_size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    MPI_Comm_split(MPI_COMM_WORLD, 0, -world_rank, &users);  // ranks reversed
    MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
    MPI_Comm_create_errhandler(&ignore_error, &handler);
    MPI_Comm_set_errhandler(users, handler);

    // A message of the user's under way, with our tags: it must not reach our calls, nor ours the user's.
    int sent = 41;
    int received = 0;
    const int right = (world_size - 1 - world_rank + 1) % world_size;
    MPI_Request pending = MPI_REQUEST_NULL;
    MPI_Isend(&sent, 1, MPI_INT, right, comm::detail::exchange_tag, users, &pending);
    {
        mpi mine(users, pieces_of(64));
        CHECK(mine.rank() == world_size - 1 - world_rank);
        CHECK(mine.native_handle() != users);
        int compared = MPI_UNEQUAL;
        MPI_Comm_compare(mine.native_handle(), users, &compared);
        CHECK(compared == MPI_CONGRUENT);
        char name[MPI_MAX_OBJECT_NAME] = {};
        int length = 0;
        MPI_Comm_get_name(mine.native_handle(), name, &length);
        CHECK(std::string(name) == "world");
        every_kind<float>(mine, 20, false);
        MPI_Errhandler ours = MPI_ERRHANDLER_NULL;
        MPI_Comm_get_errhandler(mine.native_handle(), &ours);
        CHECK(ours == MPI_ERRORS_RETURN);
        MPI_Errhandler_free(&ours);
        mpi child = mine.duplicate("child");
        MPI_Comm_get_errhandler(child.native_handle(), &ours);
        CHECK(ours == MPI_ERRORS_RETURN);
        MPI_Errhandler_free(&ours);
    }
    MPI_Errhandler after_use = MPI_ERRHANDLER_NULL;
    MPI_Comm_get_errhandler(users, &after_use);
    CHECK(after_use == handler);
    MPI_Errhandler_free(&after_use);
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &after_use);
    CHECK(after_use == MPI_ERRORS_ARE_FATAL);
    MPI_Errhandler_free(&after_use);
    MPI_Recv(&received, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, users, MPI_STATUS_IGNORE);
    MPI_Wait(&pending, MPI_STATUS_IGNORE);
    CHECK(received == 41);  // and the user's communicator still works
    MPI_Errhandler_free(&handler);
    MPI_Comm_free(&users);
}

TEST_CASE("mpi: what cannot be a communicator is refused") {
    CHECK_THROWS_AS(mpi(MPI_COMM_NULL), usage_error);
    mpi_options o;
    o.largest_call = 0;
    CHECK_THROWS_AS(mpi{o}, usage_error);
    o.largest_call = std::size_t{1} << 31;
    CHECK_THROWS_AS(mpi{o}, usage_error);
    o.largest_call = 1;
    o.timeout = 0s;
    CHECK_THROWS_AS(mpi{o}, usage_error);
    int ranks = 0;
    int rank = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (ranks == 1) { return; }
    MPI_Comm half = MPI_COMM_NULL;
    MPI_Comm inter = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 5, &inter);
    CHECK_THROWS_WITH_AS(mpi{inter}, "mpi: the communicator is an inter-communicator on 'world'", usage_error);
    MPI_Comm_free(&inter);
    MPI_Comm_free(&half);
}

// pytorch/pytorch#8352, NVIDIA/nccl#1891: ranks destroy in different orders, one long before the others
TEST_CASE("mpi: communicators are destroyed in any order") {
    for (int round = 0; round < 3; ++round) {
        auto world = std::make_unique<mpi>(pieces_of(64));
        auto a = std::make_unique<mpi>(world->duplicate("a"));
        auto b = std::make_unique<mpi>(a->duplicate("b"));
        every_kind<float>(*b, 3, false);
        if (world->rank() % 2 == 0) {
            world.reset();
            a.reset();
            b.reset();
        } else {
            std::this_thread::sleep_for(20ms);
            b.reset();
            a.reset();
            world.reset();
        }
    }
}

// meta-pytorch/torchrec#4708: two collectives at once need two communicators. NVIDIA/nccl#195: used in different
// orders.
TEST_CASE("mpi: communicators of one family are used by several threads at once") {
    mpi world(pieces_of(100000));
    mpi first = world.duplicate("first");
    mpi second = world.duplicate("second");
    const auto work = [](mpi& c, int rounds, std::size_t n, bool& good) {
        for (int i = 0; i < rounds; ++i) {
            std::vector<float> v(n, static_cast<float>(c.rank() + i));
            c.all_reduce(view(v), view(v), sum{});
            const int ranks = c.size();
            good =
                good && v.front() == static_cast<float>(ranks * (ranks - 1) / 2 + ranks * i) && v.back() == v.front();
            c.barrier();
        }
    };
    bool good[3] = {true, true, true};
    std::thread one([&] { work(first, 40, 30000, good[0]); });
    std::thread two([&] { work(second, 60, 100, good[1]); });
    work(world, 50, 3000, good[2]);
    one.join();
    two.join();
    CHECK(good[0]);
    CHECK(good[1]);
    CHECK(good[2]);
}

// Another thread answers a question about a call just as the call ends and its memory goes.
TEST_CASE("mpi: what is said of a call does not read the call's own memory") {
    MPI_Comm root = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_SELF, &root);
    comm::detail::mpi_family family(root, 0, 1, true, mpi_options{});
    comm::detail::mpi_activity activity;
    const std::string operation(200, 'x');
    {
        error_context context;
        context.operation = operation;
        const comm::detail::mpi_session session(family, activity, std::move(context), true);
    }
    const std::string next(200, 'y');  // where the call's text was
    CHECK(activity.operation == operation);
}

TEST_CASE("mpi: children are made while another thread communicates") {
    mpi world(pieces_of(std::size_t{1} << 30));
    mpi lane = world.duplicate("lane");
    bool good = true;
    std::thread worker([&] {
        for (int i = 0; i < 60; ++i) {
            float x = 1;
            lane.all_reduce(view(&x, 1), view(&x, 1), sum{});
            good = good && x == static_cast<float>(lane.size());
        }
    });
    for (int i = 0; i < 8; ++i) {
        mpi child = world.duplicate("child");
        child.barrier();
    }
    worker.join();
    CHECK(good);
}

TEST_CASE("mpi: agree and split_by_color") {
    mpi world(pieces_of(std::size_t{1} << 30));
    CHECK_NOTHROW(world.agree(7, "the plan"));
    auto group = comm::split_by_color(world, world.rank() == 0 ? -5 : 2, "rest");
    CHECK(group.has_value() == (world.rank() != 0));
    world.synchronize();
}
