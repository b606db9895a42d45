// Grouped point-to-point between threads: offers in mailboxes, the receiver copies straight out of the sender's memory.
// Needs comm/detail/channel. Only the ranks of a group's messages take part.
#pragma once

#include <algorithm>  // find_if
#include <cstddef>    // size_t
#include <cstdint>    // epochs
#include <cstring>    // memcpy
#include <mutex>      // boxes
#include <string>     // messages
#include <thread>     // yield
#include <utility>    // move
#include <vector>     // offers, receives

#include <tutti/comm/detail/channel.hpp>  // mailboxes
#include <tutti/core/text.hpp>            // formatted

namespace tutti::comm::detail {

/// One exchange of one rank. Construct, `run`, destroy; the destructor takes back what nobody has taken, and waits for
/// a receiver that is copying, so the sender's memory is never touched after it.
class mail_exchange {
    channel& channel_;
    const call& call_;
    const int rank_;
    const error_context context_;
    std::vector<mail> offers_;  // addresses are handed out: sized once
    std::vector<const message*> receives_;

public:
    mail_exchange(channel& c, const call& k, int rank, error_context context)
        : channel_(c), call_(k), rank_(rank), context_(std::move(context)) {
        std::size_t sends = 0;
        for (const message& m : call_.messages) { sends += m.sends ? 1u : 0u; }
        offers_.reserve(sends);
        receives_.reserve(call_.messages.size() - sends);
        for (const message& m : call_.messages) {
            if (m.sends) {
                offers_.push_back({rank_, m.peer, m.data, m.bytes, mail::progress::offered});
            } else {
                receives_.push_back(&m);
            }
        }
    }
    mail_exchange(const mail_exchange&) = delete;
    mail_exchange& operator=(const mail_exchange&) = delete;
    ~mail_exchange() {
        for (mail& offer : offers_) { withdraw(offer); }
    }

    void run() {
        for (mail& offer : offers_) {
            mailbox& box = channel_.of(offer.destination).box;
            {
                const std::lock_guard lock(box.mutex);
                box.offers.push_back(&offer);
            }
            box.changed.notify();
        }
        signal& changed = channel_.of(rank_).box.changed;
        machine::ladder ladder(channel_.spin_time);
        deadline limit = after(channel_.relatives->timeout);
        for (;;) {
            const std::uint32_t seen = changed.value();
            if (receive_offered()) { ladder = machine::ladder(channel_.spin_time); }
            if (receives_.empty() && sent()) { return; }
            if (changed.value() != seen) { continue; }
            channel_.relatives->raise_if_poisoned(context_);
            expect_partners(limit);
            if (clock_type::now() >= limit) { time_out(); }
            if (!ladder.again()) { changed.sleep(seen); }
        }
    }

private:
    // Takes every receive whose message is there, in order for each peer. True when something was received.
    bool receive_offered() {
        std::vector<int> waiting_for;  // an earlier receive from this peer is still open: later ones must not overtake
        const std::size_t before = receives_.size();
        std::erase_if(receives_, [&](const message* m) {
            if (std::find(waiting_for.begin(), waiting_for.end(), m->peer) != waiting_for.end()) { return false; }
            if (receive(*m)) { return true; }
            waiting_for.push_back(m->peer);
            return false;
        });
        return receives_.size() != before;
    }

    bool receive(const message& m) {
        mailbox& box = channel_.of(rank_).box;
        mail* offer = nullptr;
        {
            const std::lock_guard lock(box.mutex);
            const auto found =
                std::find_if(box.offers.begin(), box.offers.end(), [&](const mail* o) { return o->source == m.peer; });
            if (found == box.offers.end()) { return false; }
            if ((*found)->bytes != m.bytes) { refuse(**found, m); }
            offer = *found;
            offer->state = mail::progress::taken;  // from here the sender cannot leave before we are done
            box.offers.erase(found);
        }
        if (m.bytes != 0) { std::memcpy(m.data, offer->data, m.bytes); }
        signal& sender = channel_.of(offer->source).box.changed;
        {
            const std::lock_guard lock(box.mutex);
            offer->state = mail::progress::done;
        }
        sender.notify();
        return true;
    }

    [[nodiscard]] bool sent() {
        return std::all_of(offers_.begin(), offers_.end(), [&](const mail& offer) {
            const std::lock_guard lock(channel_.of(offer.destination).box.mutex);
            return offer.state == mail::progress::done;
        });
    }

    void withdraw(mail& offer) noexcept {
        mailbox& box = channel_.of(offer.destination).box;
        for (;;) {
            {
                const std::lock_guard lock(box.mutex);
                if (offer.state != mail::progress::taken) {
                    std::erase(box.offers, &offer);
                    return;
                }
            }
            std::this_thread::yield();  // a copy is under way: bounded
        }
    }

    [[noreturn]] void refuse(const mail& offer, const message& m) {
        fail([&](const std::string& tail) {
            return mismatch_error(formatted("exchange: bytes differ (rank {} sends {}, rank {} receives {}){}",
                                            offer.source, offer.bytes, rank_, m.bytes, tail),
                                  {offer.source}, context_);
        });
    }
    // The partners that something is still to come from or to be taken by.
    [[nodiscard]] std::vector<int> partners() {
        std::vector<int> list;
        for (const message* m : receives_) { list.push_back(m->peer); }
        for (const mail& offer : offers_) {
            const std::lock_guard lock(channel_.of(offer.destination).box.mutex);
            if (offer.state == mail::progress::offered) { list.push_back(offer.destination); }
        }
        std::sort(list.begin(), list.end());
        list.erase(std::unique(list.begin(), list.end()), list.end());
        return list;
    }
    // A partner that left can neither send nor take: end now instead of at the deadline. What it had offered before it
    // left is gone too, since leaving an exchange means its offers were taken or withdrawn.
    void expect_partners(deadline& limit) {
        for (const int p : partners()) {
            const auto owner = channel_.of(p).owner.load(std::memory_order_acquire);
            if (p == rank_ || owner == presence::here) { continue; }
            const std::vector<int> open = partners();  // it may have taken its last message between the two looks
            if (std::find(open.begin(), open.end(), p) == open.end()) { continue; }
            if (owner == presence::thrown) {
                limit = std::min(limit, after(cause_time));
                continue;
            }
            channel_.relatives->raise_if_poisoned(context_);  // a rank that fails poisons before it goes
            fail([&](const std::string& tail) {
                return mismatch_error(formatted("exchange: rank {} has left{}", p, tail), {p}, context_);
            });
        }
    }
    [[noreturn]] void time_out() {
        const std::vector<int> missing = partners();
        for (const int p : missing) {
            if (channel_.of(p).owner.load(std::memory_order_acquire) != presence::thrown) { continue; }
            channel_.relatives->poison(formatted("rank {} was left by an exception", p));
            channel_.relatives->raise(context_);
        }
        fail([&](const std::string& tail) {
            return timeout_error(formatted("exchange: rank {} did not take part within {} s{}", list_of(missing),
                                           seconds(channel_.relatives->timeout), tail),
                                 missing, context_);
        });
    }
    template <class MakeError> [[noreturn]] void fail(MakeError make) {
        const auto error = make(where(context_));
        channel_.relatives->poison(error.what());
        throw error;
    }
};

}  // namespace tutti::comm::detail
