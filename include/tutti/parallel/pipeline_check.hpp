// pipeline_check: proves of a schedule and of its program what running it relies on, before anything runs.
// Needs parallel/pipeline_program. Each error names the rank and the action.
#pragma once

#include <algorithm>  // max
#include <cstddef>    // size_t
#include <cstdint>    // units held
#include <string>     // messages
#include <utility>    // pair
#include <vector>     // states

#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/parallel/pipeline_program.hpp>   // pipeline_program
#include <tutti/parallel/pipeline_replay.hpp>    // replayed
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule

namespace tutti::parallel {

namespace detail {

// What has been done for each (stage, micro-batch), and the last weight gradient of each copy of a stage.
class schedule_check {
    const pipeline_schedule& s_;
    std::vector<bool> forward_, input_, weight_;
    std::vector<int> last_weight_;  // by route and stage

    [[nodiscard]] std::size_t at(const action& a) const {
        return static_cast<std::size_t>(a.stage) * static_cast<std::size_t>(s_.micro_batches) +
               static_cast<std::size_t>(a.micro_batch);
    }
    [[noreturn]] void refuse(std::size_t rank, const action& a, const std::string& why) const {
        throw usage_error(formatted("{}: rank {}, {}: {}", s_.name, rank, describe(a), why));
    }
    void expect(bool holds, std::size_t rank, const action& a, const char* why) const {
        if (!holds) { refuse(rank, a, why); }
    }

public:
    explicit schedule_check(const pipeline_schedule& s) : s_(s) {
        const auto shape = [&](bool holds, const std::string& why) {
            if (!holds) { throw usage_error(formatted("{}: {}", s.name, why)); }
        };
        shape(s.ranks > 0 && s.micro_batches > 0,
              formatted("{} ranks and {} micro-batches; both must be positive", s.ranks, s.micro_batches));
        shape(s.actions.size() == static_cast<std::size_t>(s.ranks) && s.in_flight_limit.size() == s.actions.size(),
              formatted("{} lists and {} limits for {} ranks", s.actions.size(), s.in_flight_limit.size(), s.ranks));
        shape(s.stages() > 0 && s.routes.size() <= static_cast<std::size_t>(s.micro_batches),
              formatted("{} routes of {} stages", s.routes.size(), s.stages()));
        expect_held(s.name, s.held, std::int64_t{s.stages()} * s.micro_batches);
        for (const auto& route : s.routes) {
            shape(route.size() == s.routes[0].size(), "routes of different lengths");
            for (const int r : route) { shape(r >= 0 && r < s.ranks, formatted("a stage on rank {}", r)); }
        }
        forward_.resize(s.routes[0].size() * static_cast<std::size_t>(s.micro_batches));
        input_ = weight_ = forward_;
        last_weight_.assign(s.routes.size() * s.routes[0].size(), -1);
    }

    void list_of(std::size_t rank) {
        const auto& list = s_.actions[rank];
        std::int64_t held = 0;
        for (std::size_t i = 0; i < list.size(); ++i) {
            const action& a = list[i];
            expect(a.stage >= 0 && a.stage < s_.stages() && a.micro_batch >= 0 && a.micro_batch < s_.micro_batches,
                   rank, a, "there is no such stage or micro-batch");
            const int home = s_.rank_of(a.stage, a.micro_batch);
            if (home != static_cast<int>(rank)) { refuse(rank, a, formatted("belongs to rank {}", home)); }
            if (a.joined) { pair_of(rank, i); }
            if (a.what == pass::forward) {
                expect(!forward_[at(a)], rank, a, "comes twice");
                forward_[at(a)] = true;
                held += s_.held.before_backward;
                if (held > s_.in_flight_limit[rank]) {
                    refuse(rank, a, formatted("holds {} where {} are allowed", held, s_.in_flight_limit[rank]));
                }
            }
            if (a.what == pass::backward || a.what == pass::backward_input) {
                expect(!input_[at(a)], rank, a, "comes twice");
                expect(forward_[at(a)], rank, a, "comes before its forward");
                input_[at(a)] = true;
                held -= s_.held.before_backward - s_.held.before_weight;
            }
            if (a.what == pass::backward || a.what == pass::backward_weight) {
                expect(!weight_[at(a)], rank, a, "comes twice");
                expect(input_[at(a)], rank, a, "comes before its backward_input");
                weight_[at(a)] = true;
                held -= s_.held.before_weight;
                int& last = last_weight_[static_cast<std::size_t>(s_.route_of(a.micro_batch) * s_.stages() + a.stage)];
                if (a.micro_batch < last) {
                    refuse(rank, a, formatted("is added behind that of micro-batch {}; sums must be in order", last));
                }
                last = a.micro_batch;
            }
        }
    }
    void everything_done() const {
        for (int stage = 0; stage < s_.stages(); ++stage) {
            for (int b = 0; b < s_.micro_batches; ++b) {
                const auto rank = static_cast<std::size_t>(s_.rank_of(stage, b));
                for (const auto& [what, done] :
                     {std::pair{pass::forward, &forward_}, std::pair{pass::backward_input, &input_},
                      std::pair{pass::backward_weight, &weight_}}) {
                    const action a{what, stage, b};
                    if (!(*done)[at(a)]) { refuse(rank, a, "is missing"); }
                }
            }
        }
    }

private:
    void pair_of(std::size_t rank, std::size_t i) const {
        const auto& list = s_.actions[rank];
        const bool whole = list[i].what == pass::forward && i + 1 < list.size() && !list[i + 1].joined &&
                           (list[i + 1].what == pass::backward || list[i + 1].what == pass::backward_input);
        expect(whole, rank, list[i], "is joined with something else than a backward");
        expect(list[i].stage != list[i + 1].stage || list[i].micro_batch != list[i + 1].micro_batch, rank, list[i],
               "is joined with its own backward");
    }
};

[[noreturn]] inline void refuse_step(const pipeline_schedule& s, std::size_t rank, const pipeline_step& step,
                                     const std::string& why) {
    throw usage_error(formatted("{}: rank {}, {}: {}", s.name, rank, describe(step), why));
}

// Whether what a rank computes, sends and receives fits together within the rank.
inline void check_own_steps(const pipeline_schedule& s, const pipeline_program& program, std::size_t rank) {
    // By kind of result, stage and micro-batch it comes from.
    const auto m = static_cast<std::size_t>(s.micro_batches);
    const std::size_t results = static_cast<std::size_t>(s.stages()) * m;
    const auto at = [&](const action& a, int stage) {
        return (a.what == pass::forward ? 0 : results) + static_cast<std::size_t>(stage) * m +
               static_cast<std::size_t>(a.micro_batch);
    };
    std::vector<bool> received(2 * results, false);
    std::vector<const pipeline_step*> unsent(2 * results, nullptr);
    std::size_t next = 0;
    for (const pipeline_step& step : program[rank]) {
        const action& a = step.what;
        const bool known =
            a.stage >= 0 && a.stage < s.stages() && a.micro_batch >= 0 && a.micro_batch < s.micro_batches;
        if (!known) { refuse_step(s, rank, step, "there is no such stage or micro-batch"); }
        if (step.kind == step_kind::receive) {
            if (destination_of(s, a) != static_cast<int>(rank) || s.rank_of(a.stage, a.micro_batch) != step.peer) {
                refuse_step(s, rank, step, "is nothing this rank needs from there");
            }
            if (received[at(a, a.stage)]) { refuse_step(s, rank, step, "comes twice"); }
            received[at(a, a.stage)] = true;
            continue;
        }
        if (step.kind == step_kind::send) {
            if (unsent[at(a, a.stage)] == nullptr) { refuse_step(s, rank, step, "is not there to be sent"); }
            if (destination_of(s, a) != step.peer) { refuse_step(s, rank, step, "goes to the wrong rank"); }
            unsent[at(a, a.stage)] = nullptr;
            continue;
        }
        if (next == s.actions[rank].size() || s.actions[rank][next] != a) {
            refuse_step(s, rank, step, "is not what the schedule has here");
        }
        ++next;
        if (destination_of(s, a) >= 0) { unsent[at(a, a.stage)] = &step; }
        if (a.what == pass::backward_weight) { continue; }
        const int from = a.what == pass::forward ? a.stage - 1 : a.stage + 1;
        if (from < 0 || from == s.stages() || s.rank_of(from, a.micro_batch) == static_cast<int>(rank)) { continue; }
        if (!received[at(a, from)]) { refuse_step(s, rank, step, "its input has not been received"); }
    }
    if (next != s.actions[rank].size()) {
        throw usage_error(
            formatted("{}: rank {}, {}: is never computed", s.name, rank, describe(s.actions[rank][next])));
    }
    for (const pipeline_step* const step : unsent) {
        if (step != nullptr) { refuse_step(s, rank, *step, "its result is never sent"); }
    }
}

// Matches the sends and receives of each pair of ranks, and makes steps as long as any can be made.
class program_check {
    struct place {
        std::size_t rank = 0;
        std::size_t step = 0;
    };
    const pipeline_schedule& s_;
    const pipeline_program& program_;
    std::vector<std::vector<place>> partner_;  // by rank and step, of messages

public:
    program_check(const pipeline_schedule& s, const pipeline_program& program) : s_(s), program_(program) {
        const std::size_t n = program_.size();
        std::vector<std::vector<place>> sent(n * n);  // by source and destination
        std::vector<std::vector<place>> received(n * n);
        for (std::size_t r = 0; r < program_.size(); ++r) {
            partner_.emplace_back(program_[r].size());
            for (std::size_t i = 0; i < program_[r].size(); ++i) {
                const pipeline_step& step = program_[r][i];
                if (step.kind == step_kind::compute) { continue; }
                const auto peer = static_cast<std::size_t>(step.peer);
                if (step.kind == step_kind::send) { sent[r * n + peer].push_back({r, i}); }
                if (step.kind == step_kind::receive) { received[peer * n + r].push_back({r, i}); }
            }
        }
        for (std::size_t pair = 0; pair < sent.size(); ++pair) { match(sent[pair], received[pair]); }
    }

    /// One message at a time; both sides wait for each other. What comes to its end so also does with all messages
    /// between two computations in one call: when one is made here, both sides have begun the calls that it is in.
    void expect_no_deadlock() const {
        std::vector<std::size_t> at(program_.size(), 0);
        bool moved = true;
        while (moved) {
            moved = false;
            for (std::size_t r = 0; r < program_.size(); ++r) {
                for (; at[r] < program_[r].size(); ++at[r]) {
                    if (program_[r][at[r]].kind != step_kind::compute) {
                        const place other = partner_[r][at[r]];
                        if (at[other.rank] != other.step) { break; }
                        ++at[other.rank];
                    }
                    moved = true;
                }
            }
        }
        expect_end(at);
    }

private:
    void match(const std::vector<place>& sends, const std::vector<place>& receives) {
        for (std::size_t i = 0; i < std::max(sends.size(), receives.size()); ++i) {
            if (i >= sends.size()) { refuse(receives[i], "is never sent"); }
            if (i >= receives.size()) { refuse(sends[i], "is never received"); }
            const pipeline_step& send = step_at(sends[i]);
            const pipeline_step& receive = step_at(receives[i]);
            if (send.what != receive.what) {
                refuse(receives[i], formatted("but message {} from there is the result of {}", i, describe(send.what)));
            }
            partner_[sends[i].rank][sends[i].step] = receives[i];
            partner_[receives[i].rank][receives[i].step] = sends[i];
        }
    }
    [[nodiscard]] const pipeline_step& step_at(const place& p) const { return program_[p.rank][p.step]; }
    [[noreturn]] void refuse(const place& p, const std::string& why) const { refuse_step(s_, p.rank, step_at(p), why); }
    void expect_end(const std::vector<std::size_t>& at) const {
        for (std::size_t r = 0; r < at.size(); ++r) {
            if (at[r] < program_[r].size()) { refuse({r, at[r]}, "waits for ever"); }
        }
    }
};

}  // namespace detail

/// Checks a schedule: every forward, input gradient and weight gradient exactly once, on the rank of its stage, in an
/// order that can run; weight gradients of a copy of a stage in ascending order of micro-batches, so that sums have the
/// same bits under every schedule; never more held than the schedule says.
///
/// Cost    linear in the actions.
/// Errors  usage_error naming the rank, the action and what is wrong with it.
inline void validate(const pipeline_schedule& s) {
    detail::schedule_check check_of(s);
    for (std::size_t r = 0; r < s.actions.size(); ++r) { check_of.list_of(r); }
    check_of.everything_done();
    static_cast<void>(replayed(s, {}));
}

/// Checks a program of a valid schedule: it computes what the schedule says, what is needed is received before and what
/// is given sent after; sends and receives of each pair match in order; no rank waits for ever, be messages sent one by
/// one with both sides waiting, or all messages between two computations in one call.
///
/// Cost    linear in the steps for programs of program_of; times ranks at worst.
/// Errors  usage_error naming the rank, the step and what is wrong with it.
inline void validate(const pipeline_schedule& s, const pipeline_program& program) {
    if (program.size() != s.actions.size()) {
        throw usage_error(formatted("{}: a program for {} ranks of {}", s.name, program.size(), s.actions.size()));
    }
    for (std::size_t r = 0; r < program.size(); ++r) { detail::check_own_steps(s, program, r); }
    detail::program_check(s, program).expect_no_deadlock();
}

}  // namespace tutti::parallel
