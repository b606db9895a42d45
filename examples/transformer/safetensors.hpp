// safetensors: named tensors in one file, read and written one after the other through a buffer of fixed size.
// Needs nlohmann-json. The format: 8 bytes of header length (little-endian), a JSON object with the type, shape and
// place of each tensor, the tensors' little-endian elements (https://github.com/huggingface/safetensors).
#pragma once

#include <algorithm>     // sort, min
#include <bit>           // endian
#include <cerrno>        // why a file cannot be opened
#include <cstddef>       // sizes
#include <cstdint>       // the format's integers
#include <filesystem>    // file sizes
#include <fstream>       // files
#include <functional>    // multiplies
#include <map>           // tensors by name
#include <numeric>       // accumulate
#include <set>           // names seen
#include <span>          // elements
#include <stdexcept>     // runtime_error
#include <string>        // names
#include <string_view>   // types
#include <system_error>  // why a file cannot be read
#include <utility>       // pair
#include <vector>        // shapes

#include <fmt/format.h>            // messages
#include <nlohmann/json.hpp>       // header
#include <tutti/core/element.hpp>  // float16, bfloat16

#include "bad_input.hpp"
#include "whole_file.hpp"

namespace transformer {

static_assert(std::endian::native == std::endian::little, "the files are little-endian, and are used as they are");

/// Elements converted at a time: a buffer that stays in cache.
inline constexpr std::size_t safetensors_part = 1 << 16;

/// Text of a file as messages show it: printable and not too long, whoever wrote the file.
[[nodiscard]] inline std::string shown(std::string_view text) {
    std::string out(text.substr(0, 100));
    std::replace_if(
        out.begin(), out.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
    return text.size() > 100 ? out + "..." : out;
}

/// "[1024, 768]"
template <class Integer> [[nodiscard]] std::string shape_text(const std::vector<Integer>& shape) {
    std::string text;
    for (const auto extent : shape) { text += fmt::format("{}{}", text.empty() ? "" : ", ", extent); }
    return shown("[" + text + "]");
}

/// A file of tensors: its checked header, and its tensors on demand.
class safetensors_file {
public:
    struct tensor {
        std::string type;  // "F32", "BF16", ...
        std::vector<std::uint64_t> shape;
        std::uint64_t first, last;  // its bytes in the file: [first, last)
    };

    /// Errors  bad_input names `option`, the file and what is wrong with it, down to the tensor: every element of the
    ///         file must belong to exactly one tensor. Allocates no more than the header's length times a small factor.
    safetensors_file(const char* option, const std::string& path) : name_(fmt::format("{}: '{}'", option, path)) {
        std::error_code failed;
        const bool regular = std::filesystem::is_regular_file(path, failed);
        if (failed) { refuse(failed.message()); }
        if (!regular) { refuse("is not a regular file"); }
        const std::uint64_t bytes = std::filesystem::file_size(path, failed);
        if (!failed) { in_.open(path, std::ios::binary); }
        if (failed || !in_) { refuse((failed ? failed : std::error_code(errno, std::generic_category())).message()); }
        std::uint64_t length = 0;
        if (bytes < sizeof length) { refuse(fmt::format("{} bytes are too few for a header", bytes)); }
        in_.read(reinterpret_cast<char*>(&length), sizeof length);
        if (length > std::min(longest_header, bytes - sizeof length)) {
            refuse(fmt::format("a header of {} bytes is more than the file holds ({}) or the format allows ({})",
                               length, bytes - sizeof length, longest_header));
        }
        std::string header(length, '\0');
        in_.read(header.data(), static_cast<std::streamsize>(length));
        if (!in_) { refuse("cannot be read"); }
        take_entries(parsed(header), sizeof length + length, bytes);
        require_full(sizeof length + length, bytes);
    }

    [[nodiscard]] const std::map<std::string, tensor>& tensors() const { return tensors_; }

    /// Elements [first, first + out.size()) of a tensor of type F32, F16 or BF16, as floats. That there are so many is
    /// the caller's promise.
    /// Errors  runtime_error when the file has become shorter; bad_input for another type.
    void read(const std::string& name, std::uint64_t first, std::span<float> out) {
        const tensor& t = tensors_.at(name);
        if (t.type == "F32") {
            read_as<float>(t, first, out);
        } else if (t.type == "F16") {
            read_as<tutti::float16>(t, first, out);
        } else if (t.type == "BF16") {
            read_as<tutti::bfloat16>(t, first, out);
        } else {
            refuse(fmt::format("tensor '{}' has type {}, not F32, F16 or BF16", name, t.type));
        }
    }

    [[noreturn]] void refuse(const std::string& fact) const { throw bad_input(fmt::format("{}: {}", name_, fact)); }

private:
    using json = nlohmann::json;
    static constexpr std::uint64_t longest_header = 100'000'000;  // the reference implementation's limit

    std::string name_;  // "--option: 'path'", for messages
    std::ifstream in_;
    std::map<std::string, tensor> tensors_;

    [[nodiscard]] json parsed(const std::string& header) const {
        if (!header.starts_with('{')) { refuse("the header is not a JSON object"); }
        std::set<std::string> names;
        // A header has three levels: the list, a tensor, its shape. More would cost memory before it could be refused.
        const auto watch = [&](int depth, json::parse_event_t event, json& value) {
            if (event == json::parse_event_t::key && depth == 1 && !names.insert(value.get<std::string>()).second) {
                refuse(fmt::format("tensor '{}' is there twice", shown(value.get<std::string>())));
            }
            const bool opens = event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
            if (opens && depth > 2) { refuse("the header is nested too deep"); }
            return true;
        };
        try {
            return json::parse(header, watch);
        } catch (const json::exception& e) { refuse(fmt::format("the header is not valid JSON: {}", shown(e.what()))); }
    }

    /// 0 for types that are none.
    [[nodiscard]] static std::uint64_t size_of_type(std::string_view type) {
        static constexpr std::pair<std::string_view, std::uint64_t> sizes[] = {
            {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"U16", 2}, {"I16", 2}, {"F16", 2},
            {"BF16", 2}, {"U32", 4}, {"I32", 4}, {"F32", 4},     {"U64", 8},     {"I64", 8}, {"F64", 8}};
        for (const auto& [name, size] : sizes) {
            if (name == type) { return size; }
        }
        return 0;
    }

    void take_entries(const json& header, std::uint64_t data, std::uint64_t end) {
        const auto integers = [](const json& list) {
            return list.is_array() && std::all_of(list.begin(), list.end(), [](const json& x) {
                       return x.is_number_unsigned();  // neither negative, nor with a fraction, nor beyond 64 bits
                   });
        };
        for (const auto& [name, entry] : header.items()) {
            if (name == "__metadata__") { continue; }
            if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
                !entry.contains("shape") || !integers(entry["shape"]) || !entry.contains("data_offsets") ||
                !integers(entry["data_offsets"]) || entry["data_offsets"].size() != 2) {
                refuse(fmt::format("tensor '{}' lacks a proper dtype, shape or data_offsets", shown(name)));
            }
            const json& place = entry["data_offsets"];
            tensor t{entry["dtype"].get<std::string>(), entry["shape"].get<std::vector<std::uint64_t>>(),
                     place[0].get<std::uint64_t>(), place[1].get<std::uint64_t>()};
            std::uint64_t needed = size_of_type(t.type);
            if (needed == 0) { refuse(fmt::format("tensor '{}' has unknown type '{}'", shown(name), shown(t.type))); }
            bool overflows = false;
            for (const std::uint64_t extent : t.shape) {
                overflows = overflows || __builtin_mul_overflow(needed, extent, &needed);
            }
            if (t.first > t.last || t.last > end - data) {
                refuse(fmt::format("tensor '{}' has bytes {} to {} of {}", shown(name), t.first, t.last, end - data));
            }
            if (overflows || t.last - t.first != needed) {
                refuse(fmt::format("tensor '{}' of type {} and shape {} cannot have {} bytes", shown(name), t.type,
                                   shape_text(t.shape), t.last - t.first));
            }
            t.first += data;
            t.last += data;
            tensors_.emplace(name, std::move(t));
        }
    }

    /// Tensors lie one behind the other, from the header's end to the file's.
    void require_full(std::uint64_t data, std::uint64_t end) const {
        std::vector<const std::pair<const std::string, tensor>*> order;
        for (const auto& entry : tensors_) { order.push_back(&entry); }
        std::sort(order.begin(), order.end(), [](auto a, auto b) {
            return std::pair(a->second.first, a->second.last) < std::pair(b->second.first, b->second.last);
        });
        for (const auto* const entry : order) {
            const tensor& t = entry->second;
            if (t.first < data) { refuse(fmt::format("tensor '{}' overlaps the one before it", shown(entry->first))); }
            if (t.first > data) {
                refuse(fmt::format("{} bytes before tensor '{}' belong to none", t.first - data, shown(entry->first)));
            }
            data = t.last;
        }
        if (data != end) { refuse(fmt::format("{} bytes at the end belong to no tensor", end - data)); }
    }

    template <class Stored> void read_as(const tensor& t, std::uint64_t first, std::span<float> out) {
        std::vector<Stored> stored(out.size());
        in_.seekg(static_cast<std::streamoff>(t.first + first * sizeof(Stored)));
        in_.read(reinterpret_cast<char*>(stored.data()), static_cast<std::streamsize>(stored.size() * sizeof(Stored)));
        if (!in_) { throw std::runtime_error(fmt::format("{}: has become shorter", name_)); }
        std::copy(stored.begin(), stored.end(), out.begin());
    }
};

/// Writes tensors as F32, whole or not at all. `list` names them and gives their shapes; values(i) is asked once for
/// each, in that order, and returns its elements as a contiguous range on the host.
/// Errors  runtime_error with the system's reason.
template <class List, class Values> void write_safetensors(const std::string& path, const List& list, Values values) {
    nlohmann::ordered_json header{{"__metadata__", {{"format", "pt"}}}};
    std::uint64_t end = 0;
    for (const auto& t : list) {
        const std::uint64_t first = end;
        end += sizeof(float) * std::accumulate(t.shape.begin(), t.shape.end(), std::uint64_t{1}, std::multiplies<>());
        header[t.name] = {
            {"dtype", "F32"}, {"shape", t.shape}, {"data_offsets", nlohmann::ordered_json::array({first, end})}};
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // so that elements are aligned for who maps the file
    write_whole(path, [&](std::ofstream& out) {
        const std::uint64_t length = text.size();
        out.write(reinterpret_cast<const char*>(&length), sizeof length);
        out << text;
        std::vector<float> floats;
        for (std::size_t i = 0; i < list.size(); ++i) {
            const auto elements = values(i);
            const std::span all(elements.data(), elements.size());
            for (std::size_t first = 0; first < all.size(); first += safetensors_part) {
                const auto part = all.subspan(first, std::min(all.size() - first, safetensors_part));
                floats.resize(part.size());
                std::transform(part.begin(), part.end(), floats.begin(), [](auto x) { return static_cast<float>(x); });
                out.write(reinterpret_cast<const char*>(floats.data()),
                          static_cast<std::streamsize>(floats.size() * sizeof(float)));
            }
        }
    });
}

}  // namespace transformer
