// store: values, arrivals, failures and deadlines of both stores; what the file store leaves on disk.
#include <doctest/doctest.h>  // test cases

#include <tutti/comm/store.hpp>  // what is tested

#include <atomic>      // order of events
#include <chrono>      // deadlines
#include <cstddef>     // byte
#include <filesystem>  // what is on disk
#include <fstream>     // a file that somebody left behind
#include <functional>  // bodies of ranks
#include <string>      // keys
#include <thread>      // ranks
#include <vector>      // values

#include <sys/stat.h>  // modes
#include <sys/wait.h>  // waitpid
#include <unistd.h>    // fork

#include <support/scratch_folder.hpp>  // a folder

using namespace std::chrono_literals;
using tutti::after;
using tutti::comm::file_store;
using tutti::comm::memory_store;
namespace fs = std::filesystem;

namespace {

struct scratch_directory {
    tutti::test::scratch_folder whole;
    std::string path = whole.path().string();
};

// The same meeting place for every rank: one object, or one object a rank over the same directory.
struct memory_place {
    memory_store shared;
    memory_store& of_rank() { return shared; }
};
struct file_place {
    scratch_directory directory;
    file_store of_rank() { return file_store(directory.path, "run-1"); }
};

std::vector<std::byte> bytes_of(std::string_view text) {
    const auto* const p = reinterpret_cast<const std::byte*>(text.data());
    return {p, p + text.size()};
}

template <class Place> void run_ranks(Place& place, const std::vector<std::function<void(Place&)>>& bodies) {
    std::vector<std::thread> threads;
    for (const auto& body : bodies) {
        threads.emplace_back([&place, &body] { body(place); });
    }
    for (auto& t : threads) { t.join(); }
}

template <class E, class F> std::string text_of(F f) {
    try {
        f();
    } catch (const E& e) { return e.what(); }
    return "nothing was thrown";
}

}  // namespace

TEST_CASE_TEMPLATE("store: a value reaches a rank that asks before it is set", Place, memory_place, file_place) {
    Place place;
    std::vector<std::byte> got;
    run_ranks<Place>(place, {[&](Place& p) { got = p.of_rank().get("dp", after(10s)); },
                             [&](Place& p) {
                                 std::this_thread::sleep_for(20ms);
                                 p.of_rank().set("dp", bytes_of("id of dp"));
                             }});
    CHECK(got == bytes_of("id of dp"));
    CHECK(place.of_rank().get("dp", after(0s)) == got);
}

TEST_CASE_TEMPLATE("store: values may be empty and larger than a page", Place, memory_place, file_place) {
    Place place;
    const auto large = bytes_of(std::string(100000, 'x'));
    place.of_rank().set("none", std::vector<std::byte>{});
    place.of_rank().set("large", large);
    CHECK(place.of_rank().get("none", after(0s)).empty());
    CHECK(place.of_rank().get("large", after(0s)) == large);
}

// pytorch/gloo#520: every wait has a deadline
TEST_CASE_TEMPLATE("store: get and wait_for_all keep their deadline and say who is missing", Place, memory_place,
                   file_place) {
    Place place;
    auto&& s = place.of_rank();
    const tutti::deadline limit = after(60ms);
    CHECK_THROWS_WITH_AS(static_cast<void>(s.get("dp", limit)), "store: 'dp' was not set before the deadline",
                         tutti::timeout_error);
    CHECK(tutti::clock_type::now() >= limit);

    s.arrive("dp", 1);
    CHECK(s.missing("dp", 4) == std::vector{0, 2, 3});
    CHECK_THROWS_WITH_AS(s.wait_for_all("dp", 4, after(60ms)),
                         "store: rank 0, 2, 3 did not arrive at 'dp' before the deadline", tutti::timeout_error);
    try {
        s.wait_for_all("dp", 4, after(1ms));
    } catch (const tutti::timeout_error& e) { CHECK(e.missing() == std::vector{0, 2, 3}); }
    for (const int r : {0, 2, 3}) { s.arrive("dp", r); }
    CHECK_NOTHROW(s.wait_for_all("dp", 4, after(0s)));
    CHECK(s.missing("dp", 5) == std::vector{4});
}

// NVIDIA/nccl#1038: an id used for a second communicator
TEST_CASE_TEMPLATE("store: the second use of a key is rejected", Place, memory_place, file_place) {
    Place place;
    auto&& s = place.of_rank();
    s.set("dp", bytes_of("1"));
    CHECK_THROWS_WITH_AS(s.set("dp", bytes_of("2")), "store: 'dp' has been set before; a key is used once",
                         tutti::usage_error);
    CHECK(s.get("dp", after(0s)) == bytes_of("1"));
    s.arrive("dp", 3);
    CHECK_THROWS_WITH_AS(s.arrive("dp", 3), "store: rank 3 has arrived at 'dp' before; a key is used once",
                         tutti::usage_error);
    s.leave("dp", 3);
    CHECK(s.missing("dp", 4) == std::vector{0, 1, 2, 3});
    CHECK_NOTHROW(s.arrive("dp", 3));
    CHECK_THROWS_AS(s.set("", bytes_of("1")), tutti::usage_error);
    CHECK_THROWS_AS(static_cast<void>(s.get("", after(0s))), tutti::usage_error);
    CHECK_THROWS_AS(s.arrive("", 0), tutti::usage_error);
}

// meta-pytorch/torchcomms#3093: a process-wide counter in the key diverges
TEST_CASE_TEMPLATE("store: ranks with different histories meet under the same name", Place, memory_place, file_place) {
    Place place;
    std::vector<std::byte> got;
    run_ranks<Place>(place, {[](Place& p) {
                                 auto&& s = p.of_rank();
                                 s.set("only here", bytes_of("x"));
                                 s.set("a", bytes_of("id a"));
                                 s.set("b", bytes_of("id b"));
                             },
                             [&](Place& p) {
                                 auto&& s = p.of_rank();
                                 got = s.get("b", after(10s));
                                 const auto a = s.get("a", after(10s));
                                 got.insert(got.end(), a.begin(), a.end());
                             }});
    CHECK(got == bytes_of("id bid a"));
}

// NVIDIA/nccl#582: one rank out of memory during initialization deadlocks its peers
TEST_CASE_TEMPLATE("store: a rank that fails ends the waits of its peers at once, with its cause", Place, memory_place,
                   file_place) {
    Place place;
    std::string waiting;
    std::string getting;
    run_ranks<Place>(
        place, {[&](Place& p) {
                    waiting = text_of<tutti::aborted_error>([&] { p.of_rank().wait_for_all("dp", 3, after(1h)); });
                },
                [&](Place& p) {
                    getting =
                        text_of<tutti::aborted_error>([&] { static_cast<void>(p.of_rank().get("dp", after(1h))); });
                },
                [&](Place& p) {
                    std::this_thread::sleep_for(20ms);
                    auto&& s = p.of_rank();
                    s.fail("dp", 2, "out of memory");
                    s.fail("dp", 1, "a later cause");
                }});
    CHECK(waiting == "store: 'dp' failed: rank 2: out of memory");
    CHECK(getting == waiting);
    CHECK(place.of_rank().failure("dp") == "rank 2: out of memory");
    CHECK_FALSE(place.of_rank().failure("another").has_value());
    place.of_rank().set("another", bytes_of("1"));
    CHECK(place.of_rank().get("another", after(0s)) == bytes_of("1"));
}

TEST_CASE_TEMPLATE("store: of many ranks that set one key, one succeeds", Place, memory_place, file_place) {
    Place place;
    std::atomic<int> won{0};
    std::vector<std::function<void(Place&)>> bodies;
    for (int r = 0; r < 8; ++r) {
        bodies.push_back([&won, r](Place& p) {
            try {
                p.of_rank().set("dp", bytes_of(std::string(5000, static_cast<char>('a' + r))));
                ++won;
            } catch (const tutti::usage_error&) {}
        });
    }
    run_ranks<Place>(place, bodies);
    CHECK(won == 1);
    const auto value = place.of_rank().get("dp", after(1s));
    CHECK(value.size() == 5000);
    CHECK(value == std::vector<std::byte>(5000, value[0]));
}

TEST_CASE("file_store: files of an earlier run are not seen, the same nonce is found out") {
    const scratch_directory directory;
    {
        file_store earlier(directory.path, "job 17");
        earlier.arrive("dp", 0);
        earlier.arrive("dp", 1);
        earlier.set("dp", bytes_of("stale"));
        earlier.fail("dp", 1, "stale");
    }
    file_store now(directory.path, "job 18");
    CHECK(now.missing("dp", 2) == std::vector{0, 1});
    CHECK_FALSE(now.failure("dp").has_value());
    CHECK_THROWS_AS(static_cast<void>(now.get("dp", after(5ms))), tutti::timeout_error);
    file_store again(directory.path, "job 17");
    CHECK_THROWS_AS(again.arrive("dp", 0), tutti::usage_error);
    CHECK_THROWS_AS(again.set("dp", bytes_of("new")), tutti::usage_error);
}

TEST_CASE("file_store: only this user can read, and nothing half-written is seen") {
    const scratch_directory directory;
    file_store s(directory.path + "/made", "n");
    s.arrive("dp/0", 0);
    s.set("dp/0", bytes_of("value"));
    s.fail("dp/0", 0, "why");
    int files = 0;
    for (const auto& entry : fs::recursive_directory_iterator(directory.path)) {
        struct stat found {};
        REQUIRE(::lstat(entry.path().c_str(), &found) == 0);
        CHECK((found.st_mode & 0777u) == (entry.is_directory() ? 0700u : 0600u));
        files += entry.is_directory() ? 0 : 1;
    }
    CHECK(files == 5);  // set, value, rank-0, failed, cause

    // What a process that died while writing leaves behind.
    s.arrive("half", 0);
    std::ofstream(directory.path + "/made/n/half/value.abc123") << "val";
    CHECK_THROWS_AS(static_cast<void>(s.get("half", after(5ms))), tutti::timeout_error);
}

TEST_CASE("file_store: keys cannot leave the directory and may be long") {
    const scratch_directory directory;
    file_store s(directory.path, "../n");
    const std::string deep(400, 'k');
    for (const std::string& key :
         {std::string("../../escape"), std::string("."), std::string("a/b c%"), deep, deep + "2"}) {
        s.set(key, bytes_of(key));
    }
    CHECK(s.get("../../escape", after(0s)) == bytes_of("../../escape"));
    CHECK(s.get(deep + "2", after(0s)) == bytes_of(deep + "2"));
    CHECK(s.get(deep, after(0s)) == bytes_of(deep));
    CHECK(s.get(".", after(0s)) == bytes_of("."));
    int at_top = 0;
    for (const auto& entry : fs::directory_iterator(directory.path)) {
        CHECK(entry.path().filename() == "%2e%2e"
                                         "%2fn");
        ++at_top;
    }
    CHECK(at_top == 1);
}

TEST_CASE("file_store: a directory prepared by somebody else is refused") {
    const scratch_directory directory;
    REQUIRE(::mkdir((directory.path + "/open").c_str(), 0700) == 0);
    REQUIRE(::chmod((directory.path + "/open").c_str(), 0777) == 0);
    CHECK_THROWS_AS(file_store(directory.path, "open"), tutti::usage_error);
    REQUIRE(::symlink(directory.path.c_str(), (directory.path + "/link").c_str()) == 0);
    CHECK_THROWS_AS(file_store(directory.path, "link"), tutti::usage_error);
    CHECK_THROWS_AS(file_store("", "n"), tutti::usage_error);
    CHECK_THROWS_AS(file_store(directory.path, ""), tutti::usage_error);
    std::ofstream(directory.path + "/file") << "not a directory";
    try {
        file_store(directory.path + "/file", "n");
        FAIL("a file served as the directory");
    } catch (const tutti::backend_error& e) {
        CHECK(e.context().backend_code == ENOTDIR);
        CHECK(std::string(e.what()).starts_with("file_store: cannot create '"));
    }
}

TEST_CASE("file_store: the last rank to leave takes the run's directory along") {
    const scratch_directory directory;
    file_store a(directory.path, "n");
    file_store b(directory.path, "n");
    a.arrive("dp", 0);
    b.arrive("dp", 1);
    a.leave("dp", 0);
    CHECK_FALSE(fs::is_empty(directory.path));
    b.leave("dp", 1);
    CHECK(fs::is_empty(directory.path));
    CHECK_NOTHROW(a.arrive("dp", 0));  // and it comes back when it is needed
    CHECK(b.missing("dp", 2) == std::vector{1});
}

TEST_CASE("file_store: processes meet") {
    const scratch_directory directory;
    std::vector<pid_t> children;
    for (int r = 1; r < 4; ++r) {
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            int code = 1;
            try {
                file_store s(directory.path, "job");
                s.arrive("dp", r);
                s.wait_for_all("dp", 4, after(20s));
                code = s.get("dp", after(20s)) == bytes_of("id") ? 0 : 2;
            } catch (const std::exception&) { code = 3; }
            ::_exit(code);
        }
        children.push_back(child);
    }
    file_store s(directory.path, "job");
    s.set("dp", bytes_of("id"));
    s.arrive("dp", 0);
    CHECK_NOTHROW(s.wait_for_all("dp", 4, after(20s)));
    for (const pid_t child : children) {
        int status = -1;
        REQUIRE(::waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 0);
    }
}
