// disk_store: weights in a file, of which a few blocks at a time are in page-locked memory, on their way to the device
// and back. Needs zeroth/block_store, schedule/lane and POSIX files. Host memory does not depend on depth.
// Source: Wang et al., ZO2, arXiv:2503.12668 (disk as a further tier).
#pragma once

#include <algorithm>  // max
#include <cstddef>    // size_t, byte
#include <cstring>    // strerror
#include <span>       // updates
#include <string>     // paths
#include <utility>    // exchange
#include <vector>     // tickets

#include <cerrno>      // reasons
#include <fcntl.h>     // open
#include <sys/stat.h>  // permissions
#include <unistd.h>    // pread, pwrite

#include <tutti/comm/self.hpp>           // lanes
#include <tutti/schedule/lane.hpp>       // lane
#include <tutti/zeroth/block_store.hpp>  // block_store

namespace tutti::zeroth {

namespace detail {

/// A file of a fixed size, read and written by position. Errors: backend_error with the system's code and text.
class block_file {
    int handle_ = -1;
    std::string path_;

    [[noreturn]] void raise(const char* what, int code) const {
        error_context context;
        context.operation = what;
        context.backend_code = code;
        context.backend_text = std::strerror(code);
        throw backend_error(formatted("disk_store: cannot {} '{}': {} ({})", what, path_, context.backend_text, code),
                            context);
    }

public:
    block_file(std::string path, std::size_t bytes) : path_(std::move(path)) {
        handle_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR);
        if (handle_ < 0) { raise("open", errno); }
        if (::ftruncate(handle_, narrow<::off_t>(bytes, "disk_store")) != 0) {
            const int code = errno;
            ::close(std::exchange(handle_, -1));
            raise("size", code);
        }
    }
    block_file(const block_file&) = delete;
    block_file& operator=(const block_file&) = delete;
    ~block_file() {
        if (handle_ >= 0) { ::close(handle_); }
    }
    void read(std::size_t at, view<std::byte> to) const {
        for (std::size_t done = 0; done < to.size();) {
            const ::ssize_t n = ::pread(handle_, to.data() + done, to.size() - done, static_cast<::off_t>(at + done));
            if (n > 0) {
                done += static_cast<std::size_t>(n);
            } else if (n == 0 || errno != EINTR) {
                raise("read", n == 0 ? EIO : errno);  // someone has cut the file
            }
        }
    }
    void write(std::size_t at, view<const std::byte> from) const {
        for (std::size_t done = 0; done < from.size();) {
            const ::ssize_t n =
                ::pwrite(handle_, from.data() + done, from.size() - done, static_cast<::off_t>(at + done));
            if (n > 0) {
                done += static_cast<std::size_t>(n);
            } else if (n == 0 || errno != EINTR) {
                raise("write", n == 0 ? EIO : errno);
            }
        }
    }
};

}  // namespace detail

/// The rank's part of every module, one behind the other in a file of the rank's own.
///
/// Semantics  a file that is there is used as it is, cut or grown to size; what grows is zero. Reads and writes are on
///            lanes of their own. After flush all is in the file, as far as other processes see; not yet on a medium
///            that survives a loss of power: this is no checkpoint.
/// Cost       page-locked memory: two buffers of the largest module for each slot, and two more, at any depth. The
///            operating system may keep more of the file in memory that is free.
/// Errors     backend_error with the system's reason, from the pipeline's next wait where a lane met it.
template <floating_element T, queue Q> class disk_store final : public block_store<T, Q> {
    using base = block_store<T, Q>;
    using lane = schedule::lane<comm::self<host_queue>>;
    static_assert(base::host::host_accessible, "a virtual rank's host has no values to keep in a file");
    static constexpr std::size_t page = 4096;
    static constexpr std::size_t nobody = static_cast<std::size_t>(-1);

    std::vector<std::size_t> at_;  // bytes, by module
    detail::block_file file_;
    staging_queue<Q> memory_;
    std::vector<buffer<T, staging_queue<Q>>> in_, out_;  // by slot
    std::vector<std::size_t> last_;                      // by slot: whose offload was there
    lane reading_;
    lane writing_;
    std::vector<typename base::host_ticket> read_;     // by slot
    std::vector<typename base::host_ticket> written_;  // by module
    typename base::host_ticket none_;

    // Where each module begins; behind the last one, the size.
    [[nodiscard]] static std::vector<std::size_t> places(const model_layout& l) {
        std::vector<std::size_t> at{0};
        for (std::size_t m = 0; m < l.modules(); ++m) {
            at.push_back(at.back() + (l.part_of(m, 0).count * sizeof(T) + page - 1) / page * page);
        }
        return at;
    }

public:
    using typename base::host;
    using typename base::host_ticket;
    using typename base::upload_ticket;

    disk_store(model_layout l, std::string path, std::size_t rank = 0, staging_queue<Q> memory = {})
        : base(std::move(l), rank)
        , at_(places(this->layout()))
        , file_(std::move(path), at_.back())
        , memory_(std::move(memory))
        , reading_(comm::self<host_queue>(host_queue(), {.name = "read"}))
        , writing_(comm::self<host_queue>(host_queue(), {.name = "write"}))
        , written_(this->layout().modules()) {}

    /// Of page-locked memory.
    [[nodiscard]] std::size_t bytes() const noexcept { return memory_.account().live(); }

    void open(std::size_t slot_count) override {
        std::size_t largest = 0;
        for (std::size_t m = 0; m < this->layout().modules(); ++m) { largest = std::max(largest, this->own(m).count); }
        this->settle();
        read_.clear();  // waits: blocks that the pipeline before took ahead may still be coming
        for (auto* const buffers : {&in_, &out_}) {
            buffers->clear();
            for (std::size_t s = 0; s < slot_count; ++s) { buffers->emplace_back(memory_, largest); }
        }
        last_.assign(slot_count, nobody);
        read_.resize(slot_count);
    }
    void fetch(std::size_t m, std::size_t slot, std::span<const pending_update>, upload_ticket& before) override {
        const view<std::byte, host> to = as_bytes(in_.at(slot).view().sub(0, this->own(m).count));
        static_cast<void>(
            read_[slot] = reading_.submit(
                "read",
                [file = &file_, at = at_[m], to](auto&) { file->read(at, view<std::byte>(to.data(), to.size())); },
                before, written_[m]));
    }
    [[nodiscard]] view<const std::byte, host> source(std::size_t m, std::size_t slot) const override {
        return as_bytes(in_.at(slot).view().sub(0, this->own(m).count));
    }
    [[nodiscard]] host_ticket& fetched(std::size_t slot) override { return read_[slot]; }
    [[nodiscard]] view<std::byte, host> sink(std::size_t m, std::size_t slot) override {
        return as_bytes(out_.at(slot).view().sub(0, this->own(m).count));
    }
    [[nodiscard]] host_ticket& emptied(std::size_t slot) override {
        return last_[slot] == nobody ? none_ : written_[last_[slot]];
    }
    void stored(std::size_t m, std::size_t slot, upload_ticket& offload) override {
        const view<std::byte, host> from = sink(m, slot);
        last_[slot] = m;
        static_cast<void>(written_[m] = writing_.submit(
                              "write",
                              [file = &file_, at = at_[m], from](auto&) {
                                  file->write(at, view<const std::byte>(from.data(), from.size()));
                              },
                              offload));
    }
    void settle() override {
        for (const host_ticket& t : written_) { t.wait(host_queue()); }
    }
    [[nodiscard]] std::uint64_t hash(std::size_t m, std::uint64_t seed) override {
        std::vector<T> values(this->own(m).count);
        get(m, 0, view<T>(values));
        return hash_bytes(as_bytes(view<const T>(values)), seed);
    }

private:
    void put(std::size_t m, std::size_t first, view<const T> values) override {
        file_.write(at_[m] + first * sizeof(T), as_bytes(values));
    }
    void get(std::size_t m, std::size_t first, view<T> values) override {
        file_.read(at_[m] + first * sizeof(T), as_bytes(values));
    }
};

}  // namespace tutti::zeroth
