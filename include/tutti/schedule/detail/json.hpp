// append_json_string: one string as JSON, whatever bytes it holds.
// Needs nothing. Invalid UTF-8 becomes U+FFFD, so that every reader accepts the document.
#pragma once

#include <cstddef>      // size_t
#include <string>       // output
#include <string_view>  // input

namespace tutti::schedule::detail {

/// Bytes of the UTF-8 sequence at the front of `text`, or 0 when there is none (RFC 3629: no overlong forms, no
/// surrogates, nothing above U+10FFFF).
[[nodiscard]] inline std::size_t utf8_length(std::string_view text) noexcept {
    const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    const auto continues = [&](std::size_t i) { return (byte(i) & 0xc0u) == 0x80u; };
    const unsigned first = byte(0);
    if (first < 0x80) { return 1; }
    if (first >= 0xc2 && first <= 0xdf) { return continues(1) ? 2 : 0; }
    if (first >= 0xe0 && first <= 0xef) {
        const bool overlong = first == 0xe0 && byte(1) < 0xa0;
        const bool surrogate = first == 0xed && byte(1) > 0x9f;
        return continues(1) && continues(2) && !overlong && !surrogate ? 3 : 0;
    }
    if (first >= 0xf0 && first <= 0xf4) {
        const bool overlong = first == 0xf0 && byte(1) < 0x90;
        const bool beyond = first == 0xf4 && byte(1) > 0x8f;
        return continues(1) && continues(2) && continues(3) && !overlong && !beyond ? 4 : 0;
    }
    return 0;
}

inline void append_json_string(std::string& out, std::string_view text) {
    constexpr std::string_view hex = "0123456789abcdef";
    out += '"';
    while (!text.empty()) {
        const auto c = static_cast<unsigned char>(text.front());
        std::size_t length = 1;
        if (c == '"' || c == '\\') {
            (out += '\\') += text.front();
        } else if (c < 0x20) {
            ((out += "\\u00") += hex[c >> 4]) += hex[c & 15u];
        } else if (length = utf8_length(text); length != 0) {
            out += text.substr(0, length);
        } else {
            out += "\\ufffd";
            length = 1;
        }
        text.remove_prefix(length);
    }
    out += '"';
}

}  // namespace tutti::schedule::detail
