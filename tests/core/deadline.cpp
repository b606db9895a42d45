// Deadlines: saturation, and TUTTI_TIMEOUT with good and bad values.
#include <tutti/core/deadline.hpp>  // under test

#include <chrono>   // durations
#include <cstdlib>  // setenv
#include <string>   // values

#include <doctest/doctest.h>  // checks

namespace {

using namespace tutti;
using namespace std::chrono_literals;

// Sets the variable for one scope and puts back what the caller of the tests had.
class environment {
    std::string before_;
    bool was_set_ = false;

public:
    explicit environment(const char* value) {
        if (const char* const old = std::getenv("TUTTI_TIMEOUT"); old != nullptr) {
            before_ = old;
            was_set_ = true;
        }
        if (value == nullptr) {
            unsetenv("TUTTI_TIMEOUT");
        } else {
            setenv("TUTTI_TIMEOUT", value, 1);
        }
    }
    ~environment() {
        if (was_set_) {
            setenv("TUTTI_TIMEOUT", before_.c_str(), 1);
        } else {
            unsetenv("TUTTI_TIMEOUT");
        }
    }
    environment(const environment&) = delete;
    environment& operator=(const environment&) = delete;
};

duration timeout_from(const char* value) {
    const environment set(value);
    return default_timeout();
}

TEST_CASE("the default is ten minutes") { CHECK(timeout_from(nullptr) == 10min); }

TEST_CASE("TUTTI_TIMEOUT is a number of seconds that the clock can count") {
    CHECK(timeout_from("30") == 30s);
    CHECK(timeout_from("0.25") == 250ms);
    CHECK(timeout_from("1e-3") == 1ms);
    CHECK(timeout_from("1e-9") == 1ns);
    CHECK(timeout_from("1e9") == 1000000000s);
    CHECK(timeout_from(" 5") == 5s);
}

TEST_CASE("anything else is an error that shows the value") {
    for (const char* bad : {"",    " ",    "abc",  "5s",    "5 s", "5,5", "0",      "-0",    "-1",      "nan",  "-nan",
                            "inf", "-inf", "1e10", "1e400", "--1", "0x",  "1e-400", "1e-10", "9.9e-10", "1.1e9"}) {
        CAPTURE(bad);
        CHECK_THROWS_AS(static_cast<void>(timeout_from(bad)), usage_error);
    }
    CHECK_THROWS_WITH_AS(static_cast<void>(timeout_from("fast")),
                         "TUTTI_TIMEOUT: 'fast' is not a number of seconds from 1e-9 to 1e9", usage_error);
}

TEST_CASE("a deadline lies that far ahead, and never overflows into the past") {
    const deadline before = clock_type::now();
    const deadline soon = after(1h);
    CHECK(soon >= before + 1h);
    CHECK(soon <= clock_type::now() + 1h);
    CHECK(after(duration::max()) == deadline::max());
    CHECK(after(duration::max() - 1ns) == deadline::max());
    CHECK(after(0s) >= before);
    CHECK(after(-1h) < before);
    CHECK(after(1000000000s) > clock_type::now() + 999999999s);
}

TEST_CASE("a timeout leaves some time") {
    CHECK_NOTHROW(expect_timeout("x", 1ns));
    CHECK_THROWS_WITH_AS(expect_timeout("x", 0s), "x: the timeout is 0 s, expected more than 0", usage_error);
    CHECK_THROWS_WITH_AS(expect_timeout("x", -2s), "x: the timeout is -2 s, expected more than 0", usage_error);
}

TEST_CASE("durations print as seconds") {
    CHECK(seconds(1500ms) == 1.5);
    CHECK(seconds(0s) == 0.0);
}

}  // namespace
