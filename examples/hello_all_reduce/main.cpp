// Four ranks, threads of this process, average a gradient.
#include <vector>

#include <fmt/core.h>

#include <tutti/tutti.hpp>

int main() {
    tutti::comm::threads::launch(4, [](tutti::comm::threads& comm) {
        std::vector<float> gradient(1 << 20, static_cast<float>(comm.rank()));
        const tutti::view g{gradient};
        comm.all_reduce(g, g, tutti::mean{});  // in place; the same bits on every rank
        if (comm.rank() == 0) { fmt::print("mean of ranks 0 to 3: {}\n", gradient.front()); }
    });
}
