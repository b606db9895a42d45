// fingerprint: a 64-bit hash of names, tables and numbers, for ranks that compare what they are about to do.
// Needs nothing. Not cryptographic: it finds mistakes, not forgeries.
#pragma once

#include <concepts>     // integral
#include <cstddef>      // size_t
#include <cstdint>      // words
#include <span>         // tables
#include <string_view>  // names

namespace tutti::comm {

/// Hashes what is added, in the order in which it is added.
///
/// Semantics    `c.agree(fingerprint().add(name).add(counts).value(), "parameter list")`. Every item counts with its
///              length, so {"ab", "c"} and {"a", "bc"} differ.
/// Determinism  the same on every machine.
/// Cost         a few operations a word (a name: a word is one character).
/// Source       the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
class fingerprint {
    std::uint64_t state_;

public:
    constexpr explicit fingerprint(std::uint64_t seed = 0) noexcept : state_(mix(seed)) {}

    constexpr fingerprint& add(std::uint64_t word) noexcept {
        state_ = mix(state_ ^ word);
        return *this;
    }
    constexpr fingerprint& add(std::string_view text) noexcept {
        add(text.size());
        for (const char c : text) { add(static_cast<std::uint64_t>(static_cast<unsigned char>(c))); }
        return *this;
    }
    template <std::integral T>
    constexpr fingerprint& add(std::span<const T> table) noexcept {
        add(table.size());
        for (const T x : table) { add(static_cast<std::uint64_t>(x)); }
        return *this;
    }
    [[nodiscard]] constexpr std::uint64_t value() const noexcept { return state_; }

private:
    [[nodiscard]] static constexpr std::uint64_t mix(std::uint64_t z) noexcept {
        z += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
};

}  // namespace tutti::comm
