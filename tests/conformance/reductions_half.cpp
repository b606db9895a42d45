// Reductions of the 16-bit floats on the backend under test.
#include <conformance/reductions.hpp>  // cases

using namespace tutti::test;
using tutti::bfloat16;
using tutti::float16;

TEST_CASE("float16: reductions") { all_reductions_conform<float16>(); }
TEST_CASE("float16: NaN") { nan_reaches_all<float16>(); }
TEST_CASE("bfloat16: reductions") { all_reductions_conform<bfloat16>(); }
TEST_CASE("bfloat16: large sums") { large_sums_conform<bfloat16>(); }
TEST_CASE("bfloat16: NaN") { nan_reaches_all<bfloat16>(); }
