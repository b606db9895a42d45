// offload: forward passes and zeroth-order updates of a model that is larger than the device: blocks stream through a
// few slots. Needs zeroth/{block_store,probe,slice} and schedule/lane; on a CUDA queue zeroth/perturbation.cuh.
// Source: Wang et al., ZO2, arXiv:2503.12668; DistZO2, arXiv:2507.03211. Ours: weights stay as they are and perturbed
// copies are made beside them, so nothing drifts; updates keep their own learning rate, and none is left out.
#pragma once

#include <cmath>        // isfinite
#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <exception>    // uncaught_exceptions
#include <optional>     // the last update
#include <span>         // probes, weights
#include <string_view>  // texts
#include <utility>      // move
#include <vector>       // residents

#include <tutti/core/buffer.hpp>                  // buffer
#include <tutti/core/deadline.hpp>                // after
#include <tutti/core/error.hpp>                   // usage_error
#include <tutti/core/partition.hpp>               // part
#include <tutti/core/state.hpp>                   // hash_seed
#include <tutti/core/text.hpp>                    // formatted
#include <tutti/schedule/timeline.hpp>            // timeline
#include <tutti/zeroth/block_model.hpp>           // block_model
#include <tutti/zeroth/block_store.hpp>           // block_store
#include <tutti/zeroth/detail/module_runner.hpp>  // module_runner
#include <tutti/zeroth/detail/slot_ring.hpp>      // slot_ring
#include <tutti/zeroth/perturbation.hpp>          // apply_updates
#include <tutti/zeroth/probe.hpp>                 // probe, loss_value
#include <tutti/zeroth/slice.hpp>                 // whole
#include <tutti/zeroth/transfer_counters.hpp>     // transfer_counters
#include <tutti/zeroth/update_log.hpp>            // update_log

namespace tutti::zeroth {

struct offload_options {
    std::size_t slot_count = 3;        ///< blocks on the device that arrive, are in use, or leave
    std::size_t blocks_resident = 0;   ///< the first so many blocks stay on the device
    std::size_t write_back_every = 1;  ///< steps of updates that a block may lack in its store: it is written so rarely
    bool prefetch = true;              ///< the next pass's first uploads begin before a pass ends
    std::size_t piece = std::size_t{1} << 25;  ///< bytes of a block that move at once, a multiple of 256
    schedule::timeline* trace = nullptr;       ///< lanes, modules and steps; must outlive the pipeline
    int trace_rank = 0;
};

/// A model's weights in a store, brought to the device block by block while it runs.
///
/// Semantics    evaluate  losses of a micro-batch at weights + scale z for each probe, all in one pass: a block comes
///                        once, is updated with what it lacks, and each probe's copy of it is made and used in turn.
///              update    the updates of a step, all at once: applied when a block comes next. While some are pending,
///                        directions stay of one distribution.
///              flush     brings every update into the store: before evaluation elsewhere, saving, and at destruction
///                        (where an error is lost: call it before). After T updates and a flush the store holds exactly
///                        T, each with the learning rate it was given.
///              Head, tail and the first `blocks_resident` blocks stay on the device.
/// Shapes       as the store's layout; probes may be any number, as many as the model has branches.
/// Determinism  bits do not depend on slots, residents, write_back_every, prefetch, piece, Exchange, or which store
///              keeps T: stores that encode say on what theirs do.
/// Cost         a pass: each block up once; down once where it is due. Device memory: residents, slots times the
///              largest block (of a store that encodes: slots times what travels, and one block), one perturbed copy of
///              the largest module, what the model allocates; not the depth. The host waits once a pass, for the losses.
///              With `sliced`, 1/N of the bytes each way and (N-1)/N from other ranks.
///              A step of n blocks takes n times the longest of: an upload; an offload; what computing takes, with the
///              copies; and, where blocks move whole, a slot's way over the slots: up, until it has been read, or down
///              where that is later.
/// Errors       usage_error before anything moved: no slot, more residents than blocks, a store of another rank than
///              the exchange, a probe or update that is not finite, a step twice. After another error the pipeline has failed.
/// Lifetime     store, model and trace outlive it.
template <queue Q, floating_element T, block_model<Q, T> Model, class Exchange = whole> class offload {
    using M = typename Q::memory_type;
    using ring = detail::slot_ring<T, Q, Exchange>;

    Q q_;
    block_store<T, Q>& store_;
    offload_options options_;
    update_log log_;
    std::vector<buffer<T, Q>> residents_;  // by module; empty where it travels
    std::optional<direction> last_;        // of the last update
    bool unsaved_ = false;                 // residents have updates that their store lacks
    bool failed_ = false;
    int exceptions_ = std::uncaught_exceptions();
    ring ring_;
    detail::module_runner<T, Q, Model> runner_;

public:
    using value_type = T;
    using queue_type = Q;

    offload(Q q, Model& model, block_store<T, Q>& store, offload_options options = {}, Exchange exchange = Exchange{})
        : q_(std::move(q))
        , store_(store)
        , options_(options)
        , log_(store.layout().modules() + (store.renewing() == nullptr ? 0 : options.blocks_resident + 2))
        , residents_(store.layout().modules())
        , ring_(q_, store, log_, checked(std::move(exchange), store), travelers(store.layout(), options),
                options.slot_count, options.write_back_every, options.prefetch, options.piece,
                {.trace = options.trace, .trace_rank = options.trace_rank, .consumer = "compute"})
        , runner_(q_, model, store.layout(), residents_, options.trace, options.trace_rank) {
        const model_layout& layout = store_.layout();
        for (std::size_t m = 0; m < layout.modules(); ++m) {
            if (!resident(m)) { continue; }
            residents_[m] = buffer<T, Q>(q_, layout.size(m));
            ring_.load(m, residents_[m].view());
        }
    }
    offload(const offload&) = delete;
    offload& operator=(const offload&) = delete;
    ~offload() {
        if (failed_ || std::uncaught_exceptions() > exceptions_) { return; }
        try {
            flush();
        } catch (...) {}  // the ring's lanes end what is in flight
    }

    /// Collective with `sliced`. `out` gets one loss for each probe.
    void evaluate(std::span<const probe> probes, std::size_t micro_batch, std::span<loss_value> out) {
        if (probes.empty() || probes.size() != out.size()) {
            throw usage_error(formatted("evaluate: {} probes and {} losses", probes.size(), out.size()));
        }
        for (const probe& p : probes) {
            if (!std::isfinite(p.scale)) { throw usage_error(formatted("evaluate: a scale of {}", p.scale)); }
        }
        usable();
        log_.trim();
        if (probes.front().scale != 0) { expect_kind("evaluate", probes.front().z.kind); }
        guarded([&] {
            const auto step = runner_.begin(probes.size());
            ring_.begin(false);
            for (std::size_t m = 0; m < store_.layout().modules(); ++m) { visit(m, probes, micro_batch); }
            for (std::size_t b = 0; b < probes.size(); ++b) { out[b] = runner_.loss(b); }
        });
    }

    /// The updates of one step, in the order in which they apply. None: the step changes nothing.
    void update(std::span<const pending_update> step) {
        usable();
        log_.trim();
        if (step.empty()) { return; }
        const direction& z = step.front().z;
        detail::expect_updates("update", step, z.kind);
        expect_kind("update", z.kind);
        if (last_.has_value() && last_->seed == z.seed && last_->step == z.step) {
            throw usage_error(
                formatted("update: step {} of seed {} again; a step's updates come together", z.step, z.seed));
        }
        last_ = z;
        log_.append(step);
    }

    /// Collective with `sliced`. Cost: one pass without the model where an update is pending, nothing else.
    void flush() {
        guarded([&] {
            if (log_.any_behind()) {
                ring_.begin(true);
                for (std::size_t m = 0; m < store_.layout().modules(); ++m) { visit(m, {}, 0); }
            }
            if (unsaved_) {
                for (std::size_t m = 0; m < store_.layout().modules(); ++m) {
                    if (resident(m)) { ring_.save(m, residents_[m].view()); }
                }
                unsaved_ = false;
            }
            ring_.settle();
            q_.record().wait_host(after(default_timeout()));
        });
    }

    /// Of all weights, flushed; the same on ranks that are replicas. Collective with `sliced`.
    /// Cost  a flush and a read of every weight by the host.
    [[nodiscard]] std::uint64_t hash() {
        flush();
        std::uint64_t h = hash_seed;
        for (std::size_t m = 0; m < store_.layout().modules(); ++m) { h = store_.hash(m, h); }
        return ring_.exchange().hash(h);
    }

    [[nodiscard]] transfer_counters counters() const noexcept { return ring_.counters(); }
    /// Of all that the rank's queues allocated, also the model's activations.
    [[nodiscard]] std::size_t peak_device_bytes() const noexcept { return q_.account().peak(); }
    [[nodiscard]] Q queue() const noexcept { return q_; }

private:
    [[nodiscard]] static bool stays(const model_layout& layout, const offload_options& o, std::size_t m) noexcept {
        return m <= o.blocks_resident || m == layout.tail();
    }
    [[nodiscard]] bool resident(std::size_t m) const noexcept { return stays(store_.layout(), options_, m); }

    // Where the log has what the masters of a module that stays have taken, which lack more than its weights do.
    [[nodiscard]] std::size_t masters_of(std::size_t m) const noexcept {
        return store_.layout().modules() + (m == store_.layout().tail() ? options_.blocks_resident + 1 : m);
    }

    static std::vector<std::size_t> travelers(const model_layout& layout, const offload_options& o) {
        if (o.slot_count == 0) { throw usage_error("offload: 0 slots, expected 1 or more"); }
        if (o.write_back_every == 0) { throw usage_error("offload: write_back_every is 0 steps, expected 1 or more"); }
        if (o.piece == 0 || o.piece % model_layout::alignment != 0) {
            throw usage_error(
                formatted("offload: pieces of {} bytes, expected a multiple of {}", o.piece, model_layout::alignment));
        }
        if (o.blocks_resident > layout.blocks()) {
            throw usage_error(
                formatted("offload: {} resident blocks of a model of {}", o.blocks_resident, layout.blocks()));
        }
        std::vector<std::size_t> order;
        for (std::size_t m = 0; m < layout.modules(); ++m) {
            if (!stays(layout, o, m)) { order.push_back(m); }
        }
        return order;
    }
    static Exchange checked(Exchange e, const block_store<T, Q>& store) {
        if (e.rank() != store.rank() || e.ranks() != store.layout().ranks()) {
            throw usage_error(
                formatted("offload: the store has the part of rank {} of {}, the exchange is rank {} of {}",
                          store.rank(), store.layout().ranks(), e.rank(), e.ranks()));
        }
        return e;
    }
    void usable() const {
        if (failed_) { throw usage_error("offload: used after an error"); }
    }
    // Lists of updates are of one distribution, and so is the perturbation that an update is fused with.
    void expect_kind(std::string_view operation, distribution kind) const {
        if (log_.size() != 0 && log_.front().z.kind != kind) {
            throw usage_error(formatted("{}: directions are {}, those of pending updates {}: flush before", operation,
                                        name_of(kind), name_of(log_.front().z.kind)));
        }
    }
    void fail(std::string_view why) noexcept {
        failed_ = true;
        ring_.exchange().abort(why);
    }
    template <class Work> void guarded(Work work) {
        usable();
        try {
            work();
        } catch (const std::exception& e) {
            fail(e.what());
            throw;
        } catch (...) {
            fail("an exception that is no std::exception");
            throw;
        }
    }

    // Brings a module's weights up to date and, for each probe, makes the copy and runs the module on it. The slot is
    // free as soon as the last copy has been made: the model reads copies alone, unless a probe has a scale of 0.
    void visit(std::size_t m, std::span<const probe> probes, std::size_t micro_batch) {
        const bool travels = !resident(m);
        typename ring::arrival at = travels ? ring_.arrive() : typename ring::arrival{m, 0, residents_[m].view()};
        if (!travels) { renew_resident(m); }
        const bool updated_before = store_.updates() || (Exchange::gathers && travels);
        const std::span<const pending_update> updates = updated_before ? std::span<const pending_update>()
                                                        : travels      ? ring_.lacking(m)
                                                                       : log_.pending(m);
        // What comes is updated as it comes, and the first probe's copy is made of it in the same pass over memory.
        const bool copied_first = !probes.empty() && probes[0].scale != 0;
        const auto bring_up_to_date = [&](part p, std::span<const tensor_slice> slices) {
            if (copied_first) {
                runner_.copy(at.weights, p, slices, updates, probes[0]);
            } else if (!updates.empty()) {
                apply_updates(q_, at.weights.sub(p.first, p.count), slices, updates);
            }
        };
        const part all{0, at.weights.size()};
        const std::span<const tensor_slice> slices = store_.layout().slices(m);
        if (travels) {
            ring_.each_piece(at, bring_up_to_date);
        } else {
            bring_up_to_date(all, slices);
            if (!updates.empty()) {
                log_.applied(m);
                unsaved_ = true;
            }
        }
        for (std::size_t b = 0; b < probes.size(); ++b) {
            const bool last = b + 1 == probes.size();
            if (probes[b].scale == 0) {
                runner_.run_weights(m, at.weights, b, micro_batch);
                if (last && travels) { ring_.release(); }
                continue;
            }
            if (b != 0) { runner_.copy(at.weights, all, slices, {}, probes[b]); }
            runner_.copy_tied(m, probes[b]);
            if (last && travels) { ring_.release(); }
            runner_.run_copy(m, b, micro_batch);
        }
        if (probes.empty() && travels) { ring_.release(); }
    }
    // A module that stays takes its updates from the store where that has masters.
    void renew_resident(std::size_t m) {
        if (store_.updates() && log_.steps_behind(m) != 0) {
            ring_.load(m, residents_[m].view(), log_.pending(m));
            log_.applied(m);
        } else if (ring_.renewal_due(m, masters_of(m))) {
            ring_.load(m, residents_[m].view(), log_.pending(masters_of(m)));
            log_.applied(masters_of(m));
            log_.applied(m);
        }
    }
};

}  // namespace tutti::zeroth
