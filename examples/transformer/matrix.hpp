// Row-major matrices over memory that somebody else owns, on the host or on a device; the extents of attention.
// Needs tutti/core/config.
#pragma once

#include <cstddef>      // size_t
#include <type_traits>  // element types

#include <tutti/core/config.hpp>  // TUTTI_HOST_DEVICE

namespace transformer {

/// `rows` x `columns` elements, row i at data + i * stride. T is const where the matrix is only read.
template <class T> struct matrix {
    T* data = nullptr;
    int rows = 0;
    int columns = 0;
    int stride = 0;

    matrix() = default;
    matrix(T* first, int row_count, int column_count, int row_stride)
        : data(first), rows(row_count), columns(column_count), stride(row_stride) {}
    matrix(T* first, int row_count, int column_count) : matrix(first, row_count, column_count, column_count) {}
    /// Adds const, never removes it.
    template <class U>
    requires(!std::is_same_v<U, T> && std::is_same_v<const U, T>) matrix(const matrix<U>& other)
        : matrix(other.data, other.rows, other.columns, other.stride) {}

    [[nodiscard]] TUTTI_HOST_DEVICE T* row(int i) const {
        return data + static_cast<std::size_t>(i) * static_cast<std::size_t>(stride);
    }
    [[nodiscard]] std::size_t size() const {
        return static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
    }
    /// Rows [row0, row0 + r), columns [column0, column0 + c) of the same memory.
    [[nodiscard]] matrix block(int row0, int r, int column0, int c) const {
        return {row(row0) + column0, r, c, stride};
    }
    [[nodiscard]] matrix top(int r) const { return block(0, r, 0, columns); }
};

/// Where layers begin and end on a rank that has whole layers: all rows are there, and are complete. See blocks.hpp.
template <class T> struct whole_layers {
    [[nodiscard]] int outer_rows(int rows) const { return rows; }
    template <class Work> void on_whole_rows(matrix<const T> all, int, Work work) const { work(all); }
    template <class Work> void sum_of_parts(matrix<T> sum, int, Work work) const { work(sum); }
    template <class Input, class Weight>
    void back_from_whole_rows(matrix<const T> all, matrix<T> d_all, int, Input input, Weight weight) const {
        input(d_all);
        weight(all);
    }
};

/// Extents of a batch of sequences in one matrix of batch * length rows.
struct attention_shape {
    int batch;
    int length;
    int heads;
    int head_width;
    [[nodiscard]] TUTTI_HOST_DEVICE int width() const { return heads * head_width; }
};

}  // namespace transformer
