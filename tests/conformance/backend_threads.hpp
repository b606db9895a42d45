// The conformance backend `threads`: up to 8 ranks, more than most test machines have processors.
#pragma once

#include <chrono>       // timeout
#include <functional>   // bodies
#include <string_view>  // name
#include <vector>       // sizes

#include <tutti/comm/threads.hpp>  // under test

#include <support/build.hpp>  // full_speed

namespace tutti::test {

struct backend {
    using communicator = comm::threads;
    static constexpr std::string_view name = "threads";
    static constexpr bool deterministic = true;
    static constexpr bool keeps_nan = true;
    static std::vector<int> sizes() {
        if (!full_speed) { return {1, 2, 3, 4}; }
        return {1, 2, 3, 4, 5, 7, 8};
    }
    static void run(int ranks, const std::function<void(communicator&)>& body,
                    std::chrono::seconds timeout = std::chrono::seconds(50)) {
        communicator::launch(ranks, body, {.name = "world", .timeout = timeout});
    }
};

}  // namespace tutti::test
