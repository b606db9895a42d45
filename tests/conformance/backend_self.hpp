// The conformance backend `self`: one rank, which is the caller.
#pragma once

#include <chrono>       // timeout
#include <functional>   // bodies
#include <string_view>  // name
#include <vector>       // sizes

#include <tutti/comm/self.hpp>  // under test

namespace tutti::test {

struct backend {
    using communicator = comm::self<>;
    static constexpr std::string_view name = "self";
    static constexpr bool deterministic = true;
    static constexpr bool keeps_nan = true;
    static std::vector<int> sizes() { return {1}; }
    static void run(int, const std::function<void(communicator&)>& body, std::chrono::seconds = {}) {
        communicator c;
        body(c);
    }
};

}  // namespace tutti::test
