// recorder: a communicator of any size and rank that only keeps the messages of its exchanges. Its memory is phantom,
// so sizes may be larger than any machine's.
#pragma once

#include <cstdint>      // numbers
#include <optional>     // split
#include <span>         // colors
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // messages

#include <tutti/comm/front.hpp>          // typed collectives
#include <tutti/core/virtual_queue.hpp>  // phantom memory

namespace tutti::test {

class recorder : public comm::front<recorder, virtual_queue> {
    int rank_;
    int ranks_;
    virtual_queue queue_;

public:
    std::vector<std::vector<comm::message>> exchanges;

    recorder(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return ranks_; }
    [[nodiscard]] std::string_view name() const noexcept { return "recorder"; }
    [[nodiscard]] virtual_queue queue() const noexcept { return queue_; }
    [[nodiscard]] recorder duplicate(std::string_view) { return {rank_, ranks_}; }
    [[nodiscard]] std::optional<recorder> split(std::span<const int>, std::string_view) { return std::nullopt; }
    [[nodiscard]] std::vector<comm::control_record> gather_control(comm::control_record) { return {}; }
    void synchronize() {}
    void abort(std::string_view) noexcept {}
    void execute(const comm::call& c) { exchanges.emplace_back(c.messages.begin(), c.messages.end()); }
};
static_assert(comm::can_exchange<recorder>);

}  // namespace tutti::test
