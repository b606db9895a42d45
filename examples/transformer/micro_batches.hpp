// micro_batches: the rows that a rank has of its replica's micro-batches, and of text to validate on.
// Needs document_attention.hpp. Sequences of one length, or documents of --lengths; whole, or a rank's part of each.
#pragma once

#include <algorithm>  // find
#include <cstddef>    // size_t
#include <cstdint>    // counts
#include <optional>   // documents, rows that others have
#include <stdexcept>  // a step without a loss
#include <utility>    // move
#include <vector>     // micro-batches

#include <fmt/format.h>  // messages

#include "data.hpp"
#include "document_attention.hpp"
#include "documents.hpp"
#include "options.hpp"

namespace transformer {

/// Draws rows for one rank of a mesh; those along the sequence dimension have parts of the same sequences.
///
/// Semantics    calls are collective over the ranks that share sequences, if any do: they plan their attention.
///   draw       this step's micro-batches of a replica; returns how many tokens of all replicas have a target. Documents
///              are drawn for each micro-batch, its number in the run in place of a step's: with one micro-batch a step
///              they are those of the pipelines of documents.
///   take       `count` sequences of `length`, one behind the other from token `first` of a text on, of which the last
///              has a token more.
///   end        tokens of the only sequence taken last from position `length` on are padding, without a target.
///   row_of     where position `at` of the only sequence taken last is, if this rank has it.
/// Determinism  of the options, the step and the text: how ranks divide the work changes no sequence.
/// Errors       draw: runtime_error, on all ranks, when no token of the step has a target.
template <class T> class micro_batch_rows {
    const options& o_;
    document_attention<T>* attention_;  // null: rows are whole sequences
    std::optional<document_lengths> lengths_;

    // Gives `out` the rows of sequences that start where start_of(number) says.
    template <class Start>
    void share(batch& out, tokens text, std::size_t count, std::size_t length, Start start_of) const {
        out.clear();
        out.lengths.assign(count, static_cast<std::int64_t>(length));
        attention_->plan(out.lengths);
        for (const auto& p : attention_->pieces()) {
            if (p.size() == 0) { continue; }
            out.append(text, start_of(static_cast<std::size_t>(p.sequence)) + static_cast<std::size_t>(p.begin),
                       static_cast<std::size_t>(p.size()));
        }
    }

public:
    micro_batch_rows(const options& o, document_attention<T>* attention) : o_(o), attention_(attention) {
        if (o.of_documents()) { lengths_.emplace(o.lengths); }
    }

    [[nodiscard]] std::uint64_t draw(std::vector<batch>& out, tokens training, int step, int replica) const {
        const int groups = o_.batch / o_.micro_batch, own = groups / o_.dp;
        const auto length = static_cast<std::size_t>(o_.model.context);
        const auto count = static_cast<std::size_t>(o_.micro_batch);
        out.resize(static_cast<std::size_t>(own));
        std::uint64_t valid = 0;
        for (int g = 0; g < groups; ++g) {
            batch& b = out[static_cast<std::size_t>(g % own)];
            const std::int64_t number = std::int64_t{step} * groups + g;
            const auto as_step = static_cast<int>(number);  // of documents alone: then it fits
            std::vector<std::int64_t> lengths;
            if (lengths_) { lengths = lengths_->of_step(o_.seed, as_step, o_.attention_tokens(), o_.model.context); }
            valid += count * length - lengths.size();  // the last token of a document has no target
            if (g / own != replica) { continue; }
            const std::uint64_t first = static_cast<std::uint64_t>(number) * count;
            if (lengths_) {
                attention_->plan(lengths);
                static_cast<void>(
                    transformer::draw(b, training, o_.seed, as_step, o_.model.context, lengths, attention_->pieces()));
                b.lengths = std::move(lengths);
            } else if (attention_ != nullptr) {
                share(b, training, count, length,
                      [&](std::size_t i) { return sample_start(training, o_.seed, first + i, length); });
            } else {
                transformer::draw(b, training, o_.seed, first, count, o_.model.context);
            }
        }
        if (valid == 0) { throw std::runtime_error(fmt::format("step {} has only documents of one token", step + 1)); }
        return valid;
    }
    void take(batch& out, tokens text, std::size_t first, std::size_t count, std::size_t length) const {
        if (attention_ != nullptr) {
            return share(out, text, count, length, [&](std::size_t i) { return first + i * length; });
        }
        out.clear();
        out.append(text, first, count * length);
    }
    void end(batch& out, std::size_t length) const {
        for (std::size_t row = 0; row < out.targets.size(); ++row) {
            const auto at = attention_ == nullptr ? row : static_cast<std::size_t>(attention_->positions()[row]);
            if (at >= length) { out.targets[row] = no_target; }
        }
    }
    [[nodiscard]] std::optional<int> row_of(std::int64_t at) const {
        if (attention_ == nullptr) { return static_cast<int>(at); }
        const auto positions = attention_->positions();
        const auto found = std::find(positions.begin(), positions.end(), at);
        return found == positions.end() ? std::nullopt : std::optional(static_cast<int>(found - positions.begin()));
    }
};

}  // namespace transformer
