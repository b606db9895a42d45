// Mistakes with secondary_shards.
#include <tutti/comm/self.hpp>                  // communicators
#include <tutti/optimize/sgd.hpp>               // optimizer
#include <tutti/strategy/node_shards.hpp>       // another exchange
#include <tutti/strategy/secondary_shards.hpp>  // tested
#include <tutti/strategy/zero.hpp>              // strategies

using namespace tutti;
using strategy::secondary_shards;
template <int Stage, class Exchange>
using tested = strategy::zero<Stage, comm::self<host_queue>, optimize::sgd, float, Exchange>;

int main() {
    const auto one = comm::topology::one_node(1);
#ifdef STAGE_2
    tested<2, secondary_shards<>> s(comm::self<host_queue>{}, {}, {}, {one});
#elif defined(OVER_NODES)
    tested<3, secondary_shards<strategy::node_shards>> s(comm::self<host_queue>{}, {}, {}, {one, {one}});
#elif defined(TWICE)
    tested<3, secondary_shards<secondary_shards<>>> s(comm::self<host_queue>{}, {}, {}, {one, {one}});
#else
    tested<3, secondary_shards<>> s(comm::self<host_queue>{}, {}, {}, {one});
#endif
    s.flush();
}
