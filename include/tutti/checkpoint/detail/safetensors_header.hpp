// safetensors_header: what stands in front of the tensors of a safetensors file, read and written.
// Needs nlohmann-json. 8 bytes of length (little-endian), a JSON object with the type, shape and place of each tensor
// and, under "__metadata__", texts; then the tensors without gaps (https://github.com/huggingface/safetensors).
#pragma once

#include <algorithm>    // sort, find, min, max
#include <array>        // offsets
#include <cstddef>      // size_t
#include <cstdint>      // numbers of the format
#include <iterator>     // begin, end
#include <map>          // tensors by name
#include <optional>     // types that are no elements
#include <string>       // names
#include <string_view>  // types
#include <utility>      // move, pair, exchange
#include <vector>       // shapes

#include <nlohmann/json.hpp>  // parser, escapes

#include <tutti/checkpoint/detail/codec.hpp>   // encoder
#include <tutti/checkpoint/detail/layout.hpp>  // shape_text, most_dimensions
#include <tutti/checkpoint/error.hpp>          // damaged_error
#include <tutti/core/element.hpp>              // dtype
#include <tutti/core/error.hpp>                // usage_error
#include <tutti/core/text.hpp>                 // formatted

namespace tutti::checkpoint {

/// A tensor of a safetensors file.
struct safetensors_tensor {
    std::string_view type;         ///< as the format names it: "F32", "BF16", "F8_E4M3", ...
    std::optional<dtype> element;  ///< that type; nothing for those that are no elements of this library
    std::vector<std::uint64_t> shape;
    std::uint64_t elements = 0;
    std::uint64_t first = 0, last = 0;  ///< its bytes behind the header: [first, last)
};

namespace detail {

using safetensors_tensors = std::map<std::string, safetensors_tensor, std::less<>>;
using safetensors_texts = std::map<std::string, std::string, std::less<>>;

struct safetensors_header {
    safetensors_tensors tensors;
    safetensors_texts metadata;
};

inline constexpr std::uint64_t longest_safetensors_header = 100'000'000;  // the reference implementation's limit
inline constexpr std::string_view safetensors_metadata = "__metadata__";

struct safetensors_type {
    std::string_view name;
    unsigned bits;
    std::optional<dtype> element{};
};
inline constexpr safetensors_type safetensors_types[] = {{"F64", 64, dtype::float64},
                                                         {"F32", 32, dtype::float32},
                                                         {"F16", 16, dtype::float16},
                                                         {"BF16", 16, dtype::bfloat16},
                                                         {"I64", 64, dtype::int64},
                                                         {"I32", 32, dtype::int32},
                                                         {"I16", 16, dtype::int16},
                                                         {"I8", 8, dtype::int8},
                                                         {"U64", 64, dtype::uint64},
                                                         {"U32", 32, dtype::uint32},
                                                         {"U16", 16, dtype::uint16},
                                                         {"U8", 8, dtype::uint8},
                                                         {"BOOL", 8},
                                                         {"C64", 64},
                                                         {"F8_E4M3", 8},
                                                         {"F8_E5M2", 8},
                                                         {"F8_E8M0", 8},
                                                         {"F8_E4M3FNUZ", 8},
                                                         {"F8_E5M2FNUZ", 8},
                                                         {"F6_E2M3", 6},
                                                         {"F6_E3M2", 6},
                                                         {"F4", 4}};

/// Elements of a shape and the bytes that they take; nothing where these are more than there can be, or not whole.
[[nodiscard]] inline std::optional<std::pair<std::uint64_t, std::uint64_t>> extent_in(
    const safetensors_type& type, const std::vector<std::uint64_t>& shape) {
    std::uint64_t elements = 1;
    bool overflows = false;
    for (const std::uint64_t extent : shape) {
        if (extent == 0) { return std::pair{std::uint64_t{0}, std::uint64_t{0}}; }
        overflows = overflows || __builtin_mul_overflow(elements, extent, &elements) || elements > most_bytes;
    }
    std::uint64_t bits = 0;
    if (overflows || __builtin_mul_overflow(elements, type.bits, &bits) || bits % 8 != 0) { return std::nullopt; }
    return std::pair{elements, bits / 8};
}

/// Takes a header event by event, so that only what belongs to one is ever kept, however deep or long the rest is.
/// (nlohmann-json's SAX interface: the names and signatures are its.)
class safetensors_reader {
    using json = nlohmann::json;
    enum class field : std::uint8_t { dtype, shape, data_offsets };

    safetensors_header& out_;
    std::uint64_t data_;  // bytes behind the header
    int depth_ = 0;       // 1: in the header, 2: in a tensor or the metadata, 3: in an array of a tensor
    bool in_metadata_ = false;
    bool had_metadata_ = false;
    std::string name_;
    std::string key_;  // in the metadata
    const safetensors_type* type_ = nullptr;
    safetensors_tensor tensor_;
    std::array<std::uint64_t, 2> place_{};
    std::size_t places_ = 0;
    field field_ = field::dtype;
    std::array<bool, 3> had_{};  // by field

    [[noreturn]] void improper() const {
        if (depth_ == 0) { throw damaged_error("the header is not a JSON object"); }
        if (in_metadata_) { throw damaged_error(formatted("'{}' has what is no text", safetensors_metadata)); }
        refuse("lacks a proper dtype, shape or data_offsets");
    }
    [[noreturn]] void refuse(const std::string& fact) const {
        throw damaged_error(formatted("tensor '{}' {}", shown(name_), fact));
    }
    void begin_field(std::string_view key) {
        constexpr std::string_view names[] = {"dtype", "shape", "data_offsets"};
        const auto* const at = std::find(std::begin(names), std::end(names), key);
        if (at == std::end(names)) { refuse(formatted("has an unknown field '{}'", shown(key))); }
        const auto i = static_cast<std::size_t>(at - std::begin(names));
        if (std::exchange(had_[i], true)) { refuse(formatted("has two fields '{}'", key)); }
        field_ = static_cast<field>(i);
    }
    void take_tensor() {
        if (!had_[0] || !had_[1] || places_ != 2) { improper(); }
        tensor_.type = type_->name;
        tensor_.element = type_->element;
        tensor_.first = place_[0];
        tensor_.last = place_[1];
        if (tensor_.first > tensor_.last || tensor_.last > data_) {
            refuse(formatted("has bytes {} to {} of {}", tensor_.first, tensor_.last, data_));
        }
        const auto extent = extent_in(*type_, tensor_.shape);
        if (!extent || extent->second != tensor_.last - tensor_.first) {
            refuse(formatted("of type {} and shape {} cannot have {} bytes", type_->name, shape_text(tensor_.shape),
                             tensor_.last - tensor_.first));
        }
        tensor_.elements = extent->first;
        out_.tensors.emplace(std::move(name_), std::move(tensor_));
    }

public:
    safetensors_reader(safetensors_header& out, std::uint64_t data_bytes) noexcept : out_(out), data_(data_bytes) {}

    bool null() { improper(); }
    bool boolean(bool) { improper(); }
    bool number_integer(json::number_integer_t) { improper(); }                  // negative ones
    bool number_float(json::number_float_t, const std::string&) { improper(); }  // and those beyond 64 bits
    bool binary(json::binary_t&) { improper(); }
    bool number_unsigned(json::number_unsigned_t value) {
        if (depth_ != 3) { improper(); }
        if (field_ == field::data_offsets) {
            if (places_ == 2) { improper(); }
            place_[places_++] = value;
        } else {
            if (tensor_.shape.size() == most_dimensions) {
                refuse(formatted("has more than {} dimensions", most_dimensions));
            }
            tensor_.shape.push_back(value);
        }
        return true;
    }
    bool string(std::string& text) {
        if (depth_ != 2) { improper(); }
        if (in_metadata_) {
            out_.metadata.emplace(std::move(key_), std::move(text));
            return true;
        }
        if (field_ != field::dtype) { improper(); }
        type_ = std::find_if(std::begin(safetensors_types), std::end(safetensors_types),
                             [&](const safetensors_type& t) { return t.name == text; });
        if (type_ == std::end(safetensors_types)) { refuse(formatted("has unknown type '{}'", shown(text))); }
        return true;
    }
    bool start_object(std::size_t) {
        if (depth_ > 1) { improper(); }
        if (++depth_ == 2 && !in_metadata_) {
            tensor_ = {};
            places_ = 0;
            had_ = {};
        }
        return true;
    }
    bool key(std::string& text) {
        if (depth_ == 1) {
            in_metadata_ = text == safetensors_metadata;
            const bool twice = in_metadata_ ? std::exchange(had_metadata_, true) : out_.tensors.contains(text);
            if (twice) { throw damaged_error(formatted("'{}' is there twice", shown(text))); }
            name_ = std::move(text);
        } else if (in_metadata_) {
            if (out_.metadata.contains(text)) {
                throw damaged_error(formatted("the metadata has '{}' twice", shown(text)));
            }
            key_ = std::move(text);
        } else {
            begin_field(text);
        }
        return true;
    }
    bool end_object() {
        if (depth_-- == 2 && !in_metadata_) { take_tensor(); }
        return true;
    }
    bool start_array(std::size_t) {
        if (depth_ != 2 || in_metadata_ || field_ == field::dtype) { improper(); }
        depth_ = 3;
        return true;
    }
    bool end_array() {
        depth_ = 2;
        return true;
    }
    [[noreturn]] bool parse_error(std::size_t position, const std::string&, const json::exception& e) {
        const std::string_view what = e.what();  // "[json.exception....] parse error at line 1, column 2: the reason"
        std::size_t reason = what.find(": ");
        if (reason == what.npos) { reason = what.find("] "); }
        throw damaged_error(formatted("the header is not valid JSON at byte {}: {}", position,
                                      shown(what.substr(reason == what.npos ? 0 : reason + 2))));
    }
};

/// Tensors lie one behind the other and fill what is behind the header.
inline void demand_full(const safetensors_tensors& tensors, std::uint64_t data_bytes) {
    std::vector<const safetensors_tensors::value_type*> order;
    for (const auto& entry : tensors) { order.push_back(&entry); }
    std::sort(order.begin(), order.end(), [](auto a, auto b) {
        return std::pair(a->second.first, a->second.last) < std::pair(b->second.first, b->second.last);
    });
    std::uint64_t end = 0;
    for (const auto* const entry : order) {
        const std::uint64_t first = entry->second.first;
        if (first < end) {
            throw damaged_error(formatted("tensor '{}' overlaps the one before it", shown(entry->first)));
        }
        if (first > end) {
            throw damaged_error(
                formatted("{} bytes before tensor '{}' belong to none", first - end, shown(entry->first)));
        }
        end = entry->second.last;
    }
    if (end != data_bytes) {
        throw damaged_error(formatted("{} bytes at the end belong to no tensor", data_bytes - end));
    }
}

inline constexpr std::size_t most_between_strings = 2048;  // 64 dimensions of 20 digits, and two offsets

/// Refuses what a parser would keep, grow and quote in messages before it is known to be of use: strings of more than a
/// quarter of the file, and more than a few numbers, brackets and blanks between two strings.
/// Errors  damaged_error. Whatever else is wrong with the JSON is for the parser to say.
inline void demand_short_parts(std::string_view text, std::uint64_t file_bytes) {
    const std::uint64_t longest = std::max(file_bytes / 4, std::uint64_t{1} << 14);
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t quote = std::min(text.find('"', at), text.size());
        if (quote - at > most_between_strings) {
            throw damaged_error(formatted("the header has {} bytes without a string from byte {} on, more than {}",
                                          quote - at, at, most_between_strings));
        }
        if (quote == text.size()) { return; }
        std::size_t end = quote + 1;
        while (end < text.size() && text[end] != '"') { end += text[end] == '\\' ? 2u : 1u; }
        const std::size_t size = std::min(end, text.size()) - quote - 1;
        if (size > longest) {
            throw damaged_error(
                formatted("the header has a string of {} bytes at byte {}, more than {}, of a file of {}", size, quote,
                          longest, file_bytes));
        }
        at = end + 1;
    }
}

/// The header whose JSON this is, with so many bytes behind it.
/// Memory  a few times the text, whatever it says; no part of it larger than the file, or than 64 KiB.
/// Errors  damaged_error saying what is wrong, down to the tensor.
[[nodiscard]] inline safetensors_header decoded_safetensors(std::string_view text, std::uint64_t data_bytes) {
    const std::uint64_t file_bytes = sizeof(std::uint64_t) + text.size() + data_bytes;
    text = text.substr(0, text.find_last_not_of(' ') + 1);  // what fills it up
    if (!text.starts_with('{')) { throw damaged_error("the header is not a JSON object"); }
    if (const std::size_t zero = text.find('\0'); zero != text.npos) {  // the parser would take it for the end
        throw damaged_error(formatted("the header is not valid JSON at byte {}: it is zero", zero + 1));
    }
    demand_short_parts(text, file_bytes);
    safetensors_header header;
    safetensors_reader reader(header, data_bytes);
    static_cast<void>(nlohmann::json::sax_parse(text.begin(), text.end(), &reader));
    demand_full(header.tensors, data_bytes);
    return header;
}

/// A JSON string. Errors  usage_error when the text is not UTF-8.
[[nodiscard]] inline std::string json_text(std::string_view text) {
    try {
        return nlohmann::json(text).dump();
    } catch (const nlohmann::json::exception&) { throw usage_error(formatted("'{}' is not UTF-8", shown(text))); }
}

/// The length and the JSON, filled up with blanks so that tensors start at a multiple of 8.
/// Errors  usage_error: a name is the metadata's, or some text is not UTF-8.
[[nodiscard]] inline std::string encoded(const safetensors_header& header) {
    std::string json;
    const auto add = [&json](std::string_view name, std::string_view value) {
        json += formatted("{}{}:{}", json.empty() ? "" : ",", json_text(name), value);
    };
    if (!header.metadata.empty()) {
        std::string texts;
        for (const auto& [key, text] : header.metadata) {
            texts += formatted("{}{}:{}", texts.empty() ? "" : ",", json_text(key), json_text(text));
        }
        add(safetensors_metadata, "{" + texts + "}");
    }
    for (const auto& [name, t] : header.tensors) {
        std::string shape;
        for (const std::uint64_t extent : t.shape) { shape += formatted("{}{}", shape.empty() ? "" : ",", extent); }
        add(name,
            formatted("{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", t.type, shape, t.first, t.last));
    }
    json = "{" + json + "}";
    json.resize((json.size() + 7) / 8 * 8, ' ');
    encoder out;
    out.number(std::uint64_t{json.size()}).text(json);
    const auto bytes = out.bytes();
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace detail
}  // namespace tutti::checkpoint
