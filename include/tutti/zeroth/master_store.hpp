// master_store: weights in float on the host, where updates are applied; what goes to the device may be of 16 or 8
// bits, and loses no update. Needs zeroth/block_store and schedule/lane. Nothing comes back from the device.
// Updates of zeroth-order steps are smaller than the last place of 16-bit weights: stored there they would be rounded
// away.
#pragma once

#include <algorithm>  // max, copy_n
#include <cstddef>    // size_t, byte
#include <memory>     // tickets of helpers
#include <span>       // updates
#include <utility>    // move
#include <vector>     // masters

#include <tutti/comm/self.hpp>            // lanes
#include <tutti/core/partition.hpp>       // partition
#include <tutti/schedule/lane.hpp>        // lane
#include <tutti/zeroth/block_store.hpp>   // block_store
#include <tutti/zeroth/perturbation.hpp>  // apply_updates
#include <tutti/zeroth/weight_wire.hpp>   // weight_wire

namespace tutti::zeroth {

/// Masters of float in ordinary memory, and for each slot one page-locked buffer of what travels.
///
/// Semantics    a fetch brings the master up to date, every update rounded to float alone, and encodes it. Modules that
///              stay on the device come anew whenever they lack an update.
/// Determinism  of values and positions; `workers` threads work on parts of a module, and change nothing but how a wire
///              of blocks is cut.
/// Cost         4 bytes a weight of host memory; for each step the host makes a normal a weight, some 5e7 a second and
///              core (signs: many more), so this pays where the link is slow or directions are of signs. No offload.
template <floating_element T, queue Q, weight_wire<T, Q> Wire = rounded_wire<T>>
class master_store final : public block_store<T, Q> {
    using base = block_store<T, Q>;
    using lane = schedule::lane<comm::self<host_queue>>;
    static_assert(base::host::host_accessible, "a virtual rank's host has no values to make what travels of");

    Wire wire_;
    std::size_t workers_;
    staging_queue<Q> memory_;
    std::vector<std::vector<float>> masters_;                  // by module
    std::vector<std::vector<std::vector<tensor_slice>>> own_;  // by module and worker
    std::vector<buffer<std::byte, staging_queue<Q>>> wires_;   // by slot
    std::vector<lane> lanes_;
    std::vector<typename base::host_ticket> fetched_;
    typename base::host_ticket none_;

    struct piece {
        part elements;
        std::size_t at;  // bytes, in the wire
        std::size_t bytes;
    };
    [[nodiscard]] piece piece_of(std::size_t m, std::size_t worker) const {
        const std::size_t count = this->own(m).count;
        std::size_t at = 0;
        for (std::size_t w = 0; w < worker; ++w) { at += padded(partition(count, workers_, w, cut).count); }
        const part elements = partition(count, workers_, worker, cut);
        return {elements, at, wire_.bytes(elements.count)};
    }
    [[nodiscard]] std::size_t padded(std::size_t count) const {
        return (wire_.bytes(count) + model_layout::alignment - 1) / model_layout::alignment * model_layout::alignment;
    }

public:
    using typename base::host;
    using typename base::host_ticket;
    using typename base::upload_ticket;
    static constexpr std::size_t cut =
        1024;  ///< elements: where workers' parts begin, a multiple of any block of a wire

    explicit master_store(model_layout l, std::size_t rank = 0, Wire wire = {}, std::size_t workers = 1,
                          staging_queue<Q> memory = {})
        : base(std::move(l), rank), wire_(std::move(wire)), workers_(workers), memory_(std::move(memory)) {
        if (workers == 0) { throw usage_error("master_store: 0 workers, expected 1 or more"); }
        for (std::size_t m = 0; m < this->layout().modules(); ++m) {
            masters_.emplace_back(this->own(m).count);
            auto& cuts = own_.emplace_back();
            for (std::size_t w = 0; w < workers_; ++w) {
                part of = piece_of(m, w).elements;
                of.first += this->own(m).first;
                cuts.push_back(slices_within(this->layout().slices(m), of));
            }
        }
        for (std::size_t w = 0; w < workers_; ++w) {
            lanes_.emplace_back(comm::self<host_queue>(host_queue(), {.name = "master"}));
        }
    }
    /// The rank's part of a module. To be read after a flush.
    [[nodiscard]] view<const float> master(std::size_t m) const { return masters_.at(m); }
    /// Sets the masters of a tensor, more exactly than write().
    void write_master(std::size_t m, std::size_t k, view<const float> whole) {
        this->each_piece(m, k, whole.size(), "write_master", [&](const tensor_slice& p) {
            std::copy_n(whole.data() + p.first, p.count, masters_[m].data() + p.offset);
        });
    }

    [[nodiscard]] bool updates() const noexcept override { return true; }
    [[nodiscard]] std::size_t wire_bytes(std::size_t m) const override {
        const piece last = piece_of(m, workers_ - 1);
        return Wire::plain ? this->own(m).count * sizeof(T) : last.at + padded(last.elements.count);
    }
    [[nodiscard]] bool encoded() const noexcept override { return !Wire::plain; }
    void decode(const Q& q, std::size_t m, view<const std::byte, typename Q::memory_type> in,
                view<T, typename Q::memory_type> out) const override {
        for (std::size_t w = 0; w < workers_; ++w) {
            const piece p = piece_of(m, w);
            if (p.elements.count == 0) { continue; }
            wire_.decode(q, in.sub(p.at, p.bytes), out.sub(p.elements.first, p.elements.count));
        }
    }
    void open(std::size_t slot_count) override {
        std::size_t largest = 0;
        for (std::size_t m = 0; m < this->layout().modules(); ++m) { largest = std::max(largest, wire_bytes(m)); }
        fetched_.clear();
        wires_.clear();
        for (std::size_t s = 0; s < slot_count; ++s) { wires_.emplace_back(memory_, largest); }
        fetched_.resize(slot_count);
    }
    void fetch(std::size_t m, std::size_t slot, std::span<const pending_update> updates,
               upload_ticket& before) override {
        // The first worker waits for the others, so that one ticket stands for all.
        auto helpers = std::make_shared<std::vector<host_ticket>>();
        for (std::size_t w = 1; w < workers_; ++w) {
            helpers->push_back(lanes_[w].submit("master", work(m, w, slot, updates), before));
        }
        static_cast<void>(fetched_[slot] = lanes_[0].submit(
                              "master",
                              [mine = work(m, 0, slot, updates), helpers](auto& c) {
                                  mine(c);
                                  for (const host_ticket& t : *helpers) { t.wait(host_queue()); }
                              },
                              before));
    }
    [[nodiscard]] view<const std::byte, host> source(std::size_t m, std::size_t slot) const override {
        return wires_.at(slot).view().sub(0, wire_bytes(m));
    }
    [[nodiscard]] host_ticket& fetched(std::size_t slot) override { return fetched_[slot]; }
    [[nodiscard]] view<std::byte, host> sink(std::size_t, std::size_t) override { return {}; }
    [[nodiscard]] host_ticket& emptied(std::size_t) override { return none_; }
    void stored(std::size_t, std::size_t, upload_ticket&) override {}
    void settle() override {
        for (const host_ticket& t : fetched_) { t.wait(host_queue()); }
    }
    [[nodiscard]] std::uint64_t hash(std::size_t m, std::uint64_t seed) override {
        return hash_bytes(as_bytes(view<const float>(masters_[m])), seed);
    }

private:
    [[nodiscard]] auto work(std::size_t m, std::size_t worker, std::size_t slot,
                            std::span<const pending_update> updates) {
        const piece p = piece_of(m, worker);
        const view<float> master = view<float>(masters_[m]).sub(p.elements.first, p.elements.count);
        const std::span<const tensor_slice> slices = own_[m][worker];
        // A plain wire is one run of elements.
        const std::size_t at = Wire::plain ? p.elements.first * sizeof(T) : p.at;
        const view<std::byte, host> out = wires_.at(slot).view().sub(at, p.bytes);
        return [master, slices, updates, out, wire = wire_](auto& c) {
            apply_updates(c.queue(), master, slices, updates);
            wire.encode(host_queue(), view<const float>(master), view<std::byte>(out.data(), out.size()));
        };
    }
    void put(std::size_t m, std::size_t first, view<const T> values) override {
        for (std::size_t i = 0; i < values.size(); ++i) { masters_[m][first + i] = static_cast<float>(values[i]); }
    }
    void get(std::size_t m, std::size_t first, view<T> values) override {
        for (std::size_t i = 0; i < values.size(); ++i) { values[i] = static_cast<T>(masters_[m][first + i]); }
    }
};

}  // namespace tutti::zeroth
