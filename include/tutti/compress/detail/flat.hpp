// flat: the elementwise operations of compressed collectives, between elements of T and sums in float.
// Needs core/elementwise; on a CUDA queue core/cuda_run.cuh. All arithmetic is in float.
#pragma once

#include <cstddef>      // size_t
#include <string_view>  // names
#include <tuple>        // inputs, outputs

#include <tutti/core/element.hpp>      // floating_element
#include <tutti/core/elementwise.hpp>  // elementwise operations
#include <tutti/core/run.hpp>          // run, cost
#include <tutti/core/view.hpp>         // view

namespace tutti::compress::detail {

/// out[i] = To(factor * in[i])
template <floating_element From, floating_element To, memory M> struct convert_scaled_operation {
    static constexpr std::string_view name = "convert_scaled";
    view<const From, M> in;
    view<To, M> out;
    float factor;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.size_bytes() + out.size_bytes()), static_cast<double>(out.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(in); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(out); }
    [[nodiscard]] TUTTI_HOST_DEVICE To result(std::size_t, From x) const noexcept {
        return static_cast<To>(factor * static_cast<float>(x));
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

/// total[i] += in[i]
template <floating_element T, memory M> struct add_operation {
    static constexpr std::string_view name = "add";
    view<const T, M> in;
    view<float, M> total;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.size_bytes() + 2 * total.size_bytes()), static_cast<double>(total.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(in, total); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(total); }
    [[nodiscard]] TUTTI_HOST_DEVICE float result(std::size_t, T x, float before) const noexcept {
        return before + static_cast<float>(x);
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

/// total[i] += in[i] + residual[i]; residual[i] = 0: nothing of the sum is lost, so nothing is left over.
template <floating_element T, memory M> struct add_all_operation {
    static constexpr std::string_view name = "add_all";
    view<const T, M> in;
    view<float, M> residual;
    view<float, M> total;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.size_bytes() + 4 * total.size_bytes()), 2.0 * static_cast<double>(total.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(in, residual, total); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(total, residual); }
    [[nodiscard]] TUTTI_HOST_DEVICE auto result(std::size_t, T x, float left, float before) const noexcept {
        return std::tuple(before + (static_cast<float>(x) + left), 0.0f);
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

template <queue Q, floating_element From, floating_element To>
void convert_scaled(Q q, view<const From, typename Q::memory_type> in, view<To, typename Q::memory_type> out,
                    float factor) {
    run(q, convert_scaled_operation<From, To, typename Q::memory_type>{in, out, factor});
}

/// total += in, and the residual, which is zero then. An empty residual is none.
template <queue Q, floating_element T>
void add_all(Q q, view<const T, typename Q::memory_type> in, view<float, typename Q::memory_type> residual,
             view<float, typename Q::memory_type> total) {
    if (residual.empty()) {
        run(q, add_operation<T, typename Q::memory_type>{in, total});
    } else {
        run(q, add_all_operation<T, typename Q::memory_type>{in, residual, total});
    }
}

/// A part of a residual; of none, none.
template <memory M>
[[nodiscard]] view<float, M> part_of(view<float, M> residual, std::size_t first, std::size_t count) {
    return residual.empty() ? residual : residual.sub(first, count);
}

}  // namespace tutti::compress::detail
