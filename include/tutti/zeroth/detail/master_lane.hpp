// master_lane: masters on their way to the device and back, piece by piece, beside the blocks that a ring brings.
// Needs schedule/lane and zeroth/block_store. Pieces of a module follow each other between the uploads of the next
// blocks, so that the link has as much to do at all times.
#pragma once

#include <algorithm>  // min, max, any_of
#include <cstddef>    // size_t, byte
#include <deque>      // modules that wait
#include <memory>     // updates
#include <span>       // updates
#include <vector>     // tickets

#include <tutti/comm/self.hpp>                 // self
#include <tutti/core/buffer.hpp>               // buffer
#include <tutti/schedule/lane.hpp>             // lane
#include <tutti/zeroth/block_store.hpp>        // block_store, renewal
#include <tutti/zeroth/detail/transfers.hpp>   // bring, take
#include <tutti/zeroth/transfer_counters.hpp>  // transfer_counters

namespace tutti::zeroth::detail {

/// Brings masters, lets them take updates and become what travels or weights, and takes them back.
///
/// Semantics  a module is renewed at once, for what its ring needs now, or put off: then its pieces go when the ring says
///            so, in the order in which modules were put off, and behind the module's own upload, which was submitted
///            before. What travels of it is not to be uploaded before remade(m).
///            Uploads and offloads are on the ring's lanes, the updates on one of its own, whose kernels come first:
///            uploads would wait behind a model's kernels.
template <floating_element T, queue Q> class master_lane {
    using M = typename Q::memory_type;
    using host = typename block_store<T, Q>::host;
    using ticket = schedule::ticket<Q>;
    using lane = schedule::lane<comm::self<Q>>;
    using update_list = std::shared_ptr<const std::vector<pending_update>>;
    static constexpr std::size_t under_way = 6;  // some come, some are updated, some go
    static constexpr std::size_t all = static_cast<std::size_t>(-1);

    block_store<T, Q>& store_;
    renewal<T, Q>& of_;
    lane& up_;
    lane& off_;
    transfer_counters& counters_;
    std::size_t piece_size_;
    std::size_t encoded_size_ = 0;  // of a piece
    buffer<std::byte, Q> pieces_;
    lane renew_;
    std::vector<ticket> brought_;   // by piece under way
    std::vector<ticket> renewed_;   // by piece under way
    std::vector<ticket> returned_;  // by piece under way
    std::vector<ticket> remade_;    // by module
    std::size_t next_ = 0;
    struct waiting {
        std::size_t module;
        update_list updates;
        std::size_t next;  // piece
    };
    std::deque<waiting> waiting_;

public:
    master_lane(const Q& q, block_store<T, Q>& store, renewal<T, Q>& of, std::span<const std::size_t> travelers,
                lane& up, lane& off, transfer_counters& counters, const schedule::lane_options& options)
        : store_(store)
        , of_(of)
        , up_(up)
        , off_(off)
        , counters_(counters)
        , piece_size_(padded(of.largest_piece()))
        , renew_(comm::self<Q>(urgent(q), {.name = "zeroth/renew"}), options)
        , brought_(under_way)
        , renewed_(under_way)
        , returned_(under_way)
        , remade_(store.layout().modules()) {
        for (const std::size_t m : travelers) {
            if (of.pieces(m) != 0) { encoded_size_ = std::max(encoded_size_, padded(of.encoded_piece(m, 0).count)); }
        }
        pieces_ = buffer<std::byte, Q>(q, under_way * (piece_size_ + encoded_size_));
    }
    master_lane(const master_lane&) = delete;
    master_lane& operator=(const master_lane&) = delete;

    /// Of all that has been submitted of a module.
    [[nodiscard]] ticket& remade(std::size_t m) { return remade_[m]; }

    /// All of a module: `encoded` becomes what travels of it, `weights` what it is, whichever is not empty; behind `free`.
    template <class... Free>
    [[nodiscard]] ticket renew(std::size_t m, std::span<const pending_update> updates, view<std::byte, M> encoded,
                               view<T, M> weights, Free&... free) {
        const auto kept = std::make_shared<std::vector<pending_update>>(updates.begin(), updates.end());
        for (std::size_t i = 0; i < of_.pieces(m); ++i) {
            const part at = of_.encoded_piece(m, i);
            bring_piece(m, i, kept, encoded.empty() ? encoded : encoded.sub(at.first, at.count), {}, weights, free...);
        }
        static_cast<void>(remade_[m] = off_.submit("remade", [](comm::self<Q>&) {}));
        return renew_.submit("renewed", [](comm::self<Q>&) {});
    }
    void put_off(std::size_t m, std::span<const pending_update> updates) {
        waiting_.push_back({m, std::make_shared<std::vector<pending_update>>(updates.begin(), updates.end()), 0});
    }
    /// 1/n of the module whose turn it is.
    void some(std::size_t n) {
        if (!waiting_.empty()) { advance((of_.pieces(waiting_.front().module) - 1) / n + 1); }
    }
    /// All of a module that was put off, and of those before it.
    void rest_of(std::size_t m) {
        while (std::any_of(waiting_.begin(), waiting_.end(), [m](const waiting& w) { return w.module == m; })) {
            advance(all);
        }
    }
    void settle() {
        while (!waiting_.empty()) { advance(all); }
        for (const ticket& t : remade_) { t.wait(host_queue()); }
    }

private:
    [[nodiscard]] static Q urgent(const Q& q) {
        if constexpr (requires { q.urgent_sibling(); }) {
            return q.urgent_sibling();
        } else {
            return q.sibling();
        }
    }
    [[nodiscard]] static std::size_t padded(std::size_t bytes) noexcept {
        return (bytes + model_layout::alignment - 1) / model_layout::alignment * model_layout::alignment;
    }
    void advance(std::size_t count) {
        waiting& now = waiting_.front();
        const std::size_t m = now.module;
        for (; count != 0 && now.next < of_.pieces(m); --count, ++now.next) {
            const std::size_t size = of_.encoded_piece(m, now.next).count;
            const view<std::byte, M> encoded = pieces_.view().sub(place_of(next_) + piece_size_, size);
            const part at = of_.encoded_piece(m, now.next);
            bring_piece(m, now.next, now.updates, encoded, store_.sink(m, 0).sub(at.first, at.count), {});
        }
        if (now.next < of_.pieces(m)) { return; }
        waiting_.pop_front();
        static_cast<void>(remade_[m] = off_.submit("remade", [](comm::self<Q>&) {}));
    }
    [[nodiscard]] std::size_t place_of(std::size_t number) const noexcept {
        return number % under_way * (piece_size_ + encoded_size_);
    }
    // What has been encoded goes to `sink`, if that is not empty; masters go back if they have changed.
    template <class... Free>
    void bring_piece(std::size_t m, std::size_t i, const update_list& updates, view<std::byte, M> encoded,
                     view<std::byte, host> sink, view<T, M> weights, Free&... free) {
        const std::size_t k = next_ % under_way;
        const view<std::byte, host> home = of_.masters(m, i);
        const view<std::byte, M> here = pieces_.view().sub(place_of(next_++), home.size());
        static_cast<void>(
            brought_[k] = up_.submit(
                "upload",
                [from = view<const std::byte, host>(home), here](comm::self<Q>& c) { bring(c.queue(), from, here); },
                renewed_[k], returned_[k], remade_[m]));
        static_cast<void>(renewed_[k] = renew_.submit(
                              "renew",
                              [of = &of_, m, i, here, updates, encoded, weights](comm::self<Q>& c) {
                                  of->renew(c.queue(), m, i, here, *updates, encoded, weights);
                              },
                              brought_[k], free...));
        counters_.uploads += 1;
        counters_.upload_bytes += home.size();
        if (updates->empty()) { return; }
        static_cast<void>(returned_[k] = off_.submit(
                              "offload",
                              [from = view<const std::byte, M>(here), home, wire = view<const std::byte, M>(encoded),
                               sink](comm::self<Q>& c) {
                                  take(c.queue(), from, home);
                                  if (!sink.empty()) { take(c.queue(), wire, sink); }
                              },
                              renewed_[k]));
        counters_.offloads += 1;
        counters_.offload_bytes += home.size() + sink.size();
    }
};

}  // namespace tutti::zeroth::detail
