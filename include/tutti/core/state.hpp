// state_entry: the named pieces of memory a bit-exact resume needs, as strategies list them.
// Needs core/view. Checkpoints, replicas' hashes and debuggers read the same list.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // uint64_t
#include <cstring>  // memcpy
#include <string>   // names
#include <utility>  // move
#include <vector>   // shapes

#include <tutti/core/config.hpp>   // TUTTI_HOST_DEVICE
#include <tutti/core/element.hpp>  // dtype
#include <tutti/core/view.hpp>     // view

namespace tutti {

/// Whose an entry is, among the ranks that keep it in step.
enum class ownership : std::uint8_t {
    sharded,     ///< each rank has elements of one tensor; together they have each of them once
    replicated,  ///< every rank has the same whole tensor
    local        ///< every rank has its own, which is nobody else's: residuals, random generators
};

/// One piece of state. `name` is unique in its list and stable between runs.
template <memory M = host_memory> struct state_entry {
    std::string name;
    std::vector<std::size_t> shape;  ///< of the whole logical tensor
    std::size_t offset = 0;          ///< first element of the logical tensor that this rank's piece holds
    dtype type = dtype::byte;
    view<std::byte, M> data;  ///< this rank's piece
    ownership whose = ownership::local;
};

/// An entry over a typed view; `shape` empty means one dimension of the view's size.
template <transportable T, memory M>
[[nodiscard]] state_entry<M> state_of(std::string name, view<T, M> v, std::vector<std::size_t> shape = {},
                                      std::size_t offset = 0) {
    if (shape.empty()) { shape = {v.size()}; }
    return {std::move(name), std::move(shape), offset, dtype_of<T>, as_bytes(v)};
}
template <transportable T, memory M>
[[nodiscard]] state_entry<M> state_of(std::string name, view<T, M> v, ownership whose,
                                      std::vector<std::size_t> shape = {}, std::size_t offset = 0) {
    state_entry<M> e = state_of(std::move(name), v, std::move(shape), offset);
    e.whose = whose;
    return e;
}

namespace detail {
inline constexpr std::uint64_t hash_prime = 1099511628211ull;
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::uint64_t hash_word(std::uint64_t h, std::uint64_t word) noexcept {
    h = (h ^ word) * hash_prime;
    return h ^ (h >> 32);  // a multiplication only carries upward: bring the high bits down
}
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::uint64_t hash_byte(std::uint64_t h, std::byte b) noexcept {
    return (h ^ static_cast<std::uint64_t>(b)) * hash_prime;
}
}  // namespace detail

/// FNV-1a over bytes, eight at a time: an equality check between ranks and runs, not a cryptographic hash.
/// Determinism: depends on the bytes alone.
[[nodiscard]] inline std::uint64_t hash_bytes(const std::byte* bytes, std::size_t count, std::uint64_t seed) noexcept {
    std::uint64_t h = seed;
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, bytes + i, 8);
        h = detail::hash_word(h, word);
    }
    for (; i < count; ++i) { h = detail::hash_byte(h, bytes[i]); }
    return h;
}
/// What hashes begin with; a hash in its place goes on from there.
inline constexpr std::uint64_t hash_seed = 14695981039346656037ull;
[[nodiscard]] inline std::uint64_t hash_bytes(view<const std::byte> bytes, std::uint64_t seed = hash_seed) noexcept {
    return hash_bytes(bytes.data(), bytes.size(), seed);
}

}  // namespace tutti
