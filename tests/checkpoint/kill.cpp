// A job that is killed while it saves, again and again: what loads is whole, and at most one checkpoint behind.
// For longer: TUTTI_KILLS=200 <build>/tests/checkpoint/checkpoint_kill
#include <doctest/doctest.h>  // test cases

#include <chrono>   // when it is killed
#include <csignal>  // SIGKILL
#include <cstdint>  // steps
#include <cstdlib>  // getenv, atoi
#include <string>   // folder
#include <thread>   // sleep_for
#include <vector>   // values

#include <sys/wait.h>  // waitpid
#include <unistd.h>    // fork, pipe

#include "state.hpp"

using namespace tutti;
using namespace tutti::test;

namespace {

constexpr std::size_t elements = 60'000;

std::uint64_t value(std::uint64_t step, std::size_t i) { return mixed(step * 1'000'003 + i); }

// Trains for ever: every step is saved while the next one is computed, or before it. Tells each step that is safe.
[[noreturn]] void job(const std::string& folder, int ranks, bool waits, std::uint64_t step, int told) {
    try {
        comm::threads::launch(ranks, [&](comm::threads& c) {
            const part mine = partition(elements, static_cast<std::size_t>(ranks), static_cast<std::size_t>(c.rank()));
            std::vector<std::uint64_t> x(mine.count);
            list contents;
            contents.add(state_of("x", view<std::uint64_t>(x), {elements}, mine.first), ownership::sharded);
            checkpoint::saver saver(c.duplicate("save"), folder);
            for (std::uint64_t s = step;; ++s) {
                for (std::size_t i = 0; i < x.size(); ++i) { x[i] = value(s, mine.first + i); }
                const auto made = saver.wait();
                if (made && c.rank() == 0 && ::write(told, &made->step, sizeof made->step) < 0) { ::_exit(3); }
                saver.save(s, contents);
                if (!waits) { continue; }
                const auto at_once = saver.wait();
                if (at_once && c.rank() == 0 && ::write(told, &at_once->step, sizeof at_once->step) < 0) { ::_exit(3); }
            }
        });
    } catch (...) {}
    ::_exit(4);
}

}  // namespace

TEST_CASE("save: a job that is killed at any time") {
    const scratch_directory scratch;
    std::uint64_t step = 1;  // of the next job
    std::uint64_t safe = 0;  // that some job has been told of
    int jobs_with_saves = 0;
    const char* const asked = std::getenv("TUTTI_KILLS");
    const int kills = asked == nullptr ? 12 : std::atoi(asked);
    REQUIRE(kills > 0);
    for (int round = 0; round < kills; ++round) {
        CAPTURE(round);
        int ends[2];
        REQUIRE(::pipe(ends) == 0);
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            ::close(ends[0]);
            job(scratch.folder(), 1 + round % 3, round % 4 >= 2, step, ends[1]);
        }
        ::close(ends[1]);
        // Later rounds wait for a save first, so that even on a slow machine some are killed amid the saves to follow.
        std::uint64_t first = 0;
        if (round % 2 == 1) {
            REQUIRE(::read(ends[0], &first, sizeof first) == sizeof first);
            safe = first;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(mixed(std::uint64_t(round)) % 40'000));
        REQUIRE(::kill(child, SIGKILL) == 0);
        int status = 0;
        REQUIRE(::waitpid(child, &status, 0) == child);
        CHECK(WIFSIGNALED(status));
        for (std::uint64_t s = 0; ::read(ends[0], &s, sizeof s) == sizeof s;) { safe = s; }
        ::close(ends[0]);
        jobs_with_saves += safe >= step ? 1 : 0;

        const int ranks = 1 + (round + 1) % 2;
        std::uint64_t loaded = 0;
        comm::threads::launch(ranks, [&](comm::threads& c) {
            const part mine = partition(elements, static_cast<std::size_t>(ranks), static_cast<std::size_t>(c.rank()));
            std::vector<std::uint64_t> x(mine.count);
            list contents;
            contents.add(state_of("x", view<std::uint64_t>(x), {elements}, mine.first), ownership::sharded);
            const auto got = checkpoint::load(c, scratch.folder(), {}, contents);
            if (!got) { return; }
            expect(got->damaged.empty(), "{}", got->damaged.empty() ? "" : got->damaged[0]);
            for (std::size_t i = 0; i < x.size(); ++i) {
                expect(x[i] == value(got->step, mine.first + i), "element {} is not of step {}", mine.first + i,
                       got->step);
            }
            if (c.rank() == 0) { loaded = got->step; }
        });
        CHECK(loaded >= safe);
        CHECK(loaded <= std::max(safe, step) + 1);  // the one after it may have been finished
        if (loaded != 0) { step = loaded + 1; }
    }
    CHECK(2 * jobs_with_saves >= kills);
}
