// all_reduce, compressed: against a restatement for one process, on one rank, on threads and on lanes of them.
#include <doctest/doctest.h>  // checks

#include <atomic>  // bytes over ranks
#include <chrono>  // delays
#include <cmath>   // fabs
#include <limits>  // NaN
#include <span>    // tables
#include <thread>  // sleep
#include <vector>  // data

#include "ranks.hpp"                      // places, data
#include "schemes.hpp"                    // compressors
#include <tutti/comm/counted.hpp>         // bytes on the wire
#include <tutti/compress/all_reduce.hpp>  // tested

using namespace tutti;
using namespace tutti::test;
using compress::dense;
using compress::dense_level;

namespace {

constexpr std::uint64_t seed = 11;
template <class C> draw_key key_of(const C& c, std::uint32_t step = 0) {
    return {seed, step, static_cast<std::uint32_t>(c.rank())};
}
draw_key key_of(int rank, std::uint32_t step = 0) { return {seed, step, static_cast<std::uint32_t>(rank)}; }

/// What a compressor makes of one segment, alone: the wire's values; the residual is updated.
template <class X>
std::vector<float> through(const X& x, const segment& s, const std::vector<float>& in, std::vector<float>& residual,
                           draw_key key) {
    std::vector<std::byte> wire(x.wire_bytes(s));
    const std::vector<segment> one{s};
    x.encode(host_queue(), one, host<const float>(in), host<float>(residual), host<std::byte>(wire), key);
    std::vector<float> out(in.size());
    x.decode(host_queue(), one, host<const std::byte>(wire), host<float>(out), 1.0f);
    return out;
}

struct everyone {
    rows<float> in;
    rows<float> residual;
    std::vector<float> out;  // the sum
};

/// The cut form, restated: element by element, each owned by some rank.
template <class X> void reduce_cut(everyone& e, const X& x, const std::vector<segment>& all, std::uint32_t step) {
    const int n = static_cast<int>(e.in.size());
    const compress::shards parts = compress::cut(all, x.granularity(), n);
    for (int owner = 0; owner < n; ++owner) {
        for (const segment& s : parts.of(owner)) {
            std::vector<float> total(e.out.size());
            for (int r = 0; r < n; ++r) {
                std::vector<float> arrived;
                if (r != owner) { arrived = through(x, s, e.in[at(r)], e.residual[at(r)], key_of(r, step)); }
                for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) {
                    total[i] += r != owner ? arrived[i] : e.in[at(r)][i] + e.residual[at(r)][i];
                    if (r == owner) { e.residual[at(r)][i] = 0; }
                }
            }
            const auto arrived = through(x, s, total, e.residual[at(owner)], key_of(owner, step));
            for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) { e.out[i] = arrived[i]; }
        }
    }
}
template <class X> void reduce_whole(everyone& e, const X& x, const std::vector<segment>& all, std::uint32_t step) {
    for (const segment& s : all) {
        std::vector<float> total(e.out.size());
        for (std::size_t r = 0; r < e.in.size(); ++r) {
            const auto arrived = through(x, s, e.in[r], e.residual[r], key_of(static_cast<int>(r), step));
            for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) { total[i] += arrived[i]; }
        }
        for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) { e.out[i] = total[i]; }
    }
}
/// Linear in the gradient, so the sum of what each would send.
void reduce_sampled(everyone& e, const std::vector<segment>& all, std::uint32_t step) {
    const auto shift = static_cast<std::size_t>(draw_key{seed, step, 0}.shared().stream(0, 3).below(0, 1000));
    for (const segment& s : all) {
        for (std::size_t r = 0; r < e.in.size(); ++r) {
            for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) { e.residual[r][i] += e.in[r][i]; }
        }
        for (std::size_t k = 0; k < sampled::kept(s); ++k) {
            const std::size_t i = sampled::place(s, k, shift);
            for (auto& residual : e.residual) {
                e.out[i] += residual[i];
                residual[i] = 0;
            }
        }
    }
}

/// Steps of `reduce`, each rank against the restatement, bit by bit; inputs are whole numbers where `whole`.
template <class Place, class X, class Restated>
void check_steps(const X& x, const std::vector<segment>& all, Restated restated, bool in_place) {
    const std::size_t size = end_of(all) + 3;  // elements behind the last segment belong to nobody
    for_ranks<Place>([&](auto& c) {
        const int n = c.size();
        everyone e{rows<float>(at(n)), rows<float>(at(n), std::vector<float>(size)), {}};
        std::vector<float> residual(size);
        auto state = compress::make_state(x, c.queue(), all);
        for (std::uint32_t step = 0; step < 3; ++step) {
            for (int r = 0; r < n; ++r) { e.in[at(r)] = gradient(size, at(r), step); }
            e.out.assign(size, 0.0f);
            restated(e, all, step);
            std::vector<float> in = e.in[at(c.rank())];
            std::vector<float> out = in_place ? in : std::vector<float>(size, 7.0f);
            const std::vector<float> before = out;
            view<float> to = in_place ? view<float>(in) : view<float>(out);
            compress::all_reduce(c, x, state, all, view<const float>(in), to, view<float>(residual), key_of(c, step),
                                 sum{});
            if (!in_place) { expect(same_bytes(in, e.in[at(c.rank())]), "in was written"); }
            for (std::size_t i = 0; i < size; ++i) {
                const bool inside = std::any_of(
                    all.begin(), all.end(), [&](const segment& s) { return i >= s.offset && i < s.offset + s.size(); });
                const float want = inside ? e.out[i] : before[i];
                expect(to[i] == want, "step {}: element {} of {} ranks is {}, not {}", step, i, n, to[i], want);
                expect(residual[i] == e.residual[at(c.rank())][i], "step {}: residual {} is {}, not {}", step, i,
                       residual[i], e.residual[at(c.rank())][i]);
            }
        }
    });
}

const std::vector<std::size_t> tensors{100, 7, 1, 330, 32, 65, 0, 1000};

}  // namespace

TEST_CASE_TEMPLATE("cut among owners: every bit as restated, residuals too", Place, on_self, on_threads, on_lane) {
    for (const bool stochastic : {false, true}) {
        const bucketed x{stochastic};
        const auto restated = [&](everyone& e, const std::vector<segment>& all, std::uint32_t step) {
            reduce_cut(e, x, all, step);
        };
        check_steps<Place>(x, layout_of(tensors, 4), restated, false);
        check_steps<Place>(x, layout_of(tensors, 2), restated, true);
        // In another order than that of the views, with gaps, with several levels, and parts of tensors.
        const std::vector<segment> apart{
            {9, 4, 700, 64, 97, 1}, {1, 2, 0, 0, 10, 12}, {2, 8, 300, 0, 64, 1}, {7, 1, 150, 320, 31, 1}};
        check_steps<Place>(x, apart, restated, false);
        check_steps<Place>(x, apart, restated, true);
    }
}

TEST_CASE_TEMPLATE("gathered whole: every bit as restated, residuals too", Place, on_self, on_threads, on_lane) {
    const largest x;
    const auto restated = [&](everyone& e, const std::vector<segment>& all, std::uint32_t step) {
        reduce_whole(e, x, all, step);
    };
    check_steps<Place>(x, layout_of({100, 7, 1, 330}, 1000), restated, false);
    check_steps<Place>(x, layout_of({100, 7, 1, 330}, 100), restated, true);
    check_steps<Place>(x, {{3, 500, 400, 0, 20, 5}, {1, 2000, 10, 0, 33, 1}}, restated, false);
}

TEST_CASE_TEMPLATE("linear: as restated, residuals too", Place, on_self, on_threads, on_lane) {
    // Means of n numbers times n are not their sums for every n: whole numbers, and powers of two.
    const sampled x;
    const auto all = layout_of({100, 7, 1, 330}, 4);
    const std::size_t size = end_of(all);
    for_ranks<Place>([&](auto& c) {
        const int n = c.size();
        everyone e{rows<float>(at(n), std::vector<float>(size)), rows<float>(at(n), std::vector<float>(size)), {}};
        std::vector<float> residual(size);
        auto state = compress::make_state(x, c.queue(), all);
        for (std::uint32_t step = 0; step < 4; ++step) {
            for (int r = 0; r < n; ++r) {
                for (std::size_t i = 0; i < size; ++i) {
                    e.in[at(r)][i] = small_element<float>(op_kind::sum, at(r) + step * 100, i) * static_cast<float>(n);
                }
            }
            e.out.assign(size, 0.0f);
            reduce_sampled(e, all, step);
            std::vector<float> out(e.in[at(c.rank())]);
            compress::all_reduce(c, x, state, all, view<const float>(out), view<float>(out), view<float>(residual),
                                 key_of(c, step), mean{});
            for (std::size_t i = 0; i < size; ++i) {
                expect(out[i] == e.out[i] / static_cast<float>(n), "step {}: element {}", step, i);
            }
            expect(same_bytes(residual, e.residual[at(c.rank())]), "step {}: residuals", step);
            // As a sum, and with nothing to keep residuals in.
            std::vector<float> summed(size, 7.0f);
            everyone without{e.in, rows<float>(at(n), std::vector<float>(size)), std::vector<float>(size)};
            reduce_sampled(without, all, step);
            compress::all_reduce(c, x, state, all, view<const float>(e.in[at(c.rank())]), view<float>(summed), {},
                                 key_of(c, step), sum{});
            expect(same_bytes(summed, without.out), "step {}: sums", step);
        }
    });
}

// Dense segments among the others: exact, with what is left over from when they were compressed, and nothing stays.
TEST_CASE_TEMPLATE("segments of dense_level arrive whole and leave no residual, whatever the compressor", Place,
                   on_self, on_threads, on_lane) {
    const auto check = [](const auto& x, int level) {
        std::vector<segment> all = layout_of({64, 10, 3, 128, 1, 50}, level);
        all[1].level = all[2].level = all[4].level = dense_level;
        const std::size_t size = end_of(all);
        for_ranks<Place>([&](auto& c) {
            auto state = compress::make_state(x, c.queue(), all);
            std::vector<float> residual(size);
            rows<float> in;
            for (int r = 0; r < c.size(); ++r) {
                in.emplace_back(size);
                for (std::size_t i = 0; i < size; ++i) { in.back()[i] = small_element<float>(op_kind::sum, at(r), i); }
            }
            for (float& v : residual) { v = static_cast<float>(1 + c.rank()); }
            std::vector<float> out(size, 99.0f);
            compress::all_reduce(c, x, state, all, view<const float>(in[at(c.rank())]), view<float>(out),
                                 view<float>(residual), key_of(c), sum{});
            for (const std::size_t t : {1u, 2u, 4u}) {
                for (std::size_t i = all[t].offset; i < all[t].offset + all[t].size(); ++i) {
                    float want = static_cast<float>(c.size() * (c.size() + 1) / 2);
                    for (const auto& row : in) { want += row[i]; }
                    expect(out[i] == want, "tensor {}: {} instead of {}", t, out[i], want);
                    expect(residual[i] == 0, "tensor {} leaves {}", t, residual[i]);
                }
            }
            expect_equal_on_all(c, out);
            expect(std::any_of(residual.begin(), residual.end(), [](float v) { return v != 0; }), "others leave none");
        });
    };
    check(bucketed{}, 2);
    check(largest{}, 1000);
    check(sampled{}, 4);
}

TEST_CASE("a layout that is dense altogether is one plain all_reduce of floats; one without segments is nothing") {
    const auto check = [](const auto& x) {
        comm::threads::launch(3, [&](comm::threads& world) {
            comm::counted<comm::threads> c(world.duplicate("c"));
            const auto all = layout_of({12, 8}, dense_level);
            auto state = compress::make_state(x, c.queue(), std::vector<segment>{});
            std::vector<float> v{gradient(20, at(c.rank()))};
            const std::vector<float> original = v;
            compress::all_reduce(c, x, state, std::vector<segment>{}, view<const float>(v), view<float>(v), {},
                                 key_of(c));
            expect(same_bytes(v, original), "written without a segment");
            expect(c.traffic_ledger()->total() == comm::traffic{}, "sent without a segment");
            compress::all_reduce(c, x, state, all, view<const float>(v), view<float>(v), {}, key_of(c));
            std::vector<float> want(20);
            rows<float> in{gradient(20, 0), gradient(20, 1), gradient(20, 2)};
            for (std::size_t i = 0; i < 20; ++i) { want[i] = (in[0][i] + in[1][i] + in[2][i]) * (1.0f / 3.0f); }
            expect(same_bytes(v, want), "not the mean");
            expect(c.traffic_ledger()->snapshot()[comm::collective::all_reduce].calls == 1, "all_reduce calls");
            expect(c.traffic_ledger()->total().calls == 1, "other calls");
        });
    };
    check(bucketed{});
    check(largest{});
    check(sampled{});
}

// T10. deepspeedai/DeepSpeed#5054: odd sizes, which an all_to_all of equal parts corrupts without an error.
TEST_CASE_TEMPLATE("sizes around the number of ranks and the bucket, odd and prime", Place, on_self, on_threads) {
    for (const std::size_t n :
         {0u, 1u, 2u, 3u, 4u, 5u, 7u, 8u, 9u, 31u, 32u, 33u, 63u, 64u, 65u, 97u, 127u, 255u, 256u, 257u, 1021u}) {
        CAPTURE(n);
        for_ranks<Place>([&](auto& c) {
            const auto all = layout_of({n}, 8);
            rows<float> in;
            std::vector<float> want(n);
            for (int r = 0; r < c.size(); ++r) {
                in.push_back(gradient(n, at(r)));
                for (std::size_t i = 0; i < n; ++i) { want[i] += in.back()[i]; }
            }
            compress::stateless<host_queue> none;
            std::vector<float> out(n, 9.0f);
            compress::all_reduce(c, dense<>(), none, all, view<const float>(in[at(c.rank())]), view<float>(out), {},
                                 key_of(c), sum{});
            expect(same_bytes(out, want), "dense: not the sum in rank order");
            std::vector<float> small(n, 9.0f);
            compress::all_reduce(c, bucketed{}, none, all, view<const float>(in[at(c.rank())]), view<float>(small), {},
                                 key_of(c), sum{});
            expect_equal_on_all(c, small);
            for (std::size_t i = 0; i < n; ++i) {
                // Half a step of each sender, and of the sum: ranges are below 2 a rank.
                const float bound = static_cast<float>(c.size()) * (2.0f / 255 + 1e-5f);
                expect(std::fabs(small[i] - want[i]) <= bound, "element {}: {} instead of {}", i, small[i], want[i]);
            }
        });
    }
}

// T7. local-inference-lab/b12x#44: an owner that keeps its sum as it was before the wire differs from all others.
TEST_CASE_TEMPLATE("all ranks end with the same bits, over many steps", Place, on_threads, on_lane) {
    const auto check = [](const auto& x, int level) {
        const auto all = layout_of({321, 64, 5}, level);
        for_ranks<Place>([&](auto& c) {
            auto state = compress::make_state(x, c.queue(), all);
            std::vector<float> residual(390);
            for (std::uint32_t step = 0; step < 20; ++step) {
                std::vector<float> g = gradient(390, at(c.rank()), step);
                compress::all_reduce(c, x, state, all, view<const float>(g), view<float>(g), view<float>(residual),
                                     key_of(c, step));
                expect_equal_on_all(c, g);
            }
        });
    };
    check(bucketed{true}, 1);
    check(bucketed{}, 3);
    check(largest{}, 500);
    check(sampled{}, 3);
}

// T8.
TEST_CASE_TEMPLATE("constant inputs arrive exactly", Place, on_self, on_threads) {
    for_ranks<Place>([](auto& c) {
        const auto all = layout_of({100, 33}, 2);
        const std::vector<float> in(133, 3.0f + static_cast<float>(c.rank()));
        compress::stateless<host_queue> none;
        std::vector<float> out(133);
        compress::all_reduce(c, bucketed{true}, none, all, view<const float>(in), view<float>(out), {}, key_of(c),
                             sum{});
        for (const float v : out) {
            expect(v == static_cast<float>(3 * c.size() + c.size() * (c.size() - 1) / 2), "the sum is {}", v);
        }
    });
}

// T9. Every sender's steps have an error of u^2 / 6 each; the sum's range grows as the root of the number of ranks.
TEST_CASE("the error is that of one compression a sender and one of the sum") {
    constexpr std::size_t n = 32 * 400;
    for (const int ranks : {2, 4, 8}) {
        CAPTURE(ranks);
        comm::threads::launch(ranks, [&](comm::threads& c) {
            const auto all = layout_of({n}, 4);
            std::vector<std::vector<float>> in(at(ranks), std::vector<float>(n));
            const auto unit_square = [&](const std::vector<float>& v) {
                double total = 0;
                for (std::size_t b = 0; b < n; b += 32) {
                    const auto [low, high] =
                        std::minmax_element(v.begin() + static_cast<long>(b), v.begin() + static_cast<long>(b) + 32);
                    const double unit = (*high - *low) / 15.0;
                    total += 32 * unit * unit;
                }
                return total;
            };
            std::vector<float> exact_sum(n);
            double of_senders = 0;
            for (int r = 0; r < ranks; ++r) {
                const random_stream normals{77, static_cast<std::uint32_t>(r), 0};
                for (std::size_t i = 0; i < n; ++i) {
                    in[at(r)][i] = normals.normal(i);
                    exact_sum[i] += in[at(r)][i];
                }
                of_senders += unit_square(in[at(r)]);
            }
            compress::stateless<host_queue> none;
            double error = 0;
            constexpr int draws = 8;
            for (std::uint32_t step = 0; step < draws; ++step) {
                std::vector<float> out(n);
                compress::all_reduce(c, bucketed{true}, none, all, view<const float>(in[at(c.rank())]),
                                     view<float>(out), {}, key_of(c, step), sum{});
                for (std::size_t i = 0; i < n; ++i) {
                    const double d = static_cast<double>(out[i]) - static_cast<double>(exact_sum[i]);
                    error += d * d / draws;
                }
            }
            // All but the owner send: (n - 1) / n of the senders' errors.
            const double model = (of_senders * (ranks - 1) / ranks + unit_square(exact_sum)) / 6;
            expect(std::fabs(error / model - 1) < 0.1, "mean square error {} instead of {}", error, model);
        });
    }
}

// T11. CGX starts buckets anew at each chunk, so that they depend on the number of ranks.
TEST_CASE("what a rank's bucket decodes to depends neither on the number of ranks nor on the cut") {
    // One rank has a gradient, the others zeros: whatever the owners, an element goes through its bucket's levels once
    // or twice, and nearest rounding of what is on the grid changes nothing.
    const auto all = layout_of({1000, 77}, 3);
    const auto reduced = [&](int ranks) {
        std::vector<float> result;
        comm::threads::launch(ranks, [&](comm::threads& c) {
            std::vector<float> g(1077);
            if (c.rank() == 0) {
                for (std::size_t i = 0; i < 1077; ++i) { g[i] = static_cast<float>((i * 37 + i / 32) % 1000); }
            }
            compress::stateless<host_queue> none;
            compress::all_reduce(c, bucketed{}, none, all, view<const float>(g), view<float>(g), {}, key_of(c), sum{});
            if (c.rank() == 0) { result = g; }
        });
        return result;
    };
    const auto one = reduced(1);
    for (const int ranks : {2, 3, 4, 8}) {
        const auto many = reduced(ranks);
        for (std::size_t i = 0; i < one.size(); ++i) { REQUIRE(many[i] == doctest::Approx(one[i]).epsilon(1e-5)); }
    }
}

// T12. pytorch/pytorch#50283: a test of a compressor that moved nothing.
TEST_CASE("counted bytes on the wire equal the formula, rank by rank") {
    for (const int ranks : {1, 2, 3, 4, 8}) {
        CAPTURE(ranks);
        const auto n = static_cast<std::uint64_t>(ranks);
        std::atomic<std::uint64_t> cut_total{0};
        const auto all = layout_of(tensors, 4);
        comm::threads::launch(ranks, [&](comm::threads& world) {
            comm::counted<comm::threads> c(world.duplicate("c"));
            const auto ledger = c.traffic_ledger();
            using enum comm::collective;
            std::vector<float> g(end_of(all));
            const auto moved = [&](const auto& x, const std::vector<segment>& layout) {
                auto state = compress::make_state(x, c.queue(), layout);
                const auto before = ledger->snapshot();
                compress::all_reduce(c, x, state, layout, view<const float>(g), view<float>(g), {}, key_of(c));
                return ledger->snapshot() - before;
            };
            // Cut: each piece is 8 bytes a bucket of 32 and 1 an element, in multiples of 16.
            const auto parts = compress::cut(all, 32, ranks);
            const auto bytes_of = [&](int r) {
                std::uint64_t bytes = 0;
                for (const segment& s : parts.of(r)) { bytes += ((s.size() + 31) / 32 * 8 + s.size() + 15) / 16 * 16; }
                return bytes;
            };
            std::uint64_t others = 0;
            for (int r = 0; r < ranks; ++r) { others += r == c.rank() ? 0 : bytes_of(r); }
            auto t = moved(bucketed{}, all);
            expect(t[all_to_all_v] == comm::traffic{1, others}, "all_to_all_v: {}", t[all_to_all_v].bytes);
            expect(t[all_gather_v] + t[all_gather] == comm::traffic{1, bytes_of(c.rank()) * (n - 1)}, "all_gather");
            expect(t.total().calls == 2, "{} calls", t.total().calls);
            cut_total += t.total().bytes;

            // Whole: 8 bytes an element that is kept, of each tensor, to all others.
            const auto sparse_layout = layout_of({100, 7, 330}, 1000);
            t = moved(largest{}, sparse_layout);
            expect(t.total() == comm::traffic{1, (80 + 16 + 272) * (n - 1)}, "whole: {} bytes", t.total().bytes);
            expect(t[all_gather].calls == 1, "whole is gathered");

            // Linear, with a dense segment on the first wire: 25 + 82 + 1 kept, half of each tensor's a round; 7 floats,
            // padded to 8.
            auto mixed = layout_of({100, 7, 330, 7}, 4);
            mixed[1].level = dense_level;
            t = moved(sampled{}, mixed);
            comm::call wire;
            wire.kind = all_reduce;
            wire.element_size = 4;
            std::uint64_t want = 0;
            for (const std::size_t floats : {8u + 12 + 41 + 0, 13u + 41 + 1}) {
                wire.in_count = wire.out_count = floats;
                want += comm::wire_bytes(wire, c.rank(), ranks);
            }
            expect(t.total() == comm::traffic{2, want}, "linear: {} bytes, not {}", t.total().bytes, want);
        });
        std::uint64_t w = 0;
        const auto parts = compress::cut(all, 32, ranks);
        for (const segment& s : parts.all()) { w += bucketed{}.wire_bytes(s); }
        CHECK(cut_total == 2 * (n - 1) * w);
    }
}

// sands-lab/grace#16: an empty selection hangs. ggml-org/llama.cpp#22489: a slice of no elements before a late one.
TEST_CASE_TEMPLATE("empty tensors, more ranks than elements, then a full one: nothing hangs, nothing is stale", Place,
                   on_threads, on_lane) {
    for_ranks<Place>([](auto& c) {
        compress::stateless<host_queue> none;
        std::vector<float> g{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
        for (const auto& sizes : {std::vector<std::size_t>{0, 0}, {1}, {0, 2, 0}, {10}}) {
            const auto all = layout_of(sizes, 8);
            std::vector<float> v(g.begin(), g.begin() + static_cast<long>(end_of(all)));
            if (c.rank() == 1) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }
            compress::all_reduce(c, dense<>(), none, all, view<const float>(v), view<float>(v), {}, key_of(c), sum{});
            for (std::size_t i = 0; i < v.size(); ++i) {
                expect(v[i] == static_cast<float>(c.size()) * g[i], "element {}: {}", i, v[i]);
            }
            const auto kept = layout_of(sizes, 10000);
            std::vector<float> w(g.begin(), g.begin() + static_cast<long>(end_of(kept)));
            compress::all_reduce(c, largest{}, none, kept, view<const float>(w), view<float>(w), {}, key_of(c), sum{});
            expect(same_bytes(v, w), "all elements kept are not the sum");
        }
    });
}

// horovod/horovod#1548: results that differ from run to run, with the timing of ranks.
TEST_CASE_TEMPLATE("the same bits in every run, whatever the delays of ranks", Place, on_threads, on_lane) {
    const auto all = layout_of({321, 64, 5, 100}, 3);
    const auto run_with = [&](std::uint64_t delays) {
        std::vector<float> result;
        Place::run(4, [&](auto& c) {
            compress::stateless<host_queue> none;
            std::vector<float> residual(490);
            std::vector<float> g;
            for (std::uint32_t step = 0; step < 6; ++step) {
                g = gradient(490, at(c.rank()), step);
                const auto micro = delays == 0 ? 0 : mixed(delays * 100 + step * 10 + at(c.rank())) % 300;
                std::this_thread::sleep_for(std::chrono::microseconds(micro));
                compress::all_reduce(c, bucketed{true}, none, all, view<const float>(g), view<float>(g),
                                     view<float>(residual), key_of(c, step));
            }
            if (c.rank() == 0) { result = g; }
        });
        return result;
    };
    const auto first = run_with(0);
    for (const std::uint64_t delays : {1u, 2u, 3u}) { CHECK(same_bytes(run_with(delays), first)); }
}

// The same report: fused or not. Where nothing is owned by anybody, grouping into calls changes nothing either.
TEST_CASE("gathered whole and linear: bits do not depend on how tensors are grouped into calls") {
    const auto check = [](const auto& x, int level) {
        comm::threads::launch(3, [&](comm::threads& c) {
            const auto all = layout_of({96, 60, 33, 12}, level);
            const auto g = gradient(201, at(c.rank()));
            auto state = compress::make_state(x, c.queue(), all);
            std::vector<float> fused(201);
            compress::all_reduce(c, x, state, all, view<const float>(g), view<float>(fused), {}, key_of(c));
            std::vector<float> single(201);
            for (const segment& s : all) {
                const std::vector<segment> one{s};
                compress::all_reduce(c, x, state, one, view<const float>(g), view<float>(single), {}, key_of(c));
            }
            expect(same_bytes(fused, single), "grouping changes bits");
        });
    };
    check(largest{}, 1000);
    check(sampled{}, 4);
}

TEST_CASE_TEMPLATE("16-bit gradients are summed in float and rounded once", T, float16, bfloat16) {
    on_threads::run(4, [](comm::threads& c) {
        constexpr std::size_t n = 300;
        const auto all = layout_of({n}, 8);
        rows<T> in;
        for (int r = 0; r < c.size(); ++r) { in.push_back(gradient<T>(n, at(r))); }
        compress::stateless<host_queue> none;
        std::vector<T> out(n);
        compress::all_reduce(c, dense<>(), none, all, view<const T>(in[at(c.rank())]), view<T>(out), {}, key_of(c),
                             mean{});
        expect(same_bytes(out, reduced_in_rank_order<T>(op_kind::mean, in)), "not the mean in float, rounded once");
    });
}

// NaN must reach every rank, so that all skip the step, and must not stay in residuals (BaguaSys/bagua#485).
TEST_CASE_TEMPLATE("a NaN or an infinity on one rank reaches all ranks, and the next step is clean", Place, on_threads,
                   on_lane) {
    const auto all = layout_of({320, 33}, 4);
    for_ranks<Place>([&](auto& c) {
        compress::stateless<host_queue> none;
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
            for (const std::size_t where : {0u, 100u, 319u, 352u}) {
                std::vector<float> residual(353);
                std::vector<float> g = gradient(353, at(c.rank()));
                if (c.rank() == c.size() - 1) { g[where] = bad; }
                compress::all_reduce(c, bucketed{true}, none, all, view<const float>(g), view<float>(g),
                                     view<float>(residual), key_of(c));
                expect(!std::isfinite(g[where]), "element {} is {}", where, g[where]);
                expect(std::all_of(residual.begin(), residual.end(), [](float v) { return std::isfinite(v); }),
                       "a residual is not finite");
                g = gradient(353, at(c.rank()), 1);
                compress::all_reduce(c, bucketed{true}, none, all, view<const float>(g), view<float>(g),
                                     view<float>(residual), key_of(c, 1));
                expect(std::all_of(g.begin(), g.end(), [](float v) { return std::isfinite(v); }), "still not finite");
            }
        }
    });
}

// pytorch/pytorch#49477, #49716: chains of compressions on two lanes, each beside the other.
TEST_CASE("long chains on two lanes beside the main communicator give what one after the other gives") {
    constexpr int n = 3;
    const auto all = layout_of({200, 31}, 4);
    const auto run_with = [&](bool lanes) {
        std::vector<float> result;
        comm::threads::launch(n, [&](comm::threads& world) {
            constexpr std::uint32_t steps = 25;
            std::vector<std::vector<float>> data;
            std::vector<std::vector<float>> residual(2, std::vector<float>(231));
            for (std::uint32_t k = 0; k < 2 * steps; ++k) { data.push_back(gradient(231, at(world.rank()), k)); }
            const auto work = [&](std::uint32_t k) {
                const view<float> g = data[k];
                const view<float> left = residual[k % 2];
                return [=](comm::threads& c) {
                    compress::stateless<host_queue> none;
                    compress::all_reduce(c, bucketed{true}, none, all, g, g, left, key_of(c, k));
                };
            };
            if (lanes) {
                schedule::lane<comm::threads> even(world.duplicate("even"));
                schedule::lane<comm::threads> odd(world.duplicate("odd"));
                std::vector<schedule::ticket<host_queue>> done;
                for (std::uint32_t k = 0; k < 2 * steps; ++k) {
                    done.push_back((k % 2 == 0 ? even : odd).submit("step", work(k)));
                }
                for (const auto& t : done) { t.wait(world.queue()); }
            } else {
                for (std::uint32_t k = 0; k < 2 * steps; ++k) { work(k)(world); }
            }
            if (world.rank() == 1) {
                for (const auto& v : data) { result.insert(result.end(), v.begin(), v.end()); }
            }
        });
        return result;
    };
    CHECK(same_bytes(run_with(true), run_with(false)));
}

// pytorch/pytorch#48867: error memory that only ever grows.
TEST_CASE("scratch is given back: memory after many steps is that of before, and its peak that of one") {
    comm::threads::launch(2, [](comm::threads& c) {
        const auto all = layout_of({4096}, 8);
        std::vector<float> g = gradient(4096, at(c.rank()));
        compress::stateless<host_queue> none;
        host_queue q = c.queue();
        const std::size_t before = q.account().live();
        const auto once = [&] {
            compress::all_reduce(c, bucketed{}, none, all, view<const float>(g), view<float>(g), {}, key_of(c));
        };
        once();
        expect(q.account().live() == before, "{} bytes stay", q.account().live() - before);
        const std::size_t peak = q.account().peak();
        // The sum of its half in float; the wire of the other half, and the other's of this; all wires.
        expect(peak - before <= 2048 * 4 + 2 * (64 * 8 + 2048) + (128 * 8 + 4096), "peak {}", peak - before);
        for (int i = 0; i < 50; ++i) { once(); }
        expect(q.account().live() == before && q.account().peak() == peak, "memory grows");
    });
}
