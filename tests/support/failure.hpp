// failure, expect: how code of a rank judges. Not a doctest assertion: ranks are threads, and an exception ends them all.
// Needs fmt.
#pragma once

#include <stdexcept>  // failure
#include <utility>    // forward

#include <fmt/format.h>  // texts

namespace tutti::test {

/// What a rank throws when the library is wrong: it ends all ranks, with the text of the first.
class failure : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

template <class... Values> void expect(bool holds, fmt::format_string<Values...> text, Values&&... values) {
    if (!holds) { throw failure(fmt::format(text, std::forward<Values>(values)...)); }
}

}  // namespace tutti::test
