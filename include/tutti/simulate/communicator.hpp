// communicator: a rank of a virtual cluster: records what it would do with others, and when it would wait for them.
// Needs simulate/detail/recorder. simulate/cluster makes them, and resolves what they recorded.
#pragma once

#include <cstdint>      // numbers of groups
#include <memory>       // what ranks have in common
#include <optional>     // split
#include <span>         // colors
#include <string>       // contexts
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // control records

#include <tutti/comm/communicator.hpp>         // the concept
#include <tutti/comm/cost.hpp>                 // wire_bytes
#include <tutti/comm/front.hpp>                // typed collectives
#include <tutti/core/text.hpp>                 // formatted
#include <tutti/core/virtual_queue.hpp>        // virtual_queue
#include <tutti/simulate/detail/recorder.hpp>  // groups, calls

namespace tutti::simulate {

class cluster;

/// One virtual rank.
///
/// Semantics    calls are recorded on its queue, in their order; the memory that they name has sizes and no contents. A
///              duplicate and a part have streams of their own, as on a device. gather_control and agree tell the truth,
///              though ranks are recorded one after the other: see cluster::run. They and synchronize take no time.
///   abort      ends the run: later calls of any rank throw.
/// Determinism  of the program alone.
/// Cost         16 bytes a call, and some 50 ns.
/// Errors       usage_error as from any communicator; mismatch_error from duplicate and split when ranks differ in them;
///              what ranks do differently in other calls cluster::run finds.
class communicator : public comm::front<communicator, virtual_queue> {
    friend cluster;
    std::shared_ptr<detail::recorder> ranks_;
    std::uint32_t group_;
    int rank_;
    virtual_queue queue_;
    // The last call without tables: layers repeat theirs.
    comm::call last_{};
    std::uint32_t last_number_ = 0;
    std::uint64_t last_bytes_ = 0;

    communicator(std::shared_ptr<detail::recorder> ranks, std::uint32_t g, int rank, virtual_queue q)
        : ranks_(std::move(ranks)), group_(g), rank_(rank), queue_(std::move(q)) {
        ranks_->name_stream(of().members[static_cast<std::size_t>(rank_)], queue_.stream(), group_);
    }

public:
    communicator(communicator&&) noexcept = default;
    communicator& operator=(communicator&&) noexcept = default;

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return of().size(); }
    [[nodiscard]] std::string_view name() const noexcept { return of().name; }
    [[nodiscard]] virtual_queue queue() const noexcept { return queue_; }
    /// The network as this communicator's ranks see it.
    [[nodiscard]] const comm::topology& network() const noexcept { return *of().network; }

    [[nodiscard]] communicator duplicate(std::string_view name) {
        const std::vector<int> colors(of().members.size(), 0);
        return child(comm::control::duplicate, colors, name);
    }
    [[nodiscard]] std::optional<communicator> split(std::span<const int> colors, std::string_view name) {
        if (colors.size() != of().members.size()) {
            throw usage_error(formatted("split: {} colors for {} ranks, on '{}'", colors.size(), size(), this->name()));
        }
        if (colors[static_cast<std::size_t>(rank_)] < 0) {
            expect_running("split");
            ranks_->stays_out(group_, rank_, next_collective(), colors, name);
            return std::nullopt;
        }
        return child(comm::control::split, colors, name);
    }
    void synchronize() { expect_running("synchronize"); }
    void abort(std::string_view why) noexcept { ranks_->abort(why); }

    [[nodiscard]] std::vector<comm::control_record> gather_control(comm::control_record mine) {
        expect_running("gather_control");
        const auto* const known = ranks_->gather(group_, rank_, next_collective(), mine);
        return known != nullptr ? *known : std::vector<comm::control_record>(of().members.size(), mine);
    }
    void agree(std::uint64_t hash, std::string_view what) {
        expect_running("agree");
        const auto* const known = ranks_->gather(group_, rank_, next_collective(), {hash, 0, 0, 0});
        if (known != nullptr) { expect_agreement(*known, what); }
    }

    /// The byte-level core; called by the typed front.
    void execute(const comm::call& c) {
        expect_running(name_of(c.kind));
        const bool plain = c.send_counts.empty() && c.recv_counts.empty() && c.messages.empty();
        if (!plain || !repeats(c)) {
            last_number_ = ranks_->post(group_, rank_, c);
            last_bytes_ = comm::wire_bytes(c, rank_, size());
            last_ = plain ? c : comm::call{};
        }
        auto& sent = ranks_->traffic[static_cast<std::size_t>(of().members[static_cast<std::size_t>(rank_)])][c.kind];
        sent = sent + comm::traffic{1, last_bytes_};
        queue_.charge_collective(name_of(c.kind), last_number_, c.sequence);
    }

private:
    [[nodiscard]] const detail::group& of() const noexcept { return ranks_->group_at(group_); }
    [[nodiscard]] bool repeats(const comm::call& c) const noexcept {
        return last_.sequence != 0 && c.kind == last_.kind && c.type == last_.type &&
               c.element_size == last_.element_size && c.op == last_.op && c.in_count == last_.in_count &&
               c.out_count == last_.out_count && c.root == last_.root;
    }
    void expect_running(std::string_view operation) const {
        if (!ranks_->rank_aborted()) { return; }
        ranks_->throw_aborted({std::string(operation), std::string(name()), rank_, 0, 0, dtype::byte, 0, {}});
    }
    [[nodiscard]] communicator child(comm::control kind, std::span<const int> colors, std::string_view name) {
        expect_running(name_of(comm::operation(kind)));
        const std::uint32_t g = ranks_->child(group_, rank_, next_collective(), kind, colors, name);
        const int own = colors[static_cast<std::size_t>(rank_)];
        int place = 0;
        for (int r = 0; r < rank_; ++r) { place += colors[static_cast<std::size_t>(r)] == own ? 1 : 0; }
        return communicator(ranks_, g, place, queue_.sibling());
    }
};
static_assert(tutti::communicator<communicator> && comm::can_gather_control<communicator> &&
              comm::can_exchange<communicator> && comm::can_all_reduce<communicator, float, mean>);

}  // namespace tutti::simulate
