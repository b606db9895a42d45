// mpi: ranks are processes of an MPI job. Nonblocking collectives are polled, so deadlines hold and aborts are heard.
// Needs MPI 3 (tutti::mpi). `mpi::launch(argc, argv, f)` is a main(); an existing MPI_Comm is accepted as it is.
#pragma once

#include <mpi.h>  // MPI

#include <atomic>       // a bounded end
#include <chrono>       // who speaks first
#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <cstdio>       // the last line of a failed job
#include <cstdlib>      // EXIT_FAILURE
#include <exception>    // uncaught_exceptions
#include <memory>       // channel
#include <numeric>      // iota
#include <optional>     // split
#include <span>         // colors
#include <string>       // names
#include <string_view>  // names
#include <thread>       // sleep_for
#include <type_traits>  // what f returns
#include <utility>      // move
#include <vector>       // members

#include <tutti/comm/detail/mpi_collectives.hpp>  // the calls
#include <tutti/comm/detail/mpi_family.hpp>       // aborts, who has arrived
#include <tutti/comm/detail/mpi_scratch.hpp>      // copies
#include <tutti/comm/detail/mpi_session.hpp>      // waits
#include <tutti/comm/detail/mpi_start.hpp>        // root communicators
#include <tutti/comm/front.hpp>                   // typed collectives
#include <tutti/comm/mpi_options.hpp>             // options
#include <tutti/core/state.hpp>                   // hash_bytes
#include <tutti/core/text.hpp>                    // formatted

namespace tutti::comm {

/// A rank that is a process of an MPI job.
///
/// Semantics    collectives are complete on return. The MPI_Comm given to the constructor is duplicated: its traffic,
///              its error handler and its lifetime stay the user's; `native_handle` is ours. A communicator may outlive
///              MPI_Finalize: then it frees nothing.
/// Determinism  MPI's: the order of sums is the implementation's, and may change with the number of ranks and the size.
///              16-bit floats are summed in float and rounded once; NaN wins in max and min; integers wrap.
/// Threads      as the concept says: communicators of one family may be used at the same time by different threads.
///              That needs MPI_THREAD_MULTIPLE; with less, the constructor throws unless `single_threaded` is promised,
///              and then a call from a second thread (a lane's) is a usage_error.
/// Cost         MPI's nonblocking collective, one MPI_Improbe for notes, and a copy of the input where it is the output
///              too. 16-bit sums travel as floats. Calls above `largest_call` bytes go in pieces.
/// Errors       At the deadline a rank asks the others where they are; those that are in no call, or in an earlier one,
///              are missing. Then `on_failure` decides: end_job prints one line and calls MPI_Abort (the lowest rank
///              that has arrived speaks), throw_error throws timeout_error. aborted_error at the next turn of every
///              waiting rank once any rank aborts or fails. backend_error carries MPI's code and text. Except under
///              throw_error, whoever catches an error of a call under way must end the process: a network may still
///              write into the call's buffers, which MPI cannot take back. MPI itself rarely notices that ranks
///              disagree; `checked` does. MPICH 4.0 ends the job itself over a message that does not fit.
///              While the root is being made only a store can name who is missing (`store_directory`).
/// Source       MPI 3.1, chapters 5 and 6.
class mpi : public front<mpi, host_queue> {
    struct channel {
        std::shared_ptr<detail::mpi_family> relatives;
        MPI_Comm comm = MPI_COMM_NULL;
        int rank = -1;
        host_queue queue;
        detail::mpi_workspace workspace;
        std::uint64_t children = 0;
        detail::mpi_activity activity{};

        explicit channel(const host_queue& q) : queue(q), workspace(q) {}
        channel(const channel&) = delete;
        channel& operator=(const channel&) = delete;
        ~channel();
    };
    std::unique_ptr<channel> channel_;
    std::string_view purpose_;  // of the control gathers inside duplicate and split

    explicit mpi(std::unique_ptr<channel> c) noexcept : channel_(std::move(c)) { relatives().add(channel_->activity); }

public:
    using native_handle_type = MPI_Comm;
    class environment;

    /// All ranks of the job.
    explicit mpi(mpi_options o = {}) : mpi(MPI_COMM_WORLD, std::move(o)) {}
    /// The ranks of `existing`; collective over them.
    /// Errors  usage_error: MPI is not running, its thread level is too low, the handle is null or an
    ///         inter-communicator.
    explicit mpi(MPI_Comm existing, mpi_options o = {});

    /// Runs f(world) and returns what it returns (0 for void): a whole main().
    ///
    /// Semantics  f takes mpi&. An exception that leaves f on any rank aborts the family; its text is printed once, by
    ///            the rank that threw first, and MPI_Abort ends the job. With throw_error the other ranks may go on,
    ///            and EXIT_FAILURE is returned.
    template <class F> static int launch(int argc, char** argv, F f, mpi_options o = {});

    mpi(mpi&&) noexcept = default;
    mpi& operator=(mpi&&) noexcept = default;

    [[nodiscard]] int rank() const noexcept { return channel_->rank; }
    [[nodiscard]] int size() const noexcept { return static_cast<int>(channel_->activity.members.size()); }
    [[nodiscard]] std::string_view name() const noexcept { return channel_->activity.name; }
    [[nodiscard]] host_queue queue() const noexcept { return channel_->queue; }
    /// For MPI calls of the user's own, from the thread that uses this communicator; freed with it. Messages between
    /// two ranks go on an MPI_Comm_dup of it: on itself their tags are the library's.
    [[nodiscard]] MPI_Comm native_handle() const noexcept { return channel_->comm; }

    [[nodiscard]] mpi duplicate(std::string_view name) {
        const std::vector<int> colors(channel_->activity.members.size(), 0);
        return *child(colors, name, "duplicate");
    }
    [[nodiscard]] std::optional<mpi> split(std::span<const int> colors, std::string_view name) {
        if (colors.size() != channel_->activity.members.size()) {
            throw usage_error(formatted("split: {} colors for {} ranks, on '{}'", colors.size(), size(), this->name()));
        }
        return child(colors, name, "split");
    }
    void synchronize() { detail::mpi_session hears(relatives(), channel_->activity, context("synchronize", 0), false); }
    void abort(std::string_view why) noexcept { relatives().poison(why); }

    /// The byte-level core; called by the typed front.
    void execute(const call& c) {
        error_context context = context_of(c, name(), rank());
        if (!purpose_.empty()) { context.operation = purpose_; }
        attempt(std::move(context), c.kind != collective::exchange, [&](detail::mpi_session& session) {
            const auto run = [&](const call& on) {
                const std::size_t ranks = channel_->activity.members.size();
                detail::mpi_collective(session, channel_->comm, on, channel_->queue, channel_->workspace, ranks).run();
            };
            if (relatives().choice.on_failure == failure_policy::end_job) {
                run(c);
                return;
            }
            const detail::mpi_copies copies(c, channel_->queue);
            run(copies.on_copies());
            copies.deliver();
        });
    }

private:
    [[nodiscard]] detail::mpi_family& relatives() const noexcept { return *channel_->relatives; }
    [[nodiscard]] error_context context(std::string_view operation, std::uint64_t sequence) const {
        return {std::string(operation), std::string(name()), rank(), sequence, 0, dtype::byte, 0, {}};
    }
    template <class Work> void attempt(error_context context, bool advances, Work work) {
        detail::mpi_session session(relatives(), channel_->activity, std::move(context), advances);
        try {
            work(session);
        } catch (const std::exception& e) {
            session.fail(e.what());
            throw;
        }
    }
    [[nodiscard]] std::optional<mpi> child(std::span<const int> colors, std::string_view name,
                                           std::string_view operation);
};

/// MPI for the lifetime of this object: initialized with MPI_THREAD_MULTIPLE unless it is already, and then finalized.
///
/// Semantics  one an application, before its communicators, which may outlive it. Leaving by an exception, or after a
///            family with end_job failed, ends the job: MPI_Finalize would wait for ranks that do not come. After a
///            failure with throw_error it waits five seconds for them.
/// Errors     usage_error when MPI has been finalized: it cannot be started twice.
class mpi::environment {
    bool owns_ = false;
    int uncaught_ = std::uncaught_exceptions();

public:
    explicit environment(int* argc = nullptr, char*** argv = nullptr) {
        int initialized = 0;
        int finalized = 0;
        MPI_Initialized(&initialized);
        MPI_Finalized(&finalized);
        if (finalized != 0) { throw usage_error("mpi: MPI has been finalized and cannot be started again"); }
        if (initialized != 0) { return; }
        int level = MPI_THREAD_SINGLE;
        detail::expect_success(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread",
                               detail::context_named("mpi"));
        owns_ = true;
    }
    environment(const environment&) = delete;
    environment& operator=(const environment&) = delete;
    ~environment() {
        if (!owns_ || !detail::mpi_is_up()) { return; }
        if (std::uncaught_exceptions() > uncaught_) {
            detail::end_job(MPI_COMM_WORLD, "an exception left mpi::environment");
        }
        if (const std::string cause = detail::mpi_job_failure::ending(); !cause.empty()) {
            detail::end_job_together(MPI_COMM_WORLD, cause);
        }
        if (detail::mpi_job_failure::any()) {
            finalize_after_failure();
        } else {
            MPI_Finalize();
        }
    }

private:
    // With a rank gone, MPI_Finalize may never return, not even under --enable-recovery: then it is left behind.
    static void finalize_after_failure() {
        const auto finished = std::make_shared<std::atomic<bool>>(false);
        std::thread helper([finished] {
            MPI_Finalize();
            finished->store(true);
        });
        const deadline limit = after(std::chrono::seconds(5));
        while (!finished->load() && clock_type::now() < limit) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        if (finished->load()) {
            helper.join();
        } else {
            helper.detach();
        }
    }
};

inline mpi::channel::~channel() {
    if (relatives == nullptr) { return; }
    relatives->remove(activity);
    if (relatives->poisoned()) { workspace.abandon(); }                  // a family that failed leaves requests behind
    if (comm == relatives->root() || comm == MPI_COMM_NULL) { return; }  // the root goes with the family
    // MPI may be gone: then nothing is given back.
    if (relatives->may_call() && detail::mpi_is_up() && !relatives->poisoned()) { MPI_Comm_free(&comm); }
}

inline mpi::mpi(MPI_Comm existing, mpi_options o) : channel_(std::make_unique<channel>(host_queue{})) {
    std::string name = o.name;
    detail::mpi_start start(existing, std::move(o));
    channel_->activity.members.resize(static_cast<std::size_t>(start.size()));
    std::iota(channel_->activity.members.begin(), channel_->activity.members.end(), 0);
    channel_->activity.name = std::move(name);
    channel_->activity.id = 1;
    channel_->rank = start.rank();
    channel_->relatives = start.run();
    channel_->comm = channel_->relatives->root();
    relatives().add(channel_->activity);
}

// Collective. All ranks agree on name and table before MPI's own call, which then has everybody.
inline std::optional<mpi> mpi::child(std::span<const int> colors, std::string_view name, std::string_view operation) {
    const std::uint64_t text = hash_bytes(as_bytes(view(name.data(), name.size())));
    {
        struct restoring {
            std::string_view& purpose;
            ~restoring() { purpose = {}; }
        } const restore{purpose_};
        purpose_ = operation;
        agree(hash_bytes(as_bytes(view(colors.data(), colors.size())), text),
              formatted("{}: name or table of '{}'", operation, name));
    }
    const int color = colors[static_cast<std::size_t>(rank())];
    auto made = std::make_unique<channel>(channel_->queue.sibling());
    // Equal on all ranks without asking: children are numbered in the order all ranks make them.
    const std::uint64_t birth[] = {channel_->activity.id, ++channel_->children, static_cast<std::uint64_t>(color)};
    made->activity.id = hash_bytes(as_bytes(view(birth)));
    made->activity.name = channel_->activity.name + "/" + std::string(name);
    attempt(context(operation, next_collective()), true, [&](detail::mpi_session& session) {
        const auto blocking = [parent = channel_->comm, color, rank = rank()](MPI_Comm* result) {
            return MPI_Comm_split(parent, color < 0 ? MPI_UNDEFINED : color, rank, result);
        };
        made->comm = session.create(blocking, "MPI_Comm_split");
        if (made->comm == MPI_COMM_NULL) { return; }
        session.expect(MPI_Comm_set_errhandler(made->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
        session.expect(MPI_Comm_set_name(made->comm, made->activity.name.c_str()), "MPI_Comm_set_name");
    });
    if (color < 0) { return std::nullopt; }
    for (std::size_t r = 0; r < colors.size(); ++r) {
        if (colors[r] != color) { continue; }
        if (static_cast<int>(r) == rank()) { made->rank = static_cast<int>(made->activity.members.size()); }
        made->activity.members.push_back(channel_->activity.members[r]);
    }
    made->relatives = channel_->relatives;
    return mpi(std::move(made));
}

template <class F> int mpi::launch(int argc, char** argv, F f, mpi_options o) {
    const environment started(&argc, &argv);
    const failure_policy policy = o.on_failure;
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    bool elsewhere = false;
    // The rank that caused the error says it; the others give it two seconds to end them. Of ranks that fail together,
    // one speaks.
    const auto end = [&](std::string_view text) {
        if (policy == failure_policy::end_job) {
            if (elsewhere) { std::this_thread::sleep_for(std::chrono::seconds(2)); }
            detail::end_job_together(MPI_COMM_WORLD, formatted("rank {}: {}", rank, text));
        }
        if (!elsewhere) {
            std::fprintf(stderr, "tutti: rank %d: %.*s\n", rank, static_cast<int>(text.size()), text.data());
        }
        return EXIT_FAILURE;
    };
    try {
        mpi world(std::move(o));
        try {
            if constexpr (std::is_void_v<std::invoke_result_t<F&, mpi&>>) {
                f(world);
                return EXIT_SUCCESS;
            } else {
                return f(world);
            }
        } catch (const std::exception& e) {
            elsewhere = world.relatives().heard_of_failure();
            world.abort(e.what());
            throw;
        } catch (...) {
            world.abort("an exception of unknown type");
            throw;
        }
    } catch (const std::exception& e) { return end(e.what()); } catch (...) {
        return end("an exception of unknown type");
    }
}

static_assert(communicator<mpi> && can_gather_control<mpi>);

}  // namespace tutti::comm
