// stream_queue: a device-like queue for tests: asynchronous, in order, with events. A thread stands for the device.
// Needs core/run. Its memory is ordinary memory that the host may not touch; operations run on the thread, now and then
// late, so that a missing event shows as a wrong result and under the thread sanitizer.
#pragma once

#include <chrono>              // delays
#include <condition_variable>  // events
#include <cstdint>             // seeds
#include <deque>               // work
#include <functional>          // work
#include <memory>              // shared by handles
#include <mutex>               // work list
#include <new>                 // storage
#include <optional>            // marks
#include <thread>              // the device

#include <tutti/core/run.hpp>  // operation

namespace tutti::test {

struct stream_memory {
    static constexpr bool host_accessible = false;
    static constexpr std::string_view name = "stream";
};

class stream_queue {
    struct stream {
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<std::function<void()>> work;
        bool stop = false;
        std::uint32_t random = 1;
        std::thread thread{[this] { loop(); }};

        void loop() {
            for (;;) {
                std::function<void()> next;
                {
                    std::unique_lock lock(mutex);
                    changed.wait(lock, [this] { return stop || !work.empty(); });
                    if (work.empty()) { return; }
                    next = std::move(work.front());
                    work.pop_front();
                }
                random = random * 1664525u + 1013904223u;
                if (random >> 30 == 0) { std::this_thread::sleep_for(std::chrono::microseconds(200)); }
                next();
            }
        }
        ~stream() {
            {
                const std::lock_guard lock(mutex);
                stop = true;
            }
            changed.notify_all();
            thread.join();
        }
    };
    std::shared_ptr<memory_account> account_ = std::make_shared<memory_account>();
    std::shared_ptr<stream> stream_ = std::make_shared<stream>();

public:
    using memory_type = stream_memory;
    static constexpr bool executes_inline = false;

    class event_type {
        struct shared {
            std::mutex mutex;
            std::condition_variable changed;
            bool done = false;
            deadline time{};
        };
        std::shared_ptr<shared> state_ = std::make_shared<shared>();

    public:
        [[nodiscard]] bool ready() const {
            const std::lock_guard lock(state_->mutex);
            return state_->done;
        }
        void wait_host(deadline end) const {
            std::unique_lock lock(state_->mutex);
            if (!state_->changed.wait_until(lock, end, [this] { return state_->done; })) {
                throw timeout_error("event: not reached in time", {});
            }
        }
        void happen() const {
            {
                const std::lock_guard lock(state_->mutex);
                state_->done = true;
                state_->time = clock_type::now();
            }
            state_->changed.notify_all();
        }
        [[nodiscard]] deadline when() const {
            const std::lock_guard lock(state_->mutex);
            return state_->time;
        }
        [[nodiscard]] duration since(const event_type& earlier) const { return when() - earlier.when(); }
    };
    using mark_type = event_type;

    void enqueue(std::function<void()> f) const {
        {
            const std::lock_guard lock(stream_->mutex);
            stream_->work.push_back(std::move(f));
        }
        stream_->changed.notify_all();
    }
    [[nodiscard]] event_type record() const {
        event_type e;
        enqueue([e] { e.happen(); });
        return e;
    }
    [[nodiscard]] std::optional<mark_type> mark() const { return record(); }
    void wait(const event_type& e) const {
        enqueue([e] { e.wait_host(after(std::chrono::seconds(60))); });
    }
    [[nodiscard]] void* allocate(std::size_t bytes) const {
        if (bytes == 0) { return nullptr; }
        account_->allocated(bytes);
        return ::operator new(bytes);
    }
    void release(void* p, std::size_t bytes) const {
        if (p == nullptr) { return; }
        enqueue([p] { ::operator delete(p); });
        account_->released(bytes);
    }
    [[nodiscard]] memory_account& account() const noexcept { return *account_; }
    [[nodiscard]] stream_queue sibling() const {
        stream_queue q;
        q.account_ = account_;
        return q;
    }
};
static_assert(timed_queue<stream_queue>);

// Found by argument-dependent lookup, as a device's launch is.
template <operation O> void launch(const stream_queue& q, const O& op) {
    q.enqueue([op] { op(); });
}
template <class T>
[[nodiscard]] std::remove_const_t<T> fetch_from_device(const stream_queue& q, view<T, stream_memory> v) {
    q.record().wait_host(after(std::chrono::seconds(60)));
    return *v.data();
}

}  // namespace tutti::test
