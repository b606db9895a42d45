// Files that are not what was written: found, said, and passed over for the checkpoint before.
#include <doctest/doctest.h>  // test cases

#include <cerrno>   // what the file system answered
#include <cstddef>  // size_t
#include <cstdint>  // steps
#include <cstdlib>  // malloc
#include <new>      // bad_alloc
#include <string>   // texts
#include <vector>   // bytes

#include <sys/stat.h>  // mkfifo, mknod

#include <support/build.hpp>  // sanitizers

#include "state.hpp"

using namespace tutti;
using namespace tutti::test;
namespace format = tutti::checkpoint::detail;
using checkpoint::damaged_error;

#if !TUTTI_TEST_SANITIZED  // their allocators stay
namespace {

// Of this thread's allocations of a page or more, the one that there is no memory for; -1: there is for all.
thread_local int lacking = -1;
void* allocated(std::size_t bytes) noexcept {
    if (bytes >= 4096 && lacking >= 0 && lacking-- == 0) { return nullptr; }
    return std::malloc(bytes == 0 ? 1 : bytes);
}

}  // namespace

// Not inlined: GCC would warn of what it then sees of one half of the pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    if (void* const p = allocated(bytes)) { return p; }
    throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocated(bytes); }
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
#endif

namespace {

// Two checkpoints of a few bytes, by one rank.
struct small {
    scratch_directory scratch;
    std::string folder = scratch.folder();
    std::vector<std::uint16_t> x = std::vector<std::uint16_t>(40);
    std::uint64_t own = 0;
    comm::self<> c;
    list contents;

    small() {
        contents.add(state_of("x", view<std::uint16_t>(x)), ownership::sharded);
        contents.add(state_of("own", view<std::uint64_t>(&own, 1)), ownership::local);
        checkpoint::saver saver(c.duplicate("save"), folder);
        for (const std::uint64_t step : {1u, 2u}) {
            fill(step);
            saver.save(step, contents);
            static_cast<void>(saver.wait());
        }
        fill(99);
    }
    void fill(std::uint64_t step) {
        x.assign(x.size(), static_cast<std::uint16_t>(step));
        own = step;
    }
    // The step that is loaded, all of it.
    std::uint64_t load(std::vector<std::string>* damaged = nullptr) {
        const auto got = checkpoint::load(c, folder, {}, contents);
        REQUIRE(got);
        CHECK(own == got->step);
        CHECK(x == std::vector<std::uint16_t>(x.size(), static_cast<std::uint16_t>(got->step)));
        if (damaged != nullptr) { *damaged = got->damaged; }
        return got->step;
    }
    [[nodiscard]] std::string file(int generation, const std::string& name) const {
        return path_of(folder, generation) + "/" + name;
    }
};

}  // namespace

TEST_CASE("load: a bit turned anywhere in any file is found") {
    small s;
    for (const std::string name : {"manifest", "rank-00000.shard"}) {
        const auto bytes = bytes_of(s.file(2, name));
        REQUIRE(bytes.size() > 100);
        for (std::size_t i = 0; i < bytes.size(); ++i) {
            auto turned = bytes;
            turned[i] ^= static_cast<std::byte>(1u << i % 8);
            write_bytes(s.file(2, name), turned);
            CAPTURE(name);
            CAPTURE(i);
            CHECK(s.load() == 1);
        }
        write_bytes(s.file(2, name), bytes);
        CHECK(s.load() == 2);
    }
}

TEST_CASE("load: a file of any other length is found") {
    small s;
    for (const std::string name : {"manifest", "rank-00000.shard"}) {
        auto bytes = bytes_of(s.file(2, name));
        for (std::size_t n = 0; n < bytes.size(); ++n) {
            write_bytes(s.file(2, name), std::span(bytes).first(n));
            CAPTURE(name);
            CAPTURE(n);
            CHECK(s.load() == 1);
        }
        bytes.push_back(std::byte{0});
        write_bytes(s.file(2, name), bytes);
        CHECK(s.load() == 1);
        bytes.pop_back();
        write_bytes(s.file(2, name), bytes);
        CHECK(s.load() == 2);
    }
}

TEST_CASE("load: says what is damaged; when all is, that is an error and no entry changes") {
    small s;
    std::vector<std::string> damaged;
    const std::string second = s.file(2, "rank-00000.shard");
    auto bytes = bytes_of(second);
    bytes[bytes.size() - 60] ^= std::byte{1};
    write_bytes(second, bytes);
    CHECK(s.load(&damaged) == 1);
    REQUIRE(damaged.size() == 1);
    CHECK(damaged[0].starts_with("checkpoint-0000000002: load: '" + second + "' has checksum "));
    bytes[9] ^= std::byte{1};
    write_bytes(second, bytes);
    CHECK(s.load(&damaged) == 1);
    CHECK(damaged[0] == "checkpoint-0000000002: load: '" + second + "' has another header");
    fs::remove(second);
    CHECK(s.load(&damaged) == 1);
    CHECK(damaged[0] == "checkpoint-0000000002: load: '" + second + "' is not there");
    fs::create_directories(second);
    CHECK(s.load(&damaged) == 1);
    CHECK(damaged[0] == "checkpoint-0000000002: load: '" + second + "' is no regular file");
    fs::remove(second);
    REQUIRE(::mkfifo(second.c_str(), 0600) == 0);  // opening one would wait for its writer
    CHECK(s.load(&damaged) == 1);
    CHECK(damaged[0] == "checkpoint-0000000002: load: '" + second + "' is no regular file");

    const std::string first = s.file(1, "manifest");
    fs::resize_file(first, 20);
    s.fill(99);
    const auto text = [&]() -> std::string {
        try {
            static_cast<void>(checkpoint::load(s.c, s.folder, {}, s.contents));
        } catch (const damaged_error& e) { return e.what(); }
        return "no error";
    }();
    CHECK(text ==
          "load: no checkpoint in '" + s.folder + "' is whole (checkpoint-0000000002: load: '" + second +
              "' is no regular file; checkpoint-0000000001: the manifest ends too early: 4 bytes are left where 8 "
              "belong)");
    CHECK(s.own == 99);
    CHECK(s.x == std::vector<std::uint16_t>(40, 99));
}

// A socket's name cannot be opened by anybody, unlike a file without permissions.
TEST_CASE("load: what cannot be read is an error on all ranks, not a reason to take an older checkpoint") {
    const scratch_directory scratch;
    const std::string folder = scratch.folder();
    save_steps(folder, 3, {1, 2});
    const std::string checkpoint = path_of(folder, 2);
    struct failing {
        const char* file;
        const char* who;
    };
    for (const failing& f : {failing{"manifest", "rank 0"}, {"rank-00002.shard", "rank 2"}}) {
        const std::string file = checkpoint + "/" + f.file;
        const std::string aside = scratch.path + "/aside";
        fs::rename(file, aside);
        REQUIRE(::mknod(file.c_str(), S_IFSOCK | 0600, 0) == 0);
        std::vector<std::string> texts(3);
        std::vector<int> codes(3);
        std::vector<char> same(3);
        comm::threads::launch(3, [&](comm::threads& c) {
            const auto rank = static_cast<std::size_t>(c.rank());
            state s(rank, 3);
            s.fill(99);
            const list contents = s.contents();
            try {
                static_cast<void>(checkpoint::load(c, folder, {}, contents));
            } catch (const backend_error& e) {
                texts[rank] = e.what();
                codes[rank] = e.context().backend_code;
            }
            same[rank] = s.holds(99) ? 1 : 0;
        });
        for (std::size_t rank = 0; rank < 3; ++rank) {
            CHECK(texts[rank] == std::string("load: ") + f.who + ": cannot open '" + file +
                                     "': No such device or address; '" + checkpoint +
                                     "' may be whole: load again when it can be read, or move it away to load an older "
                                     "one");
            CHECK(codes[rank] == ENXIO);
            CHECK(same[rank] == 1);
        }
        fs::remove(file);
        fs::rename(aside, file);
        CHECK(load_at(folder, 3).step == 2);
    }
}

TEST_CASE("load: files of one checkpoint in another are found") {
    small s;
    fs::copy_file(s.file(1, "rank-00000.shard"), s.file(2, "rank-00000.shard"), fs::copy_options::overwrite_existing);
    CHECK(s.load() == 1);
    small t;
    fs::copy_file(t.file(1, "rank-00000.shard"), t.file(2, "rank-00000.shard"), fs::copy_options::overwrite_existing);
    fs::copy_file(t.file(1, "manifest"), t.file(2, "manifest"), fs::copy_options::overwrite_existing);
    std::vector<std::string> damaged;
    CHECK(t.load(&damaged) == 1);
    REQUIRE(damaged.size() == 1);
    CHECK(damaged[0] == "checkpoint-0000000002: the manifest is checkpoint 1's");
}

TEST_CASE("load: an endless manifest is not read into memory") {
    small s;
    fs::resize_file(s.file(2, "manifest"), std::uintmax_t{3} << 30);  // sparse
    std::vector<std::string> damaged;
    CHECK(s.load(&damaged) == 1);
    REQUIRE(damaged.size() == 1);
    CHECK(damaged[0] == "checkpoint-0000000002: load: the manifest has 3221225472 bytes, 2147483648 are the most");
}

// Manifests with a right checksum, but not of a saver's making.
TEST_CASE("load: hostile manifests lead to no other checkpoint's bytes and to no crash") {
    small s;
    const auto bytes = bytes_of(s.file(2, "manifest"));
    const format::manifest good = format::decoded_manifest(bytes);
    const auto loads = [&](auto change) {
        format::manifest m = good;
        change(m);
        for (auto& shard : m.shards) {
            shard.bytes = format::data_begin(shard.table) + format::data_bytes(shard.table);
        }
        write_bytes(s.file(2, "manifest"), format::encoded(m));
        return s.load();
    };
    CHECK(loads([](auto&) {}) == 2);
    // A shard that is there twice: its elements would be two ranks'.
    CHECK(loads([](auto& m) { m.shards.push_back(m.shards[0]); }) == 1);
    CHECK(loads([](auto& m) { m.shards[0].table[0].count = 39; }) == 1);
    CHECK(loads([](auto& m) { m.shards[0].table[0].shape = {41}; }) == 1);
    CHECK(loads([](auto& m) { m.shards[0].table[1].name = "x"; }) == 1);
    CHECK(loads([](auto& m) { m.shards[0].table.push_back({"big", dtype::byte, true, {1 << 20}, 0, 1 << 20}); }) == 1);
    CHECK(loads([](auto& m) { m.shards[0].table[0].type = dtype::int8; }) == 1);
    CHECK(loads([](auto& m) { m.shards[0].sum ^= 1; }) == 1);
    CHECK(loads([](auto& m) { m.step = 3; }) == 1);
    CHECK(loads([](auto& m) { m.generation = 3; }) == 1);
}

TEST_CASE("load: all ranks pass over what one of them finds damaged") {
    const scratch_directory scratch;
    const std::string folder = scratch.folder();
    save_steps(folder, 4, {1, 2, 3}, {.keep = 3});
    for (int rank = 0; rank < 4; ++rank) {
        const std::string file = path_of(folder, 3) + "/rank-0000" + std::to_string(rank) + ".shard";
        const auto bytes = bytes_of(file);
        auto turned = bytes;
        turned[turned.size() - 100] ^= std::byte{16};
        write_bytes(file, turned);
        for (int m = 1; m <= 4; ++m) {
            const auto got = load_at(folder, m, {.at_other_ranks = checkpoint::local_entries::keep});
            CAPTURE(rank);
            CAPTURE(m);
            CHECK(got.step == 2);
            CHECK(got.damaged.size() == 1);
        }
        write_bytes(file, bytes);
    }
    fs::remove(path_of(folder, 3) + "/rank-00002.shard");
    fs::resize_file(path_of(folder, 2) + "/rank-00003.shard", 100);
    const auto got = load_at(folder, 4);
    CHECK(got.step == 1);
    CHECK(got.damaged.size() == 2);
}

#if !TUTTI_TEST_SANITIZED
TEST_CASE("load: a rank without memory fails all ranks with one error, whatever it was wanted for; nobody waits") {
    const scratch_directory scratch;
    int failed = 0;
    comm::threads::launch(2, [&](comm::threads& c) {
        std::vector<std::uint64_t> values(300);
        list contents;
        for (std::size_t i = 0; i < values.size(); ++i) {
            contents.add(state_of(std::string(100, 'w') + std::to_string(i), view<std::uint64_t>(&values[i], 1)),
                         ownership::replicated);
        }
        checkpoint::saver saver(c.duplicate("save"), scratch.folder());
        saver.save(1, contents);
        static_cast<void>(saver.wait());
        for (int k = 0;; ++k) {
            if (c.rank() == 1) { lacking = k; }
            std::string text;
            try {
                expect(checkpoint::load(c, scratch.folder(), {}, contents)->step == 1, "not loaded");
            } catch (const backend_error& e) { text = e.what(); }
            lacking = -1;
            c.agree(hash_bytes(as_bytes(view(text.data(), text.size()))), "the error");
            if (text.empty()) { break; }
            expect(text.find("rank 1") != std::string::npos, "{}", text);
            if (c.rank() == 0) { ++failed; }
        }
    });
    CHECK(failed >= 10);
}
#endif
