// Checkpoints of a training run: what is in them, when they are made, and how a run goes on from one.
// Needs checkpoint/checkpoint and any_strategy. --checkpoint, --checkpoint-every, --resume.
#pragma once

#include <array>     // what places the data
#include <cstdint>   // steps
#include <optional>  // a saver, if asked for
#include <string>    // messages

#include <fmt/format.h>  // messages

#include <tutti/checkpoint/checkpoint.hpp>  // saver, load
#include <tutti/core/queue.hpp>             // host_queue
#include <tutti/core/state.hpp>             // state_of, hash_bytes

#include "data.hpp"
#include "options.hpp"

namespace transformer {

/// The checkpoints of one rank's run.
///
/// Semantics  resume and save are collective. `resume` loads the strategy, where there is a checkpoint, and gives the
///            steps that are done: 0 where there is none yet. `save` copies what it needs and returns; files are written
///            beside the training. `finish` waits for the last one.
///            ZeRO's checkpoints, and those of plain data parallelism, load at any number of ranks; what compression owes
///            a rank then starts anew, with a note. Local updates need the number that has saved.
/// Errors     bad_input: the checkpoint is of a run over other samples. As tutti::checkpoint otherwise.
template <class Comm, class Strategy> class checkpoints {
    using queue = typename Strategy::queue_type;

    const options& o_;
    Strategy& strategy_;
    tutti::checkpoint::contents<queue> trained_;
    tutti::checkpoint::contents<tutti::host_queue> run_;
    std::array<std::uint64_t, 4> samples_{};  // what places them: seed, sequences a step and tokens in one, text
    std::optional<tutti::checkpoint::saver<Comm>> saver_;

public:
    checkpoints(const options& o, Strategy& attached, const corpus& text)
        : o_(o), strategy_(attached), trained_(attached.queue()), samples_(placed_by(o, text)) {
        trained_.add(strategy_.state());
        run_.add(tutti::state_of("trainer/samples", tutti::view<std::uint64_t>(samples_.data(), samples_.size())),
                 tutti::checkpoint::ownership::replicated);
    }

    template <class Note> [[nodiscard]] int resume(Comm& world, Note note) {
        std::optional<tutti::checkpoint::loaded> found;
        if (o_.resume) {
            const auto expected = samples_;
            using enum tutti::checkpoint::local_entries;
            found = tutti::checkpoint::load(world, o_.checkpoint,
                                            {.at_other_ranks = o_.pipeline.starts_with("ddp") ? keep : refuse},
                                            trained_, run_);
            if (samples_ != expected) {
                throw bad_input(
                    fmt::format("--resume: the run in '{}' has another --seed, --batch, --context, --lengths or text",
                                o_.checkpoint));
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
        return found ? static_cast<int>(found->step) : 0;
    }

    void save(int done) {
        static_cast<void>(strategy_.state());  // waits for what is still being written to
        saver_->save(static_cast<std::uint64_t>(done), trained_, run_);
    }
    void finish() { static_cast<void>(saver_->wait()); }

private:
    [[nodiscard]] static std::array<std::uint64_t, 4> placed_by(const options& o, const corpus& text) {
        const tutti::view<const std::uint16_t> all(text.training());
        const std::uint64_t text_hash = tutti::hash_bytes(tutti::as_bytes(all));
        return {o.seed, static_cast<std::uint64_t>(o.batch), static_cast<std::uint64_t>(o.model.context),
                o.of_documents() ? document_lengths(o.lengths).hash(text_hash) : text_hash};
    }
};

}  // namespace transformer
