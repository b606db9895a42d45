// mpi_start: how a root communicator comes to be: what it needs of MPI, and a duplication that ends by its deadline.
// Needs comm/detail/mpi_session and comm/store. Before it there is no channel of our own to ask through: only a store
// can say who is missing.
#pragma once

#include <mpi.h>  // MPI

#include <chrono>       // store looks
#include <cstddef>      // size_t
#include <cstdlib>      // getenv
#include <exception>    // errors
#include <memory>       // family
#include <numeric>      // iota
#include <optional>     // store
#include <string>       // job id
#include <string_view>  // texts
#include <utility>      // move
#include <vector>       // ranks

#include <tutti/comm/detail/mpi_family.hpp>   // family
#include <tutti/comm/detail/mpi_session.hpp>  // poll_until, end_job
#include <tutti/comm/store.hpp>               // file_store
#include <tutti/core/deadline.hpp>            // after
#include <tutti/core/state.hpp>               // hash_bytes
#include <tutti/core/text.hpp>                // formatted
#include <tutti/core/view.hpp>                // bytes of ranks

namespace tutti::comm::detail {

/// What the launcher calls this run; the nonce of the store. Empty when it says nothing we know.
[[nodiscard]] inline std::string mpi_job_id() {
    const auto value = [](const char* name) {
        const char* const text = std::getenv(name);
        return text == nullptr ? std::string() : std::string(text);
    };
    for (const char* const name : {"PMIX_NAMESPACE", "PMI_JOBID", "PMI_KVSNAME"}) {
        if (const std::string id = value(name); !id.empty()) { return id; }
    }
    const std::string job = value("SLURM_JOB_ID");
    return job.empty() ? job : job + "." + value("SLURM_STEP_ID");
}

[[nodiscard]] inline mpi_options checked_options(mpi_options o) {
    if (o.largest_call == 0 || o.largest_call > 0x7fffffff) {
        throw usage_error(formatted("mpi: largest_call is {} bytes, not one of 1 to 2^31 - 1", o.largest_call));
    }
    expect_timeout("mpi", o.timeout);
    return o;
}

/// Where the ranks of `comm` meet in a store: other ranks may be making a communicator of the same name at the same
/// time.
[[nodiscard]] inline std::string mpi_start_key(MPI_Comm comm, std::string_view name, const error_context& context) {
    const auto succeed = [&](int code, std::string_view function) { expect_success(code, function, context); };
    MPI_Group world = MPI_GROUP_NULL;
    MPI_Group members = MPI_GROUP_NULL;
    int size = 0;
    succeed(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    succeed(MPI_Comm_group(comm, &members), "MPI_Comm_group");
    succeed(MPI_Group_size(members, &size), "MPI_Group_size");
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    std::vector<int> in_world(ranks.size());
    succeed(MPI_Group_translate_ranks(members, size, ranks.data(), world, in_world.data()),
            "MPI_Group_translate_ranks");
    succeed(MPI_Group_free(&members), "MPI_Group_free");
    succeed(MPI_Group_free(&world), "MPI_Group_free");
    return formatted("{}-{:016x}", name, hash_bytes(as_bytes(view(in_world))));
}

class mpi_start {
    mpi_options choice_;
    MPI_Comm given_;
    error_context context_;
    int size_ = 0;
    bool multiple_ = false;
    std::optional<file_store> store_;
    std::string key_;  // in the store

public:
    mpi_start(MPI_Comm given, mpi_options o) : choice_(checked_options(std::move(o))), given_(given) {
        context_.operation = "mpi";
        context_.communicator = choice_.name;
        const auto expect = [&](bool holds, std::string_view fact) {
            if (!holds) { throw usage_error(formatted("mpi: {}{}", fact, where(context_)), context_); }
        };
        expect(mpi_is_up(), "MPI is not running; make a mpi::environment first, or call MPI_Init_thread");
        int level = MPI_THREAD_SINGLE;
        succeed(MPI_Query_thread(&level), "MPI_Query_thread");
        multiple_ = level == MPI_THREAD_MULTIPLE;
        expect(multiple_ || choice_.single_threaded, "MPI was initialized below MPI_THREAD_MULTIPLE, which lanes need; "
                                                     "initialize it with that level, or promise "
                                                     "with single_threaded that one thread makes all calls");
        expect(given_ != MPI_COMM_NULL, "the communicator is MPI_COMM_NULL");
        int inter = 0;
        succeed(MPI_Comm_test_inter(given_, &inter), "MPI_Comm_test_inter");
        expect(inter == 0, "the communicator is an inter-communicator");
        succeed(MPI_Comm_rank(given_, &context_.rank), "MPI_Comm_rank");
        succeed(MPI_Comm_size(given_, &size_), "MPI_Comm_size");
        if (!choice_.store_directory.empty()) {
            const std::string job = mpi_job_id();
            expect(!job.empty(),
                   "a store directory is given, but the launcher names no job (PMIX_NAMESPACE, PMI_JOBID, "
                   "PMI_KVSNAME, SLURM_JOB_ID) that tells this run from an earlier one");
            store_.emplace(choice_.store_directory, job);
            key_ = mpi_start_key(given_, choice_.name, context_);
        }
    }

    /// Duplicates the given communicator; it and its error handler stay as they are.
    [[nodiscard]] std::shared_ptr<mpi_family> run() {
        if (!store_) { return duplicate(); }
        std::shared_ptr<mpi_family> made;
        try {
            store_->arrive(key_, context_.rank);
            made = duplicate();
        } catch (const std::exception& e) {
            try {
                store_->fail(key_, context_.rank, e.what());
            } catch (...) {}  // the others find out by their deadline; what failed first is what is said
            throw;
        }
        store_->leave(key_, context_.rank);
        return made;
    }
    [[nodiscard]] int size() const noexcept { return size_; }
    [[nodiscard]] int rank() const noexcept { return context_.rank; }

private:
    void succeed(int code, std::string_view function) const { expect_success(code, function, context_); }

    [[nodiscard]] std::shared_ptr<mpi_family> duplicate() {
        MPI_Comm own = MPI_COMM_NULL;
        MPI_Request request = MPI_REQUEST_NULL;
        succeed(MPI_Comm_idup(given_, &own, &request), "MPI_Comm_idup");
        const auto done = [&] {
            int flag = 0;
            succeed(MPI_Request_get_status(request, &flag, MPI_STATUS_IGNORE), "MPI_Request_get_status");
            return flag != 0;
        };
        deadline next_look = after(std::chrono::milliseconds(20));
        const auto look_for_failures = [&] {
            if (!store_ || clock_type::now() < next_look) { return; }
            next_look = after(std::chrono::milliseconds(20));
            if (const auto cause = store_->failure(key_)) {
                throw aborted_error(formatted("mpi: aborted: {}{}", *cause, where(context_)), context_);
            }
        };
        if (!poll_until(after(choice_.timeout), done, look_for_failures)) { explain_absence(); }
        succeed(take_completed(request), "MPI_Comm_idup");
        succeed(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
        succeed(MPI_Comm_set_name(own, choice_.name.c_str()), "MPI_Comm_set_name");
        return std::make_shared<mpi_family>(own, context_.rank, size_, multiple_, choice_);
    }
    [[noreturn]] void explain_absence() {
        const double waited = seconds(choice_.timeout);
        std::vector<int> missing;
        std::string text =
            formatted("mpi: not all of {} ranks came to make the communicator within {} s; who is missing is "
                      "known only with a store (TUTTI_STORE){}",
                      size_, waited, where(context_));
        if (store_) {
            missing = store_->missing(key_, size_);
            text = missing.empty()
                       ? formatted("mpi: all {} ranks came, but the communicator was not made within {} s{}", size_,
                                   waited, where(context_))
                       : formatted("mpi: rank {} did not come to make the communicator within {} s{}", list_of(missing),
                                   waited, where(context_));
        }
        if (choice_.on_failure == failure_policy::throw_error) { throw timeout_error(text, missing, context_); }
        end_job_together(given_, text);
    }
};

}  // namespace tutti::comm::detail
