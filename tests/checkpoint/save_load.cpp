// save, load: what comes back is what was there, at any number of ranks; what does not fit is refused with a reason.
#include <doctest/doctest.h>  // test cases

#include <atomic>   // order between saves
#include <chrono>   // a queue that stands still
#include <cstdint>  // steps
#include <string>   // texts
#include <thread>   // yield
#include <vector>   // values

#include "state.hpp"

#include <schedule/stream_queue.hpp>  // a queue whose memory the host may not touch

namespace tutti::test {

// A device's copies, found by argument-dependent lookup.
void download(const stream_queue& q, view<const std::byte, stream_memory> in, view<std::byte, stream_memory> out) {
    q.enqueue([in, out] { std::memcpy(out.data(), in.data(), in.size()); });
}
void upload(const stream_queue& q, view<const std::byte> in, view<std::byte, stream_memory> out) {
    q.enqueue([copy = std::vector<std::byte>(in.begin(), in.end()), out] {
        std::memcpy(out.data(), copy.data(), copy.size());
    });
}

}  // namespace tutti::test

using namespace tutti;
using namespace tutti::test;

namespace {

template <class E, class F> std::string text_of(F f) {
    try {
        f();
    } catch (const E& e) { return e.what(); } catch (const std::exception& e) {
        return std::string("another error: ") + e.what();
    }
    return "no error";
}

// Every rank saves what `list_of` gives it; what rank 0 then gets from wait().
template <class E, class Fill> std::string refusal(int ranks, const std::string& folder, Fill fill) {
    std::string first;
    comm::threads::launch(ranks, [&](comm::threads& c) {
        std::vector<float> memory(100);
        list contents;
        fill(c, contents, view<float>(memory));
        checkpoint::saver saver(c.duplicate("save"), folder);
        saver.save(static_cast<std::uint64_t>(1), contents);
        const std::string text = text_of<E>([&] { static_cast<void>(saver.wait()); });
        c.agree(hash_bytes(as_bytes(view(text.data(), text.size()))), "the text of the error");
        expect(!saver.wait(), "an error is told twice");
        if (c.rank() == 0) { first = text; }
    });
    return first;
}

std::size_t checkpoints_in(const std::string& folder) {
    std::size_t n = 0;
    for (const std::string& name : listing(folder)) { n += name.starts_with("checkpoint-") ? 1u : 0u; }
    return n;
}

}  // namespace

TEST_CASE("load: what N ranks have saved, M ranks get, bit for bit") {
    for (int n = 1; n <= 4; ++n) {
        const scratch_directory scratch;
        save_steps(scratch.folder(), n, {std::uint64_t(10 + n)});
        for (int m = 1; m <= 4; ++m) {
            CAPTURE(n);
            CAPTURE(m);
            const auto got = load_at(scratch.folder(), m, {.at_other_ranks = checkpoint::local_entries::keep});
            CHECK(got.step == std::uint64_t(10 + n));
            CHECK(got.ranks == n);
            CHECK(got.generation == 1);
            CHECK(got.damaged.empty());
            CHECK(got.kept == (n == m ? std::vector<std::string>() : std::vector<std::string>{"random", "residual"}));
        }
    }
}

TEST_CASE("load: replicated and sharded are the same tensor in a checkpoint") {
    const scratch_directory scratch;
    comm::threads::launch(3, [&](comm::threads& c) {
        std::vector<float> all(10);
        for (std::size_t i = 0; i < all.size(); ++i) { all[i] = static_cast<float>(i); }
        list replicated;
        replicated.add(state_of("a", view<float>(all)), ownership::replicated);
        checkpoint::saver saver(c.duplicate("save"), scratch.folder());
        saver.save(1, replicated);
        static_cast<void>(saver.wait());
        const auto mine = static_cast<std::size_t>(c.rank());
        std::vector<float> two(2, -1.0f);
        list sharded;  // ranks may ask for the same elements
        sharded.add(state_of("a", view<float>(two), {10}, 3 + mine), ownership::sharded);
        static_cast<void>(checkpoint::load(c, scratch.folder(), {}, sharded));
        expect(two[0] == static_cast<float>(3 + mine) && two[1] == two[0] + 1, "{} {}", two[0], two[1]);
    });
}

TEST_CASE("save: each rank writes its share of what is replicated") {
    const scratch_directory scratch;
    comm::threads::launch(4, [&](comm::threads& c) {
        std::vector<double> all(4096);
        list replicated;
        replicated.add(state_of("a", view<double>(all)), ownership::replicated);
        checkpoint::saver saver(c.duplicate("save"), scratch.folder());
        saver.save(1, replicated);
        static_cast<void>(saver.wait());
    });
    for (int r = 0; r < 4; ++r) {
        const auto bytes = fs::file_size(path_of(scratch.folder(), 1) + "/rank-0000" + std::to_string(r) + ".shard");
        CHECK(bytes == 128 + 1024 * sizeof(double));  // header with one line, elements
    }
}

TEST_CASE("save: values may change at once") {
    const scratch_directory scratch;
    // The lane stands still until the values have changed.
    std::atomic<bool> changed{false};
    checkpoint::saver_options options;
    options.before_file_operation = [&](std::string_view, const std::string& path) {
        while (path.find("/checkpoint-0") != std::string::npos && !changed.load()) { std::this_thread::yield(); }
        return 0;
    };
    comm::threads::launch(2, [&](comm::threads& c) {
        state s(static_cast<std::size_t>(c.rank()), 2);
        list contents = s.contents();
        checkpoint::saver saver(c.duplicate("save"), scratch.folder(), options);
        s.fill(1);
        saver.save(1, contents);
        s.fill(2);
        c.barrier();
        changed = true;
        const auto made = saver.wait();
        expect(made && made->step == 1, "not saved");
        s.demand(2);
        for (std::uint64_t step = 3; step < 20; ++step) {  // and again, over the same snapshot
            s.fill(step);
            saver.save(step, contents);
            s.fill(1000 + step);
        }
        static_cast<void>(saver.wait());
    });
    CHECK(load_at(scratch.folder(), 2).step == 19);
}

TEST_CASE("save: contents of a device are copied in its queue's order, and come back") {
    const scratch_directory scratch;
    comm::threads::launch(2, [&](comm::threads& c) {
        const stream_queue q;
        const auto n = std::size_t{1000};
        const buffer<float, stream_queue> device(q, n);
        std::uint64_t steps = 5;
        checkpoint::contents<stream_queue> on_device(q);
        on_device.add(state_of("x", device.view(), {2 * n}, n * static_cast<std::size_t>(c.rank())),
                      ownership::sharded);
        list on_host;
        on_host.add(state_of("steps", view<std::uint64_t>(&steps, 1)), ownership::replicated);
        const auto set = [&](float value) {
            q.enqueue([out = device.view(), value] { std::fill_n(out.data(), out.size(), value); });
        };
        const auto rank = static_cast<float>(c.rank());
        // The queue stands still for a while: the lane must not write before the queue has got to the copy.
        std::atomic<bool> goes{false}, early{false};
        checkpoint::saver_options options;
        options.before_file_operation = [&](std::string_view, const std::string& path) {
            if (path.find("/checkpoint-0") != std::string::npos && !goes.load()) { early = true; }
            return 0;
        };
        checkpoint::saver saver(c.duplicate("save"), scratch.folder(), options);
        q.enqueue([&] {
            while (!goes.load()) { std::this_thread::yield(); }
        });
        set(1 + rank);
        saver.save(3, on_host, on_device);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        expect(!early.load(), "written before it was there");
        goes = true;
        set(-1);  // queued behind the copy
        steps = 6;
        static_cast<void>(saver.wait());
        const auto got = checkpoint::load(c, scratch.folder(), {}, on_device, on_host);
        expect(got && got->step == 3 && steps == 5, "steps {}", steps);
        q.record().wait_host(after(std::chrono::seconds(60)));
        for (std::size_t i = 0; i < n; ++i) { expect(device.data()[i] == 1 + rank, "element {}", i); }
    });
}

TEST_CASE("save: a contents that another saver has not written yet is not overwritten") {
    const scratch_directory scratch;
    std::atomic<bool> go{false};
    checkpoint::saver_options options;
    options.before_file_operation = [&](std::string_view, const std::string& path) {
        while (path.find("checkpoint-0") != std::string::npos && !go.load()) { std::this_thread::yield(); }
        return 0;
    };
    comm::self<> c;
    state s(0, 1);
    list contents = s.contents();
    checkpoint::saver slow(c.duplicate("slow"), scratch.path + "/slow", options);
    checkpoint::saver other(c.duplicate("other"), scratch.path + "/other");
    slow.save(1, contents);
    CHECK(text_of<usage_error>([&] { other.save(1, contents); }) ==
          "save: another saver has not yet written these contents");
    go = true;
    static_cast<void>(slow.wait());
    other.save(1, contents);
    CHECK(other.wait()->step == 1);
}

TEST_CASE("wait: tells each save once") {
    const scratch_directory scratch;
    comm::self<> c;
    std::uint64_t x = 1;
    list contents;
    contents.add(state_of("x", view<std::uint64_t>(&x, 1)), ownership::sharded);
    checkpoint::saver saver(c.duplicate("save"), scratch.folder());
    CHECK(!saver.wait());
    saver.save(8, contents);
    const auto made = saver.wait();
    REQUIRE(made);
    CHECK(made->step == 8);
    CHECK(made->generation == 1);
    CHECK(!saver.wait());
    saver.save(8, contents);  // the same step once more is another checkpoint
    CHECK(saver.wait()->generation == 2);
}

TEST_CASE("load: nothing where nothing is") {
    const scratch_directory scratch;
    CHECK(load_at(scratch.folder(), 2).generation == 0);   // no folder
    fs::create_directories(path_of(scratch.folder(), 3));  // no manifest
    fs::create_directories(path_of(scratch.folder(), 4) + ".unfinished");
    fs::create_directories(scratch.folder() + "/checkpoint-5");  // not our way to write a number
    CHECK(load_at(scratch.folder(), 2).generation == 0);
}

TEST_CASE("contents: a wrong entry is refused when it is added") {
    std::vector<float> x(6);
    const view<float> all(x);
    const auto refused = [&](state_entry<> e, ownership whose) {
        return text_of<usage_error>([&] { list().add(e, whose); });
    };
    CHECK(refused({"", {6}, 0, dtype::float32, as_bytes(all)}, ownership::sharded) ==
          "checkpoint: an entry has no name");
    CHECK(refused({std::string(5000, 'a'), {6}, 0, dtype::float32, as_bytes(all)}, ownership::sharded) ==
          "checkpoint: '" + std::string(100, 'a') + "...' has a name of 5000 bytes; 4096 are the most");
    CHECK(refused({"x", std::vector<std::size_t>(65, 1), 0, dtype::float32, as_bytes(all)}, ownership::sharded) ==
          "checkpoint: 'x' has 65 dimensions; 64 are the most");
    CHECK(refused({"x", {7}, 2, dtype::float32, as_bytes(all)}, ownership::sharded) ==
          "checkpoint: 'x': 6 elements from 2 leave shape [7]");
    CHECK(refused({"x", {7}, 8, dtype::float32, {}}, ownership::sharded) ==
          "checkpoint: 'x': 0 elements from 8 leave shape [7]");
    CHECK(refused({"x", {3}, 0, dtype::float64, as_bytes(all).sub(0, 23)}, ownership::sharded) ==
          "checkpoint: 'x' has 23 bytes of 8-byte elements");
    CHECK(refused({"x", {std::size_t{1} << 40, std::size_t{1} << 40}, 0, dtype::float32, {}}, ownership::sharded) ==
          "checkpoint: 'x' of shape [1099511627776, 1099511627776] is too large");
    CHECK(refused({"x", {7}, 0, dtype::float32, as_bytes(all)}, ownership::replicated) ==
          "checkpoint: 'x' is replicated, but has 6 of 7 elements");
    CHECK(refused({"x", {7}, 0, dtype::float32, as_bytes(all)}, ownership::local) ==
          "checkpoint: 'x' is a rank's own, but has 6 of 7 elements");
    list twice;
    twice.add(state_of("x", all), ownership::sharded);
    CHECK(text_of<usage_error>([&] { twice.add(state_of("x", all), ownership::local); }) ==
          "checkpoint: 'x' is there twice");
    CHECK(twice.size() == 1);
}

TEST_CASE("contents: a list is added by one ownership, or by what its entries say") {
    std::vector<float> x(6);
    const std::vector<state_entry<>> both{state_of("a", view<float>(x), ownership::replicated),
                                          state_of("b", view<float>(x))};
    list as_they_say;
    as_they_say.add(both);
    REQUIRE(as_they_say.size() == 2);
    CHECK(!as_they_say.wanted(0).local);
    CHECK(as_they_say.wanted(1).local);
    list own;
    own.add(std::vector<state_entry<>>{state_of("a", view<float>(x), ownership::local, {3, 4}, 6)});
    CHECK(own.wanted(0).local);
    CHECK(own.wanted(0).shape == std::vector<std::uint64_t>{6});
    CHECK(own.wanted(0).offset == 0);
    list by_one;
    by_one.add(both, ownership::local);
    CHECK(by_one.wanted(0).local);
}

TEST_CASE("save: ranks that do not fit together are refused before anything is written") {
    const scratch_directory scratch;
    const std::string folder = scratch.folder();
    CHECK(refusal<usage_error>(2, folder, [](auto& c, list& l, view<float> m) {
              l.add(state_of("w", m.sub(0, c.rank() == 0 ? 6u : 5u), {10}, c.rank() == 0 ? 0u : 5u),
                    ownership::sharded);
          }) == "save: element 5 of 'w' is rank 0's and rank 1's");
    CHECK(refusal<usage_error>(2, folder, [](auto& c, list& l, view<float> m) {
              l.add(state_of("w", m.sub(0, 4), {10}, c.rank() == 0 ? 0u : 6u), ownership::sharded);
          }) == "save: elements 4 to 6 of 'w' are no rank's");
    CHECK(refusal<usage_error>(3, folder, [](auto& c, list& l, view<float> m) {
              if (c.rank() == 1) { l.add(state_of("w", m.sub(0, 4), {10}), ownership::sharded); }
          }) == "save: elements 4 to 10 of 'w' are no rank's");
    CHECK(refusal<usage_error>(2, folder, [](auto& c, list& l, view<float> m) {
              l.add(state_of("w", m.sub(0, 5), {c.rank() == 0 ? 10u : 11u}, c.rank() == 0 ? 0u : 5u),
                    ownership::sharded);
          }) == "save: 'w' is float32 [11] on rank 1, but float32 [10] before");
    CHECK(refusal<usage_error>(2, folder, [](auto& c, list& l, view<float> m) {
              state_entry<> e = state_of("w", m.sub(0, 5), {10}, c.rank() == 0 ? 0u : 5u);
              if (c.rank() == 1) { e.type = dtype::int32; }
              l.add(e, ownership::sharded);
          }) == "save: 'w' is int32 [10] on rank 1, but float32 [10] before");
    CHECK(refusal<usage_error>(2, folder, [](auto& c, list& l, view<float> m) {
              l.add(state_of("w", m), c.rank() == 0 ? ownership::sharded : ownership::local);
          }) == "save: 'w' is rank 1's own, and a tensor of all ranks elsewhere");
    CHECK(checkpoints_in(folder) == 0);

    comm::threads::launch(2, [&](comm::threads& c) {
        list a, b;
        float x = 0;
        a.add(state_of("x", view<float>(&x, 1)), ownership::replicated);
        b.add(state_of("x", view<float>(&x, 1)), ownership::local);
        checkpoint::saver saver(c.duplicate("save"), folder);
        saver.save(1, a, b);
        // Told by the next save if nobody asks.
        const std::string twice = text_of<usage_error>([&] { saver.save(1, a); });
        expect(twice == "save: 'x' is there twice on rank 0", "{}", twice);
        saver.save(static_cast<std::uint64_t>(c.rank()), a);
        const std::string steps = text_of<usage_error>([&] { static_cast<void>(saver.wait()); });
        expect(steps == "save: rank 1 saves step 1, rank 0 step 0", "{}", steps);
        saver.save(7, a);  // and the saver is as good as before
        expect(saver.wait()->generation == 1, "a refused save made a checkpoint");
    });
}

TEST_CASE("load: what does not fit is refused, and nothing has changed") {
    const scratch_directory scratch;
    save_steps(scratch.folder(), 2, {5});
    const auto refused = [&](int ranks, auto fill, checkpoint::load_options how = {.allow_unused = true}) {
        std::string first;
        comm::threads::launch(ranks, [&](comm::threads& c) {
            std::vector<float> memory(40, 7.0f);
            list contents;
            fill(c, contents, view<float>(memory));
            const std::string text =
                text_of<usage_error>([&] { static_cast<void>(checkpoint::load(c, scratch.folder(), how, contents)); });
            expect(memory == std::vector<float>(40, 7.0f), "an entry has changed");
            c.agree(hash_bytes(as_bytes(view(text.data(), text.size()))), "the text of the error");
            if (c.rank() == 0) { first = text; }
        });
        return first;
    };
    const auto on_one = [](int rank, state_entry<> e, ownership whose) {
        return [=](auto& c, list& l, view<float> m) {
            l.add(state_of("w/value", m.sub(0, 35), {5, 7}), ownership::replicated);
            state_entry<> mine = e;
            mine.data = as_bytes(m.sub(35, 4));
            if (c.rank() == rank) { l.add(mine, whose); }
        };
    };
    CHECK(refused(2, on_one(1, {"w", {4}, 0, dtype::float32, {}}, ownership::sharded)) ==
          "load: rank 1: the checkpoint has no tensor 'w'");
    CHECK(refused(3, on_one(2, {"bias", {4}, 0, dtype::float32, {}}, ownership::sharded)) ==
          "load: rank 2: 'bias' is float32 [13] in the checkpoint, not float32 [4]");
    CHECK(refused(2, on_one(0, {"bias", {13}, 0, dtype::int32, {}}, ownership::sharded)) ==
          "load: rank 0: 'bias' is float32 [13] in the checkpoint, not int32 [13]");
    CHECK(refused(2, on_one(0, {"random", {4}, 0, dtype::float32, {}}, ownership::sharded)) ==
          "load: rank 0: the checkpoint has no tensor 'random', but one of the ranks' own");
    CHECK(refused(2, on_one(0, {"bias", {4}, 0, dtype::float32, {}}, ownership::local)) ==
          "load: rank 0: the checkpoint has no rank's own 'bias', but a tensor of all ranks");
    CHECK(refused(3, on_one(0, {"random", {4}, 0, dtype::uint32, {}}, ownership::local)) ==
          "load: rank 0: 'random' is each rank's own, and was saved by 2 ranks, not 3");
    const auto some = [](auto&, list& l, view<float> m) {
        l.add(state_of("w/value", m.sub(0, 35), {5, 7}), ownership::replicated);
    };
    CHECK(refused(2, some, {}) == "load: the checkpoint has 'bias', which nobody asks for");
    CHECK(refused(1, some, {}) == "load: the checkpoint has 'bias', which nobody asks for");
    // Ranks' own entries are asked for by their own rank.
    for (const int ranks : {2, 3}) {
        CHECK(refused(ranks,
                      [](auto& c, list& l, view<float>) {
                          static std::vector<std::byte> room(4096);
                          state s(static_cast<std::size_t>(c.rank()), static_cast<std::size_t>(c.size()), false);
                          const list all = s.contents();
                          for (std::size_t i = 0; i < all.size(); ++i) {
                              const auto& p = all.wanted(i);
                              l.add({p.name,
                                     {p.shape.begin(), p.shape.end()},
                                     p.offset,
                                     p.type,
                                     view<std::byte>(room).sub(0, static_cast<std::size_t>(p.bytes()))},
                                    ownership::sharded);
                          }
                      },
                      {}) == "load: the checkpoint has 'random', which nobody asks for");
    }
}

TEST_CASE("load: two lists may not name the same entry") {
    const scratch_directory scratch;
    save_steps(scratch.folder(), 1, {5});
    comm::self<> c;
    std::vector<float> x(13);
    list a, b;
    a.add(state_of("bias", view<float>(x)), ownership::sharded);
    b.add(state_of("bias", view<float>(x)), ownership::sharded);
    CHECK(text_of<usage_error>([&] {
              static_cast<void>(checkpoint::load(c, scratch.folder(), {.allow_unused = true}, a, b));
          }) == "load: 'bias' is there twice");
}
