// mpi_note: what ranks of a family tell each other, what they know of their communicators, and what has failed here.
// Needs comm/mpi_options. Includes no MPI.
#pragma once

#include <algorithm>    // find, min
#include <atomic>       // busy and failure flags
#include <cstddef>      // size_t
#include <cstdint>      // ids
#include <cstring>      // memcpy
#include <mutex>        // the first failure
#include <optional>     // answers
#include <string>       // names, causes
#include <string_view>  // causes
#include <vector>       // members

#include <tutti/comm/mpi_options.hpp>  // policy

namespace tutti::comm::detail {

/// Tags on our communicators: exchange, notes, and collectives that are made of messages (from first_call_tag on).
inline constexpr int exchange_tag = 0;
inline constexpr int note_tag = 1;
inline constexpr int first_call_tag = 2;

/// One communicator as the family sees it: who is in it, how far it got, what it is doing.
struct mpi_activity {
    std::uint64_t id = 0;  ///< the same on all ranks, a function of how the communicator was made
    std::string name;
    std::vector<int> members;    ///< by rank: the rank in the root communicator
    std::uint64_t position = 0;  ///< collectives begun; guarded by the family's mutex, like the next two
    std::string operation{};     ///< of the last call: a copy, as notes are answered while the call ends
    std::uint64_t sequence = 0;
    std::atomic<bool> busy{false};  ///< in that call
};

/// A note. The text is a cause (abort) or what the sender is doing (answer).
struct mpi_note {
    enum kind_type : std::uint32_t { abort, query, answer };
    std::uint32_t kind = abort;
    std::int32_t from = -1;      ///< rank in the root communicator
    std::uint64_t token = 0;     ///< names the query
    std::uint64_t channel = 0;   ///< id of the communicator asked about
    std::uint64_t position = 0;  ///< answer: collectives begun there
    char text[224] = {};
    std::uint64_t signature = own;  ///< tells notes from messages of the user's under the same tag
    static constexpr std::uint64_t own = 0x74757474692e6e6f;
    void say(std::string_view words) noexcept {
        const std::size_t n = std::min(words.size(), sizeof(text) - 1);
        std::memcpy(text, words.data(), n);
        text[n] = '\0';
    }
};

/// What one rank learned about the others after its deadline.
struct mpi_inquiry {
    struct reply {
        std::uint64_t position = 0;
        std::string doing;
    };
    std::uint64_t token = 0;
    std::vector<int> asked;                     ///< ranks in the root communicator
    std::vector<std::optional<reply>> replies;  ///< one for each of them
    [[nodiscard]] bool complete() const noexcept {
        return std::find(replies.begin(), replies.end(), std::nullopt) == replies.end();
    }
};

/// What failed on this rank, of all families: after that, MPI_Finalize may wait for ranks that do not come.
class mpi_job_failure {
    inline static std::mutex mutex_;
    inline static std::string cause_;
    inline static std::atomic<bool> failed_{false};

public:
    static void set(std::string_view why, failure_policy policy) {
        failed_.store(true);
        const std::lock_guard lock(mutex_);
        if (cause_.empty() && policy == failure_policy::end_job) { cause_ = why; }
    }
    [[nodiscard]] static bool any() noexcept { return failed_.load(); }
    /// The first cause of a family with end_job, or nothing.
    [[nodiscard]] static std::string ending() {
        const std::lock_guard lock(mutex_);
        return cause_;
    }
};

}  // namespace tutti::comm::detail
