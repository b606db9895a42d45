// The conformance backend `nccl`: 1, 2 and 4 ranks, as far as there are devices, each a thread. Sums come in NCCL's
// order. Where no device answers, the program is skipped.
#pragma once

#include <chrono>       // timeout
#include <string_view>  // name
#include <utility>      // move
#include <vector>       // sizes

#include <tutti/comm/checked.hpp>  // disagreement
#include <tutti/comm/nccl.hpp>     // under test

#include <conformance/staged.hpp>  // host memory
#include <gpu/device.hpp>          // require_device

namespace tutti::test {

struct backend {
#ifdef TUTTI_CONFORMANCE_CHECKED  // failures: NCCL itself does not notice that ranks disagree
    using device = comm::checked<comm::nccl>;
    static device made(comm::nccl c) { return device(std::move(c)); }
#else
    using device = comm::nccl;
    static device made(comm::nccl c) { return c; }
#endif
    using communicator = staged<device>;
    static constexpr std::string_view name = "nccl";
    static constexpr bool deterministic = false;
    static constexpr bool keeps_nan = false;
    static std::vector<int> sizes() {
        require_device();
        int devices = 0;
        static_cast<void>(cudaGetDeviceCount(&devices));
        std::vector<int> list;
        for (const int n : {1, 2, 4}) {
            if (n <= devices) { list.push_back(n); }
        }
        return list;
    }
    template <class Body>
    static void run(int ranks, Body body, std::chrono::seconds timeout = std::chrono::seconds(50)) {
        comm::nccl::launch(ranks,
                           [&](comm::nccl& own) {
                               communicator c(made(std::move(own)));
                               body(c);
                           },
                           {.name = "world", .timeout = timeout});
    }
};

}  // namespace tutti::test
