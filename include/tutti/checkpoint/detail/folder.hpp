// folder: where checkpoints lie: their names, and what one rank does to them on behalf of all.
// Needs checkpoint/detail/{files,manifest}.
//
//   <folder>/lock                                  held by the one saver
//   <folder>/checkpoint-0000000007/manifest        written last: without it the folder is no checkpoint
//   <folder>/checkpoint-0000000007/rank-00000.shard
//   <folder>/checkpoint-0000000008.unfinished/     being written, being removed, or left by a crash
#pragma once

#include <algorithm>    // sort
#include <cerrno>       // what the file system answered
#include <cstddef>      // size_t
#include <cstdint>      // generations
#include <optional>     // names that are none
#include <span>         // shards
#include <string>       // paths
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // generations

#include <unistd.h>  // access

#include <tutti/checkpoint/detail/files.hpp>     // files, input
#include <tutti/checkpoint/detail/manifest.hpp>  // manifest
#include <tutti/checkpoint/error.hpp>            // damaged_error
#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/text.hpp>                   // formatted

namespace tutti::checkpoint::detail {

inline constexpr std::uint64_t most_generations = 1'000'000'000'000'000'000;
inline constexpr std::uint64_t most_manifest_bytes = std::uint64_t{1} << 31;

class folder {
    files files_;
    std::string path_;

public:
    struct entry {
        std::uint64_t generation = 0;
        bool finished = false;  // by its name
    };

    explicit folder(std::string path, files operations = {}) : files_(std::move(operations)), path_(std::move(path)) {}

    [[nodiscard]] const std::string& path() const noexcept { return path_; }
    [[nodiscard]] static std::string name_of(std::uint64_t generation) {
        return formatted("checkpoint-{:010}", generation);
    }
    [[nodiscard]] std::string finished(std::uint64_t generation) const { return path_ + "/" + name_of(generation); }
    [[nodiscard]] std::string begun(std::uint64_t generation) const {
        return finished(generation) + std::string(unfinished);
    }
    [[nodiscard]] static std::string shard_of(const std::string& checkpoint, std::size_t rank) {
        return formatted("{}/rank-{:05}.shard", checkpoint, rank);
    }
    [[nodiscard]] static std::string manifest_of(const std::string& checkpoint) { return checkpoint + "/manifest"; }

    /// All that is named like a checkpoint, newest first. Nothing when there is no folder.
    [[nodiscard]] std::vector<entry> entries() const {
        std::vector<entry> found;
        for (const std::string& name : names_in(path_).value_or(std::vector<std::string>())) {
            if (const auto e = entry_of(name)) { found.push_back(*e); }
        }
        std::sort(found.begin(), found.end(), [](entry a, entry b) { return a.generation > b.generation; });
        return found;
    }
    [[nodiscard]] bool has_manifest(std::uint64_t generation) const {
        const std::string path = manifest_of(finished(generation));
        if (::access(path.c_str(), F_OK) == 0) { return true; }
        if (errno != ENOENT) { refuse_file("look at", path, errno); }  // who cannot look must not remove it either
        return false;
    }
    [[nodiscard]] std::vector<std::byte> manifest_bytes(std::uint64_t generation) const {
        const input file(manifest_of(finished(generation)));
        if (file.bytes() > most_manifest_bytes) {
            throw damaged_error(
                formatted("the manifest has {} bytes, {} are the most", file.bytes(), most_manifest_bytes));
        }
        std::vector<std::byte> bytes(static_cast<std::size_t>(file.bytes()));
        file.read(0, bytes);
        return bytes;
    }
    /// Its manifest is whole, and the shards are there in full length. Their contents are not read.
    [[nodiscard]] bool looks_complete(std::uint64_t generation) const {
        try {
            const manifest m = decoded_manifest(manifest_bytes(generation));
            bool same = m.generation == generation;
            for (std::size_t rank = 0; rank < m.shards.size() && same; ++rank) {
                same = input(shard_of(finished(generation), rank)).bytes() == m.shards[rank].bytes;
            }
            return same;
        } catch (const damaged_error&) { return false; }
    }

    /// Makes the place where the next checkpoint is written, and returns its generation.
    [[nodiscard]] std::uint64_t begin() const {
        const std::vector<entry> found = entries();
        const std::uint64_t generation = found.empty() ? 1 : found.front().generation + 1;
        if (generation >= most_generations) {
            throw usage_error(formatted("'{}' has checkpoint {}; there is no next", path_, generation - 1));
        }
        if (!files_.make_directory(begun(generation))) {
            throw usage_error(formatted("'{}' appeared meanwhile: does somebody else save here?", begun(generation)));
        }
        return generation;
    }
    /// Writes a rank's shard; durable but for its name.
    [[nodiscard]] shard write_shard(std::uint64_t generation, std::size_t rank, std::span<const std::byte> header,
                                    std::span<const std::span<const std::byte>> data) const {
        const std::string path = shard_of(begun(generation), rank);
        descriptor file = files_.create(path);
        shard written;
        const auto put = [&](std::span<const std::byte> bytes) {
            files_.write(file, path, bytes);
            written.sum = checksum(bytes, written.sum);
            written.bytes += bytes.size();
        };
        put(header);
        for (const auto& part : data) { put(part); }
        files_.finish(std::move(file), path);
        return written;
    }
    /// Makes what all ranks have written a checkpoint. A crash before the last rename leaves none, one behind it leaves
    /// this one.
    void publish(const manifest& m) const {
        const std::string from = begun(m.generation);
        const std::string to = finished(m.generation);
        for (std::size_t rank = 0; rank < m.shards.size(); ++rank) {
            const input file(shard_of(from, rank));
            if (file.bytes() != m.shards[rank].bytes) {
                throw backend_error(formatted("'{}' has {} bytes where rank {} wrote {}", file.path(), file.bytes(),
                                              rank, m.shards[rank].bytes));
            }
        }
        files_.synchronize_directory(from);
        files_.rename(from, to);
        files_.synchronize_directory(path_);
        files_.replace(manifest_of(to), [&](const auto& put) { put(encoded(m)); });
        files_.synchronize_directory(to);
    }

    /// Removes a checkpoint: by its name at once, then file by file. A crash leaves what is named unfinished.
    void remove(entry e) const {
        const std::string place = begun(e.generation);
        if (e.finished) { files_.rename(finished(e.generation), place); }
        for (const std::string& name : names_in(place).value_or(std::vector<std::string>())) {
            // Only what a saver wrote: the folder then stays, and says so, if anybody else's file is in it.
            if (name.starts_with("rank-") || name.starts_with("manifest")) { files_.remove(place + "/" + name, false); }
        }
        files_.remove(place, true);
    }
    /// Removes a checkpoint that could not be finished. What cannot be removed stays for the next saver.
    void discard(std::uint64_t generation) const noexcept {
        try {
            for (const bool finished_too : {true, false}) {
                const std::string place = finished_too ? finished(generation) : begun(generation);
                if (::access(place.c_str(), F_OK) == 0) { remove({generation, finished_too}); }
            }
        } catch (...) {}
    }
    /// Removes what crashes have left. Only for who holds the lock, between saves.
    void remove_incomplete() const {
        for (const entry e : entries()) {
            if (!e.finished || !has_manifest(e.generation)) { remove(e); }
        }
    }
    /// Removes all but the newest `keep` that look complete, of which those in (after, before) do not count.
    void keep_newest(std::size_t keep, std::uint64_t after, std::uint64_t before) const {
        std::size_t kept = 0;
        bool removed = false;
        for (const entry e : entries()) {
            if (kept == keep) {
                remove(e);
                removed = true;
                continue;
            }
            const bool counts = e.generation <= after || e.generation >= before;
            if (e.finished && counts && looks_complete(e.generation)) { ++kept; }
        }
        if (removed) { files_.synchronize_directory(path_); }
    }
    /// Makes the folder, durably, takes its lock and removes what crashes have left.
    /// Errors  usage_error when another saver has it.
    [[nodiscard]] descriptor take() const {
        if (path_.empty()) { throw usage_error("the folder's name is empty"); }
        const bool made = files_.make_directory(path_);
        descriptor lock = hold_alone(path_ + "/lock", formatted("'{}' is in use by another saver", path_));
        // A folder without a checkpoint may be what a crash has left right here. Or somebody else has made it, in a
        // parent that only he may read.
        const std::string parent = parent_of(path_);
        if (made || (entries().empty() && ::access(parent.c_str(), R_OK) == 0)) {
            files_.synchronize_directory(parent);
        }
        remove_incomplete();
        files_.synchronize_directory(path_);
        return lock;
    }

private:
    [[nodiscard]] static std::optional<entry> entry_of(std::string_view name) {
        constexpr std::string_view prefix = "checkpoint-";
        const std::string_view whole = name;
        if (!name.starts_with(prefix)) { return std::nullopt; }
        name.remove_prefix(prefix.size());
        entry e{0, !name.ends_with(unfinished)};
        if (!e.finished) { name.remove_suffix(unfinished.size()); }
        if (name.empty() || name.size() > 18) { return std::nullopt; }
        for (const char c : name) {
            if (c < '0' || c > '9') { return std::nullopt; }
            e.generation = e.generation * 10 + static_cast<std::uint64_t>(c - '0');
        }
        const std::string canonical = name_of(e.generation) + std::string(e.finished ? "" : unfinished);
        return canonical == whole ? std::optional(e) : std::nullopt;
    }
};

}  // namespace tutti::checkpoint::detail
