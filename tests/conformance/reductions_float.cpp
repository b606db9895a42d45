// Reductions of float and double on the backend under test.
#include <conformance/reductions.hpp>  // cases

using namespace tutti::test;

TEST_CASE("float: reductions") { all_reductions_conform<float>(); }
TEST_CASE("float: large sums") { large_sums_conform<float>(); }
TEST_CASE("float: sums beyond every cache") { sums_beyond_caches_conform(); }
TEST_CASE("float: NaN") { nan_reaches_all<float>(); }
TEST_CASE("double: reductions") { all_reductions_conform<double>(); }
TEST_CASE("double: NaN") { nan_reaches_all<double>(); }
