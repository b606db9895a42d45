// The door: operations that do not say what they cost, and scalars that nobody looks at.
#include <tutti/core/elementwise.hpp>  // operations
#include <tutti/core/error.hpp>        // narrow

using namespace tutti;

#pragma GCC diagnostic error "-Wunused-result"  // a discarded result is an error here

struct costless {
    static constexpr std::string_view name = "costless";
    void operator()() const {}
};

void use(host_queue q, view<float> v, view<int> i, std::size_t large) {
    fill(q, v, 1);
    scale(q, v, v, 2);
#ifdef WITHOUT_COST
    run(q, costless{});
#endif
#ifdef SCALED_INTEGERS
    scale(q, i, i, 2);
#endif
#ifdef DISCARDED_FETCH
    fetch(q, v, 0);
#endif
#ifdef DISCARDED_NARROW
    narrow<int>(large, "count");
#endif
    static_cast<void>(i);
    static_cast<void>(large);
}
