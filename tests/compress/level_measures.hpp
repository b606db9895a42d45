// What tests of compress/level_errors measure, on the host and on a device.
#pragma once

#include <cmath>    // cbrt
#include <cstddef>  // size_t
#include <cstdint>  // seeds
#include <vector>   // values

#include <tutti/compress/compressor.hpp>  // segment
#include <tutti/core/element.hpp>         // floating_element

#include "support/oracle.hpp"  // random_element

namespace tutti::test {

/// Three matrices, one behind the other; sizes that no bucket divides.
inline std::vector<compress::segment> three_tensors() {
    return {{0, 0, 0, 0, 37, 53}, {1, 0, 1961, 0, 130, 7}, {4, 0, 2871, 0, 9, 1001}};
}
inline std::size_t elements_of(const std::vector<compress::segment>& all) {
    return all.back().offset + all.back().size();
}

/// Most are small and a few are large, as gradients are.
template <floating_element T> std::vector<T> heavy_tailed(std::size_t n, std::uint64_t seed = 11) {
    std::vector<T> x(n);
    for (std::size_t i = 0; i < n; ++i) {
        const auto u = random_element<float>(seed, i);
        x[i] = static_cast<T>(u * u * u * (1.0f + 0.001f * static_cast<float>(i % 977)));
    }
    return x;
}

template <floating_element T> double squares(const std::vector<T>& x, const compress::segment& s) {
    double sum = 0;
    for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) {
        const double v = static_cast<double>(static_cast<float>(x[i]));
        sum += v * v;
    }
    return sum;
}

/// A matrix with these singular values, from two reflections.
inline std::vector<float> with_singular_values(std::size_t rows, std::size_t cols, const std::vector<double>& values) {
    const auto reflected = [](std::vector<double> vector, std::uint64_t seed) {  // x - 2 v (v'x) / (v'v)
        double inner = 0, norm = 0;
        for (std::size_t i = 0; i < vector.size(); ++i) {
            const auto v = static_cast<double>(random_element<float>(seed, i));
            inner += v * vector[i];
            norm += v * v;
        }
        for (std::size_t i = 0; i < vector.size(); ++i) {
            vector[i] -= 2 * static_cast<double>(random_element<float>(seed, i)) * inner / norm;
        }
        return vector;
    };
    std::vector<double> sum(rows * cols);
    for (std::size_t k = 0; k < values.size(); ++k) {
        std::vector<double> left(rows), right(cols);
        left[k] = right[k] = 1;
        left = reflected(left, 21);
        right = reflected(right, 22);
        for (std::size_t i = 0; i < rows; ++i) {
            for (std::size_t j = 0; j < cols; ++j) { sum[i * cols + j] += values[k] * left[i] * right[j]; }
        }
    }
    return {sum.begin(), sum.end()};
}

}  // namespace tutti::test
