// slot_ring: blocks on their way through a few slots of a device: fetch, upload, gather, offload, each on a lane.
// Needs schedule/lane, zeroth/{block_store,slice,update_log}. Ordered by events and tickets alone: inside a pass the
// host waits for nothing but stores that are slower than the device.
// Source: Wang et al., ZO2, arXiv:2503.12668; a ring of slots that the caller sizes, and offloads that do
// not wait for the computation, are ours.
#pragma once

#include <algorithm>  // min, max
#include <cstddef>    // size_t, byte
#include <optional>   // masters
#include <span>       // slices
#include <utility>    // move
#include <vector>     // tickets

#include <tutti/comm/self.hpp>                  // self
#include <tutti/core/buffer.hpp>                // buffer
#include <tutti/core/error.hpp>                 // usage_error
#include <tutti/core/text.hpp>                  // formatted
#include <tutti/schedule/lane.hpp>              // lane
#include <tutti/zeroth/block_store.hpp>         // block_store
#include <tutti/zeroth/detail/master_lane.hpp>  // master_lane
#include <tutti/zeroth/detail/transfers.hpp>    // bring, take
#include <tutti/zeroth/perturbation.hpp>        // apply_updates
#include <tutti/zeroth/slice.hpp>               // whole, sliced
#include <tutti/zeroth/transfer_counters.hpp>   // transfer_counters
#include <tutti/zeroth/update_log.hpp>          // update_log

namespace tutti::zeroth::detail {

/// Modules that do not stay on the device, in the order in which they are visited, pass after pass.
///
/// Semantics  visits are numbered from 0 over all passes: visit v is of module order[v % n] and in slot v % K. A pass:
///            begin(), then for each module arrive() and, behind the last work that reads the slot, release(). Uploads
///            run ahead as far as slots are free and the module's last visit is over, also into the next pass.
///            A transfer is submitted behind all that it depends on, so that its event is enough:
///              upload   the slot's last reader (the queue as it is) and the slot's last offload. So also the module's
///                       last offload: there are no more slots than modules, so its slot has been waited for by this
///                       upload or one before it
///              offload  the update (the queue as it is, or the lane that gathers)
///            Weights that come as they are move in pieces, which are updated as they come and go back at once, so that
///            the link has work both ways also with two slots: each piece of an upload waits for the piece that was in
///            its place, the last one for all that was in the slot.
///            What is decoded needs its slot no longer: the next upload into it begins behind that, and all modules are
///            decoded to the same place. Where a store has masters that the device updates, those of a module that is due
///            come after its visit, some pieces behind each of the next uploads, so that the link has as much to do at all
///            times; are updated and encoded on a lane of their own; and go back before the module comes again.
template <floating_element T, queue Q, class Exchange> class slot_ring {
public:
    using M = typename Q::memory_type;
    using store_type = block_store<T, Q>;
    using host = typename store_type::host;
    using ticket = schedule::ticket<Q>;

    struct arrival {
        std::size_t number;  ///< of the module
        std::size_t slot;
        view<T, M> weights;
    };

private:
    static constexpr std::size_t nobody = static_cast<std::size_t>(-1);
    using lane = schedule::lane<comm::self<Q>>;

    Q q_;
    store_type& store_;
    update_log& log_;
    std::vector<std::size_t> order_;
    std::vector<std::vector<std::vector<tensor_slice>>> own_slices_;  // by module and piece: what this rank updates
    std::size_t slots_;
    std::size_t write_every_;
    bool prefetch_;
    renewal<T, Q>* renewing_;
    bool decodes_first_;               // of the visit
    std::size_t piece_;                // elements
    std::vector<std::size_t> pieces_;  // of every module
    std::size_t slot_size_ = 0;
    std::size_t wire_size_ = 0;
    transfer_counters counters_;
    buffer<T, Q> weights_;
    buffer<std::byte, Q> wires_;
    Exchange exchange_;  // its lane works on the buffers above
    comm::self<Q> root_;
    lane up_;
    lane off_;
    std::optional<master_lane<T, Q>> masters_;
    std::size_t current_ = 0;                     // module that is visited
    std::vector<std::vector<ticket>> uploaded_;   // by slot and piece
    std::vector<ticket> updated_;                 // by slot, where ranks gather
    std::vector<ticket> gathered_;                // by slot
    std::vector<std::vector<ticket>> offloaded_;  // by module and piece
    std::vector<std::size_t> user_;               // by slot: whose offload to wait for
    ticket loaded_;
    ticket none_;
    // Visits, each number at most the one before it: fetch, upload, exchange, visit.
    std::size_t fetching_ = 0;
    std::size_t uploading_ = 0;
    std::size_t exchanging_ = 0;
    std::size_t visited_ = 0;   // whose slot is free
    std::size_t released_ = 0;  // whose module may come again
    std::size_t end_ = 0;       // of the pass
    bool write_all_ = false;

public:
    slot_ring(Q q, store_type& store, update_log& log, Exchange exchange, std::vector<std::size_t> order,
              std::size_t slot_count, std::size_t write_every, bool prefetch, std::size_t piece_bytes,
              schedule::lane_options lanes)
        : q_(std::move(q))
        , store_(store)
        , log_(log)
        , order_(std::move(order))
        , slots_(std::min(slot_count, std::max<std::size_t>(order_.size(), 1)))
        , write_every_(write_every)
        , prefetch_(prefetch && !store.updates())
        , renewing_(store.renewing())
        , decodes_first_(store.encoded() && !Exchange::gathers)
        , piece_(piece_bytes / sizeof(T))
        , pieces_(store.layout().modules(), 1)
        , exchange_(std::move(exchange))
        , root_(q_, {.name = "zeroth"})
        , up_(root_.duplicate("upload"), lanes)
        , off_(root_.duplicate("offload"), lanes)
        , uploaded_(slots_)
        , updated_(slots_)
        , gathered_(slots_)
        , user_(slots_, nobody) {
        std::size_t most = 1;
        for (const std::size_t m : order_) {
            const std::size_t count = store_.own(m).count;
            if (!Exchange::gathers && !store_.encoded() && count != 0) { pieces_[m] = (count + piece_ - 1) / piece_; }
            most = std::max(most, pieces_[m]);
            slot_size_ = std::max(slot_size_, store_.layout().size(m));
            wire_size_ = std::max(wire_size_, store_.wire_bytes(m));
        }
        for (auto& of_slot : uploaded_) { of_slot.resize(most); }
        for (std::size_t m = 0; m < store_.layout().modules(); ++m) {
            offloaded_.emplace_back(pieces_[m]);
            auto& of_module = own_slices_.emplace_back();
            for (std::size_t i = 0; i < pieces_[m]; ++i) {
                const part own = Exchange::gathers ? store_.own(m) : piece(m, i);
                of_module.push_back(slices_within(store_.layout().slices(m), own));
            }
        }
        wire_size_ = store_.encoded() ? (wire_size_ + model_layout::alignment - 1) / model_layout::alignment *
                                            model_layout::alignment
                                      : 0;
        weights_ = buffer<T, Q>(q_, (decodes_first_ ? 1 : slots_) * slot_size_);
        wires_ = buffer<std::byte, Q>(q_, slots_ * wire_size_);
        if (renewing_ != nullptr) { masters_.emplace(q_, store_, *renewing_, order_, up_, off_, counters_, lanes); }
        store_.open(slots_ + 1);  // one for modules that stay
    }

    slot_ring(const slot_ring&) = delete;
    slot_ring& operator=(const slot_ring&) = delete;
    ~slot_ring() {
        try {
            store_.settle();  // its lanes may be reading the log
        } catch (...) {}      // what went wrong there has been thrown, or nobody asked for it
    }

    [[nodiscard]] const transfer_counters& counters() const noexcept { return counters_; }
    [[nodiscard]] Exchange& exchange() noexcept { return exchange_; }

    /// `write_all`: every module goes back that lacks an update in its store, also if it is not due.
    void begin(bool write_all) {
        end_ += order_.size();
        write_all_ = write_all;
        advance();
    }
    /// The next module. Where ranks gather, and where the store updates, it lacks no update; else its updates are the
    /// visitor's.
    [[nodiscard]] arrival arrive() {
        const std::size_t s = visited_ % slots_;
        const std::size_t m = order_[visited_ % order_.size()];
        current_ = m;
        return {m, s, slot(m, s)};
    }
    /// Calls update(part, slices) for the parts of its run, in order, each there for work of the queue from now on; behind
    /// that it goes back where the module is due.
    template <class Update> void each_piece(const arrival& at, Update update) {
        const std::size_t m = at.number, s = at.slot;
        const bool goes_back = !Exchange::gathers && due(m);
        for (std::size_t i = 0; i < pieces_[m]; ++i) {
            uploaded_[s][i].wait(q_);
            if constexpr (Exchange::gathers) {
                updated_[s].wait(q_);
                gathered_[s].wait(q_);
            } else if (decodes_first_) {
                store_.decode(q_, m, wire(m, s), slot(m, s));
                ++visited_;
                advance();
            }
            update(piece(m, i),
                   std::span<const tensor_slice>(Exchange::gathers ? store_.layout().slices(m) : own_slices_[m][i]));
            if (goes_back) { submit_offload("offload", m, s, i, as_bytes(view<const T, M>(at.weights)), q_); }
        }
        if (goes_back) { log_.applied(m); }
    }
    /// Behind the last work that reads the arrival's weights.
    void release() {
        if (renewal_due(current_, current_)) {
            masters_->put_off(current_, log_.pending(current_));
            log_.applied(current_);
        }
        visited_ = ++released_;
        advance();
        if (renewing_ != nullptr) { masters_->some(write_every_); }
    }
    /// Updates for the visitor, or whoever gathers, of a module that has come.
    [[nodiscard]] std::span<const pending_update> lacking(std::size_t m) const {
        if (store_.updates() || (renewing_ != nullptr && !renewing_->replays())) { return {}; }
        return log_.pending(m);
    }
    /// Is it time for the masters of a module? `entry`: their place in the log.
    [[nodiscard]] bool renewal_due(std::size_t m, std::size_t entry) const {
        if (renewing_ == nullptr) { return false; }
        const std::size_t behind = log_.steps_behind(entry);
        return behind != 0 && (write_all_ || behind >= write_every_ || (log_.steps() + m) % write_every_ == 0);
    }

    /// A module that stays comes from its store, with `updates` where the store applies them, or its masters take them,
    /// for work of the queue from now on.
    void load(std::size_t m, view<T, M> to, std::span<const pending_update> updates = {}) {
        if (to.empty()) { return; }
        const part own = store_.own(m);
        const view<T, M> mine = to.sub(own.first, own.count);
        if (renewing_ != nullptr) {
            static_cast<void>(loaded_ = masters_->renew(m, updates, {}, mine, q_));
            loaded_.wait(q_);
        } else {
            const buffer<std::byte, Q> encoded(q_, store_.encoded() ? store_.wire_bytes(m) : 0);
            store_.fetch(m, slots_, updates, loaded_);
            static_cast<void>(loaded_ = submit_upload("load", m, slots_, 0,
                                                      store_.encoded() ? encoded.view() : as_bytes(mine), none_));
            loaded_.wait(q_);
            if (store_.encoded()) { store_.decode(q_, m, encoded.view(), mine); }
        }
        if constexpr (Exchange::gathers) {
            const ticket t = exchange_.lane().submit(
                "gather", [to, own, gather = exchange_.gather()](auto& c) { gather(c, to, own); }, q_);
            t.wait(q_);
            counters_.gathered_bytes += (to.size() - own.count) * sizeof(T);
        }
    }
    /// A module that stays, back to its store, behind the queue's work.
    void save(std::size_t m, view<const T, M> from) {
        if (from.empty() || store_.updates() || renewing_ != nullptr) { return; }
        const part own = store_.own(m);
        submit_offload("save", m, slots_, 0, as_bytes(from.sub(own.first, own.count)), q_);
        offloaded_[m].front().wait(host_queue());
    }
    /// Waits until every module is in its store.
    void settle() {
        if (renewing_ != nullptr) { masters_->settle(); }
        for (const auto& of_module : offloaded_) { of_module.back().wait(host_queue()); }
        store_.settle();
    }

private:
    [[nodiscard]] view<T, M> slot(std::size_t m, std::size_t s) const {
        return weights_.view().sub(decodes_first_ ? 0 : s * slot_size_, store_.layout().size(m));
    }
    [[nodiscard]] view<T, M> own_of(std::size_t m, std::size_t s) const {
        const part own = store_.own(m);
        return slot(m, s).sub(own.first, own.count);
    }
    [[nodiscard]] view<std::byte, M> wire(std::size_t m, std::size_t s) const {
        return wires_.view().sub(s * wire_size_, store_.wire_bytes(m));
    }
    // What a module's run, and so the bytes that travel of it, is cut into.
    [[nodiscard]] part piece(std::size_t m, std::size_t i) const {
        if (pieces_[m] == 1) { return {0, store_.layout().size(m)}; }
        return {i * piece_, std::min(piece_, store_.layout().size(m) - i * piece_)};
    }
    template <class Bytes> [[nodiscard]] Bytes piece_of(Bytes all, std::size_t m, std::size_t i) const {
        const part p = piece(m, i);
        return pieces_[m] == 1 ? all : all.sub(p.first * sizeof(T), p.count * sizeof(T));
    }
    [[nodiscard]] bool due(std::size_t m) const {
        return !store_.updates() && renewing_ == nullptr && log_.steps_behind(m) >= (write_all_ ? 1 : write_every_);
    }
    // Starts all that may start. A slot is free when its last visit is over, and so is a module.
    void advance() {
        const std::size_t n = order_.size();
        if (n == 0) { return; }
        const std::size_t last = prefetch_ ? released_ + n : std::min(released_ + n, end_);
        for (;;) {
            while (fetching_ < std::min(last, uploading_ + slots_)) { fetch(); }
            if (uploading_ >= std::min(last, visited_ + slots_)) { break; }
            upload_next();
        }
        if constexpr (Exchange::gathers) {
            while (exchanging_ < std::min(uploading_, end_)) { exchange_next(); }
        }
    }
    void fetch() {
        const std::size_t s = fetching_ % slots_;
        const std::size_t m = order_[fetching_ % order_.size()];
        ticket& last = user_[s] == nobody ? none_ : uploaded_[s][pieces_[user_[s]] - 1];
        store_.fetch(m, s, store_.updates() ? log_.pending(m) : std::span<const pending_update>(), last);
        if (store_.updates()) { log_.applied(m); }
        ++fetching_;
    }
    void upload_next() {
        const std::size_t s = uploading_ % slots_;
        const std::size_t m = order_[uploading_ % order_.size()];
        const view<std::byte, M> into = store_.encoded() ? wire(m, s) : as_bytes(own_of(m, s));
        std::vector<ticket>* const leaving = user_[s] == nobody ? nullptr : &offloaded_[user_[s]];
        if (renewing_ != nullptr && !renewing_->made(m)) {  // it has never traveled
            static_cast<void>(uploaded_[s][0] =
                                  masters_->renew(m, {}, into, {}, q_, leaving == nullptr ? none_ : leaving->back()));
            submit_offload("offload", m, s, 0, view<const std::byte, M>(into), uploaded_[s][0]);
        } else {
            if (renewing_ != nullptr) { masters_->rest_of(m); }
            for (std::size_t i = 0; i < pieces_[m]; ++i) {
                const bool all = i + 1 == pieces_[m] || (leaving != nullptr && i >= leaving->size());
                ticket& gone = leaving == nullptr ? none_ : all ? leaving->back() : (*leaving)[i];
                static_cast<void>(uploaded_[s][i] = submit_upload("upload", m, s, i, piece_of(into, m, i), gone));
            }
        }
        user_[s] = m;
        ++uploading_;
    }
    [[nodiscard]] ticket submit_upload(std::string_view name, std::size_t m, std::size_t s, std::size_t i,
                                       view<std::byte, M> into, ticket& gone) {
        const view<const std::byte, host> from = piece_of(store_.source(m, s), m, i);
        counters_.uploads += i == 0 ? 1 : 0;
        counters_.upload_bytes += from.size();
        return up_.submit(
            name, [from, into](comm::self<Q>& c) { bring(c.queue(), from, into); }, q_, gone, offloaded_[m][i],
            renewing_ == nullptr ? none_ : masters_->remade(m), store_.fetched(s));
    }
    void exchange_next() {
        if constexpr (Exchange::gathers) {
            const std::size_t s = exchanging_ % slots_;
            const std::size_t m = order_[exchanging_ % order_.size()];
            const view<T, M> all = slot(m, s);
            const view<T, M> mine = own_of(m, s);
            const part own = store_.own(m);
            const std::span<const tensor_slice> slices = own_slices_[m][0];
            const std::span<const pending_update> updates = lacking(m);
            const view<const std::byte, M> encoded = store_.encoded() ? wire(m, s) : view<std::byte, M>();
            const store_type* const decoder = store_.encoded() ? &store_ : nullptr;
            static_cast<void>(updated_[s] = exchange_.lane().submit(
                                  "update",
                                  [mine, slices, updates, encoded, decoder, m](auto& c) {
                                      if (decoder != nullptr) { decoder->decode(c.queue(), m, encoded, mine); }
                                      if (!updates.empty()) { apply_updates(c.queue(), mine, slices, updates); }
                                  },
                                  uploaded_[s][0]));
            if (due(m)) {
                submit_offload("offload", m, s, 0, as_bytes(view<const T, M>(mine)), updated_[s]);
                log_.applied(m);
            }
            static_cast<void>(gathered_[s] = exchange_.lane().submit(
                                  "gather", [all, own, gather = exchange_.gather()](auto& c) { gather(c, all, own); }));
            counters_.gathered_bytes += (all.size() - own.count) * sizeof(T);
            ++exchanging_;
        }
    }
    // Piece i of `all`, of a module that goes back; the last one is behind all others.
    template <class After>
    void submit_offload(std::string_view name, std::size_t m, std::size_t s, std::size_t i,
                        view<const std::byte, M> all, After& behind) {
        const view<std::byte, host> to = piece_of(store_.sink(m, s), m, i);
        const view<const std::byte, M> from = piece_of(all, m, i);
        static_cast<void>(
            offloaded_[m][i] = off_.submit(
                name, [from, to](comm::self<Q>& c) { take(c.queue(), from, to); }, behind, store_.emptied(s)));
        counters_.offloads += i == 0 ? 1 : 0;
        counters_.offload_bytes += to.size();
        if (i + 1 == pieces_[m]) { store_.stored(m, s, offloaded_[m][i]); }
    }
};

}  // namespace tutti::zeroth::detail
