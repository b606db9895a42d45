// block_store: where the weights of a model's modules are on the host; pinned_store keeps all of them in page-locked
// memory. Needs zeroth/layout and schedule/ticket. Other stores: disk_store, master_store.
#pragma once

#include <cstddef>  // size_t, byte
#include <cstdint>  // hashes
#include <span>     // updates
#include <utility>  // move
#include <vector>   // images

#include <tutti/core/buffer.hpp>            // buffer
#include <tutti/core/elementwise.hpp>       // fill
#include <tutti/core/error.hpp>             // usage_error
#include <tutti/core/queue.hpp>             // staging_queue
#include <tutti/core/state.hpp>             // hash_bytes
#include <tutti/core/text.hpp>              // formatted
#include <tutti/core/view.hpp>              // view
#include <tutti/schedule/ticket.hpp>        // ticket
#include <tutti/zeroth/layout.hpp>          // model_layout
#include <tutti/zeroth/pending_update.hpp>  // pending_update

namespace tutti::zeroth {

namespace detail {
// Contents of host memory. Where it has sizes alone nothing is kept, and nothing can be read.
template <class A, memory M, class T> void put_values(view<A, M> into, view<const T> values) {
    if constexpr (M::host_accessible) {
        for (std::size_t i = 0; i < values.size(); ++i) { into[i] = static_cast<A>(values[i]); }
    }
}
template <class A, memory M, class T> void get_values(view<A, M> from, view<T> values) {
    if constexpr (M::host_accessible) {
        for (std::size_t i = 0; i < values.size(); ++i) { values[i] = static_cast<T>(from[i]); }
    } else {
        throw usage_error("block_store: weights of a virtual rank have no values to read");
    }
}
template <class A, memory M> [[nodiscard]] std::uint64_t hash_values(view<A, M> of, std::uint64_t seed) {
    if constexpr (M::host_accessible) {
        return hash_bytes(as_bytes(view<const A>(of.data(), of.size())), seed);
    } else {
        const std::uint64_t bytes[] = {of.size_bytes()};
        return hash_bytes(as_bytes(view<const std::uint64_t>(bytes)), seed);
    }
}
}  // namespace detail

/// Masters that the device updates, piece by piece, making anew what travels: for pipelines.
template <floating_element T, queue Q> class renewal {
    using M = typename Q::memory_type;
    using host = typename staging_queue<Q>::memory_type;

public:
    /// Of the rank's part of a module.
    [[nodiscard]] virtual std::size_t pieces(std::size_t m) const = 0;
    /// Bytes of the masters of the largest.
    [[nodiscard]] virtual std::size_t largest_piece() const = 0;
    [[nodiscard]] virtual view<std::byte, host> masters(std::size_t m, std::size_t piece) = 0;
    /// Where the piece's part of what travels is in it, in bytes.
    [[nodiscard]] virtual part encoded_piece(std::size_t m, std::size_t piece) const = 0;
    /// Is there anything of the module that can travel?
    [[nodiscard]] virtual bool made(std::size_t m) const = 0;
    /// Are updates that what travels lacks applied to it on every visit? Else it is seen without them.
    [[nodiscard]] virtual bool replays() const noexcept = 0;
    /// On `q`: updates a piece's masters, and makes of them its part of what travels, and of the weights of the module
    /// as the device has them; of each if it is not empty.
    virtual void renew(const Q& q, std::size_t m, std::size_t piece, view<std::byte, M> masters,
                       std::span<const pending_update>, view<std::byte, M> encoded, view<T, M> weights) const = 0;

protected:
    ~renewal() = default;
};

/// The host's weights, and how a pipeline gets at them. One rank's part of every module: all of it where there is one.
///
/// Semantics  a store outlives the pipelines that use it. `write` and `read` are the user's: write before a pipeline is
///            made, which takes blocks ahead; read after a flush and before the next pass. The
///            other members are the pipeline's: fetch (or several) before an upload, sink and stored around
///            an offload; `slot` says which of its buffers a transfer uses.
///            On a virtual queue a store has sizes and no values: what is written is not kept, and a hash is of sizes.
/// Threads    one thread at a time.
/// Errors     usage_error for a layout of other elements, for a module, tensor or size that is not the layout's; for a read
///            on a virtual queue.
template <floating_element T, queue Q> class block_store {
    model_layout layout_;
    std::size_t rank_;

public:
    using value_type = T;
    using host = typename staging_queue<Q>::memory_type;
    using upload_ticket = schedule::ticket<Q>;
    using host_ticket = schedule::ticket<host_queue>;

    block_store(model_layout l, std::size_t rank) : layout_(std::move(l)), rank_(rank) {
        if (rank >= layout_.ranks()) {
            throw usage_error(formatted("block_store: rank {} of a layout for {} ranks", rank, layout_.ranks()));
        }
        if (layout_.grain() * sizeof(T) != model_layout::alignment) {
            throw usage_error(formatted("block_store: a layout for elements of {} bytes, those of the weights have {}",
                                        model_layout::alignment / layout_.grain(), sizeof(T)));
        }
    }
    block_store(const block_store&) = delete;
    block_store& operator=(const block_store&) = delete;
    virtual ~block_store() = default;

    [[nodiscard]] const model_layout& layout() const noexcept { return layout_; }
    [[nodiscard]] std::size_t rank() const noexcept { return rank_; }
    /// Which elements of a module's run are here.
    [[nodiscard]] part own(std::size_t m) const { return layout_.part_of(m, rank_); }

    /// Sets the tensor of a name: the elements that this rank has.
    void write(std::string_view name, view<const T> whole) {
        const tensor_index at = layout_.find(name);
        write(at.module, at.slice, whole);
    }
    /// Reads the elements of the tensor of a name that this rank has; the others of `whole` stay as they are.
    void read(std::string_view name, view<T> whole) {
        const tensor_index at = layout_.find(name);
        read(at.module, at.slice, whole);
    }
    /// Sets tensor `k` of module `m` (by its place among the module's own): the elements that this rank has.
    void write(std::size_t m, std::size_t k, view<const T> whole) {
        each_piece(m, k, whole.size(), "write",
                   [&](const tensor_slice& piece) { put(m, piece.offset, whole.sub(piece.first, piece.count)); });
    }
    /// Reads the elements of a tensor that this rank has; the others of `whole` stay.
    void read(std::size_t m, std::size_t k, view<T> whole) {
        each_piece(m, k, whole.size(), "read",
                   [&](const tensor_slice& piece) { get(m, piece.offset, whole.sub(piece.first, piece.count)); });
    }

    // --- for pipelines ----------------------------------------------------------------------------------------------
    /// Does the store apply updates itself? Then fetch is given them, and nothing comes back from the device.
    [[nodiscard]] virtual bool updates() const noexcept { return false; }
    /// Bytes that an upload of the module moves.
    [[nodiscard]] virtual std::size_t wire_bytes(std::size_t m) const { return own(m).count * sizeof(T); }
    /// Does what is uploaded need decode()? Else it is the weights themselves.
    [[nodiscard]] virtual bool encoded() const noexcept { return false; }
    /// What was uploaded becomes the weights `to`, on `q`.
    virtual void decode(const Q&, std::size_t, view<const std::byte, typename Q::memory_type>,
                        view<T, typename Q::memory_type>) const {}
    /// Has it masters that the device updates? Then modules that are due come as those, and no weights go back.
    [[nodiscard]] virtual renewal<T, Q>* renewing() noexcept { return nullptr; }
    /// Called once by each pipeline, before the others.
    virtual void open(std::size_t /*slot_count*/) {}
    /// Starts to make a module ready for upload. `before`: the last upload from this slot.
    virtual void fetch(std::size_t m, std::size_t slot, std::span<const pending_update>, upload_ticket& before) = 0;
    [[nodiscard]] virtual view<const std::byte, host> source(std::size_t m, std::size_t slot) const = 0;
    /// What an upload from the slot must wait for.
    [[nodiscard]] virtual host_ticket& fetched(std::size_t slot) = 0;
    /// Where an offload from the slot goes, and what it must wait for.
    [[nodiscard]] virtual view<std::byte, host> sink(std::size_t m, std::size_t slot) = 0;
    [[nodiscard]] virtual host_ticket& emptied(std::size_t slot) = 0;
    /// `offload` fills the sink.
    virtual void stored(std::size_t m, std::size_t slot, upload_ticket& offload) = 0;
    /// Returns when all that was stored is where it belongs.
    virtual void settle() = 0;
    /// Of the rank's part of a module, as it is kept.
    [[nodiscard]] virtual std::uint64_t hash(std::size_t m, std::uint64_t seed) = 0;

protected:
    /// Calls each(slice) for what this rank has of tensor `k` of module `m`: `first` in the tensor, `offset` in the part.
    template <class Each>
    void each_piece(std::size_t m, std::size_t k, std::size_t count, std::string_view what, Each each) {
        if (m >= layout_.modules() || k >= layout_.slices(m).size()) {
            throw usage_error(formatted("block_store: {} of tensor {} of module {}, which there is not", what, k, m));
        }
        const tensor_slice& all = layout_.slices(m)[k];
        if (count != all.count) {
            throw usage_error(formatted("block_store: {} of {} elements, but tensor {} of module {} has {}", what,
                                        count, k, m, all.count));
        }
        for (const tensor_slice& piece : slices_within({&all, 1}, own(m))) { each(piece); }
    }
    /// Elements from `first` on of the rank's part of a module.
    virtual void put(std::size_t m, std::size_t first, view<const T> values) = 0;
    virtual void get(std::size_t m, std::size_t first, view<T> values) = 0;
};

/// Every module in one page-locked buffer of its own, so that a transfer is one copy at the full rate of the link.
///
/// Cost    the model's bytes, or the rank's part of them, of page-locked memory. Contents are zero until written.
/// Errors  backend_error when memory cannot be page-locked: never ordinary memory instead, which copies slowly and
///         blocks the host.
template <floating_element T, queue Q> class pinned_store final : public block_store<T, Q> {
    using base = block_store<T, Q>;
    staging_queue<Q> memory_;
    std::vector<buffer<T, staging_queue<Q>>> images_;
    typename base::host_ticket none_;

public:
    using typename base::host;
    using typename base::host_ticket;
    using typename base::upload_ticket;

    explicit pinned_store(model_layout l, std::size_t rank = 0, staging_queue<Q> memory = {})
        : base(std::move(l), rank), memory_(std::move(memory)) {
        for (std::size_t m = 0; m < this->layout().modules(); ++m) {
            const std::size_t count = this->own(m).count;
            try {
                images_.emplace_back(memory_, count);
            } catch (const backend_error& e) {
                throw backend_error(
                    formatted("pinned_store: module {} of {}: {} bytes cannot be page-locked, {} are: {}", m,
                              this->layout().modules(), count * sizeof(T), memory_.account().live(), e.what()),
                    e.context());
            }
            fill(memory_, images_.back().view(), T{});
        }
    }
    /// The rank's part of a module, as it is stored.
    [[nodiscard]] view<T, host> image(std::size_t m) const { return images_.at(m).view(); }
    [[nodiscard]] std::size_t bytes() const noexcept { return memory_.account().live(); }

    void fetch(std::size_t, std::size_t, std::span<const pending_update>, upload_ticket&) override {}
    [[nodiscard]] view<const std::byte, host> source(std::size_t m, std::size_t) const override {
        return as_bytes(image(m));
    }
    [[nodiscard]] host_ticket& fetched(std::size_t) override { return none_; }
    [[nodiscard]] view<std::byte, host> sink(std::size_t m, std::size_t) override { return as_bytes(image(m)); }
    [[nodiscard]] host_ticket& emptied(std::size_t) override { return none_; }
    void stored(std::size_t, std::size_t, upload_ticket&) override {}
    void settle() override {}
    [[nodiscard]] std::uint64_t hash(std::size_t m, std::uint64_t seed) override {
        return detail::hash_values(image(m), seed);
    }

private:
    void put(std::size_t m, std::size_t first, view<const T> values) override {
        detail::put_values(image(m).sub(first, values.size()), values);
    }
    void get(std::size_t m, std::size_t first, view<T> values) override {
        detail::get_values(image(m).sub(first, values.size()), values);
    }
};

}  // namespace tutti::zeroth
