// document_attention<T>: the shared attention of a pipeline of documents as one type, so that the trainer is compiled once.
// Needs sequence/engine. Calls go through a table, as any_strategy's do.
#pragma once

#include <algorithm>  // max
#include <chrono>     // time in attention
#include <cstddef>    // size_t
#include <cstdint>    // tokens
#include <memory>     // the engine
#include <span>       // lengths
#include <utility>    // move, exchange
#include <vector>     // layers

#include <tutti/core/view.hpp>           // rows
#include <tutti/schedule/timeline.hpp>   // trace
#include <tutti/sequence/engine.hpp>     // what it is
#include <tutti/sequence/placement.hpp>  // placement

#include "model.hpp"
#include "options.hpp"

namespace transformer {

/// An engine, with what each layer keeps.
///
/// Semantics  the calls are the engine's own; collective. most_rows: that a rank may have. take_seconds: spent in
///            attention since the last call of it, waiting for other ranks included.
template <class T> struct document_attention : shared_attention<T> {
    virtual void plan(std::span<const std::int64_t> lengths) = 0;
    [[nodiscard]] virtual std::span<const tutti::sequence::piece> pieces() const = 0;
    [[nodiscard]] virtual std::span<const std::int64_t> positions() const = 0;
    [[nodiscard]] virtual const tutti::sequence::placement& placed() const = 0;
    [[nodiscard]] virtual tutti::sequence::engine_traffic traffic() const = 0;
    [[nodiscard]] virtual double loss_scale(std::uint64_t own_valid_tokens) = 0;
    [[nodiscard]] virtual std::int64_t most_rows() const = 0;
    [[nodiscard]] virtual double take_seconds() = 0;
};

/// `Engine` as one.
template <class Engine> class engine_attention final : public document_attention<typename Engine::element_type> {
    using T = typename Engine::element_type;
    using clock = std::chrono::steady_clock;
    Engine engine_;
    std::vector<typename Engine::memory> layers_;
    std::int64_t most_rows_;
    double seconds_ = 0;

    template <class Work> void timed(Work work) {
        const auto begin = clock::now();
        work();
        seconds_ += std::chrono::duration<double>(clock::now() - begin).count();
    }

public:
    engine_attention(Engine engine, int layers, std::int64_t most_rows)
        : engine_(std::move(engine)), most_rows_(most_rows) {
        for (int l = 0; l < layers; ++l) { layers_.push_back(engine_.make_memory()); }
    }
    void plan(std::span<const std::int64_t> lengths) override { engine_.plan(lengths); }
    [[nodiscard]] std::span<const tutti::sequence::piece> pieces() const override { return engine_.pieces(); }
    [[nodiscard]] std::span<const std::int64_t> positions() const override { return engine_.positions(); }
    [[nodiscard]] const tutti::sequence::placement& placed() const override { return engine_.placed(); }
    [[nodiscard]] tutti::sequence::engine_traffic traffic() const override { return engine_.traffic(); }
    [[nodiscard]] double loss_scale(std::uint64_t own_valid_tokens) override {
        return engine_.loss_scale(own_valid_tokens);
    }
    [[nodiscard]] std::int64_t most_rows() const override { return most_rows_; }
    [[nodiscard]] double take_seconds() override { return std::exchange(seconds_, 0); }

    void forward(int layer, matrix<const T> qkv, matrix<T> out) override {
        timed([&] { engine_.forward({qkv.data, qkv.size()}, {out.data, out.size()}, of(layer)); });
    }
    void backward(int layer, matrix<const T> d_out, matrix<T> d_qkv) override {
        timed([&] { engine_.backward({d_out.data, d_out.size()}, {d_qkv.data, d_qkv.size()}, of(layer)); });
    }

private:
    [[nodiscard]] typename Engine::memory& of(int layer) { return layers_[static_cast<std::size_t>(layer)]; }
};

/// That of the pipeline that `o` names, over a duplicate of `comm`; none where that is not of documents. Collective.
/// Compiled apart, in documents.cpp.
template <class T, class Comm>
[[nodiscard]] std::unique_ptr<document_attention<T>> make_document_attention(Comm& comm, const options& o,
                                                                             tutti::schedule::timeline* trace);

/// Seconds that one rank of this machine takes for causal attention, forward, of one layer with these heads; measured, in
/// some milliseconds. Compiled there too.
template <class T> [[nodiscard]] tutti::sequence::attention_cost measured_attention(const configuration& c);

}  // namespace transformer
