// Reductions of unsigned integers on the backend under test.
#include <conformance/reductions.hpp>  // cases

using namespace tutti::test;

TEST_CASE("uint8: reductions") { all_reductions_conform<std::uint8_t>(); }
TEST_CASE("uint16: reductions") { all_reductions_conform<std::uint16_t>(); }
TEST_CASE("uint32: reductions") { all_reductions_conform<std::uint32_t>(); }
TEST_CASE("uint64: reductions") { all_reductions_conform<std::uint64_t>(); }
