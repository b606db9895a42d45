#pragma once
// What most tests parse before their first line, parsed once (cmake/testing.cmake). Each test still includes what it
// uses, and every header of tutti is compiled alone elsewhere (tests/headers).
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <tutti/tutti.hpp>
