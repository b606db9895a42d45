// mpi_types: how MPI names element types and operators, return codes as errors, and the arithmetic around MPI's own.
// Needs MPI 3 and core/reduce_op. 16-bit floats are summed as floats; what MPI does not promise (NaN in max and min,
// wrapping sums of narrow integers) is done by operators of our own.
#pragma once

#include <mpi.h>  // MPI

#include <algorithm>    // replace
#include <array>        // operators
#include <atomic>       // loops of operators
#include <cstddef>      // size_t
#include <mutex>        // call_once
#include <string>       // texts of MPI
#include <string_view>  // function names
#include <utility>      // index_sequence

#include <tutti/comm/call.hpp>       // dtype, op_kind
#include <tutti/core/element.hpp>    // conversions
#include <tutti/core/error.hpp>      // backend_error
#include <tutti/core/reduce_op.hpp>  // reduce_function
#include <tutti/core/text.hpp>       // formatted

namespace tutti::comm::detail {

[[nodiscard]] inline std::string mpi_text(int code) {
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) { return formatted("MPI error {}", code); }
    std::string line(text, static_cast<std::size_t>(length));
    std::replace(line.begin(), line.end(), '\n', ' ');
    return line;
}

[[nodiscard]] inline error_context context_named(std::string_view operation) {
    error_context context;
    context.operation = operation;
    return context;
}

/// Throws for a return code other than MPI_SUCCESS: mismatch_error when a message was longer than its receiver
/// expected, backend_error otherwise.
inline void expect_success(int code, std::string_view function, error_context context) {
    if (code == MPI_SUCCESS) { return; }
    context.backend_code = code;
    context.backend_text = mpi_text(code);
    int kind = MPI_ERR_OTHER;
    MPI_Error_class(code, &kind);
    const std::string text =
        formatted("{}: {}: {}{}", context.operation, function, context.backend_text, where(context));
    if (kind == MPI_ERR_TRUNCATE) { throw mismatch_error(text, {}, context); }
    throw backend_error(text, context);
}

/// False before MPI_Init and after MPI_Finalize, when no other function may be called.
[[nodiscard]] inline bool mpi_is_up() noexcept {
    int initialized = 0;
    int finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    return initialized != 0 && finalized == 0;
}

/// `bytes` bytes as (count, type) of one message: a derived type where an int cannot count them.
class mpi_extent {
    bool owned_ = false;

public:
    int count = 0;
    MPI_Datatype type = MPI_BYTE;

    mpi_extent(std::size_t bytes, std::size_t largest, const error_context& context) {
        if (bytes <= largest) {
            count = static_cast<int>(bytes);
            return;
        }
        // Blocks of the largest size, and the rest.
        const int blocks = narrow<int>(bytes / largest, "mpi: blocks of a message");
        MPI_Datatype block = MPI_DATATYPE_NULL;
        const auto expect = [&](int code, std::string_view function) { expect_success(code, function, context); };
        expect(MPI_Type_contiguous(static_cast<int>(largest), MPI_BYTE, &block), "MPI_Type_contiguous");
        const int lengths[] = {blocks, static_cast<int>(bytes % largest)};
        const MPI_Aint offsets[] = {0, static_cast<MPI_Aint>(bytes - bytes % largest)};
        const MPI_Datatype parts[] = {block, MPI_BYTE};
        expect(MPI_Type_create_struct(2, lengths, offsets, parts, &type), "MPI_Type_create_struct");
        owned_ = true;
        count = 1;
        expect(MPI_Type_commit(&type), "MPI_Type_commit");
        expect(MPI_Type_free(&block), "MPI_Type_free");
    }
    mpi_extent(const mpi_extent&) = delete;
    mpi_extent& operator=(const mpi_extent&) = delete;
    // A type may be freed while messages that use it are under way.
    ~mpi_extent() {
        if (owned_) { MPI_Type_free(&type); }
    }
};

/// Operators that MPI cannot be trusted with, one a (dtype, operator): the library's own loops. max and min let NaN win
/// and know that unsigned types have no sign (MPICH 4.0.2 forgets); sums of 8- and 16-bit integers wrap (the vector
/// units of Open MPI 4.1 saturate them). An MPI_Op is made at its first use and kept until the process ends.
class mpi_own_operators {
    static constexpr std::size_t types = static_cast<std::size_t>(dtype::uint64) + 1;
    struct entry {
        std::atomic<reduce_function> loop{nullptr};
        std::once_flag once;
        MPI_Op op = MPI_OP_NULL;
    };
    [[nodiscard]] static std::array<entry, 3 * types>& entries() noexcept {
        static std::array<entry, 3 * types> table;
        return table;
    }
    // An MPI operator is a plain function that is told nothing but the data: one function an entry.
    template <std::size_t Entry> static void apply(void* in, void* inout, int* count, MPI_Datatype* /*type*/) {
        const void* const rows[] = {in, inout};
        entries()[Entry].loop.load(std::memory_order_relaxed)(inout, rows, 2, static_cast<std::size_t>(*count));
    }
    template <std::size_t... Entry>
    [[nodiscard]] static MPI_User_function* function(std::size_t i, std::index_sequence<Entry...>) noexcept {
        static constexpr MPI_User_function* functions[] = {&apply<Entry>...};
        return functions[i];
    }

public:
    /// `loop` is the caller's instance of the (dtype, operator) loop; all instances of one pair do the same.
    [[nodiscard]] static MPI_Op get(dtype t, op_kind k, reduce_function loop) {
        const std::size_t column = k == op_kind::max ? 0 : k == op_kind::min ? 1 : 2;
        const std::size_t i = static_cast<std::size_t>(t) + column * types;
        entry& e = entries()[i];
        e.loop.store(loop, std::memory_order_relaxed);
        std::call_once(e.once, [&] {
            MPI_User_function* const f = function(i, std::make_index_sequence<3 * types>{});
            expect_success(MPI_Op_create(f, 1, &e.op), "MPI_Op_create", context_named(name_of(k)));
        });
        return e.op;
    }
};

/// How one (dtype, operator) pair is reduced by MPI.
struct mpi_reduction {
    MPI_Datatype type = MPI_BYTE;
    MPI_Op op = MPI_OP_NULL;
    bool widens = false;    ///< 16-bit floats travel as floats and are rounded once, at the end
    bool divides = false;   ///< mean
    std::size_t bytes = 1;  ///< of an element on the wire
};

/// Integers go through unsigned types: overflow wraps by definition.
[[nodiscard]] inline mpi_reduction reduction_of(dtype t, op_kind k, reduce_function loop) {
    mpi_reduction how;
    how.bytes = size_of(t);
    switch (t) {
    case dtype::float32: how.type = MPI_FLOAT; break;
    case dtype::float64: how.type = MPI_DOUBLE; break;
    case dtype::int8:
    case dtype::uint8: how.type = MPI_UINT8_T; break;
    case dtype::float16:
    case dtype::bfloat16:
    case dtype::int16:
    case dtype::uint16: how.type = MPI_UINT16_T; break;
    case dtype::int32:
    case dtype::uint32: how.type = MPI_UINT32_T; break;
    case dtype::int64:
    case dtype::uint64: how.type = MPI_UINT64_T; break;
    case dtype::byte: throw usage_error("mpi: bytes cannot be reduced");
    }
    const bool narrow_integer = t == dtype::int8 || t == dtype::uint8 || t == dtype::int16 || t == dtype::uint16;
    if (k == op_kind::max || k == op_kind::min || (k == op_kind::sum && narrow_integer)) {
        how.op = mpi_own_operators::get(t, k, loop);
        return how;
    }
    how.op = k == op_kind::product ? MPI_PROD : MPI_SUM;
    how.divides = k == op_kind::mean;
    how.widens = t == dtype::float16 || t == dtype::bfloat16;
    if (how.widens) {
        how.type = MPI_FLOAT;
        how.bytes = sizeof(float);
    }
    return how;
}

template <class T> void widen_as(const void* in, float* out, std::size_t count) noexcept {
    const auto* const values = static_cast<const T*>(in);
    for (std::size_t i = 0; i < count; ++i) { out[i] = static_cast<float>(values[i]); }
}
inline void widen(dtype t, const void* in, float* out, std::size_t count) noexcept {
    if (t == dtype::float16) {
        widen_as<float16>(in, out, count);
    } else {
        widen_as<bfloat16>(in, out, count);
    }
}
/// out[i] = T(in[i] / ranks), rounded once.
template <class T> void deliver_as(const float* in, void* out, std::size_t count, int ranks) noexcept {
    auto* const values = static_cast<T*>(out);
    const auto divisor = static_cast<float>(ranks);
    for (std::size_t i = 0; i < count; ++i) { values[i] = static_cast<T>(in[i] / divisor); }
}
inline void deliver(dtype t, const float* in, void* out, std::size_t count, int ranks) noexcept {
    if (t == dtype::float16) {
        deliver_as<float16>(in, out, count, ranks);
    } else {
        deliver_as<bfloat16>(in, out, count, ranks);
    }
}
template <class T> void divide_as(void* data, std::size_t count, int ranks) noexcept {
    auto* const values = static_cast<T*>(data);
    const auto divisor = static_cast<T>(ranks);
    for (std::size_t i = 0; i < count; ++i) { values[i] = values[i] / divisor; }
}
inline void divide(dtype t, void* data, std::size_t count, int ranks) noexcept {
    if (t == dtype::float64) {
        divide_as<double>(data, count, ranks);
    } else {
        divide_as<float>(data, count, ranks);
    }
}

}  // namespace tutti::comm::detail
