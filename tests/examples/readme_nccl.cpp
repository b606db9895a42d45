// What the README shows of GPUs, word for word (readme.py compares), over the fakes of CUDA and NCCL.
#include <doctest/doctest.h>

#include <tutti/comm/nccl.hpp>
#include <tutti/tutti.hpp>

#include <support/fake_nccl.hpp>  // calls

namespace {

TEST_CASE("a thread a GPU") {
    tutti::test::fake_nccl::reset();
    // `comm::nccl::over(world)` does the same from the ranks of comm::mpi or comm::threads.
    tutti::comm::nccl::launch(2, [](tutti::comm::nccl& comm) {
        const tutti::buffer<float, tutti::cuda_queue> gradient(comm.queue(), 1 << 20);
        // your kernels fill it on comm.queue().stream(); the mean is enqueued behind them
        comm.all_reduce(gradient.view(), gradient.view(), tutti::mean{});
        comm.synchronize();  // the one wait, with a deadline
    });
    CHECK(tutti::test::fake_nccl::calls("ncclAllReduce") == 2);
}

}  // namespace
