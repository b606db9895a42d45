// Errors: what they carry, how their texts end, and the one narrowing conversion.
#include <tutti/core/error.hpp>  // under test

#include <cstdint>      // fixed widths
#include <limits>       // extremes
#include <string>       // texts
#include <type_traits>  // hierarchy

#include <doctest/doctest.h>  // checks

namespace {

using namespace tutti;

TEST_CASE("every error is a tutti::error with a context") {
    static_assert(std::is_base_of_v<std::runtime_error, error>);
    static_assert(std::is_base_of_v<error, usage_error> && std::is_base_of_v<error, mismatch_error> &&
                  std::is_base_of_v<error, timeout_error> && std::is_base_of_v<error, aborted_error> &&
                  std::is_base_of_v<error, backend_error> && std::is_base_of_v<backend_error, memory_error>);
    static_assert(std::is_nothrow_copy_constructible_v<std::runtime_error>);
    const error_context context{"reduce", "dp", 3, 17, 1024, dtype::bfloat16, 42, "no route"};
    try {
        throw backend_error("reduce: no route", context);
    } catch (const error& e) {
        CHECK(std::string(e.what()) == "reduce: no route");
        CHECK(e.context().operation == "reduce");
        CHECK(e.context().communicator == "dp");
        CHECK(e.context().rank == 3);
        CHECK(e.context().sequence == 17);
        CHECK(e.context().count == 1024);
        CHECK(e.context().type == dtype::bfloat16);
        CHECK(e.context().backend_code == 42);
        CHECK(e.context().backend_text == "no route");
    }
    CHECK(mismatch_error("m", {1, 4}).ranks() == std::vector<int>{1, 4});
    CHECK(timeout_error("t", {2}, context).missing() == std::vector<int>{2});
    CHECK(timeout_error("t", {2}, context).context().rank == 3);
    CHECK(mismatch_error("m", {1}, context).context().sequence == 17);
    CHECK(usage_error("u").context().rank == -1);
}

TEST_CASE("the tail of a message tells what is known") {
    error_context c;
    CHECK(where(c) == "");
    c.sequence = 17;
    CHECK(where(c) == ", call 17");
    c.communicator = "dp";
    CHECK(where(c) == ", call 17 on 'dp'");
    c.rank = 0;
    CHECK(where(c) == ", call 17 on 'dp', rank 0");
    c.sequence = 0;
    CHECK(where(c) == " on 'dp', rank 0");
}

TEST_CASE("narrowing keeps what fits") {
    CHECK(narrow<std::int32_t>(std::size_t{2147483647}, "n") == 2147483647);
    CHECK(narrow<std::uint8_t>(255, "n") == 255);
    CHECK(narrow<std::int8_t>(-128, "n") == -128);
    CHECK(narrow<std::size_t>(7, "n") == 7);
    CHECK(narrow<std::int64_t>(std::uint64_t{0x7fffffffffffffff}, "n") == std::numeric_limits<std::int64_t>::max());
    static_assert(narrow<int>(5ull, "n") == 5);
}

TEST_CASE("narrowing refuses what does not fit, and says which number it was") {
    CHECK_THROWS_WITH_AS(static_cast<void>(narrow<std::int32_t>(std::size_t{2147483648}, "count")),
                         "count: 2147483648 does not fit into 4 bytes", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(narrow<std::uint64_t>(-1, "offset")), "offset: -1 does not fit into 8 bytes",
                         usage_error);
    // Signs that a plain round trip would not notice.
    CHECK_THROWS_AS(static_cast<void>(narrow<std::int64_t>(~std::uint64_t{0}, "n")), usage_error);
    CHECK_THROWS_AS(static_cast<void>(narrow<std::uint32_t>(std::int32_t{-1}, "n")), usage_error);
    CHECK_THROWS_AS(static_cast<void>(narrow<std::int32_t>(std::uint32_t{0xffffffff}, "n")), usage_error);
    CHECK_THROWS_AS(static_cast<void>(narrow<std::uint8_t>(256, "n")), usage_error);
    CHECK_THROWS_AS(static_cast<void>(narrow<std::int8_t>(128, "n")), usage_error);
    CHECK_THROWS_AS(static_cast<void>(narrow<std::int8_t>(-129, "n")), usage_error);
}

}  // namespace
