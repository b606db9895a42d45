// The error of a request that cannot be met.
// Needs the standard library. main() turns it into one line on stderr and exit code 2.
#pragma once

#include <stdexcept>  // runtime_error
#include <string>     // why

namespace transformer {

/// The user asked for something that cannot be done: one line on stderr, exit code 2, nothing written.
class bad_input : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

namespace detail {
inline void require(bool holds, const std::string& otherwise) {
    if (!holds) { throw bad_input(otherwise); }
}
}  // namespace detail

}  // namespace transformer
