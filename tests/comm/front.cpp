// The typed front: what reaches the byte-level core for each call, and in which numbers.
#include <optional>     // split
#include <span>         // colors
#include <string>       // causes
#include <string_view>  // names
#include <vector>       // recorded calls

#include <tutti/comm/front.hpp>  // under test

#include <doctest/doctest.h>  // checks

using namespace tutti;
using comm::call;
using comm::collective;

namespace {

// Rank 2 of 4 that only writes down what it is asked for.
struct recorder : comm::front<recorder, host_queue> {
    std::vector<call> calls;
    std::vector<std::vector<comm::message>> messages;
    std::vector<comm::control_record> others;

    [[nodiscard]] int rank() const noexcept { return 2; }
    [[nodiscard]] int size() const noexcept { return 4; }
    [[nodiscard]] std::string_view name() const noexcept { return "recorder"; }
    void execute(const call& c) {
        calls.push_back(c);
        if (peer_is_gone && calls.size() > 1) { throw aborted_error("a peer is gone", {}); }
        messages.emplace_back(c.messages.begin(), c.messages.end());
        if (!others.empty() && c.kind == collective::all_gather) {
            const auto out = static_cast<comm::control_record*>(c.out);
            for (std::size_t r = 0; r < 4; ++r) {
                out[r] = r == 2 ? *static_cast<const comm::control_record*>(c.in) : others[r];
            }
        }
    }
    void abort(std::string_view why) noexcept {
        cause = why;
        calls_before_abort = calls.size();
    }
    std::string cause;
    std::size_t calls_before_abort = 0;
    bool peer_is_gone = false;  // from the second call on
};

struct storage {
    std::vector<float> in = std::vector<float>(40), out = std::vector<float>(40);
    [[nodiscard]] view<const float> from(std::size_t n) const { return view<const float>(in).sub(0, n); }
    [[nodiscard]] view<float> to(std::size_t n) { return view<float>(out).sub(0, n); }
};

void expect_views(const call& c, const void* in, std::size_t in_count, const void* out, std::size_t out_count) {
    CHECK(c.in == in);
    CHECK(c.in_count == in_count);
    CHECK(c.out == out);
    CHECK(c.out_count == out_count);
    CHECK(c.in_bytes() == in_count * c.element_size);
    CHECK(c.out_bytes() == out_count * c.element_size);
    CHECK(c.count() == std::max(in_count, out_count));
}

}  // namespace

TEST_CASE("each collective becomes one call with its views, type and operator") {
    recorder r;
    storage s;
    const float *const in = s.in.data(), *const out = s.out.data();
    const std::vector<std::size_t> table{1, 0, 3, 2};

    r.all_reduce(s.from(5), s.to(5), tutti::max{});
    expect_views(r.calls.back(), in, 5, out, 5);
    CHECK(r.calls.back().kind == collective::all_reduce);
    CHECK(r.calls.back().type == dtype::float32);
    CHECK(r.calls.back().element_size == 4);
    CHECK(r.calls.back().op == op_kind::max);
    CHECK((r.calls.back().reduce == reduce_function_of<float, tutti::max>()));
    CHECK(r.calls.back().root == -1);
    CHECK(r.calls.back().sequence == 1);

    r.reduce_scatter(s.from(20), s.to(5), sum{});
    expect_views(r.calls.back(), in, 20, out, 5);
    CHECK(r.calls.back().kind == collective::reduce_scatter);

    r.reduce_scatter_v(s.from(6), s.to(3), table, mean{});
    expect_views(r.calls.back(), in, 6, out, 3);
    CHECK(r.calls.back().kind == collective::reduce_scatter_v);
    CHECK(r.calls.back().op == op_kind::mean);
    CHECK(r.calls.back().send_counts.data() == table.data());
    CHECK(r.calls.back().send_counts.size() == 4);

    r.all_gather(s.from(5), s.to(20));
    expect_views(r.calls.back(), in, 5, out, 20);
    CHECK(r.calls.back().kind == collective::all_gather);
    CHECK(r.calls.back().op == op_kind::none);
    CHECK((r.calls.back().reduce == nullptr));

    r.all_gather_v(s.from(3), s.to(6), table);
    expect_views(r.calls.back(), in, 3, out, 6);
    CHECK(r.calls.back().kind == collective::all_gather_v);
    CHECK(r.calls.back().send_counts.data() == table.data());

    r.broadcast(s.to(5), 3);
    expect_views(r.calls.back(), out, 5, out, 5);
    CHECK(r.calls.back().kind == collective::broadcast);
    CHECK(r.calls.back().root == 3);

    r.all_to_all(s.from(8), s.to(8));
    expect_views(r.calls.back(), in, 8, out, 8);
    CHECK(r.calls.back().kind == collective::all_to_all);

    const std::vector<std::size_t> receives{4, 1, 3, 0};
    r.all_to_all_v(s.from(6), table, s.to(8), receives);
    expect_views(r.calls.back(), in, 6, out, 8);
    CHECK(r.calls.back().kind == collective::all_to_all_v);
    CHECK(r.calls.back().send_counts.data() == table.data());
    CHECK(r.calls.back().recv_counts.data() == receives.data());

    r.barrier();
    expect_views(r.calls.back(), nullptr, 0, nullptr, 0);
    CHECK(r.calls.back().kind == collective::barrier);
    CHECK(r.calls.back().sequence == 9);
}

TEST_CASE("a view that a rank does not need arrives empty") {
    recorder r;
    storage s;
    r.reduce(s.from(5), s.to(7), sum{}, 1);  // rank 2's output is not used, whatever its size
    expect_views(r.calls.back(), s.in.data(), 5, nullptr, 0);
    r.reduce(s.from(5), s.to(5), sum{}, 2);
    expect_views(r.calls.back(), s.in.data(), 5, s.out.data(), 5);
    r.gather(s.from(5), s.to(7), 1);
    expect_views(r.calls.back(), s.in.data(), 5, nullptr, 0);
    r.gather(s.from(5), s.to(20), 2);
    expect_views(r.calls.back(), s.in.data(), 5, s.out.data(), 20);
    r.scatter(s.from(7), s.to(5), 1);
    expect_views(r.calls.back(), nullptr, 0, s.out.data(), 5);
    r.scatter(s.from(20), s.to(5), 2);
    expect_views(r.calls.back(), s.in.data(), 20, s.out.data(), 5);
    CHECK(r.calls.size() == 6);
}

TEST_CASE("collectives and exchanges are numbered apart; refused collectives are not numbered") {
    recorder r;
    storage s;
    r.barrier();
    r.exchange(std::vector{comm::send_to(1, s.to(3))});
    CHECK(r.calls.back().sequence == 1);
    CHECK_THROWS_WITH_AS(r.all_reduce(s.from(3), s.to(4), sum{}),
                         "all_reduce: in has 3 elements, out 4, call 2 on 'recorder', rank 2", usage_error);
    r.all_reduce(s.from(0), s.to(0), sum{});  // of nothing, yet a call
    CHECK(r.calls.back().sequence == 2);
    r.exchange(std::vector{comm::send_to(1, s.to(3))});
    CHECK(r.calls.back().sequence == 2);
    try {
        r.broadcast(s.to(3), 4);
    } catch (const usage_error& e) {
        CHECK(e.context().operation == "broadcast");
        CHECK(e.context().communicator == "recorder");
        CHECK(e.context().rank == 2);
        CHECK(e.context().sequence == 3);
        CHECK(e.context().count == 3);
        CHECK(e.context().type == dtype::float32);
    }
    CHECK(r.calls.size() == 4);
}

TEST_CASE("messages keep their order, peers and sizes; types become bytes") {
    recorder r;
    std::vector<double> d(3);
    const std::vector<char> c(5);
    r.exchange(std::vector{comm::receive_from(3, view<double>(d)), comm::send_to(0, view<const char>(c)),
                           comm::send_to(2, view<double>(d).sub(0, 0))});
    const auto& m = r.messages.back();
    REQUIRE(m.size() == 3);
    CHECK(!m[0].sends);
    CHECK(m[0].peer == 3);
    CHECK(m[0].data == d.data());
    CHECK(m[0].bytes == 24);
    CHECK(m[1].sends);
    CHECK(m[1].peer == 0);
    CHECK(m[1].data == c.data());
    CHECK(m[1].bytes == 5);
    CHECK(m[2].bytes == 0);
    CHECK(r.calls.back().kind == collective::exchange);
    CHECK(r.calls.back().in_count == 5);
    CHECK(r.calls.back().out_count == 24);
}

TEST_CASE("agree sides with the majority, of several with the lowest rank, and aborts") {
    const auto verdict = [](std::vector<std::uint64_t> hashes) {
        recorder r;
        for (const std::uint64_t h : hashes) { r.others.push_back({h, 0, 0, 0}); }
        try {
            r.agree(hashes[2], "seed");
        } catch (const mismatch_error& e) {
            CHECK(r.cause == e.what());
            return e.ranks();
        }
        CHECK(r.cause.empty());
        return std::vector<int>{};
    };
    CHECK(verdict({5, 5, 5, 5}).empty());
    CHECK(verdict({5, 5, 5, 6}) == std::vector<int>{3});
    CHECK(verdict({6, 5, 5, 5}) == std::vector<int>{0});
    CHECK(verdict({5, 6, 5, 6}) == std::vector<int>{1, 3});
    CHECK(verdict({5, 6, 6, 5}) == std::vector<int>{1, 2});
    CHECK(verdict({1, 2, 3, 3}) == std::vector<int>{0, 1});
    CHECK(verdict({1, 2, 3, 4}) == std::vector<int>{1, 2, 3});
}

TEST_CASE("agree: all ranks leave its gather together before the first one aborts") {
    for (const bool gone : {false, true}) {
        recorder r;
        r.others.assign(4, {7, 0, 0, 0});
        r.peer_is_gone = gone;
        CHECK_THROWS_AS(r.agree(8, "seed"), mismatch_error);
        CHECK(r.calls_before_abort == 2);
        CHECK(r.calls.size() == 2);
        CHECK(r.cause.find("seed differs") != std::string::npos);
        r.calls.clear();
        r.peer_is_gone = false;
        CHECK_NOTHROW(r.agree(7, "seed"));
        CHECK(r.calls.size() == 1);  // nothing to say, nothing to pay
    }
}

TEST_CASE("kinds have names") {
    CHECK(name_of(collective::all_reduce) == "all_reduce");
    CHECK(name_of(collective::reduce_scatter) == "reduce_scatter");
    CHECK(name_of(collective::reduce_scatter_v) == "reduce_scatter_v");
    CHECK(name_of(collective::all_gather) == "all_gather");
    CHECK(name_of(collective::all_gather_v) == "all_gather_v");
    CHECK(name_of(collective::broadcast) == "broadcast");
    CHECK(name_of(collective::reduce) == "reduce");
    CHECK(name_of(collective::gather) == "gather");
    CHECK(name_of(collective::scatter) == "scatter");
    CHECK(name_of(collective::all_to_all) == "all_to_all");
    CHECK(name_of(collective::all_to_all_v) == "all_to_all_v");
    CHECK(name_of(collective::exchange) == "exchange");
    CHECK(name_of(collective::barrier) == "barrier");
}
