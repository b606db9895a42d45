// GPT-2 tokens in llm.c's .bin format: a header of 256 int32 (magic number, version, token count), then uint16 tokens.
// Needs POSIX mmap. Files are mapped, not read: pages come when touched, and all ranks of a machine share them.
#pragma once

#include <algorithm>     // max, find_if
#include <bit>           // endian
#include <cerrno>        // why a file cannot be mapped
#include <cstddef>       // sizes
#include <cstdint>       // header
#include <cstring>       // memcpy
#include <memory>        // owned mapping
#include <string>        // names
#include <system_error>  // the system's reason

#include <fcntl.h>     // open
#include <sys/mman.h>  // mmap
#include <sys/stat.h>  // size
#include <unistd.h>    // close

#include <fmt/format.h>  // messages

#include "bad_input.hpp"
#include "parameters.hpp"

namespace transformer {

static_assert(std::endian::native == std::endian::little, "the files are little-endian, and are used as they are");

/// One file of tokens.
///
/// Semantics  values() stays valid while the object lives, also after a move. The file must not be shortened meanwhile.
/// Cost       nothing is read before it is used.
class token_file {
    struct unmap {
        std::size_t bytes;
        void operator()(void* mapping) const { ::munmap(mapping, bytes); }
    };
    std::string name_;  // "--option: 'path'", for messages
    std::unique_ptr<void, unmap> mapping_;
    tokens values_;

    [[noreturn]] void refuse(const std::string& fact) const { throw bad_input(fmt::format("{}: {}", name_, fact)); }
    [[noreturn]] void refuse_errno() const { refuse(std::error_code(errno, std::generic_category()).message()); }

public:
    static constexpr std::size_t header_bytes = 256 * sizeof(std::int32_t);
    static constexpr std::uint32_t magic = 20240520;
    static constexpr std::uint32_t version = 1;

    /// Errors  bad_input names `option`, the file and what is wrong with it.
    token_file(const char* option, const std::string& path)
        : name_(fmt::format("{}: '{}'", option, path)), mapping_(nullptr, unmap{0}) {
        const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not block
        if (descriptor < 0) { refuse_errno(); }
        struct closing {
            int descriptor;
            ~closing() { ::close(descriptor); }
        } const closed_at_the_end{descriptor};
        struct stat about {};
        if (::fstat(descriptor, &about) != 0) { refuse_errno(); }
        if (!S_ISREG(about.st_mode)) { refuse("is not a regular file"); }
        const auto bytes = static_cast<std::size_t>(about.st_size);
        if (bytes < header_bytes) { refuse(fmt::format("{} bytes are less than a header of {}", bytes, header_bytes)); }
        void* const mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
        if (mapped == MAP_FAILED) { refuse_errno(); }
        mapping_ = {mapped, unmap{bytes}};

        std::uint32_t header[3];
        std::memcpy(header, mapped, sizeof header);
        if (header[0] != magic) {
            refuse(fmt::format("magic number is {}, not {}: no GPT-2 tokens of llm.c", header[0], magic));
        }
        if (header[1] != version) { refuse(fmt::format("version is {}, not {}", header[1], version)); }
        // The count has 32 bits; of a longer file it holds the lower ones.
        const std::size_t body = bytes - header_bytes, count = body / sizeof(std::uint16_t);
        if (body % sizeof(std::uint16_t) != 0 || header[2] != static_cast<std::uint32_t>(count)) {
            refuse(fmt::format("the header counts {} tokens, but {} bytes follow it", header[2], body));
        }
        values_ = {reinterpret_cast<const std::uint16_t*>(static_cast<const std::byte*>(mapped) + header_bytes), count};
    }

    [[nodiscard]] tokens values() const { return values_; }

    /// Errors  bad_input names the first token that is none of the vocabulary.
    /// Cost    reads the whole file once.
    void require_below(int vocabulary) const {
        constexpr std::size_t block = 1 << 15;
        for (std::size_t first = 0; first < values_.size(); first += block) {
            const tokens part = values_.subspan(first, std::min(block, values_.size() - first));
            std::uint16_t largest = 0;
            for (const std::uint16_t t : part) { largest = std::max(largest, t); }  // no early end: it vectorizes
            if (largest < vocabulary) { continue; }
            const auto found = std::find_if(part.begin(), part.end(), [&](int t) { return t >= vocabulary; });
            refuse(fmt::format("token number {} is {}, not below the vocabulary of {}",
                               first + static_cast<std::size_t>(found - part.begin()), *found, vocabulary));
        }
    }
};

}  // namespace transformer
