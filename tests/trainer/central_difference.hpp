// Gradients by central differences of fourth order, and the measure by which an analytic gradient must agree with them.
// Needs nothing. Double only: the error floor is about 1e-10 of the gradient at the step used.
#pragma once

#include <cmath>    // sqrt
#include <cstddef>  // size_t
#include <span>     // what is differentiated
#include <vector>   // gradients

#include <tutti/core/philox.hpp>  // test data

namespace trainer_test {

/// d f / d x[i] for every stride-th i. f reads x through its own references.
template <class F>
[[nodiscard]] std::vector<double> central_differences(std::span<double> x, F&& f, std::size_t stride = 1) {
    constexpr double h = 1e-3;
    std::vector<double> gradient;
    for (std::size_t i = 0; i < x.size(); i += stride) {
        const double at = x[i];
        const auto value = [&](double step) {
            x[i] = at + step;
            return f();
        };
        const double near = value(h) - value(-h);
        const double far = value(2 * h) - value(-2 * h);
        x[i] = at;
        gradient.push_back((8 * near - far) / (12 * h));
    }
    return gradient;
}

/// || a - b || / || b || over every stride-th element of `a`: relative, and blind to no element of the tensor.
[[nodiscard]] inline double relative_distance(std::span<const double> a, std::span<const double> b,
                                              std::size_t stride = 1) {
    double difference = 0;
    double norm = 0;
    for (std::size_t i = 0; i < b.size(); ++i) {
        difference += (a[i * stride] - b[i]) * (a[i * stride] - b[i]);
        norm += b[i] * b[i];
    }
    return std::sqrt(difference / norm);
}

/// Standard normals; different tensors of a test take different streams.
[[nodiscard]] inline std::vector<double> normals(std::size_t count, std::uint32_t stream, float deviation = 1) {
    std::vector<double> x(count);
    tutti::fill_normal(tutti::host_queue{}, tutti::view<double>(x), {.seed = 20, .stream = stream}, deviation);
    return x;
}

}  // namespace trainer_test
