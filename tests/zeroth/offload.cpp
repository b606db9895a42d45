// The offload pipeline on the host: the bits of the reference for any number of slots, resident blocks and deferred
// write-backs; every update, also the last one, with its own learning rate; tied and frozen tensors; exact counters;
// device memory that does not depend on depth; errors.
#include <tutti/zeroth/offload.hpp>           // under test
#include <tutti/zeroth/transfer_overlap.hpp>  // under test

#include <chrono>   // times
#include <cstdint>  // counts
#include <limits>   // nan
#include <string>   // texts
#include <vector>   // losses

#include <doctest/doctest.h>  // checks

#include <tutti/core/text.hpp>          // formatted
#include <tutti/schedule/timeline.hpp>  // trace

#include "trial.hpp"  // runs of the toy

using namespace tutti;
using namespace tutti::test;
using zeroth::offload_options;

namespace {

static_assert(zeroth::pipeline<zeroth::offload<host_queue, float, chain_model<host_queue, float, no_pause>>>);

using pinned = zeroth::pinned_store<float, host_queue>;

// A run, and whether all of it is the reference's.
bool right(const trial& t, const trace_of<float>& expected, const offload_options& o) {
    pinned store(zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(float)));
    fill(store, chain_reference<float>({t.blocks}));
    const auto losses = by_pipeline<float>(host_queue{}, t, store, o, no_pause{});
    return losses == expected.losses && holds(store, expected.weights);
}

}  // namespace

TEST_CASE("losses and weights are the reference's for any slots, residents, write-backs and depth") {
    for (const std::size_t blocks : {1u, 2u, 3u, 7u}) {
        const trial t{.blocks = blocks, .steps = 5};
        const auto expected = by_reference<float>(t);
        CHECK(expected.losses[0] != expected.losses[1]);
        for (const std::size_t slot_count : {1u, 2u, 3u, 4u}) {
            for (const std::size_t resident : {std::size_t{0}, blocks / 2, blocks}) {
                for (const std::size_t every : {1u, 2u, 3u}) {
                    CAPTURE(blocks);
                    CAPTURE(slot_count);
                    CAPTURE(resident);
                    CAPTURE(every);
                    CHECK(right(t, expected,
                                {.slot_count = slot_count,
                                 .blocks_resident = resident,
                                 .write_back_every = every,
                                 .prefetch = slot_count != 1,
                                 .piece = every == 3 ? std::size_t{1} << 20 : every * 256}));
                }
            }
        }
    }
    const trial deep{.blocks = 48, .steps = 2};
    CHECK(right(deep, by_reference<float>(deep), {.slot_count = 3}));
}

TEST_CASE("one sign, a pristine probe among others, several directions, signs for normals") {
    for (const trial& t : {trial{.signs = {1}}, trial{.signs = {-1}}, trial{.signs = {0}}, trial{.signs = {0, 1}},
                           trial{.signs = {1, 0}}, trial{.signs = {1, -1}, .directions = 3, .seed = 17},
                           trial{.kind = zeroth::distribution::rademacher}, trial{.weight_decay = 0}}) {
        const auto expected = by_reference<float>(t);
        for (const std::size_t every : {1u, 2u}) {
            CHECK(right(t, expected,
                        {.slot_count = 2, .blocks_resident = 1, .write_back_every = every, .piece = every * 256}));
        }
    }
}

TEST_CASE("what is read after a flush between steps is the reference's, and training goes on as without") {
    const trial t{.steps = 5};
    for (const std::size_t every : {1u, 4u}) {
        pinned store(zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(float)));
        fill(store, chain_reference<float>({t.blocks}));
        chain_model<host_queue, float, no_pause> model({}, 2, {});
        zeroth::offload<host_queue, float, decltype(model)> p({}, model, store,
                                                              {.slot_count = 2, .write_back_every = every});
        std::vector<double> losses;
        std::uint64_t hash = 0;
        const auto expected = by_reference<float>(t, [&](std::size_t step, const chain_reference<float>& weights) {
            take_step(p, t, step, losses);
            if (step == 0) { return; }  // two steps are pending at the next
            const std::uint64_t now = p.hash();
            CHECK((now == hash) == (step == 2));  // which changes nothing
            hash = now;
            CHECK(holds(store, weights));
            const auto before = p.counters();
            p.flush();  // nothing is pending: nothing moves
            CHECK(p.counters() == before);
        });
        CHECK(losses == expected.losses);
    }
}

TEST_CASE("every transfer is counted, and nothing moves that need not") {
    const trial t{.blocks = 5, .steps = 1};
    const zeroth::model_layout layout(chain_shape{t.blocks}.shape(), sizeof(float));
    pinned store(layout);
    fill(store, chain_reference<float>({t.blocks}));
    std::uint64_t ends = 0, travelers = 0;
    for (std::size_t m = 0; m < layout.modules(); ++m) {
        std::size_t padded = 0;
        for (const auto& s : layout.slices(m)) { padded += (s.count * sizeof(float) + 255) / 256 * 256; }
        CHECK(padded == layout.size(m) * sizeof(float));
        (m <= 2 || m == layout.tail() ? ends : travelers) += padded;
    }
    chain_model<host_queue, float, no_pause> model({}, 2, {});
    zeroth::offload<host_queue, float, decltype(model)> p(
        {}, model, store,
        {.slot_count = 2, .blocks_resident = 2, .write_back_every = 2, .prefetch = false, .piece = 512});
    CHECK(p.counters() == zeroth::transfer_counters{4, ends, 0, 0, 0});
    std::vector<double> losses;
    auto before = p.counters();
    const auto moved = [&] {
        const auto now = p.counters();
        const auto difference = now - before;
        before = now;
        return difference;
    };
    take_step(p, t, 0, losses);
    CHECK(moved() == zeroth::transfer_counters{3, travelers, 0, 0, 0});  // no update yet
    take_step(p, t, 3, losses);
    CHECK(moved() == zeroth::transfer_counters{3, travelers, 0, 0, 0});  // one: not due
    take_step(p, t, 4, losses);
    CHECK(moved() == zeroth::transfer_counters{3, travelers, 3, travelers, 0});  // two: due
    p.flush();
    CHECK(moved() == zeroth::transfer_counters{3, travelers, 3 + 4, travelers + ends, 0});
    take_step(p, t, 2, losses);  // its update is none
    CHECK(moved() == zeroth::transfer_counters{3, travelers, 0, 0, 0});
    p.flush();
    CHECK(moved() == zeroth::transfer_counters{});
}

TEST_CASE("device memory is residents, slots of the largest block, one copy: the same at every depth") {
    std::size_t first = 0;
    for (const std::size_t blocks : {4u, 8u, 16u, 32u}) {
        const trial t{.blocks = blocks, .steps = 2};
        zeroth::model_shape shape = chain_shape{blocks}.shape();
        for (auto& b : shape.blocks) { b.back().frozen = false; }
        const zeroth::model_layout layout(shape, sizeof(float));
        pinned store(layout);
        host_queue q;
        chain_model<host_queue, float, no_pause> model(q, 2, {});
        std::size_t largest = 0;
        for (std::size_t m = 1; m <= 4; ++m) { largest = std::max(largest, layout.size(m)); }
        {
            zeroth::offload<host_queue, float, decltype(model)> p(q, model, store, {.slot_count = 3});
            std::vector<double> losses;
            for (std::size_t step = 0; step < t.steps; ++step) { take_step(p, t, step, losses); }
            const std::size_t elements =
                layout.size(0) + layout.size(layout.tail()) + 3 * largest + layout.largest_copy();
            CHECK(p.peak_device_bytes() ==
                  elements * sizeof(float) + 2 * chain_width * sizeof(float) + 4 * sizeof(double));
            if (first == 0) { first = p.peak_device_bytes(); }
            CHECK(p.peak_device_bytes() == first);
        }
        CHECK(q.account().live() == 2 * chain_width * sizeof(float));
    }
}

TEST_CASE("a trace has each lane's transfers, the modules of both branches and the steps") {
    schedule::timeline trace;
    const trial t{.blocks = 4, .steps = 3};
    pinned store(zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(float)));
    fill(store, chain_reference<float>({t.blocks}));
    by_pipeline<float>(host_queue{}, t, store, {.slot_count = 2, .prefetch = false, .trace = &trace, .trace_rank = 3},
                       no_pause{});
    std::size_t uploads = 0, offloads = 0, blocks = 0;
    for (const auto& s : trace.spans(3)) {
        uploads += s.name == "upload" && s.kind == schedule::span_kind::communication;
        offloads += s.name == "offload" && s.kind == schedule::span_kind::communication;
        blocks += s.name == "block" && s.kind == schedule::span_kind::work;
    }
    CHECK(uploads == 12);      // step 2 has no update: the flush at the end finds nothing pending
    CHECK(offloads == 2 * 4);  // steps 0 and 1
    CHECK(blocks == 2 * 12);
    CHECK(trace.steps(3).size() == 3);
}

TEST_CASE("blocks move in pieces, each an upload and an offload of its own") {
    schedule::timeline trace;
    const trial t{.blocks = 3, .steps = 1};
    const zeroth::model_layout layout(chain_shape{t.blocks}.shape(), sizeof(float));
    pinned store(layout);
    fill(store, chain_reference<float>({t.blocks}));
    by_pipeline<float>(host_queue{}, t, store, {.slot_count = 1, .prefetch = false, .piece = 512, .trace = &trace},
                       no_pause{});
    std::size_t pieces = 0, uploads = 0, offloads = 0;
    for (std::size_t m = 1; m <= t.blocks; ++m) { pieces += (layout.size(m) * sizeof(float) + 511) / 512; }
    for (const auto& s : trace.spans(0)) {
        uploads += s.name == "upload" && s.kind == schedule::span_kind::communication;
        offloads += s.name == "offload" && s.kind == schedule::span_kind::communication;
    }
    CHECK(pieces > 2 * t.blocks);
    CHECK(uploads == 2 * pieces);  // the step's pass, and the flush's
    CHECK(offloads == pieces);
}

TEST_CASE("overlap of a timeline: the longest of uploads, computation and offloads as a share of its steps") {
    schedule::timeline trace;
    const deadline start = clock_type::now();
    const auto add = [&](const char* track, const char* name, schedule::span_kind kind, int from, int to) {
        trace.add(trace.track_of(0, track), name, kind, start + std::chrono::milliseconds(from),
                  start + std::chrono::milliseconds(to));
    };
    using schedule::span_kind;
    CHECK(zeroth::overlap_of(trace, 0).efficiency() == 0);
    for (const int step : {0, 100, 200}) {
        add("compute", "step", span_kind::step, step, step + 100);
        add("up", "upload", span_kind::communication, step + 5, step + 45);
        add("up", "upload", span_kind::communication, step + 45, step + 95);
        add("compute", "block", span_kind::work, step + 45, step + 75);
        add("compute", "tail", span_kind::work, step + 95, step + 100);
        add("off", "offload", span_kind::communication, step + 45, step + 65);
        add("off", "save", span_kind::communication, step + 65, step + 66);
    }
    // Of what begins before the second step or ends behind the last, the rest does not count.
    add("up", "upload", span_kind::communication, 95, 105);
    add("up", "upload", span_kind::communication, 295, 325);
    const auto of = zeroth::overlap_of(trace, 0);
    CHECK(of.steps == 2);
    CHECK(of.step == doctest::Approx(0.1));
    CHECK(of.upload == doctest::Approx(0.095));
    CHECK(of.compute == doctest::Approx(0.035));
    CHECK(of.offload == doctest::Approx(0.02));
    CHECK(of.efficiency() == doctest::Approx(0.95));
    CHECK(of.exposed() == doctest::Approx(0.065));
}

TEST_CASE(
    "tensors by their names: numbered in their order, tied where head and tail share one, found and set by them") {
    using zeroth::model_layout;
    using zeroth::tensor_index;
    zeroth::model_shape named{.head = {{.count = 70, .name = "table"}, {.count = 3, .name = "bias"}},
                              .blocks = {{{.count = 9, .decayed = false, .name = "a"}}, {{.count = 5, .name = "b"}}},
                              .tail = {{.count = 3, .name = "gain"}, {.count = 70, .name = "table"}}};
    const model_layout numbers({{{0, 70}, {1, 3}}, {{{2, 9, false}}, {{3, 5}}}, {{4, 3}, {0, 70}}}, 4);
    pinned store{model_layout(named, 4)};
    const model_layout& layout = store.layout();
    for (std::size_t m = 0; m < layout.modules(); ++m) {
        REQUIRE(layout.slices(m).size() == numbers.slices(m).size());
        CHECK(layout.copied(m) == numbers.copied(m));
        for (std::size_t k = 0; k < layout.slices(m).size(); ++k) {
            CHECK(layout.slices(m)[k].tensor == numbers.slices(m)[k].tensor);
            CHECK(layout.slices(m)[k].offset == numbers.slices(m)[k].offset);
            CHECK(layout.slices(m)[k].decayed == numbers.slices(m)[k].decayed);
        }
    }
    CHECK(layout.find("table") == tensor_index{0, 0});
    CHECK(layout.find("bias") == tensor_index{0, 1});
    CHECK(layout.find("b") == tensor_index{2, 0});
    CHECK(layout.find("gain") == tensor_index{3, 0});
    CHECK(layout.count("table") == 70);
    const std::vector<float> set{5, 6, 7};
    std::vector<float> by_place(3), by_name(3);
    store.write("gain", set);
    store.read(3, 0, by_place);
    store.read("gain", by_name);
    CHECK(by_place == set);
    CHECK(by_name == set);
    CHECK_THROWS_WITH_AS(store.write("grain", set), "model_layout: no tensor is called 'grain'", usage_error);
    CHECK_THROWS_AS(store.write("table", set), usage_error);
    // A number of its own may have a name as well; a name is of one tensor, and all are numbered or none.
    CHECK(model_layout({{}, {{{.tensor = 8, .count = 2, .name = "x"}, {9, 2}}}, {}}, 4).find("x") ==
          tensor_index{1, 0});
    CHECK_THROWS_WITH_AS(model_layout({{}, {{{.count = 2}}}, {}}, 4),
                         "model_layout: a tensor has neither a name nor a number", usage_error);
    CHECK_THROWS_WITH_AS(model_layout({{}, {{{7, 2}, {.count = 2, .name = "x"}}}, {}}, 4),
                         "model_layout: tensor 'x' has no number, others have one", usage_error);
    CHECK_THROWS_WITH_AS(
        model_layout({{}, {{{.tensor = 8, .count = 2, .name = "x"}, {.tensor = 9, .count = 2, .name = "x"}}}, {}}, 4),
        "model_layout: tensors 8 and 9 are both called 'x'", usage_error);
    named.blocks[1][0].name = "a";
    CHECK_THROWS_WITH_AS(model_layout(named, 4), "model_layout: tensor 'a' is in module 1 and again in module 2",
                         usage_error);
}

TEST_CASE("bad layouts, options and calls are refused before anything moves") {
    using zeroth::model_layout;
    using zeroth::model_shape;
    CHECK_THROWS_WITH_AS(model_layout(model_shape{}, 4), "model_layout: the model has no block", usage_error);
    CHECK_THROWS_WITH_AS(model_layout({{}, {{{1, 0}}}, {}}, 4), "model_layout: tensor 1 has no elements", usage_error);
    CHECK_THROWS_WITH_AS(model_layout({{{1, 5}}, {{{1, 5}}}, {}}, 4),
                         "model_layout: tensor 1 is in module 0 and again in module 1", usage_error);
    CHECK_THROWS_WITH_AS(model_layout({{}, {{{1, 5}}}, {{1, 5}}}, 4),
                         "model_layout: tensor 1 is in module 1 and again in module 2", usage_error);
    for (const std::size_t bytes : {0u, 3u, 257u, 512u}) {
        const std::string why = formatted("model_layout: elements of {} bytes, expected a divisor of 256", bytes);
        CHECK_THROWS_WITH_AS(model_layout({{}, {{{1, 5}}}, {}}, bytes), why.c_str(), usage_error);
    }
    CHECK_THROWS_WITH_AS(pinned(model_layout({{}, {{{1, 5}}}, {}}, 2)),
                         "block_store: a layout for elements of 2 bytes, those of the weights have 4", usage_error);
    CHECK_THROWS_AS(model_layout({{{7, 5}}, {{{1, 5}}}, {{7, 5}, {7, 5}}}, 4), usage_error);
    CHECK_THROWS_AS(model_layout({{{7, 5}}, {{{1, 5}}}, {{7, 6}}}, 4), usage_error);
    CHECK_THROWS_AS(model_layout({{{7, 5}}, {{{1, 5}}}, {{7, 5, true, true}}}, 4), usage_error);

    pinned store(model_layout(chain_shape{2}.shape(), sizeof(float)));
    chain_model<host_queue, float, no_pause> model({}, 2, {});
    using pipeline = zeroth::offload<host_queue, float, decltype(model)>;
    CHECK_THROWS_AS(pipeline({}, model, store, {.slot_count = 0}), usage_error);
    CHECK_THROWS_AS(pipeline({}, model, store, {.blocks_resident = 3}), usage_error);
    CHECK_THROWS_AS(pipeline({}, model, store, {.write_back_every = 0}), usage_error);
    CHECK_THROWS_WITH_AS(pipeline({}, model, store, {.piece = 100}),
                         "offload: pieces of 100 bytes, expected a multiple of 256", usage_error);
    CHECK_THROWS_AS(pipeline({}, model, store, {.piece = 0}), usage_error);
    pinned other(model_layout(chain_shape{2}.shape(), sizeof(float), 2), 1);
    CHECK_THROWS_AS(pipeline({}, model, other), usage_error);
    CHECK_THROWS_AS(pinned(model_layout(chain_shape{2}.shape(), sizeof(float), 2), 2), usage_error);

    pipeline p({}, model, store);
    const auto before = p.counters();
    const double nan = std::numeric_limits<double>::quiet_NaN();
    std::vector<zeroth::probe> probes{{{}, 1e-3}, {{}, nan}};
    std::vector<zeroth::loss_value> out(2);
    CHECK_THROWS_AS(p.evaluate(probes, 0, out), usage_error);
    CHECK_THROWS_AS(p.evaluate({}, 0, {}), usage_error);
    out.resize(1);
    CHECK_THROWS_AS(p.evaluate(probes, 0, out), usage_error);
    const zeroth::pending_update bad{{}, nan, 0.1, 0};
    CHECK_THROWS_AS(p.update({&bad, 1}), usage_error);
    CHECK(p.counters() == before);
    using zeroth::distribution;
    const zeroth::pending_update mixed[] = {{{.seed = 1}, 1, 0.1, 0},
                                            {{.seed = 1, .index = 1, .kind = distribution::rademacher}, 1, 0.1, 0}};
    CHECK_THROWS_AS(p.update(mixed), usage_error);
    p.update({mixed, 1});
    CHECK_THROWS_WITH_AS(p.update({mixed, 1}), "update: step 0 of seed 1 again; a step's updates come together",
                         usage_error);
    const zeroth::pending_update signs{{.seed = 2, .kind = distribution::rademacher}, 1, 0.1, 0};
    CHECK_THROWS_WITH_AS(p.update({&signs, 1}),
                         "update: directions are rademacher, those of pending updates normal: flush before",
                         usage_error);
    probes = {{signs.z, 1e-3}};
    CHECK_THROWS_AS(p.evaluate(probes, 0, out), usage_error);
    p.flush();
    p.evaluate(probes, 0, out);
    p.update({&signs, 1});
    std::vector<float> values(3);
    CHECK_THROWS_AS(store.write(1, 0, view<const float>(values)), usage_error);
    CHECK_THROWS_AS(store.read(9, 0, view<float>(values)), usage_error);
    CHECK_THROWS_AS(store.read(1, 7, view<float>(values)), usage_error);
}
