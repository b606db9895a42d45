// resolver: lets the recorded ranks of a virtual cluster run against each other: who waits for whom, and how long
// operations take on links that others use too. Needs simulate/detail/{recorder,link_clock}.
#pragma once

#include <algorithm>      // max
#include <array>          // links of a message
#include <chrono>         // virtual times as points of the clock
#include <cstddef>        // size_t
#include <cstdint>        // numbers
#include <deque>          // messages
#include <memory>         // recordings
#include <string>         // messages
#include <unordered_map>  // pairs of ranks
#include <utility>        // move
#include <vector>         // states

#include <tutti/comm/cost.hpp>                     // call_time
#include <tutti/core/error.hpp>                    // mismatch_error, timeout_error
#include <tutti/core/text.hpp>                     // formatted
#include <tutti/core/virtual_queue.hpp>            // virtual_recording
#include <tutti/schedule/timeline.hpp>             // spans
#include <tutti/simulate/detail/disagreement.hpp>  // expect_one_call
#include <tutti/simulate/detail/link_clock.hpp>    // time
#include <tutti/simulate/detail/recorder.hpp>      // groups, calls
#include <tutti/simulate/outcome.hpp>              // rank_outcome

namespace tutti::simulate::detail {

/// One resolution: construct, run.
///
/// Semantics  a stream goes on until it waits: for an event of its rank, or in an operation for its ranks. Operations
///            begin when the last of their ranks is there, and end for all at once. Of an exchange each message begins
///            when both its ends are there, and the call ends with its last message.
class resolver {
    using kind = virtual_step::kind;
    static constexpr std::uint64_t nothing = ~std::uint64_t{0};

    struct stream {
        std::uint32_t rank;
        std::uint32_t index;  // among those of its rank
        std::size_t next = 0;
        double time = 0;
        std::uint64_t waits_for = nothing;  // an event
        std::uint32_t messages = 0;         // of the exchange that it is in
        double begun = 0;                   // when the last of them began
    };
    // The operation of a group; there is never more than one at a time.
    struct meeting {
        std::vector<std::uint32_t> streams;  // by rank, of those that are there
        std::vector<char> here;
        std::size_t arrived = 0;
        double begun = 0;
        comm::call_time time{};
        int stage = 0;
        std::vector<std::uint32_t> inside, between;  // links
    };
    struct end_point {
        std::uint32_t stream;
        bool sends;
        std::size_t bytes;
    };
    struct moving {
        std::uint32_t from, to;  // streams
        double busy;
        std::array<std::uint32_t, 2> links;
        bool used = false;  // links, already
    };

    const recorder& ranks_;
    std::vector<std::shared_ptr<virtual_recording>>& recordings_;
    schedule::timeline* trace_;
    std::vector<std::vector<schedule::timeline::track>> tracks_;  // by rank and stream, where traced
    std::vector<stream> streams_;
    std::vector<std::size_t> first_;  // by rank: its streams
    std::vector<meeting> meetings_;   // by group
    std::unordered_map<std::uint64_t, std::deque<end_point>> mail_;
    std::deque<moving> messages_;  // whose links stay where they are
    std::vector<std::uint32_t> free_messages_;
    std::vector<std::uint32_t> awake_;
    link_clock clock_;

public:
    std::vector<rank_outcome> out;  ///< times of each rank
    std::uint64_t operations = 0;   ///< between ranks: collectives, and messages

    resolver(const recorder& ranks, std::vector<std::shared_ptr<virtual_recording>>& recordings,
             schedule::timeline* trace, const std::vector<int>& traced)
        : ranks_(ranks)
        , recordings_(recordings)
        , trace_(trace)
        , tracks_(recordings.size())
        , meetings_(ranks.groups())
        , clock_(2 * recordings.size() +
                 2 * static_cast<std::size_t>(ranks.network().nodes() * ranks.network().nics_per_node()))
        , out(recordings.size()) {
        for (std::uint32_t r = 0; r < recordings.size(); ++r) {
            first_.push_back(streams_.size());
            recordings[r]->reached.assign(recordings[r]->events, -1.0);
            for (std::uint32_t s = 0; s < recordings[r]->streams.size(); ++s) { streams_.push_back({r, s}); }
        }
        first_.push_back(streams_.size());
        for (const int r : trace != nullptr ? traced : std::vector<int>{}) {
            const auto at = static_cast<std::size_t>(r);
            for (std::size_t s = 0; s < recordings.at(at)->streams.size(); ++s) {
                tracks_[at].push_back(trace->track_of(r, ranks.stream_name(r, s)));
            }
        }
    }

    void run() {
        for (std::size_t s = streams_.size(); s-- > 0;) { awake_.push_back(static_cast<std::uint32_t>(s)); }
        go_on();
        while (const auto next = clock_.next()) {
            if (next->token < meetings_.size()) {
                collective_goes_on(next->token, next->time);
            } else {
                message_goes_on(next->token - static_cast<std::uint32_t>(meetings_.size()), next->time);
            }
            go_on();
        }
        expect_end();
    }

private:
    [[nodiscard]] virtual_recording& recording(const stream& s) const { return *recordings_[s.rank]; }
    [[nodiscard]] const virtual_step& step_of(const stream& s) const { return recording(s).streams[s.index][s.next]; }

    void go_on() {
        while (!awake_.empty()) {
            const std::uint32_t id = awake_.back();
            awake_.pop_back();
            advance(id);
        }
    }
    void advance(std::uint32_t id) {
        stream& s = streams_[id];
        virtual_recording& r = recording(s);
        const auto& steps = r.streams[s.index];
        rank_outcome& sums = out[s.rank];
        for (; s.next < steps.size(); ++s.next) {
            const virtual_step& step = steps[s.next];
            if (step.what == kind::work) {
                span(s, step, s.time, s.time + step.seconds, schedule::span_kind::work);
                s.time += step.seconds;
                sums.work += step.seconds;
            } else if (step.what == kind::record) {
                r.reached[step.id] = s.time;
                for (std::size_t o = first_[s.rank]; o < first_[s.rank + 1]; ++o) {
                    if (streams_[o].waits_for == step.id) {
                        streams_[o].waits_for = nothing;
                        awake_.push_back(static_cast<std::uint32_t>(o));
                    }
                }
            } else if (step.what == kind::wait) {
                if (step.id >= r.reached.size() || r.reached[step.id] < 0) {
                    s.waits_for = step.id;
                    break;
                }
                s.time = std::max(s.time, r.reached[step.id]);
            } else if (!passes(id, step)) {
                break;
            }
        }
        sums.end = std::max(sums.end, s.time);
    }
    void span(const stream& s, const virtual_step& step, double begin, double end, schedule::span_kind what) {
        const auto& tracks = tracks_[s.rank];
        if (tracks.empty()) { return; }
        const auto at = [](double t) {
            return deadline{} + std::chrono::round<duration>(std::chrono::duration<double>(t));
        };
        trace_->add(tracks[s.index], recording(s).name_of(step), what, at(begin), at(end));
    }
    // The operation that a stream is in has ended for it.
    void release(std::uint32_t id, double begun, double end) {
        stream& s = streams_[id];
        rank_outcome& sums = out[s.rank];
        sums.waiting += begun - s.time;
        sums.communication += end - begun;
        span(s, step_of(s), s.time, end, schedule::span_kind::communication);
        s.time = end;
        ++s.next;
        awake_.push_back(id);
    }

    // Whether the operation is over at once.
    [[nodiscard]] bool passes(std::uint32_t id, const virtual_step& step) {
        const posted_call& call = ranks_.posted(step.id);
        if (ranks_.group_at(call.group).size() == 1) { return true; }
        if (call.kind == comm::collective::exchange) { return mails(id, call); }
        arrives(id, call);
        return false;
    }

    // Collectives.

    void arrives(std::uint32_t id, const posted_call& call) {
        const group& g = ranks_.group_at(call.group);
        meeting& m = meetings_[call.group];
        if (m.streams.empty()) {
            m.streams.resize(g.members.size());
            m.here.resize(g.members.size());
        }
        const auto place = static_cast<std::size_t>(
            std::lower_bound(g.members.begin(), g.members.end(), static_cast<int>(streams_[id].rank)) -
            g.members.begin());
        m.streams[place] = id;
        m.here[place] = 1;
        if (++m.arrived < g.members.size()) { return; }
        expect_agreement(g, m);
        m.begun = 0;
        m.time = call.time;
        for (const std::uint32_t other : m.streams) {
            const comm::call_time& t = ranks_.posted(step_of(streams_[other]).id).time;
            m.begun = std::max(m.begun, streams_[other].time);
            m.time = {std::max(m.time.latency, t.latency), std::max(m.time.inside, t.inside),
                      std::max(m.time.between, t.between)};
        }
        m.stage = 0;
        ++operations;
        clock_.at(m.begun + m.time.latency, call.group);
    }
    void collective_goes_on(std::uint32_t at, double now) {
        meeting& m = meetings_[at];
        const group& g = ranks_.group_at(at);
        for (++m.stage; m.stage <= 2; ++m.stage) {
            const double busy = m.stage == 1 ? m.time.inside : m.time.between;
            if (busy <= 0) { continue; }
            std::vector<std::uint32_t>& links = m.stage == 1 ? m.inside : m.between;
            if (links.empty()) { links = links_of(g, m.stage == 2); }
            clock_.use(now, busy, links, at);
            return;
        }
        m.arrived = 0;
        std::fill(m.here.begin(), m.here.end(), char{0});
        for (const std::uint32_t id : m.streams) { release(id, m.begun, now); }
    }
    // Both directions of every link that a group uses inside its nodes, or between them.
    [[nodiscard]] std::vector<std::uint32_t> links_of(const group& g, bool between) const {
        std::vector<std::uint32_t> links;
        for (const int r : g.members) {
            for (const bool out_of : {true, false}) { links.push_back(link_of(r, between, out_of)); }
        }
        std::sort(links.begin(), links.end());
        links.erase(std::unique(links.begin(), links.end()), links.end());
        return links;
    }
    [[nodiscard]] std::uint32_t link_of(int rank, bool between, bool out_of) const {
        const comm::topology& t = ranks_.network();
        const int link = between ? t.ranks() + t.node_of(rank) * t.nics_per_node() + t.nic_of(rank) : rank;
        return static_cast<std::uint32_t>(2 * link + (out_of ? 0 : 1));
    }

    // Exchanges.

    [[nodiscard]] bool mails(std::uint32_t id, const posted_call& call) {
        stream& s = streams_[id];
        const group& g = ranks_.group_at(call.group);
        const int rank = static_cast<int>(s.rank);
        s.messages = 1;  // the call itself, as long as it is being posted
        s.begun = s.time;
        for (const comm::message& m : call.messages) {
            const int peer = g.members[static_cast<std::size_t>(m.peer)];
            const auto from = static_cast<std::uint64_t>(m.sends ? rank : peer);
            const auto to = static_cast<std::uint64_t>(m.sends ? peer : rank);
            auto& waiting = mail_[(std::uint64_t{call.group} * recordings_.size() + from) * recordings_.size() + to];
            ++s.messages;
            if (waiting.empty() || waiting.front().sends == m.sends) {
                waiting.push_back({id, m.sends, m.bytes});
                continue;
            }
            const end_point other = waiting.front();
            waiting.pop_front();
            if (other.bytes != m.bytes) { throw_sizes(g, step_of(s), m, other); }
            begin_message(m.sends ? id : other.stream, m.sends ? other.stream : id, m.bytes);
        }
        return --s.messages == 0;
    }
    void begin_message(std::uint32_t from, std::uint32_t to, std::size_t bytes) {
        stream& a = streams_[from];
        stream& b = streams_[to];
        const double begun = std::max(a.time, b.time);
        a.begun = std::max(a.begun, begun);
        b.begun = std::max(b.begun, begun);
        const int sender = static_cast<int>(a.rank);
        const int receiver = static_cast<int>(b.rank);
        const bool between = !ranks_.network().same_node(sender, receiver);
        const comm::link l = ranks_.network().link(sender, receiver);
        std::uint32_t at = static_cast<std::uint32_t>(messages_.size());
        if (free_messages_.empty()) {
            messages_.emplace_back();
        } else {
            at = free_messages_.back();
            free_messages_.pop_back();
        }
        messages_[at] = {from,
                         to,
                         static_cast<double>(bytes) / l.bytes_per_second,
                         {link_of(sender, between, true), link_of(receiver, between, false)}};
        ++operations;
        clock_.at(begun + l.latency_seconds, static_cast<std::uint32_t>(meetings_.size()) + at);
    }
    void message_goes_on(std::uint32_t at, double now) {
        moving& m = messages_[at];
        if (!m.used && m.busy > 0 && streams_[m.from].rank != streams_[m.to].rank) {
            m.used = true;
            clock_.use(now, m.busy, m.links, static_cast<std::uint32_t>(meetings_.size()) + at);
            return;
        }
        const std::array<std::uint32_t, 2> ends{m.from, m.to};
        free_messages_.push_back(at);
        for (const std::uint32_t id : ends) {
            if (--streams_[id].messages == 0) { release(id, streams_[id].begun, now); }
        }
    }

    // Errors.

    void expect_agreement(const group& g, const meeting& m) const {
        bool same = true;
        const virtual_step& first = step_of(streams_[m.streams.front()]);
        for (const std::uint32_t id : m.streams) {
            const virtual_step& own = step_of(streams_[id]);
            same = same && own.id == first.id && own.call == first.call;
        }
        if (same) { return; }
        std::vector<made_call> calls;
        for (const std::uint32_t id : m.streams) {
            const virtual_step& own = step_of(streams_[id]);
            calls.push_back({&ranks_.posted(own.id), own.call});
        }
        expect_one_call(g, calls);
    }
    [[noreturn]] void throw_sizes(const group& g, const virtual_step& step, const comm::message& m,
                                  const end_point& other) const {
        const error_context context{"exchange", g.name, -1, step.call, 0, dtype::byte, 0, {}};
        const int peer = g.members[static_cast<std::size_t>(m.peer)];
        throw mismatch_error(formatted("exchange: {} bytes {} rank {}, which {} {}{}", m.bytes, m.sends ? "to" : "from",
                                       peer, m.sends ? "expects" : "sends", other.bytes, where(context)),
                             {peer}, context);
    }
    // Every stream is at its end, or it is said who waits where.
    void expect_end() const {
        constexpr std::size_t listed = 6;
        std::string text;
        std::vector<int> missing;
        std::size_t stuck = 0;
        for (const stream& s : streams_) {
            if (s.next == recording(s).streams[s.index].size()) { continue; }
            if (++stuck > listed) { continue; }
            text += formatted("{}rank {} waits {}", stuck == 1 ? "" : "; ", s.rank, position(s, missing));
        }
        if (stuck == 0) { return; }
        if (stuck > listed) { text += formatted("; and {} more", stuck - listed); }
        throw timeout_error(formatted("simulate: nothing can go on: {}", text), missing);
    }
    [[nodiscard]] std::string position(const stream& s, std::vector<int>& missing) const {
        const virtual_step& step = step_of(s);
        if (step.what == kind::wait) {
            return formatted("on '{}'", ranks_.stream_name(static_cast<int>(s.rank), s.index));
        }
        const posted_call& call = ranks_.posted(step.id);
        const group& g = ranks_.group_at(call.group);
        std::vector<int> absent;
        if (call.kind == comm::collective::exchange) {
            for (const comm::message& m : call.messages) {
                absent.push_back(g.members[static_cast<std::size_t>(m.peer)]);
            }
        } else {
            const meeting& at = meetings_[call.group];
            for (std::size_t r = 0; r < at.here.size(); ++r) {
                if (at.here[r] == 0) { absent.push_back(g.members[r]); }
            }
        }
        if (missing.empty()) { missing = absent; }
        return formatted("in {}, call {} on '{}', for {}", name_of(call.kind), step.call, g.name, list_of(absent));
    }
};

}  // namespace tutti::simulate::detail
