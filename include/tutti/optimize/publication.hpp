// publication: an update that also writes the values made from its masters, while these are in registers.
// Needs core/elementwise and core/stochastic_rounding; on a CUDA queue core/cuda_run.cuh.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // positions
#include <optional>     // noise
#include <span>         // views
#include <string_view>  // names
#include <tuple>        // inputs and outputs

#include <tutti/core/elementwise.hpp>          // copy_operation
#include <tutti/core/stochastic_rounding.hpp>  // stochastic_copy_operation

namespace tutti::optimize {

/// Where an update writes its values besides the masters, and how they are rounded.
template <floating_element T, memory M> struct publication {
    std::span<const view<T, M>> values{};  ///< one a segment, of its size; none at all: nothing is published
    std::optional<random_stream> noise{};  ///< rounds stochastically; to nearest even without
    std::uint64_t first = 0;               ///< place in the model of the element that the update calls 0
};

/// `update`, then `copy` of its first output. Semantics: one pass on the device; the host's body is one after the
/// other.
template <elementwise_operation Update, elementwise_operation Copy> struct publishing_operation {
    static constexpr std::string_view name = Update::name;
    Update update;
    Copy copy;  ///< its input is the first output of update
    [[nodiscard]] tutti::cost cost() const noexcept {
        const tutti::cost both = update.cost();
        return {both.bytes + static_cast<double>(copy.out.size_bytes()), both.flops + copy.cost().flops};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return update.inputs(); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple_cat(update.outputs(), copy.outputs()); }
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr auto words(std::size_t i) const noexcept
        requires(drawing_operation<Copy>) {
        return copy.words(i);
    }
    // The key, a place or a random word, is the copy's: updates depend on neither.
    template <class Key, class... Input>
    [[nodiscard]] TUTTI_HOST_DEVICE auto result(Key key, Input... input) const noexcept {
        const auto updated = update.result(0, input...);
        if constexpr (std::tuple_size_v<decltype(update.outputs())> == 1) {
            return std::tuple(updated, copy.result(key, updated));
        } else {
            return std::tuple_cat(updated, std::tuple(copy.result(key, std::get<0>(updated))));
        }
    }
    void operator()() const {
        update();
        copy();
    }
};

namespace detail {

/// Runs `update`, of segment k, which begins at element `first`, with what is to be published of it.
/// Semantics: after expect_publishable, which refuses what has no meaning here.
template <floating_element T, queue Q, class Update>
void run_update(Q q, const Update& update, const publication<T, typename Q::memory_type>& publish, std::size_t k,
                std::size_t first) {
    using M = typename Q::memory_type;
    using real = master_t<T>;
    if (publish.values.empty()) {
        run(q, update);
        return;
    }
    if constexpr (half_element<T>) {
        if (publish.noise) {
            using copy = stochastic_copy_operation<T, M>;
            const copy rounded{update.value, publish.values[k], *publish.noise, publish.first + first};
            run(q, publishing_operation<Update, copy>{update, rounded});
            return;
        }
    }
    using copy = copy_operation<real, T, M>;
    run(q, publishing_operation<Update, copy>{update, {update.value, publish.values[k]}});
}

}  // namespace detail

}  // namespace tutti::optimize
