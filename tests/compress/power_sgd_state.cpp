// PowerSGD around its arithmetic: state, levels, what is not finite, what it refuses, what it costs, real communicators;
// and what users of others reported.
#include <tutti/compress/power_sgd.hpp>  // under test

#include <algorithm>   // all_of
#include <cmath>       // isfinite
#include <cstring>     // memcpy
#include <functional>  // calls
#include <limits>      // infinity
#include <stdexcept>   // runtime_error
#include <string>      // messages
#include <vector>      // matrices

#include <doctest/doctest.h>  // checks

#include "dense.hpp"
#include "low_rank_trial.hpp"
#include "support/oracle.hpp"            // same_bytes
#include <tutti/comm/counted.hpp>        // bytes
#include <tutti/comm/threads.hpp>        // ranks
#include <tutti/core/virtual_queue.hpp>  // costs

using namespace tutti;
using compress::draw_key;
using compress::power_sgd;
using compress::power_sgd_state;
using test::dense;
using test::distance;
using test::low_rank_trial;
using test::matrix_segment;
using test::normal_matrix;
using test::rounded;
using test::segment;

namespace {

bool finite(const std::vector<float>& v) {
    return std::all_of(v.begin(), v.end(), [](float x) { return std::isfinite(x); });
}
bool all_nan(const float* first, std::size_t count) {
    return std::all_of(first, first + count, [](float x) { return std::isnan(x); });
}
std::vector<float> noise(std::size_t n, std::size_t m, std::uint32_t stream) {
    return rounded(normal_matrix(n, m, stream));
}
void copy_state(const power_sgd_state<host_queue>& from, power_sgd_state<host_queue>& to) {
    REQUIRE(from.entries().size() == to.entries().size());
    for (std::size_t i = 0; i < from.entries().size(); ++i) {
        CHECK(from.entries()[i].name == to.entries()[i].name);
        REQUIRE(from.entries()[i].data.size() == to.entries()[i].data.size());
        std::memcpy(to.entries()[i].data.data(), from.entries()[i].data.data(), from.entries()[i].data.size());
    }
    to.restored();
}
// The text of the usage_error of a call; empty when there is none.
std::string refusal(const std::function<void()>& call) {
    try {
        call();
    } catch (const usage_error& e) { return e.what(); }
    return {};
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

// --- levels ---------------------------------------------------------------------------------------------------------

// L-GreCo's hook draws all factors anew, from unsynchronized generators, whenever it has chosen ranks.
TEST_CASE("levels change: columns that are there stay, others are drawn, the same on all ranks") {
    low_rank_trial trial({matrix_segment(4, 30, 20, 6)}, 2, 600);
    trial.feedback = false;
    for (const int level : {2, 5, 1, 6, 3, 6}) {
        trial.segments[0].level = level;
        const test::rows<float> g{noise(30, 20, trial.step_count), noise(30, 20, 100 + trial.step_count)};
        const auto draws = draw_key{trial.seed, trial.step_count, 0}.shared().stream(4, power_sgd::draw_purpose);
        const test::low_rank_reference expected({dense(30, 20, g[0].data()), dense(30, 20, g[1].data())},
                                                trial.factor(), static_cast<std::size_t>(level), draws);
        CHECK(distance(dense(30, 20, trial.step(g)[0].data()), expected.out) <= 2e-6);
        CHECK(distance(trial.factor(), expected.factor) <= 2e-6);
        CHECK(trial.sums.size() == static_cast<std::size_t>(level) * 20);
    }
}

TEST_CASE("draws differ from tensor to tensor and from step to step, and end with the first step") {
    const auto g = noise(30, 20, 1);
    const auto first_out = [&](std::uint32_t tensor, std::uint32_t step, std::uint64_t seed) {
        low_rank_trial trial({matrix_segment(tensor, 30, 20, 2)}, 1, 600);
        trial.step_count = step;
        trial.seed = seed;
        return trial.step({g})[0];
    };
    const auto base = first_out(0, 0, 1);
    CHECK(base == first_out(0, 0, 1));
    CHECK(base != first_out(1, 0, 1));
    CHECK(base != first_out(0, 1, 1));
    CHECK(base != first_out(0, 0, 2));
    // A warm factor needs no draw.
    low_rank_trial a(30, 20, 2), b(30, 20, 2);
    CHECK(a.step({g}) == b.step({g}));
    b.seed = 99;
    b.step_count = 77;
    CHECK(a.step({g}) == b.step({g}));
}

// --- state ----------------------------------------------------------------------------------------------------------

// The state of PyTorch's hook could not be saved: github.com/pytorch/pytorch/issues/75666,
// github.com/pytorch/pytorch/pull/79334, github.com/pytorch/pytorch/pull/102721
TEST_CASE("a run goes on from its saved state with the same bits") {  // T29
    const std::vector<segment> all{matrix_segment(3, 12, 20, 4), matrix_segment(1, 9, 30, 2, 240)};
    low_rank_trial run(all, 2, 510), resumed(all, 2, 510);
    const auto gradients = [](std::uint32_t step) {
        return test::rows<float>{noise(1, 510, 2 * step), noise(1, 510, 2 * step + 1)};
    };
    for (std::uint32_t step = 0; step < 5; ++step) { static_cast<void>(run.step(gradients(step))); }
    // The resumed run did something else before, and was interrupted in a step.
    static_cast<void>(resumed.step(gradients(50)));
    std::vector<float> wire(compress::detail::wire_count(resumed.scheme, all, 0));
    for (std::size_t r = 0; r < 2; ++r) {
        resumed.scheme.contribute(resumed.queue, all, resumed.states[r], 0, view<const float>(run.residuals[r]), {},
                                  wire, draw_key{});
        copy_state(run.states[r], resumed.states[r]);
    }
    resumed.residuals = run.residuals;
    resumed.step_count = run.step_count;
    for (std::uint32_t step = 5; step < 9; ++step) {
        CHECK(test::same_bytes(run.step(gradients(step))[1], resumed.step(gradients(step))[1]));
    }
    CHECK(test::same_bytes(run.residuals[0], resumed.residuals[0]));
    const auto entries = run.states[0].entries();
    CHECK(entries[0].name == "power_sgd.1");
    CHECK(entries[0].shape == std::vector<std::size_t>{2, 30});
    CHECK(entries[1].name == "power_sgd.3");
    CHECK(entries[1].shape == std::vector<std::size_t>{4, 20});
    CHECK(entries[1].type == dtype::float32);
}

TEST_CASE("after restoring, a step that was under way cannot go on") {
    low_rank_trial trial(12, 20, 4);
    std::vector<float> g(240, 1.0f), wire(48);
    const auto absorb = [&] { trial.scheme.absorb(trial.queue, trial.segments, trial.states[0], 0, wire, 1); };
    trial.scheme.contribute(trial.queue, trial.segments, trial.states[0], 0, view<const float>(g), {}, wire,
                            draw_key{});
    CHECK_NOTHROW(absorb());
    trial.scheme.contribute(trial.queue, trial.segments, trial.states[0], 0, view<const float>(g), {}, wire,
                            draw_key{});
    trial.states[0].restored();
    CHECK(has(refusal(absorb), "a step is contribute"));
}

// Buckets that were rebuilt met the state of others: github.com/pytorch/pytorch/pull/51427; and their residuals were
// kept for ever: github.com/pytorch/pytorch/pull/48867
TEST_CASE("state goes by tensor, whatever calls they come in, and does not grow") {
    const std::vector<segment> all{matrix_segment(0, 12, 20, 4), matrix_segment(1, 30, 9, 2, 240),
                                   matrix_segment(2, 16, 16, 3, 510)};
    const std::size_t elements = 766;
    low_rank_trial whole(all, 1, elements);
    power_sgd scheme;
    const host_queue q;
    auto state = scheme.make_state(q, all);
    std::vector<float> residual(elements);
    const std::size_t live = q.account().live();
    // Each factor in units of four floats.
    CHECK(live == 4 * ((48 + 2 * 80 + 4) + (60 + 2 * 20 + 4) + (48 + 2 * 48 + 4)));
    for (std::uint32_t step = 0; step < 12; ++step) {
        const auto g = noise(1, elements, step);
        std::vector<float> out = g;
        // In pieces, in another order each step; their calls interleave.
        std::vector<std::vector<segment>> pieces{{all[(step + 1) % 3], all[step % 3]}, {all[(step + 2) % 3]}};
        if (step % 2 == 1) { pieces = {{all[step % 3]}, {all[(step + 2) % 3]}, {all[(step + 1) % 3]}}; }
        for (int round = 0; round < 2; ++round) {
            std::vector<std::vector<float>> wires;
            for (const auto& piece : pieces) {
                wires.emplace_back(compress::detail::wire_count(scheme, piece, round));
                scheme.contribute(q, piece, state, round, view<const float>(g), residual, wires.back(),
                                  draw_key{1, step, 0});
            }
            for (std::size_t k = 0; k < pieces.size(); ++k) { scheme.absorb(q, pieces[k], state, round, wires[k], 1); }
        }
        for (const auto& piece : pieces) {
            scheme.finish(q, piece, state, view<const float>(g), residual, view<float>(out));
        }
        CHECK(test::same_bytes(out, whole.step({g})[0]));
        CHECK(test::same_bytes(residual, whole.residuals[0]));
        CHECK(q.account().live() == live);
    }
}

// --- not finite -----------------------------------------------------------------------------------------------------

// Gradients that a loss scale had made infinite left NaN in PyTorch's state: github.com/pytorch/pytorch/pull/55031
TEST_CASE("a NaN or an infinity on one rank spoils its tensor for one step on all ranks, and leaves nothing behind") {
    const std::vector<segment> all{matrix_segment(0, 12, 20, 4), matrix_segment(1, 12, 20, 4, 240)};
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()}) {
        CAPTURE(bad);
        low_rank_trial trial(all, 3, 480), clean(all, 3, 480);
        const auto gradients = [](std::uint32_t step) {
            return test::rows<float>{noise(1, 480, 3 * step), noise(1, 480, 3 * step + 1), noise(1, 480, 3 * step + 2)};
        };
        for (std::uint32_t step = 0; step < 2; ++step) {
            CHECK(trial.step(gradients(step)) == clean.step(gradients(step)));
        }
        auto g = gradients(2);
        const auto before = trial.residuals;
        g[1][77] = bad;
        const auto out = trial.step(g);
        const auto expected = clean.step(gradients(2));
        for (std::size_t r = 0; r < 3; ++r) {
            CHECK(all_nan(out[r].data(), 240));
            CHECK(std::memcmp(out[r].data() + 240, expected[r].data() + 240, 960) == 0);
            CHECK(finite(trial.residuals[r]));
            for (std::size_t i = 0; i < 240; ++i) {
                const float expected_here = r == 1 && i == 77 ? 0.0f : before[r][i];
                CHECK(std::fabs(trial.residuals[r][i] - expected_here) <= 1e-6);
            }
            CHECK(std::memcmp(trial.residuals[r].data() + 240, clean.residuals[r].data() + 240, 960) == 0);
        }
        const dense factor = trial.factor();
        for (const double x : factor.of) { CHECK(x == 0); }
        // A new factor: as in a state that never had one.
        low_rank_trial fresh(all, 3, 480);
        fresh.residuals = trial.residuals;
        fresh.step_count = trial.step_count;
        const auto next = trial.step(gradients(3));
        CHECK(finite(next[0]));
        CHECK(std::memcmp(next[0].data(), fresh.step(gradients(3))[0].data(), 960) == 0);
    }
}

TEST_CASE("finite gradients whose sum over the ranks overflows count as not finite") {
    low_rank_trial trial(12, 20, 1, 4);
    const std::vector<float> ones(240, 1.0f), g(240, 2e37f);
    CHECK(finite(trial.step({ones, ones, ones, ones})[0]));  // after which the factor points along the ones
    const auto out = trial.step({g, g, g, g});               // four times 2e37 * sqrt(20)
    CHECK(all_nan(out[0].data(), 240));
    for (const auto& e : trial.residuals) { CHECK(finite(e)); }
    CHECK(finite(trial.step({noise(12, 20, 1), noise(12, 20, 2), noise(12, 20, 3), noise(12, 20, 4)})[0]));
}

TEST_CASE("an overflow in the second round counts too") {
    low_rank_trial trial(400, 2, 2);
    std::vector<float> g(800);
    for (std::size_t i = 0; i < 400; ++i) { g[2 * i + 1] = 2.5e37f; }  // column of length 5e38
    const auto out = trial.step({g})[0];
    CHECK(all_nan(out.data(), 800));
    CHECK(trial.residuals[0] == std::vector<float>(800));
    CHECK(distance(dense(400, 2, trial.step({noise(400, 2, 1)})[0].data()), dense(400, 2, noise(400, 2, 1).data())) <=
          1e-5);
}

// --- calls ----------------------------------------------------------------------------------------------------------

TEST_CASE("what cannot be done is refused, with what to do, before anything is written") {
    const power_sgd x;
    const host_queue q;
    const std::vector<segment> all{matrix_segment(5, 12, 20, 4)};
    auto state = x.make_state(q, all);
    std::vector<float> g(240, 1.0f), residual(240, 2.0f), wire(48, 3.0f), out(240, 4.0f);
    const auto contribute = [&](std::vector<segment> s, int round = 0) {
        return refusal([&] { x.contribute(q, s, state, round, view<const float>(g), residual, wire, draw_key{}); });
    };
    const auto with = [&](auto change) {
        auto s = all;
        change(s[0]);
        return s;
    };
    // Vectors and parts of tensors
    const auto vector = with([](segment& s) { s.rows = 240, s.cols = 1; });
    const auto part = with([](segment& s) { s.first = 240; });
    CHECK(has(contribute(vector), "tensor 5 comes as 240 x 1"));
    CHECK(has(contribute(part), "send it uncompressed"));
    CHECK(has(refusal([&] { static_cast<void>(x.make_state(q, vector)); }), "uncompressed"));
    CHECK(has(refusal([&] { static_cast<void>(x.wire_count(part[0], 0)); }), "uncompressed"));
    // Levels
    CHECK(has(contribute(with([](segment& s) { s.level = 0; })), "level 0"));
    CHECK(has(contribute(with([](segment& s) { s.level = -1; })), "level -1"));
    CHECK(has(contribute(with([](segment& s) { s.level = 5; })), "at rank 5, but its state was made for 4"));
    // Tensors
    CHECK(has(contribute(with([](segment& s) { s.tensor = 6; })), "the state has no tensor 6"));
    CHECK(has(contribute(with([](segment& s) { std::swap(s.rows, s.cols); })),
              "tensor 5 is 20 x 12, in the state 12 x 20"));
    CHECK(has(contribute({all[0], all[0]}), "comes twice"));
    CHECK(has(refusal([&] {
                  static_cast<void>(x.make_state(q, std::vector<segment>{all[0], all[0]}));
              }),
              "comes twice"));
    // Views
    CHECK(has(contribute(with([](segment& s) { s.offset = 1; })), "elements 1 to 241 of 240"));
    CHECK(has(contribute(all, 2), "no round 2"));
    CHECK(has(refusal([&] { static_cast<void>(x.wire_count(all[0], -1)); }), "no round -1"));
    CHECK(has(refusal([&] {
                  x.contribute(q, all, state, 0, view<const float>(g), view<float>(residual).sub(0, 239), wire,
                               draw_key{});
              }),
              "residual has 239 elements instead of 240"));
    CHECK(has(refusal([&] {
                  x.contribute(q, all, state, 0, view<const float>(g), residual, view<float>(wire).sub(0, 47),
                               draw_key{});
              }),
              "wire has 47 elements instead of 48"));
    CHECK(has(refusal([&] { x.contribute(q, all, state, 0, view<const float>(g), g, wire, draw_key{}); }), "overlap"));
    CHECK(has(refusal([&] {
                  x.contribute(q, all, state, 0, view<const float>(g), residual, view<float>(g).sub(0, 48), draw_key{});
              }),
              "overlap"));
    CHECK(has(refusal([&] {
                  x.contribute(q, all, state, 0, view<const float>(g), residual, view<float>(residual).sub(9, 48),
                               draw_key{});
              }),
              "overlap"));
    CHECK(residual == std::vector<float>(240, 2.0f));
    CHECK(wire == std::vector<float>(48, 3.0f));
}

TEST_CASE("calls out of order are refused") {
    const power_sgd x;
    const host_queue q;
    std::vector<segment> all{matrix_segment(5, 12, 20, 4)};
    auto state = x.make_state(q, all);
    std::vector<float> g(240, 1.0f), e(240), left(48), right(80), out(240, 4.0f);
    bool feedback = true;
    const auto residual = [&] { return feedback ? view<float>(e) : view<float>(); };
    const std::function<void()> step[] = {
        [&] { x.contribute(q, all, state, 0, view<const float>(g), residual(), left, draw_key{}); },
        [&] { x.absorb(q, all, state, 0, left, 1); },
        [&] { x.contribute(q, all, state, 1, view<const float>(g), residual(), right, draw_key{}); },
        [&] { x.absorb(q, all, state, 1, right, 1); },
        [&] { x.finish(q, all, state, view<const float>(g), residual(), view<float>(out)); }};
    for (int done = 0; done <= 5; ++done) {
        for (int next = 1; next < 5; ++next) {  // the first may come at any time
            for (int i = 0; i < done; ++i) { step[i](); }
            if (next == done) { continue; }
            CHECK(has(refusal(step[next]), "a step is contribute, absorb"));
        }
    }
    // A residual in some calls only, or another level in the middle
    for (const int at : {2, 4}) {
        for (const bool first : {true, false}) {
            feedback = first;
            for (int i = 0; i < at; ++i) { step[i](); }
            feedback = !first;
            CHECK(has(refusal(step[at]), "in all of them or in none"));
        }
    }
    feedback = true;
    step[0]();
    all[0].level = 3;
    CHECK(has(refusal([&] { x.absorb(q, all, state, 0, view<float>(left).sub(0, 36), 1); }), "of one level"));
    all[0].level = 4;
    CHECK(has(refusal([&] { x.absorb(q, all, state, 0, left, 0); }), "0 ranks"));
    CHECK(has(refusal([&] { x.absorb(q, all, state, 0, view<float>(left).sub(0, 36), 1); }), "36 elements"));
    step[1]();
    step[2]();
    step[3]();
    CHECK(has(refusal([&] { x.finish(q, all, state, view<const float>(g), view<float>(e), view<float>(e)); }),
              "overlap"));
    CHECK(has(
        refusal([&] { x.finish(q, all, state, view<const float>(g), view<float>(e), view<float>(out).sub(0, 239)); }),
        "out has 239 elements"));
    CHECK(out[0] != 4.0f);
}

TEST_CASE("out may be in") {
    low_rank_trial a(13, 21, 3, 2), b(13, 21, 3, 2);
    const test::rows<float> g{noise(13, 21, 1), noise(13, 21, 2)};
    const auto expected = a.step(g)[0];
    auto data = g;
    for (int round = 0; round < 2; ++round) {
        std::vector<float> sum(b.scheme.wire_count(b.segments[0], round));
        for (std::size_t r = 0; r < 2; ++r) {
            std::vector<float> wire(sum.size());
            b.scheme.contribute(b.queue, b.segments, b.states[r], round, view<float>(data[r]), b.residuals[r], wire,
                                draw_key{1, 0, static_cast<std::uint32_t>(r)});
            for (std::size_t i = 0; i < sum.size(); ++i) { sum[i] += wire[i]; }
        }
        for (auto& state : b.states) {
            auto wire = sum;
            b.scheme.absorb(b.queue, b.segments, state, round, wire, 2);
        }
    }
    for (std::size_t r = 0; r < 2; ++r) {
        b.scheme.finish(b.queue, b.segments, b.states[r], view<const float>(data[r]), b.residuals[r],
                        view<float>(data[r]));
    }
    CHECK(test::same_bytes(data[0], expected));
    CHECK(test::same_bytes(a.residuals[1], b.residuals[1]));
}

TEST_CASE("tensors without elements, and layouts without tensors") {
    low_rank_trial trial({matrix_segment(0, 0, 7, 3), matrix_segment(1, 5, 0, 3), matrix_segment(2, 4, 6, 2)}, 2, 24);
    CHECK(trial.scheme.wire_count(trial.segments[0], 0) == 0);
    const auto g = noise(4, 6, 1);
    const auto out = trial.step({g, g});
    low_rank_trial alone({matrix_segment(2, 4, 6, 2)}, 2, 24);
    CHECK(out == alone.step({g, g}));
    low_rank_trial none({}, 2, 24);
    CHECK(none.step({g, g})[0] == g);
}

// --- elsewhere ------------------------------------------------------------------------------------------------------

// The unit test of PyTorch's warm start moved no bytes: github.com/pytorch/pytorch/pull/50283. Three collectives one
// after the other cost more than the bytes they saved: github.com/pytorch/pytorch/issues/74148
TEST_CASE("over a communicator: rank * (rows + cols) floats in two calls, the same bits on all ranks") {
    const std::vector<segment> all{matrix_segment(0, 24, 40, 4), matrix_segment(1, 10, 6, 8, 960)};
    low_rank_trial expected(all, 3, 1020);
    test::rows<float> g, wanted;
    for (std::uint32_t r = 0; r < 3; ++r) { g.push_back(noise(1, 1020, r)); }
    for (int step = 0; step < 3; ++step) { wanted = expected.step(g); }
    comm::threads::launch(3, [&](comm::threads& world) {
        comm::counted counted(world.duplicate("counted"));
        const power_sgd x;
        auto q = counted.queue();
        auto state = x.make_state(q, all);
        const auto rank = static_cast<std::size_t>(world.rank());
        std::vector<float> residual(1020), out(1020);
        for (std::uint32_t step = 0; step < 3; ++step) {
            for (int round = 0; round < 2; ++round) {
                std::vector<float> wire(compress::detail::wire_count(x, all, round));
                x.contribute(q, all, state, round, view<const float>(g[rank]), residual, wire,
                             draw_key{1, step, static_cast<std::uint32_t>(rank)});
                counted.all_reduce(view<const float>(wire), view<float>(wire), sum{});
                x.absorb(q, all, state, round, wire, 3);
            }
            x.finish(q, all, state, view<const float>(g[rank]), residual, view<float>(out));
        }
        if (!test::same_bytes(out, wanted[0]) || !test::same_bytes(residual, expected.residuals[rank])) {
            throw std::runtime_error("another result than in one process");
        }
        const auto sent = counted.traffic_ledger()->total();
        const std::vector<float> left(156), right(196);
        std::vector<float> sums(196);
        for (int step = 0; step < 3; ++step) {
            counted.all_reduce(view<const float>(left), view<float>(sums).sub(0, 156), sum{});
            counted.all_reduce(view<const float>(right), view<float>(sums), sum{});
        }
        const auto both = counted.traffic_ledger()->total();
        if (sent.bytes == 0 || sent.calls != 6 || both.bytes != 2 * sent.bytes || both.calls != 12) {
            throw std::runtime_error("other traffic than two calls a step");
        }
    });
    CHECK(compress::detail::wire_count(power_sgd{}, all, 0) == 4 * 24 + 6 * 10);  // 156
    CHECK(compress::detail::wire_count(power_sgd{}, all, 1) == 4 * 40 + 6 * 6);   // 196
}

TEST_CASE("a virtual step costs three passes over the matrix") {
    const std::size_t n = 1000, m = 2000, r = 4;
    const std::vector<segment> all{matrix_segment(0, n, m, r)};
    const power_sgd x;
    const auto seconds = [&]<class T>(T, bool feedback) {
        virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
        using phantom = view<float, phantom_memory>;
        auto state = x.make_state(q, all);
        const view<const T, phantom_memory> in(nullptr, n * m);
        const phantom residual(nullptr, feedback ? n * m : 0);
        for (int round = 0; round < 2; ++round) {
            const phantom wire(nullptr, x.wire_count(all[0], round));
            x.contribute(q, all, state, round, in, residual, wire, draw_key{});
            x.absorb(q, all, state, round, wire, 8);
        }
        x.finish(q, all, state, in, residual, view<T, phantom_memory>(nullptr, n * m));
        CHECK(q.account().peak() == 4 * r * (n + 2 * m + 1));
        return resolve(q.recording())[0];
    };
    const double elements = n * m, factors = r * (n + m);
    CHECK(seconds(0.0f, true) == doctest::Approx(28 * elements).epsilon(0.03));
    CHECK(seconds(0.0f, true) > 28 * elements + 4 * 3 * factors);
    CHECK(seconds(bfloat16(), true) == doctest::Approx(24 * elements).epsilon(0.03));
    CHECK(seconds(0.0f, false) == doctest::Approx(12 * elements).epsilon(0.06));
}
