// Where the weights of forward_model are while they are tuned: all beside it, or on the host, passing by in blocks.
// Needs forward_model.hpp, zeroth_options.hpp and zeroth. Pipelines of zeroth behind one face, each compiled once.
#pragma once

#include <algorithm>    // copy, find
#include <cmath>        // sqrt
#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <limits>       // no error
#include <memory>       // pipelines
#include <optional>     // made after its weights
#include <span>         // probes
#include <tuple>        // ways to gather
#include <type_traits>  // stores
#include <utility>      // move
#include <vector>       // places

#include <tutti/core/buffer.hpp>               // weights
#include <tutti/core/element.hpp>              // master_t
#include <tutti/core/elementwise.hpp>          // fill
#include <tutti/schedule/timeline.hpp>         // trace
#include <tutti/zeroth/block_store.hpp>        // pinned_store
#include <tutti/zeroth/float8_wire.hpp>        // float8_wire
#include <tutti/zeroth/gather_by_copies.hpp>   // gather_by_copies
#include <tutti/zeroth/in_memory.hpp>          // in_memory
#include <tutti/zeroth/layout.hpp>             // model_layout
#include <tutti/zeroth/offload.hpp>            // offload
#include <tutti/zeroth/renewed_store.hpp>      // renewed_store
#include <tutti/zeroth/slice.hpp>              // sliced
#include <tutti/zeroth/transfer_counters.hpp>  // transfer_counters
#include <tutti/zeroth/weight_wire.hpp>        // rounded_wire

#include "forward_model.hpp"
#include "options.hpp"

namespace transformer {

/// A pipeline of zeroth whose weights can be read by parameter. What makes one is given first(i, values), which sets a
/// view of T or, where floats are kept, of those to parameter i.
template <class T> struct tuned_weights {
    using kept = tutti::master_t<T>;

    tuned_weights() = default;
    tuned_weights(const tuned_weights&) = delete;
    tuned_weights& operator=(const tuned_weights&) = delete;
    virtual ~tuned_weights() = default;
    virtual void evaluate(std::span<const tutti::zeroth::probe> probes, std::size_t micro_batch,
                          std::span<tutti::zeroth::loss_value> losses) = 0;
    virtual void update(std::span<const tutti::zeroth::pending_update> updates) = 0;
    virtual void flush() = 0;
    [[nodiscard]] virtual std::uint64_t hash() = 0;
    /// Parameter i after a flush: the elements that this rank has. The others of `whole` become 0.
    virtual void read(std::size_t i, tutti::view<kept> whole) = 0;
    /// What has moved between host and device.
    [[nodiscard]] virtual tutti::zeroth::transfer_counters moved() const { return {}; }
    /// Of weights that the device gets from the host.
    [[nodiscard]] virtual std::size_t host_bytes() const { return 0; }
    /// What the bits that travel change of this rank's weights, as a share of them, by root mean squares; not a number
    /// where they change none.
    [[nodiscard]] virtual double upload_error() const { return std::numeric_limits<double>::quiet_NaN(); }
};

template <class T> void widen(const std::vector<T>& from, tutti::view<tutti::master_t<T>> to) {
    std::transform(from.begin(), from.end(), to.data(), [](T x) { return static_cast<tutti::master_t<T>>(x); });
}

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
    template <class First>
    weights_in_memory(Q queue, forward_model<Math>& net, const First& first)
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
    void read(std::size_t i, tutti::view<typename base::kept> whole) override {
        const tutti::view<const T, M> there = values_.view().sub(slices_[i].offset, slices_[i].count);
        std::vector<T> values(there.size());
        if constexpr (M::host_accessible) {
            std::copy_n(there.data(), there.size(), values.data());
        } else {
            download(queue_, there, tutti::view<T>(values));
        }
        widen(values, whole);
    }
};

/// All weights, or this rank's part of them, in page-locked memory of the host; blocks pass through a few slots. Store is
/// a pinned_store or, of floats that travel in fewer bits, a renewed_store.
template <class Math, class Exchange, class Store>
class weights_on_host final : public tuned_weights<typename Math::element> {
    using T = typename Math::element;
    using Q = typename Math::queue_type;
    using base = tuned_weights<T>;
    static constexpr bool has_floats = requires(const Store& s) { s.master(0); };

    std::vector<parameter_place> places_;
    Store store_;
    std::optional<tutti::zeroth::offload<Q, T, forward_model<Math>, Exchange>> pipeline_;

    [[nodiscard]] const tutti::zeroth::tensor_slice& slice_of(std::size_t i) const {
        return store_.layout().slices(places_[i].module)[places_[i].slice];
    }
    // The pieces of parameter i that this rank has, by places in its part of the module.
    [[nodiscard]] std::vector<tutti::zeroth::tensor_slice> own_pieces(std::size_t i) const {
        return tutti::zeroth::slices_within({&slice_of(i), 1}, store_.own(places_[i].module));
    }

public:
    template <class First>
    weights_on_host(Q queue, forward_model<Math>& net, const First& first, const tutti::zeroth::offload_options& o,
                    Exchange exchange)
        : store_(tutti::zeroth::model_layout(modules_of(net.config()), sizeof(T), exchange.ranks()), exchange.rank()) {
        places_ = places_of_parameters(store_.layout());
        std::vector<std::conditional_t<has_floats, float, T>> values;
        for (std::size_t i = 0; i < places_.size(); ++i) {
            const auto [m, k] = places_[i];
            values.resize(slice_of(i).count);
            first(i, tutti::view(values));
            if constexpr (has_floats) {
                float* const masters = store_.master(m).data();
                for (const auto& p : own_pieces(i)) {
                    std::copy_n(values.data() + p.first, p.count, masters + p.offset);
                }
            } else {
                store_.write(m, k, tutti::view<const T>(values));
            }
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
    void read(std::size_t i, tutti::view<typename base::kept> whole) override {
        const auto [m, k] = places_[i];
        if constexpr (has_floats) {
            std::fill(whole.begin(), whole.end(), 0.0f);
            const float* const masters = std::as_const(store_).master(m).data();
            for (const auto& p : own_pieces(i)) { std::copy_n(masters + p.offset, p.count, whole.data() + p.first); }
        } else {
            std::vector<T> values(whole.size());
            store_.read(m, k, tutti::view<T>(values));
            widen(values, whole);
        }
    }
    [[nodiscard]] tutti::zeroth::transfer_counters moved() const override { return pipeline_->counters(); }
    [[nodiscard]] std::size_t host_bytes() const override { return store_.bytes(); }
    [[nodiscard]] double upload_error() const override {
        if constexpr (!has_floats) {
            return base::upload_error();
        } else {
            constexpr std::size_t most = 1 << 20;  // of a block: enough to know
            double error = 0, size = 0;
            for (std::size_t m = 1; m <= store_.layout().blocks(); ++m) {
                const std::size_t count = std::min(store_.own(m).count, most);
                const tutti::view<const float> masters(store_.master(m).data(), count);
                std::vector<std::byte> bytes(store_.wire().bytes(count));
                std::vector<T> seen(count);
                store_.wire().encode(tutti::host_queue(), masters, tutti::view<std::byte>(bytes));
                store_.wire().decode(tutti::host_queue(), tutti::view<const std::byte>(bytes), tutti::view<T>(seen));
                for (std::size_t i = 0; i < count; ++i) {
                    const auto w = static_cast<double>(masters[i]);
                    const double e = static_cast<double>(static_cast<float>(seen[i])) - w;
                    error += e * e;
                    size += w * w;
                }
            }
            return std::sqrt(error / size);
        }
    }
};

/// What ways_to_gather name.
template <tutti::queue Q>
using slice_gather =
    tutti::zeroth::gather_by_one_of<tutti::zeroth::gather_collectively, tutti::zeroth::gather_by_messages,
                                    tutti::zeroth::gather_by_copies<Q>>;

/// The way that `o` names, or which is the fastest for blocks of the model. Collective.
template <class T, class Comm>
[[nodiscard]] slice_gather<tutti::queue_of<Comm>> gather_of(Comm& training, const options& o) {
    namespace zeroth = tutti::zeroth;
    using copies_type = zeroth::gather_by_copies<tutti::queue_of<Comm>>;
    const bool threads = o.backend == "threads" && o.network.empty();  // copies would pass a stated network by
    copies_type copies = threads ? copies_type::over(training) : copies_type();
    if (!o.zeroth.gather.empty()) {
        const auto* const named = std::find(ways_to_gather.begin(), ways_to_gather.end(), o.zeroth.gather);
        return slice_gather<tutti::queue_of<Comm>>(
            std::tuple(zeroth::gather_collectively(), zeroth::gather_by_messages(), std::move(copies)),
            static_cast<std::size_t>(named - ways_to_gather.begin()));
    }
    const zeroth::model_layout layout(modules_of(o.model), sizeof(T), static_cast<std::size_t>(training.size()));
    return zeroth::fastest_gather(training, layout.size(1) * sizeof(T), zeroth::gather_collectively(),
                                  zeroth::gather_by_messages(), std::move(copies));
}

/// As the pipeline that `o` names has them. `training` is duplicated where ranks exchange slices, which they gather as
/// `gather` does. `net` and `trace` outlive what is returned.
template <class Math, class Comm, class First>
[[nodiscard]] std::unique_ptr<tuned_weights<typename Math::element>> place_weights(
    Comm& training, forward_model<Math>& net, const options& o,
    const std::optional<slice_gather<tutti::queue_of<Comm>>>& gather, tutti::schedule::timeline* trace,
    const First& first) {
    using T = typename Math::element;
    using Q = typename Math::queue_type;
    namespace zeroth = tutti::zeroth;
    const auto queue = training.queue();
    if (!o.zeroth.offloads(o.pipeline)) { return std::make_unique<weights_in_memory<Math>>(queue, net, first); }
    const zeroth::offload_options how{
        .slot_count = static_cast<std::size_t>(o.zeroth.slot_count),
        .blocks_resident = static_cast<std::size_t>(o.zeroth.blocks_resident),
        .write_back_every = o.zeroth.upload_bits == 0 ? 1 : static_cast<std::size_t>(o.zeroth.renew_every),
        .trace = trace,
        .trace_rank = training.rank()};
    const auto on_host = [&]<class Exchange>(Exchange exchange) -> std::unique_ptr<tuned_weights<T>> {
        const auto in = [&]<class Store>(std::type_identity<Store>) {
            return std::make_unique<weights_on_host<Math, Exchange, Store>>(queue, net, first, how,
                                                                            std::move(exchange));
        };
        if constexpr (std::is_same_v<tutti::master_t<T>, float>) {
            using of_16_bits = std::conditional_t<std::is_same_v<T, float>, tutti::float16, T>;
            if (o.zeroth.upload_bits == 16) {
                return in(std::type_identity<zeroth::renewed_store<T, Q, zeroth::rounded_wire<of_16_bits, T>>>());
            }
            if (o.zeroth.upload_bits == 8) {
                return in(std::type_identity<zeroth::renewed_store<T, Q, zeroth::float8_wire<>>>());
            }
        }
        return in(std::type_identity<zeroth::pinned_store<T, Q>>());
    };
    if (gather) { return on_host(zeroth::sliced(training.duplicate("slices"), *gather)); }
    return on_host(zeroth::whole());
}

}  // namespace transformer
