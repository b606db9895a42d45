// host_device: the CPU as a device of the trainer.
// Needs host_math.hpp.
#pragma once

#include <string_view>  // name

#include "host_math.hpp"

namespace transformer {

/// One rank's share of the CPU: its thread.
template <class T> struct host_device {
    using math = host_math<T>;
    static constexpr bool is_accelerator = false;
    [[nodiscard]] static constexpr std::string_view name() { return "cpu"; }
    [[nodiscard]] static constexpr double peak_flops() { return 0; }
    [[nodiscard]] math make_math() const { return {}; }
    template <class Comm> [[nodiscard]] Comm communicator(Comm& world) const { return world.duplicate("training"); }
};

}  // namespace transformer
