// A rank is killed in the middle of a collective, under mpirun with recovery: every other rank ends by an error that
// names it, within the deadline. Started by mpirun, a process a rank; skipped where there is no GPU.
#include <chrono>   // deadlines
#include <csignal>  // SIGKILL
#include <cstdio>   // what each rank says
#include <cstdlib>  // _Exit
#include <string>   // texts
#include <thread>   // the moment

#include <tutti/comm/mpi.hpp>     // ranks as processes
#include <tutti/comm/nccl.hpp>    // under test
#include <tutti/core/buffer.hpp>  // device memory

#include <gpu/device.hpp>  // device_of_process

using namespace std::chrono_literals;

int main(int argc, char** argv) {
    constexpr auto timeout = 2s;
    // MPI itself is left without a word at the end: its MPI_Finalize would wait for the dead.
    return tutti::comm::mpi::launch(argc, argv, [&](tutti::comm::mpi& world) {
        world.barrier();  // mpirun ends everybody when a process ends early: the reason to skip comes first
        const int device = tutti::test::device_of_process(world.rank(), world.size());
        const int victim = world.size() - 1;
        auto comm = tutti::comm::nccl::over(world, tutti::cuda_queue(device), {.timeout = timeout});
        const tutti::buffer<float, tutti::cuda_queue> data(comm.queue(), 1 << 20);
        tutti::detail::check_cuda(cudaMemsetAsync(data.data(), 0, data.size() * 4, comm.queue().stream()), "memset");
        comm.all_reduce(data.view(), data.view(), tutti::sum{});
        comm.synchronize();

        std::string text = "no error";
        auto begin = tutti::clock_type::now();
        try {
            for (int i = 0;; ++i) {
                comm.all_reduce(data.view(), data.view(), tutti::sum{});
                if (i == 100 && comm.rank() == victim) { std::raise(SIGKILL); }
                if (i % 8 == 7) {
                    comm.synchronize();
                    begin = tutti::clock_type::now();
                }
            }
        } catch (const tutti::error& e) { text = e.what(); }
        const double waited = tutti::seconds(tutti::clock_type::now() - begin);
        // By the watchdog's deadline, or, where ranks speak over a network, by the connection that broke.
        const std::string name = "rank " + std::to_string(victim);
        const bool named = text.find("does not answer") != std::string::npos &&
                           (text.find(name + " did not arrive") != std::string::npos ||
                            text.find(name + " does not answer") != std::string::npos);
        const bool in_time = waited < 3 * tutti::seconds(timeout);
        std::printf("rank %d %s after %.1f s: %s\n", comm.rank(), named && in_time ? "was told" : "WAS NOT TOLD",
                    waited, text.c_str());
        std::fflush(stdout);
        std::this_thread::sleep_for(500ms);  // the others print too before mpirun ends them
        std::_Exit(named && in_time ? 0 : 1);
    });
}
