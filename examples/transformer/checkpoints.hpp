// Checkpoints of a training run: what is in them, when they are made, and how a run goes on from one.
// Needs checkpoint/checkpoint and any_strategy. --checkpoint, --checkpoint-every, --resume.
#pragma once

#include <cstddef>   // shares
#include <cstdint>   // steps
#include <optional>  // a saver, if asked for
#include <span>      // an entry
#include <string>    // messages
#include <vector>    // what places the data

#include <fmt/format.h>  // messages

#include <tutti/checkpoint/checkpoint.hpp>  // saver, load
#include <tutti/core/error.hpp>             // usage_error
#include <tutti/core/partition.hpp>         // shares of what ranks have alike
#include <tutti/core/queue.hpp>             // host_queue
#include <tutti/core/state.hpp>             // state_of, hash_bytes

#include "data.hpp"
#include "options.hpp"

namespace transformer {

/// What a rank's strategy has of the model: all, or a part by a name of its own, on `ranks` ranks of which this is number
/// `rank`.
struct kept_part {
    std::string name{};
    std::size_t rank = 0, ranks = 1;
};

/// The checkpoints of one rank's run.
///
/// Semantics  resume and save are collective. `resume` loads the strategy, where there is a checkpoint, and gives the
///            steps that are done: 0 where there is none yet. `save` copies what it needs and returns; files are written
///            beside the training. `finish` waits for the last one.
///            ZeRO's checkpoints, and those of plain data parallelism, load at any number of ranks; what compression owes
///            a rank then starts anew, with a note. Local updates need the number that has saved, and parts of a model
///            the same ranks along each dimension.
/// Errors     bad_input: the checkpoint is of another model or pipeline, of a run over other samples, or with other
///            parts, or nothing is left to do. As tutti::checkpoint otherwise.
template <class Comm, class Strategy> class checkpoints {
    using queue = typename Strategy::queue_type;

    const options& o_;
    Strategy& strategy_;
    tutti::checkpoint::contents<queue> trained_;
    std::optional<tutti::checkpoint::contents<queue>>
        written_;  // of a part: what this rank of those that have it saves
    tutti::checkpoint::contents<tutti::host_queue> run_;
    std::vector<std::uint64_t> samples_;  // what places them: seed, sequences a step and tokens in one, text
    std::vector<std::uint64_t> parts_;    // of the model, of the batch
    std::optional<tutti::checkpoint::saver<Comm>> saver_;

public:
    checkpoints(const options& o, Strategy& attached, const corpus& text, const kept_part& part = {})
        : o_(o), strategy_(attached), trained_(attached.queue()), samples_(placed_by(o, text)) {
        using tutti::checkpoint::ownership;
        run_.add(tutti::state_of("trainer/samples", tutti::view<std::uint64_t>(samples_)), ownership::replicated);
        if (part.name.empty()) {
            trained_.add(strategy_.state());
            return;
        }
        parts_ = divided_by(o);
        run_.add(tutti::state_of("trainer/parts", tutti::view<std::uint64_t>(parts_)), ownership::replicated);
        written_.emplace(attached.queue());
        for (auto e : strategy_.state()) {
            e.name = fmt::format("{}: {}", part.name, e.name);
            trained_.add(std::span(&e, 1));
            if (e.whose == ownership::replicated) {
                const std::size_t size = tutti::size_of(e.type);
                const auto share = tutti::partition(e.data.size() / size, part.ranks, part.rank);
                e.offset = share.first;
                e.data = e.data.sub(share.first * size, share.count * size);
                e.whose = ownership::sharded;
            }
            written_->add(std::span(&e, 1));
        }
    }

    template <class Note> [[nodiscard]] int resume(Comm& world, Note note) {
        std::optional<tutti::checkpoint::loaded> found;
        if (o_.resume) {
            const auto samples = samples_, parts = parts_;
            using enum tutti::checkpoint::local_entries;
            try {
                found = tutti::checkpoint::load(world, o_.checkpoint,
                                                {.at_other_ranks = o_.pipeline.starts_with("ddp") ? keep : refuse},
                                                trained_, run_);
            } catch (const tutti::usage_error& e) {
                throw bad_input(fmt::format(
                    "--resume: the run in '{}' has another model, --precision, --pipeline{} ({})", o_.checkpoint,
                    written_ ? ", --tp, --pp or --pipeline-schedule" : " or number of ranks", e.what()));
            }
            if (samples_ != samples) {
                throw bad_input(
                    fmt::format("--resume: the run in '{}' has another --seed, --batch, --context, --lengths or text",
                                o_.checkpoint));
            }
            if (parts_ != parts) {
                throw bad_input(fmt::format("--resume: the run in '{}' was begun with --tp {} --pp {} --dp {} --sp {} "
                                            "--zero {} --micro-batch {}, {} --sequence-parallel, and goes on like this",
                                            o_.checkpoint, parts_[0], parts_[1], parts_[2], parts_[3], parts_[4],
                                            parts_[5], parts_[6] == 0 ? "without" : "with"));
            }
            note(!found ? fmt::format("no checkpoint in '{}' yet: from the beginning", o_.checkpoint)
                        : fmt::format("resumed from step {} in '{}'", found->step, o_.checkpoint));
        }
        if (found) {
            strategy_.restored();
            for (const auto& why : found->damaged) { note(fmt::format("passed over {}", why)); }
            if (!found->kept.empty()) {
                note(fmt::format("saved by {} ranks: what compression owed them is lost", found->ranks));
            }
        }
        tutti::checkpoint::saver_options how;
        if (found) { how.resumed_from = found->generation; }
        saver_.emplace(world.duplicate("checkpoints"), o_.checkpoint, how);
        const int done = found ? static_cast<int>(found->step) : 0;
        if (done >= o_.last_step()) {
            throw bad_input(
                fmt::format("--resume: the run in '{}' is at step {}: nothing is left to do", o_.checkpoint, done));
        }
        return done;
    }

    void save(int done) {
        static_cast<void>(strategy_.state());  // waits for what is still being written to
        saver_->save(static_cast<std::uint64_t>(done), written_ ? *written_ : trained_, run_);
    }
    void finish() { static_cast<void>(saver_->wait()); }

private:
    [[nodiscard]] static std::vector<std::uint64_t> divided_by(const options& o) {
        std::vector<std::uint64_t> numbers;
        for (const int n : {o.tp, o.pp, o.dp, o.sp, o.zero, o.micro_batch, int{o.sequence_parallel}}) {
            numbers.push_back(static_cast<std::uint64_t>(n));
        }
        return numbers;
    }
    [[nodiscard]] static std::vector<std::uint64_t> placed_by(const options& o, const corpus& text) {
        const tutti::view<const std::uint16_t> all(text.training());
        const std::uint64_t text_hash = tutti::hash_bytes(tutti::as_bytes(all));
        return {o.seed, static_cast<std::uint64_t>(o.batch), static_cast<std::uint64_t>(o.model.context),
                o.of_documents() ? document_lengths(o.lengths).hash(text_hash) : text_hash};
    }
};

}  // namespace transformer
