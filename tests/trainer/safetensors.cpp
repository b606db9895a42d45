// safetensors: values in all three types, each malformed file with its refusal, GPT-2's names, the way there and back.
#include <cstdint>  // shapes, bits
#include <cstring>  // memcpy
#include <limits>   // extreme values
#include <map>      // tensors
#include <string>   // headers
#include <vector>   // values

#include <doctest/doctest.h>

#include "bytes.hpp"
#include "program.hpp"
#include "weights.hpp"

namespace {

using namespace trainer_test;
using namespace transformer;

std::vector<float> read_all(safetensors_file& file, const std::string& name, std::size_t count) {
    std::vector<float> out(count);
    file.read(name, 0, out);
    return out;
}

TEST_CASE("values of F32, F16 and BF16, at any place of the file") {
    const scratch_folder folder;
    const std::string path = folder / "w.safetensors";
    const std::string header =
        R"({"b":{"dtype":"F16","shape":[3],"data_offsets":[16,22]},"__metadata__":{"a":"b"},)"
        R"("c":{"dtype":"BF16","shape":[1,3],"data_offsets":[22,28]},"empty":{"dtype":"F32","shape":[0,5],)"
        R"("data_offsets":[22,22]},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
        R"("scalar":{"dtype":"I64","shape":[],"data_offsets":[28,36]}}   )";
    write_bytes(path, safetensors_bytes(header, bytes_of(std::vector<float>{1.5f, -2, 1e-40f, 3e38f}) +
                                                    bytes_of(std::vector<std::uint16_t>{0x3c00, 0xc500, 0x0001}) +
                                                    bytes_of(std::vector<std::uint16_t>{0x3f80, 0xc0a0, 0x7f80}) +
                                                    std::string(8, 'x')));
    safetensors_file file("--load", path);
    CHECK(file.tensors().size() == 5);
    CHECK(read_all(file, "a", 4) == std::vector<float>{1.5f, -2, 1e-40f, 3e38f});
    CHECK(read_all(file, "b", 3) == std::vector<float>{1, -5, 0x1p-24f});
    CHECK(read_all(file, "c", 3) == std::vector<float>{1, -5, std::numeric_limits<float>::infinity()});
    CHECK(read_all(file, "empty", 0).empty());
    std::vector<float> end(1);
    file.read("a", 3, end);
    CHECK(end[0] == 3e38f);
    CHECK(file.tensors().at("c").shape == std::vector<std::uint64_t>{1, 3});
    CHECK_THROWS_WITH_AS(file.read("scalar", 0, end), doctest::Contains("type I64, not F32, F16 or BF16"), bad_input);
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 20);
    std::vector<float> gone(3);
    CHECK_THROWS_WITH_AS(file.read("c", 0, gone), doctest::Contains("has become shorter"), std::runtime_error);
}

TEST_CASE("a malformed file is refused with what is wrong") {
    const scratch_folder folder;
    const std::string path = folder / "w.safetensors";
    const auto refused_bytes = [&](const std::string& bytes, const char* says) {
        write_bytes(path, bytes);
        CAPTURE(says);
        CHECK_THROWS_WITH_AS(safetensors_file("--load", path), doctest::Contains(says), bad_input);
        CHECK_THROWS_WITH_AS(safetensors_file("--load", path), doctest::Contains(("--load: '" + path + "'").c_str()),
                             bad_input);
    };
    const auto refused = [&](const std::string& header, const char* says, std::size_t elements = 8) {
        refused_bytes(safetensors_bytes(header, std::string(elements, '\0')), says);
    };
    const auto entry = [](const std::string& type, const std::string& shape, const std::string& place) {
        return R"({"dtype":)" + type + R"(,"shape":)" + shape + R"(,"data_offsets":)" + place + "}";
    };
    const auto lone = [&](const std::string& type, const std::string& shape, const std::string& place) {
        return R"({"a":)" + entry(type, shape, place) + "}";
    };
    const std::string f32 = R"("F32")";
    // the length of the header
    refused_bytes("", "0 bytes are too few");
    refused_bytes("1234567", "7 bytes are too few");
    refused_bytes(bytes_of(std::vector<std::uint64_t>{3}) + "{}",
                  "a header of 3 bytes is more than the file holds (2)");
    refused_bytes(bytes_of(std::vector<std::uint64_t>{~std::uint64_t{0}}) + "{}", "a header of 18446744073709551615");
    refused_bytes(bytes_of(std::vector<std::uint64_t>{std::uint64_t{1} << 63}) + "{}",
                  "is more than the file holds (2)");
    // the header
    refused("", "not a JSON object", 0);
    refused("[]", "not a JSON object");
    refused(" {}", "not a JSON object");
    refused("{", "not valid JSON");
    refused("{}x", "not valid JSON");
    refused("{\"\xff\":1}", "not valid JSON");
    refused(R"({"a":[[[1]]]})", "nested too deep");
    refused(R"({"a":)" + std::string(1'000'000, '['), "nested too deep");
    refused(R"({"a":)" + entry(f32, "[2]", "[0,8]") + R"(,"a":)" + entry(f32, "[2]", "[0,8]") + "}",
            "'a' is there twice");
    // a tensor
    for (const std::string& broken :
         {std::string("7"), std::string("[]"), std::string("{}"), std::string(R"({"dtype":"F32","shape":[2]})"),
          entry("7", "[2]", "[0,8]"), entry(f32, "2", "[0,8]"), entry(f32, "[2.0]", "[0,8]"),
          entry(f32, "[-2]", "[0,8]"), entry(f32, R"(["2"])", "[0,8]"), entry(f32, "[[2]]", "[0,8]"),
          entry(f32, "[2]", "[0,8,8]"), entry(f32, "[2]", "[0]"), entry(f32, "[2]", "[-8,8]"),
          entry(f32, "[2]", "[0,99999999999999999999]"), entry(f32, "[2]", R"({"0":0})"), entry(f32, "[2]", "null")}) {
        CAPTURE(broken);
        refused(R"({"a":)" + broken + "}", broken.find("[[") == std::string::npos
                                               ? "'a' lacks a proper dtype, shape or data_offsets"
                                               : "nested too deep");
    }
    refused(lone(R"("F31")", "[2]", "[0,8]"), "'a' has unknown type 'F31'");
    refused(lone(f32, "[2]", "[8,0]"), "'a' has bytes 8 to 0 of 8");
    refused(lone(f32, "[2]", "[8,16]"), "'a' has bytes 8 to 16 of 8");
    refused(lone(f32, "[2]", "[18446744073709551608,18446744073709551615]"), "'a' has bytes 18446744073709551608 to");
    refused(lone(f32, "[3]", "[0,8]"), "'a' of type F32 and shape [3] cannot have 8 bytes");
    refused(lone(R"("F16")", "[2]", "[0,8]"), "'a' of type F16 and shape [2] cannot have 8 bytes");
    refused(lone(f32, "[]", "[0,8]"), "'a' of type F32 and shape [] cannot have 8 bytes");
    refused(lone(f32, "[4611686018427387906]", "[0,8]"), "cannot have 8 bytes");         // 8 modulo 2^64
    refused(lone(f32, "[4294967296,4294967296,2]", "[0,0]"), "cannot have 0 bytes", 0);  // 0 modulo 2^64
    // all of them
    const auto two = [&](const std::string& a, const std::string& b) {
        return R"({"a":)" + entry(f32, "[2]", a) + R"(,"b":)" + entry(f32, "[2]", b) + "}";
    };
    refused(two("[0,8]", "[0,8]"), "'b' overlaps", 16);
    refused(two("[4,12]", "[0,8]"), "'a' overlaps", 16);
    refused(two("[0,8]", "[9,17]"), "1 bytes before tensor 'b' belong to none", 17);
    refused(two("[1,9]", "[9,17]"), "1 bytes before tensor 'a' belong to none", 17);
    refused(two("[0,8]", "[8,16]"), "1 bytes at the end belong to no tensor", 17);
    refused("{}", "8 bytes at the end belong to no tensor");
    // what a file says is shown short, and without control characters
    refused(R"({"\u001b[31m)" + std::string(1000, 'x') + R"(":7})", "tensor '?[31mxxx");
    write_bytes(path, safetensors_bytes(R"({")" + std::string(100'000, 'x') + R"(":7})", ""));
    try {
        const safetensors_file file("--load", path);
        FAIL("not refused");
    } catch (const bad_input& e) { CHECK(std::string(e.what()).size() < 400 + path.size()); }

    CHECK_THROWS_WITH_AS(safetensors_file("--load", folder / "missing"), doctest::Contains("No such file"), bad_input);
    CHECK_THROWS_WITH_AS(safetensors_file("--load", folder.path()), doctest::Contains("not a regular file"), bad_input);
}

TEST_CASE("no truncation and no flipped bit of a file crashes or makes a tensor reach beyond it") {
    const scratch_folder folder;
    const std::string path = folder / "w.safetensors";
    const std::string good = safetensors_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                               R"("b":{"dtype":"BF16","shape":[2,2],"data_offsets":[8,16]}})",
                                               std::string(16, 'x'));
    const auto try_it = [&](const std::string& bytes) {
        write_bytes(path, bytes);
        try {
            safetensors_file file("--load", path);
            for (const auto& [name, t] : file.tensors()) {
                CHECK(t.first <= t.last);
                CHECK(t.last <= bytes.size());
            }
            return true;
        } catch (const bad_input&) { return false; }
    };
    REQUIRE(try_it(good));
    for (std::size_t length = 0; length < good.size(); ++length) { CHECK_FALSE(try_it(good.substr(0, length))); }
    for (std::size_t bit = 0; bit < 8 * (good.size() - 16); ++bit) {
        std::string flipped = good;
        flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
        (void)try_it(flipped);
    }
}

// ---- GPT-2's tensors ------------------------------------------------------------------------------------------------

constexpr configuration small{.vocabulary = 7, .context = 3, .layers = 2, .heads = 2, .width = 4, .positions = 5};

struct content {
    std::string type = "F32";
    std::vector<std::size_t> shape;
    std::string bytes;
};
using contents = std::map<std::string, content>;

/// Every parameter of `small`, with elements that differ from each other.
contents whole_model() {
    contents all;
    float next = 1;
    for (const declaration& d : parameters_of(small)) {
        std::vector<float> values(d.size());
        for (float& x : values) { x = next++; }
        all[d.name] = {"F32", d.shape, bytes_of(values)};
    }
    return all;
}

void write(const std::filesystem::path& path, const contents& all) {
    nlohmann::json header;
    std::string elements;
    for (const auto& [name, t] : all) {
        header[name] = {{"dtype", t.type},
                        {"shape", t.shape},
                        {"data_offsets", {elements.size(), elements.size() + t.bytes.size()}}};
        elements += t.bytes;
    }
    write_bytes(path, safetensors_bytes(header.dump(), elements));
}

TEST_CASE("tensors are found by GPT-2's names, with and without prefix; masks and a tied head are passed over") {
    const scratch_folder folder;
    const std::string path = folder / "w.safetensors";
    const contents plain = whole_model();
    contents prefixed;
    for (const auto& [name, t] : plain) { prefixed["transformer." + name] = t; }
    prefixed["transformer.h.0.attn.bias"] = {"BOOL", {1, 1, 5, 5}, std::string(25, '\1')};
    prefixed["transformer.h.1.attn.masked_bias"] = {"F32", {}, std::string(4, '\1')};
    prefixed["lm_head.weight"] = plain.at("wte.weight");
    for (const contents& all : {plain, prefixed}) {
        write(path, all);
        weights_file file(path, small);
        CHECK_NOTHROW(file.require_tied_head(small));
        double next = 1;
        const auto list = parameters_of(small);
        for (std::size_t i = 0; i < list.size(); ++i) {
            std::vector<double> values(list[i].size());
            file.read(i, tutti::view<double>(values));
            for (const double x : values) { REQUIRE(x == next++); }
        }
    }
}

TEST_CASE("a file that does not fit the model is refused with the tensor and the shapes") {
    const scratch_folder folder;
    const std::string path = folder / "w.safetensors";
    const auto refused = [&](auto change, const char* says) {
        contents all = whole_model();
        change(all);
        write(path, all);
        const auto open = [&] { weights_file(path, small).require_tied_head(small); };
        CHECK_THROWS_WITH_AS(open(), doctest::Contains(says), bad_input);
    };
    refused([](contents& c) { c.erase("h.1.mlp.c_fc.weight"); },
            "has no tensor 'h.1.mlp.c_fc.weight' of shape [4, 16]");
    refused(
        [](contents& c) {
            c["h.0.attn.c_attn.weight"].shape = {12, 4};
        },
        "tensor 'h.0.attn.c_attn.weight' has shape [12, 4], the model needs [4, 12]");
    refused([](contents& c) { c["ln_f.bias"].shape = {4, 1}; }, "'ln_f.bias' has shape [4, 1], the model needs [4]");
    refused(
        [](contents& c) {
            c["wpe.weight"] = {"F32", {3, 4}, std::string(48, 'x')};
        },
        "tensor 'wpe.weight' has shape [3, 4], the model needs [5, 4]");
    refused(
        [](contents& c) {
            c["ln_f.weight"] = {"I32", {4}, std::string(16, 'x')};
        },
        "tensor 'ln_f.weight' has type I32, not F32, F16 or BF16");
    refused([](contents& c) { c["h.2.ln_1.weight"] = c["h.1.ln_1.weight"]; },
            "has tensor 'h.2.ln_1.weight' of shape [4], which the model has not");
    for (const char* const unknown : {"h..attn.bias", "h.0.attn.biases", "h.attn.bias", "h.0x.attn.bias", "h."}) {
        CAPTURE(unknown);
        refused([&](contents& c) { c[unknown] = {"F32", {1}, std::string(4, 'x')}; }, unknown);
    }
    refused([](contents& c) { c["transformer.ln_f.bias"] = c["ln_f.bias"]; },
            "has both 'ln_f.bias' and 'transformer.ln_f.bias'");
    refused(
        [](contents& c) {
            c["lm_head.weight"] = c["wte.weight"];
            c["lm_head.weight"].bytes.back() ^= 1;
        },
        "tensors 'wte.weight' and 'lm_head.weight' differ");
    refused(
        [](contents& c) {
            c["lm_head.weight"] = {"F32", {4, 7}, c["wte.weight"].bytes};
        },
        "tensor 'lm_head.weight' has shape [4, 7], the model needs [7, 4]");
}

TEST_CASE("written and read again, weights are the same to the last bit; doubles are rounded once") {
    const scratch_folder folder;
    const std::string path = folder / "new/w.safetensors";
    configuration c = small;
    c.vocabulary = 20'000;  // more than one part
    const auto list = parameters_of(c);
    std::vector<std::vector<float>> values;
    for (const declaration& d : list) {
        values.emplace_back(d.size());
        initialize(tutti::host_queue{}, tutti::view<float>(values.back()), {d.name, d.shape, 1.0f}, 1,
                   static_cast<std::uint32_t>(values.size()));
    }
    values[0][0] = -0.0f;
    values[0][1] = std::numeric_limits<float>::denorm_min();
    values[0][2] = std::numeric_limits<float>::quiet_NaN();
    write_safetensors(path, list, [&](std::size_t i) { return std::span<const float>(values[i]); });
    CHECK_FALSE(std::filesystem::exists(path + ".unfinished"));
    weights_file file(path, c);
    for (std::size_t i = 0; i < list.size(); ++i) {
        std::vector<float> again(list[i].size());
        file.read(i, tutti::view<float>(again));
        CHECK(bytes_of(again) == bytes_of(values[i]));
    }
    // the header, by another eye
    const std::string bytes = content_of(path);
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    CHECK(length % 8 == 0);
    const auto header = nlohmann::json::parse(bytes.substr(8, length));
    CHECK(header.at("__metadata__") == nlohmann::json{{"format", "pt"}});
    CHECK(header.size() == list.size() + 1);
    CHECK(header.at("wte.weight").at("dtype") == "F32");
    CHECK(header.at("h.1.mlp.c_proj.weight").at("shape") == nlohmann::json{16, 4});

    const std::vector<double> third{1.0 / 3, 2};
    const std::vector<declaration> one{{"x", {2}, 0}};
    write_safetensors(path, one, [&](std::size_t) { return std::span<const double>(third); });
    safetensors_file rounded("--load", path);
    CHECK(read_all(rounded, "x", 2) == std::vector<float>{1.0f / 3, 2});
}

TEST_CASE("a file that cannot be written keeps the old one, and leaves nothing behind") {
    const scratch_folder folder;
    const std::string path = folder / "w.safetensors";
    write_bytes(path, "old");
    const std::vector<declaration> one{{"x", {2}, 0}};
    const auto failing = [](std::size_t) -> std::span<const float> { throw std::runtime_error("no values"); };
    CHECK_THROWS_WITH_AS(write_safetensors(path, one, failing), "no values", std::runtime_error);
    CHECK(content_of(path) == "old");
    CHECK_FALSE(std::filesystem::exists(path + ".unfinished"));
    const std::vector<float> two{1, 2};
    const auto write_full = [&] {
        write_safetensors("/dev/full/x", one, [&](std::size_t) { return std::span<const float>(two); });
    };
    CHECK_THROWS_WITH_AS(write_full(), doctest::Contains("cannot write '/dev/full/x'"), std::runtime_error);
}

}  // namespace
