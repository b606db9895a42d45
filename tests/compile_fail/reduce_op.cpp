// Reductions without one meaning, and without the types for it.
#include <functional>  // an operator of somebody else

#include <tutti/comm/self.hpp>  // all_reduce, reduce_scatter

using namespace tutti;

struct pair {
    int a, b;
};

void reduce(comm::self<>& c, view<float> f, view<int> i, view<bool> b, view<pair> p) {
    c.all_reduce(f, f, mean{});
    c.all_reduce(i, i, sum{});
#ifdef MEAN_OF_INT
    c.all_reduce(i, i, mean{});
#endif
#ifdef MEAN_OF_INT_SCATTERED
    c.reduce_scatter(i, i, mean{});
#endif
#ifdef MEAN_OF_BOOL
    c.all_reduce(b, b, mean{});
#endif
#ifdef SUM_OF_BOOL
    c.all_reduce(b, b, sum{});
#endif
#ifdef SUM_OF_STRUCT
    c.all_reduce(p, p, sum{});
#endif
#ifdef NOT_AN_OPERATOR
    c.all_reduce(f, f, std::plus<>{});
#endif
#ifdef TYPES_DIFFER
    c.all_reduce(i, f, sum{});
#endif
#ifdef CONSTANT_OUTPUT
    c.all_reduce(f, view<const float>(f), sum{});
#endif
    c.broadcast(b, 0);
    c.broadcast(p, 0);
}
