// pipeline: runs a schedule over a user's stages: activations and gradients travel, weights stay.
// Needs parallel/pipeline_plan and schedule/lane. Source: Huang et al. 2019, arXiv:1811.06965 (with recomputation).
#pragma once

#include <algorithm>    // max
#include <array>        // one message
#include <cstddef>      // size_t, byte
#include <cstdint>      // counts, hashes
#include <deque>        // messages on their way
#include <exception>    // errors of stages
#include <memory>       // plans
#include <optional>     // lane, buffers
#include <string>       // messages
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // tables

#include <tutti/comm/communicator.hpp>           // can_exchange
#include <tutti/core/buffer.hpp>                 // activations
#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/state.hpp>                  // hash_bytes
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/core/view.hpp>                   // view
#include <tutti/parallel/pipeline_plan.hpp>      // pipeline_plan
#include <tutti/parallel/pipeline_program.hpp>   // pipeline_step
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule
#include <tutti/schedule/lane.hpp>               // lane

namespace tutti::parallel {

/// What a stage is asked for. `chunk` is its number among those of this rank.
struct stage_call {
    int stage = 0;
    int chunk = 0;
    int micro_batch = 0;
    bool keep = true;  ///< forward: the backward of this micro-batch is to come, without another forward before it
};

/// A user's part of the model on one rank, all its chunks.
///
/// Semantics  works on pipeline.queue(). The first stage has an empty `in` and `d_in` and finds its data by the
///            micro-batch; the last has an empty `out` and `d_out` and begins with the gradient of its own loss.
///   forward(call, in, out)                 writes all of out; keeps what backward needs beyond `in` if call.keep.
///   backward_input(call, in, d_out, d_in)  writes all of d_in.
///   backward_weight(call, in, d_out)       adds to the gradients of the weights, and lets go of what forward kept;
///                                          in ascending order of micro-batches for each copy of a stage.
template <class S, class T, class M>
concept pipeline_stage = requires(S& s, const stage_call& c, view<const T, M> in, view<T, M> out) {
    s.forward(c, in, out);
    s.backward_input(c, in, in, out);
    s.backward_weight(c, in, in);
};

struct pipeline_options {
    /// Elements of what stage s gives to stage s + 1; a single number is for all.
    std::vector<std::size_t> elements{};
    /// Forwards keep nothing but their inputs; each is run once more just before its backward.
    bool recompute = false;
    /// Messages travel on a lane while the next pass computes, two of a rank's results at a time; otherwise between
    /// passes, one call for all between two.
    bool overlap = false;
    pass_times times{};                    ///< what passes take, roughly: messages are put in order by it
    schedule::lane_options lane_choice{};  ///< of the lane, if there is one
};

/// What one rank did in a run.
struct pipeline_counts {
    std::uint64_t messages_sent = 0;
    std::uint64_t bytes_sent = 0;
    std::uint64_t exchanges = 0;  ///< calls; overlapped messages take one each on either side
    std::uint64_t forwards = 0;   ///< without those computed again
    std::uint64_t recomputed = 0;
    std::uint64_t backwards = 0;  ///< weight gradients
    int peak_in_flight = 0;       ///< chunks between a forward and its weight gradient, whose inputs are held
    int peak_kept = 0;            ///< chunks whose forward kept what backward needs
    friend constexpr bool operator==(const pipeline_counts&, const pipeline_counts&) = default;
};

/// One schedule over a communicator whose rank r is rank r of the schedule.
///
/// Semantics    construction is collective and proves the schedule; `run` is one step: all micro-batches through all
///              stages and back. It may be repeated. The stages' gradients are then complete for this pipeline.
/// Determinism  each pass sees the same inputs, and gradients are summed in the same order, under every schedule of the
///              same routes, with and without overlap and recomputation.
/// Cost         an activation and a gradient for each micro-batch and border between ranks; buffers as the schedule's
///              in-flight limit says, one input and one output gradient a chunk.
/// Errors       usage_error when the schedule is not valid, is for another number of ranks, or sizes do not fit its
///              stages; mismatch_error when ranks were given different ones. An error of a stage ends all ranks: the
///              family is aborted with its text, and it is rethrown here.
template <comm::can_exchange C, transportable T> class pipeline {
    using Q = queue_of<C>;
    using M = memory_of<C>;

    C comm_;
    std::shared_ptr<const pipeline_plan> plan_;
    pipeline_options options_;
    std::optional<schedule::lane<C>> lane_;

public:
    using element_type = T;
    using queue_type = Q;

    pipeline(C own, pipeline_schedule s, pipeline_options o) : comm_(std::move(own)), options_(std::move(o)) {
        std::string why;
        try {
            plan_ = plan_pipeline(std::move(s), delivery_of(options_), options_.times);
        } catch (const usage_error& e) { why = e.what(); }
        start(std::move(why));
    }
    /// The same by a plan that ranks share; `o.times` play no part.
    pipeline(C own, std::shared_ptr<const pipeline_plan> shared, pipeline_options o)
        : comm_(std::move(own)), plan_(std::move(shared)), options_(std::move(o)) {
        start("");
    }

    [[nodiscard]] const pipeline_schedule& schedule() const noexcept { return plan_->schedule; }
    [[nodiscard]] C& communicator() noexcept { return comm_; }
    [[nodiscard]] Q queue() const noexcept { return comm_.queue(); }

    template <pipeline_stage<T, M> S> pipeline_counts run(S& stage) {
        execution<S> step(*this, stage);
        try {
            step.run();
        } catch (const std::exception& e) {
            comm_.abort(e.what());  // before buffers go: peers may wait for them
            throw;
        } catch (...) {
            comm_.abort("pipeline: a stage threw something that is no std::exception");
            throw;
        }
        return step.counts;
    }

private:
    void start(std::string why) {
        if (why.empty()) { why = fault(); }
        try {
            comm_.agree(why.empty() ? hash() : hash_bytes(as_bytes(view<const char>(why))), "schedule and sizes");
        } catch (const mismatch_error&) {
            if (why.empty()) { throw; }
        }
        if (!why.empty()) { throw usage_error(why); }
        if (options_.overlap) { lane_.emplace(comm_.duplicate("pipeline"), options_.lane_choice); }
    }
    // What makes this pipeline impossible; "" if nothing does. Fills in sizes.
    [[nodiscard]] std::string fault() {
        const pipeline_schedule& s = plan_->schedule;
        if (comm_.size() != s.ranks) {
            return formatted("pipeline: {} for {} ranks on a communicator of {}, '{}'", s.name, s.ranks, comm_.size(),
                             comm_.name());
        }
        if (plan_->when != delivery_of(options_)) {
            return formatted("pipeline: the plan is for messages {} computations, overlap is {}",
                             plan_->when == delivery::ahead ? "beside" : "between", options_.overlap ? "on" : "off");
        }
        const auto borders = static_cast<std::size_t>(s.stages() - 1);
        if (options_.elements.size() == 1) { options_.elements.assign(borders, options_.elements[0]); }
        if (options_.elements.size() != borders) {
            return formatted("pipeline: sizes of {} activations for {} borders between stages",
                             options_.elements.size(), borders);
        }
        return "";
    }
    [[nodiscard]] static delivery delivery_of(const pipeline_options& o) noexcept {
        return o.overlap ? delivery::ahead : delivery::between;
    }
    [[nodiscard]] std::uint64_t hash() const {
        std::vector<std::uint64_t> words{plan_->hash, sizeof(T)};
        words.insert(words.end(), options_.elements.begin(), options_.elements.end());
        return hash_bytes(as_bytes(view<const std::uint64_t>(words)));
    }

    // One run: what is on its way and what is held.
    template <class S> class execution {
        // A result, from where it is made or received to its last use. The ticket goes first.
        struct parcel {
            buffer<T, Q> data;
            schedule::ticket<Q> moving{};
            parcel(Q q, std::size_t elements) : data(q, elements) {}
        };
        using table = std::vector<std::vector<std::optional<parcel>>>;  // rows of stages that this rank has to do with

        pipeline& pipe_;
        S& stage_;
        Q queue_;
        table activations_;  // by the stage that takes it, and micro-batch
        table gradients_;    // likewise
        std::vector<comm::transfer<M>> group_;
        std::vector<parcel> sent_;      // by the group that is being gathered
        std::deque<parcel> departing_;  // on the lane
        int in_flight_ = 0;
        int kept_ = 0;

    public:
        pipeline_counts counts;

        execution(pipeline& p, S& stage) : pipe_(p), stage_(stage), queue_(p.queue()) {
            activations_.resize(static_cast<std::size_t>(p.schedule().stages()));
            gradients_.resize(activations_.size());
        }

        void run() {
            for (const pipeline_step& step : pipe_.plan_->program[static_cast<std::size_t>(pipe_.comm_.rank())]) {
                switch (step.kind) {
                case step_kind::compute:
                    exchange_group();
                    compute(step.what);
                    break;
                case step_kind::send: send(step); break;
                case step_kind::receive: receive(step); break;
                }
            }
            exchange_group();
            while (!departing_.empty()) { see_off(); }
        }

    private:
        [[nodiscard]] std::optional<parcel>& place(table& t, int stage, int micro_batch) {
            auto& row = t[static_cast<std::size_t>(stage)];
            if (row.empty()) { row.resize(static_cast<std::size_t>(pipe_.schedule().micro_batches)); }
            return row[static_cast<std::size_t>(micro_batch)];
        }
        // Where the result of a pass is, whether made here or received.
        [[nodiscard]] std::optional<parcel>& result_of(const action& a) {
            return a.what == pass::forward ? place(activations_, a.stage + 1, a.micro_batch)
                                           : place(gradients_, a.stage - 1, a.micro_batch);
        }
        [[nodiscard]] std::size_t elements_of_result(const action& a) const {
            return pipe_.options_.elements[static_cast<std::size_t>(a.what == pass::forward ? a.stage : a.stage - 1)];
        }

        void send(const pipeline_step& step) {
            parcel out = *std::move(result_of(step.what));
            result_of(step.what).reset();
            ++counts.messages_sent;
            counts.bytes_sent += out.data.size_bytes();
            const auto message = comm::send_to(step.peer, view<const T, M>(out.data));
            if (!pipe_.lane_.has_value()) {
                group_.push_back(message);
                sent_.push_back(std::move(out));
                return;
            }
            while (departing_.size() >= 2) { see_off(); }
            departing_.push_back(std::move(out));
            // nvcc takes the reference that an assignment gives for a ticket thrown away.
            static_cast<void>(departing_.back().moving = submit(message, "send"));
        }
        void receive(const pipeline_step& step) {
            auto& in = result_of(step.what).emplace(queue_, elements_of_result(step.what));
            const auto message = comm::receive_from(step.peer, in.data.view());
            if (pipe_.lane_.has_value()) {
                static_cast<void>(in.moving = submit(message, "receive"));
            } else {
                group_.push_back(message);
            }
        }
        [[nodiscard]] schedule::ticket<Q> submit(const comm::transfer<M>& message, std::string_view what) {
            ++counts.exchanges;
            return pipe_.lane_->submit(
                what, [message](C& c) { c.exchange(std::array<comm::transfer<M>, 1>{message}); }, queue_);
        }
        void see_off() {
            departing_.front().moving.wait(queue_);
            departing_.pop_front();
        }
        void exchange_group() {
            if (group_.empty()) { return; }
            ++counts.exchanges;
            pipe_.comm_.exchange(group_);
            group_.clear();
            sent_.clear();
        }

        // What a stage takes; nothing at the ends of the pipeline.
        [[nodiscard]] view<const T, M> input(table& t, int stage, int micro_batch) {
            const auto& p = place(t, stage, micro_batch);
            if (!p.has_value()) { return {}; }
            p->moving.wait(queue_);
            return p->data.view();
        }
        [[nodiscard]] view<T, M> output(const action& a) {
            if (detail::consumer_of(pipe_.schedule(), a) < 0) { return {}; }
            return result_of(a).emplace(queue_, elements_of_result(a)).data.view();
        }

        void compute(const action& a) {
            const int route = pipe_.schedule().route_of(a.micro_batch);
            stage_call call{a.stage, pipe_.schedule().chunk_of(route, a.stage), a.micro_batch, true};
            const view<const T, M> in = input(activations_, a.stage, a.micro_batch);
            if (a.what == pass::forward) {
                call.keep = !pipe_.options_.recompute;
                count_forward(call.keep);
                stage_.forward(call, in, output(a));
                ++counts.forwards;
                return;
            }
            const view<const T, M> d_out = input(gradients_, a.stage, a.micro_batch);
            if (a.what != pass::backward_weight) {
                if (pipe_.options_.recompute) { forward_again(call, in); }
                stage_.backward_input(call, in, d_out, output({pass::backward_input, a.stage, a.micro_batch}));
            }
            if (a.what == pass::backward_input) { return; }
            stage_.backward_weight(call, in, d_out);
            ++counts.backwards;
            --in_flight_;
            --kept_;
            place(activations_, a.stage, a.micro_batch).reset();
            place(gradients_, a.stage, a.micro_batch).reset();
        }
        void forward_again(const stage_call& call, view<const T, M> in) {
            const action a{pass::forward, call.stage, call.micro_batch};
            const bool last = detail::consumer_of(pipe_.schedule(), a) < 0;
            const buffer<T, Q> out(queue_, last ? 0 : elements_of_result(a));
            stage_.forward(call, in, last ? view<T, M>{} : out.view());
            ++counts.recomputed;
            counts.peak_kept = std::max(counts.peak_kept, ++kept_);
        }
        void count_forward(bool keeps) {
            counts.peak_in_flight = std::max(counts.peak_in_flight, ++in_flight_);
            kept_ += keeps ? 1 : 0;
            counts.peak_kept = std::max(counts.peak_kept, kept_);
        }
    };
};

}  // namespace tutti::parallel
