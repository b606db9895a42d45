// level_table: rows of any length, errors in one span, nothing that is no cost.
#include <doctest/doctest.h>  // checks

#include <cmath>   // isnan
#include <limits>  // nan
#include <vector>  // rows

#include <tutti/compress/level_table.hpp>  // level_table

using namespace tutti;
using compress::level_table;

TEST_CASE("rows come back as they were given, errors as one span") {
    level_table t;
    CHECK(t.layers() == 0);
    CHECK(t.errors().empty());
    t.add_layer(std::vector<double>{1, 2, 3}, std::vector<double>{0.3, 0.2, 0.1});
    t.add_layer(std::vector<double>{7});
    t.add_layer(std::vector<double>{4, 5}, std::vector<double>{0.5, 0.4});
    CHECK(t.layers() == 3);
    CHECK(t.options(0) == 3);
    CHECK(t.options(1) == 1);
    CHECK(t.options(2) == 2);
    CHECK(t.costs(0)[2] == 3);
    CHECK(t.costs(1)[0] == 7);
    CHECK(t.costs(2)[1] == 5);
    CHECK(t.errors(0)[1] == 0.2);
    CHECK(t.errors(2)[0] == 0.5);
    REQUIRE(t.errors().size() == 6);
    CHECK(std::isnan(t.errors()[3]));  // not measured
    t.errors(1)[0] = 0.7;
    t.errors()[5] = 0.6;
    const level_table& same = t;
    CHECK(same.errors(1)[0] == 0.7);
    CHECK(same.errors(2)[1] == 0.6);
}

TEST_CASE("rows that make no sense are refused, and leave the table as it was") {
    level_table t;
    t.add_layer(std::vector<double>{1});
    CHECK_THROWS_WITH_AS(t.add_layer(std::vector<double>{}), "level_table: layer 1 has 0 options, not 1 to 256",
                         usage_error);
    CHECK_THROWS_WITH_AS(t.add_layer(std::vector<double>(257, 1.0)),
                         "level_table: layer 1 has 257 options, not 1 to 256", usage_error);
    CHECK_THROWS_WITH_AS(t.add_layer(std::vector<double>{1, 2}, std::vector<double>{1}),
                         "level_table: layer 1 has 2 costs and 1 errors", usage_error);
    CHECK_THROWS_WITH_AS(t.add_layer(std::vector<double>{1, -2}), "level_table: layer 1, option 1: -2 is not a cost",
                         usage_error);
    for (const double c : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        CHECK_THROWS_AS(t.add_layer(std::vector<double>{c}), usage_error);
    }
    CHECK(t.layers() == 1);
    CHECK(t.errors().size() == 1);
    CHECK_NOTHROW(t.add_layer(std::vector<double>(256, 0.0)));
    CHECK(t.options(1) == 256);
}
