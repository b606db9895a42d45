// measured_link: latency and bandwidth between ranks of a communicator, timed by messages of several sizes.
// Needs sequence/calibration, comm point-to-point and all_reduce.
#pragma once

#include <array>    // a send and a receive
#include <chrono>   // steady_clock
#include <cstddef>  // size_t
#include <span>     // sizes
#include <vector>   // samples

#include <tutti/comm/communicator.hpp>          // can_exchange, can_all_reduce
#include <tutti/core/buffer.hpp>                // what is sent
#include <tutti/core/error.hpp>                 // usage_error
#include <tutti/core/reduce_op.hpp>             // max
#include <tutti/core/run.hpp>                   // fetch
#include <tutti/core/text.hpp>                  // formatted
#include <tutti/sequence/calibration.hpp>       // link_sample, fitted_link
#include <tutti/sequence/token_operations.hpp>  // fill

namespace tutti::sequence {

/// Seconds of an exchange in which every rank sends `bytes` to the rank `steps` behind it in its group, and gets as many,
/// all at once: the mean of `times` in a row, on the slowest rank.
///
/// Semantics  collective. Groups are `group` ranks in a row: with steps 1 and the ranks of a node a group, the links
///            inside nodes; with steps the ranks of a node and one group of all, those between neighboring nodes, by as
///            many ranks at once as a node has.
/// Determinism  a time. All ranks get the same.
/// Cost       2 * bytes of memory, `times` + 1 exchanges.
/// Errors     usage_error on all ranks: groups that do not divide the ranks, steps that lead to the rank itself, no bytes
///            or no times.
template <comm::can_exchange C>
requires comm::can_all_reduce<C, double, max>
[[nodiscard]] double exchange_seconds(C& comm, int steps, int group, std::size_t bytes, int times = 4) {
    if (group < 1 || comm.size() % group != 0 || steps < 1 || steps >= group || bytes == 0 || times < 1) {
        throw usage_error(formatted("measured_link: {} messages of {} bytes, {} steps on in groups of {} of {} ranks",
                                    times, bytes, steps, group, comm.size()));
    }
    using Q = queue_of<C>;
    const Q queue = comm.queue();
    buffer<std::byte, Q> from(queue, bytes), into(queue, bytes);
    buffer<double, Q> seconds(queue, 1);
    const int first = comm.rank() / group * group;
    const auto place = [&](int n) { return first + (comm.rank() - first + n) % group; };
    const std::array<comm::transfer<memory_of<C>>, 2> both{comm::send_to(place(steps), from.view()),
                                                           comm::receive_from(place(group - steps), into.view())};
    comm.exchange(both);  // connections are made with the first message
    comm.barrier();
    comm.synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < times; ++i) { comm.exchange(both); }
    comm.synchronize();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    const token_view<double, memory_of<C>> one(seconds.view(), std::size_t{1}, std::size_t{1}, std::size_t{1});
    fill_tokens(queue, one, taken.count() / times);
    comm.all_reduce(seconds.view(), seconds.view(), max{});
    return fetch(queue, seconds.view(), 0.0);
}

/// The link between ranks that are `steps` apart inside of groups: messages of every size, the median of `repeats` each.
/// Semantics and errors  as of exchange_seconds and fitted_link.
template <comm::can_exchange C>
[[nodiscard]] comm::link measured_link(C& comm, int steps, int group, std::span<const std::size_t> sizes,
                                       int repeats = 3) {
    std::vector<link_sample> samples;
    for (const std::size_t bytes : sizes) {
        samples.push_back(
            {bytes, detail::median_of(repeats, [&] { return exchange_seconds(comm, steps, group, bytes); })});
    }
    return fitted_link(samples);
}

}  // namespace tutti::sequence
