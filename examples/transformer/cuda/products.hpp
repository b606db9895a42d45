// Matrix products of the GPU trainer, over its matrices: tutti/core/cuda_products, with bias, GELU and residual in the
// same kernel. Needs tutti/core/cuda_products and matrix.hpp.
#pragma once

#include <cstddef>      // size_t
#include <type_traits>  // type_identity_t

#include <tutti/core/cuda_products.hpp>  // products

#include "../matrix.hpp"

namespace transformer::gpu {

using tutti::after_product;

/// A factor of a product: as stored, or transposed without moving anything.
template <class T> struct operand {
    matrix<const T> stored;
    bool transposed = false;
    operand(matrix<T> m) : stored(m) {}
    operand(matrix<const T> m, bool t = false) : stored(m), transposed(t) {}
};
template <class T> [[nodiscard]] operand<T> across(matrix<const T> m) { return {m, true}; }
template <class T> [[nodiscard]] operand<T> across(matrix<T> m) { return {matrix<const T>(m), true}; }

/// Products on one queue, as tutti::cuda_products says.
class products {
    tutti::cuda_products products_;

    template <class T> [[nodiscard]] static tutti::matrix<T> sized(matrix<T> m) {
        const auto size = [](int n) { return static_cast<std::size_t>(n); };
        return {m.data, size(m.rows), size(m.columns), size(m.stride)};
    }

public:
    explicit products(const tutti::cuda_queue& q, int reserve = 0) : products_(q, reserve) {}

    template <class T> struct extras {
        after_product after = after_product::nothing;
        const T* bias = nullptr;
        matrix<T> kept{};
        matrix<const T> addend{};
    };
    /// out = after(a * b + addend).
    template <class T>
    void multiply(std::type_identity_t<operand<T>> a, std::type_identity_t<operand<T>> b, matrix<T> out,
                  const extras<std::type_identity_t<T>>& e = {}) {
        products_.multiply<T>({sized(a.stored), a.transposed}, {sized(b.stored), b.transposed}, sized(out),
                              tutti::product_extras<T>{e.after, e.bias, sized(e.kept), sized(e.addend)});
    }
};

}  // namespace transformer::gpu
