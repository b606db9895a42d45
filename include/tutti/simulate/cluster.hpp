// cluster: runs a program of many ranks on none: each rank is recorded once, on one thread and without data, then all
// are resolved against links that they share. Needs simulate/communicator, plan/machine for known hardware.
#pragma once

#include <concepts>    // invocable
#include <cstddef>     // size_t
#include <exception>   // errors of ranks
#include <functional>  // invoke
#include <memory>      // recordings
#include <utility>     // move
#include <vector>      // ranks

#include <tutti/comm/topology.hpp>             // topology
#include <tutti/core/error.hpp>                // usage_error
#include <tutti/core/text.hpp>                 // formatted
#include <tutti/core/virtual_queue.hpp>        // virtual_rates
#include <tutti/plan/machine.hpp>              // machine
#include <tutti/schedule/timeline.hpp>         // timeline
#include <tutti/simulate/communicator.hpp>     // communicator
#include <tutti/simulate/detail/recorder.hpp>  // recorder
#include <tutti/simulate/detail/resolver.hpp>  // resolver
#include <tutti/simulate/outcome.hpp>          // outcome

namespace tutti::simulate {

/// The network of `ranks` ranks on machines of a kind, at its attainable speed.
/// Errors  usage_error when ranks do not fill their nodes.
[[nodiscard]] inline comm::topology network_of(const plan::machine& m, int ranks) {
    const int per_node = ranks < m.ranks_per_node ? ranks : m.ranks_per_node;
    if (per_node < 1 || ranks % per_node != 0) {
        throw usage_error(formatted("simulate: {} ranks on nodes of {}", ranks, m.ranks_per_node));
    }
    const auto at = [&](comm::link l) { return comm::link{l.latency_seconds, l.bytes_per_second * m.link_efficiency}; };
    return comm::topology::uniform(ranks / per_node, per_node, at(m.inside), at(m.between), per_node);
}
/// The speed of its ranks, likewise.
[[nodiscard]] inline virtual_rates rates_of(const plan::machine& m) noexcept {
    return {m.memory_bandwidth * m.memory_efficiency, m.flops * m.product_efficiency,
            m.host_bandwidth * m.link_efficiency};
}

/// Ranks whose streams a run draws on a timeline, besides what the program itself records there.
struct trace_options {
    schedule::timeline* into = nullptr;  ///< with `deadline{}` as its origin
    std::vector<int> ranks{};
};

/// A virtual cluster.
///
/// Semantics
///   run        calls program(communicator&) once for each rank, in ascending order, and then resolves what they
///              recorded. The program is the one that runs on threads or GPUs: strategies, pipelines and lanes work as
///              they are, on views of phantom memory. It charges its own computing to a queue (charge, or tutti::run).
///              It must be repeatable: where ranks gather control records that differ (split_by_color, agreements that
///              fail) all are recorded again, until they have been told what all gave. What a program concludes from
///              records, and throws, before that is thrown away; so are its marks, by their timeline.
///   computing  a rank's streams do not slow one another down, and the host that submits takes no time. Every rank has
///              a link to its host of its own, see virtual_queue.
///   operations take what comm/cost says (time_of) from when their last rank is there, and end for all at once. Latency
///              passes beside other traffic. A link, of a rank inside its node or a NIC in one direction, gives equal
///              shares to all operations that use it, and an operation is as fast as its fullest link: what it leaves
///              of others is not given away, so busy networks look slower than they might be, never faster. An
///              operation counts once on a NIC, however many of its ranks are behind it.
/// Determinism  exact and repeatable: a function of the program.
/// Cost         memory: 16 bytes a step, and 8 an event. Time: about 0.1 us a step and 1 us an operation.
/// Errors       the error of the lowest rank whose program threw; mismatch_error when ranks disagree about a call: names
///              them, by their rank there; timeout_error when ranks wait for each other for ever: says who, where, and
///              for whom; aborted_error when the program aborted.
class cluster {
    comm::topology network_;
    virtual_rates rates_;

public:
    explicit cluster(comm::topology network, virtual_rates rates = {}) : network_(std::move(network)), rates_(rates) {}
    /// Errors  usage_error when a figure of the machine makes no sense, or ranks do not fill their nodes.
    cluster(const plan::machine& m, int ranks) : cluster((validate(m), network_of(m, ranks)), rates_of(m)) {}

    [[nodiscard]] int ranks() const noexcept { return network_.ranks(); }
    [[nodiscard]] const comm::topology& network() const noexcept { return network_; }

    template <std::invocable<communicator&> Program>
    outcome run(Program program, const trace_options& trace = {}) const {
        for (const int r : trace.ranks) {
            if (r < 0 || r >= ranks()) {
                throw usage_error(formatted("simulate: no rank {} to trace of {}", r, ranks()));
            }
        }
        recordings all;
        try {
            return record_and_resolve(program, trace, all);
        } catch (...) {
            abandon(all);
            throw;
        }
    }

private:
    using recordings = std::vector<std::shared_ptr<virtual_recording>>;

    // Marks that lie ahead will not be reached.
    static void abandon(const recordings& all) noexcept {
        for (const auto& r : all) { r->abandoned = true; }
    }

    template <class Program>
    outcome record_and_resolve(Program& program, const trace_options& trace, recordings& all) const {
        const auto shared = std::make_shared<detail::recorder>(network_);
        outcome result;
        for (;;) {
            ++result.passes;
            const std::exception_ptr error = record(shared, program, all);
            if (shared->end_pass()) {
                if (error != nullptr) { std::rethrow_exception(error); }
                break;
            }
            if (static_cast<std::size_t>(result.passes) > shared->control_calls() + 2) {
                throw usage_error("simulate: ranks give other control records whenever they are recorded: the program "
                                  "is not repeatable");
            }
            abandon(all);
            shared->begin_pass();
        }
        if (shared->aborted()) { shared->throw_aborted({"run", "world", -1, 0, 0, dtype::byte, 0, {}}); }
        shared->expect_complete();
        detail::resolver resolve(*shared, all, trace.into, trace.ranks);
        resolve.run();
        result.operations = resolve.operations;
        result.ranks = std::move(resolve.out);
        for (std::size_t r = 0; r < all.size(); ++r) {
            rank_outcome& own = result.ranks[r];
            own.peak_bytes = all[r]->account.peak();
            own.traffic = shared->traffic[r];
            result.seconds = result.seconds < own.end ? own.end : result.seconds;
            for (auto& s : all[r]->streams) {
                result.steps += s.size();
                s = {};
            }
        }
        return result;
    }

    // The first error of a rank.
    template <class Program>
    std::exception_ptr record(const std::shared_ptr<detail::recorder>& shared, Program& program,
                              recordings& all) const {
        std::exception_ptr first;
        all.clear();
        for (int r = 0; r < ranks(); ++r) {
            const virtual_queue q(rates_);
            all.push_back(q.shared_recording());
            shared->begin_rank();
            try {
                communicator world(shared, 0, r, q);
                std::invoke(program, world);
            } catch (...) {
                if (first == nullptr) { first = std::current_exception(); }
            }
            for (auto& s : all.back()->streams) { s.shrink_to_fit(); }
        }
        return first;
    }
};

}  // namespace tutti::simulate
