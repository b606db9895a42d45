// host_device: the CPU as a device of the trainer, over the network that the user states.
// Needs host_math.hpp, options.hpp and train.hpp.
#pragma once

#include <initializer_list>  // dimensions
#include <string_view>       // name

#include <tutti/comm/shaped.hpp>    // stated networks
#include <tutti/comm/topology.hpp>  // machines
#include <tutti/core/queue.hpp>     // host_queue
#include <tutti/parallel/mesh.hpp>  // dimensions

#include "host_math.hpp"
#include "options.hpp"
#include "train.hpp"

namespace transformer {

/// One rank's share of the CPU: its thread.
template <class T> struct host_device {
    using math = host_math<T>;
    static constexpr bool is_accelerator = false;
    [[nodiscard]] static constexpr std::string_view name() { return "cpu"; }
    [[nodiscard]] static constexpr double peak_flops() { return 0; }
    [[nodiscard]] math make_math(const tutti::host_queue& queue) const { return math(queue); }
    /// With --network, calls take as long as they would between machines like that. Without, as long as they take.
    template <class Comm> [[nodiscard]] tutti::comm::shaped<Comm> communicator(Comm& world, const options& o) const {
        tutti::comm::shaped_network network{tutti::comm::link{}};
        if (!o.network.empty()) {
            const int nodes = o.nodes == 0 ? o.ranks : o.nodes;
            network = tutti::comm::shaped_network(
                tutti::comm::topology::uniform(nodes, o.ranks / nodes, {}, stated_link(o.network)));
        }
        return tutti::comm::shaped<Comm>(world.duplicate("training"), network);
    }
    /// That part of it which lies along dimensions of a mesh.
    template <class Comm>
    [[nodiscard]] tutti::comm::shaped<Comm> along(Comm& world, const options& o, const tutti::parallel::mesh& m,
                                                  std::initializer_list<tutti::parallel::dimension> dimensions) const {
        auto whole = communicator(world, o);
        return tutti::parallel::split_along(whole, m, dimensions);
    }
};

}  // namespace transformer
