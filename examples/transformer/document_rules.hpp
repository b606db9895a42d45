// document_rules: where each pipeline has the sequences that ranks share, in attention and outside of it.
// Needs the partitions of sequence. Rules, so that one engine of attention serves all pipelines.
#pragma once

#include <algorithm>   // min
#include <cstdint>     // tokens
#include <functional>  // rules
#include <span>        // lengths
#include <utility>     // move

#include <tutti/sequence/cost.hpp>                 // attention_cost
#include <tutti/sequence/partition/even_ring.hpp>  // even_ring
#include <tutti/sequence/partition/whole.hpp>      // whole
#include <tutti/sequence/partition/zeppelin.hpp>   // zeppelin
#include <tutti/sequence/placement.hpp>            // placement

#include "options.hpp"

namespace transformer {

struct document_rules {
    /// A partitioner: where documents are for attention.
    std::function<tutti::sequence::placement(std::span<const std::int64_t>, const tutti::sequence::cluster&,
                                             std::int64_t)>
        partition;
    bool spreads_rows;       ///< Are tokens spread evenly outside of attention? Else they are where attention has them.
    std::int64_t most_rows;  ///< that a rank may have there
};

/// Of the pipeline that `o` names, whose ranks share attention: as zeppelin where ranks have parts of the model and of
/// documents, as even-ring where sequences are of one length.
[[nodiscard]] inline document_rules rules_of(const options& o) {
    namespace partition = tutti::sequence::partition;
    const std::int64_t all = o.attention_tokens(), share = all / o.attention_ranks();
    if (o.pipeline == "packed") { return {partition::whole(), false, std::min(all, o.tokens_held())}; }
    if (o.pipeline == "even-ring" || !o.of_documents()) { return {partition::even_ring(), false, share + 2}; }
    // By squares of lengths: a cost that was measured would differ from run to run, and so would the plans.
    partition::zeppelin_options how;
    how.cost = tutti::sequence::attention_cost{};
    return {partition::zeppelin(std::move(how)), true, share + 1};
}

}  // namespace transformer
