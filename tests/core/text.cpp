// formatted: what fmt::format would say, for every kind of argument and every way to name one.
#include <tutti/core/text.hpp>  // under test

#include <cstddef>      // size_t
#include <cstdint>      // widths
#include <limits>       // extremes
#include <string>       // results
#include <string_view>  // arguments

#include <doctest/doctest.h>  // checks
#include <fmt/format.h>       // the oracle

using tutti::formatted;

TEST_CASE("integers of every width keep their values") {
    CHECK(formatted("{}", std::int8_t{-128}) == "-128");
    CHECK(formatted("{}", std::uint8_t{255}) == "255");
    CHECK(formatted("{} {}", std::numeric_limits<long long>::min(), std::numeric_limits<unsigned long long>::max()) ==
          "-9223372036854775808 18446744073709551615");
    CHECK(formatted("{} of {}", 3, std::size_t{4}) == "3 of 4");
    CHECK(formatted("{:02x} {:016x} {:+}", static_cast<unsigned char>(7), std::uint64_t{0xabc}, 5) ==
          "07 0000000000000abc +5");
}

TEST_CASE("floating-point numbers are as short as their own type allows") {
    CHECK(formatted("{}", 0.1F) == "0.1");
    CHECK(formatted("{}", 0.1) == "0.1");
    CHECK(formatted("{}", static_cast<double>(0.1F)) == "0.10000000149011612");
    CHECK(formatted("{:.3g} {:8.2f}", 1234.5, -2.0F) == fmt::format("{:.3g} {:8.2f}", 1234.5, -2.0F));
    CHECK(formatted("{} {}", std::numeric_limits<double>::infinity(), -0.0F) == "inf -0");
}

TEST_CASE("words, letters and truth values") {
    const std::string owned = "owned";
    const char array[] = "array";
    const char* pointer = "pointer";
    CHECK(formatted("{} {} {} {} {}", owned, std::string_view("viewed").substr(0, 4), array, pointer, "literal") ==
          "owned view array pointer literal");
    CHECK(formatted("{:>4}|{:<4}|", 'x', "ab") == "   x|ab  |");
    CHECK(formatted("{} {}", true, false) == "true false");
    CHECK(formatted("{}", std::string(1000, 'a') + '\0').size() == 1001);
}

TEST_CASE("placeholders by number, braces, and none at all") {
    CHECK(formatted("{1} before {0}, {1} again", "b", "a") == "a before b, a again");
    CHECK(formatted("{{{}}} }}{{", 1) == "{1} }{");
    CHECK(formatted("nothing to say").compare("nothing to say") == 0);
    CHECK(formatted("").empty());
    CHECK_THROWS_AS(static_cast<void>(formatted("{:d}", "words")), fmt::format_error);
}
