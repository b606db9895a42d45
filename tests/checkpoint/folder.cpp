// The folder of a saver: which checkpoints stay, what crashes have left, who may write.
#include <doctest/doctest.h>  // test cases

#include <cstdint>  // steps
#include <string>   // texts
#include <vector>   // names

#include <sys/stat.h>  // mkfifo
#include <unistd.h>    // geteuid

#include "state.hpp"

using namespace tutti;
using namespace tutti::test;
using names = std::vector<std::string>;

namespace {

template <class E, class F> std::string text_of(F f) {
    try {
        f();
    } catch (const E& e) { return e.what(); } catch (const std::exception& e) {
        return std::string("another error: ") + e.what();
    }
    return "no error";
}

std::string name_of(int generation) { return fs::path(path_of("", generation)).filename().string(); }

// Named like a checkpoint, with these files.
void plant(const std::string& path, const names& files) {
    fs::create_directories(path);
    for (const std::string& f : files) { write_bytes(path + "/" + f, std::vector<std::byte>(10)); }
}

}  // namespace

TEST_CASE("saver: keeps the last checkpoints") {
    for (std::size_t keep = 1; keep <= 3; ++keep) {
        const scratch_directory scratch;
        save_steps(scratch.folder(), 2, {1, 2, 3, 4, 5}, {.keep = keep});
        names expected;
        for (int g = 6 - static_cast<int>(keep); g <= 5; ++g) { expected.push_back(name_of(g)); }
        expected.push_back("lock");
        CHECK(listing(scratch.folder()) == expected);
        CHECK(listing(path_of(scratch.folder(), 5)) == names{"manifest", "rank-00000.shard", "rank-00001.shard"});
        CHECK(load_at(scratch.folder(), 2).step == 5);
    }
}

TEST_CASE("saver: goes on where the last one ended, and may keep fewer") {
    const scratch_directory scratch;
    save_steps(scratch.folder(), 2, {1, 2, 3}, {.keep = 3});
    save_steps(scratch.folder(), 1, {4}, {.keep = 2});
    CHECK(listing(scratch.folder()) == names{name_of(3), name_of(4), "lock"});
    CHECK(load_at(scratch.folder(), 1).generation == 4);
}

TEST_CASE("saver: removes what crashes have left, before it writes and nothing else") {
    const scratch_directory scratch;
    const std::string folder = scratch.folder();
    save_steps(folder, 1, {1, 2, 3}, {.keep = 3});
    plant(path_of(folder, 4), {"rank-00000.shard", "manifest.unfinished"});  // died before its manifest had its name
    plant(path_of(folder, 7) + ".unfinished", {"rank-00000.shard"});         // while shards were written
    plant(path_of(folder, 9) + ".unfinished", {"rank-00000.shard", "manifest"});  // while it was removed
    plant(folder + "/checkpoint-12", {"notes"});
    plant(folder + "/results", {"loss"});
    comm::self<> c;
    {
        // Complete ones stay until a new one is: nobody has loaded any yet.
        const checkpoint::saver saver(c.duplicate("save"), folder, {.keep = 1});
        CHECK(listing(folder) == names{name_of(1), name_of(2), name_of(3), "checkpoint-12", "lock", "results"});
    }
    save_steps(folder, 1, {5}, {.keep = 1});
    CHECK(listing(folder) == names{name_of(4), "checkpoint-12", "lock", "results"});
}

TEST_CASE("saver: what is damaged in its manifest or in the sizes of its files does not count as kept") {
    const scratch_directory scratch;
    const std::string folder = scratch.folder();
    save_steps(folder, 2, {1, 2, 3, 4}, {.keep = 4});
    fs::resize_file(path_of(folder, 3) + "/rank-00001.shard", 10);
    fs::resize_file(path_of(folder, 4) + "/manifest", 10);
    save_steps(folder, 2, {5}, {.keep = 2});
    CHECK(listing(folder) == names{name_of(2), name_of(3), name_of(4), name_of(5), "lock"});
    save_steps(folder, 2, {6}, {.keep = 2});
    CHECK(listing(folder) == names{name_of(5), name_of(6), "lock"});
}

TEST_CASE("saver: what is newer than what the run was resumed from does not count as kept") {
    const scratch_directory scratch;
    const std::string folder = scratch.folder();
    save_steps(folder, 1, {1, 2, 3}, {.keep = 3});
    save_steps(folder, 1, {4}, {.keep = 2, .resumed_from = 1});
    CHECK(listing(folder) == names{name_of(1), name_of(2), name_of(3), name_of(4), "lock"});
    save_steps(folder, 1, {5, 6}, {.keep = 2, .resumed_from = 1});
    CHECK(listing(folder) == names{name_of(5), name_of(6), "lock"});
}

TEST_CASE("saver: two do not share a folder") {
    const scratch_directory scratch;
    const std::string taken = "'" + scratch.folder() + "' is in use by another saver";
    comm::threads::launch(2, [&](comm::threads& c) {
        checkpoint::saver first(c.duplicate("first"), scratch.folder());
        const std::string text =
            text_of<usage_error>([&] { checkpoint::saver second(c.duplicate("second"), scratch.folder()); });
        expect(text == "saver: rank 0: " + taken, "{}", text);
        // The first one is not disturbed.
        state s(static_cast<std::size_t>(c.rank()), 2);
        list contents = s.contents();
        s.fill(3);
        first.save(3, contents);
        expect(first.wait()->step == 3, "not saved");
    });
    comm::self<> c;
    CHECK(text_of<usage_error>([&] {
              const checkpoint::saver first(c.duplicate("first"), scratch.folder());
              const checkpoint::saver second(c.duplicate("second"), scratch.folder());
          }) == "saver: " + taken);
    const checkpoint::saver again(c.duplicate("again"), scratch.folder());  // given back by the one before
}

TEST_CASE("saver: a moved one still holds its folder") {
    const scratch_directory scratch;
    comm::self<> c;
    std::uint64_t x = 3;
    list contents;
    contents.add(state_of("x", view<std::uint64_t>(&x, 1)), ownership::sharded);
    checkpoint::saver first(c.duplicate("first"), scratch.folder());
    first.save(1, contents);
    checkpoint::saver moved = std::move(first);
    CHECK_THROWS_AS(checkpoint::saver(c.duplicate("second"), scratch.folder()), usage_error);
    CHECK(moved.wait()->step == 1);
}

TEST_CASE("saver: says why it cannot have a folder") {
    const scratch_directory scratch;
    comm::self<> c;
    const auto refused = [&]<class E>(const E*, const std::string& folder, checkpoint::saver_options o = {}) {
        return text_of<E>([&] { const checkpoint::saver s(c.duplicate("save"), folder, o); });
    };
    const usage_error* const usage = nullptr;
    const backend_error* const system = nullptr;
    CHECK(refused(usage, scratch.folder(), {.keep = 0}) == "saver: keep is 0: no checkpoint would stay");
    CHECK(refused(usage, "") == "saver: the folder's name is empty");
    const std::string below = scratch.path + "/missing/folder";
    CHECK(refused(system, below) == "saver: cannot create '" + below + "': No such file or directory");
    write_bytes(scratch.path + "/file", {});
    CHECK(refused(system, scratch.path + "/file") ==
          "saver: cannot open '" + scratch.path + "/file/lock': Not a directory");
    fs::create_directories(scratch.folder() + "/checkpoint-999999999999999999");
    write_bytes(scratch.folder() + "/checkpoint-999999999999999999/manifest", {});
    std::uint64_t x = 3;
    list contents;
    contents.add(state_of("x", view<std::uint64_t>(&x, 1)), ownership::sharded);
    checkpoint::saver last(c.duplicate("save"), scratch.folder());
    last.save(1, contents);
    CHECK(text_of<usage_error>([&] { static_cast<void>(last.wait()); }) ==
          "save: '" + scratch.folder() + "' has checkpoint 999999999999999999; there is no next");
}

TEST_CASE("saver: a folder's name is in its parent, with slashes behind it and without") {
    using checkpoint::detail::parent_of;
    CHECK(parent_of("runs/7") == "runs");
    CHECK(parent_of("runs//7//") == "runs");
    CHECK(parent_of("/runs/7") == "/runs");
    CHECK(parent_of("/runs/") == "/");
    CHECK(parent_of("//runs") == "/");
    CHECK(parent_of("/") == "/");
    CHECK(parent_of("runs") == ".");
    CHECK(parent_of("runs/") == ".");
    // The parent is synchronized until there is a checkpoint: who made the folder may have crashed before.
    const scratch_directory scratch;
    names log;
    const auto take = [&] {
        log.clear();
        checkpoint::saver_options options;
        options.before_file_operation = [&](std::string_view operation, const std::string& path) {
            log.push_back(std::string(operation) + " " + path);
            return 0;
        };
        const checkpoint::saver s(comm::self<>(), scratch.folder() + "/", options);
        return log;
    };
    const names parent_too{"create " + scratch.folder() + "/", "synchronize " + scratch.path,
                           "synchronize " + scratch.folder() + "/"};
    CHECK(take() == parent_too);
    CHECK(take() == parent_too);
    save_steps(scratch.folder(), 1, {1});
    CHECK(take() == names{parent_too.front(), parent_too.back()});
    // Made by somebody else, where nobody else may look.
    fs::remove_all(path_of(scratch.folder(), 1));
    fs::permissions(scratch.path, fs::perms::owner_write | fs::perms::owner_exec);
    CHECK(take() == (::geteuid() == 0 ? parent_too : names{parent_too.front(), parent_too.back()}));
    fs::permissions(scratch.path, fs::perms::owner_all);
}

TEST_CASE("saver: files of others in a checkpoint stay, and are told") {
    const scratch_directory scratch;
    const std::string folder = scratch.folder();
    save_steps(folder, 2, {1});
    write_bytes(path_of(folder, 1) + "/notes", {});
    comm::threads::launch(2, [&](comm::threads& c) {
        state s(static_cast<std::size_t>(c.rank()), 2);
        list contents = s.contents();
        s.fill(2);
        checkpoint::saver saver(c.duplicate("save"), folder, {.keep = 1});
        saver.save(2, contents);
        const auto made = saver.wait();
        const std::string why =
            "save: rank 0: cannot remove '" + path_of(folder, 1) + ".unfinished': Directory not empty";
        expect(made && made->left_over == why, "{}", made ? made->left_over : "not saved");
    });
    CHECK(listing(path_of(folder, 1) + ".unfinished") == names{"notes"});
    CHECK(load_at(folder, 2).step == 2);
}
