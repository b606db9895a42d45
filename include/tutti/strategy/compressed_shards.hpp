// compressed_shards: a shard exchange that sends gradients through one compressor and values through another one.
// Needs strategy/shard_exchange and compress; on a CUDA queue the compressors' .cuh. Vectors go as they are.
// Source: Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023, sections
// 3.1 (qwZ: values) and 3.3 (qgZ: gradients).
#pragma once

#include <algorithm>    // max, min
#include <concepts>     // copyable, same_as
#include <cstddef>      // size_t, byte
#include <cstdint>      // seeds, passes
#include <memory>       // shared with work in flight
#include <optional>     // counts
#include <span>         // state
#include <string>       // descriptions
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // buckets

#include <tutti/comm/communicator.hpp>                    // can_all_to_all
#include <tutti/compress/all_gather.hpp>                  // values
#include <tutti/compress/compressor.hpp>                  // segment
#include <tutti/compress/dense_or.hpp>                    // vectors
#include <tutti/compress/error_feedback.hpp>              // residuals
#include <tutti/compress/matrix.hpp>                      // which tensors are compressed
#include <tutti/compress/quantize.hpp>                    // what is used unless said otherwise
#include <tutti/compress/reduce_scatter.hpp>              // gradients
#include <tutti/compress/shards.hpp>                      // shards
#include <tutti/core/element.hpp>                         // master_t
#include <tutti/core/error.hpp>                           // usage_error
#include <tutti/core/reduce_op.hpp>                       // mean
#include <tutti/core/state.hpp>                           // state_entry
#include <tutti/core/text.hpp>                            // formatted
#include <tutti/schedule/bucket.hpp>                      // bucket_plan
#include <tutti/strategy/detail/describe_compressor.hpp>  // what ranks agree on
#include <tutti/strategy/detail/kept_number.hpp>          // counts
#include <tutti/strategy/detail/shard_plan.hpp>           // shard_plan
#include <tutti/strategy/shard_exchange.hpp>              // plain_shards
#include <tutti/strategy/strategy.hpp>                    // parameters

namespace tutti::strategy {

/// In place of a compressor: sent as they are.
struct as_is {};

/// What may stand for a compressor of T, and carry it over C.
template <class Scheme, class C, class T>
concept compresses_shards = std::same_as<Scheme, as_is> ||
    (std::copyable<Scheme>&& compress::compressor<Scheme, queue_of<C>, T>&&
         compress::compressor<Scheme, queue_of<C>, master_t<T>>);

/// Gradients through `gradients` and values through `values`, each of them or neither `as_is`: then like plain_shards.
///
/// Semantics    what a rank owns of a tensor is one segment of the compressor, a tensor of its own to it. It is
///              compressed if that is worth it (compress::worth_compressing): if the tensor is a matrix and its wire is no
///              larger than its floats; everything else goes as floats on the same wire.
///   gradients  compress::reduce_scatter: each rank's part is sent compressed to its owner, which sums in full
///              precision and adds its own part as it is. With `feedback` every rank keeps what its compression lost,
///              and adds it to what it sends next for the same elements; where the scale of the loss changes, it is
///              rescaled.
///   values     every rank encodes the masters that it owns, sends the wire to all, and all decode it, the owner too:
///              trainers see the same bits on all ranks, from attach on, and masters stay exact. Stage 3 encodes for each
///              gather, with the same numbers between two updates. No feedback: the next gather sends masters, in which
///              nothing was lost, anew.
/// Units        levels are the compressors': bits, for quantize.
///              Wires, sums and what is owed are of floats, also where values are of double.
/// Determinism  on deterministic backends the bits depend on data, ranks and bucket size, not on timing. Gradients draw
///              by (seed, micro-batches begun, rank, segment, element), values by (seed, updates, rank, segment,
///              element); both counts are in state(), so that a resume has the same bits.
/// Cost         n ranks, P elements, of which this rank owns p; w wire bytes of all segments, w_own of this rank's. Of
///              what zero says:
///     memory     with feedback 4 P bytes more. 16 bytes for the counts, if gradients are compressed. Stage 3 keeps no
///                rounded values, if values are compressed. Scratch of the bucket under way: its wires, and for
///                gradients those of the other ranks and a float an element of the own part.
///     sent       gradients: w - w_own in place of s (P - p), with w of `gradients`; values: (n - 1) w_own in place of
///                s p (n - 1), with w of `values`.
///     passes     encoding and decoding, on the lanes.
/// Errors       usage_error for levels that a compressor does not have, before anything is sent; from attach where values
///              are compressed and rounded stochastically too.
template <class Gradients = compress::quantize, class Values = compress::quantize>
requires(std::copyable<Gradients>&& std::copyable<Values>) struct compressed_shards {
    Gradients gradients{};
    int gradient_level = 4;  ///< not read where gradients go as they are
    Values values{};
    int value_level = 8;  ///< likewise
    bool feedback = false;
    std::uint64_t seed = 0;

    static constexpr bool compresses_gradients = !std::same_as<Gradients, as_is>;
    static constexpr bool compresses_values = !std::same_as<Values, as_is>;

    template <communicator C, floating_element T> class state_type {
        using Q = queue_of<C>;
        using M = memory_of<C>;
        using by_bucket = std::vector<compress::shards>;

        compressed_shards own_;
        plain_shards::state_type<C, T> plain_;
        std::shared_ptr<const by_bucket> gradient_parts_;
        std::shared_ptr<const by_bucket> value_parts_;
        compress::residuals<Q> lost_;
        std::optional<detail::kept_number<std::uint64_t, Q>> passes_;  // where gradients are compressed
        std::optional<detail::kept_number<double, Q>> scale_;          // likewise
        std::vector<state_entry<M>> entries_;
        std::uint32_t rank_;

    public:
        static constexpr bool gathers_masters = compresses_values;
        state_type(const compressed_shards& own, C& comm, const parameters<T, M>& list,
                   const schedule::bucket_plan& plan)
            : own_(own)
            , plain_(comm, plan)
            , lost_(comm.queue(), own.feedback ? plan.elements : 0, "exchange/residual")
            , rank_(static_cast<std::uint32_t>(comm.rank())) {
            if constexpr (compresses_gradients) {
                gradient_parts_ = parts_of(own.gradients, own.gradient_level, 0, list);
                passes_.emplace(comm.queue(), 0);
                scale_.emplace(comm.queue(), 1);
                if (own.feedback) { entries_.push_back(lost_.entries().front()); }
                entries_.push_back(passes_->entry("exchange/passes", ownership::local));
                entries_.push_back(scale_->entry("exchange/loss_scale", ownership::local));
            }
            if constexpr (compresses_values) {
                value_parts_ = parts_of(own.values, own.value_level, std::uint32_t{1} << 31, list);
            }
        }

        [[nodiscard]] const std::shared_ptr<const detail::shard_plan>& plan() const noexcept { return plain_.plan(); }
        [[nodiscard]] C duplicate(C& comm, std::string_view name) const { return plain_.duplicate(comm, name); }
        template <class F> decltype(auto) among(C& comm, F f) const { return f(comm); }

        void begin(const micro_batch& m) {
            if constexpr (compresses_gradients) {
                const double before = scale_->value();
                if (own_.feedback && m.loss_scale != before) { lost_.rescale(m.loss_scale / before); }
                scale_->set(m.loss_scale);
                passes_->set(passes_->value() + 1);
            }
        }
        [[nodiscard]] auto reduce(std::size_t b) const {
            if constexpr (compresses_gradients) {
                const schedule::bucket& at = plan()->bucket(b);
                const auto lost = own_.feedback ? lost_.view().sub(at.offset, at.size) : view<float, M>();
                return [x = compress::dense_or(own_.gradients), parts = gradient_parts_, b, lost,
                        key = key_of(passes_->value())](C& c, view<T, M> whole, view<T, M> mine) {
                    compress::reduce_scatter(c, x, (*parts)[b], whole, mine, lost, key, mean{});
                };
            } else {
                return plain_.reduce(b);
            }
        }
        [[nodiscard]] auto replicate(std::size_t b) const noexcept { return plain_.replicate(b); }
        [[nodiscard]] auto gather(std::size_t b, std::uint64_t updates) const {
            if constexpr (compresses_values) {
                return [x = compress::dense_or(own_.values), parts = value_parts_, b,
                        key = key_of(updates)](C& c, view<const master_t<T>, M> mine, view<T, M> whole) {
                    compress::all_gather(c, x, (*parts)[b], mine, whole, view<float, M>(), key);
                };
            } else {
                return plain_.gather(b, updates);
            }
        }
        void expect_replicas(C&, view<const master_t<T>, M>) const noexcept {}
        [[nodiscard]] std::span<const state_entry<M>> entries() const noexcept { return entries_; }
        void restored() {
            if constexpr (compresses_gradients) {
                passes_->restored();
                scale_->restored();
            }
        }

        /// What this rank owes of the gradients, flat, in the order of the model; empty without feedback.
        [[nodiscard]] view<float, M> owed() const noexcept { return lost_.view(); }
        /// By bucket and rank, in elements of the bucket: how gradients are sent. Only if they are compressed.
        [[nodiscard]] std::span<const compress::shards> gradient_parts() const noexcept requires compresses_gradients {
            return *gradient_parts_;
        }
        /// Likewise values.
        [[nodiscard]] std::span<const compress::shards> value_parts() const noexcept requires compresses_values {
            return *value_parts_;
        }

    private:
        [[nodiscard]] compress::draw_key key_of(std::uint64_t time) const noexcept {
            return {own_.seed, static_cast<std::uint32_t>(time), rank_};
        }
        /// What each rank owns of each tensor of each bucket. Segments are tensors from `tensor` on.
        template <class Scheme>
        [[nodiscard]] std::shared_ptr<const by_bucket> parts_of(const Scheme& x, int level, std::uint32_t tensor,
                                                                const parameters<T, M>& list) const {
            const detail::shard_plan& shared = *plan();
            by_bucket all;
            for (std::size_t b = 0; b < shared.size(); ++b) {
                const schedule::bucket& at = shared.bucket(b);
                std::vector<std::vector<compress::segment>> ranks(shared.ranks());
                std::size_t begin = 0;  // elements of the bucket
                for (std::size_t r = 0; r < shared.ranks(); ++r) {
                    const std::size_t end = begin + shared.counts(b)[r];
                    for (std::size_t i = at.first; i < at.first + at.count; ++i) {
                        const std::size_t first = shared.buckets().offsets[i] - at.offset;
                        const std::size_t from = std::max(begin, first);
                        const std::size_t to = std::min(end, first + list[i].value.size());
                        if (from >= to) { continue; }
                        compress::segment s{tensor++, level, from, 0, to - from, 1};
                        const auto bytes = [&x](const compress::segment& g) { return x.wire_bytes(g); };
                        if (!compress::worth_compressing(list[i].shape, s, bytes)) { s.level = compress::dense_level; }
                        ranks[r].push_back(s);
                    }
                    begin = end;
                }
                all.emplace_back(ranks);
            }
            return std::make_shared<const by_bucket>(std::move(all));
        }
    };

    void validate() const {
        if constexpr (compresses_gradients) {
            expect_level("gradients", gradients, gradient_level);
        } else if (feedback) {
            throw usage_error("compressed shards: feedback is of compressed gradients, these go as they are");
        }
        if constexpr (compresses_values) { expect_level("values", values, value_level); }
    }
    [[nodiscard]] std::string describe() const {
        std::string text;
        if constexpr (compresses_gradients) {
            text += formatted(", gradients compressed{} {}", feedback ? " with feedback" : "",
                              described(gradients, gradient_level));
        }
        if constexpr (compresses_values) { text += ", values compressed " + described(values, value_level); }
        return text + formatted(", seed {}", seed);
    }
    template <communicator C, floating_element T>
    requires compresses_shards<Gradients, C, T> && compresses_shards<Values, C, T> &&
        comm::can_all_to_all<C, std::byte> && comm::can_all_gather<C, std::byte>
    [[nodiscard]] state_type<C, T> make_state(C& comm, const parameters<T, memory_of<C>>& list,
                                              const schedule::bucket_plan& plan) const {
        return state_type<C, T>(*this, comm, list, plan);
    }

private:
    static constexpr compress::segment probe(int level) { return {0, level, 0, 0, 1024, 1}; }

    template <class Scheme> static void expect_level(std::string_view what, const Scheme& x, int level) {
        if (level == compress::dense_level) {
            throw usage_error(formatted("compressed shards: {} at level {}, which compresses nothing; as_is in place "
                                        "of their compressor leaves them as they are",
                                        what, level));
        }
        static_cast<void>(x.wire_bytes(probe(level)));  // refuses levels that it does not have
    }
    template <class Scheme> [[nodiscard]] static std::string described(const Scheme& x, int level) {
        return formatted("at level {} to {} bytes of 1024 elements{}", level, x.wire_bytes(probe(level)),
                         detail::describe_compressor(x));
    }
};

}  // namespace tutti::strategy
