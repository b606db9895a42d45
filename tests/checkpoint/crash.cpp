// Crashes, losses of power and full disks at every operation on files: the old checkpoint or the new one, never less.
#include <doctest/doctest.h>  // test cases

#include <atomic>   // calls
#include <cerrno>   // ENOSPC
#include <csignal>  // SIGXFSZ
#include <cstdarg>  // open
#include <cstdint>  // steps
#include <map>      // what is not durable
#include <mutex>    // ranks
#include <set>      // what is not durable
#include <string>   // paths
#include <vector>   // operations

#include <sys/resource.h>  // setrlimit
#include <sys/syscall.h>   // SYS_fsync
#include <unistd.h>        // syscall

#include "state.hpp"

using namespace tutti;
using namespace tutti::test;
using names = std::vector<std::string>;

namespace {

// What signals do to calls that wait for a disk, on file systems that let them: every other one is interrupted.
std::atomic<bool> interrupting{false};
struct interrupted_call {
    std::atomic<int> calls{0};
    std::atomic<int> interrupted{0};
    bool operator()() {
        if (!interrupting || calls++ % 2 != 0) { return false; }
        ++interrupted;
        errno = EINTR;
        return true;
    }
};
interrupted_call opening, synchronizing, closing;

}  // namespace

// Ahead of the C library's.
extern "C" int open(const char* path, int flags, ...) {
    std::va_list more;
    va_start(more, flags);
    const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : 0;
    va_end(more);
    return opening() ? -1 : static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}
extern "C" int fsync(int file) { return synchronizing() ? -1 : static_cast<int>(::syscall(SYS_fsync, file)); }
extern "C" int close(int file) {  // Linux has closed it, also when it says that it was interrupted
    const auto closed = static_cast<int>(::syscall(SYS_close, file));
    return closed == 0 && closing() ? -1 : closed;
}

namespace {

struct crashed : std::runtime_error {
    crashed() : std::runtime_error("crashed") {}
};

// Sees every operation on files, ends the world at one of them, and knows what a loss of power takes away then.
class disk {
    std::mutex mutex_;
    std::set<std::string> unwritten_;                           // files with bytes that are not durable
    std::vector<std::pair<std::string, std::string>> renamed_;  // names that are not
    std::vector<std::string> created_;

    static std::string other_name(const std::string& path) {
        const std::string suffix = ".unfinished";
        return path.ends_with(suffix) ? path.substr(0, path.size() - suffix.size()) : path + suffix;
    }
    static void move(std::string& path, const std::string& from, const std::string& to) {
        if (path == from || path.starts_with(from + "/")) { path = to + path.substr(from.size()); }
    }
    void note(std::string_view operation, const std::string& path) {
        if (operation == "create" && !fs::exists(path)) { created_.push_back(path); }
        if (operation == "write") { unwritten_.insert(path); }
        if (operation == "synchronize") {
            unwritten_.erase(path);
            std::erase_if(created_, [&](const std::string& c) { return fs::path(c).parent_path() == path; });
            std::erase_if(renamed_, [&](const auto& r) { return fs::path(r.second).parent_path() == path; });
        }
        if (operation == "rename") {
            const std::string to = other_name(path);
            std::set<std::string> moved;
            for (std::string p : unwritten_) {
                move(p, path, to);
                moved.insert(p);
            }
            unwritten_ = moved;
            for (std::string& c : created_) { move(c, path, to); }
            renamed_.emplace_back(path, to);
        }
    }

public:
    int crash_at = -1;
    int refuse_at = -1;
    int operations = 0;
    bool dead = false;
    names log;

    int operator()(std::string_view operation, const std::string& path) {
        const std::lock_guard lock(mutex_);
        dead = dead || operations == crash_at;
        if (dead) { throw crashed(); }
        const bool refused = operations == refuse_at;
        ++operations;
        if (refused) { return ENOSPC; }
        log.push_back(std::string(operation) + " " + path);
        note(operation, path);
        return 0;
    }
    [[nodiscard]] checkpoint::file_hook hook() {
        return [this](std::string_view operation, const std::string& path) { return (*this)(operation, path); };
    }
    /// What was not made durable goes: names that were not synchronized, then bytes.
    void lose_power(bool names_too) {
        for (const std::string& path : unwritten_) {
            if (fs::exists(path)) { fs::resize_file(path, fs::file_size(path) / 2); }
        }
        if (!names_too) { return; }
        for (std::size_t i = created_.size(); i-- > 0;) { fs::remove_all(created_[i]); }
        for (std::size_t i = renamed_.size(); i-- > 0;) {
            if (fs::exists(renamed_[i].second)) { fs::rename(renamed_[i].second, renamed_[i].first); }
        }
    }
};

// Saves step 2 while the disk watches. Whether wait() has said that it is there.
bool save_second(const std::string& folder, int ranks, disk& d) {
    bool told = false;
    try {
        comm::threads::launch(ranks, [&](comm::threads& c) {
            state s(static_cast<std::size_t>(c.rank()), static_cast<std::size_t>(c.size()));
            list contents = s.contents();
            s.fill(2);
            checkpoint::saver saver(c.duplicate("save"), folder, {.keep = 1, .before_file_operation = d.hook()});
            saver.save(2, contents);
            const auto made = saver.wait();
            if (c.rank() == 0) { told = made.has_value(); }
        });
    } catch (const error&) {}
    return told;
}

int operations_of_a_save(int ranks) {
    const scratch_directory scratch;
    save_steps(scratch.folder(), ranks, {1});
    disk d;
    REQUIRE(save_second(scratch.folder(), ranks, d));
    return d.operations;
}

}  // namespace

TEST_CASE("save: everything is durable before anything depends on it") {
    const scratch_directory scratch;
    const std::string folder = scratch.folder();
    disk d;
    save_steps(folder, 1, {1, 2}, {.keep = 1, .before_file_operation = d.hook()});
    const auto steps = [&](const std::string& c) {
        return names{"create " + c + ".unfinished",
                     "create " + c + ".unfinished/rank-00000.shard",
                     "write " + c + ".unfinished/rank-00000.shard",  // header
                     "write " + c + ".unfinished/rank-00000.shard",  // elements
                     "synchronize " + c + ".unfinished/rank-00000.shard",
                     "synchronize " + c + ".unfinished",
                     "rename " + c + ".unfinished",
                     "synchronize " + folder,
                     "create " + c + "/manifest.unfinished",
                     "write " + c + "/manifest.unfinished",
                     "synchronize " + c + "/manifest.unfinished",
                     "rename " + c + "/manifest.unfinished",
                     "synchronize " + c};
    };
    const std::string first = path_of(folder, 1);
    names expected{"create " + folder, "synchronize " + scratch.path, "synchronize " + folder};
    for (const int generation : {1, 2}) {
        for (const std::string& s : steps(path_of(folder, generation))) { expected.push_back(s); }
    }
    expected.push_back("rename " + first);
    // Then its files, in no order.
    REQUIRE(d.log.size() == expected.size() + 4);
    CHECK(names(d.log.begin(), d.log.end() - 4) == expected);
    names removed(d.log.end() - 4, d.log.end() - 2);
    std::sort(removed.begin(), removed.end());
    CHECK(removed ==
          names{"remove " + first + ".unfinished/manifest", "remove " + first + ".unfinished/rank-00000.shard"});
    CHECK(d.log[d.log.size() - 2] == "remove " + first + ".unfinished");
    CHECK(d.log.back() == "synchronize " + folder);
}

TEST_CASE("save: a crash, with and without a loss of power, at every operation") {
    enum class loss { none, bytes, bytes_and_names };
    for (const int ranks : {1, 2}) {
        const int operations = operations_of_a_save(ranks);
        REQUIRE(operations > 15);
        int old_ones = 0;
        for (int k = 0; k <= operations; ++k) {
            for (const loss what : {loss::none, loss::bytes, loss::bytes_and_names}) {
                if (ranks > 1 && what == loss::bytes) { continue; }  // a disk's time
                CAPTURE(ranks);
                CAPTURE(k);
                CAPTURE(static_cast<int>(what));
                const scratch_directory scratch;
                const std::string folder = scratch.folder();
                save_steps(folder, ranks, {1});
                disk d;
                d.crash_at = k;
                const bool told = save_second(folder, ranks, d);
                CHECK((told || k < operations));
                if (what != loss::none) { d.lose_power(what == loss::bytes_and_names); }
                const auto got = load_at(folder, ranks);
                const bool right = told ? got.step == 2 : got.step == 1 || got.step == 2;
                CHECK(right);
                CHECK(got.damaged.empty());
                old_ones += got.step == 1 ? 1 : 0;
                // Who comes next is not disturbed, and cleans up.
                save_steps(folder, ranks, {3}, {.keep = 1});
                CHECK(load_at(folder, ranks).step == 3);
                CHECK(listing(folder).size() == 2);
            }
        }
        CHECK(old_ones > 2 * 10);
    }
}

TEST_CASE("save: into a new folder, whose own name is durable before a save is told") {
    bool more = true;
    for (int k = 0; more; ++k) {
        CAPTURE(k);
        const scratch_directory scratch;
        const std::string folder = scratch.folder();
        disk d;
        d.crash_at = k;
        const bool told = save_second(folder, 1, d);
        more = !told;  // the last one comes to its end
        if (!told) {   // who comes next finds what is left, and only then the power goes
            d.crash_at = -1;
            d.dead = false;
            REQUIRE(save_second(folder, 1, d));
        }
        d.lose_power(true);
        CHECK(load_at(folder, 1).step == 2);
    }
}

TEST_CASE("save: an operation that fails costs that checkpoint and no other, on all ranks") {
    for (const int ranks : {1, 2}) {
        const int operations = operations_of_a_save(ranks);
        int failed_saves = 0;  // both as rank 0 counts them
        int left_over = 0;
        for (int k = 0; k < operations; ++k) {
            CAPTURE(ranks);
            CAPTURE(k);
            const scratch_directory scratch;
            const std::string folder = scratch.folder();
            save_steps(folder, ranks, {1});
            disk d;
            d.refuse_at = k;
            comm::threads::launch(ranks, [&](comm::threads& c) {
                state s(static_cast<std::size_t>(c.rank()), static_cast<std::size_t>(c.size()));
                list contents = s.contents();
                std::optional<checkpoint::saver<comm::threads>> saver;
                const auto open = [&] {
                    saver.emplace(c.duplicate("save"), folder,
                                  checkpoint::saver_options{.keep = 1, .before_file_operation = d.hook()});
                };
                try {
                    open();
                } catch (const backend_error&) {  // the disk had its failure
                    open();
                }
                s.fill(2);
                saver->save(2, contents);
                std::uint64_t there = 2;
                std::string text;
                try {
                    const auto made = saver->wait();
                    text = made->left_over;
                    if (c.rank() == 0 && !text.empty()) { ++left_over; }
                } catch (const backend_error& e) {
                    there = 1;
                    text = e.what();
                    expect(e.context().backend_code == ENOSPC, "code {}", e.context().backend_code);
                    if (c.rank() == 0) { ++failed_saves; }
                }
                expect(text.empty() || text.find("No space left on device") != std::string::npos, "{}", text);
                c.agree(hash_bytes(as_bytes(view(text.data(), text.size()))), "the error");
                s.fill(0);
                const list again = s.contents();
                const auto got = checkpoint::load(c, folder, {}, again);
                expect(got && got->step == there, "step {} instead of {}", got ? got->step : 0, there);
                s.demand(there);
                // The next one succeeds, and leaves nothing of the failure.
                c.barrier();
                s.fill(3);
                saver->save(3, contents);
                expect(saver->wait()->left_over.empty(), "something is left over");
            });
            CHECK(load_at(folder, ranks).step == 3);
            CHECK(listing(folder).size() == 2);
        }
        CHECK(failed_saves >= 12);
        CHECK(left_over == operations - failed_saves - 2);  // but for those of the constructor
    }
}

TEST_CASE("save and load: signals interrupt what opens, synchronizes and closes files, and nothing fails") {
    const scratch_directory scratch;
    interrupting = true;
    save_steps(scratch.folder(), 2, {1, 2}, {.keep = 1});
    const std::uint64_t step = load_at(scratch.folder(), 2).step;
    interrupting = false;
    CHECK(step == 2);
    CHECK(opening.interrupted > 10);
    CHECK(synchronizing.interrupted > 10);
    CHECK(closing.interrupted > 10);
}

TEST_CASE("save: a file system that is full in earnest") {
    const scratch_directory scratch;
    const std::string folder = scratch.folder();
    save_steps(folder, 2, {1});
    comm::threads::launch(2, [&](comm::threads& c) {
        std::vector<float> large(50000, 1.0f);
        list contents;
        contents.add(state_of("large", view<float>(large)), ownership::local);
        checkpoint::saver saver(c.duplicate("save"), folder);
        rlimit before{};
        if (c.rank() == 0) {
            std::signal(SIGXFSZ, SIG_IGN);
            ::getrlimit(RLIMIT_FSIZE, &before);
            const rlimit narrow{8192, before.rlim_max};
            ::setrlimit(RLIMIT_FSIZE, &narrow);
        }
        c.barrier();
        saver.save(2, contents);
        std::string text;
        try {
            static_cast<void>(saver.wait());
        } catch (const backend_error& e) { text = e.what(); }
        c.barrier();
        if (c.rank() == 0) { ::setrlimit(RLIMIT_FSIZE, &before); }
        c.barrier();
        expect(text == "save: rank 0: cannot write '" + path_of(folder, 2) +
                           ".unfinished/rank-00000.shard': File too large (rank 1 failed too)",
               "{}", text);
        expect(listing(folder) == names{"checkpoint-0000000001", "lock"}, "something is left");
        c.barrier();
        saver.save(3, contents);
        expect(saver.wait()->step == 3, "not saved");
    });
    fs::remove_all(path_of(folder, 2));
    CHECK(load_at(folder, 2).step == 1);
}

TEST_CASE("save: a shard that rank 0 does not find as it was written is missed") {
    const scratch_directory scratch;
    const std::string shard = path_of(scratch.folder(), 1) + ".unfinished/rank-00001.shard";
    for (const bool gone : {true, false}) {
        comm::threads::launch(2, [&](comm::threads& c) {
            state s(static_cast<std::size_t>(c.rank()), 2);
            list contents = s.contents();
            s.fill(1);
            checkpoint::saver_options options;
            options.before_file_operation = [&](std::string_view operation, const std::string& path) {
                if (operation == "synchronize" && path == shard) {  // rank 1 has written it
                    if (gone) {
                        fs::remove(path);  // as if rank 1 had a folder of its own by this name
                    } else {
                        fs::resize_file(path, 10);
                    }
                }
                return 0;
            };
            checkpoint::saver saver(c.duplicate("save"), scratch.folder(), options);
            saver.save(1, contents);
            std::string text;
            try {
                static_cast<void>(saver.wait());
            } catch (const error& e) { text = e.what(); }
            expect(
                text.starts_with("save: rank 0: '" + shard + (gone ? "' is not there" : "' has 10 bytes where rank 1")),
                "{}", text);
        });
        CHECK(load_at(scratch.folder(), 2).generation == 0);
        CHECK(listing(scratch.folder()) == names{"lock"});
    }
}

TEST_CASE("save: a communicator that fails ends the save and leaves the checkpoint before") {
    const scratch_directory scratch;
    save_steps(scratch.folder(), 2, {1});
    std::string text;
    try {
        comm::threads::launch(2, [&](comm::threads& c) {
            state s(static_cast<std::size_t>(c.rank()), 2);
            list contents = s.contents();
            checkpoint::saver_options options;
            if (c.rank() == 1) {
                options.before_file_operation = [&](std::string_view, const std::string&) {
                    c.abort("rank 1 is gone");
                    return 0;
                };
            }
            checkpoint::saver saver(c.duplicate("save"), scratch.folder(), options);
            saver.save(2, contents);
            static_cast<void>(saver.wait());
        });
    } catch (const aborted_error& e) { text = e.what(); }
    CHECK(text.find("rank 1 is gone") != std::string::npos);
    CHECK(load_at(scratch.folder(), 2).step == 1);
    save_steps(scratch.folder(), 2, {3});
    CHECK(listing(scratch.folder()) == names{"checkpoint-0000000001", "checkpoint-0000000002", "lock"});
}
