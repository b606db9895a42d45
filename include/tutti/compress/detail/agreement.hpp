// agreement: whether ranks are about to do the same with the same layout, where the communicator is one that looks.
// Needs compress/compressor and comm/communicator. Equal counts of bytes do not tell layouts apart, so `checked` alone
// would not see two tensors that changed places.
#pragma once

#include <cstdint>      // hashes
#include <string_view>  // names

#include <tutti/comm/communicator.hpp>    // communicator
#include <tutti/compress/compressor.hpp>  // layout, draw_key
#include <tutti/compress/dense.hpp>       // dense_level
#include <tutti/core/reduce_op.hpp>       // op_kind
#include <tutti/core/state.hpp>           // hash_word
#include <tutti/core/text.hpp>            // formatted

namespace tutti::compress::detail {

/// Does C, or a communicator that it wraps, compare calls?
template <class C> constexpr bool compares_calls() noexcept {
    if constexpr (requires { C::compares_calls; }) {
        return C::compares_calls;
    } else if constexpr (requires { typename C::inner_type; }) {
        return compares_calls<typename C::inner_type>();
    } else {
        return false;
    }
}

/// On a communicator that compares calls: throws mismatch_error on every rank unless all have the same segments, wires,
/// step, seed and operator. Offsets are each rank's own. Cost: one control gather there, nothing elsewhere.
template <communicator C, class Scheme>
void expect_agreement(C& comm, const Scheme& x, layout all, const draw_key& key, op_kind op,
                      std::string_view operation) {
    if constexpr (compares_calls<C>()) {
        std::uint64_t h = hash_seed;
        const auto mix = [&](std::uint64_t word) { h = tutti::detail::hash_word(h, word); };
        mix(static_cast<std::uint64_t>(op));
        mix(key.seed);
        mix(key.step);
        for (const segment& s : all) {
            mix(s.tensor);
            mix(static_cast<std::uint64_t>(s.level));
            mix(s.first);
            mix(s.rows);
            mix(s.cols);
            if (s.level == dense_level) { continue; }
            if constexpr (requires { x.granularity(); }) {
                mix(x.granularity());
                mix(x.wire_bytes(s));
            } else {
                for (int round = 0; round < Scheme::rounds; ++round) { mix(x.wire_count(s, round)); }
            }
        }
        comm.agree(h, formatted("{}: layout, level, seed or step", operation));
    }
}

}  // namespace tutti::compress::detail
