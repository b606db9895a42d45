// safetensors: every type there and back, the layout that others write, each malformed file with its refusal, how much
// memory a hostile one gets, and files that appear whole or not at all.
#include <doctest/doctest.h>  // test cases

#include <algorithm>  // max
#include <atomic>     // allocations
#include <cerrno>     // failures of the disk
#include <cstdint>    // bits
#include <cstdlib>    // malloc
#include <cstring>    // memcpy
#include <limits>     // extreme values
#include <new>        // allocations
#include <optional>   // elements
#include <string>     // headers
#include <vector>     // values

#include <malloc.h>  // malloc_usable_size

#include <tutti/checkpoint/safetensors.hpp>  // under test

#include "files.hpp"  // folders

// What is allocated now, and the most and the largest of it since they were reset.
static std::atomic<std::size_t> live{0};
static std::atomic<std::size_t> most{0};
static std::atomic<std::size_t> largest{0};

static void raise_to(std::atomic<std::size_t>& mark, std::size_t n) {
    for (std::size_t seen = mark; n > seen && !mark.compare_exchange_weak(seen, n);) {}
}
void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
    void* const p = std::malloc(n == 0 ? 1 : n);
    raise_to(largest, n);
    raise_to(most, live += ::malloc_usable_size(p));
    return p;
}
void* operator new(std::size_t n) {
    void* const p = operator new(n, std::nothrow);
    if (p == nullptr) { throw std::bad_alloc(); }
    return p;
}
void operator delete(void* p) noexcept {
    live -= ::malloc_usable_size(p);
    std::free(p);
}
void operator delete(void* p, std::size_t) noexcept { operator delete(p); }

namespace {

using namespace tutti;
using namespace tutti::test;
using checkpoint::damaged_error;
using checkpoint::safetensors_file;
using checkpoint::write_safetensors;

template <class T> std::string text_of(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}
std::string content_of(const std::string& path) {
    const auto bytes = bytes_of(path);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
void write_text(const std::string& path, const std::string& text) { write_bytes(path, std::as_bytes(std::span(text))); }

// A file as the format has it, byte by byte.
std::string file_of(const std::string& header, const std::string& elements) {
    std::string length(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) { length[i] = static_cast<char>(header.size() >> (8 * i)); }
    return length + header + elements;
}
std::string entry(const std::string& type, const std::string& shape, const std::string& place) {
    return R"({"dtype":)" + type + R"(,"shape":)" + shape + R"(,"data_offsets":)" + place + "}";
}
const std::string f32 = R"("F32")";

template <class E, class F> std::string refusal(F f) {
    try {
        f();
    } catch (const E& e) { return e.what(); }
    return "no error";
}

template <class T> std::vector<T> read_all(const safetensors_file& file, const std::string& name) {
    std::vector<T> out(static_cast<std::size_t>(file.at(name).elements));
    file.read(name, view<T>(out));
    return out;
}

template <class T> void there_and_back(const std::string& path, const char* type, std::vector<T> values) {
    CAPTURE(type);
    values.push_back(std::numeric_limits<T>::max());
    values.push_back(std::numeric_limits<T>::lowest());
    const std::vector entries{state_of("x", view<T>(values), {1, values.size()})};
    write_safetensors(path, entries);
    const std::string bytes = content_of(path);
    CHECK(bytes.find("\"" + std::string(type) + "\"") != std::string::npos);
    CHECK(bytes.substr(bytes.size() - values.size() * sizeof(T)) == text_of(values));
    const safetensors_file file(path);
    CHECK(file.at("x").type == type);
    CHECK(file.at("x").element == dtype_of<T>);
    CHECK(file.at("x").shape == std::vector<std::uint64_t>{1, values.size()});
    CHECK(text_of(read_all<T>(file, "x")) == text_of(values));
    std::vector<T> again(values.size());
    checkpoint::read_safetensors(path, std::vector{state_of("x", view<T>(again), {1, values.size()})});
    CHECK(text_of(again) == text_of(values));
}

}  // namespace

template <> struct std::numeric_limits<float16> {
    static float16 max() { return float16(65504.0f); }
    static float16 lowest() { return float16(-65504.0f); }
};
template <> struct std::numeric_limits<bfloat16> {
    static bfloat16 max() { return bfloat16(0x1.fep127f); }
    static bfloat16 lowest() { return bfloat16(-0x1.fep127f); }
};

TEST_CASE("every type, there and back to the last bit") {
    const scratch_directory scratch;
    const std::string path = scratch.path + "/x.safetensors";
    const float nan = std::numeric_limits<float>::quiet_NaN();
    there_and_back<double>(path, "F64", {-0.0, 1.0 / 3, std::numeric_limits<double>::denorm_min()});
    there_and_back<float>(path, "F32", {-0.0f, 1.0f / 3, std::numeric_limits<float>::denorm_min(), nan});
    there_and_back<float16>(path, "F16", {float16(-0.0f), float16(0x1p-24f), float16(nan)});
    there_and_back<bfloat16>(path, "BF16", {bfloat16(-0.0f), bfloat16(1.0f / 3), bfloat16(nan)});
    there_and_back<std::int64_t>(path, "I64", {0, -1});
    there_and_back<std::int32_t>(path, "I32", {0, -1});
    there_and_back<std::int16_t>(path, "I16", {0, -1});
    there_and_back<std::int8_t>(path, "I8", {0, -1});
    there_and_back<std::uint64_t>(path, "U64", {0, 1});
    there_and_back<std::uint32_t>(path, "U32", {0, 1});
    there_and_back<std::uint16_t>(path, "U16", {0, 1});
    there_and_back<std::uint8_t>(path, "U8", {0, 1});
}

TEST_CASE("scalars, empty tensors, no tensors, texts, and names that JSON escapes") {
    const scratch_directory scratch;
    const std::string path = scratch.path + "/x.safetensors";
    write_safetensors(path, std::vector<state_entry<>>());
    CHECK(content_of(path) == file_of("{}      ", ""));
    CHECK(safetensors_file(path).tensors().empty());
    CHECK(safetensors_file(path).metadata().empty());

    const std::vector<std::string> names{"plain",
                                         "",
                                         "quote\" back\\slash /",
                                         "\n\t\b\f\r\x01\x7f",
                                         "naïve 日本 😀",
                                         std::string("zero\0byte", 9),
                                         "{\"a\":[",
                                         "__metadata"};
    std::vector<float> values{1, 2, 3, 4, 5, 6, 7, 8};
    std::vector<state_entry<>> entries;
    for (std::size_t i = 0; i < names.size(); ++i) {
        entries.push_back(state_of(names[i], view<float>(&values[i], 1), {1, 1}));
    }
    entries[0].shape.clear();  // a scalar
    entries.push_back(state_of("empty", view<float>(values.data(), std::size_t{0}), {3, 0, std::size_t{1} << 63, 4}));
    const checkpoint::safetensors_options how{.metadata = {{"format", "pt"}, {"a \"text\"", "line\nand \u00fc"}}};
    write_safetensors(path, entries, how);
    const safetensors_file file(path);
    CHECK(file.path() == path);
    CHECK(file.metadata() == how.metadata);
    REQUIRE(file.tensors().size() == entries.size());
    for (std::size_t i = 0; i < names.size(); ++i) {
        CAPTURE(names[i]);
        CHECK(read_all<float>(file, names[i]) == std::vector<float>{values[i]});
    }
    CHECK(file.at("plain").shape.empty());
    CHECK(file.at("plain").elements == 1);
    CHECK(file.at("empty").elements == 0);
    CHECK(file.at("empty").shape == std::vector<std::uint64_t>{3, 0, std::uint64_t{1} << 63, 4});
    CHECK(read_all<float>(file, "empty").empty());
}

TEST_CASE("large elements come first, so that each tensor lies at a multiple of its element's size") {
    const scratch_directory scratch;
    const std::string path = scratch.path + "/x.safetensors";
    std::vector<std::int8_t> a{1, 2, 3};
    std::vector<float> b{4};
    std::vector<bfloat16> c(3, bfloat16(5.0f));
    std::vector<double> d{6};
    std::vector<float> e{7};
    const std::vector entries{state_of("a", view<std::int8_t>(a)), state_of("b", view<float>(b)),
                              state_of("c", view<bfloat16>(c)), state_of("d", view<double>(d)),
                              state_of("e", view<float>(e))};
    write_safetensors(path, entries, {.metadata = {{"k", "v"}}});
    CHECK(content_of(path) ==
          file_of(R"({"__metadata__":{"k":"v"},"a":{"dtype":"I8","shape":[3],"data_offsets":[22,25]},)"
                  R"("b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},)"
                  R"("c":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},)"
                  R"("d":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},)"
                  R"("e":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}}      )",
                  text_of(d) + text_of(b) + text_of(e) + text_of(c) + text_of(a)));
    CHECK(read_all<float>(safetensors_file(path), "e") == e);
}

TEST_CASE("a file as the Python package writes it, with types that are no elements here; floats are converted") {
    const scratch_directory scratch;
    const std::string path = scratch.path + "/x.safetensors";
    // Tensors by descending size of their type, then by name; no order among the names; an escape is as good as the
    // letter.
    const std::string header =
        R"({"__metadata__":{"format":"pt"},"c":{"dtype":"BF16","shape":[1,3],"data_offsets":[46,52]},)"
        R"("a":{"dtype":"F32","shape":[2,2],"data_offsets":[24,40]},"n":{"dtype":"I64","shape":[],"data_offsets":[16,24]},)"
        R"("b":{"dtype":"F16","shape":[3],"data_offsets":[40,46]},"d":{"dtype":"F64","shape":[2],"data_offsets":[0,16]},)"
        R"("mask":{"dtype":"BOOL","shape":[2],"data_offsets":[55,57]},"f8":{"dtype":"F8_E4M3","shape":[3],)"
        R"("data_offsets":[52,55]},"f4":{"dtype":"F4","shape":[2,2],"data_offsets":[57,59]}, "z" : )"
        "\n\t"
        R"({ "data_offsets" : [52 , 52], "shape" : [0,5], "dtype" : "\u004632"} }   )";
    const std::string data =
        text_of<double>({1.0 + 0x1p-52, -3}) + text_of<std::int64_t>({-7}) + text_of<float>({1.5f, -2, 1e-40f, 3e38f}) +
        text_of<std::uint16_t>({0x3c00, 0xc500, 0x0001}) + text_of<std::uint16_t>({0x3f80, 0xc0a0, 0x7f80}) +
        "\x38\x40\x7f\1" + std::string(1, '\0') + "\x12\x34";
    write_text(path, file_of(header, data));
    const safetensors_file file(path);
    CHECK(file.tensors().size() == 9);
    CHECK(file.metadata().at("format") == "pt");
    CHECK(read_all<float>(file, "a") == std::vector<float>{1.5f, -2, 1e-40f, 3e38f});
    CHECK(read_all<float>(file, "b") == std::vector<float>{1, -5, 0x1p-24f});
    CHECK(read_all<double>(file, "b") == std::vector<double>{1, -5, 0x1p-24});
    CHECK(read_all<float>(file, "c") == std::vector<float>{1, -5, std::numeric_limits<float>::infinity()});
    CHECK(read_all<double>(file, "d") == std::vector<double>{1.0 + 0x1p-52, -3});
    CHECK(read_all<float>(file, "d") == std::vector<float>{1, -3});
    CHECK(text_of(read_all<bfloat16>(file, "b")) == text_of<std::uint16_t>({0x3f80, 0xc0a0, 0x3380}));
    CHECK(read_all<std::int64_t>(file, "n") == std::vector<std::int64_t>{-7});
    std::vector<float> end(1);
    file.read("a", 3, view<float>(end));
    CHECK(end[0] == 3e38f);
    for (const char* const name : {"mask", "f8", "f4"}) { CHECK_FALSE(file.at(name).element.has_value()); }
    CHECK(file.at("f8").type == "F8_E4M3");
    std::vector<std::byte> raw(2);
    file.read_bytes("f8", 1, raw);
    CHECK(raw == std::vector{std::byte{0x40}, std::byte{0x7f}});
    file.read_bytes("f4", 0, raw);
    CHECK(raw == std::vector{std::byte{0x12}, std::byte{0x34}});

    // what cannot be asked of it
    std::vector<std::int64_t> one(1);
    const auto says = [&](auto f) { return refusal<usage_error>(f); };
    const std::string start = "'" + path + "': tensor '";
    CHECK(says([&] { file.read("n", view<float>(end)); }) == start + "n' has type I64: it cannot be read as float32");
    CHECK(says([&] { file.read("a", 0, view<std::int64_t>(one)); }) ==
          start + "a' has type F32: it cannot be read as int64");
    CHECK(says([&] { file.read("mask", view<float>(end)); }) ==
          start + "mask' has type BOOL: it cannot be read as float32");
    CHECK(says([&] { file.read("a", 4, view<float>(end)); }) == start + "a' has 4 elements, not 1 from 4 on");
    CHECK(says([&] { file.read("a", ~std::uint64_t{0}, view<float>(end)); }) ==
          start + "a' has 4 elements, not 1 from 18446744073709551615 on");
    CHECK(says([&] { file.read_bytes("f8", 2, raw); }) == start + "f8' has 3 bytes, not 2 from 2 on");
    CHECK(says([&] { file.read("nobody", view<float>(end)); }) == start + "nobody' is not there");
    fs::resize_file(path, fs::file_size(path) - 12);
    std::vector<float> gone(3);
    CHECK(refusal<damaged_error>([&] { file.read("c", view<float>(gone)); }).find("' ends after") != std::string::npos);
}

TEST_CASE("conversions of many parts") {
    const scratch_directory scratch;
    const std::string path = scratch.path + "/x.safetensors";
    std::vector<float> values(150'001);
    for (std::size_t i = 0; i < values.size(); ++i) { values[i] = static_cast<float>(i); }
    write_safetensors(path, std::vector{state_of("x", view<float>(values))});
    const auto doubles = read_all<double>(safetensors_file(path), "x");
    CHECK(std::vector<float>(doubles.begin(), doubles.end()) == values);
}

TEST_CASE("entries that are pieces are read from their place; those that do not fit are refused before any changes") {
    const scratch_directory scratch;
    const std::string path = scratch.path + "/x.safetensors";
    std::vector<float> w{0, 1, 2, 3, 4, 5};
    std::vector<std::int32_t> n{9};
    write_safetensors(path, std::vector{state_of("w", view<float>(w), {2, 3}), state_of("n", view<std::int32_t>(n))});
    std::vector<float> piece(2, -1.0f);
    const auto piece_at = [&](std::size_t offset) { return state_of("w", view<float>(piece), {2, 3}, offset); };
    checkpoint::read_safetensors(path, std::vector{piece_at(3)});
    CHECK(piece == std::vector<float>{3, 4});

    const auto says = [&](const state_entry<>& wrong) {
        piece = {-1, -1};
        const std::string text = refusal<usage_error>([&] {
            checkpoint::read_safetensors(path, std::vector{piece_at(0), wrong});
        });
        CHECK(piece == std::vector<float>{-1, -1});
        return text;
    };
    std::vector<float> other(1);
    const std::string start = "'" + path + "': tensor '";
    CHECK(says(state_of("m", view<float>(other))) == start + "m' is not there");
    CHECK(says(state_of("n", view<float>(other))) == start + "n' is I32 [1], not float32 [1]");
    CHECK(says(state_of("w", view<float>(other), {6})) == start + "w' is F32 [2, 3], not float32 [6]");
    CHECK(says(piece_at(5)) == start + "w' has 6 elements, not 8 bytes from element 5 on");
    CHECK(says(piece_at(7)) == start + "w' has 6 elements, not 8 bytes from element 7 on");
}

TEST_CASE("a malformed file is refused with its name and what is wrong") {
    const scratch_directory scratch;
    const std::string path = scratch.path + "/x.safetensors";
    const auto refused_bytes = [&](const std::string& bytes, const std::string& says) {
        write_text(path, bytes);
        largest = 0;
        const std::size_t before = most = live.load();
        const std::string text = refusal<damaged_error>([&] { const safetensors_file file(path); });
        // A file gets no memory but a few times what its header takes, and what messages do.
        CHECK(largest <= std::max(bytes.size(), std::size_t{1} << 16));
        CHECK(most - before <= 4 * bytes.size() + (std::size_t{1} << 17));
        CAPTURE(text);
        CAPTURE(says);
        CHECK(text.starts_with("'" + path + "': "));
        CHECK(text.find(says) != std::string::npos);
        CHECK(text.size() < path.size() + 400);
    };
    const auto refused = [&](const std::string& header, const std::string& says, std::size_t elements = 8) {
        refused_bytes(file_of(header, std::string(elements, '\0')), says);
    };
    const auto lone = [&](const std::string& type, const std::string& shape, const std::string& place) {
        return R"({"a":)" + entry(type, shape, place) + "}";
    };
    // the length of the header
    refused_bytes("", "0 bytes are too few");
    refused_bytes("1234567", "7 bytes are too few");
    refused_bytes(text_of<std::uint64_t>({3}) + "{}", "a header of 3 bytes is more than the file holds (2)");
    for (const std::uint64_t huge : {~std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{1} << 40}) {
        refused_bytes(text_of<std::uint64_t>({huge}) + "{}", "a header of " + std::to_string(huge) + " bytes");
    }
    // the header
    for (const char* const none : {"", "[]", " {}", "7"}) { refused(none, "the header is not a JSON object"); }
    for (const char* const broken :
         {"{", "{}x", "{} {}", "{\"a\"}", "{\"a\":}", "{\"\xff\":1}", "{\"\xc0\x80\":1}", "{\"\xed\xa0\x80\":1}",
          "{\"\\ud800\":1}", "{\"\\x\":1}", "{\"\n\":1}", "{'a':1}", "{\"a\":{\"dtype\":\"F32\",}", "{\"a\":nul"}) {
        CAPTURE(broken);
        refused(broken, "the header is not valid JSON at byte ");
    }
    refused(std::string("{}\0\0\0\0\0\0", 8), "the header is not valid JSON at byte 3: it is zero", 0);
    const std::string improper = "'a' lacks a proper dtype, shape or data_offsets";
    for (const std::string& deep : {std::string(1000, '['), [] {
                                        std::string s;
                                        for (int i = 0; i < 200'000; ++i) { s += "{\"a\":"; }
                                        return s;
                                    }()}) {
        refused(R"({"a":)" + deep, deep[0] == '[' ? improper : "tensor 'a' has an unknown field 'a'");
        refused(R"({"a":{"shape":)" + deep, improper);
        refused(R"({"a":{"shape":[1,)" + deep, improper);
        refused(R"({"__metadata__":{"a":)" + deep, "'__metadata__' has what is no text");
    }
    refused(R"({"a":{"shape":[)" + std::string(1000, '1'), "not valid JSON");
    refused(R"({"a":{"shape":[)" +
                [] {
                    std::string s;
                    for (int i = 0; i < 65; ++i) { s += "1,"; }
                    return s;
                }(),
            "tensor 'a' has more than 64 dimensions");
    // what a parser would keep, grow and show
    const std::string no_json = "the header is not valid JSON at byte ";
    for (const char c : {'[', '1', ' ', '\n', '\x01', '}'}) {
        refused(R"({"a":)" + std::string(1'000'000, c) + "x",
                "the header has 1000002 bytes without a string from byte 4 on, more than 2048");
        if (c != '[' && c != '1') { refused(R"({"a":)" + std::string(2040, c) + "\x02", no_json); }
    }
    for (const std::string part : {"x", "\\\"", "\\u0001", "\xff", "\x01"}) {
        std::string text;
        while (text.size() < 1'000'000) { text += part; }
        for (const char* const end : {"", "\":1}", "\\"}) {
            refused("{\"" + text + end, "bytes at byte 1, more than 2500");
            refused(R"({"__metadata__":{"k":")" + text + end, "bytes at byte 21, more than 2500");
        }
        refused("{\"" + text.substr(0, 16000) + "\x01\":7}", no_json);
        refused("{\"" + text.substr(0, 200'000) + "\x01\":7}", no_json, 700'000);
    }
    refused(R"({"a":)" + entry(f32, "[2]", "[0,8]") + R"(,"a":)" + entry(f32, "[2]", "[0,8]") + "}",
            "'a' is there twice");
    refused(R"({"a":)" + entry(f32, "[2]", "[0,8]") + R"(,"\u0061":)" + entry(f32, "[2]", "[8,16]") + "}",
            "'a' is there twice", 16);
    refused(R"({"__metadata__":{},"__metadata__":{}})", "'__metadata__' is there twice", 0);
    refused(R"({"__metadata__":{"k":"1","k":"2"}})", "the metadata has 'k' twice", 0);
    for (const char* const wrong :
         {"7", "null", "[]", R"("text")", R"({"k":7})", R"({"k":null})", R"({"k":["v"]})", R"({"k":{"v":"w"}})"}) {
        refused(R"({"__metadata__":)" + std::string(wrong) + "}", "'__metadata__' has what is no text", 0);
    }
    // a tensor
    for (const std::string& broken : {std::string("7"),
                                      std::string("[]"),
                                      std::string("{}"),
                                      std::string("null"),
                                      std::string("true"),
                                      std::string(R"("F32")"),
                                      std::string(R"({"dtype":"F32","shape":[2]})"),
                                      std::string(R"({"dtype":"F32","data_offsets":[0,8]})"),
                                      std::string(R"({"shape":[2],"data_offsets":[0,8]})"),
                                      entry("7", "[2]", "[0,8]"),
                                      entry("[]", "[2]", "[0,8]"),
                                      entry(f32, "2", "[0,8]"),
                                      entry(f32, "[2.0]", "[0,8]"),
                                      entry(f32, "[-2]", "[0,8]"),
                                      entry(f32, "[-0]", "[0,8]"),
                                      entry(f32, R"(["2"])", "[0,8]"),
                                      entry(f32, "[[2]]", "[0,8]"),
                                      entry(f32, "[null]", "[0,8]"),
                                      entry(f32, "[{}]", "[0,8]"),
                                      entry(f32, "[2]", "[0,8,8]"),
                                      entry(f32, "[2]", "[0]"),
                                      entry(f32, "[2]", "[]"),
                                      entry(f32, "[2]", "[-8,8]"),
                                      entry(f32, "[2]", "[0,99999999999999999999]"),
                                      entry(f32, "[2]", R"({"0":0})"),
                                      entry(f32, "[2]", "null"),
                                      entry(f32, "[2]", "8")}) {
        CAPTURE(broken);
        refused(R"({"a":)" + broken + "}", improper);
    }
    refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"stride":[1]}})",
            "tensor 'a' has an unknown field 'stride'");
    refused(R"({"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})", "'a' has two fields 'shape'");
    for (const char* const lacking :  // what 'a' has is not taken for theirs
         {R"("shape":[2],"data_offsets":[8,16])", R"("dtype":"F32","data_offsets":[8,16])",
          R"("dtype":"F32","shape":[2])"}) {
        refused(R"({"a":)" + entry(f32, "[2]", "[0,8]") + R"(,"b":{)" + lacking + "}}", "'b' lacks a proper", 16);
    }
    refused(lone(R"("F31")", "[2]", "[0,8]"), "'a' has unknown type 'F31'");
    refused(lone(R"("f32")", "[2]", "[0,8]"), "'a' has unknown type 'f32'");
    refused(lone(f32, "[2]", "[8,0]"), "'a' has bytes 8 to 0 of 8");
    refused(lone(f32, "[2]", "[8,16]"), "'a' has bytes 8 to 16 of 8");
    refused(lone(f32, "[2]", "[18446744073709551608,18446744073709551615]"), "'a' has bytes 18446744073709551608 to");
    refused(lone(f32, "[3]", "[0,8]"), "'a' of type F32 and shape [3] cannot have 8 bytes");
    for (const char* const wrong :
         {"F64", "F16", "BF16", "I64", "I16", "I8", "U64", "U16", "U8", "BOOL", "C64", "F8_E5M2", "F4", "F6_E2M3"}) {
        refused(lone("\"" + std::string(wrong) + "\"", "[2]", "[0,8]"),
                "'a' of type " + std::string(wrong) + " and shape [2] cannot have 8 bytes");
    }
    refused(lone(R"("F4")", "[15]", "[0,8]"), "'a' of type F4 and shape [15] cannot have 8 bytes");  // half a byte
    refused(lone(f32, "[]", "[0,8]"), "'a' of type F32 and shape [] cannot have 8 bytes");
    refused(lone(f32, "[0]", "[0,8]"), "'a' of type F32 and shape [0] cannot have 8 bytes");
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
    refused(R"({")" + std::string(10'000, 'x') + R"(":7})", "xxx...' lacks");

    CHECK(refusal<damaged_error>([&] { const safetensors_file file(scratch.path + "/none"); }) ==
          "'" + scratch.path + "/none' is not there");
    CHECK(refusal<damaged_error>([&] { const safetensors_file file(scratch.path); }) ==
          "'" + scratch.path + "' is no regular file");
}

TEST_CASE("strings of a quarter of the file, and blanks behind the header, are read back") {
    const scratch_directory scratch;
    const std::string path = scratch.path + "/x.safetensors";
    const std::vector<float> values(1000, 1.0f);
    for (const std::size_t size : {std::size_t{16384}, std::size_t{1'000'000}}) {
        const std::string name = std::string(size / 2, 'n'), text = std::string(size, '\x7f');
        std::vector<std::uint8_t> filler(size == 16384 ? 1 : 4 * size);
        const std::vector<state_entry<>> all{state_of(name, view<std::uint8_t>(filler))};
        write_safetensors(path, all, {.metadata = {{"k", text}}});
        largest = 0;
        const safetensors_file file(path);
        const std::size_t seen = largest;
        CHECK(seen <= std::max(bytes_of(path).size(), std::size_t{1} << 16));
        CHECK(file.metadata().at("k") == text);
        CHECK(file.at(name).elements == filler.size());
    }
    const std::string header = R"({"a":)" + entry(f32, "[1000]", "[0,4000]") + "}" + std::string(100'000, ' ');
    write_text(path, file_of(header, text_of(values)));
    std::vector<float> read(1000);
    safetensors_file(path).read("a", view<float>(read));
    CHECK(read == values);
}

TEST_CASE("no truncation and no flipped bit of a file crashes, or makes a tensor reach beyond it") {
    const scratch_directory scratch;
    const std::string path = scratch.path + "/x.safetensors";
    const std::string good = file_of(R"({"__metadata__":{"k":"v"},"a":)" + entry(f32, "[2]", "[0,8]") + R"(,"b":)" +
                                         entry(R"("BF16")", "[2,2]", "[8,16]") + "}",
                                     std::string(16, 'x'));
    const auto is_taken = [&](const std::string& bytes) {
        write_text(path, bytes);
        const std::size_t before = most = live.load();
        bool taken = false;
        try {
            const safetensors_file file(path);
            taken = true;
            for (const auto& [name, t] : file.tensors()) {
                std::vector<std::byte> all(static_cast<std::size_t>(t.last - t.first));
                file.read_bytes(name, 0, all);
            }
        } catch (const damaged_error& e) {
            CHECK_FALSE(taken);
            CHECK(std::string(e.what()).starts_with("'" + path + "': "));
        }
        CHECK(most - before <= 8 * bytes.size() + 16384);
        return taken;
    };
    REQUIRE(is_taken(good));
    for (std::size_t length = 0; length < good.size(); ++length) { CHECK_FALSE(is_taken(good.substr(0, length))); }
    CHECK_FALSE(is_taken(good + "x"));
    for (std::size_t bit = 0; bit < 8 * (good.size() - 16); ++bit) {
        std::string flipped = good;
        flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
        static_cast<void>(is_taken(flipped));
    }
}

TEST_CASE("what the format has no place for is refused before anything is written") {
    const scratch_directory scratch;
    const std::string path = scratch.path + "/x.safetensors";
    std::vector<float> two{1, 2};
    const auto says = [&](const std::vector<checkpoint::safetensors_declaration>& declared,
                          const checkpoint::safetensors_options& how = {}) {
        const std::string text = refusal<usage_error>([&] {
            write_safetensors(
                path, declared, [](std::size_t, const checkpoint::byte_sink&) { FAIL("nobody asked"); }, how);
        });
        CHECK(listing(scratch.path).empty());
        return text;
    };
    const std::string start = "'" + path + "': ";
    using enum dtype;
    CHECK(says({{"x", float32, {2}}, {"x", float64, {2}}}) == start + "tensor 'x' is there twice");
    CHECK(says({{"__metadata__", float32, {2}}}) == start + "tensor '__metadata__' has the metadata's name");
    CHECK(says({{"x", byte, {2}}}) == start + "tensor 'x' has type byte, which the format has not");
    CHECK(says({{"\xff", float32, {2}}}) == start + "'?' is not UTF-8");
    CHECK(says({}, {.metadata = {{"k", "\xc3"}}}) == start + "'?' is not UTF-8");
    CHECK(says({}, {.metadata = {{"\xc3(", "v"}}}) == start + "'?(' is not UTF-8");
    CHECK(says({}, {.metadata = {{"k", std::string(16385, 'x')}}}) ==
          start.substr(0, start.size() - 2) + " could not be read back: the header has a string of 16385 bytes at byte "
                                              "21, more than 16384, of a file of 16424");
    const std::uint64_t large = std::uint64_t{1} << 40;
    CHECK(says({{"x", float32, {large, large}}}) ==
          start + "tensor 'x' of shape [1099511627776, 1099511627776] is too large");
    CHECK(says({{"x", float32, {large << 17}}, {"y", float32, {large << 17}}, {"z", float32, {1}}}) ==
          start + "tensor 'z' of shape [1] is too large");
    CHECK(says({{"x", float32, std::vector<std::uint64_t>(65, 1)}}).find("is too large") != std::string::npos);
    CHECK(refusal<usage_error>([&] { write_safetensors(path, std::vector{state_of("w", view<float>(two), {4})}); }) ==
          start + "tensor 'w' lacks 8 of 16 bytes");
    CHECK(refusal<usage_error>([&] { write_safetensors(path, std::vector{state_of("w", view<float>(two), {1})}); }) ==
          start + "tensor 'w' gets more than 4 bytes");
    CHECK(listing(scratch.path).empty());
}

TEST_CASE("a file appears whole or not at all: whatever fails keeps the old one, and leaves nothing beside it") {
    const scratch_directory scratch;
    const std::string path = scratch.path + "/x.safetensors";
    std::vector<float> two{1, 2};
    const std::vector entries{state_of("w", view<float>(two))};
    std::vector<std::string> operations;
    write_safetensors(path, entries, {.before_file_operation = [&](std::string_view what, const std::string& where) {
                          operations.push_back(std::string(what) + " " + fs::path(where).filename().string());
                          return 0;
                      }});
    const std::string beside = "x.safetensors.unfinished";
    CHECK(operations == std::vector<std::string>{"create " + beside, "write " + beside, "write " + beside,
                                                 "synchronize " + beside, "rename " + beside,
                                                 "synchronize " + fs::path(scratch.path).filename().string()});
    CHECK(read_all<float>(safetensors_file(path), "w") == two);

    for (std::size_t failing = 0; failing < operations.size(); ++failing) {
        CAPTURE(operations[failing]);
        write_text(path, "old");
        std::size_t done = 0;
        const auto full = [&](std::string_view, const std::string&) { return done++ == failing ? ENOSPC : 0; };
        const std::string text =
            refusal<backend_error>([&] { write_safetensors(path, entries, {.before_file_operation = full}); });
        // Only the name's durability comes behind the rename.
        const bool last = failing + 1 == operations.size();
        CHECK(text.find("': No space left on device") != std::string::npos);
        CHECK(text.ends_with("; '" + path + "' is the new file, but its name may not outlast a loss of power") == last);
        CHECK(listing(scratch.path) == std::vector<std::string>{"x.safetensors"});
        CHECK((content_of(path) == "old") != last);
    }

    write_text(path, "old");
    const std::vector<checkpoint::safetensors_declaration> declared{{"w", dtype::float32, {2}}};
    CHECK(refusal<std::runtime_error>([&] {
              write_safetensors(path, declared, [&](std::size_t, const checkpoint::byte_sink& put) {
                  put(std::as_bytes(std::span(two).first(1)));
                  throw std::runtime_error("no values");
              });
          }) == "no values");
    CHECK(listing(scratch.path) == std::vector<std::string>{"x.safetensors"});
    CHECK(content_of(path) == "old");

    // what a crash has left beside it
    write_text(scratch.path + "/" + beside, "half a file");
    write_safetensors(path, declared, [&](std::size_t, const checkpoint::byte_sink& put) {
        put(std::as_bytes(std::span(two).first(1)));
        put({});
        put(std::as_bytes(std::span(two).last(1)));
    });
    CHECK(listing(scratch.path) == std::vector<std::string>{"x.safetensors"});
    CHECK(read_all<float>(safetensors_file(path), "w") == two);

    CHECK(refusal<backend_error>([&] { write_safetensors(scratch.path + "/none/x", entries); }) ==
          "cannot create '" + scratch.path + "/none/x.unfinished': No such file or directory");
}
