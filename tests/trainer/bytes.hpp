// Files written byte by byte, for tests of what reads them.
// Needs the standard library; the trainer's writers stay out of it.
#pragma once

#include <cstdint>     // integers of the formats
#include <cstring>     // memcpy
#include <filesystem>  // paths
#include <fstream>     // files
#include <string>      // bytes
#include <vector>      // tokens

namespace trainer_test {

/// The bytes of values as they lie in memory, which the formats take on little-endian machines.
template <class T> [[nodiscard]] std::string bytes_of(const std::vector<T>& values) {
    std::string bytes(values.size() * sizeof(T), '\0');
    if (!values.empty()) { std::memcpy(bytes.data(), values.data(), bytes.size()); }
    return bytes;
}

inline void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

/// A file of tokens in llm.c's format; its first three words may be wrong.
[[nodiscard]] inline std::string token_bytes(const std::vector<std::uint16_t>& tokens, std::uint32_t count,
                                             std::uint32_t magic = 20240520, std::uint32_t version = 1) {
    std::vector<std::uint32_t> header(256);
    header[0] = magic;
    header[1] = version;
    header[2] = count;
    return bytes_of(header) + bytes_of(tokens);
}
[[nodiscard]] inline std::string token_bytes(const std::vector<std::uint16_t>& tokens) {
    return token_bytes(tokens, static_cast<std::uint32_t>(tokens.size()));
}

/// A safetensors file of that header and those elements.
[[nodiscard]] inline std::string safetensors_bytes(const std::string& header, const std::string& elements) {
    return bytes_of(std::vector<std::uint64_t>{header.size()}) + header + elements;
}

}  // namespace trainer_test
