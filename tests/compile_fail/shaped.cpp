// Mistakes with shaped.
#include <tutti/comm/self.hpp>           // communicators
#include <tutti/comm/shaped.hpp>         // tested
#include <tutti/core/virtual_queue.hpp>  // a queue that does not execute inline

using namespace tutti;

int main() {
#ifdef SHAPED_ASYNCHRONOUS
    comm::shaped c(comm::self<virtual_queue>{}, comm::shaped_network({}));
#else
    comm::shaped c(comm::self<host_queue>{}, comm::shaped_network(comm::link{}));
#endif
    c.barrier();
}
