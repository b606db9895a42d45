// contents<Queue>: the entries of one queue's memory that a checkpoint holds, and whose they are.
// Needs core/state and checkpoint/detail/layout. A trainer lists what its strategy and itself need for a resume, once.
#pragma once

#include <algorithm>   // min
#include <atomic>      // snapshots in use
#include <concepts>    // same_as
#include <cstddef>     // size_t
#include <cstdint>     // numbers of the files
#include <cstring>     // memset
#include <functional>  // how bytes are read
#include <memory>      // snapshots
#include <span>        // lists
#include <utility>     // move
#include <vector>      // entries

#include <tutti/checkpoint/detail/layout.hpp>  // piece
#include <tutti/core/buffer.hpp>               // snapshots
#include <tutti/core/error.hpp>                // usage_error
#include <tutti/core/partition.hpp>            // parts of what replicas share
#include <tutti/core/queue.hpp>                // staging_queue
#include <tutti/core/state.hpp>                // state_entry, ownership
#include <tutti/core/text.hpp>                 // formatted

namespace tutti::checkpoint {

using tutti::ownership;  // of what is replicated each rank writes a part

namespace detail {

/// Bytes that a save reads while their owner goes on.
struct snapshot {
    std::atomic<bool> in_use{false};
    virtual ~snapshot() = default;
    [[nodiscard]] virtual std::span<const std::byte> bytes() const = 0;
};

/// Keeps a snapshot from being overwritten.
class snapshot_lease {
    std::shared_ptr<snapshot> held_;

public:
    explicit snapshot_lease(std::shared_ptr<snapshot> s) noexcept : held_(std::move(s)) {}
    snapshot_lease(snapshot_lease&&) noexcept = default;
    snapshot_lease& operator=(snapshot_lease&&) = delete;
    ~snapshot_lease() {
        if (held_ != nullptr) { held_->in_use.store(false, std::memory_order_release); }
    }
    [[nodiscard]] std::span<const std::byte> bytes() const { return held_->bytes(); }
};

/// Reads `part.size()` bytes from byte `first` on of what is asked for.
using byte_source = std::function<void(std::uint64_t first, std::span<std::byte> part)>;

}  // namespace detail

/// A list of entries in the memory of queue Q.
///
/// Semantics  names are unique in all contents of a save. Ranks may list entries in different orders, and a sharded one
///            only where they own elements of it. The memory must outlive this list.
///            A checkpoint knows tensors of all ranks and ranks' own: what was saved as sharded may be loaded as
///            replicated, and the other way around. That replicas are equal is the caller's promise: the tensor is put
///            together from parts of all.
/// Order      a save reads entries in the queue's order, into a snapshot that the list keeps: page-locked memory for
///            device queues. Entries may change behind it.
/// Cost       the first save allocates the bytes that this rank writes.
/// Errors     usage_error naming the entry, when it is added.
template <queue Q>
requires(!std::same_as<typename Q::memory_type, phantom_memory>) class contents {
public:
    using queue_type = Q;
    using memory_type = typename Q::memory_type;
    using entry_type = state_entry<memory_type>;

    explicit contents(Q q = Q{}) : queue_(std::move(q)) {}

    contents& add(entry_type e, ownership whose) {
        item added{as_piece(e, whose), whose, e.data};
        try {
            detail::demand_sound(added.whole);
            const std::uint64_t all = detail::elements_of(added.whole);
            if (whose == ownership::replicated && added.whole.count != all) {
                throw usage_error(
                    formatted("'{}' is replicated, but has {} of {} elements", e.name, added.whole.count, all));
            }
            for (const item& i : items_) {
                if (i.whole.name == e.name) { throw usage_error(formatted("'{}' is there twice", e.name)); }
            }
        } catch (const usage_error& wrong) { throw usage_error(formatted("checkpoint: {}", wrong.what())); }
        items_.push_back(std::move(added));
        return *this;
    }
    contents& add(std::span<const entry_type> list, ownership whose) {
        for (const entry_type& e : list) { add(e, whose); }
        return *this;
    }
    /// Each is whose it says, as strategies list them. Of a tensor that is a rank's own, what the rank has is all of it.
    contents& add(std::span<const entry_type> list) {
        for (entry_type e : list) {
            if (e.whose == ownership::local) {
                e.shape = {e.data.size() / size_of(e.type)};
                e.offset = 0;
            }
            add(e, e.whose);
        }
        return *this;
    }

    [[nodiscard]] Q queue() const { return queue_; }
    [[nodiscard]] std::size_t size() const noexcept { return items_.size(); }

    /// For savers: what rank `rank` of `ranks` writes.
    [[nodiscard]] std::vector<detail::piece> written_by(std::size_t rank, std::size_t ranks) const {
        std::vector<detail::piece> pieces;
        for (const item& i : items_) { pieces.push_back(part_of(i, rank, ranks)); }
        return pieces;
    }
    /// For savers: a copy of that, in the queue's order, each piece filled up with zeros.
    /// Errors  usage_error while an earlier copy is in use.
    [[nodiscard]] detail::snapshot_lease take_snapshot(std::size_t rank, std::size_t ranks) {
        const std::vector<detail::piece> pieces = written_by(rank, ranks);
        const auto bytes = static_cast<std::size_t>(detail::data_bytes(pieces));
        if (snapshot_ != nullptr && snapshot_->in_use.load(std::memory_order_acquire)) {
            throw usage_error("save: another saver has not yet written these contents");
        }
        if (snapshot_ == nullptr || snapshot_->storage.size() != bytes) {
            snapshot_ = nullptr;  // the old one goes before the new one comes
            snapshot_ = std::make_shared<memory>(storage_queue(), bytes);
        }
        snapshot_->in_use.store(true, std::memory_order_relaxed);
        detail::snapshot_lease lease(snapshot_);
        std::size_t position = 0;
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            const auto n = static_cast<std::size_t>(pieces[i].bytes());
            const auto first =
                static_cast<std::size_t>((pieces[i].offset - items_[i].whole.offset) * size_of(pieces[i].type));
            const auto room = static_cast<std::size_t>(detail::aligned(n));
            if (n != 0) { fetch(items_[i].data.sub(first, n), snapshot_->storage.view().sub(position, n)); }
            if (room != n) { std::memset(snapshot_->storage.data() + position + n, 0, room - n); }
            position += room;
        }
        return lease;
    }

    /// For loads: what each entry needs: a range of a tensor, or all of a rank's own.
    [[nodiscard]] const detail::piece& wanted(std::size_t i) const noexcept { return items_[i].whole; }
    /// For loads: overwrites bytes [first, first + count) of an entry by those that `from` gives.
    void overwrite(std::size_t i, std::size_t first, std::size_t count, const detail::byte_source& from) const {
        const auto to = items_[i].data.sub(first, count);
        if constexpr (memory_type::host_accessible) {
            if (count != 0) { from(0, std::span(to.data(), to.size())); }
        } else {
            std::vector<std::byte> part(std::min(count, upload_bytes));
            for (std::size_t done = 0; done < count; done += part.size()) {
                part.resize(std::min(part.size(), count - done));
                from(done, part);
                upload(queue_, view<const std::byte>(part), to.sub(done, part.size()));
            }
        }
    }

private:
    static constexpr std::size_t upload_bytes = std::size_t{16} << 20;
    using staging = staging_queue<Q>;

    struct item {
        detail::piece whole;  // of this rank
        ownership whose;
        view<std::byte, memory_type> data;
    };
    struct memory final : detail::snapshot {
        buffer<std::byte, staging> storage;
        memory(staging q, std::size_t n) : storage(std::move(q), n) {}
        [[nodiscard]] std::span<const std::byte> bytes() const override { return {storage.data(), storage.size()}; }
    };

    Q queue_;
    std::vector<item> items_;
    std::shared_ptr<memory> snapshot_;

    [[nodiscard]] staging storage_queue() const {
        if constexpr (std::same_as<staging, Q>) {
            return queue_;
        } else {
            return staging();
        }
    }
    [[nodiscard]] static detail::piece as_piece(const entry_type& e, ownership whose) {
        const std::size_t size = size_of(e.type);
        if (e.data.size() % size != 0) {
            throw usage_error(
                formatted("checkpoint: '{}' has {} bytes of {}-byte elements", e.name, e.data.size(), size));
        }
        detail::piece p{e.name, e.type, whose == ownership::local, {}, e.offset, e.data.size() / size};
        p.shape.assign(e.shape.begin(), e.shape.end());
        return p;
    }
    [[nodiscard]] static detail::piece part_of(const item& i, std::size_t rank, std::size_t ranks) {
        detail::piece p = i.whole;
        if (i.whose == ownership::replicated) {
            const part mine = partition(static_cast<std::size_t>(p.count), ranks, rank);
            p.offset = mine.first;
            p.count = mine.count;
        }
        return p;
    }
    void fetch(view<std::byte, memory_type> in, view<std::byte, typename staging::memory_type> out) const {
        if constexpr (memory_type::host_accessible) {
            std::memcpy(out.data(), in.data(), in.size());
        } else {
            download(queue_, view<const std::byte, memory_type>(in), out);
        }
    }
};

}  // namespace tutti::checkpoint
