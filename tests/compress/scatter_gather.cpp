// reduce_scatter and all_gather, compressed: shards as ZeRO has them.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // copy
#include <cmath>      // fabs
#include <vector>     // data

#include "ranks.hpp"                          // places, data
#include "schemes.hpp"                        // compressors
#include <tutti/comm/counted.hpp>             // bytes on the wire
#include <tutti/compress/all_gather.hpp>      // tested
#include <tutti/compress/dense.hpp>           // reference
#include <tutti/compress/reduce_scatter.hpp>  // tested

using namespace tutti;
using namespace tutti::test;
using compress::cut;
using compress::dense;
using compress::shards;

namespace {

template <class C> draw_key key_of(const C& c, std::uint32_t step = 0) {
    return {5, step, static_cast<std::uint32_t>(c.rank())};
}
part own_part(const shards& parts, int rank) { return compress::detail::extent_of(parts.of(rank)); }

const std::vector<std::size_t> tensors{100, 7, 1, 330, 32, 65, 0, 500};

}  // namespace

TEST_CASE_TEMPLATE("reduce_scatter through dense: this rank's shard of the sum in rank order, apart and in place",
                   Place, on_self, on_threads, on_lane) {
    const auto all = layout_of(tensors, 4, 5);
    const std::size_t size = end_of(all) + 2;
    for_ranks<Place>([&](auto& c) {
        const shards parts = cut(all, 32, c.size());
        rows<float> in;
        for (int r = 0; r < c.size(); ++r) { in.push_back(gradient(size, at(r))); }
        const auto want = reduced_in_rank_order<float>(op_kind::sum, in);
        const part own = own_part(parts, c.rank());
        std::vector<float> mine = in[at(c.rank())];
        std::vector<float> shard(own.count, 9.0f);
        compress::reduce_scatter(c, dense<>(), parts, view<const float>(mine), view<float>(shard), {}, key_of(c),
                                 sum{});
        expect(same_bytes(mine, in[at(c.rank())]), "in was written");
        compress::reduce_scatter(c, dense<>(), parts, view<const float>(mine),
                                 view<float>(mine).sub(own.first, own.count), {}, key_of(c), sum{});
        for (std::size_t i = 0; i < size; ++i) {
            const bool is_mine = i >= own.first && i < own.first + own.count;
            expect(mine[i] == (is_mine ? want[i] : in[at(c.rank())][i]), "in place: element {}", i);
            if (is_mine) { expect(shard[i - own.first] == want[i], "apart: element {}", i); }
        }
    });
}

// By reading, nothing in DeepSpeed's qgZ divides by the ranks of a node: its scale is off by their number.
TEST_CASE_TEMPLATE("the scale is that of an fp32 mean", T, float, bfloat16) {
    for (const int n : {1, 2, 3, 4, 8}) {
        CAPTURE(n);
        on_threads::run(n, [](comm::threads& c) {
            const auto all = layout_of({640, 96}, 8);
            const shards parts = cut(all, 32, c.size());
            const part own = own_part(parts, c.rank());
            std::vector<double> mean_of(736);
            std::vector<T> mine;
            for (int r = 0; r < c.size(); ++r) {
                const auto g = gradient<T>(736, at(r));
                for (std::size_t i = 0; i < 736; ++i) { mean_of[i] += static_cast<double>(g[i]) / c.size(); }
                if (r == c.rank()) { mine = g; }
            }
            std::vector<T> shard(own.count);
            compress::reduce_scatter(c, bucketed{}, parts, view<const T>(mine), view<T>(shard), {}, key_of(c));
            double product = 0;
            double square = 0;
            for (std::size_t i = 0; i < own.count; ++i) {
                const double exact_mean = mean_of[own.first + i];
                expect(std::fabs(static_cast<double>(shard[i]) - exact_mean) <= 2.0 / 255 + 0.005, "element {}: {}, {}",
                       i, static_cast<double>(shard[i]), exact_mean);
                product += static_cast<double>(shard[i]) * exact_mean;
                square += exact_mean * exact_mean;
            }
            if (own.count != 0) { expect(std::fabs(product / square - 1) < 0.01, "scale {}", product / square); }
        });
    }
}

TEST_CASE_TEMPLATE("what is lost on the way to a shard stays with its sender, and the own shard's residual is used",
                   Place, on_self, on_threads, on_lane) {
    const auto all = layout_of(tensors, 2);
    const std::size_t size = end_of(all);
    for_ranks<Place>([&](auto& c) {
        const shards parts = cut(all, 32, c.size());
        const part own = own_part(parts, c.rank());
        // Numbers that are a whole multiple of 2^-10, so that all sums below are exact.
        std::vector<float> g(size);
        std::vector<float> residual(size);
        for (std::size_t i = 0; i < size; ++i) {
            g[i] = std::round(1024 * random_element<float>(at(c.rank()), i)) / 1024;
            residual[i] = std::round(64 * random_element<float>(50 + at(c.rank()), i)) / 1024;
        }
        std::vector<double> owed(size);
        for (std::size_t i = 0; i < size; ++i) { owed[i] = static_cast<double>(g[i]) + residual[i]; }
        std::vector<float> shard(own.count);
        compress::reduce_scatter(c, bucketed{true}, parts, view<const float>(g), view<float>(shard),
                                 view<float>(residual), key_of(c), sum{});
        for (std::size_t i = 0; i < own.count; ++i) {
            expect(residual[own.first + i] == 0, "residual of the own shard");
        }
        std::vector<double> left(size);
        for (std::size_t i = 0; i < size; ++i) { left[i] = residual[i]; }
        for (std::size_t i = 0; i < own.count; ++i) { left[own.first + i] += shard[i]; }
        c.all_reduce(view<const double>(owed), view<double>(owed), sum{});
        c.all_reduce(view<const double>(left), view<double>(left), sum{});
        for (std::size_t i = 0; i < size; ++i) {
            expect(std::fabs(left[i] - owed[i]) <= 1e-5 * c.size(), "element {}: {} of {}", i, left[i], owed[i]);
        }
    });
}

// Ranks that draw the same numbers make the same errors, which do not average out (CGX seeds by the time of day).
TEST_CASE("ranks draw their own numbers: errors of equal gradients average out") {
    constexpr std::size_t n = 32 * 200;
    const auto error_with = [&](bool same_key) {
        double error = 0;
        comm::threads::launch(8, [&](comm::threads& c) {
            std::vector<float> g(n);
            for (std::size_t i = 0; i < n; ++i) { g[i] = static_cast<float>(i % 32) / 7 + 0.01f; }
            const auto all = layout_of({n}, 2);
            const shards parts = cut(all, 32, 8);
            std::vector<float> shard(own_part(parts, c.rank()).count);
            compress::reduce_scatter(c, bucketed{true}, parts, view<const float>(g), view<float>(shard), {},
                                     {5, 0, same_key ? 0u : static_cast<std::uint32_t>(c.rank())});
            if (c.rank() != 0) { return; }
            for (std::size_t i = 0; i < shard.size(); ++i) { error += (shard[i] - g[i]) * (shard[i] - g[i]); }
        });
        return error;
    };
    CHECK(error_with(false) < 0.25 * error_with(true));  // 1/7 is expected
}

TEST_CASE_TEMPLATE("all_gather: every shard as its wire decodes, on all ranks and on its owner", Place, on_self,
                   on_threads, on_lane) {
    const auto all = layout_of(tensors, 3, 4);
    const std::size_t size = end_of(all) + 1;
    for_ranks<Place>([&](auto& c) {
        const bucketed x{true};
        const shards parts = cut(all, 32, c.size());
        const part own = own_part(parts, c.rank());
        const auto weights = gradient(size, 40);
        std::vector<float> want(size, 6.0f);
        std::vector<float> lost(size);
        for (int r = 0; r < c.size(); ++r) {
            std::vector<std::byte> wire(compress::detail::wire_bytes(x, parts.of(r)));
            x.encode(c.queue(), parts.of(r), host<const float>(weights), host<float>(lost), host<std::byte>(wire),
                     {5, 0, static_cast<std::uint32_t>(r)});
            x.decode(c.queue(), parts.of(r), host<const std::byte>(wire), host<float>(want), 1.0f);
        }
        const std::vector<float> shard(weights.begin() + static_cast<long>(own.first),
                                       weights.begin() + static_cast<long>(own.first + own.count));
        std::vector<float> residual(own.count);
        std::vector<float> out(size, 6.0f);
        compress::all_gather(c, x, parts, view<const float>(shard), view<float>(out), view<float>(residual), key_of(c));
        expect(same_bytes(out, want), "not what the wires hold");
        for (std::size_t i = 0; i < own.count; ++i) { expect(residual[i] == lost[own.first + i], "residual {}", i); }
        // In place: the owner's values are replaced by what all others see.
        std::vector<float> live(size, 6.0f);
        std::copy(shard.begin(), shard.end(), live.begin() + static_cast<long>(own.first));
        compress::all_gather(c, x, parts, view<const float>(live).sub(own.first, own.count), view<float>(live), {},
                             key_of(c));
        expect(same_bytes(live, want), "in place");
        // Through dense: the weights.
        std::vector<float> full(size, 6.0f);
        compress::all_gather(c, dense<>(), parts, view<const float>(shard), view<float>(full), {}, key_of(c));
        for (std::size_t i = 4; i + 1 < size; ++i) { expect(full[i] == weights[i], "dense: element {}", i); }
        expect(full[0] == 6.0f && full[size - 1] == 6.0f, "written outside of the segments");
    });
}

// deepspeedai/DeepSpeed#4852, #4886: bf16 weights through kernels that read fp16.
TEST_CASE_TEMPLATE("weights of 16 bits keep their bits through dense of the same type", T, float16, bfloat16) {
    on_threads::run(3, [](comm::threads& c) {
        const auto all = layout_of({100, 33}, 16);
        const shards parts = cut(all, dense<T>::granularity(), c.size());
        const part own = own_part(parts, c.rank());
        const auto weights = gradient<T>(133, 3);
        std::vector<T> live(133);
        std::copy_n(weights.begin() + static_cast<long>(own.first), own.count,
                    live.begin() + static_cast<long>(own.first));
        compress::all_gather(c, dense<T>(), parts, view<const T>(live).sub(own.first, own.count), view<T>(live), {},
                             key_of(c));
        expect(same_bytes(live, weights), "weights changed");
    });
}

// deepspeedai/DeepSpeed#4386: multiples of 8 on 3 nodes; deepspeedai/DeepSpeed#5652: a partition of no elements.
TEST_CASE_TEMPLATE("shards of a strategy's own: by tensor, uneven, and empty", Place, on_threads, on_lane) {
    const auto check = [](const auto& x) {
        for_ranks<Place>([&](auto& c) {
            const auto all = layout_of({33, 5, 64, 1}, 10000);
            std::vector<std::vector<segment>> lists(at(c.size()));
            for (std::size_t i = 0; i < all.size(); ++i) { lists[(2 * i) % lists.size()].push_back(all[i]); }
            for (auto& list : lists) {  // one run each, as shards are
                if (list.size() > 1) {
                    std::sort(list.begin(), list.end(), [](auto& a, auto& b) { return a.offset < b.offset; });
                }
            }
            const shards parts(lists);
            std::vector<float> g(103);
            for (std::size_t i = 0; i < 103; ++i) { g[i] = small_element<float>(op_kind::sum, at(c.rank()), i); }
            std::vector<float> want(103);
            for (int r = 0; r < c.size(); ++r) {
                for (std::size_t i = 0; i < 103; ++i) { want[i] += small_element<float>(op_kind::sum, at(r), i); }
            }
            const part own = own_part(parts, c.rank());
            std::vector<float> shard(own.count);
            compress::reduce_scatter(c, x, parts, view<const float>(g), view<float>(shard), {}, key_of(c), sum{});
            for (const segment& s : parts.of(c.rank())) {
                for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) {
                    expect(shard[i - own.first] == want[i], "element {}", i);
                }
            }
            std::vector<float> full(103);
            compress::all_gather(c, x, parts, view<const float>(shard), view<float>(full), {}, key_of(c));
            expect(same_bytes(full, want), "gathered");
        });
    };
    check(dense<>());
    check(largest{});  // keeps everything
}

TEST_CASE("counted bytes equal the formula: all other shards' wires; the own wire to each other rank") {
    for (const int ranks : {1, 2, 3, 8}) {
        CAPTURE(ranks);
        comm::threads::launch(ranks, [&](comm::threads& world) {
            comm::counted<comm::threads> c(world.duplicate("c"));
            const auto all = layout_of(tensors, 4);
            const shards parts = cut(all, 32, ranks);
            const auto bytes_of = [&](int r) {
                std::uint64_t bytes = 0;
                for (const segment& s : parts.of(r)) { bytes += ((s.size() + 31) / 32 * 8 + s.size() + 15) / 16 * 16; }
                return bytes;
            };
            std::uint64_t others = 0;
            for (int r = 0; r < ranks; ++r) { others += r == c.rank() ? 0 : bytes_of(r); }
            const part own = own_part(parts, c.rank());
            std::vector<float> g(end_of(all));
            const auto before = c.traffic_ledger()->total();
            compress::reduce_scatter(c, bucketed{}, parts, view<const float>(g),
                                     view<float>(g).sub(own.first, own.count), {}, key_of(c));
            const auto between = c.traffic_ledger()->total();
            expect(between - before == comm::traffic{1, others}, "reduce_scatter: {}", (between - before).bytes);
            compress::all_gather(c, bucketed{}, parts, view<const float>(g).sub(own.first, own.count), view<float>(g),
                                 {}, key_of(c));
            const auto gathered = c.traffic_ledger()->total() - between;
            expect(gathered == comm::traffic{1, bytes_of(c.rank()) * static_cast<std::uint64_t>(ranks - 1)},
                   "all_gather: {}", gathered.bytes);
        });
    }
}

TEST_CASE("arguments that make no sense are refused before anything is sent") {
    comm::self<> c;
    const auto all = layout_of({64, 10}, 4);
    const shards parts = cut(all, 32, 1);
    std::vector<float> in(74);
    std::vector<float> out(74);
    const auto scatter = [&](const shards& p, std::size_t in_size, std::size_t out_size, view<float> residual) {
        compress::reduce_scatter(c, bucketed{}, p, view<const float>(in).sub(0, in_size),
                                 view<float>(out).sub(0, out_size), residual, key_of(c));
    };
    const auto gather = [&](const shards& p, std::size_t in_size, view<float> residual) {
        compress::all_gather(c, bucketed{}, p, view<const float>(in).sub(0, in_size), view<float>(out), residual,
                             key_of(c));
    };
    CHECK_THROWS_WITH_AS(scatter(cut(all, 32, 2), 74, 74, {}),
                         "compressed reduce_scatter: 2 shards for 1 ranks, on 'self'", usage_error);
    CHECK_THROWS_WITH_AS(scatter(parts, 73, 74, {}),
                         "compressed reduce_scatter: tensor 1 is at elements 64 to 74 of 73", usage_error);
    CHECK_THROWS_WITH_AS(scatter(parts, 74, 73, {}), "compressed reduce_scatter: out has 73 elements instead of 74",
                         usage_error);
    std::vector<float> residual(74);
    CHECK_THROWS_WITH_AS(scatter(parts, 74, 74, view<float>(residual).sub(0, 5)),
                         "compressed reduce_scatter: residual has 5 elements instead of 74", usage_error);
    CHECK_THROWS_WITH_AS(scatter(parts, 74, 74, view<float>(out)),
                         "compressed reduce_scatter: the residual overlaps in or out", usage_error);
    CHECK_THROWS_WITH_AS(scatter(parts, 74, 74, view<float>(in)),
                         "compressed reduce_scatter: the residual overlaps in or out", usage_error);
    CHECK_THROWS_AS(gather(cut(all, 32, 2), 74, {}), usage_error);
    CHECK_THROWS_WITH_AS(gather(parts, 73, {}), "compressed all_gather: in has 73 elements instead of 74", usage_error);
    CHECK_THROWS_WITH_AS(gather(parts, 74, view<float>(residual).sub(0, 5)),
                         "compressed all_gather: residual has 5 elements instead of 74", usage_error);
    std::vector<float> both(100);
    CHECK_THROWS_WITH_AS(compress::reduce_scatter(c, bucketed{}, parts, view<const float>(both).sub(0, 74),
                                                  view<float>(both).sub(1, 74), {}, key_of(c)),
                         "compressed reduce_scatter: in and out overlap, but not as the in-place form asks",
                         usage_error);
    CHECK_THROWS_AS(compress::all_gather(c, bucketed{}, parts, view<const float>(both).sub(1, 74),
                                         view<float>(both).sub(0, 74), {}, key_of(c)),
                    usage_error);
    CHECK_THROWS_WITH_AS(scatter(shards({{{0, 9, 0, 0, 64, 1}}}), 74, 64, {}), "bucketed: 9 bits", usage_error);
}
