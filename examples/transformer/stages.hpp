// stages: a rank's part of a model: its stages of a pipeline, of each layer what the rank has of it.
// Needs blocks.hpp, cut.hpp and tutti/parallel/pipeline_schedule. Forward and backward of a micro-batch in a stage, as
// tutti/parallel/pipeline asks for them.
#pragma once

#include <algorithm>   // find_if
#include <cstddef>     // byte, size_t
#include <cstdint>     // seed
#include <functional>  // what is told of passes
#include <list>        // memory that stays where it is
#include <optional>    // rehearsals, rates
#include <utility>     // move
#include <vector>      // parameters

#include <tutti/core/buffer.hpp>                 // storage
#include <tutti/core/elementwise.hpp>            // copy, fill
#include <tutti/core/hash.hpp>                   // hash_of
#include <tutti/core/run.hpp>                    // run, fetch
#include <tutti/parallel/pipeline.hpp>           // stage_call
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule
#include <tutti/strategy/strategy.hpp>           // parameters

#include "blocks.hpp"
#include "cut.hpp"
#include "data.hpp"
#include "document_attention.hpp"
#include "model.hpp"

namespace transformer {

/// Do gradients of weights come later than those of inputs?
[[nodiscard]] inline bool defers_weights(const tutti::parallel::pipeline_schedule& s) {
    const auto is_weight = [](const auto& a) { return a.what == tutti::parallel::pass::backward_weight; };
    return std::any_of(s.actions.begin(), s.actions.end(),
                       [&](const auto& list) { return std::any_of(list.begin(), list.end(), is_weight); });
}

/// What one rank has of a model whose layers are divided over a pipeline, each over a tensor group.
///
/// Semantics    layers divide over the stages of the schedule. Both ends have the token table, stage 0 that of positions
///              too. Attach parameters() to a strategy; per step begin(), then the pipeline runs with of(strategy).
///              A gradient is announced behind the last micro-batch of its stage, or, where the strategy is told of each,
///              behind each; but for those that other ranks add to: is_tied(i); these, and no others, are the caller's
///              to announce. Micro-batches must live until the pipeline has run. Losses are those of the last stage, on
///              each rank of the group that has it.
///              The classifier comes with the backward pass, so that logits are there once; its weight's gradient does
///              too, in every schedule.
/// Determinism  initial weights are those of the whole model, whatever the rank has of it; gradients are added up in
///              ascending order of micro-batches.
/// Cost         where ranks share documents, a plan of attention each time that another micro-batch comes to hand;
///              activations of as many micro-batches as the schedule has in flight, from the first step on.
template <class Math> class stages : blocks<Math> {
    using base = blocks<Math>;
    using typename base::M;
    using typename base::Q;
    using typename base::real;
    using typename base::T;
    using base::config_;
    using base::d_stream_;
    using base::logits_;
    using base::math_;
    using base::outer_;
    using base::rows_;
    using call = tutti::parallel::stage_call;
    using schedule_type = tutti::parallel::pipeline_schedule;

public:
    using typename base::element;
    using typename base::memory_type;
    using typename base::queue_type;
    static constexpr std::size_t nowhere = ~std::size_t{0};

    /// A strategy whose parameters are this rank's, by the numbers that they have in the whole model.
    template <class S> class placed {
        stages& own_;
        S& strategy_;

    public:
        placed(stages& own, S& strategy) : own_(own), strategy_(strategy) {}
        [[nodiscard]] tutti::view<const T, M> before_use(std::size_t i) {
            return own_.stand_in_ ? own_.stand_in_->values.view().sub(0, own_.declared(i).size())
                                  : strategy_.before_use(own_.place_of(i));
        }
        void after_use(std::size_t i) {
            if (!own_.stand_in_) { strategy_.after_use(own_.place_of(i)); }
        }
        [[nodiscard]] tutti::view<T, M> gradient(std::size_t i) {
            return own_.stand_in_ ? own_.stand_in_->gradients.view().sub(0, own_.declared(i).size())
                                  : strategy_.gradient(own_.place_of(i));
        }
        void begin(tutti::strategy::micro_batch m) { strategy_.begin(m); }
        void gradient_ready(std::size_t i) {
            if (--own_.expected_[own_.place_of(i)] == 0) { own_.announce(strategy_, i); }
        }
    };
    /// What a pipeline runs.
    template <class S> class bound {
        stages& own_;
        placed<S> s_;

    public:
        bound(stages& own, S& strategy) : own_(own), s_(own, strategy) {}
        void forward(const call& c, tutti::view<const T, M> in, tutti::view<T, M> out) {
            own_.timed("forward", [&] { own_.forward(s_, c, in, out); });
        }
        void backward_input(const call& c, tutti::view<const T, M> in, tutti::view<const T, M> d_out,
                            tutti::view<T, M> d_in) {
            own_.timed("backward", [&] { own_.backward_input(s_, c, in, d_out, d_in); });
        }
        void backward_weight(const call& c, tutti::view<const T, M>, tutti::view<const T, M>) {
            own_.timed("weights", [&] { own_.backward_weight(s_, c); });
        }
    };

    /// `rank` is that along the pipeline; the schedule stays where it is, and so does the attention of the batches whose
    /// sequences other ranks have parts of. Sequences have at most c.context tokens.
    stages(const configuration& c, int most_rows, std::uint64_t seed, const schedule_type& s, int rank,
           const tensor_part& part, recompute level, Math math, document_attention<T>* shared = nullptr)
        : base(c, parameters_of(c, part), most_rows, level == recompute::stages ? recompute::nothing : level,
               defers_weights(s), std::move(math))
        , schedule_(s)
        , rank_(rank)
        , part_(part)
        , attention_(shared)
        , values_(this->memory_, 0)
        , workspace_(this->memory_, 0) {
        make_parameters(seed);
        workspace_ = this->room_for([&](auto take) { this->lay_out_shared(take, holds(s.stages() - 1)); });
    }
    stages(const stages&) = delete;
    stages& operator=(const stages&) = delete;

    /// Those that this rank has any part of, in model order.
    [[nodiscard]] tutti::strategy::parameters<T, M>& parameters() { return parameters_; }
    /// Where parameter i of the whole model is in these; `nowhere` if it is not.
    [[nodiscard]] std::size_t place_of(std::size_t i) const { return place_[i]; }
    /// In the shape that this rank has of it, whether it has it or not.
    [[nodiscard]] const declaration& declared(std::size_t i) const { return this->list_[i]; }
    [[nodiscard]] const tensor_part& part() const { return part_; }
    [[nodiscard]] const configuration& config() const { return config_; }
    [[nodiscard]] const tutti::memory_account& account() const { return this->memory_.account(); }
    [[nodiscard]] queue_type queue() const { return math_.queue(); }
    [[nodiscard]] Math& math() { return math_; }
    /// Has this rank that stage, on any route?
    [[nodiscard]] bool holds(int stage) const {
        return std::any_of(schedule_.routes.begin(), schedule_.routes.end(),
                           [&](const auto& route) { return route[static_cast<std::size_t>(stage)] == rank_; });
    }
    /// The first stage that has parameter i of the whole model.
    [[nodiscard]] int stage_of(std::size_t i) const {
        if (i < at(0, in_layer{})) { return 0; }
        if (i >= this->final_gain()) { return schedule_.stages() - 1; }
        return static_cast<int>((i - at(0, in_layer{})) / per_layer) / layers_of_stage();
    }
    /// Parameter i of the whole model gets gradients on several ranks: both ends' table, or one of two copies.
    [[nodiscard]] bool is_tied(std::size_t i) const {
        return schedule_.routes.size() > 1 ||
               (i == token_table && schedule_.routes[0].front() != schedule_.routes[0].back());
    }
    /// Parameter i's gradient has what all micro-batches, or this one, and all routes add: it becomes the tensor group's,
    /// and is announced.
    template <class S> void announce(S& strategy, std::size_t i) {
        if (math_.divides_rows() && is_of_norm(i, config_)) { math_.add_up(strategy.gradient(place_of(i))); }
        strategy.gradient_ready(place_of(i));
    }
    /// Elements that leave and enter stages, of so many rows: those of the residual stream that this rank has.
    [[nodiscard]] std::size_t border(std::size_t rows) const {
        return static_cast<std::size_t>(math_.outer_rows(static_cast<int>(rows))) *
               static_cast<std::size_t>(config_.width);
    }
    /// Of all that this rank has. Collective among those that share values.
    template <class S> [[nodiscard]] std::uint64_t hash(S& strategy) const {
        std::uint64_t hash = 0;
        for_each_value(strategy, [&](std::size_t, tutti::view<const T, M> values) {
            const std::uint64_t both[] = {hash, tutti::hash_of(math_.queue(), values)};
            hash = tutti::hash_bytes(tutti::as_bytes(tutti::view<const std::uint64_t>(both, 2)));
        });
        return hash;
    }
    /// visit(i, values) for the parameters that this rank has, by their numbers in the whole model. Collective likewise.
    template <class S, class Visit> void for_each_value(S& strategy, Visit visit) const {
        for (std::size_t i = 0; i < place_.size(); ++i) {
            if (place_[i] == nowhere) { continue; }
            visit(i, strategy.before_use(place_[i]));
            strategy.after_use(place_[i]);
        }
    }
    /// The strategy does without the memory that values began in; of parameters() sizes are left.
    void release_values() { values_ = tutti::buffer<T, Q>(this->memory_, 0); }

    /// Runs every pass once on a batch, and waits. A device sets up products and page-locked memory when they are first
    /// used, and may wait for all its streams to do so: it must not come to that while one waits for another rank. So
    /// ranks rehearse alone, and, when all have, once more, collectively over the tensor group: then there are
    /// connections too, and both of the places from which tokens come. The next step begins as if this had not been.
    /// Attention that ranks share is left out where they rehearse alone. `apart`: without the strategy, which would talk
    /// to other ranks.
    template <class S> void rehearse(S& strategy, const batch& b, bool alone, bool apart) {
        const standing_in scope(*this, strategy.queue(), apart);
        placed<S> s(*this, strategy);
        const std::vector<batch> batches(static_cast<std::size_t>(schedule_.micro_batches), b);
        begin(batches, 1);
        expected_.assign(parameters_.size(), 0);  // nothing is announced
        rehearse_stages(b, alone, [&](int stage, tutti::view<const T, M> zero, tutti::view<T, M> out) {
            const call c{stage, 0, 0, true};
            forward(s, c, zero, out);
            backward_input(s, c, zero, zero, out);
            backward_weight(s, c);
        });
        static_cast<void>(take_loss());
    }
    /// Likewise forward alone, as score runs it.
    template <class S> void rehearse_scoring(S& strategy, const batch& b, bool alone, bool apart) {
        const standing_in scope(*this, strategy.queue(), apart);
        rehearse_stages(b, alone, [&](int stage, tutti::view<const T, M> zero, tutti::view<T, M> out) {
            static_cast<void>(score(strategy, stage, b, config_.context, zero, out));
        });
    }

    /// A step: these micro-batches, whose gradients are those of scale * (the sum of their losses). With a learning rate
    /// the strategy is told of each when it begins, behind the end of the one before, and gradients are announced in each.
    void begin(const std::vector<batch>& micro_batches, real scale, std::optional<double> rate_of_each = {}) {
        batches_ = &micro_batches;
        scale_ = scale;
        rate_of_each_ = rate_of_each;
        told_ = nobody;
        expect_announcements();
    }
    template <class S> [[nodiscard]] bound<S> of(S& strategy) { return {*this, strategy}; }
    [[nodiscard]] double take_loss() { return holds(schedule_.stages() - 1) ? math_.take_loss() : 0; }
    /// Is told the names of passes, and calls what it is given.
    void time_passes_by(std::function<void(const char*, const std::function<void()>&)> timer) {
        timer_ = std::move(timer);
    }

    /// Forward alone of sequences of `length`, through a stage that this rank has. The last one returns the losses'
    /// sum; others nothing.
    template <class S>
    [[nodiscard]] double score(S& strategy, int stage, const batch& b, int length, tutti::view<const T, M> in,
                               tutti::view<T, M> out) {
        placed<S> s(*this, strategy);
        memory_of_pass& m = free_memory();
        through(s, m, stage, b, length, in, out);
        if (stage + 1 < schedule_.stages()) { return 0; }
        if (stage > 0) { take(b, length); }
        this->classify(s, m.kept);
        return math_.loss(logits_.top(rows_));
    }
    /// Logits of the words that this rank has, for the token behind row `row` of what the last stage has just scored.
    /// Collective over the tensor group.
    template <class S> [[nodiscard]] auto logits_behind(S& strategy, int row) {
        placed<S> s(*this, strategy);
        const memory_of_pass& m = free_memory();  // where it was scored
        const matrix<T> logits = logits_.top(1);
        math_.on_whole_rows(matrix<const T>(m.kept.normalized.top(outer_)), rows_, [&](matrix<const T> normalized) {
            this->classify(s, normalized.block(row, 1, 0, config_.width), logits);
        });
        return on_host<T>(math_.queue(),
                          tutti::view<const T, M>(logits.data, static_cast<std::size_t>(logits.columns)));
    }

private:
    static constexpr int nobody = -1;
    // Values and gradients that mean nothing, all in one place.
    struct stand_in {
        tutti::buffer<T, Q> values, gradients;
    };
    class standing_in {
        stages& own_;

    public:
        standing_in(stages& own, const Q& q, bool stands) : own_(own) {
            if (!stands) { return; }
            std::size_t largest = 0;
            for (const auto& d : own_.list_) { largest = std::max(largest, d.size()); }
            own_.stand_in_.emplace(stand_in{tutti::buffer<T, Q>(q, largest), tutti::buffer<T, Q>(q, largest)});
            tutti::fill(own_.math_.queue(), own_.stand_in_->values.view(), static_cast<T>(0.0f));
        }
        standing_in(const standing_in&) = delete;
        standing_in& operator=(const standing_in&) = delete;
        ~standing_in() { own_.stand_in_.reset(); }
    };
    // What is kept of a micro-batch in a stage; of nobody, it is free, for any stage of this rank.
    struct memory_of_pass {
        int stage = nobody;
        int micro_batch = nobody;
        int first_slot;  // of what attention keeps
        typename base::kept_activations kept{};
        tutti::buffer<std::byte, Q> room;
        memory_of_pass(const Q& q, int slot) : first_slot(slot), room(q, 0) {}
    };

    // Calls pass(stage, zeros, room) for each stage that this rank has, and waits for them.
    template <class Pass> void rehearse_stages(const batch& b, bool alone, Pass pass) {
        math_.rehearse(alone);
        if (attention_ != nullptr) { attention_->rehearse(alone); }
        const tutti::buffer<T, Q> in(this->memory_, border(b.in.size())), out(this->memory_, in.size());
        tutti::fill(math_.queue(), in.view(), static_cast<T>(0.0f));
        for (int stage = 0; stage < schedule_.stages(); ++stage) {
            if (holds(stage)) { pass(stage, tutti::view<const T, M>(in.view()), out.view()); }
        }
        if (out.size() > 0) { static_cast<void>(tutti::fetch(math_.queue(), out.view().sub(0, 1), T{})); }
        math_.rehearse(false);
        if (attention_ != nullptr) { attention_->rehearse(false); }
    }
    [[nodiscard]] int layers_of_stage() const { return config_.layers / schedule_.stages(); }
    void expect_announcements() {
        expected_.assign(parameters_.size(), 0);
        for (std::size_t i = 0; i < place_.size(); ++i) {
            if (place_[i] != nowhere && !is_tied(i)) {
                expected_[place_[i]] = rate_of_each_ ? 1 : passes_of(stage_of(i));
            }
        }
    }
    // Micro-batches that go through a stage on this rank.
    [[nodiscard]] int passes_of(int stage) const {
        int passes = 0;
        for (int m = 0; m < schedule_.micro_batches; ++m) { passes += schedule_.rank_of(stage, m) == rank_ ? 1 : 0; }
        return passes;
    }
    template <class Work> void timed(const char* name, Work work) {
        if (timer_) {
            timer_(name, work);
        } else {
            work();
        }
    }

    void make_parameters(std::uint64_t seed) {
        const std::vector<declaration> whole = parameters_of(config_);
        std::size_t total = 0;
        place_.assign(whole.size(), nowhere);
        std::vector<std::size_t> held;
        for (std::size_t i = 0; i < whole.size(); ++i) {
            if (!holds(stage_of(i)) && !(i == token_table && holds(schedule_.stages() - 1))) { continue; }
            place_[i] = held.size();
            held.push_back(i);
            total += this->list_[i].size();
        }
        values_ = tutti::buffer<T, Q>(this->memory_, total);
        tutti::fill(math_.queue(), values_.view(), static_cast<T>(0.0f));  // padding
        std::size_t offset = 0;
        for (const std::size_t i : held) {
            const declaration& own = this->list_[i];
            const auto value = values_.view().sub(offset, own.size());
            {
                const tutti::buffer<T, Q> all(this->memory_, whole[i].size());
                initialize<T>(math_.queue(), all.view(), whole[i], seed, static_cast<std::uint32_t>(i));
                for_each_run(i, config_, part_, whole[i], [&](std::size_t from, std::size_t to, std::size_t n) {
                    tutti::copy(math_.queue(), tutti::view<const T, M>(all.view().sub(from, n)), value.sub(to, n));
                });
            }
            parameters_.push_back({.name = own.name,
                                   .shape = own.shape,
                                   .decay = own.shape.size() == 2,  // gains and biases do not decay
                                   .value = value,
                                   .gradient = {}});
            offset += own.size();
        }
    }

    // That of a micro-batch in a stage, or one that is free.
    [[nodiscard]] memory_of_pass* memory_of(int stage, int micro_batch) {
        const auto found = std::find_if(memories_.begin(), memories_.end(), [&](const memory_of_pass& m) {
            return m.stage == stage && m.micro_batch == micro_batch;
        });
        return found == memories_.end() ? nullptr : &*found;
    }
    [[nodiscard]] memory_of_pass& memory_of(const call& c) { return *memory_of(c.stage, c.micro_batch); }
    // The first that is free.
    [[nodiscard]] memory_of_pass& free_memory() {
        if (memory_of_pass* const free = memory_of(nobody, nobody); free != nullptr) { return *free; }
        memory_of_pass& made = memories_.emplace_back(this->memory_, slots_);
        slots_ += layers_of_stage();
        made.room = this->room_for([&](auto take) {
            this->lay_out(take, made.kept, layers_of_stage(), holds(0), holds(schedule_.stages() - 1));
        });
        return made;
    }
    [[nodiscard]] const batch& batch_of(const call& c) const {
        return (*batches_)[static_cast<std::size_t>(c.micro_batch)];
    }
    [[nodiscard]] matrix<T> rows_of(tutti::view<T, M> v) const { return {v.data(), outer_, config_.width}; }

    void enter(const batch& b, int length, const memory_of_pass& m, int stage) {
        const bool shares = !b.lengths.empty();
        if (shares) { attention_->plan(b.lengths); }
        base::enter(static_cast<int>(b.in.size()), length, shares ? attention_ : nullptr,
                    m.first_slot - stage * layers_of_stage());
    }
    void take(const batch& b, int length) {
        if (b.lengths.empty()) { return math_.take(b.in, b.targets, length); }
        math_.take(b.in, b.targets, attention_->positions());
    }

    template <class S>
    void through(S& s, memory_of_pass& m, int stage, const batch& b, int length, tutti::view<const T, M> in,
                 tutti::view<T, M> out) {
        enter(b, length, m, stage);
        auto& k = m.kept;
        if (stage == 0) {
            take(b, length);
            k.layers[0].in = k.stream[0];
            this->embed(s, k.stream[0]);
        } else {
            k.layers[0].in = matrix<const T>(in.data(), outer_, config_.width);
        }
        const int first = stage * layers_of_stage();
        for (std::size_t l = 0; l < k.layers.size(); ++l) {
            const bool last = l + 1 == k.layers.size();
            const matrix<T> to = !last ? k.stream[l + 1] : stage + 1 == schedule_.stages() ? k.last : rows_of(out);
            this->layer_forward(s, k.layers[l], first + static_cast<int>(l), to);
        }
        if (stage + 1 == schedule_.stages()) { this->final_norm(s, k); }
    }
    template <class S> void forward(S& s, const call& c, tutti::view<const T, M> in, tutti::view<T, M> out) {
        if (rate_of_each_ && c.micro_batch != told_) {
            told_ = c.micro_batch;
            expect_announcements();
            s.begin({c.micro_batch, static_cast<int>(batches_->size()), *rate_of_each_});
        }
        memory_of_pass& m = free_memory();
        if (c.keep) {
            m.stage = c.stage;
            m.micro_batch = c.micro_batch;
        }
        through(s, m, c.stage, batch_of(c), config_.context, in, out);
    }
    template <class S>
    void backward_input(S& s, const call& c, tutti::view<const T, M>, tutti::view<const T, M> d_out,
                        tutti::view<T, M> d_in) {
        const memory_of_pass& m = memory_of(c);
        const auto& k = m.kept;
        const batch& b = batch_of(c);
        enter(b, config_.context, m, c.stage);
        const bool ends = c.stage + 1 == schedule_.stages();
        const tutti::view<T, M> d_stream(d_stream_.data, d_stream_.top(outer_).size());
        if (ends || c.stage == 0) { take(b, config_.context); }
        if (ends) {
            this->classify(s, k);
            math_.loss_and_gradient(logits_.top(rows_), scale_);
            this->head_backward(s, k);
        } else {
            tutti::copy(math_.queue(), d_out, d_stream);
        }
        for (int l = layers_of_stage(); l-- > 0;) {
            this->layer_backward(s, k.layers[static_cast<std::size_t>(l)], c.stage * layers_of_stage() + l);
        }
        if (c.stage == 0) {
            this->embed_backward(s);
        } else {
            tutti::copy(math_.queue(), tutti::view<const T, M>(d_stream), d_in);
        }
    }
    template <class S> void backward_weight(S& s, const call& c) {
        memory_of_pass& m = memory_of(c);
        if (this->deferred_) {
            for (int l = layers_of_stage(); l-- > 0;) {
                this->layer_backward_weight(s, m.kept.layers[static_cast<std::size_t>(l)],
                                            c.stage * layers_of_stage() + l);
            }
        }
        m.stage = m.micro_batch = nobody;
    }

    const schedule_type& schedule_;
    int rank_;
    tensor_part part_;
    document_attention<T>* attention_;  // of batches whose sequences other ranks have parts of
    int slots_ = 0;                     // of it that memories have
    std::vector<std::size_t> place_;    // by number in the whole model
    std::list<memory_of_pass> memories_;
    std::vector<int> expected_;  // by place: announcements until the gradient is complete
    const std::vector<batch>* batches_ = nullptr;
    real scale_ = 1;
    std::optional<double> rate_of_each_;  // the strategy is told of each micro-batch,
    int told_ = nobody;                   // of this one the last time
    std::optional<stand_in> stand_in_;
    std::function<void(const char*, const std::function<void()>&)> timer_;
    tutti::strategy::parameters<T, M> parameters_;
    tutti::buffer<T, Q> values_;
    tutti::buffer<std::byte, Q> workspace_;
};

}  // namespace transformer
