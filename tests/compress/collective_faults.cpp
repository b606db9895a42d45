// Compressed collectives when ranks disagree, arguments are wrong, or a rank fails: errors, no hang, no wrong numbers.
#include <doctest/doctest.h>  // checks

#include <chrono>      // deadlines
#include <functional>  // differences
#include <string>      // texts
#include <vector>      // data

#include "ranks.hpp"                        // data
#include "schemes.hpp"                      // compressors
#include <tutti/comm/checked.hpp>           // who differs
#include <tutti/comm/counted.hpp>           // nested decorators
#include <tutti/comm/faulty.hpp>            // planned failures
#include <tutti/compress/hierarchical.hpp>  // tested, with what it is made of

using namespace tutti;
using namespace tutti::test;
using namespace std::chrono_literals;
using compress::dense_level;

namespace {

using watched = comm::counted<comm::checked<comm::threads>>;

/// What each rank does, before one of them does something else.
struct plan {
    std::vector<segment> all = layout_of({64, 64, 32}, 4);
    draw_key key{1, 1, 0};
    bool is_mean = true;
    std::size_t size = 160;
};

/// Runs `work(comm, plan)` on 3 ranks of which rank 1 has a plan changed by `change`; the texts of their errors.
template <class Work> std::vector<std::string> texts_of(Work work, const std::function<void(plan&)>& change) {
    std::vector<std::string> texts(3);
    const auto body = [&](comm::threads& world) {
        watched c(comm::checked<comm::threads>(world.duplicate("c")));
        plan mine;
        mine.key.rank = static_cast<std::uint32_t>(c.rank());
        if (c.rank() == 1) { change(mine); }
        try {
            work(c, mine);
        } catch (const mismatch_error& e) {
            texts[at(c.rank())] = e.what();
            expect(e.ranks() == std::vector<int>{1}, "not rank 1 is named");
        }
    };
    comm::threads::launch(3, body, {.name = "world", .timeout = 20s});
    return texts;
}

template <class X> auto reduces(X x) {
    return [x](watched& c, const plan& p) {
        std::vector<float> g = gradient(p.size, at(c.rank()));
        auto state = compress::make_state(x, c.queue(), p.all);
        if (p.is_mean) {
            compress::all_reduce(c, x, state, p.all, view<const float>(g), view<float>(g), {}, p.key, mean{});
        } else {
            compress::all_reduce(c, x, state, p.all, view<const float>(g), view<float>(g), {}, p.key, sum{});
        }
    };
}

void check_differs(const std::vector<std::string>& texts, std::string_view operation) {
    for (const auto& text : texts) {
        CHECK(text.find(operation) != std::string::npos);
        CHECK(text.find("layout, level, seed or step differs (rank 0: ") != std::string::npos);
        CHECK(text.find(", rank 1: ") != std::string::npos);
        CHECK(text.find("rank 2: ") == std::string::npos);
    }
}

}  // namespace

// sands-lab/grace#7: another order of tensors on each worker. Sizes are equal, so no count tells.
TEST_CASE_TEMPLATE("checked: a rank with another layout, level, step, seed or operator is named on every rank", X,
                   bucketed, largest, sampled) {
    const std::vector<std::function<void(plan&)>> changes{
        [](plan& p) { std::swap(p.all[0].tensor, p.all[1].tensor); },
        [](plan& p) { p.all[1].level = 5; },
        [](plan& p) { p.all[1].level = dense_level; },
        [](plan& p) { p.all[0].first = 32; },
        [](plan& p) { p.all.pop_back(); },
        [](plan& p) { p.all.clear(); },
        [](plan& p) {
            p.all[0].rows = 8;
            p.all[0].cols = 8;
        },
        [](plan& p) { p.key.step = 2; },
        [](plan& p) { p.key.seed = 2; },
        [](plan& p) { p.is_mean = false; },
    };
    for (const auto& change : changes) {
        check_differs(texts_of(reduces(X{}), change), "agree: compressed all_reduce: ");
    }
    // And nothing is said where nothing differs, or only what may.
    for (const auto& text : texts_of(reduces(X{}), [](plan& p) { p.key.rank = 77; })) { CHECK(text.empty()); }
    const auto elsewhere = [](plan& p) {
        p.size = 200;
        for (segment& s : p.all) { s.offset += 30; }
    };
    for (const auto& text : texts_of(reduces(X{}), elsewhere)) { CHECK(text.empty()); }
}

TEST_CASE("checked: reduce_scatter, all_gather and the hierarchical form look as well") {
    const auto parts_of = [](const plan& p, int ranks) { return compress::cut(p.all, 32, ranks); };
    const auto swap = [](plan& p) { std::swap(p.all[0].tensor, p.all[1].tensor); };
    check_differs(texts_of(
                      [&](watched& c, const plan& p) {
                          const auto parts = parts_of(p, c.size());
                          std::vector<float> g(p.size);
                          std::vector<float> out(compress::detail::extent_of(parts.of(c.rank())).count);
                          compress::reduce_scatter(c, bucketed{}, parts, view<const float>(g), view<float>(out), {},
                                                   p.key);
                      },
                      swap),
                  "agree: compressed reduce_scatter: ");
    check_differs(texts_of(
                      [&](watched& c, const plan& p) {
                          const auto parts = parts_of(p, c.size());
                          std::vector<float> out(p.size);
                          std::vector<float> in(compress::detail::extent_of(parts.of(c.rank())).count);
                          compress::all_gather(c, bucketed{}, parts, view<const float>(in), view<float>(out), {},
                                               p.key);
                      },
                      swap),
                  "agree: compressed all_gather: ");
    check_differs(texts_of(
                      [&](watched& c, const plan& p) {
                          auto alone = *c.split(std::vector<int>{0, 1, 2}, "alone");
                          std::vector<float> g(p.size);
                          compress::stateless<host_queue> none;
                          compress::all_reduce(c, alone, bucketed{}, none, p.all, view<const float>(g), view<float>(g),
                                               {}, p.key);
                      },
                      swap),
                  "agree: hierarchical all_reduce: ");
}

TEST_CASE("checked: shards that others cut otherwise are found by their counts of bytes") {
    std::vector<std::string> texts(3);
    comm::threads::launch(3, [&](comm::threads& world) {
        comm::checked<comm::threads> c(world.duplicate("c"));
        const auto all = layout_of({64, 64, 32}, 4);
        // The same segments on all ranks, dealt out differently by rank 2.
        const compress::shards parts = c.rank() == 2 ? compress::shards({{all[0], all[1]}, {}, {all[2]}})
                                                     : compress::shards({{all[0]}, {all[1]}, {all[2]}});
        std::vector<float> g(160);
        std::vector<float> out(compress::detail::extent_of(parts.of(c.rank())).count);
        try {
            compress::reduce_scatter(c, bucketed{}, parts, view<const float>(g), view<float>(out), {}, {});
        } catch (const mismatch_error& e) { texts[at(c.rank())] = e.what(); }
    });
    for (const auto& text : texts) { CHECK(text.find("all_to_all_v: count differs") != std::string::npos); }
}

TEST_CASE("without checked, nobody asks: no control gather, no call more than the data's") {
    static_assert(compress::detail::compares_calls<watched>());
    static_assert(compress::detail::compares_calls<comm::checked<comm::counted<comm::threads>>>());
    static_assert(!compress::detail::compares_calls<comm::counted<comm::threads>>());
    static_assert(!compress::detail::compares_calls<comm::threads>());
    // Unchecked ranks of another step still exchange what they said: sizes agree, so it ends.
    comm::threads::launch(2, [](comm::threads& c) {
        std::vector<float> g(64);
        compress::stateless<host_queue> none;
        compress::all_reduce(c, bucketed{}, none, layout_of({64}, 4), view<const float>(g), view<float>(g), {},
                             {1, static_cast<std::uint32_t>(c.rank()), 0});
    });
}

TEST_CASE("arguments that make no sense are refused before anything is sent, and the communicator stays usable") {
    comm::threads::launch(2, [](comm::threads& world) {
        comm::counted<comm::threads> c(world.duplicate("c"));
        std::vector<float> in(100);
        std::vector<float> out(100);
        std::vector<float> residual(100);
        compress::stateless<host_queue> none;
        const auto refused = [&](std::string_view text, const std::vector<segment>& all, view<const float> from,
                                 view<float> to, view<float> left) {
            try {
                compress::all_reduce(c, bucketed{}, none, all, from, to, left, {});
                expect(false, "accepted: {}", text);
            } catch (const usage_error& e) { expect(e.what() == text, "'{}' instead of '{}'", e.what(), text); }
        };
        const auto all = layout_of({64, 36}, 4);
        refused("compressed all_reduce: in has 99 elements instead of 100", all, view<const float>(in).sub(0, 99), out,
                {});
        refused("compressed all_reduce: tensor 1 is at elements 64 to 100 of 99", all, view<const float>(in).sub(0, 99),
                view<float>(out).sub(0, 99), {});
        refused("compressed all_reduce: residual has 3 elements instead of 100", all, in, out,
                view<float>(residual).sub(0, 3));
        refused("compressed all_reduce: the residual overlaps in or out", all, in, out, view<float>(in));
        refused("compressed all_reduce: the residual overlaps in or out", all, in, out, view<float>(out));
        refused("compressed all_reduce: segments of tensors 0 and 1 share element 63", {all[0], {1, 4, 63, 0, 36, 1}},
                in, out, {});
        refused("bucketed: 9 bits", layout_of({64, 36}, 9), in, out, {});
        refused("cut: a segment of tensor 0 begins at its element 5, which is not a multiple of the granularity 32",
                {{0, 4, 0, 5, 64, 1}}, in, out, {});
        std::vector<float> both(101);
        refused("compressed all_reduce: in and out overlap, but not as the in-place form asks", all,
                view<const float>(both).sub(0, 100), view<float>(both).sub(1, 100), {});
        expect(c.traffic_ledger()->total() == comm::traffic{}, "something was sent");
        compress::all_reduce(c, bucketed{}, none, all, view<const float>(in), view<float>(out), view<float>(residual),
                             {});
    });
}

TEST_CASE("a rank that fails in the middle ends the others with its reason; none hangs") {
    for (const bool on_a_lane : {false, true}) {
        std::vector<std::string> texts(3);
        const auto body = [&](comm::threads& world) {
            const auto work = [&](comm::threads& c) {
                std::vector<float> g = gradient(160, at(c.rank()));
                auto all = layout_of({64, 64, 32}, 4);
                if (c.rank() == 2) { all[0].level = 9; }  // refused there; the others wait for it
                compress::stateless<host_queue> none;
                compress::all_reduce(c, bucketed{}, none, all, view<const float>(g), view<float>(g), {}, {});
            };
            try {
                if (on_a_lane) {
                    schedule::lane<comm::threads> own(world.duplicate("lane"));
                    const auto done = own.submit("work", work);
                    done.wait(world.queue());
                } else {
                    work(world);
                }
            } catch (const error& e) {
                texts[at(world.rank())] = e.what();
                throw;
            }
        };
        CHECK_THROWS_WITH_AS(comm::threads::launch(3, body, {.name = "world", .timeout = 20s}), "bucketed: 9 bits",
                             usage_error);
        for (const auto& text : texts) { CHECK(text.find("bucketed: 9 bits") != std::string::npos); }
    }
}
