// Reductions of signed integers on the backend under test.
#include <conformance/reductions.hpp>  // cases

using namespace tutti::test;

TEST_CASE("int8: reductions") { all_reductions_conform<std::int8_t>(); }
TEST_CASE("int8: large sums") { large_sums_conform<std::int8_t>(); }
TEST_CASE("int16: reductions") { all_reductions_conform<std::int16_t>(); }
TEST_CASE("int32: reductions") { all_reductions_conform<std::int32_t>(); }
TEST_CASE("int64: reductions") { all_reductions_conform<std::int64_t>(); }
