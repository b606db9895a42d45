// recorder: what the ranks of a virtual cluster have in common while they are recorded one after the other: groups, the
// calls they make, and what the control plane tells them. Needs comm/detail/intent, comm/cost and core/virtual_queue.
#pragma once

#include <cstddef>        // size_t
#include <cstdint>        // keys
#include <memory>         // groups
#include <span>           // colors
#include <string>         // names
#include <string_view>    // names
#include <unordered_map>  // look-ups
#include <utility>        // move
#include <vector>         // tables

#include <tutti/comm/call.hpp>           // call
#include <tutti/comm/cost.hpp>           // time_of
#include <tutti/comm/counted.hpp>        // traffic_snapshot
#include <tutti/comm/detail/intent.hpp>  // intent
#include <tutti/comm/topology.hpp>       // topology
#include <tutti/core/error.hpp>          // mismatch_error
#include <tutti/core/state.hpp>          // hash_bytes
#include <tutti/core/text.hpp>           // formatted

namespace tutti::simulate::detail {

/// The ranks of a communicator.
struct group {
    std::uint64_t key;  ///< the same on all of them, and whenever ranks are recorded again
    std::string name;
    std::vector<int> members;  ///< ranks of the cluster
    std::shared_ptr<const comm::topology> network;
    [[nodiscard]] int size() const noexcept { return static_cast<int>(members.size()); }
};

/// A call, once for all that make the same.
struct posted_call {
    std::uint32_t group = 0;
    comm::collective kind = comm::collective::barrier;
    comm::control_record intent{};                ///< without a number
    comm::call_time time{};                       ///< alone, as this rank sees it
    std::vector<comm::message> messages{};        ///< of an exchange
    std::vector<std::size_t> sent{}, expected{};  ///< by rank, in all_to_all_v
};

[[nodiscard]] inline std::uint64_t hash_of_words(std::span<const std::uint64_t> words) noexcept {
    return comm::detail::hash_of(words);
}

/// Groups and calls of all ranks, which are recorded in ascending order.
///
/// Semantics  a pass records every rank once. Control gathers are answered before all ranks have given their records:
///            by what they gave in the pass before, and in the first one as if all gave the same. Where that was wrong
///            another pass is needed. Each pass is right a call further than the one before it, at least.
class recorder {
    struct control_entry {
        comm::control_record intent{};  // of the first rank
        std::vector<comm::control_record> given{};
        std::vector<bool> came{};
        std::uint32_t group = 0;
        bool gathers = false;
        bool differs = false;  // the records given, while none was known
    };
    static constexpr std::uint32_t no_group = ~std::uint32_t{0};
    using key_map = std::unordered_map<std::uint64_t, std::uint32_t>;

    std::shared_ptr<const comm::topology> network_;
    std::vector<std::unique_ptr<const group>> groups_;
    key_map group_of_;
    std::vector<posted_call> posted_;
    key_map posted_at_;
    std::unordered_map<std::uint64_t, control_entry> control_;
    std::unordered_map<std::uint64_t, std::vector<comm::control_record>> answers_;
    std::vector<std::vector<std::uint32_t>> streams_;  // by rank and stream: whose it is
    std::string abort_cause_;
    bool aborted_ = false, rank_aborted_ = false;

public:
    std::vector<comm::traffic_snapshot> traffic;  ///< by rank

    explicit recorder(comm::topology network) : network_(std::make_shared<comm::topology>(std::move(network))) {
        begin_pass();
    }

    [[nodiscard]] const group& group_at(std::uint32_t g) const { return *groups_[g]; }
    [[nodiscard]] std::size_t groups() const noexcept { return groups_.size(); }
    [[nodiscard]] const posted_call& posted(std::uint32_t id) const { return posted_[id]; }
    [[nodiscard]] const comm::topology& network() const noexcept { return *network_; }

    /// Group 0 is of all ranks.
    void begin_pass() {
        groups_.clear();
        group_of_.clear();
        posted_.clear();
        posted_at_.clear();
        control_.clear();
        aborted_ = false;
        streams_.assign(static_cast<std::size_t>(network_->ranks()), {});
        traffic.assign(static_cast<std::size_t>(network_->ranks()), {});
        std::vector<int> all;
        for (int r = 0; r < network_->ranks(); ++r) { all.push_back(r); }
        static_cast<void>(add({1, "world", std::move(all), network_}));
    }
    /// Whether everybody was told the truth; if not, the next pass will know more.
    [[nodiscard]] bool end_pass() {
        bool right = true;
        for (auto& [key, entry] : control_) {
            if (!entry.gathers) { continue; }
            const auto known = answers_.find(key);
            const bool told = known != answers_.end() && known->second.size() == entry.came.size();
            std::vector<comm::control_record> truth = told ? known->second : all_of(entry);
            for (std::size_t r = 0; told && r < truth.size(); ++r) {
                if (entry.came[r]) { truth[r] = entry.given[entry.differs ? r : 0]; }
            }
            if (told ? known->second == truth : !entry.differs) { continue; }
            right = false;
            answers_[key] = std::move(truth);
        }
        return right;
    }
    /// Calls that the control plane had, at most one more pass for each.
    [[nodiscard]] std::size_t control_calls() const noexcept { return control_.size(); }
    /// Errors  mismatch_error when a control call was not made by all its ranks.
    void expect_complete() const {
        for (const auto& [key, entry] : control_) {
            std::vector<int> missing;
            for (std::size_t r = 0; r < entry.came.size(); ++r) {
                if (!entry.came[r]) { missing.push_back(static_cast<int>(r)); }
            }
            if (missing.empty()) { continue; }
            const comm::detail::intent what(entry.intent);
            const error_context context{
                std::string(name_of(what.what)), groups_[entry.group]->name, -1, what.sequence, 0, dtype::byte, 0, {}};
            throw mismatch_error(
                formatted("{}: ranks {} never come{}", context.operation, list_of(missing), where(context)), missing,
                context);
        }
    }

    /// Streams are called after the communicators that own them.
    void name_stream(int rank, std::size_t stream, std::uint32_t g) {
        auto& known = streams_[static_cast<std::size_t>(rank)];
        if (known.size() <= stream) { known.resize(stream + 1, no_group); }
        known[stream] = g;
    }
    [[nodiscard]] std::string stream_name(int rank, std::size_t stream) const {
        const auto& known = streams_[static_cast<std::size_t>(rank)];
        if (stream >= known.size() || known[stream] == no_group) { return formatted("stream {}", stream); }
        return groups_[known[stream]]->name;
    }

    /// The next rank starts. What ranks before it aborted it cannot know: they may have been told what is not true.
    void begin_rank() noexcept { rank_aborted_ = false; }
    /// Whether the rank that is recorded has aborted; whether any has.
    [[nodiscard]] bool rank_aborted() const noexcept { return rank_aborted_; }
    [[nodiscard]] bool aborted() const noexcept { return aborted_; }
    void abort(std::string_view why) noexcept {
        rank_aborted_ = true;
        if (aborted_) { return; }
        aborted_ = true;
        try {
            abort_cause_ = why;
        } catch (...) {}  // out of memory: the abort stands without its text
    }
    [[noreturn]] void throw_aborted(error_context context) const {
        throw aborted_error(formatted("{}: aborted: {}{}", context.operation, abort_cause_, where(context)), context);
    }

    /// The group of those with this rank's color. Errors: mismatch_error when other ranks do something else.
    [[nodiscard]] std::uint32_t child(std::uint32_t parent, int rank, std::uint64_t sequence, comm::control kind,
                                      std::span<const int> colors, std::string_view name) {
        comm::detail::intent mine(kind, sequence);
        mine.first = comm::detail::hash_of(std::span(name.data(), name.size()));
        mine.second = comm::detail::hash_of(colors);
        static_cast<void>(arrive(parent, rank, mine));
        const group& of = *groups_[parent];
        const int color = colors[static_cast<std::size_t>(rank)];
        const std::uint64_t words[] = {of.key, sequence, static_cast<std::uint64_t>(color)};
        const std::uint64_t key = hash_of_words(words);
        const auto known = group_of_.find(key);
        if (known != group_of_.end()) { return known->second; }
        group made{key, formatted("{}/{}", of.name, name), {}, of.network};
        std::vector<int> places;
        for (std::size_t r = 0; r < colors.size(); ++r) {
            if (colors[r] != color) { continue; }
            places.push_back(static_cast<int>(r));
            made.members.push_back(of.members[r]);
        }
        if (places.size() != of.members.size()) {
            made.network = std::make_shared<comm::topology>(of.network->subset(places));
        }
        return add(std::move(made));
    }
    /// A rank that joins no group takes part in the split.
    void stays_out(std::uint32_t parent, int rank, std::uint64_t sequence, std::span<const int> colors,
                   std::string_view name) {
        comm::detail::intent mine(comm::control::split, sequence);
        mine.first = comm::detail::hash_of(std::span(name.data(), name.size()));
        mine.second = comm::detail::hash_of(colors);
        static_cast<void>(arrive(parent, rank, mine));
    }

    /// What all ranks give, as far as it is known; null: all the same as this one.
    [[nodiscard]] const std::vector<comm::control_record>* gather(std::uint32_t g, int rank, std::uint64_t sequence,
                                                                  const comm::control_record& mine) {
        control_entry& entry = arrive(g, rank, comm::detail::intent(comm::control::gather_control, sequence));
        entry.gathers = true;
        if (entry.given.empty()) {
            entry.given.push_back(mine);
        } else if (entry.differs || mine != entry.given[0]) {
            if (!entry.differs) { entry.given.resize(entry.came.size(), entry.given[0]); }
            entry.differs = true;
            entry.given[static_cast<std::size_t>(rank)] = mine;
        }
        const auto known = answers_.find(key_of(g, sequence));
        const bool fits = known != answers_.end() && known->second.size() == entry.came.size();
        return fits ? &known->second : nullptr;
    }

    /// The number of a call.
    [[nodiscard]] std::uint32_t post(std::uint32_t g, int rank, const comm::call& c) {
        comm::detail::intent what(c, rank);
        what.sequence = 0;
        const comm::control_record record = what.record();
        const bool own = c.kind == comm::collective::exchange || c.kind == comm::collective::all_to_all_v;
        std::vector<std::uint64_t> words{g, own ? static_cast<std::uint64_t>(rank) : ~std::uint64_t{0}};
        words.insert(words.end(), record.begin(), record.end());
        for (const comm::message& m : c.messages) {
            words.insert(words.end(), {static_cast<std::uint64_t>(m.peer) << 1 | (m.sends ? 1u : 0u), m.bytes});
        }
        const auto [at, fresh] =
            posted_at_.try_emplace(hash_of_words(words), static_cast<std::uint32_t>(posted_.size()));
        if (fresh) {
            posted_.push_back({g, c.kind, record, comm::time_of(c, rank, *groups_[g]->network)});
            posted_call& made = posted_.back();
            made.messages.assign(c.messages.begin(), c.messages.end());
            if (c.kind == comm::collective::all_to_all_v) {
                made.sent.assign(c.send_counts.begin(), c.send_counts.end());
                made.expected.assign(c.recv_counts.begin(), c.recv_counts.end());
            }
        }
        return at->second;
    }

private:
    [[nodiscard]] std::uint32_t add(group g) {
        const auto index = static_cast<std::uint32_t>(groups_.size());
        group_of_.emplace(g.key, index);
        groups_.push_back(std::make_unique<const group>(std::move(g)));
        return index;
    }
    [[nodiscard]] std::uint64_t key_of(std::uint32_t g, std::uint64_t sequence) const {
        const std::uint64_t words[] = {groups_[g]->key, sequence};
        return hash_of_words(words);
    }
    [[nodiscard]] static std::vector<comm::control_record> all_of(const control_entry& e) {
        return e.differs ? e.given : std::vector<comm::control_record>(e.came.size(), e.given.at(0));
    }
    [[nodiscard]] control_entry& arrive(std::uint32_t g, int rank, const comm::detail::intent& mine) {
        const auto [at, fresh] = control_.try_emplace(key_of(g, mine.sequence));
        control_entry& entry = at->second;
        const comm::control_record record = mine.record();
        if (fresh) {
            entry.intent = record;
            entry.group = g;
            entry.came.resize(groups_[g]->members.size(), false);
        } else if (entry.intent != record) {
            const comm::detail::intent first(entry.intent);
            comm::detail::finding found;
            if (!comm::detail::differ_in_fields({first, mine}, found)) {
                found.text = first.first != mine.first ? "name differs" : "colors differ";
            }
            const error_context context{
                std::string(name_of(mine.what)), groups_[g]->name, rank, mine.sequence, 0, dtype::byte, 0, {}};
            throw mismatch_error(
                formatted("{}: {} from what lower ranks say{}", context.operation, found.text, where(context)), {rank},
                context);
        }
        entry.came[static_cast<std::size_t>(rank)] = true;
        return entry;
    }
};

}  // namespace tutti::simulate::detail
