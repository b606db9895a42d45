// What a consumer of tutti::tutti builds: ranks as threads, through the umbrella header. fmt and threads must come with
// the target.
#include <tutti/tutti.hpp>  // threads, all_reduce

#include <fmt/core.h>  // print

#include <vector>  // what is summed

int main() {
    tutti::comm::threads::launch(3, [](tutti::comm::threads& comm) {
        std::vector<int> ones(5, 1);
        const tutti::view all{ones};
        comm.all_reduce(all, all, tutti::sum{});
        if (comm.rank() == 0) { fmt::print("tutti {}: {} ranks\n", tutti::version_string, ones.back()); }
    });
}
