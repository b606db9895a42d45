// hash: one number for many bytes, wherever they are: what ranks compare.
// Needs core/state and core/run; on a CUDA queue core/hash.cuh.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <string_view>  // names

#include <tutti/core/buffer.hpp>  // where a hash is made
#include <tutti/core/config.hpp>  // TUTTI_HOST_DEVICE
#include <tutti/core/memory.hpp>  // memory
#include <tutti/core/queue.hpp>   // queue
#include <tutti/core/run.hpp>     // cost, fetch
#include <tutti/core/state.hpp>   // hash_bytes
#include <tutti/core/view.hpp>    // view

namespace tutti {

/// out[0] = hash of `in`: the sum of the hashes of its blocks, each seeded by its place, so that any order will do.
template <memory M> struct hash_operation {
    static constexpr std::string_view name = "hash";
    static constexpr std::size_t block = 4096;
    view<const std::byte, M> in;
    view<std::uint64_t, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept { return {static_cast<double>(in.size()), 0}; }
    [[nodiscard]] TUTTI_HOST_DEVICE std::size_t blocks() const noexcept { return (in.size() + block - 1) / block; }
    [[nodiscard]] TUTTI_HOST_DEVICE static std::uint64_t seed_of(std::size_t b) noexcept {
        return hash_seed + 0x9e3779b97f4a7c15ull * (b + 1);  // 2^64 over the golden ratio: spreads
    }
    void operator()() const {
        std::uint64_t sum = 0;
        for (std::size_t b = 0; b < blocks(); ++b) {
            const std::size_t rest = in.size() - b * block;
            sum += hash_bytes(in.data() + b * block, rest < block ? rest : block, seed_of(b));
        }
        out.data()[0] = sum;
    }
};

/// The hash of the elements of a view, on the host. Waits for the queue.
template <queue Q, class T> [[nodiscard]] std::uint64_t hash_of(const Q& q, view<T, typename Q::memory_type> elements) {
    const buffer<std::uint64_t, Q> hash(q, 1);
    const view<const T, typename Q::memory_type> in = elements;
    run(q, hash_operation<typename Q::memory_type>{as_bytes(in), hash.view()});
    return fetch(q, hash.view(), std::uint64_t{0});
}

}  // namespace tutti
