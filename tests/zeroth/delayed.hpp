// What makes queues and lanes late in tests of zeroth: copies of stream_queue, and a store with lanes that sleep.
// Needs schedule/stream_queue and zeroth/block_store.
#pragma once

#include <chrono>     // delays
#include <cstddef>    // size_t
#include <cstdint>    // seeds
#include <cstring>    // memcpy
#include <stdexcept>  // a model that fails
#include <thread>     // sleep
#include <vector>     // tickets

#include <tutti/comm/self.hpp>           // lanes
#include <tutti/schedule/lane.hpp>       // lane
#include <tutti/zeroth/block_store.hpp>  // block_store

#include "schedule/stream_queue.hpp"  // stream_queue

template <> struct tutti::staging_queue_of<tutti::test::stream_queue> { using type = tutti::host_queue; };

namespace tutti::test {

inline void upload(const stream_queue& q, view<const std::byte> in, view<std::byte, stream_memory> out) {
    q.enqueue([in, out] {
        if (!in.empty()) { std::memcpy(out.data(), in.data(), in.size()); }
    });
}
inline void download(const stream_queue& q, view<const std::byte, stream_memory> in, view<std::byte> out) {
    q.enqueue([in, out] {
        if (!in.empty()) { std::memcpy(out.data(), in.data(), in.size()); }
    });
}

// Sleeps now and then, by its own random numbers; the call that `calls` counts down to throws.
class nap {
    std::uint32_t state_;
    std::size_t calls_;

public:
    explicit nap(std::uint32_t seed, std::size_t calls = 0) : state_(seed), calls_(calls) {}
    void operator()() {
        if (calls_ != 0 && --calls_ == 0) { throw std::runtime_error("the model has had enough"); }
        state_ = state_ * 1664525u + 1013904223u;
        if (state_ >> 30 == 0) { std::this_thread::sleep_for(std::chrono::microseconds(state_ >> 24)); }
    }
};

// A pinned_store whose uploads wait for a lane that sleeps, and whose offloads do too: that of the last block, `slow`
// more.
template <floating_element T, queue Q> class late_store final : public zeroth::block_store<T, Q> {
    using base = zeroth::block_store<T, Q>;
    zeroth::pinned_store<T, Q> inner_;
    schedule::lane<comm::self<host_queue>> up_, down_;
    std::uint32_t seed_;
    std::chrono::milliseconds slow_;
    std::size_t leaving_ = 0;
    std::vector<typename base::host_ticket> fetched_, emptied_;

public:
    using typename base::host;
    using typename base::host_ticket;
    using typename base::upload_ticket;

    late_store(const zeroth::model_layout& l, std::uint32_t seed, std::chrono::milliseconds slow = {})
        : base(l, 0)
        , inner_(l)
        , up_(comm::self<host_queue>(host_queue(), {.name = "up"}))
        , down_(comm::self<host_queue>(host_queue(), {.name = "down"}))
        , seed_(seed)
        , slow_(slow) {}
    void open(std::size_t slot_count) override {
        fetched_.resize(slot_count);
        emptied_.resize(slot_count);
    }
    void fetch(std::size_t, std::size_t slot, std::span<const zeroth::pending_update>, upload_ticket&) override {
        fetched_[slot] = up_.submit("late", [nap = nap(++seed_)](auto&) mutable { nap(); });
    }
    [[nodiscard]] view<const std::byte, host> source(std::size_t m, std::size_t slot) const override {
        return inner_.source(m, slot);
    }
    [[nodiscard]] host_ticket& fetched(std::size_t slot) override { return fetched_[slot]; }
    [[nodiscard]] view<std::byte, host> sink(std::size_t m, std::size_t slot) override {
        leaving_ = m;
        return inner_.sink(m, slot);
    }
    [[nodiscard]] host_ticket& emptied(std::size_t slot) override {
        const auto more = leaving_ == this->layout().blocks() ? slow_ : std::chrono::milliseconds(0);
        emptied_[slot] = down_.submit("late", [nap = nap(++seed_), more](auto&) mutable {
            nap();
            std::this_thread::sleep_for(more);
        });
        return emptied_[slot];
    }
    void stored(std::size_t, std::size_t, upload_ticket&) override {}
    void settle() override {}
    [[nodiscard]] std::uint64_t hash(std::size_t m, std::uint64_t seed) override { return inner_.hash(m, seed); }

private:
    void put(std::size_t m, std::size_t first, view<const T> values) override {
        std::copy_n(values.data(), values.size(), inner_.image(m).data() + first);
    }
    void get(std::size_t m, std::size_t first, view<T> values) override {
        std::copy_n(inner_.image(m).data() + first, values.size(), values.data());
    }
};

}  // namespace tutti::test
