// Documents in place of sequences of one length: their options, and the checks of pipelines that pack them.
// Needs CLI11.
#pragma once

#include <cstdint>  // tokens
#include <string>   // names

#include <CLI/CLI.hpp>                   // command line
#include <fmt/format.h>                  // messages
#include <tutti/sequence/placement.hpp>  // no_capacity

#include "bad_input.hpp"
#include "documents.hpp"
#include "option_checks.hpp"
#include "training_options.hpp"

namespace transformer {

struct document_options {
    static constexpr const char* packing_pipelines = "packed, even-ring, zeppelin";  // over a step's documents

    std::string lengths;       // a distribution's name or a file of them
    long capacity = 0;         // tokens of documents that a rank holds; 0: any number
    std::string plan_picture;  // where a picture of where they are goes; empty: nowhere

    [[nodiscard]] std::int64_t tokens_held() const {
        return capacity == 0 ? tutti::sequence::no_capacity : std::int64_t{capacity};
    }
};

inline void declare(command_line& app, document_options& o) {
    using detail::named;
    using detail::within;
    app.begin("Documents", "packed, even-ring, zeppelin, tp, pp, 3d");
    app.add_option("--lengths", o.lengths,
                   "draw documents of these lengths, --batch times --context tokens a step, the last three in each "
                   "micro-batch, each cut to --context: " +
                       document_lengths::names() + ", or a file of numbers of tokens")
        ->check(named("file name"))
        ->type_name("NAME|FILE");
    app.add_option("--capacity", o.capacity,
                   "tokens of documents that a rank may hold for attention; default: any number")
        ->check(within(1, 1L << 40))
        ->type_name("TOKENS");
    app.used_by(document_options::packing_pipelines);
    app.add_option("--plan-picture", o.plan_picture, "SVG picture of where the first step's documents are")
        ->check(named("file name"))
        ->type_name("FILE");
}

namespace detail {

/// That a step's documents can be placed. `Options` has these and all others. Errors: bad_input.
template <class Options> void expect_placeable(const Options& o) {
    require(o.capacity == 0 || o.tokens_per_step() <= std::int64_t{o.capacity} * o.ranks,
            fmt::format("--capacity: {} ranks of {} tokens do not hold the {} of a step", o.ranks, o.capacity,
                        o.tokens_per_step()));
    require(o.capacity == 0 || o.pipeline != "packed" || o.model.context <= o.capacity,
            fmt::format("--capacity: {} tokens are less than a document of --context {}, which 'packed' does not cut",
                        o.capacity, o.model.context));
    require(o.tokens_per_step() <= most_tokens_at_a_time,
            fmt::format("--batch: {} tokens a step are more than {}", o.tokens_per_step(), most_tokens_at_a_time));
}

}  // namespace detail

}  // namespace transformer
