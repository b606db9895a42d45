// any_strategy<T, Queue>: the strategy of any pipeline as one type, so that the trainer is compiled once for all.
// Needs strategy/strategy. Calls go through a table: a few hundred a step, beside milliseconds of computing.
#pragma once

#include <concepts>    // same_as
#include <cstddef>     // size_t
#include <functional>  // norms
#include <memory>      // the strategy, scopes
#include <span>        // state
#include <stdexcept>   // logic_error
#include <utility>     // move
#include <vector>      // levels

#include <tutti/core/queue.hpp>         // queue
#include <tutti/core/state.hpp>         // state
#include <tutti/core/view.hpp>          // views
#include <tutti/schedule/bucket.hpp>    // bucket_plan
#include <tutti/schedule/overlap.hpp>   // overlap_metrics
#include <tutti/schedule/timeline.hpp>  // trace
#include <tutti/strategy/strategy.hpp>  // what it is

#include "options.hpp"

namespace transformer {

/// A strategy, and what else the trainer asks its pipelines.
///
/// Semantics  the calls are the strategy's own; attach's second argument is that of zero's stage 3, and nothing to the
///            others. `levels`: of compression, by parameter, 0 for one that is sent as it is; none where gradients are
///            not compressed. `overlap`: what communication cost by rounds, or steps where there are none, as `trace`
///            has it, which the strategy was made with. step(h, norm): of a part of a model, whose norm of gradients is
///            what `norm` says of this part's, averaged, in the order of owned(); strategies of make_strategy_of_parts
///            can.
/// Cost       an indirect call each.
template <class T, tutti::queue Q> class any_strategy {
public:
    using element_type = T;
    using memory_type = typename Q::memory_type;
    using queue_type = Q;

private:
    using M = memory_type;
    using list = tutti::strategy::parameters<T, M>;
    using master = tutti::master_t<T>;
    using gradient_norm = std::function<double(tutti::view<T, M>)>;

    struct calls {
        virtual ~calls() = default;
        virtual void attach(list& p, const std::function<void()>& values_read) = 0;
        virtual void begin(tutti::strategy::micro_batch m) = 0;
        virtual tutti::view<const T, M> before_use(std::size_t i) = 0;
        virtual void after_use(std::size_t i) = 0;
        virtual tutti::view<T, M> gradient(std::size_t i) = 0;
        virtual void gradient_ready(std::size_t i) = 0;
        virtual tutti::strategy::step_result step(tutti::strategy::hyper h) = 0;
        virtual tutti::strategy::step_result step(tutti::strategy::hyper h, const gradient_norm& norm) = 0;
        virtual void flush() = 0;
        virtual void finish() = 0;
        virtual void restored() = 0;
        virtual std::shared_ptr<void> consensus() = 0;
        virtual tutti::view<master, M> owned() = 0;
        virtual std::span<const tutti::state_entry<M>> state() = 0;
        virtual const tutti::schedule::bucket_plan& plan() = 0;
        virtual std::vector<int> levels() = 0;
        virtual tutti::schedule::overlap_metrics overlap(const tutti::schedule::timeline& trace, int rank) = 0;
        virtual Q queue() = 0;
    };
    template <class S> struct calls_of final : calls {
        S own;
        explicit calls_of(S s) : own(std::move(s)) {}
        void attach(list& p, const std::function<void()>& values_read) override {
            if constexpr (requires { own.attach(p, values_read); }) {
                own.attach(p, values_read);
            } else {
                own.attach(p);
            }
        }
        void begin(tutti::strategy::micro_batch m) override { own.begin(m); }
        tutti::view<const T, M> before_use(std::size_t i) override { return own.before_use(i); }
        void after_use(std::size_t i) override { own.after_use(i); }
        tutti::view<T, M> gradient(std::size_t i) override { return own.gradient(i); }
        void gradient_ready(std::size_t i) override { own.gradient_ready(i); }
        tutti::strategy::step_result step(tutti::strategy::hyper h) override { return own.step(h); }
        tutti::strategy::step_result step(tutti::strategy::hyper h, const gradient_norm& norm) override {
            if constexpr (requires { own.step(h, norm); }) {
                return own.step(h, norm);
            } else {
                throw std::logic_error("a strategy that is not told the norm of its gradients");
            }
        }
        void flush() override { own.flush(); }
        void finish() override { own.finish(); }
        void restored() override { own.restored(); }
        std::shared_ptr<void> consensus() override {
            using scope = decltype(own.consensus());
            return std::shared_ptr<scope>(new scope(own.consensus()));  // made in place: a scope may stay where it is
        }
        tutti::view<master, M> owned() override { return own.owned(); }
        std::span<const tutti::state_entry<M>> state() override { return own.state(); }
        const tutti::schedule::bucket_plan& plan() override { return plan_of(own); }
        std::vector<int> levels() override {
            std::vector<int> of;
            if constexpr (requires { own.exchange().tensors(); }) {
                for (const auto& t : own.exchange().tensors()) { of.push_back(t.level); }
            }
            return of;
        }
        tutti::schedule::overlap_metrics overlap(const tutti::schedule::timeline& trace, int rank) override {
            if constexpr (requires { own.overlap(); }) {
                return own.overlap();
            } else {
                return tutti::schedule::overlap_of(trace, rank);
            }
        }
        Q queue() override { return own.queue(); }

    private:
        template <class Any> static const tutti::schedule::bucket_plan& plan_of(Any& s) {
            if constexpr (requires { s.inner(); }) {
                return plan_of(s.inner());
            } else if constexpr (requires { s.shards(); }) {
                return s.shards().buckets();
            } else {
                return s.plan();
            }
        }
    };
    std::unique_ptr<calls> own_;

public:
    any_strategy() = default;
    // In this order: whether any_strategy is a strategy may not be asked while its own constructors are chosen.
    template <class S>
    requires(!std::same_as<S, any_strategy>) && tutti::strategy::strategy<S> any_strategy(S s)
        : own_(std::make_unique<calls_of<S>>(std::move(s))) {}

    void attach(list& p) {
        own_->attach(p, [] {});
    }
    void attach(list& p, const std::function<void()>& values_read) { own_->attach(p, values_read); }
    void begin(tutti::strategy::micro_batch m) { own_->begin(m); }
    [[nodiscard]] tutti::view<const T, M> before_use(std::size_t i) { return own_->before_use(i); }
    void after_use(std::size_t i) { own_->after_use(i); }
    [[nodiscard]] tutti::view<T, M> gradient(std::size_t i) { return own_->gradient(i); }
    void gradient_ready(std::size_t i) { own_->gradient_ready(i); }
    tutti::strategy::step_result step(tutti::strategy::hyper h) { return own_->step(h); }
    tutti::strategy::step_result step(tutti::strategy::hyper h, const gradient_norm& norm) {
        return own_->step(h, norm);
    }
    void flush() { own_->flush(); }
    void finish() { own_->finish(); }
    void restored() { own_->restored(); }
    [[nodiscard]] std::shared_ptr<void> consensus() { return own_->consensus(); }
    [[nodiscard]] tutti::view<master, M> owned() { return own_->owned(); }
    [[nodiscard]] std::span<const tutti::state_entry<M>> state() { return own_->state(); }
    [[nodiscard]] const tutti::schedule::bucket_plan& plan() { return own_->plan(); }
    [[nodiscard]] std::vector<int> levels() { return own_->levels(); }
    [[nodiscard]] tutti::schedule::overlap_metrics overlap(const tutti::schedule::timeline& trace, int rank) {
        return own_->overlap(trace, rank);
    }
    [[nodiscard]] Q queue() { return own_->queue(); }
};

/// The strategy of the pipeline that `o` names, over `comm`. Compiled apart, in strategies.cpp and cuda/strategies.cu.
template <class T, class Comm>
[[nodiscard]] any_strategy<T, tutti::queue_of<Comm>> make_strategy(Comm comm, const options& o,
                                                                   tutti::schedule::timeline* trace);

/// The strategy among the replicas of a part of the model, by --zero; `rank` is what the trace calls this one. Compiled
/// with the others.
template <class T, class Comm>
[[nodiscard]] any_strategy<T, tutti::queue_of<Comm>> make_strategy_of_parts(Comm comm, const options& o,
                                                                            tutti::schedule::timeline* trace, int rank);

}  // namespace transformer
