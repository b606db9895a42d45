// What tests of strategies on a GPU train: parameters of sizes that share blocks of the norm, slopes that are functions of
// positions. Needs core/philox and core/elementwise; on a device core/cuda_run.cuh.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // streams
#include <string_view>  // name
#include <tuple>        // inputs and outputs
#include <vector>       // values

#include <tutti/core/elementwise.hpp>  // for_each_element
#include <tutti/core/exact.hpp>        // exact
#include <tutti/core/philox.hpp>       // noise
#include <tutti/core/run.hpp>          // cost
#include <tutti/core/view.hpp>         // views

namespace tutti::test {

// g += what would be a gradient: a function of the value and of positions in the run.
template <class T, memory M> struct slope_operation {
    static constexpr std::string_view name = "slope";
    view<const T, M> x;
    view<T, M> g;
    std::uint32_t sample;
    [[nodiscard]] tutti::cost cost() const noexcept { return {}; }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(x, g); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(g); }
    [[nodiscard]] TUTTI_HOST_DEVICE T result(std::size_t i, T at, T before) const noexcept {
        const exact noise(random_stream{.seed = 5, .stream = sample}.normal(i));
        const exact pull = exact(static_cast<float>(at)) + noise;
        return static_cast<T>((exact(static_cast<float>(before)) + pull).value);
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

inline const std::vector<std::size_t> toy_sizes{1, 3000, 64, 10000, 7};
/// Two of them are matrices, which compressors take.
inline std::vector<std::size_t> toy_shape(std::size_t p) {
    const std::size_t n = toy_sizes[p];
    return n % 100 == 0 ? std::vector<std::size_t>{n / 100, 100} : std::vector<std::size_t>{n};
}

template <class T> std::vector<T> initial(std::size_t p) {
    std::vector<T> v(toy_sizes[p]);
    for (std::size_t i = 0; i < v.size(); ++i) {
        v[i] = static_cast<T>(random_stream{.seed = 6, .stream = static_cast<std::uint32_t>(p)}.normal(i));
    }
    return v;
}

}  // namespace tutti::test
