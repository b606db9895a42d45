// Work that ignores the abort of its family: its ticket ends the program rather than let it write to freed memory.
#include <chrono>  // delays
#include <thread>  // sleep_for

#include <tutti/comm/self.hpp>      // one rank
#include <tutti/schedule/lane.hpp>  // lane

int main() {
    using namespace std::chrono_literals;
    using self = tutti::comm::self<tutti::host_queue>;
    tutti::schedule::lane lane(self{}, {.timeout = 50ms});
    auto t = lane.submit("endless", [](self&) { std::this_thread::sleep_for(100s); });
    return 0;
}
