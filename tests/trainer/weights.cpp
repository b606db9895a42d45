// weights: files are found by GPT-2's names and refused where they do not fit the model; the way there and back.
#include <limits>  // extreme values
#include <map>     // tensors
#include <string>  // headers
#include <vector>  // values

#include <doctest/doctest.h>

#include "bytes.hpp"
#include "program.hpp"
#include "weights.hpp"

namespace {

using namespace trainer_test;
using namespace transformer;

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
    const std::string path = folder / "w.safetensors";
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
    write_weights(path, list, [&](std::size_t i) { return std::span<const float>(values[i]); });
    CHECK_FALSE(std::filesystem::exists(path + ".unfinished"));
    weights_file file(path, c);
    for (std::size_t i = 0; i < list.size(); ++i) {
        std::vector<float> again(list[i].size());
        file.read(i, tutti::view<float>(again));
        CHECK(bytes_of(again) == bytes_of(values[i]));
    }
    const tutti::checkpoint::safetensors_file written(path);
    CHECK(written.metadata() == std::map<std::string, std::string, std::less<>>{{"format", "pt"}});
    CHECK(written.tensors().size() == list.size());
    CHECK(written.at("wte.weight").type == "F32");

    const std::vector<double> third{1.0 / 3, 2};
    const std::vector<declaration> one{{"x", {2}, 0}};
    write_weights(path, one, [&](std::size_t) { return std::span<const double>(third); });
    std::vector<float> rounded(2);
    tutti::checkpoint::safetensors_file(path).read("x", tutti::view<float>(rounded));
    CHECK(rounded == std::vector<float>{1.0f / 3, 2});
}

TEST_CASE("what is no file of weights is refused with the option, the file and what is wrong with it") {
    const scratch_folder folder;
    const std::string path = folder / "w.safetensors";
    const auto open = [&](const std::string& where) { const weights_file file(where, small); };
    write_bytes(path, safetensors_bytes("{}", "x"));
    CHECK_THROWS_WITH_AS(open(path), ("--load: '" + path + "': 1 bytes at the end belong to no tensor").c_str(),
                         bad_input);
    const std::string missing = folder / "missing";
    CHECK_THROWS_WITH_AS(open(missing), ("--load: '" + missing + "' is not there").c_str(), bad_input);
    const std::string itself = folder.path();
    CHECK_THROWS_WITH_AS(open(itself), ("--load: '" + itself + "' is no regular file").c_str(), bad_input);
}

}  // namespace
