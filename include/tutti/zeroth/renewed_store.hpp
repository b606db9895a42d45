// renewed_store: masters in float on the host that the device updates every few steps; in between what travels is made of
// them, of 8 bits say, and updates are replayed on it. Needs zeroth/block_store and a wire: zeroth/{weight,float8}_wire.
// An update of a zeroth-order step is smaller than the last place of 16-bit weights; here none is lost, and none costs the
// host any arithmetic.
#pragma once

#include <algorithm>  // copy_n, fill_n, min
#include <cstddef>    // size_t, byte
#include <span>       // updates
#include <utility>    // move
#include <vector>     // masters

#include <tutti/core/buffer.hpp>          // buffer
#include <tutti/core/elementwise.hpp>     // copy
#include <tutti/core/error.hpp>           // usage_error
#include <tutti/core/text.hpp>            // formatted
#include <tutti/zeroth/block_store.hpp>   // block_store, renewal
#include <tutti/zeroth/perturbation.hpp>  // apply_updates
#include <tutti/zeroth/weight_wire.hpp>   // weight_encoder, weight_decoder

namespace tutti::zeroth {

struct renewed_options {
    std::size_t piece = std::size_t{1} << 22;  ///< weights whose masters are updated at once, a multiple of 128
    bool replay = true;                        ///< updates since are applied to what has come, in T, on every visit
};

/// Masters of type A and, of each block, what travels, both page-locked.
///
/// Semantics    in each step what travels comes of every block, and updates that it lacks are replayed on the decoded
///              weights, in T. After a visit, once in `write_back_every` steps for each block and another part of them in
///              each step, the masters follow, piece by piece between the next blocks: each piece is updated in A with
///              all that it lacks, encoded, and both go back, for the next visit. Modules that stay are updated in T
///              every step, and made of their masters as rarely.
///              So losses are those of weights as they travel; masters take every update, as if alone. Without `replay`
///              blocks are seen without the last write_back_every updates or fewer, which are then drawn once and not
///              in every step until they are in the masters.
/// Determinism  the bits depend on `write_back_every`, on `replay`, and on which passes and flushes are between which
///              updates, since what travels is made anew behind a pass; on nothing else: pieces only cut transfers.
/// Cost         host memory: sizeof(A) and the wire's bytes a weight. A step moves, a weight, the wire's bytes up; and 1/K
///              of sizeof(A) up and of both down. Device memory: a wire a slot, one block of T, six pieces.
/// Errors       usage_error for a piece that is not a multiple of 128; backend_error when memory cannot be page-locked.
template <floating_element T, queue Q, class Wire, floating_element A = float>
requires(weight_encoder<Wire, A, Q>&& weight_decoder<Wire, T, Q>) class renewed_store final : public block_store<T, Q>,
                                                                                              public renewal<T, Q> {
    using base = block_store<T, Q>;
    using M = typename Q::memory_type;

    Wire wire_;
    std::size_t piece_;
    bool replay_;
    staging_queue<Q> memory_;
    std::vector<buffer<A, staging_queue<Q>>> masters_;         // by module
    std::vector<buffer<std::byte, staging_queue<Q>>> wires_;   // by module; head and tail have none
    std::vector<std::vector<std::vector<tensor_slice>>> own_;  // by module and piece
    std::vector<bool> made_;                                   // by module: its wire is of its masters
    typename base::host_ticket none_;

public:
    using typename base::host;
    using typename base::host_ticket;
    using typename base::upload_ticket;

    explicit renewed_store(model_layout l, std::size_t rank = 0, Wire wire = {}, renewed_options options = {},
                           staging_queue<Q> memory = {})
        : base(std::move(l), rank)
        , wire_(std::move(wire))
        , piece_(options.piece)
        , replay_(options.replay)
        , memory_(std::move(memory))
        , made_(this->layout().modules(), false) {
        if (piece_ == 0 || piece_ % 128 != 0) {
            throw usage_error(formatted("renewed_store: pieces of {} weights, expected a multiple of 128", piece_));
        }
        for (std::size_t m = 0; m < this->layout().modules(); ++m) {
            const std::size_t count = this->own(m).count;
            masters_.emplace_back(memory_, count);
            fill(memory_, masters_.back().view(), A{});
            wires_.emplace_back(memory_, m == 0 || m == this->layout().tail() ? 0 : wire_bytes(m));
            auto& cuts = own_.emplace_back();
            for (std::size_t i = 0; i < pieces(m); ++i) {
                part of = elements(m, i);
                of.first += this->own(m).first;
                cuts.push_back(slices_within(this->layout().slices(m), of));
            }
        }
    }
    /// The rank's part of a module. To be read after a flush, and written before a pipeline is made.
    [[nodiscard]] view<A, host> master(std::size_t m) {
        made_.at(m) = false;
        return masters_.at(m).view();
    }
    [[nodiscard]] view<const A, host> master(std::size_t m) const { return masters_.at(m).view(); }
    /// Of page-locked memory.
    [[nodiscard]] std::size_t bytes() const noexcept { return memory_.account().live(); }
    [[nodiscard]] const Wire& wire() const noexcept { return wire_; }

    [[nodiscard]] std::size_t wire_bytes(std::size_t m) const override {
        const std::size_t n = pieces(m);
        return n == 0 ? 0 : (n - 1) * padded(piece_) + padded(elements(m, n - 1).count);
    }
    [[nodiscard]] bool encoded() const noexcept override { return true; }
    void decode(const Q& q, std::size_t m, view<const std::byte, M> in, view<T, M> out) const override {
        for (std::size_t i = 0; i < pieces(m); ++i) {
            const part p = elements(m, i);
            wire_.decode(q, in.sub(i * padded(piece_), wire_.bytes(p.count)), out.sub(p.first, p.count));
        }
    }
    [[nodiscard]] renewal<T, Q>* renewing() noexcept override { return this; }
    void fetch(std::size_t, std::size_t, std::span<const pending_update>, upload_ticket&) override {}
    [[nodiscard]] view<const std::byte, host> source(std::size_t m, std::size_t) const override {
        return wires_[m].view();
    }
    [[nodiscard]] host_ticket& fetched(std::size_t) override { return none_; }
    [[nodiscard]] view<std::byte, host> sink(std::size_t m, std::size_t) override { return wires_[m].view(); }
    [[nodiscard]] host_ticket& emptied(std::size_t) override { return none_; }
    void stored(std::size_t m, std::size_t, upload_ticket&) override { made_[m] = true; }
    void settle() override {}
    [[nodiscard]] std::uint64_t hash(std::size_t m, std::uint64_t seed) override {
        return detail::hash_values(masters_[m].view(), seed);
    }

    // --- renewal ----------------------------------------------------------------------------------------------------
    [[nodiscard]] std::size_t pieces(std::size_t m) const override {
        return (this->own(m).count + piece_ - 1) / piece_;
    }
    [[nodiscard]] std::size_t largest_piece() const override {
        std::size_t most = 0;
        for (const auto& all : masters_) { most = std::max(most, std::min(all.size(), piece_)); }
        return most * sizeof(A);
    }
    [[nodiscard]] view<std::byte, host> masters(std::size_t m, std::size_t i) override {
        const part p = elements(m, i);
        return as_bytes(masters_[m].view().sub(p.first, p.count));
    }
    [[nodiscard]] part encoded_piece(std::size_t m, std::size_t i) const override {
        return {i * padded(piece_), padded(elements(m, i).count)};
    }
    [[nodiscard]] bool made(std::size_t m) const override { return made_[m]; }
    [[nodiscard]] bool replays() const noexcept override { return replay_; }
    void renew(const Q& q, std::size_t m, std::size_t i, view<std::byte, M> masters,
               std::span<const pending_update> updates, view<std::byte, M> encoded, view<T, M> weights) const override {
        const part p = elements(m, i);
        const view<A, M> now(reinterpret_cast<A*>(masters.data()), p.count);
        apply_updates(q, now, own_[m][i], updates);
        if (!encoded.empty()) { wire_.encode(q, view<const A, M>(now), encoded.sub(0, wire_.bytes(p.count))); }
        if (!weights.empty()) { copy(q, view<const A, M>(now), weights.sub(p.first, p.count)); }
    }

private:
    [[nodiscard]] part elements(std::size_t m, std::size_t i) const {
        return {i * piece_, std::min(piece_, this->own(m).count - i * piece_)};
    }
    [[nodiscard]] std::size_t padded(std::size_t count) const {
        return (wire_.bytes(count) + model_layout::alignment - 1) / model_layout::alignment * model_layout::alignment;
    }
    void put(std::size_t m, std::size_t first, view<const T> values) override {
        made_[m] = false;
        detail::put_values(masters_[m].view().sub(first, values.size()), values);
    }
    void get(std::size_t m, std::size_t first, view<T> values) override {
        detail::get_values(masters_[m].view().sub(first, values.size()), values);
    }
};

}  // namespace tutti::zeroth
