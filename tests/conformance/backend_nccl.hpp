// The conformance backend `nccl`: ranks on devices; without a device the program is skipped. Sums come in NCCL's order.
// How ranks start is what a program links, nccl_threads.cpp or nccl_processes.cpp: the suite is compiled once for both,
// and for the fakes.
#pragma once

#include <chrono>       // timeout
#include <functional>   // bodies
#include <string_view>  // name
#include <vector>       // sizes

#include <tutti/comm/checked.hpp>  // disagreement
#include <tutti/comm/nccl.hpp>     // under test

#include <conformance/staged.hpp>  // host memory

namespace tutti::test {

struct backend {
#ifdef TUTTI_CONFORMANCE_CHECKED  // failures: NCCL itself does not notice that ranks disagree
    using device = comm::checked<comm::nccl>;
#else
    using device = comm::nccl;
#endif
    using communicator = staged<device>;
    static constexpr std::string_view name = "nccl";
    static constexpr bool deterministic = false;
    static constexpr bool keeps_nan = false;
    static std::vector<int> sizes();
    static void run(int ranks, const std::function<void(communicator&)>& body,
                    std::chrono::seconds timeout = std::chrono::seconds(50));
};

}  // namespace tutti::test
