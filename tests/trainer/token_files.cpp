// Files of GPT-2 tokens: what is refused, what a corpus makes of them, and files beyond 32-bit sizes.
#include <cstdint>  // tokens
#include <fstream>  // sparse file
#include <numeric>  // iota
#include <utility>  // move
#include <vector>   // tokens

#include <sys/resource.h>  // memory
#include <sys/stat.h>      // pipe

#include <doctest/doctest.h>

#include "bytes.hpp"
#include "data.hpp"
#include "program.hpp"

namespace {

using namespace trainer_test;
using transformer::bad_input;
using transformer::corpus;
using transformer::token_file;

constexpr transformer::configuration gpt2{.vocabulary = transformer::gpt2_vocabulary, .context = 8};

std::vector<std::uint16_t> counting(std::size_t count) {
    std::vector<std::uint16_t> tokens(count);
    std::iota(tokens.begin(), tokens.end(), std::uint16_t{0});
    return tokens;
}

TEST_CASE("a token file that is none is refused with what is wrong") {
    const scratch_folder folder;
    const std::string good = token_bytes(counting(100));
    const auto refused = [&](const std::string& bytes, const char* says) {
        const std::string path = folder / "tokens.bin";
        write_bytes(path, bytes);
        const auto open = [&] { const token_file file("--tokens", path); };
        CHECK_THROWS_WITH_AS(open(), doctest::Contains(says), bad_input);
        CHECK_THROWS_WITH_AS(open(), doctest::Contains(("--tokens: '" + path + "'").c_str()), bad_input);
    };
    refused("", "0 bytes are less than a header of 1024");
    refused(good.substr(0, 1023), "1023 bytes are less than a header of 1024");
    refused(token_bytes(counting(100), 100, 20240801), "magic number is 20240801, not 20240520");
    refused(token_bytes(counting(100), 100, 20240520, 2), "version is 2, not 1");
    refused(token_bytes(counting(100), 99), "the header counts 99 tokens, but 200 bytes follow it");
    refused(token_bytes(counting(100), 101), "the header counts 101 tokens, but 200 bytes follow it");
    refused(good.substr(0, good.size() - 1), "the header counts 100 tokens, but 199 bytes follow it");
    refused(good + "x", "the header counts 100 tokens, but 201 bytes follow it");
    refused(token_bytes(counting(0), 0xffffffffu), "the header counts 4294967295 tokens, but 0 bytes follow it");

    const auto open = [&](const std::string& path) { const token_file file("--tokens", path); };
    CHECK_THROWS_WITH_AS(open(folder / "missing"), doctest::Contains("No such file"), bad_input);
    CHECK_THROWS_WITH_AS(open(folder.path()), doctest::Contains("not a regular file"), bad_input);
    REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
    CHECK_THROWS_WITH_AS(open(folder / "pipe"), doctest::Contains("not a regular file"), bad_input);
}

TEST_CASE("tokens are those of the file, wherever its object moves") {
    const scratch_folder folder;
    write_bytes(folder / "tokens.bin", token_bytes(counting(1000)));
    token_file file("--tokens", folder / "tokens.bin");
    const auto* const where = file.values().data();
    const token_file moved = std::move(file);
    CHECK(moved.values().data() == where);
    const auto expected = counting(1000);
    CHECK(std::vector<std::uint16_t>(moved.values().begin(), moved.values().end()) == expected);
}

TEST_CASE("a token outside the vocabulary is refused with its place, in whatever block it is") {
    const scratch_folder folder;
    for (const std::size_t place : {std::size_t{0}, std::size_t{32767}, std::size_t{32768}, std::size_t{99'999}}) {
        CAPTURE(place);
        std::vector<std::uint16_t> tokens(100'000, 50256);
        write_bytes(folder / "tokens.bin", token_bytes(tokens));
        CHECK_NOTHROW(token_file("--tokens", folder / "tokens.bin").require_below(50257));
        tokens[place] = 50257;
        write_bytes(folder / "tokens.bin", token_bytes(tokens));
        const std::string says =
            "token number " + std::to_string(place) + " is 50257, not below the vocabulary of 50257";
        CHECK_THROWS_WITH_AS(token_file("--tokens", folder / "tokens.bin").require_below(50257),
                             doctest::Contains(says.c_str()), bad_input);
    }
}

TEST_CASE("a corpus keeps a tenth for validation, or has a file for it") {
    const scratch_folder folder;
    const std::string train = folder / "train.bin", validate = folder / "validate.bin";
    write_bytes(train, token_bytes(counting(1005)));
    write_bytes(validate, token_bytes({5, 4, 3, 2, 1, 0, 1, 2, 3}));
    corpus built(train, "", gpt2);
    const corpus split = std::move(built);
    CHECK(split.training().size() == 904);
    CHECK(split.validation().size() == 101);
    CHECK(split.training().front() == 0);
    CHECK(split.training().back() == 903);
    CHECK(split.validation().front() == 904);
    CHECK(split.validation().back() == 1004);
    CHECK(split.size() == 1005);
    const corpus apart(train, validate, gpt2);
    CHECK(apart.training().size() == 1005);
    CHECK(apart.validation().size() == 9);
    CHECK(apart.validation().front() == 5);
    CHECK(apart.size() == 1014);

    transformer::configuration longer = gpt2;
    longer.context = 9;  // one more than the nine tokens can have
    CHECK_THROWS_WITH_AS(corpus(train, validate, longer),
                         doctest::Contains("--validation-tokens: 9 tokens are too few: a context of 9 needs 10"),
                         bad_input);
    CHECK_THROWS_WITH_AS(corpus(validate, train, longer),
                         doctest::Contains("--tokens: 9 tokens are too few: a context of 9 needs 10"), bad_input);
    longer.context = 101;
    CHECK_THROWS_WITH_AS(corpus(train, "", longer), doctest::Contains("--tokens: 1005 tokens are too few: a tenth"),
                         bad_input);
    write_bytes(validate, token_bytes(std::vector<std::uint16_t>(9, 60'000)));
    CHECK_THROWS_WITH_AS(corpus(train, validate, gpt2), doctest::Contains("token number 0 is 60000"), bad_input);
    CHECK_THROWS_WITH_AS(corpus(train, validate, gpt2), doctest::Contains("--validation-tokens"), bad_input);
}

/// Where a sample of two tokens and a target starts, in a text of `count`.
std::uint64_t start_of(std::uint16_t sample, std::uint64_t count) {
    return transformer::random_for(1, transformer::purpose::data).below(sample, count - 2);
}
std::uint16_t marker(std::uint16_t sample) { return static_cast<std::uint16_t>(sample + 1); }

TEST_CASE("files of more than 2^31 and of more than 2^32 tokens are read without being held in memory") {
    const scratch_folder folder;
    const std::string path = folder / "tokens.bin";
    for (const std::uint64_t count : {(std::uint64_t{1} << 31) + 1000, (std::uint64_t{1} << 32) + 1000}) {
        CAPTURE(count);
        write_bytes(path, token_bytes({}, static_cast<std::uint32_t>(count)));  // of a long file, the lower 32 bits
        {
            std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
            const auto put = [&](std::uint64_t place, std::uint16_t token) {
                file.seekp(static_cast<std::streamoff>(1024 + 2 * place));
                file << bytes_of(std::vector<std::uint16_t>{token});
            };
            put(count - 1, 999);  // zeros before it: a hole in the file
            for (std::uint16_t sample = 0; sample < 100; ++sample) { put(start_of(sample, count), marker(sample)); }
        }
        const token_file file("--tokens", path);
        REQUIRE(file.values().size() == count);
        CHECK(file.values()[count - 1] == 999);
        CHECK(start_of(0, count) != start_of(1, count));
        transformer::batch b;
        std::vector<int> quarters(4);
        for (std::uint16_t sample = 0; sample < 100; ++sample) {
            transformer::draw(b, file.values(), 1, sample, 1, 2);
            CHECK(b.in.front() == marker(sample));
            ++quarters[start_of(sample, count) / (count / 4 + 1)];
        }
        for (const int drawn : quarters) { CHECK(drawn > 10); }  // samples reach all of it
    }
    struct rusage used {};
    REQUIRE(::getrusage(RUSAGE_SELF, &used) == 0);
    CHECK(used.ru_maxrss < 512 * 1024);  // KiB
}

}  // namespace
