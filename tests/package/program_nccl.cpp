// A program of a consumer that asked for the component nccl. It needs no device: without one, it says so.
#include <cstdio>

#include <tutti/comm/nccl.hpp>

int main() {
    try {
        tutti::comm::nccl::launch(1, [](tutti::comm::nccl& comm) {
            comm.barrier();
            comm.synchronize();
        });
    } catch (const tutti::error& e) { std::printf("no device for a rank: %s\n", e.what()); }
    int version = 0;
    std::printf("NCCL answers: %d\n", static_cast<int>(ncclGetVersion(&version)));
}
