// state_entry: the named pieces of memory a bit-exact resume needs, as strategies list them.
// Needs core/view. Checkpoints, replicas' hashes and debuggers read the same list.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // uint64_t
#include <cstring>  // memcpy
#include <string>   // names
#include <vector>   // shapes

#include <tutti/core/config.hpp>  // TUTTI_HOST_DEVICE
#include <tutti/core/view.hpp>    // view

namespace tutti {

/// One piece of state. `name` is unique in its list and stable between runs.
template <memory M = host_memory> struct state_entry {
    std::string name;
    std::vector<std::size_t> shape;  ///< of the whole logical tensor
    std::size_t offset = 0;          ///< first element of the logical tensor that this rank's piece holds
    dtype type = dtype::byte;
    view<std::byte, M> data;  ///< this rank's piece
};

/// An entry over a typed view; `shape` empty means one dimension of the view's size.
template <transportable T, memory M>
[[nodiscard]] state_entry<M> state_of(std::string name, view<T, M> v, std::vector<std::size_t> shape = {},
                                      std::size_t offset = 0) {
    if (shape.empty()) { shape = {v.size()}; }
    return {std::move(name), std::move(shape), offset, dtype_of<T>, as_bytes(v)};
}

/// FNV-1a over bytes, eight at a time: an equality check between ranks and runs, not a cryptographic hash.
/// Determinism: depends on the bytes alone.
[[nodiscard]] TUTTI_HOST_DEVICE inline std::uint64_t hash_bytes(const std::byte* bytes, std::size_t count,
                                                                std::uint64_t seed) noexcept {
    constexpr std::uint64_t prime = 1099511628211ull;
    std::uint64_t h = seed;
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, bytes + i, 8);
        h = (h ^ word) * prime;
        h ^= h >> 32;  // a multiplication only carries upward: bring the high bits down
    }
    for (; i < count; ++i) { h = (h ^ static_cast<std::uint64_t>(bytes[i])) * prime; }
    return h;
}
inline constexpr std::uint64_t hash_seed = 14695981039346656037ull;
[[nodiscard]] inline std::uint64_t hash_bytes(view<const std::byte> bytes, std::uint64_t seed = hash_seed) noexcept {
    return hash_bytes(bytes.data(), bytes.size(), seed);
}

}  // namespace tutti
