// encoder, decoder: the little-endian numbers and texts of a checkpoint's headers.
// Needs checkpoint/error. A decoder never reads behind its bytes and trusts no length it finds among them.
#pragma once

#include <bit>          // endian
#include <concepts>     // unsigned_integral
#include <cstddef>      // byte
#include <cstdint>      // numbers
#include <span>         // bytes
#include <string>       // texts
#include <string_view>  // texts
#include <vector>       // bytes

#include <tutti/checkpoint/error.hpp>  // damaged_error
#include <tutti/core/text.hpp>         // formatted

namespace tutti::checkpoint::detail {

static_assert(std::endian::native == std::endian::little, "elements are little-endian in files and used as they are");

class encoder {
    std::vector<std::byte> bytes_;

public:
    template <std::unsigned_integral T> encoder& number(T value) {
        for (std::size_t i = 0; i < sizeof(T); ++i) {
            bytes_.push_back(static_cast<std::byte>(static_cast<std::uint64_t>(value) >> (8 * i)));
        }
        return *this;
    }
    encoder& text(std::string_view t) { return block(std::as_bytes(std::span(t.data(), t.size()))); }
    encoder& block(std::span<const std::byte> b) {
        bytes_.insert(bytes_.end(), b.begin(), b.end());
        return *this;
    }
    /// Appends zeros until the size is a multiple of `unit`.
    encoder& pad(std::size_t unit) {
        bytes_.resize((bytes_.size() + unit - 1) / unit * unit);
        return *this;
    }
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }
    [[nodiscard]] std::vector<std::byte> take() noexcept { return std::move(bytes_); }
};

/// Errors  damaged_error, naming `what`, where the bytes end too early.
class decoder {
    std::span<const std::byte> left_;
    std::string_view what_;

public:
    decoder(std::span<const std::byte> bytes, std::string_view what) noexcept : left_(bytes), what_(what) {}

    [[nodiscard]] std::size_t left() const noexcept { return left_.size(); }
    template <std::unsigned_integral T> [[nodiscard]] T number() {
        std::uint64_t value = 0;
        const std::span<const std::byte> b = block(sizeof(T));
        for (std::size_t i = 0; i < sizeof(T); ++i) { value |= static_cast<std::uint64_t>(b[i]) << (8 * i); }
        return static_cast<T>(value);
    }
    [[nodiscard]] std::span<const std::byte> block(std::uint64_t count) {
        if (count > left_.size()) {
            throw damaged_error(
                formatted("{} ends too early: {} bytes are left where {} belong", what_, left_.size(), count));
        }
        const auto taken = left_.first(static_cast<std::size_t>(count));
        left_ = left_.subspan(taken.size());
        return taken;
    }
    [[nodiscard]] std::string text(std::uint64_t count) {
        const auto b = block(count);
        return {reinterpret_cast<const char*>(b.data()), b.size()};
    }
};

}  // namespace tutti::checkpoint::detail
