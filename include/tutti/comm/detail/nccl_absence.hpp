// nccl_absence: who is missing when a collective does not complete or fails: every rank tells the store where it is.
// Needs comm/detail/{nccl_channel,store_link}.
#pragma once

#include <algorithm>    // clamp, find_if
#include <chrono>       // grace
#include <cstddef>      // size_t
#include <cstdint>      // numbers
#include <cstring>      // memcpy
#include <optional>     // answers
#include <span>         // bytes
#include <string>       // texts
#include <string_view>  // keys
#include <thread>       // sleep_for
#include <vector>       // answers

#include <tutti/comm/detail/nccl_channel.hpp>  // positions
#include <tutti/comm/detail/store_link.hpp>    // store_link
#include <tutti/core/deadline.hpp>             // deadline
#include <tutti/core/error.hpp>                // list_of
#include <tutti/core/text.hpp>                 // formatted

namespace tutti::comm::detail {

/// One inquiry. A rank whose watchdog answers says how far it came; one that does not answer within a grace of half the
/// timeout (0.2 to 2 s) is gone.
class nccl_absence {
    std::vector<std::optional<nccl_position>> answers_;  // by rank of the communicator
    std::vector<int> missing_;                           // its ranks
    std::string text_;
    bool failed_elsewhere_ = false;

public:
    /// While this key has failed, ranks answer.
    [[nodiscard]] static std::string question(std::string_view family) { return formatted("{}/where", family); }

    /// Once a family: a second answer would come too late anyway.
    static void answer(store_link& store, std::string_view family, int rank, std::span<const nccl_position> positions) {
        const std::string key = of(family, rank);
        if (!store.find(key)) { store.set(key, std::as_bytes(positions)); }
    }

    /// Asks the members of communicator `id`, by their ranks in the family.
    nccl_absence(store_link& store, std::string_view family, int own_rank, const std::vector<int>& ranks,
                 std::uint64_t id, duration timeout)
        : answers_(ranks.size()) {
        store.fail(question(family), own_rank, "asks where everybody is");
        const deadline limit =
            after(std::clamp<duration>(timeout / 2, std::chrono::milliseconds(200), std::chrono::seconds(2)));
        for (bool all = false; !all && clock_type::now() < limit;) {
            // Another rank was first to find out: its text says who is missing.
            if (store.failure(family)) {
                failed_elsewhere_ = true;
                return;
            }
            all = true;
            for (std::size_t r = 0; r < answers_.size(); ++r) {
                if (!answers_[r]) { answers_[r] = ask(store, family, ranks[r], id); }
                all = all && answers_[r].has_value();
            }
            if (!all) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }
        }
    }

    /// `stuck`: what had been begun when the event was put that was not reached in time.
    void judge_late(const nccl_progress& stuck, duration timeout) {
        std::string details;
        for (std::size_t r = 0; r < answers_.size(); ++r) {
            const auto& a = answers_[r];
            // Messages concern only those whom they name, so counts of exchanges say nothing about the others.
            if (a && (stuck.exchanging || a->collectives >= stuck.at.collectives)) { continue; }
            missing_.push_back(static_cast<int>(r));
            details += formatted("{}rank {} ", details.empty() ? "" : ", ", r);
            details += a ? formatted("is at call {}", a->collectives) : "does not answer";
        }
        const error_context& context = stuck.context;
        text_ = missing_.empty() ? formatted("{}: all ranks are there, but it did not complete within {:.3g} s{}",
                                             context.operation, seconds(timeout), where(context))
                                 : formatted("{}: rank {} did not arrive within {:.3g} s ({}){}", context.operation,
                                             list_of(missing_), seconds(timeout), details, where(context));
    }
    /// NCCL failed with `why`: a rank that does not answer is the cause, whatever NCCL calls it.
    void judge_failed(std::string_view why) {
        for (std::size_t r = 0; r < answers_.size(); ++r) {
            if (!answers_[r]) { missing_.push_back(static_cast<int>(r)); }
        }
        text_ = missing_.empty() ? std::string(why) : formatted("rank {} does not answer: {}", list_of(missing_), why);
    }

    [[nodiscard]] bool failed_elsewhere() const noexcept { return failed_elsewhere_; }
    [[nodiscard]] const std::vector<int>& missing() const noexcept { return missing_; }
    [[nodiscard]] const std::string& text() const noexcept { return text_; }

private:
    [[nodiscard]] static std::string of(std::string_view family, int rank) {
        return formatted("{}/where/{}", family, rank);
    }
    // Where that rank is on communicator `id`; nowhere at all if it has not made it.
    [[nodiscard]] static std::optional<nccl_position> ask(store_link& store, std::string_view family, int rank,
                                                          std::uint64_t id) {
        const auto bytes = store.find(of(family, rank));
        if (!bytes) { return std::nullopt; }
        std::vector<nccl_position> all(bytes->size() / sizeof(nccl_position));
        if (!all.empty()) { std::memcpy(all.data(), bytes->data(), all.size() * sizeof(nccl_position)); }
        const auto found = std::find_if(all.begin(), all.end(), [&](const nccl_position& p) { return p.id == id; });
        return found == all.end() ? nccl_position{id, 0, 0} : *found;
    }
};

}  // namespace tutti::comm::detail
