// mpi_options: what the user of comm::mpi chooses: deadline, what a failure does, thread use, the store for start-up.
// Needs core/deadline. Includes no MPI.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // failure_policy
#include <cstdlib>      // getenv
#include <string>       // names
#include <string_view>  // values of variables

#include <tutti/comm/store.hpp>     // default_store_directory
#include <tutti/core/deadline.hpp>  // timeouts

namespace tutti::comm {

/// What happens when a deadline passes. MPI cannot take back a collective that has begun: its buffers stay in use.
///
/// end_job      one line on stderr says who did not arrive, then MPI_Abort ends every rank. Costs nothing before.
/// throw_error  timeout_error. So that a caller may free its buffers then, every collective works on copies of them (of
///              all it sends and receives), which are never freed when it fails. For runtimes that let survivors live.
enum class failure_policy : std::uint8_t { end_job, throw_error };

/// throw_error under `mpirun --enable-recovery` (Open MPI), end_job otherwise.
[[nodiscard]] inline failure_policy default_failure_policy() noexcept {
    const char* const recovery = std::getenv("OMPI_MCA_orte_enable_recovery");
    const bool recovers =
        recovery != nullptr && (std::string_view(recovery) == "1" || std::string_view(recovery) == "true");
    return recovers ? failure_policy::throw_error : failure_policy::end_job;
}

struct mpi_options {
    std::string name = "world";            ///< root communicator's name; children append "/name"
    duration timeout = default_timeout();  ///< deadline of every wait
    failure_policy on_failure = default_failure_policy();
    /// Accepts an MPI below MPI_THREAD_MULTIPLE: every call of the family comes from the thread that made the root,
    /// lanes are refused.
    bool single_threaded = false;
    /// A directory that all ranks see: names who is missing while the root communicator is being made. Not needed
    /// after. Roots that a rank makes at the same time must differ in name or in ranks.
    std::string store_directory = default_store_directory();
    /// One MPI call moves at most this many bytes. Below 2^31, where MPI's int counts and some implementations end.
    std::size_t largest_call = std::size_t{1} << 30;
};

}  // namespace tutti::comm
