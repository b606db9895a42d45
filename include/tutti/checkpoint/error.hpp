// damaged_error: a checkpoint that is not what was written.
// Needs core/error.
#pragma once

#include <algorithm>    // replace_if
#include <string>       // texts
#include <string_view>  // texts

#include <tutti/core/error.hpp>  // error

namespace tutti::checkpoint {

/// A file of a checkpoint is missing, of another size, has another checksum, or says what cannot be.
class damaged_error : public error {
public:
    using error::error;
};

namespace detail {
/// Text of a file as messages show it: printable and not too long, whoever wrote the file.
[[nodiscard]] inline std::string shown(std::string_view text) {
    std::string out(text.substr(0, 100));
    std::replace_if(
        out.begin(), out.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
    return text.size() > 100 ? out + "..." : out;
}
}  // namespace detail

}  // namespace tutti::checkpoint
