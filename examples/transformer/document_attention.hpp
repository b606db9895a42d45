// document_attention<T>: the attention that ranks share, of any pipeline, as one type, so that the trainer is compiled once.
// Needs sequence/engine. Calls go through a table, as any_strategy's do.
#pragma once

#include <algorithm>  // equal
#include <chrono>     // time in attention
#include <cstddef>    // size_t
#include <cstdint>    // tokens
#include <memory>     // the engine
#include <optional>   // marks
#include <span>       // lengths
#include <utility>    // move, exchange
#include <vector>     // layers

#include <tutti/core/elementwise.hpp>    // fill
#include <tutti/core/queue.hpp>          // queues with marks
#include <tutti/core/view.hpp>           // rows
#include <tutti/schedule/timeline.hpp>   // trace
#include <tutti/sequence/cost.hpp>       // measured cost
#include <tutti/sequence/engine.hpp>     // what it is
#include <tutti/sequence/placement.hpp>  // placement

#include "model.hpp"
#include "options.hpp"

namespace transformer {

/// An engine, with what is in each slot.
///
/// Semantics  the calls are the engine's own; collective, but to plan what is planned already costs nothing. Backward may
///            follow other plans: the one of its forward holds again by then. rehearse: until it is taken back, forward
///            and backward give zeros, and no rank waits for another. most_rows: that a rank may have. take_seconds: spent
///            in attention since the last call of it, waiting for other ranks included. measured_cost: seconds that this
///            rank takes for attention, forward, of a sequence in one layer; timed now, within a second.
template <class T> struct document_attention : shared_attention<T> {
    virtual void plan(std::span<const std::int64_t> lengths) = 0;
    virtual void connect() = 0;
    virtual void rehearse(bool yes) = 0;
    [[nodiscard]] virtual std::span<const tutti::sequence::piece> pieces() const = 0;
    [[nodiscard]] virtual std::span<const std::int64_t> positions() const = 0;
    [[nodiscard]] virtual const tutti::sequence::placement& placed() const = 0;
    [[nodiscard]] virtual tutti::sequence::engine_traffic traffic() const = 0;
    [[nodiscard]] virtual double loss_scale(std::uint64_t own_valid_tokens) = 0;
    [[nodiscard]] virtual std::int64_t most_rows() const = 0;
    [[nodiscard]] virtual double take_seconds() = 0;
    [[nodiscard]] virtual tutti::sequence::attention_cost measured_cost() const = 0;
};

/// Time that a queue spends on work: between marks on a device, else the host's.
template <class Q> class stopwatch {
    using clock = std::chrono::steady_clock;
    double seconds_ = 0;

public:
    template <class Work> void time(const Q&, Work work) {
        const auto begin = clock::now();
        work();
        seconds_ += std::chrono::duration<double>(clock::now() - begin).count();
    }
    void settle() {}
    [[nodiscard]] double take() { return std::exchange(seconds_, 0); }
};
template <tutti::timed_queue Q> class stopwatch<Q> {
    using mark = typename Q::mark_type;
    std::vector<std::pair<mark, mark>> running_;
    double seconds_ = 0;

public:
    template <class Work> void time(const Q& q, Work work) {
        std::optional<mark> begin = q.mark();
        work();
        std::optional<mark> end = q.mark();
        if (begin && end) { running_.emplace_back(*std::move(begin), *std::move(end)); }
    }
    /// Adds up what is over, so that marks do not pile up.
    void settle() {
        std::erase_if(running_, [&](const auto& of) {
            const bool over = of.second.ready();
            if (over) { seconds_ += tutti::seconds(of.second.since(of.first)); }
            return over;
        });
    }
    /// Of all that is over.
    [[nodiscard]] double take() {
        settle();
        return std::exchange(seconds_, 0);
    }
};

/// `Engine` as one, between what comes before and behind it on the model's queue.
template <class Engine> class engine_attention final : public document_attention<typename Engine::element_type> {
    using T = typename Engine::element_type;
    using Q = typename Engine::queue_type;
    using M = typename Q::memory_type;
    Q outside_, inside_;
    Engine engine_;
    std::vector<typename Engine::memory> slots_;
    std::vector<std::int64_t> planned_;
    std::int64_t most_rows_;
    bool rehearsing_ = false;
    stopwatch<Q> watch_;
    tutti::sequence::attention_cost (*measure_)(const Q&, tutti::sequence::attention_heads);

    template <class Work> void timed(Work work) {
        inside_.wait(outside_.record());
        watch_.time(inside_, work);
        outside_.wait(inside_.record());
    }

public:
    /// Queues: the model's, and the engine's communicator's.
    engine_attention(Q outside, Q inside, Engine engine, std::int64_t most_rows,
                     tutti::sequence::attention_cost (*measure)(const Q&, tutti::sequence::attention_heads))
        : outside_(std::move(outside))
        , inside_(std::move(inside))
        , engine_(std::move(engine))
        , most_rows_(most_rows)
        , measure_(measure) {}
    void plan(std::span<const std::int64_t> lengths) override {
        watch_.settle();
        if (!planned_.empty() && std::equal(planned_.begin(), planned_.end(), lengths.begin(), lengths.end())) {
            return;
        }
        planned_.clear();  // until there is a plan
        engine_.plan(lengths);
        planned_.assign(lengths.begin(), lengths.end());
    }
    void connect() override { engine_.connect(); }
    void rehearse(bool yes) override { rehearsing_ = yes; }
    [[nodiscard]] std::span<const tutti::sequence::piece> pieces() const override { return engine_.pieces(); }
    [[nodiscard]] std::span<const std::int64_t> positions() const override { return engine_.positions(); }
    [[nodiscard]] const tutti::sequence::placement& placed() const override { return engine_.placed(); }
    [[nodiscard]] tutti::sequence::engine_traffic traffic() const override { return engine_.traffic(); }
    [[nodiscard]] double loss_scale(std::uint64_t own_valid_tokens) override {
        return engine_.loss_scale(own_valid_tokens);
    }
    [[nodiscard]] std::int64_t most_rows() const override { return most_rows_; }
    [[nodiscard]] double take_seconds() override { return watch_.take(); }
    [[nodiscard]] tutti::sequence::attention_cost measured_cost() const override {
        return measure_(inside_, engine_.heads());
    }

    void forward(int slot, matrix<const T> qkv, matrix<T> out) override {
        if (rehearsing_) { return clear(out); }
        timed([&] { engine_.forward(rows(qkv), tutti::view<T, M>(out.data, out.size()), kept_in(slot)); });
    }
    void backward(int slot, matrix<const T> d_out, matrix<T> d_qkv) override {
        if (rehearsing_) { return clear(d_qkv); }
        timed([&] { engine_.backward(rows(d_out), tutti::view<T, M>(d_qkv.data, d_qkv.size()), kept_in(slot)); });
    }

private:
    void clear(matrix<T> m) const { tutti::fill(outside_, tutti::view<T, M>(m.data, m.size()), static_cast<T>(0.0f)); }
    [[nodiscard]] static tutti::view<const T, M> rows(matrix<const T> m) { return {m.data, m.size()}; }
    [[nodiscard]] typename Engine::memory& kept_in(int slot) {
        const auto i = static_cast<std::size_t>(slot);
        while (slots_.size() <= i) { slots_.push_back(engine_.make_memory()); }
        return slots_[i];
    }
};

/// That of the pipeline that `o` names, over a duplicate of `comm`, the ranks that share sequences, on whose queue the
/// model works; none where no rank shares any. `rank` is this one's in the whole run, which has so many of the heads.
/// Collective. Compiled apart, in documents.cpp and cuda/documents.cu.
template <class T, class Comm>
[[nodiscard]] std::unique_ptr<document_attention<T>> make_document_attention(Comm& comm, const options& o,
                                                                             tutti::schedule::timeline* trace, int rank,
                                                                             int heads);

}  // namespace transformer
