// Where the weights of forward_model are while they are tuned: all beside it, or on the host, passing by in blocks.
// Needs forward_model.hpp, zeroth_options.hpp and zeroth. Pipelines of zeroth behind one face, each compiled once.
#pragma once

#include <algorithm>   // copy
#include <cstddef>     // size_t
#include <cstdint>     // hashes
#include <functional>  // first values
#include <memory>      // pipelines
#include <optional>    // made after its weights
#include <span>        // probes
#include <utility>     // move
#include <vector>      // places

#include <tutti/core/buffer.hpp>               // weights
#include <tutti/core/elementwise.hpp>          // fill
#include <tutti/schedule/timeline.hpp>         // trace
#include <tutti/zeroth/block_store.hpp>        // pinned_store
#include <tutti/zeroth/in_memory.hpp>          // in_memory
#include <tutti/zeroth/layout.hpp>             // model_layout
#include <tutti/zeroth/offload.hpp>            // offload
#include <tutti/zeroth/slice.hpp>              // sliced
#include <tutti/zeroth/transfer_counters.hpp>  // transfer_counters

#include "forward_model.hpp"
#include "options.hpp"

namespace transformer {

/// A pipeline of zeroth whose weights can be read by parameter.
template <class T> struct tuned_weights {
    /// Sets parameter i.
    using first_values = std::function<void(std::size_t i, tutti::view<T>)>;

    tuned_weights() = default;
    tuned_weights(const tuned_weights&) = delete;
    tuned_weights& operator=(const tuned_weights&) = delete;
    virtual ~tuned_weights() = default;
    virtual void evaluate(std::span<const tutti::zeroth::probe> probes, std::size_t micro_batch,
                          std::span<tutti::zeroth::loss_value> losses) = 0;
    virtual void update(std::span<const tutti::zeroth::pending_update> updates) = 0;
    virtual void flush() = 0;
    [[nodiscard]] virtual std::uint64_t hash() = 0;
    /// Parameter i after a flush: the elements that this rank has. The others of `whole` stay.
    virtual void read(std::size_t i, tutti::view<T> whole) = 0;
    /// What has moved between host and device.
    [[nodiscard]] virtual tutti::zeroth::transfer_counters moved() const { return {}; }
    /// Of weights that the device gets from the host.
    [[nodiscard]] virtual std::size_t host_bytes() const { return 0; }
};

/// Of each parameter: its module, and its place among what the module owns.
struct parameter_place {
    std::size_t module, slice;
};
[[nodiscard]] inline std::vector<parameter_place> places_of_parameters(const tutti::zeroth::model_layout& layout) {
    std::size_t count = 0;
    for (std::size_t m = 0; m < layout.modules(); ++m) { count += layout.slices(m).size(); }
    std::vector<parameter_place> places(count);
    for (std::size_t m = 0; m < layout.modules(); ++m) {
        for (std::size_t k = 0; k < layout.slices(m).size(); ++k) { places[layout.slices(m)[k].tensor] = {m, k}; }
    }
    return places;
}

/// All weights on the device, and a perturbed copy of them; modules lie as they do on their way through slots, so that
/// a module does the same with either.
template <class Math> class weights_in_memory final : public tuned_weights<typename Math::element> {
    using T = typename Math::element;
    using Q = typename Math::queue_type;
    using M = typename Q::memory_type;
    using base = tuned_weights<T>;

    // A pass of in_memory: the whole model on one view.
    struct pass {
        weights_in_memory* self;
        tutti::zeroth::loss_value operator()(tutti::view<const T, M> weights, std::size_t) const {
            return self->net_.run(
                self->queue_, self->layout_.modules(), [&](std::size_t m) { return self->module_of(weights, m); },
                self->loss_.view());
        }
    };

    Q queue_;
    forward_model<Math>& net_;
    tutti::zeroth::model_layout layout_;
    std::vector<std::size_t> begins_;                  // of modules, in elements
    std::vector<tutti::zeroth::tensor_slice> slices_;  // by parameter
    tutti::buffer<T, Q> values_;
    tutti::buffer<double, Q> loss_;
    std::vector<tutti::view<const T, M>> module_;  // the one that runs
    std::optional<tutti::zeroth::in_memory<T, Q, pass>> pipeline_;

    [[nodiscard]] tutti::zeroth::module_weights<T, M> module_of(tutti::view<const T, M> all, std::size_t m) {
        module_.clear();
        for (const tutti::zeroth::tensor_place& p : layout_.places(m)) {
            module_.push_back(all.sub(begins_[p.owner] + p.at.offset, p.at.count));
        }
        return module_;
    }

public:
    weights_in_memory(Q queue, forward_model<Math>& net, const typename base::first_values& first)
        : queue_(queue), net_(net), layout_(modules_of(net.config()), sizeof(T)), loss_(queue, 2) {
        std::size_t total = 0;
        for (std::size_t m = 0; m < layout_.modules(); ++m) {
            begins_.push_back(total);
            total += layout_.size(m);
        }
        values_ = tutti::buffer<T, Q>(queue, total);
        tutti::fill(queue, values_.view(), static_cast<T>(0.0f));  // also what is between tensors
        std::vector<T> values;
        for (const parameter_place& at : places_of_parameters(layout_)) {
            tutti::zeroth::tensor_slice s = layout_.slices(at.module)[at.slice];
            s.offset += begins_[at.module];
            values.resize(s.count);
            first(slices_.size(), tutti::view<T>(values));
            const tutti::view<T, M> there = values_.view().sub(s.offset, s.count);
            if constexpr (M::host_accessible) {
                std::copy(values.begin(), values.end(), there.data());
            } else {
                upload(queue, tutti::view<const T>(values), there);
            }
            slices_.push_back(s);
        }
        pipeline_.emplace(queue, values_.view(), slices_, pass{this});
    }

    void evaluate(std::span<const tutti::zeroth::probe> probes, std::size_t micro_batch,
                  std::span<tutti::zeroth::loss_value> losses) override {
        pipeline_->evaluate(probes, micro_batch, losses);
    }
    void update(std::span<const tutti::zeroth::pending_update> updates) override { pipeline_->update(updates); }
    void flush() override { pipeline_->flush(); }
    [[nodiscard]] std::uint64_t hash() override { return pipeline_->hash(); }
    void read(std::size_t i, tutti::view<T> whole) override {
        const tutti::view<const T, M> there = values_.view().sub(slices_[i].offset, slices_[i].count);
        if constexpr (M::host_accessible) {
            std::copy_n(there.data(), there.size(), whole.data());
        } else {
            download(queue_, there, whole);
        }
    }
};

/// All weights, or this rank's part of them, in page-locked memory of the host; blocks pass through a few slots.
template <class Math, class Exchange> class weights_on_host final : public tuned_weights<typename Math::element> {
    using T = typename Math::element;
    using Q = typename Math::queue_type;
    using base = tuned_weights<T>;

    std::vector<parameter_place> places_;
    tutti::zeroth::pinned_store<T, Q> store_;
    std::optional<tutti::zeroth::offload<Q, T, forward_model<Math>, Exchange>> pipeline_;

public:
    weights_on_host(Q queue, forward_model<Math>& net, const typename base::first_values& first,
                    const tutti::zeroth::offload_options& o, Exchange exchange)
        : store_(tutti::zeroth::model_layout(modules_of(net.config()), sizeof(T), exchange.ranks()), exchange.rank()) {
        places_ = places_of_parameters(store_.layout());
        std::vector<T> values;
        for (std::size_t i = 0; i < places_.size(); ++i) {
            const auto [m, k] = places_[i];
            values.resize(store_.layout().slices(m)[k].count);
            first(i, tutti::view<T>(values));
            store_.write(m, k, tutti::view<const T>(values));
        }
        pipeline_.emplace(queue, net, store_, o, std::move(exchange));
    }

    void evaluate(std::span<const tutti::zeroth::probe> probes, std::size_t micro_batch,
                  std::span<tutti::zeroth::loss_value> losses) override {
        pipeline_->evaluate(probes, micro_batch, losses);
    }
    void update(std::span<const tutti::zeroth::pending_update> updates) override { pipeline_->update(updates); }
    void flush() override { pipeline_->flush(); }
    [[nodiscard]] std::uint64_t hash() override { return pipeline_->hash(); }
    void read(std::size_t i, tutti::view<T> whole) override { store_.read(places_[i].module, places_[i].slice, whole); }
    [[nodiscard]] tutti::zeroth::transfer_counters moved() const override { return pipeline_->counters(); }
    [[nodiscard]] std::size_t host_bytes() const override { return store_.bytes(); }
};

/// As the pipeline that `o` names has them. `training` is duplicated where ranks exchange slices. `net` and `trace`
/// outlive what is returned.
template <class Math, class Comm>
[[nodiscard]] std::unique_ptr<tuned_weights<typename Math::element>> place_weights(
    Comm& training, forward_model<Math>& net, const options& o, tutti::schedule::timeline* trace,
    const typename tuned_weights<typename Math::element>::first_values& first) {
    const auto queue = training.queue();
    if (!o.zeroth.offloads(o.pipeline)) { return std::make_unique<weights_in_memory<Math>>(queue, net, first); }
    const tutti::zeroth::offload_options how{.slot_count = static_cast<std::size_t>(o.zeroth.slot_count),
                                             .blocks_resident = static_cast<std::size_t>(o.zeroth.blocks_resident),
                                             .trace = trace,
                                             .trace_rank = training.rank()};
    if (o.zeroth.sliced) {
        using sliced = tutti::zeroth::sliced<Comm>;
        return std::make_unique<weights_on_host<Math, sliced>>(queue, net, first, how,
                                                               sliced(training.duplicate("slices")));
    }
    return std::make_unique<weights_on_host<Math, tutti::zeroth::whole>>(queue, net, first, how,
                                                                         tutti::zeroth::whole{});
}

}  // namespace transformer
