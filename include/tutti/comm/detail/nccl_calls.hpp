// nccl_calls: checked NCCL calls, groups, and the names that NCCL has for types and operators.
// Needs NCCL's header and core/error.
#pragma once

#include <optional>     // types that NCCL lacks
#include <string_view>  // names of calls

#include <nccl.h>  // NCCL

#include <tutti/core/element.hpp>    // dtype
#include <tutti/core/error.hpp>      // backend_error
#include <tutti/core/reduce_op.hpp>  // op_kind
#include <tutti/core/text.hpp>       // formatted

namespace tutti::comm::detail {

[[noreturn]] inline void raise_nccl(ncclResult_t code, std::string_view function, error_context context) {
    // The last error's text is that of this thread when no communicator is given.
    const char* const detail = ncclGetLastError(nullptr);
    context.backend_code = static_cast<int>(code);
    context.backend_text = ncclGetErrorString(code);
    if (detail != nullptr && *detail != '\0') { context.backend_text += formatted(" ({})", detail); }
    throw backend_error(formatted("{}: {} failed: {} ({}){}", context.operation, function, context.backend_text,
                                  context.backend_code, where(context)),
                        context);
}
/// Throws backend_error unless the call succeeded.
inline void check_nccl(ncclResult_t code, std::string_view function, const error_context& context) {
    if (code != ncclSuccess) { raise_nccl(code, function, context); }
}

/// NCCL's name of a type that it reduces.
[[nodiscard]] constexpr std::optional<ncclDataType_t> nccl_type(dtype t) noexcept {
    switch (t) {
    case dtype::float32: return ncclFloat32;
    case dtype::float64: return ncclFloat64;
    case dtype::float16: return ncclFloat16;
    case dtype::bfloat16: return ncclBfloat16;
    case dtype::int8: return ncclInt8;
    case dtype::int32: return ncclInt32;
    case dtype::int64: return ncclInt64;
    case dtype::uint8: return ncclUint8;
    case dtype::uint32: return ncclUint32;
    case dtype::uint64: return ncclUint64;
    case dtype::int16:
    case dtype::uint16:
    case dtype::byte: break;
    }
    return std::nullopt;
}
[[nodiscard]] constexpr ncclRedOp_t nccl_operator(op_kind op) noexcept {
    switch (op) {
    case op_kind::mean: return ncclAvg;
    case op_kind::max: return ncclMax;
    case op_kind::min: return ncclMin;
    case op_kind::product: return ncclProd;
    case op_kind::sum:
    case op_kind::none: break;
    }
    return ncclSum;
}

/// Calls of `body` are one group: sends and receives of it run side by side. A call that fails inside still ends the
/// group, which forgets what it holds.
template <class Body> void nccl_group(const error_context& context, Body body) {
    check_nccl(ncclGroupStart(), "ncclGroupStart", context);
    try {
        body();
    } catch (...) {
        static_cast<void>(ncclGroupEnd());
        throw;
    }
    check_nccl(ncclGroupEnd(), "ncclGroupEnd", context);
}

}  // namespace tutti::comm::detail
