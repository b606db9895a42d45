// load: the newest checkpoint that is whole, into contents, at any number of ranks.
// Needs checkpoint/contents, a host communicator and the folder of a saver. zlib.
// Rules: every byte is verified before any entry changes; all ranks load the same checkpoint or none.
#pragma once

#include <algorithm>    // upper_bound, sort, min
#include <cstddef>      // size_t
#include <cstdint>      // steps
#include <functional>   // readers
#include <optional>     // no checkpoint
#include <set>          // names
#include <span>         // bytes
#include <string>       // folder, names
#include <string_view>  // operations
#include <utility>      // move
#include <vector>       // plans

#include <tutti/checkpoint/contents.hpp>         // what is loaded
#include <tutti/checkpoint/detail/folder.hpp>    // files of a checkpoint
#include <tutti/checkpoint/detail/layout.hpp>    // whose elements
#include <tutti/checkpoint/detail/manifest.hpp>  // what makes it one
#include <tutti/checkpoint/detail/together.hpp>  // agreement
#include <tutti/checkpoint/error.hpp>            // damaged_error
#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/text.hpp>                   // formatted

namespace tutti::checkpoint {

/// What becomes of ranks' own entries that another number of ranks has saved.
enum class local_entries : std::uint8_t {
    refuse,  ///< usage_error names one
    keep     ///< they stay as they are, and `loaded` names them
};

struct load_options {
    local_entries at_other_ranks = local_entries::refuse;
    bool allow_unused = false;  ///< the checkpoint may hold entries that no rank asks for
};

/// A checkpoint that has been loaded.
struct loaded {
    std::uint64_t generation = 0;
    std::uint64_t step = 0;
    int ranks = 0;                       ///< that have saved it
    std::vector<std::string> kept{};     ///< this rank's own entries that stayed as they were
    std::vector<std::string> damaged{};  ///< newer checkpoints that could not be loaded, and why
};

namespace detail {

/// Cost    one pass over the file.
/// Errors  damaged_error when the shard is not the one that the manifest speaks of.
inline void verify_shard(const folder& place, const manifest& m, std::size_t rank) {
    constexpr std::size_t block_bytes = std::size_t{1} << 20;
    const shard& s = m.shards[rank];
    const input file(folder::shard_of(place.finished(m.generation), rank));
    if (file.bytes() != s.bytes) {
        throw damaged_error(formatted("'{}' has {} bytes, not {}", file.path(), file.bytes(), s.bytes));
    }
    const auto header = shard_header(m.generation, m.step, rank, m.shards.size(), s.table);
    std::vector<std::byte> block(header.size());
    file.read(0, block);
    if (block != header) { throw damaged_error(formatted("'{}' has another header", file.path())); }
    std::uint32_t sum = checksum(block);
    for (std::uint64_t done = header.size(); done < s.bytes; done += block.size()) {
        block.resize(static_cast<std::size_t>(std::min<std::uint64_t>(block_bytes, s.bytes - done)));
        file.read(done, block);
        sum = checksum(block, sum);
    }
    if (sum != s.sum) {
        throw damaged_error(formatted("'{}' has checksum {:08x}, not {:08x}", file.path(), sum, s.sum));
    }
}

/// An entry of this rank, and how its bytes [first, first + count) are overwritten.
struct destination {
    const piece* wanted;
    std::function<void(std::size_t first, std::size_t count, const byte_source& from)> overwrite;
};

/// `count` bytes from byte `from` of a shard on belong to byte `to` of destination `into`.
struct reading {
    std::size_t shard = 0;
    std::uint64_t from = 0;
    std::size_t into = 0;
    std::uint64_t to = 0;
    std::uint64_t count = 0;
};

inline void plan_range(const tensor& t, const piece& wanted, std::size_t into, const std::vector<std::uint64_t>& begins,
                       std::vector<reading>& out) {
    const std::uint64_t size = size_of(t.type);
    const std::uint64_t end = wanted.offset + wanted.count;
    // The extent that holds the first element: the last that begins at or before it.
    auto e = std::upper_bound(t.extents.begin(), t.extents.end(), wanted.offset,
                              [](std::uint64_t offset, const extent_of& x) { return offset < x.offset; });
    for (std::uint64_t next = wanted.offset; next < end;) {
        const extent_of& holds = *(e - 1);
        const std::uint64_t last = std::min(end, holds.offset + holds.count);
        out.push_back({holds.shard, begins[holds.shard] + holds.position + (next - holds.offset) * size, into,
                       (next - wanted.offset) * size, (last - next) * size});
        next = last;
        ++e;
    }
}

/// What a rank reads, in the order of files. Entries that stay as they are go to `kept`.
/// Errors  usage_error when the checkpoint has not what is wanted.
[[nodiscard]] inline std::vector<reading> plan_readings(const layout& whole, const manifest& m, std::size_t rank,
                                                        std::size_t ranks, std::span<const destination> all,
                                                        local_entries at_other_ranks, std::vector<std::string>& kept) {
    std::vector<std::uint64_t> begins;
    for (const shard& s : m.shards) { begins.push_back(data_begin(s.table)); }
    std::vector<reading> plan;
    std::set<std::string_view> names;
    for (std::size_t i = 0; i < all.size(); ++i) {
        const piece& p = *all[i].wanted;
        if (!names.insert(p.name).second) { throw usage_error(formatted("'{}' is there twice", p.name)); }
        if (p.local && m.shards.size() != ranks) {
            if (at_other_ranks == local_entries::refuse) {
                throw usage_error(formatted("'{}' is each rank's own, and was saved by {} ranks, not {}", p.name,
                                            m.shards.size(), ranks));
            }
            kept.push_back(p.name);
            continue;
        }
        const auto& list = p.local ? whole.local[rank] : whole.common;
        const auto found = list.find(p.name);
        if (found == list.end()) {
            const bool other_kind = p.local ? whole.common.contains(p.name)
                                            : rank < whole.local.size() && whole.local[rank].contains(p.name);
            throw usage_error(
                formatted("the checkpoint has no {} '{}'{}", p.local ? "rank's own" : "tensor", p.name,
                          other_kind ? (p.local ? ", but a tensor of all ranks" : ", but one of the ranks' own") : ""));
        }
        const tensor& t = found->second;
        if (t.type != p.type || t.shape != p.shape) {
            throw usage_error(formatted("'{}' is {} {} in the checkpoint, not {} {}", p.name, name_of(t.type),
                                        shape_text(t.shape), name_of(p.type), shape_text(p.shape)));
        }
        plan_range(t, p, i, begins, plan);
    }
    std::sort(plan.begin(), plan.end(), [](const reading& a, const reading& b) {
        return std::pair(a.shard, a.from) < std::pair(b.shard, b.from);
    });
    return plan;
}

inline void carry_out(std::span<const reading> plan, const folder& place, const manifest& m,
                      std::span<const destination> all) {
    std::optional<input> file;
    for (std::size_t i = 0; i < plan.size(); ++i) {
        const reading& r = plan[i];
        if (i == 0 || r.shard != plan[i - 1].shard) {
            file.emplace(folder::shard_of(place.finished(m.generation), r.shard));
        }
        all[r.into].overwrite(
            static_cast<std::size_t>(r.to), static_cast<std::size_t>(r.count),
            [&](std::uint64_t first, std::span<std::byte> part) { file->read(r.from + first, part); });
    }
}

/// All names that any rank asks for must cover what the checkpoint has.
inline void demand_used(const layout& whole, const std::vector<std::vector<std::byte>>& asked) {
    std::set<std::string, std::less<>> wanted;
    std::vector<std::set<std::string, std::less<>>> own(asked.size());
    for (std::size_t rank = 0; rank < asked.size(); ++rank) {
        decoder in(asked[rank], "a list of names");
        while (in.left() != 0) {
            const bool local = in.number<std::uint8_t>() != 0;
            const auto bytes = in.number<std::uint32_t>();
            (local ? own[rank] : wanted).insert(in.text(bytes));
        }
    }
    const auto demand = [](const auto& list, const auto& names) {
        for (const auto& entry : list) {
            if (!names.contains(entry.first)) {
                throw usage_error(
                    formatted("load: the checkpoint has '{}', which nobody asks for", shown(entry.first)));
            }
        }
    };
    demand(whole.common, wanted);
    std::set<std::string, std::less<>> any;
    for (const auto& names : own) { any.insert(names.begin(), names.end()); }
    const bool same_ranks = own.size() == whole.local.size();
    for (std::size_t rank = 0; rank < whole.local.size(); ++rank) {
        demand(whole.local[rank], same_ranks ? own[rank] : any);
    }
}

/// What could not be read now may be whole: taking an older one instead would let a saver that resumes from that one
/// remove it.
/// Errors  backend_error on all ranks.
inline void demand_readable(const verdict& v, const std::string& checkpoint) {
    if (v.kind != fault::other) { return; }
    const std::string text =
        formatted("{}; '{}' may be whole: load again when it can be read, or move it away to load an older one", v.text,
                  checkpoint);
    verdict{v.kind, text, v.code, {}}.raise();
}

/// Loads one checkpoint, or says why it is damaged.
template <host_communicator C>
[[nodiscard]] std::optional<loaded> load_one(C& comm, const folder& place, std::uint64_t generation,
                                             const load_options& how, std::span<const destination> all,
                                             std::string& damage) {
    constexpr std::string_view operation = "load";
    const auto rank = static_cast<std::size_t>(comm.rank());
    const auto ranks = static_cast<std::size_t>(comm.size());
    const verdict described = together(
        comm, operation, [&] { return rank == 0 ? place.manifest_bytes(generation) : std::vector<std::byte>(); });
    demand_readable(described, place.finished(generation));
    if (described.failed()) {
        damage = described.text;
        return std::nullopt;
    }
    manifest m;
    layout whole;
    const verdict verified = together(comm, operation, [&] {
        try {
            m = decoded_manifest(described.of[0]);
            if (m.generation != generation) {
                throw damaged_error(formatted("the manifest is checkpoint {}'s", m.generation));
            }
            std::vector<std::vector<piece>> tables;
            for (const shard& s : m.shards) { tables.push_back(s.table); }
            whole = merged(tables);
        } catch (const error& e) {  // the same on all ranks; a lack of memory is not
            damage = e.what();
            return std::vector<std::byte>();
        }
        for (std::size_t s = rank; s < m.shards.size(); s += ranks) { verify_shard(place, m, s); }
        return std::vector<std::byte>();
    });
    demand_readable(verified, place.finished(generation));
    if (verified.failed()) { damage = verified.text; }
    if (!damage.empty()) { return std::nullopt; }

    loaded result{generation, m.step, static_cast<int>(m.shards.size()), {}, {}};
    std::vector<reading> plan;
    const verdict planned = together(comm, operation, [&] {
        plan = plan_readings(whole, m, rank, ranks, all, how.at_other_ranks, result.kept);
        encoder asked;
        for (const destination& d : all) {
            asked.number(static_cast<std::uint8_t>(d.wanted->local));
            asked.number(static_cast<std::uint32_t>(d.wanted->name.size())).text(d.wanted->name);
        }
        return asked.take();
    });
    planned.raise();
    if (!how.allow_unused) {
        std::string unused;  // the same on all ranks
        const verdict used = together(comm, operation, [&] {
            try {
                demand_used(whole, planned.of);
            } catch (const usage_error& e) { unused = e.what(); }
            return std::vector<std::byte>();
        });
        used.raise();
        if (!unused.empty()) { throw usage_error(unused); }
    }

    const verdict done = together(comm, operation, [&] {
        carry_out(plan, place, m, all);
        return std::vector<std::byte>();
    });
    done.raise();
    return result;
}

}  // namespace detail

/// Loads the newest checkpoint of a folder that is whole into the contents.
///
/// Semantics  collective; nothing when the folder has no checkpoint, or is not there. Ranks need not be as many as have
///            saved: each reads the ranges that it lists from whichever shards hold them. A checkpoint with a file that
///            is missing, of another size or of another checksum is passed over for the one before it; one with a file
///            that the file system refuses to read is not, as it may be whole. Only then are entries looked at: what
///            does not fit a whole checkpoint is an error, not a reason to take an older one.
///            Ranks' own entries need as many ranks as have saved them: load_options says what happens otherwise.
///            A saver may have the folder meanwhile, as long as it keeps more checkpoints than it makes during the load.
/// Order      host entries are there on return, device entries when their queue gets there.
/// Cost       the files are read twice: all shards once for their checksums, shared out over the ranks, and the ranges
///            of each rank. Memory: the manifest and 1 MiB; for device entries 16 MiB.
/// Errors     usage_error: an entry is not in the checkpoint, or has another type or shape there; the checkpoint has one
///            that no rank asks for; ranks' own were saved by another number of ranks. damaged_error: there are
///            checkpoints, and none is whole. backend_error with errno when a file cannot be read to be verified, and
///            when a rank has no memory for the tables. In all of these no entry has changed. damaged_error or
///            backend_error when files change or fail between being verified and being read: entries are then
///            unspecified.
template <host_communicator C, queue... Q>
std::optional<loaded> load(C& comm, const std::string& folder, const load_options& how, const contents<Q>&... into) {
    const detail::folder place(folder);
    std::vector<detail::destination> all;
    const auto add = [&all](const auto& c) {
        for (std::size_t i = 0; i < c.size(); ++i) {
            all.push_back(
                {&c.wanted(i), [&c, i](std::size_t first, std::size_t count, const detail::byte_source& from) {
                     c.overwrite(i, first, count, from);
                 }});
        }
    };
    const detail::verdict listed = detail::together(comm, "load", [&] {
        (add(into), ...);
        detail::encoder out;
        if (comm.rank() == 0) {
            for (const detail::folder::entry e : place.entries()) {
                if (e.finished && place.has_manifest(e.generation)) { out.number(e.generation); }
            }
        }
        return out.take();
    });
    listed.raise();
    std::vector<std::string> damaged;
    detail::decoder generations(listed.of[0], "rank 0's answer");
    while (generations.left() != 0) {
        const auto generation = generations.number<std::uint64_t>();
        std::string damage;
        if (auto result = detail::load_one(comm, place, generation, how, all, damage)) {
            result->damaged = std::move(damaged);
            return result;
        }
        damaged.push_back(formatted("{}: {}", detail::folder::name_of(generation), damage));
    }
    if (damaged.empty()) { return std::nullopt; }
    std::string text;
    for (const std::string& d : damaged) { text += (text.empty() ? "" : "; ") + d; }
    throw damaged_error(formatted("load: no checkpoint in '{}' is whole ({})", folder, text));
}

}  // namespace tutti::checkpoint
