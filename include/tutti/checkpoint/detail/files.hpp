// files: what a checkpoint does to a file system, one operation at a time, and how its files are read.
// Needs core/error. POSIX. Nothing here is durable before it has been synchronized, a name not before its folder has.
#pragma once

#include <algorithm>     // min
#include <cerrno>        // what the file system answered
#include <cstddef>       // byte
#include <cstdint>       // sizes
#include <functional>    // hook
#include <optional>      // files that are not there
#include <span>          // bytes
#include <string>        // paths
#include <string_view>   // verbs
#include <system_error>  // texts of errno
#include <utility>       // exchange
#include <vector>        // names

#include <dirent.h>    // opendir
#include <fcntl.h>     // open
#include <sys/file.h>  // flock
#include <sys/stat.h>  // mkdir, fstat
#include <unistd.h>    // write, fsync, pread, access

#include <tutti/checkpoint/error.hpp>  // damaged_error
#include <tutti/core/error.hpp>        // backend_error
#include <tutti/core/text.hpp>         // formatted

namespace tutti::checkpoint {

/// Is asked before each operation that changes a file system: "create", "write", "synchronize", "rename", "remove",
/// with the path; anything but 0 is the errno with which the operation then fails. Called on lanes.
using file_hook = std::function<int(std::string_view operation, const std::string& path)>;

namespace detail {

/// Behind the name of what is being written, or was when somebody crashed.
inline constexpr std::string_view unfinished = ".unfinished";

[[noreturn]] inline void refuse_file(std::string_view verb, const std::string& path, int code) {
    const std::string text = std::generic_category().message(code);
    error_context context;
    context.operation = "checkpoint";
    context.backend_code = code;
    context.backend_text = text;
    throw backend_error(formatted("cannot {} '{}': {}", verb, path, text), context);
}

/// The folder that holds a path's name. Slashes behind a name say nothing.
[[nodiscard]] inline std::string parent_of(std::string_view path) {
    const auto name_end = [](std::string_view p) {
        while (p.size() > 1 && p.ends_with('/')) { p.remove_suffix(1); }
        return p;
    };
    path = name_end(path);
    const std::size_t slash = path.find_last_of('/');
    return slash == std::string_view::npos ? "." : std::string(name_end(path.substr(0, slash + 1)));
}

/// A call that gives -1 and an errno, again as long as signals interrupt it.
template <class Call> int uninterrupted(Call call) {
    int result = call();
    while (result < 0 && errno == EINTR) { result = call(); }
    return result;
}

/// A descriptor that closes itself.
class descriptor {
    int value_ = -1;

public:
    descriptor() = default;
    explicit descriptor(int value) noexcept : value_(value) {}
    descriptor(descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
    descriptor& operator=(descriptor&& other) noexcept {
        if (this != &other) {
            static_cast<void>(close());
            value_ = std::exchange(other.value_, -1);
        }
        return *this;
    }
    ~descriptor() { static_cast<void>(close()); }
    [[nodiscard]] int value() const noexcept { return value_; }
    /// 0 or errno. What a signal has interrupted is closed all the same, and may be somebody else's by now.
    int close() noexcept {
        const int closing = std::exchange(value_, -1);
        return closing < 0 || ::close(closing) == 0 || errno == EINTR ? 0 : errno;
    }
};

/// A descriptor of an open file, or of nothing and errno.
[[nodiscard]] inline descriptor opened(const std::string& path, int flags, mode_t mode = 0) {
    return descriptor(uninterrupted([&] { return ::open(path.c_str(), flags | O_CLOEXEC, mode); }));
}

/// Changes a file system. Errors  backend_error with errno.
class files {
    file_hook hook_;

    void ask(std::string_view verb, const std::string& path) const {
        const int code = hook_ ? hook_(verb, path) : 0;
        if (code != 0) { refuse_file(verb, path, code); }
    }
    static void synchronize(const descriptor& file, const std::string& path) {
        if (uninterrupted([&] { return ::fsync(file.value()); }) != 0) { refuse_file("synchronize", path, errno); }
    }

public:
    static constexpr std::size_t write_bytes = std::size_t{16} << 20;  // of one call: hooks and signals come between

    files() = default;
    explicit files(file_hook hook) : hook_(std::move(hook)) {}

    /// False when it is there already.
    bool make_directory(const std::string& path) const {
        ask("create", path);
        if (::mkdir(path.c_str(), 0777) == 0) { return true; }
        if (errno != EEXIST) { refuse_file("create", path, errno); }
        return false;
    }
    /// A new file; it must not be there.
    [[nodiscard]] descriptor create(const std::string& path) const {
        ask("create", path);
        descriptor made = opened(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0666);
        if (made.value() < 0) { refuse_file("create", path, errno); }
        return made;
    }
    void write(const descriptor& to, const std::string& path, std::span<const std::byte> bytes) const {
        while (!bytes.empty()) {
            ask("write", path);
            const ssize_t n = ::write(to.value(), bytes.data(), std::min(bytes.size(), write_bytes));
            if (n >= 0) {
                bytes = bytes.subspan(static_cast<std::size_t>(n));
            } else if (errno != EINTR) {
                refuse_file("write", path, errno);
            }
        }
    }
    /// Makes the file's contents durable and closes it.
    void finish(descriptor file, const std::string& path) const {
        ask("synchronize", path);
        synchronize(file, path);
        if (const int code = file.close(); code != 0) { refuse_file("close", path, code); }
    }
    /// Makes the names in the folder durable.
    void synchronize_directory(const std::string& path) const {
        ask("synchronize", path);
        const descriptor folder = opened(path, O_RDONLY | O_DIRECTORY);
        if (folder.value() < 0) { refuse_file("synchronize", path, errno); }
        synchronize(folder, path);
    }
    void rename(const std::string& from, const std::string& to) const {
        ask("rename", from);
        if (::rename(from.c_str(), to.c_str()) != 0) { refuse_file("rename", from, errno); }
    }
    /// A file, or a folder that is empty; it may be gone already.
    void remove(const std::string& path, bool folder) const {
        ask("remove", path);
        if ((folder ? ::rmdir(path.c_str()) : ::unlink(path.c_str())) != 0 && errno != ENOENT) {
            refuse_file("remove", path, errno);
        }
    }
    /// A file that appears whole or not at all, in place of the one that is there: `fill` hands its bytes to what it is
    /// given, which writes them beside; then they are made durable, and renamed. What fails leaves the old file. The
    /// name is durable when the caller has synchronized its folder. One writer of a path at a time: what a crash has
    /// left beside it goes.
    template <class Fill> void replace(const std::string& path, Fill fill) const {
        const std::string beside = path + std::string(unfinished);
        if (::access(beside.c_str(), F_OK) == 0) { remove(beside, false); }
        descriptor file = create(beside);
        try {
            fill([&](std::span<const std::byte> bytes) { write(file, beside, bytes); });
            finish(std::move(file), beside);
            rename(beside, path);
        } catch (...) {
            try {
                remove(beside, false);
            } catch (...) {}  // the next writer does it
            throw;
        }
    }
};

/// A file that is read. Errors  damaged_error when it is not there, is no regular file, or ends too early; backend_error
/// with errno when the file system refuses.
class input {
    descriptor file_;
    std::string path_;
    std::uint64_t bytes_ = 0;

public:
    explicit input(std::string path) : path_(std::move(path)) {
        // Not blocking: opening a pipe would wait for its writer.
        file_ = opened(path_, O_RDONLY | O_NONBLOCK);
        if (file_.value() < 0) {
            if (errno == ENOENT) { throw damaged_error(formatted("'{}' is not there", path_)); }
            refuse_file("open", path_, errno);
        }
        struct stat found {};
        if (::fstat(file_.value(), &found) != 0) { refuse_file("look at", path_, errno); }
        if (!S_ISREG(found.st_mode)) { throw damaged_error(formatted("'{}' is no regular file", path_)); }
        bytes_ = static_cast<std::uint64_t>(found.st_size);
    }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] const std::string& path() const noexcept { return path_; }

    void read(std::uint64_t offset, std::span<std::byte> out) const {
        while (!out.empty()) {
            const ssize_t n = ::pread(file_.value(), out.data(), out.size(), static_cast<off_t>(offset));
            if (n > 0) {
                out = out.subspan(static_cast<std::size_t>(n));
                offset += static_cast<std::uint64_t>(n);
            } else if (n == 0) {
                throw damaged_error(formatted("'{}' ends after {} bytes", path_, offset));
            } else if (errno != EINTR) {
                refuse_file("read", path_, errno);
            }
        }
    }
};

/// The names in a folder, in no order; nothing when there is no such folder.
[[nodiscard]] inline std::optional<std::vector<std::string>> names_in(const std::string& path) {
    DIR* const folder = ::opendir(path.c_str());
    if (folder == nullptr) {
        if (errno == ENOENT) { return std::nullopt; }
        refuse_file("list", path, errno);
    }
    struct closer {
        DIR* folder;
        ~closer() { ::closedir(folder); }
    } const closes{folder};
    std::vector<std::string> names;
    for (errno = 0; const dirent* const entry = ::readdir(folder); errno = 0) {
        const std::string_view name = entry->d_name;
        if (name != "." && name != "..") { names.emplace_back(name); }
    }
    if (errno != 0) { refuse_file("list", path, errno); }
    return names;
}

/// The file, held alone until the descriptor is closed, also by a crash. Errors  usage_error when somebody holds it.
[[nodiscard]] inline descriptor hold_alone(const std::string& path, const std::string& text) {
    descriptor file = opened(path, O_RDWR | O_CREAT | O_NOFOLLOW, 0666);
    if (file.value() < 0) { refuse_file("open", path, errno); }
    while (::flock(file.value(), LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) { throw usage_error(text); }
        if (errno != EINTR) { refuse_file("lock", path, errno); }
    }
    return file;
}

}  // namespace detail
}  // namespace tutti::checkpoint
