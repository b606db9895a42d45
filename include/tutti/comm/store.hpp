// store: where ranks meet that have no communicator yet: values by key, who has arrived, who has failed.
// Needs core/deadline. memory_store serves ranks that are threads, file_store ranks that share a directory.
// A key names the communicator being made: ranks may make theirs in different orders and numbers.
#pragma once

#include <algorithm>           // find, min
#include <cerrno>              // EEXIST, ENOENT
#include <chrono>              // pauses
#include <concepts>            // same_as
#include <condition_variable>  // memory_store's waits
#include <cstddef>             // byte
#include <cstdint>             // versions
#include <cstdlib>             // getenv
#include <functional>          // less: lookups without a copy
#include <map>                 // memory_store's keys
#include <mutex>               // memory_store's keys
#include <optional>            // what may not be there yet
#include <span>                // values
#include <string>              // keys, paths
#include <string_view>         // keys
#include <thread>              // sleep_for
#include <utility>             // move
#include <vector>              // values

#include <sys/stat.h>  // mkdir, lstat
#include <unistd.h>    // unlink, rmdir

#include <tutti/comm/detail/whole_file.hpp>  // files seen whole or not at all
#include <tutti/core/deadline.hpp>           // deadline
#include <tutti/core/error.hpp>              // errors
#include <tutti/core/state.hpp>              // hash_bytes
#include <tutti/core/text.hpp>               // formatted
#include <tutti/core/view.hpp>               // bytes of a name

namespace tutti::comm {

/// TUTTI_STORE, or nothing.
[[nodiscard]] inline std::string default_store_directory() {
    const char* const directory = std::getenv("TUTTI_STORE");
    return directory == nullptr ? std::string() : std::string(directory);
}

/// A meeting place of ranks.
///
/// Semantics  set          publishes a value, once a key.
///            get          waits for the value; `find` gives it if it is there.
///            arrive       says that `rank` has come to `key`, once; `leave` takes that back.
///            missing      the ranks of [0, ranks) that have not arrived, now.
///            wait_for_all waits until none is missing.
///            fail         ends every present and later get and wait_for_all of `key` at once; the first cause stays.
///            forget       takes the value back, when every rank has it.
/// Threads    all functions may be called from any thread.
/// Errors     usage_error for the second use of a key (set twice, a rank arriving twice) and for an empty key;
///            timeout_error at the deadline, naming who is missing; aborted_error after fail, with its cause.
template <class S>
concept store = requires(S& s, std::string_view key, std::span<const std::byte> value, int rank, deadline limit) {
    s.set(key, value);
    { s.get(key, limit) } -> std::same_as<std::vector<std::byte>>;
    s.arrive(key, rank);
    s.leave(key, rank);
    s.forget(key);
    { s.missing(key, rank) } -> std::same_as<std::vector<int>>;
    s.wait_for_all(key, rank, limit);
    s.fail(key, rank, key);
    { s.failure(key) } -> std::same_as<std::optional<std::string>>;
    { s.find(key) } -> std::same_as<std::optional<std::vector<std::byte>>>;
};

/// The waits that all stores share. Derived brings the rest of the concept and: find(key), has_arrived(key, rank),
/// version() and pause(version, round, limit), which returns when something may have changed since `version`.
template <class Derived> class basic_store {
public:
    [[nodiscard]] std::vector<std::byte> get(std::string_view key, deadline limit) {
        std::optional<std::vector<std::byte>> value;
        const bool found = wait(key, limit, [&] { return (value = self().find(key)).has_value(); });
        if (!found) { throw timeout_error(formatted("store: '{}' was not set before the deadline", key), {}); }
        return *std::move(value);
    }
    [[nodiscard]] std::vector<int> missing(std::string_view key, int ranks) {
        std::vector<int> absent;
        for (int r = 0; r < ranks; ++r) {
            if (!self().has_arrived(key, r)) { absent.push_back(r); }
        }
        return absent;
    }
    void wait_for_all(std::string_view key, int ranks, deadline limit) {
        std::vector<int> absent;
        if (!wait(key, limit, [&] { return (absent = missing(key, ranks)).empty(); })) {
            throw timeout_error(
                formatted("store: rank {} did not arrive at '{}' before the deadline", list_of(absent), key), absent);
        }
    }

protected:
    static void expect_key(std::string_view key) {
        if (key.empty()) { throw usage_error("store: the key is empty"); }
    }
    [[noreturn]] static void refuse_second_set(std::string_view key) {
        throw usage_error(formatted("store: '{}' has been set before; a key is used once", key));
    }
    [[noreturn]] static void refuse_second_arrival(std::string_view key, int rank) {
        throw usage_error(formatted("store: rank {} has arrived at '{}' before; a key is used once", rank, key));
    }

private:
    [[nodiscard]] Derived& self() noexcept { return static_cast<Derived&>(*this); }
    template <class Ready> [[nodiscard]] bool wait(std::string_view key, deadline limit, Ready ready) {
        expect_key(key);
        for (int round = 0;; ++round) {
            const std::uint64_t version = self().version();
            if (const auto cause = self().failure(key)) {
                throw aborted_error(formatted("store: '{}' failed: {}", key, *cause));
            }
            if (ready()) { return true; }
            if (clock_type::now() >= limit) { return false; }
            self().pause(version, round, limit);
        }
    }
};

/// The store of ranks that are threads of one process, which share it by reference.
/// Cost  a lock and a map lookup; waits sleep on a condition variable.
class memory_store : public basic_store<memory_store> {
    struct entry {
        std::optional<std::vector<std::byte>> value;
        std::vector<int> arrived;
        std::optional<std::string> cause;
    };
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::string, entry, std::less<>> entries_;
    std::uint64_t version_ = 0;

    [[nodiscard]] static bool holds(const std::vector<int>& ranks, int rank) noexcept {
        return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    }
    template <class Change> void change(std::string_view key, Change apply) {
        expect_key(key);
        {
            const std::lock_guard lock(mutex_);
            apply(entries_[std::string(key)]);
            ++version_;
        }
        changed_.notify_all();
    }
    template <class Look> [[nodiscard]] auto look(std::string_view key, Look at) {
        const std::lock_guard lock(mutex_);
        const auto found = entries_.find(key);
        static const entry none;
        return at(found == entries_.end() ? none : found->second);
    }

public:
    void set(std::string_view key, std::span<const std::byte> value) {
        change(key, [&](entry& e) {
            if (e.value) { refuse_second_set(key); }
            e.value.emplace(value.begin(), value.end());
        });
    }
    void arrive(std::string_view key, int rank) {
        change(key, [&](entry& e) {
            if (holds(e.arrived, rank)) { refuse_second_arrival(key, rank); }
            e.arrived.push_back(rank);
        });
    }
    void leave(std::string_view key, int rank) {
        change(key, [&](entry& e) { std::erase(e.arrived, rank); });
    }
    void forget(std::string_view key) {
        change(key, [&](entry& e) { e.value.reset(); });
    }
    void fail(std::string_view key, int rank, std::string_view why) {
        change(key, [&](entry& e) {
            if (!e.cause) { e.cause = formatted("rank {}: {}", rank, why); }
        });
    }
    [[nodiscard]] std::optional<std::vector<std::byte>> find(std::string_view key) {
        return look(key, [](const entry& e) { return e.value; });
    }
    [[nodiscard]] bool has_arrived(std::string_view key, int rank) {
        return look(key, [&](const entry& e) { return holds(e.arrived, rank); });
    }
    [[nodiscard]] std::optional<std::string> failure(std::string_view key) {
        return look(key, [](const entry& e) { return e.cause; });
    }
    [[nodiscard]] std::uint64_t version() {
        const std::lock_guard lock(mutex_);
        return version_;
    }
    void pause(std::uint64_t version, int /*round*/, deadline limit) {
        std::unique_lock lock(mutex_);
        // A far deadline would overflow the clock that the wait is made of.
        const deadline slice = std::min(limit, clock_type::now() + std::chrono::seconds(1));
        changed_.wait_until(lock, slice, [&] { return version_ != version; });
    }
};

/// The store of processes that share a directory.
///
/// Semantics  everything lies under <directory>/<nonce>/<key>/. The nonce is the same on all ranks and new for every
///            run (a job id), so files of earlier runs are not seen; a nonce used again is found out by the second
///            arrival. The directory is made when it is not there; its parent must exist. `leave` removes what has
///            become empty.
/// Cost       a few system calls an operation; waits look every 1 to 20 ms. Values become visible whole: they are
///            written beside and renamed. On NFS a file may be seen late, by as much as the client's attribute cache
///            holds.
/// Errors     backend_error with errno; usage_error when the run's directory belongs to, or is open to, somebody else.
///            Files have mode 0600 and directories 0700.
class file_store : public basic_store<file_store> {
    std::string directory_;
    std::string run_;

public:
    file_store(std::string directory, std::string_view nonce)
        : directory_(std::move(directory)), run_(directory_ + "/" + file_name(nonce)) {
        if (directory_.empty() || nonce.empty()) {
            throw usage_error("file_store: the directory or the nonce is empty");
        }
        detail::make_directory(directory_);
        detail::make_directory(run_);
        struct stat found {};
        if (::lstat(run_.c_str(), &found) != 0) { detail::refuse_file("look at", run_, errno); }
        if (!S_ISDIR(found.st_mode) || found.st_uid != ::geteuid() || (found.st_mode & 077u) != 0) {
            throw usage_error(formatted("file_store: '{}' is not a directory of this user alone", run_));
        }
    }

    void set(std::string_view key, std::span<const std::byte> value) {
        if (!create(key, "set")) { refuse_second_set(key); }
        detail::publish_file(path(key, "value"), value);
    }
    void arrive(std::string_view key, int rank) {
        if (!create(key, arrival(rank))) { refuse_second_arrival(key, rank); }
    }
    void leave(std::string_view key, int rank) { take_back(key, arrival(rank)); }
    void forget(std::string_view key) {
        take_back(key, "value");
        take_back(key, "set");
    }
    void fail(std::string_view key, int rank, std::string_view why) {
        if (!create(key, "failed")) { return; }
        const std::string text = formatted("rank {}: {}", rank, why);
        detail::publish_file(path(key, "cause"), std::as_bytes(std::span(text)));
    }
    [[nodiscard]] std::optional<std::vector<std::byte>> find(std::string_view key) {
        return detail::read_file(path(key, "value"));
    }
    [[nodiscard]] bool has_arrived(std::string_view key, int rank) {
        return ::access(path(key, arrival(rank)).c_str(), F_OK) == 0;
    }
    [[nodiscard]] std::optional<std::string> failure(std::string_view key) {
        const auto bytes = detail::read_file(path(key, "cause"));
        if (!bytes) { return std::nullopt; }
        return std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size());
    }
    [[nodiscard]] std::uint64_t version() const noexcept { return 0; }
    void pause(std::uint64_t /*version*/, int round, deadline limit) const {
        const duration nap = std::chrono::milliseconds(std::min(1 + round, 20));
        std::this_thread::sleep_for(std::min<duration>(nap, limit - clock_type::now()));
    }

private:
    // Letters, digits, '-' and '_' stay; the rest, '/' and '.' above all, becomes %xx. Long names end in their hash.
    [[nodiscard]] static std::string file_name(std::string_view text) {
        std::string name;
        for (const char c : text) {
            const bool plain =
                (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
            if (plain) {
                name += c;
            } else {
                name += formatted("%{:02x}", static_cast<unsigned char>(c));
            }
        }
        constexpr std::size_t most = 200;  // file systems end at 255
        if (name.size() > most) {
            name.resize(most);
            name += formatted("~{:016x}", hash_bytes(as_bytes(view(text.data(), text.size()))));
        }
        return name;
    }
    [[nodiscard]] static std::string arrival(int rank) { return formatted("rank-{}", rank); }
    [[nodiscard]] std::string path(std::string_view key, std::string_view file) const {
        expect_key(key);
        return run_ + "/" + file_name(key) + "/" + std::string(file);
    }
    void take_back(std::string_view key, std::string_view file) const {
        static_cast<void>(::unlink(path(key, file).c_str()));
        // These fail while anything is left inside, as they should.
        static_cast<void>(::rmdir(path(key, "").c_str()));
        static_cast<void>(::rmdir(run_.c_str()));
    }
    // True for the one caller that created the file.
    [[nodiscard]] bool create(std::string_view key, std::string_view file) const {
        const std::string target = path(key, file);
        for (int attempt = 0;; ++attempt) {
            detail::make_directory(run_);
            int code = ::mkdir(path(key, "").c_str(), 0700) == 0 ? EEXIST : errno;
            if (code == EEXIST) {
                code = detail::create_file(target);
                if (code == 0 || code == EEXIST) { return code == 0; }
            }
            // A leaving rank may remove an empty directory under our feet.
            if (code != ENOENT || attempt == 100) { detail::refuse_file("create", target, code); }
        }
    }
};

static_assert(store<memory_store> && store<file_store>);

}  // namespace tutti::comm
