// pipeline_run: one run of a pipeline on one rank: what is on its way and what is held.
// Needs parallel/pipeline_plan, parallel/pipeline_stage and schedule/lane.
#pragma once

#include <algorithm>    // max
#include <array>        // one message
#include <cstddef>      // size_t
#include <deque>        // messages on their way
#include <optional>     // buffers
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // tables

#include <tutti/comm/communicator.hpp>           // can_exchange
#include <tutti/core/buffer.hpp>                 // activations
#include <tutti/core/view.hpp>                   // view
#include <tutti/parallel/pipeline_plan.hpp>      // pipeline_plan
#include <tutti/parallel/pipeline_program.hpp>   // pipeline_step
#include <tutti/parallel/pipeline_schedule.hpp>  // action
#include <tutti/parallel/pipeline_stage.hpp>     // stage_call
#include <tutti/schedule/lane.hpp>               // lane
#include <tutti/schedule/ticket.hpp>             // ticket

namespace tutti::parallel::detail {

/// Semantics  made, then run once, by all ranks.
template <comm::can_exchange C, transportable T, class S> class pipeline_run {
    using Q = queue_of<C>;
    using M = memory_of<C>;

    // A result, from where it is made or received to its last use. The ticket goes first.
    struct parcel {
        buffer<T, Q> data;
        schedule::ticket<Q> moving{};
        parcel(Q q, std::size_t elements) : data(q, elements) {}
    };
    using table = std::vector<std::vector<std::optional<parcel>>>;  // rows of stages that this rank has to do with

    C& comm_;
    schedule::lane<C>* lane_;  // null: messages travel between passes
    const pipeline_plan& plan_;
    const pipeline_options& options_;
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

    pipeline_run(C& comm, schedule::lane<C>* lane, const pipeline_plan& plan, const pipeline_options& options, S& stage)
        : comm_(comm)
        , lane_(lane)
        , plan_(plan)
        , options_(options)
        , stage_(stage)
        , queue_(comm.queue())
        , activations_(static_cast<std::size_t>(plan.schedule.stages()))
        , gradients_(activations_.size()) {}

    void run() {
        for (const pipeline_step& step : plan_.program[static_cast<std::size_t>(comm_.rank())]) {
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
        if (row.empty()) { row.resize(static_cast<std::size_t>(plan_.schedule.micro_batches)); }
        return row[static_cast<std::size_t>(micro_batch)];
    }
    // Where the result of a pass is, whether made here or received.
    [[nodiscard]] std::optional<parcel>& result_of(const action& a) {
        return a.what == pass::forward ? place(activations_, a.stage + 1, a.micro_batch)
                                       : place(gradients_, a.stage - 1, a.micro_batch);
    }
    [[nodiscard]] std::size_t elements_of_result(const action& a) const {
        return options_.elements[static_cast<std::size_t>(a.what == pass::forward ? a.stage : a.stage - 1)];
    }

    void send(const pipeline_step& step) {
        parcel out = *std::move(result_of(step.what));
        result_of(step.what).reset();
        ++counts.messages_sent;
        counts.bytes_sent += out.data.size_bytes();
        const auto message = comm::send_to(step.peer, view<const T, M>(out.data));
        if (lane_ == nullptr) {
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
        if (lane_ != nullptr) {
            static_cast<void>(in.moving = submit(message, "receive"));
        } else {
            group_.push_back(message);
        }
    }
    [[nodiscard]] schedule::ticket<Q> submit(const comm::transfer<M>& message, std::string_view what) {
        ++counts.exchanges;
        return lane_->submit(
            what, [message](C& c) { c.exchange(std::array<comm::transfer<M>, 1>{message}); }, queue_);
    }
    void see_off() {
        departing_.front().moving.wait(queue_);
        departing_.pop_front();
    }
    void exchange_group() {
        if (group_.empty()) { return; }
        ++counts.exchanges;
        comm_.exchange(group_);
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
        if (consumer_of(plan_.schedule, a) < 0) { return {}; }
        return result_of(a).emplace(queue_, elements_of_result(a)).data.view();
    }

    void compute(const action& a) {
        const int route = plan_.schedule.route_of(a.micro_batch);
        stage_call call{a.stage, plan_.schedule.chunk_of(route, a.stage), a.micro_batch, true};
        const view<const T, M> in = input(activations_, a.stage, a.micro_batch);
        if (a.what == pass::forward) {
            call.keep = !options_.recompute;
            count_forward(call.keep);
            stage_.forward(call, in, output(a));
            ++counts.forwards;
            return;
        }
        const view<const T, M> d_out = input(gradients_, a.stage, a.micro_batch);
        if (a.what != pass::backward_weight) {
            if (options_.recompute) { forward_again(call, in); }
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
        const bool last = consumer_of(plan_.schedule, a) < 0;
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

}  // namespace tutti::parallel::detail
