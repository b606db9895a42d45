// What the files of fake_nccl share: communicators, cliques, tasks, the order of kernels.
// Needs fake_nccl. Not for tests.
// Locks: a clique's mutex and a turnstile's are never held together.
#pragma once

#include <array>               // scalars
#include <atomic>              // flags
#include <chrono>              // waits
#include <condition_variable>  // waits
#include <cstddef>             // size_t
#include <cstdint>             // tickets
#include <deque>               // messages
#include <functional>          // starts and splits
#include <map>                 // meetings
#include <memory>              // shared cliques
#include <mutex>               // locks
#include <optional>            // operators
#include <set>                 // tickets
#include <string>              // problems
#include <string_view>         // names
#include <utility>             // move
#include <vector>              // members

#include <support/fake_nccl.hpp>  // controls

namespace tutti::test::fake_nccl {

/// Waits under `lock` until done() or cancelled(); the latter is looked at again and again, as nobody tells of it.
template <class Done, class Cancelled>
void wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, Done done, Cancelled cancelled) {
    while (!done() && !cancelled()) { changed.wait_for(lock, std::chrono::milliseconds(5)); }
}

/// Lets the holders of tickets in, one at a time, in the order of the tickets.
class turnstile {
    std::mutex mutex_;
    std::condition_variable changed_;
    std::uint64_t next_ = 0;
    std::set<std::uint64_t> open_;

public:
    class ticket {
        turnstile& of_;
        const std::uint64_t number_;

    public:
        explicit ticket(turnstile& of) : of_(of), number_(of.take()) {}
        ticket(const ticket&) = delete;
        ticket& operator=(const ticket&) = delete;
        ~ticket() { of_.leave(number_); }
        template <class Cancelled> void enter(Cancelled cancelled) {
            std::unique_lock lock(of_.mutex_);
            wait(
                lock, of_.changed_, [&] { return *of_.open_.begin() == number_; }, cancelled);
        }
    };
    template <class Cancelled> void wait_until_empty(Cancelled cancelled) {
        std::unique_lock lock(mutex_);
        wait(
            lock, changed_, [&] { return open_.empty(); }, cancelled);
    }
    [[nodiscard]] bool empty() {
        const std::lock_guard lock(mutex_);
        return open_.empty();
    }

private:
    std::uint64_t take() {
        const std::lock_guard lock(mutex_);
        open_.insert(next_);
        return next_++;
    }
    void leave(std::uint64_t number) {
        {
            const std::lock_guard lock(mutex_);
            open_.erase(number);
        }
        changed_.notify_all();
    }
};

enum class kind {
    all_reduce,
    reduce_scatter,
    all_gather,
    broadcast,
    reduce,
    all_to_all,
    gather,
    scatter,
    send,
    receive
};

/// An operator made by ncclRedOpCreatePreMulSum.
struct factor {
    std::array<unsigned char, 8> value{};
    const void* on_device = nullptr;  // read when the operation runs
};

/// One operation of one rank.
struct task {
    kind what = kind::all_reduce;
    const char* name = "";
    const void* send = nullptr;
    void* receive = nullptr;
    std::size_t count = 0;
    ncclDataType_t type = ncclInt8;
    ncclRedOp_t op = ncclSum;
    int root = -1;  // or the peer
    std::optional<factor> scale;
    bool stalls = false;
    bool done = false;  // guarded by the clique's mutex
};

std::size_t size_of(ncclDataType_t type);
/// Does what the tasks of all ranks, which agree, say.
void compute(const std::vector<task*>& ranks);

/// Who splits, and what became of it.
struct division {
    struct entry {
        int color, key;
        bool blocking;
        ncclComm* child;
    };
    std::map<int, entry> ranks;
    bool complete = false;
};

/// What the ranks of one communicator share.
struct clique {
    const int size;
    std::mutex mutex;  // of what follows
    std::condition_variable changed;
    std::atomic<int> number{0};  // 0 until all have come
    std::map<int, ncclComm*> members;
    ncclResult_t start_error = ncclSuccess;
    std::map<std::uint64_t, std::vector<task*>> meetings;
    std::map<std::pair<int, int>, std::deque<task*>> sends, receives;  // by sender and receiver
    std::map<std::uint64_t, std::shared_ptr<division>> divisions;
    int ended = 0;

    explicit clique(int n) : size(n) {}
};

struct group_launch;

/// Counts a call, and says which failure was planned for it.
ncclResult_t enter(std::string_view function, ncclComm* c, std::size_t bytes = 0, cudaStream_t stream = nullptr);
ncclResult_t enter(std::string_view function, int rank);
void problem(std::string text);
ncclResult_t fails(ncclResult_t code, std::string text);  // what ncclGetLastError will say; returns code
bool is_exclusive();
bool hangs_on_mismatch();
bool destroy_waits();
int polls();
turnstile& order_of_device(int device);

/// Plans that concern the next operation of `c`.
struct fate {
    bool stalls = false;
    ncclResult_t async = ncclSuccess;
};
fate next_operation(const ncclComm& c);

// Of groups.
int depth();
ncclResult_t fail_group(ncclResult_t code);  // remembered until ncclGroupEnd; returns code
ncclResult_t add(ncclComm* c, task t, cudaStream_t stream);
ncclResult_t add(std::function<ncclResult_t()> finish);  // start or split: has arrived, and must wait for the others
void launch(group_launch& g);

// Of communicators.
ncclResult_t check(ncclComm* c, std::string_view function);        // alive?
ncclResult_t check_ready(ncclComm* c, std::string_view function);  // may it be given work?

}  // namespace tutti::test::fake_nccl

/// One rank of a communicator. Handles are kept for good, so that their use after the end is seen.
struct ncclComm {
    const std::shared_ptr<tutti::test::fake_nccl::clique> of;
    const int rank;
    const int device;
    const bool blocking;
    std::atomic<ncclResult_t> async{ncclSuccess};
    std::atomic<bool> aborted{false}, dead{false}, finalized{false};
    std::atomic<int> users{0}, running{0};
    tutti::test::fake_nccl::turnstile order;  // kernels of one communicator run in the order of launches on all streams
    std::uint64_t met = 0;                    // collectives; of the stream's threads, in their order
    std::mutex mutex;                         // of what follows
    std::uint64_t splits = 0;
    std::shared_ptr<tutti::test::fake_nccl::group_launch> waiting;  // not blocking: launched by polls
    std::shared_ptr<tutti::test::fake_nccl::division> dividing;     // not blocking: a split under way
    ncclComm_t* child = nullptr;                                    // where it is wanted
    std::vector<std::optional<tutti::test::fake_nccl::factor>> factors;
    std::set<void*> registered;

    ncclComm(std::shared_ptr<tutti::test::fake_nccl::clique> q, int r, int d, bool b)
        : of(std::move(q)), rank(r), device(d), blocking(b) {}
};

namespace tutti::test::fake_nccl {

/// Sees a second thread that uses a communicator at the same time.
class use {
    ncclComm* c_;

public:
    use(ncclComm* c, std::string_view function) : c_(c) {
        if (c_ != nullptr && c_->users.fetch_add(1, std::memory_order_relaxed) != 0) {
            problem(std::string(function) + ": another thread is in a call on the same communicator");
        }
    }
    use(const use&) = delete;
    use& operator=(const use&) = delete;
    ~use() {
        if (c_ != nullptr) { c_->users.fetch_sub(1, std::memory_order_relaxed); }
    }
};

/// Operations that are launched together.
struct group_launch {
    struct operation {
        ncclComm* c;
        task what;
        cudaStream_t stream;
    };
    std::mutex mutex;
    std::vector<operation> operations;
    int polls_left = 0;
    bool launched = false;
    ncclResult_t result = ncclSuccess;
};

}  // namespace tutti::test::fake_nccl
