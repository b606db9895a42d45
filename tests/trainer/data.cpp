// tinyshakespeare at nanoGPT's CPU configuration (4 layers, 4 heads, width 128, context 64, batch 12, 2000 steps), for
// which it reports a validation loss of 1.88 nats: one rank and four, with the same global batch, must reach 1.90.
#include <cmath>       // abs
#include <cstdlib>     // getenv
#include <filesystem>  // is the text there?
#include <string>      // paths

#include <doctest/doctest.h>

#include "program.hpp"
#include "support/skip.hpp"

namespace {

using namespace trainer_test;

TEST_CASE("nanoGPT's configuration reaches 1.90 nats on one rank and on four") {
    const char* const given = std::getenv("TUTTI_DATA");
    const std::string text = given != nullptr ? given : TUTTI_SOURCE_DIR "/../shared/data/tinyshakespeare.txt";
    if (!std::filesystem::is_regular_file(text)) {
        tutti::test::skip("no text at '" + text + "'; TUTTI_DATA names tinyshakespeare");
    }
    const std::string configuration =
        "--layers 4 --heads 4 --width 128 --context 64 --batch 12 --steps 2000 --lr 1e-3 --eval-every 2000 --data '" +
        text + "' ";
    const scratch_folder folder;
    nlohmann::json alone, together;
    REQUIRE(run_program(folder, configuration + "--pipeline local --quiet", 600).code == 0);
    alone = report_in(folder);
    REQUIRE(run_program(folder, configuration + "--pipeline ddp --ranks 4 --quiet", 600).code == 0);
    together = report_in(folder);
    const double one = alone["loss"]["validation"], four = together["loss"]["validation"];
    MESSAGE("validation, nats per byte: 1 rank " << one << ", 4 ranks " << four);
    CHECK(one <= 1.90);
    CHECK(four <= 1.90);
    CHECK(std::abs(one - four) < 0.02);  // the same samples in the same order: only rounding sets the two apart
    CHECK(alone["loss"]["first"].get<double>() ==
          doctest::Approx(together["loss"]["first"].get<double>()).epsilon(1e-5));
}

}  // namespace
