// nccl_start: how ranks become a NCCL communicator: they meet in a store, rank 0 brings the identity, all join.
// Needs comm/detail/nccl_family and comm/store.
#pragma once

#include <algorithm>   // erase_if
#include <atomic>      // helper's result
#include <chrono>      // pauses
#include <cstddef>     // size_t
#include <cstdint>     // identities
#include <cstring>     // memcpy
#include <exception>   // errors
#include <filesystem>  // temporary directory
#include <map>         // stores of this process
#include <memory>      // shared with a helper
#include <mutex>       // stores of this process
#include <numeric>     // iota
#include <random>      // nonces
#include <span>        // identity
#include <string>      // keys
#include <thread>      // helper
#include <utility>     // move
#include <vector>      // members

#include <cuda_runtime_api.h>  // CUDA runtime
#include <nccl.h>              // NCCL
#include <unistd.h>            // getpid, gethostname

#include <tutti/comm/communicator.hpp>        // can_gather_control
#include <tutti/comm/detail/nccl_calls.hpp>   // checked calls
#include <tutti/comm/detail/nccl_end.hpp>     // end_handles
#include <tutti/comm/detail/nccl_family.hpp>  // family
#include <tutti/comm/detail/store_link.hpp>   // store_link
#include <tutti/comm/detail/whole_file.hpp>   // read_file
#include <tutti/comm/store.hpp>               // stores
#include <tutti/core/state.hpp>               // hash_bytes
#include <tutti/core/text.hpp>                // formatted

namespace tutti::comm {

struct nccl_options {
    std::string name = "world";            ///< root communicator's name; children append "/name"
    duration timeout = default_timeout();  ///< deadline of every wait
    /// Where processes meet: a directory that all ranks see. Empty: one in the temporary directory, for ranks on one
    /// host. Threads of one process need none.
    std::string store_directory = default_store_directory();
};

namespace detail {

/// Differs between hosts, and between two starts of one.
[[nodiscard]] inline std::uint64_t this_host() {
    char name[256] = {};
    static_cast<void>(::gethostname(name, sizeof(name) - 1));
    std::string text = name;
    if (const auto boot = read_file("/proc/sys/kernel/random/boot_id")) {
        text.append(reinterpret_cast<const char*>(boot->data()), boot->size());
    }
    return hash_bytes(as_bytes(view(text.data(), text.size())));
}
[[nodiscard]] inline std::uint64_t this_process() {
    const std::uint64_t parts[] = {this_host(), static_cast<std::uint64_t>(::getpid())};
    return hash_bytes(as_bytes(view(parts)));
}

/// The store that threads of this process share under `nonce`; it lives as long as one of them holds it.
[[nodiscard]] inline std::shared_ptr<memory_store> store_of_process(const std::string& nonce) {
    static std::mutex mutex;
    static auto& stores = *new std::map<std::string, std::weak_ptr<memory_store>>;
    const std::lock_guard lock(mutex);
    std::erase_if(stores, [](const auto& each) { return each.second.expired(); });
    auto& found = stores[nonce];
    auto kept = found.lock();
    if (kept == nullptr) { found = kept = std::make_shared<memory_store>(); }
    return kept;
}

/// A store for the ranks of `world`, under a nonce that rank 0 draws: in memory between threads, in files otherwise.
/// Collective.
template <can_gather_control World>
[[nodiscard]] std::unique_ptr<store_link> meeting_of(World& world, const nccl_options& o) {
    std::random_device draw;
    const auto word = [&] { return (static_cast<std::uint64_t>(draw()) << 32) | draw(); };
    const auto all = world.gather_control({this_host(), this_process(), word(), word()});
    const std::string nonce = formatted("{:016x}{:016x}", all[0][2], all[0][3]);
    bool one_process = true;
    bool one_host = true;
    for (const control_record& r : all) {
        one_host = one_host && r[0] == all[0][0];
        one_process = one_process && r[1] == all[0][1];
    }
    if (one_process) {
        auto link = std::make_unique<store_link_to<memory_store>>(store_of_process(nonce));
        static_cast<void>(world.gather_control({}));  // all hold it before the first lets go
        return link;
    }
    std::string directory = o.store_directory;
    if (directory.empty() && one_host) {
        directory = (std::filesystem::temp_directory_path() / formatted("tutti-{}", ::geteuid())).string();
    }
    if (directory.empty()) {
        throw usage_error("nccl: ranks are on several hosts: name a directory that all of them see (TUTTI_STORE)");
    }
    return std::make_unique<store_link_to<file_store>>(std::make_shared<file_store>(directory, nonce));
}

class nccl_start {
    std::unique_ptr<store_link> store_;
    int rank_;
    int ranks_;
    cuda_queue queue_;
    nccl_options choice_;
    error_context context_;

public:
    struct started {
        std::shared_ptr<nccl_family> family;
        std::shared_ptr<nccl_channel> channel;
    };

    nccl_start(std::unique_ptr<store_link> s, int rank, int ranks, cuda_queue q, nccl_options o)
        : store_(std::move(s))
        , rank_(rank)
        , ranks_(ranks)
        , queue_(std::move(q))
        , choice_(std::move(o))
        , context_{"nccl", choice_.name, rank, 0, 0, dtype::byte, 0, {}} {
        if (rank < 0 || rank >= ranks) {
            throw usage_error(formatted("nccl: rank {} is not one of {} ranks", rank, ranks), context_);
        }
        try {
            expect_timeout("nccl", choice_.timeout);
        } catch (const usage_error& e) {  // this rank's alone: others wait for it
            if (store_ != nullptr) { store_->fail(choice_.name, rank, e.what()); }
            throw;
        }
    }

    [[nodiscard]] started run() {
        const std::string& key = choice_.name;
        const deadline limit = after(choice_.timeout);
        store_->arrive(key, rank_);
        ncclComm_t made = nullptr;
        try {
            ncclUniqueId identity{};
            if (rank_ == 0) {
                check_nccl(ncclGetUniqueId(&identity), "ncclGetUniqueId", context_);
                store_->set(key, std::as_bytes(std::span(&identity, 1)));
            }
            // NCCL has no deadline here: so everybody is known to have come before it is asked.
            store_->wait_for_all(key, ranks_, limit);
            const auto bytes = store_->get(key, limit);
            if (bytes.size() != sizeof(identity)) {
                throw mismatch_error(formatted("nccl: the identity has {} bytes, this NCCL's have {}: ranks use "
                                               "different versions{}",
                                               bytes.size(), sizeof(identity), where(context_)),
                                     {0}, context_);
            }
            std::memcpy(&identity, bytes.data(), sizeof(identity));
            made = join(identity, limit);
            if (rank_ == 0) { store_->forget(key); }  // all have joined, so all have read it
            return assemble(made, true);
        } catch (const std::exception& e) {
            if (made != nullptr) { end_handles({made}, queue_.device(), ncclCommAbort); }
            if (store_ != nullptr) { store_->fail(key, rank_, e.what()); }
            throw;
        }
    }

    [[nodiscard]] static started adopt(ncclComm_t existing, cuda_queue q, nccl_options o) {
        error_context context{"nccl", o.name, -1, 0, 0, dtype::byte, 0, {}};
        if (existing == nullptr) { throw usage_error("nccl: the communicator is null", context); }
        int ranks = 0;
        int rank = 0;
        int device = 0;
        check_nccl(ncclCommCount(existing, &ranks), "ncclCommCount", context);
        check_nccl(ncclCommUserRank(existing, &rank), "ncclCommUserRank", context);
        check_nccl(ncclCommCuDevice(existing, &device), "ncclCommCuDevice", context);
        if (device != q.device()) {
            throw usage_error(
                formatted("nccl: the communicator is on device {}, its queue on device {}", device, q.device()),
                context);
        }
        return nccl_start(nullptr, rank, ranks, std::move(q), std::move(o)).assemble(existing, false);
    }

private:
    [[nodiscard]] started assemble(ncclComm_t comm, bool owned) {
        std::vector<int> members(static_cast<std::size_t>(ranks_));
        std::iota(members.begin(), members.end(), 0);
        const tutti::detail::on_device scope(queue_.device());
        started s;
        s.channel = std::make_shared<nccl_channel>(queue_, choice_.name, rank_, std::move(members), 1);
        s.channel->owned = owned;
        s.channel->comm.store(comm);
        s.family = std::make_shared<nccl_family>(std::move(store_), choice_.name, rank_, ranks_, queue_.device(),
                                                 choice_.timeout);
        return s;
    }

    // On a helper thread, so that the deadline holds; one that never returns is left behind. One that returns later ends
    // what NCCL made: of the two threads it is the second to look at `is` that does.
    [[nodiscard]] ncclComm_t join(const ncclUniqueId& identity, deadline limit) {
        enum class state { running, done, abandoned };
        struct outcome {
            std::atomic<state> is{state::running};
            ncclResult_t code = ncclSuccess;
            std::string text;
            ncclComm_t made = nullptr;
        };
        const auto result = std::make_shared<outcome>();
        std::thread helper([result, identity, rank = rank_, ranks = ranks_, device = queue_.device()] {
            cudaSetDevice(device);
            result->code = ncclCommInitRank(&result->made, ranks, identity, rank);
            if (result->code != ncclSuccess) {
                const char* const detail = ncclGetLastError(nullptr);
                result->text = detail == nullptr ? "" : detail;
            }
            const bool made = result->code == ncclSuccess;
            if (result->is.exchange(state::done) == state::abandoned && made) { ncclCommAbort(result->made); }
        });
        try {
            deadline next_look = after(std::chrono::milliseconds(20));
            while (result->is.load(std::memory_order_acquire) != state::done) {
                const deadline now = clock_type::now();
                if (now >= next_look) {
                    if (const auto cause = store_->failure(choice_.name)) {
                        throw aborted_error(formatted("nccl: aborted: {}{}", *cause, where(context_)), context_);
                    }
                    next_look = after(std::chrono::milliseconds(20));
                }
                if (now >= limit) {
                    throw timeout_error(formatted("nccl: all ranks came, but ncclCommInitRank did not return within "
                                                  "{:.3g} s{}",
                                                  seconds(choice_.timeout), where(context_)),
                                        {}, context_);
                }
                std::this_thread::sleep_for(std::chrono::microseconds(200));
            }
        } catch (...) {
            helper.detach();
            const bool done = result->is.exchange(state::abandoned) == state::done;
            if (done && result->code == ncclSuccess) { end_handles({result->made}, queue_.device(), ncclCommAbort); }
            throw;
        }
        helper.join();
        if (result->code != ncclSuccess) {
            context_.backend_code = static_cast<int>(result->code);
            context_.backend_text = formatted("{} ({})", ncclGetErrorString(result->code), result->text);
            throw backend_error(
                formatted("nccl: ncclCommInitRank failed: {}{}", context_.backend_text, where(context_)), context_);
        }
        return result->made;
    }
};

}  // namespace detail

}  // namespace tutti::comm
