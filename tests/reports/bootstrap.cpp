// Public bug reports on start-up: keys that drift apart, identifiers used twice, a rank that fails before it has
// joined. Ranks that are threads meet in a memory_store; processes have comm/store.cpp and comm/mpi_failures.cpp.
#include <chrono>      // deadlines
#include <filesystem>  // a directory to meet in
#include <span>        // values
#include <string>      // texts
#include <thread>      // ranks
#include <unistd.h>    // process id
#include <vector>      // ranks

#include <tutti/comm/store.hpp>  // under test

#include <doctest/doctest.h>  // checks

using namespace tutti;
using namespace std::chrono_literals;

namespace {

/// A store of each kind, by the same interface; the file store's directory goes with it.
struct in_memory {
    comm::memory_store store;
};
struct in_files {
    std::filesystem::path directory =
        std::filesystem::temp_directory_path() / fmt::format("tutti-reports-{}", static_cast<long>(::getpid()));
    comm::file_store store{directory.string(), "job-1"};
    ~in_files() { std::filesystem::remove_all(directory); }
};

std::vector<std::byte> bytes(std::string_view text) {
    const auto b = std::as_bytes(std::span(text));
    return {b.begin(), b.end()};
}
template <class F> void on_ranks(int n, F f) {
    std::vector<std::thread> ranks;
    for (int r = 0; r < n; ++r) { ranks.emplace_back(f, r); }
    for (std::thread& t : ranks) { t.join(); }
}

}  // namespace

TEST_CASE_TEMPLATE("meta-pytorch/torchcomms#3093: ranks with different histories meet under one name", Place, in_memory,
                   in_files) {
    Place place;
    std::atomic<int> met = 0;
    on_ranks(3, [&](int rank) {
        // Rank r has made r communicators before, which the others know nothing of.
        for (int i = 0; i < rank; ++i) {
            const std::string own = fmt::format("rank {} alone, {}", rank, i);
            place.store.arrive(own, 0);
            place.store.wait_for_all(own, 1, after(20s));
        }
        if (rank == 1) { place.store.set("dp/id", bytes("token of dp")); }
        place.store.arrive("dp", rank);
        place.store.wait_for_all("dp", 3, after(20s));
        met += place.store.get("dp/id", after(20s)) == bytes("token of dp") ? 1 : 0;
    });
    CHECK(met == 3);
}

TEST_CASE_TEMPLATE("NVIDIA/nccl#730, NVIDIA/nccl#1038: the second use of an identifier is told", Place, in_memory,
                   in_files) {
    Place place;
    place.store.set("id", bytes("1"));
    CHECK_THROWS_WITH_AS(place.store.set("id", bytes("2")), "store: 'id' has been set before; a key is used once",
                         usage_error);
    place.store.arrive("dp", 0);
    CHECK_THROWS_AS(place.store.arrive("dp", 0), usage_error);
}

TEST_CASE_TEMPLATE("NVIDIA/nccl#582: a rank that fails while joining ends its peers' wait, with the cause", Place,
                   in_memory, in_files) {
    Place place;
    std::atomic<int> told = 0;
    on_ranks(3, [&](int rank) {
        if (rank == 2) {
            std::this_thread::sleep_for(10ms);
            return place.store.fail("dp", rank, "out of memory");
        }
        place.store.arrive("dp", rank);
        try {
            place.store.wait_for_all("dp", 3, after(100s));
        } catch (const aborted_error& e) {
            told += std::string(e.what()) == "store: 'dp' failed: rank 2: out of memory" ? 1 : 0;
        }
    });
    CHECK(told == 2);
    CHECK(place.store.missing("dp", 3) == std::vector<int>{2});
}

TEST_CASE_TEMPLATE("pytorch/gloo#520: bootstrap keeps its deadline and says who is missing", Place, in_memory,
                   in_files) {
    Place place;
    place.store.arrive("dp", 1);
    try {
        place.store.wait_for_all("dp", 3, after(30ms));
        FAIL("nobody was missed");
    } catch (const timeout_error& e) { CHECK(e.missing() == std::vector<int>{0, 2}); }
    CHECK_THROWS_AS(static_cast<void>(place.store.get("id", after(30ms))), timeout_error);
}
