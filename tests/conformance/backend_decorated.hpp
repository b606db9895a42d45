// The conformance backend of the decorators: checked and counted around threads must behave as threads does.
#pragma once

#include <chrono>       // timeout
#include <functional>   // bodies
#include <string_view>  // name
#include <utility>      // move
#include <vector>       // sizes

#include <tutti/comm/checked.hpp>  // under test
#include <tutti/comm/counted.hpp>  // under test
#include <tutti/comm/threads.hpp>  // inside

namespace tutti::test {

struct backend {
    using communicator = comm::counted<comm::checked<comm::threads>>;
    static constexpr std::string_view name = "counted, checked threads";
    static constexpr bool deterministic = true;
    static constexpr bool keeps_nan = true;
    static std::vector<int> sizes() { return {1, 3, 4}; }
    static void run(int ranks, const std::function<void(communicator&)>& body,
                    std::chrono::seconds timeout = std::chrono::seconds(50)) {
        comm::threads::launch(ranks,
                              [&](comm::threads& own) {
                                  communicator c(comm::checked<comm::threads>(std::move(own)));
                                  body(c);
                              },
                              {.name = "world", .timeout = timeout});
    }
};

}  // namespace tutti::test
