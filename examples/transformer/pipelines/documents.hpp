// Pipelines `packed`, `even-ring` and `zeppelin`: data parallel over documents of all lengths; ranks share their attention.
// Needs pipelines/ddp for the gradients. document_rules.hpp says where each has its documents.
#pragma once

#include <string_view>  // names

#include "pipelines/ddp.hpp"

namespace transformer::pipelines {

struct packed : ddp {
    static constexpr std::string_view name = "packed";
    static constexpr std::string_view summary =
        "documents of --lengths, whole ones packed into ranks; gradients as ddp";
};
struct even_ring : ddp {
    static constexpr std::string_view name = "even-ring";
    static constexpr std::string_view summary = "the same, every document on a ring over all ranks";
};
struct zeppelin : ddp {
    static constexpr std::string_view name = "zeppelin";
    static constexpr std::string_view summary =
        "the same, each document on as many ranks as suits it, tokens even elsewhere";
};

}  // namespace transformer::pipelines
