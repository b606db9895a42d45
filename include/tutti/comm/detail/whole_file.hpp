// whole_file: files that are seen whole or not at all, for the file store: created by one, written beside and renamed.
// Needs core/error. POSIX. Files get mode 0600, directories 0700.
#pragma once

#include <cerrno>        // what the file system answered
#include <cstddef>       // byte
#include <optional>      // files that are not there
#include <span>          // bytes
#include <string>        // paths
#include <string_view>   // verbs
#include <system_error>  // texts of errno
#include <vector>        // contents

#include <fcntl.h>     // open
#include <stdlib.h>    // mkostemp
#include <sys/stat.h>  // mkdir
#include <unistd.h>    // read, write, rename

#include <tutti/core/error.hpp>  // backend_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::comm::detail {

[[noreturn]] inline void refuse_file(std::string_view verb, const std::string& path, int code) {
    const std::string text = std::generic_category().message(code);
    error_context context;
    context.operation = "file_store";
    context.backend_code = code;
    context.backend_text = text;
    throw backend_error(formatted("file_store: cannot {} '{}': {}", verb, path, text), context);
}

/// Makes the directory; it may be there already.
inline void make_directory(const std::string& path) {
    if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) { refuse_file("create", path, errno); }
}

/// Creates an empty file that only one caller ever gets to create. Returns 0 or errno.
[[nodiscard]] inline int create_file(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (descriptor < 0) { return errno; }
    ::close(descriptor);
    return 0;
}

/// Replaces the file by one with these bytes.
inline void publish_file(const std::string& path, std::span<const std::byte> bytes) {
    std::string beside = path + ".XXXXXX";
    const int descriptor = ::mkostemp(beside.data(), O_CLOEXEC);
    if (descriptor < 0) { refuse_file("create", beside, errno); }
    int code = 0;
    for (std::size_t done = 0; done < bytes.size() && code == 0;) {
        const ssize_t n = ::write(descriptor, bytes.data() + done, bytes.size() - done);
        if (n >= 0) {
            done += static_cast<std::size_t>(n);
        } else if (errno != EINTR) {
            code = errno;
        }
    }
    if (::close(descriptor) != 0 && code == 0) { code = errno; }
    if (code == 0 && ::rename(beside.c_str(), path.c_str()) != 0) { code = errno; }
    if (code != 0) {
        ::unlink(beside.c_str());
        refuse_file("write", path, code);
    }
}

/// The bytes of the file, nothing when there is none.
[[nodiscard]] inline std::optional<std::vector<std::byte>> read_file(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        if (errno == ENOENT) { return std::nullopt; }
        refuse_file("open", path, errno);
    }
    std::vector<std::byte> bytes;
    std::byte block[4096];
    for (;;) {
        const ssize_t n = ::read(descriptor, block, sizeof(block));
        if (n > 0) { bytes.insert(bytes.end(), block, block + n); }
        if (n == 0 || (n < 0 && errno != EINTR)) {
            const int code = n == 0 ? 0 : errno;
            ::close(descriptor);
            if (code != 0) { refuse_file("read", path, code); }
            return bytes;
        }
    }
}

}  // namespace tutti::comm::detail
