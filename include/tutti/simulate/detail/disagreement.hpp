// disagreement: in what ranks differ that meet in one operation of a virtual cluster, as `checked` would tell them.
// Needs simulate/detail/recorder and comm/detail/intent.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // values
#include <string_view>  // names
#include <vector>       // ranks

#include <tutti/comm/detail/intent.hpp>        // intent, finding
#include <tutti/core/error.hpp>                // mismatch_error
#include <tutti/core/text.hpp>                 // formatted
#include <tutti/simulate/detail/recorder.hpp>  // group, posted_call

namespace tutti::simulate::detail {

/// A call that a rank has come to.
struct made_call {
    const posted_call* what;
    std::uint64_t number;
};

/// The counts in which calls differ that are alike in all else.
[[nodiscard]] inline comm::detail::finding different_counts(const std::vector<made_call>& calls,
                                                            const std::vector<comm::detail::intent>& intents) {
    for (std::size_t from = 0; from < calls.size() && !calls[0].what->sent.empty(); ++from) {
        for (std::size_t to = 0; to < calls.size(); ++to) {
            const std::size_t sent = calls[from].what->sent[to];
            const std::size_t expected = calls[to].what->expected[from];
            if (sent == expected) { continue; }
            return {
                formatted("count differs (rank {} sends {} to rank {}, which expects {})", from, sent, to, expected),
                {static_cast<int>(from)}};
        }
    }
    comm::detail::finding found;
    const auto differ = [&](auto word, std::string_view what, auto text) {
        std::vector<std::uint64_t> values;
        for (const auto& i : intents) { values.push_back(i.*word); }
        return comm::detail::differ(
            values, what, [&](std::size_t r) { return text(values[r]); }, found);
    };
    if (!differ(&comm::detail::intent::first, "count", [](std::uint64_t n) { return formatted("{}", n); })) {
        static_cast<void>(differ(&comm::detail::intent::second, "table of counts",
                                 [](std::uint64_t n) { return formatted("{:016x}", n); }));
    }
    return found;
}

/// Errors  mismatch_error, with the ranks in `g` that differ from the most, when the calls, by rank, are not one.
inline void expect_one_call(const group& g, const std::vector<made_call>& calls) {
    std::vector<comm::detail::intent> intents;
    std::vector<comm::control_record> all;
    for (const made_call& c : calls) {
        intents.emplace_back(c.what->intent);
        intents.back().sequence = c.number;
        all.push_back(intents.back().record());
    }
    if (comm::detail::intent::agree(all)) { return; }
    comm::detail::finding found;
    if (!comm::detail::differ_in_fields(intents, found)) { found = different_counts(calls, intents); }
    error_context context;
    context.operation = name_of(intents[0].what);
    context.communicator = g.name;
    context.sequence = calls[0].number;
    throw mismatch_error(formatted("{}: {}{}", context.operation, found.text, where(context)), found.ranks, context);
}

}  // namespace tutti::simulate::detail
