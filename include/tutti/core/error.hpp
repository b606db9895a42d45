// Errors of the library: one hierarchy, each error carrying what an engineer needs to find the call that failed.
// Needs core/element for the name of a data type.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // sequence numbers
#include <stdexcept>    // runtime_error
#include <string>       // texts
#include <string_view>  // texts passed in
#include <utility>      // move, in_range
#include <vector>       // ranks an error names

#include <tutti/core/element.hpp>  // dtype
#include <tutti/core/text.hpp>     // formatted

namespace tutti {

/// Where an error happened. Unknown fields keep their defaults.
struct error_context {
    std::string operation;       ///< "all_reduce"
    std::string communicator;    ///< its name
    int rank = -1;               ///< rank in that communicator
    std::uint64_t sequence = 0;  ///< n-th call on that communicator, from 1; 0 unknown
    std::size_t count = 0;       ///< elements
    dtype type = dtype::byte;    ///< element type
    int backend_code = 0;        ///< the backend's own error code
    std::string backend_text;    ///< the backend's own words
};

/// Base of all errors. The text is a lower-case fact followed by values, e.g.
/// `all_reduce: count differs (rank 0: 1024, rank 3: 1023), call 17 on 'dp'`.
class error : public std::runtime_error {
    error_context context_;

public:
    explicit error(const std::string& text, error_context context = {})
        : std::runtime_error(text), context_(std::move(context)) {}
    [[nodiscard]] const error_context& context() const noexcept { return context_; }
};

/// The call itself is wrong; thrown before anything moved.
class usage_error : public error {
public:
    using error::error;
};

/// Ranks disagree; `ranks()` are those that differ from the others.
class mismatch_error : public error {
    std::vector<int> ranks_;

public:
    mismatch_error(const std::string& text, std::vector<int> ranks, error_context context = {})
        : error(text, std::move(context)), ranks_(std::move(ranks)) {}
    [[nodiscard]] const std::vector<int>& ranks() const noexcept { return ranks_; }
};

/// A deadline passed; `missing()` are the ranks that had not arrived.
class timeout_error : public error {
    std::vector<int> missing_;

public:
    timeout_error(const std::string& text, std::vector<int> missing, error_context context = {})
        : error(text, std::move(context)), missing_(std::move(missing)) {}
    [[nodiscard]] const std::vector<int>& missing() const noexcept { return missing_; }
};

/// The communicator's family was aborted; the text gives the first cause. Every later call throws the same.
class aborted_error : public error {
public:
    using error::error;
};

/// A backend (MPI, NCCL, the operating system) refused; `context().backend_code` and `backend_text` hold its answer.
class backend_error : public error {
public:
    using error::error;
};

/// A device has no room for what was asked; the text says how much that was, what is held and what is free.
class memory_error : public backend_error {
public:
    using backend_error::backend_error;
};

/// ", call 17 on 'dp', rank 2": the tail of every message about a collective.
[[nodiscard]] inline std::string where(const error_context& c) {
    std::string text;
    if (c.sequence != 0) { text += formatted(", call {}", c.sequence); }
    if (!c.communicator.empty()) { text += formatted(" on '{}'", c.communicator); }
    if (c.rank >= 0) { text += formatted(", rank {}", c.rank); }
    return text;
}

/// "0, 3, 7"
[[nodiscard]] inline std::string list_of(const std::vector<int>& ranks) {
    std::string text;
    for (const int r : ranks) { text += formatted("{}{}", text.empty() ? "" : ", ", r); }
    return text;
}

/// The one narrowing conversion of counts and offsets. Throws usage_error when the value does not fit.
template <class To, class From> [[nodiscard]] constexpr To narrow(From value, std::string_view what) {
    if (!std::in_range<To>(value)) {
        throw usage_error(formatted("{}: {} does not fit into {} bytes", what, value, sizeof(To)));
    }
    return static_cast<To>(value);
}

}  // namespace tutti
