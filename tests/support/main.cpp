// main() of every test that does not bring its own: the doctest runner, compiled once.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>  // the runner
