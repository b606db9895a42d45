// Ranks of the backend `nccl` as threads: 1, 2 and 4 of them, as far as there are devices.
#include <utility>  // move

#include <cuda_runtime_api.h>  // devices

#include <conformance/backend_nccl.hpp>  // defined here
#include <gpu/device.hpp>                // require_device

namespace tutti::test {

std::vector<int> backend::sizes() {
    require_device();
    int devices = 0;
    static_cast<void>(cudaGetDeviceCount(&devices));
    std::vector<int> list;
    for (const int n : {1, 2, 4}) {
        if (n <= devices) { list.push_back(n); }
    }
    return list;
}

void backend::run(int ranks, const std::function<void(communicator&)>& body, std::chrono::seconds timeout) {
    comm::nccl::launch(ranks,
                       [&](comm::nccl& own) {
                           communicator c(device(std::move(own)));
                           body(c);
                       },
                       {.name = "world", .timeout = timeout});
}

}  // namespace tutti::test
