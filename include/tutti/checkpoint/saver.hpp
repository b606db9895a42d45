// saver<Comm>: checkpoints of all ranks in one folder, written beside the training.
// Needs checkpoint/contents, a host communicator of its own (comm.duplicate) and a folder that all ranks see. zlib.
// Rules: atomic: whatever crashes when, the folder holds the last complete checkpoint or the new one, never a mix.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // steps
#include <exception>    // what a save failed with
#include <memory>       // outcome shared with the lane
#include <optional>     // outcome
#include <string>       // folder
#include <string_view>  // operations
#include <utility>      // move
#include <vector>       // pieces

#include <tutti/checkpoint/contents.hpp>         // what is saved
#include <tutti/checkpoint/detail/folder.hpp>    // files of a checkpoint
#include <tutti/checkpoint/detail/layout.hpp>    // whose elements
#include <tutti/checkpoint/detail/manifest.hpp>  // what makes it one
#include <tutti/checkpoint/detail/together.hpp>  // agreement
#include <tutti/core/error.hpp>                  // errors
#include <tutti/core/queue.hpp>                  // host_queue
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/schedule/lane.hpp>               // beside the training

namespace tutti::checkpoint {

struct saver_options {
    std::size_t keep = 2;  ///< complete checkpoints that stay; older ones are removed behind each save
    /// Generation that this run was loaded from. Newer ones, of whatever the run before wrote, are not counted among
    /// those that stay: they have been found damaged, or were given up.
    std::optional<std::uint64_t> resumed_from{};
    schedule::lane_options lane{};
    file_hook before_file_operation{};  ///< for tests of failures
};

/// A checkpoint that has been made.
struct saved {
    std::uint64_t generation = 0;  ///< counts the checkpoints of a folder
    std::uint64_t step = 0;
    std::string left_over{};  ///< why older ones could not be removed; empty: they are gone
};

namespace detail {

/// What a rank brings to a save.
struct save_request {
    folder place;
    std::uint64_t step = 0;
    std::size_t keep = 0;
    std::optional<std::uint64_t> resumed_from;
    std::vector<piece> pieces;
    std::vector<snapshot_lease> data;  // theirs, one behind the other
};

/// An error that all ranks have: the communicator is as good as before.
struct agreed_failure {
    std::exception_ptr error;
};

inline void settle(const verdict& v) {
    try {
        v.raise();
    } catch (const error&) { throw agreed_failure{std::current_exception()}; }
}

/// The ranks' tables, from what they have told each other: the same on all.
[[nodiscard]] inline std::vector<std::vector<piece>> tables_of(const verdict& listed, std::uint64_t step) {
    try {
        std::vector<std::vector<piece>> tables;
        for (std::size_t r = 0; r < listed.of.size(); ++r) {
            decoder in(listed.of[r], "a table");
            const auto other = in.number<std::uint64_t>();
            if (r == 0) { step = other; }
            if (other != step) {
                throw usage_error(formatted("rank {} saves step {}, rank 0 step {}", r, other, step));
            }
            tables.push_back(decoded_table(in.block(in.left())));
        }
        static_cast<void>(merged(tables));
        return tables;
    } catch (const usage_error& e) {
        throw agreed_failure{std::make_exception_ptr(usage_error(formatted("save: {}", e.what())))};
    }
}

/// Errors  agreed_failure for what all ranks know; all else leaves other ranks waiting, so that the lane must fail.
template <host_communicator C>
[[nodiscard]] saved save_together(C& comm, const save_request& mine, std::uint64_t& first) {
    constexpr std::string_view operation = "save";
    const auto rank = static_cast<std::size_t>(comm.rank());
    const auto ranks = static_cast<std::size_t>(comm.size());
    const folder& place = mine.place;

    // Nothing is written before all ranks know that it fits together.
    const verdict listed = together(comm, operation, [&] {
        encoder out;
        out.number(mine.step).block(encoded(mine.pieces));
        return out.take();
    });
    settle(listed);
    std::vector<std::vector<piece>> tables = tables_of(listed, mine.step);

    const verdict begun = together(comm, operation, [&] {
        encoder out;
        if (rank == 0) { out.number(place.begin()); }
        return out.take();
    });
    settle(begun);
    manifest m{0, mine.step, {}};
    m.generation = decoder(begun.of[0], "rank 0's answer").number<std::uint64_t>();
    const auto give_up_if_failed = [&](const verdict& v) {
        if (!v.failed()) { return; }
        if (rank == 0) { place.discard(m.generation); }
        settle(v);
    };

    const verdict written = together(comm, operation, [&] {
        const auto header = shard_header(m.generation, m.step, rank, ranks, mine.pieces);
        std::vector<std::span<const std::byte>> data;
        for (const snapshot_lease& part : mine.data) { data.push_back(part.bytes()); }
        const shard s = place.write_shard(m.generation, rank, header, data);
        encoder out;
        out.number(s.bytes).number(s.sum);
        return out.take();
    });
    give_up_if_failed(written);
    for (std::size_t r = 0; r < ranks; ++r) {
        decoder in(written.of[r], "a rank's answer");
        const auto bytes = in.number<std::uint64_t>();
        const auto sum = in.number<std::uint32_t>();
        m.shards.push_back({bytes, sum, std::move(tables[r])});
    }
    give_up_if_failed(together(comm, operation, [&] {
        if (rank == 0) { place.publish(m); }
        return std::vector<std::byte>();
    }));

    if (first == 0) { first = m.generation; }
    const verdict removed = together(comm, operation, [&] {
        if (rank == 0) { place.keep_newest(mine.keep, mine.resumed_from.value_or(most_generations), first); }
        return std::vector<std::byte>();
    });
    return {m.generation, m.step, removed.text};
}

}  // namespace detail

/// Makes checkpoints.
///
/// Semantics  all functions but the destructor are collective: every rank calls them in the same order.
///   saver    takes the folder, which rank 0 makes when only its parent is there, and removes what crashes have left in
///            it. A folder has one saver at a time; a crash gives it back.
///   save     copies the contents, in their queues' orders, and returns: they may change at once. A lane writes the
///            copy. An earlier save is waited for first.
///   wait     until the last save is done: what it made, or its error; nothing when there was none, or it has been told.
/// Protocol   ranks compare what they bring; rank 0 makes <checkpoint>.unfinished; each rank writes its shard there and
///            synchronizes it; when all have, rank 0 synchronizes the folder, takes ".unfinished" off its name, and
///            writes the manifest: beside, synchronized, renamed. Then older checkpoints are removed.
///            A checkpoint is what has a manifest.
/// Failure    a save that fails on one rank (a full disk) fails on all, with the same error; older checkpoints are
///            untouched, the saver stays usable, and the next save may succeed. Failures of the communicator end its
///            family, as on every lane.
/// Lifetime   destruction waits for a save in flight and tells nobody how it ended: call wait() before.
/// Deadline   ranks wait for each other: the slowest shard must be written within the communicator's timeout.
/// Cost       caller: a copy of what the rank writes, kept for the next save. Lane: one pass for checksum and writing,
///            and what the tables of all ranks need, on each rank; eleven small collectives.
/// Errors     usage_error: the folder has another saver (saver); ranks list different steps, or tensors that do not fit
///            together (from wait, or the next save; nothing has been written); keep is 0. backend_error: the file
///            system refuses.
template <host_communicator C> class saver {
    struct outcome {
        std::optional<saved> made;
        std::exception_ptr error;
    };

    detail::folder place_;
    saver_options options_;
    detail::descriptor lock_;  // rank 0's; given back behind the lane's last work
    std::shared_ptr<std::uint64_t> first_ = std::make_shared<std::uint64_t>(0);  // generation; the lane's alone
    std::optional<schedule::lane<C>> lane_;
    std::shared_ptr<outcome> last_;
    schedule::ticket<queue_of<C>> in_flight_;

public:
    explicit saver(C own, std::string folder, saver_options options = {})
        : place_(std::move(folder), detail::files(options.before_file_operation)), options_(std::move(options)) {
        if (options_.keep == 0) { throw usage_error("saver: keep is 0: no checkpoint would stay"); }
        const detail::verdict taken = detail::together(own, "saver", [&] {
            if (own.rank() == 0) { lock_ = place_.take(); }
            return std::vector<std::byte>();
        });
        taken.raise();
        lane_.emplace(std::move(own), options_.lane);
    }
    saver(saver&&) noexcept = default;
    saver& operator=(saver&&) = delete;
    ~saver() = default;

    template <queue... Q> void save(std::uint64_t step, contents<Q>&... what) {
        static_cast<void>(wait());
        const auto rank = static_cast<std::size_t>(lane_->rank());
        const auto ranks = static_cast<std::size_t>(lane_->size());
        detail::save_request mine{place_, step, options_.keep, options_.resumed_from, {}, {}};
        const auto add = [&](auto& c) {
            for (detail::piece& p : c.written_by(rank, ranks)) { mine.pieces.push_back(std::move(p)); }
            mine.data.push_back(c.take_snapshot(rank, ranks));
        };
        (add(what), ...);
        last_ = std::make_shared<outcome>();
        auto work = [mine = std::move(mine), last = last_, first = first_](C& comm) mutable {
            const detail::save_request request = std::move(mine);  // its snapshots are free when the work is done
            try {
                last->made = detail::save_together(comm, request, *first);
            } catch (const detail::agreed_failure& f) { last->error = f.error; }
        };
        submit(std::move(work), what.queue()...);
    }

    std::optional<saved> wait() {
        in_flight_.wait(host_queue());
        const std::shared_ptr<outcome> told = std::exchange(last_, nullptr);
        if (told == nullptr) { return std::nullopt; }
        if (told->error != nullptr) { std::rethrow_exception(told->error); }
        return told->made;
    }

private:
    template <class Work, queue... Q> void submit(Work work, Q... behind) {
        // nvcc takes the reference that an assignment gives for a ticket thrown away.
        static_cast<void>(in_flight_ = lane_->submit("save", std::move(work), behind...));
    }
};

}  // namespace tutti::checkpoint
