// Communicators: owners that are moved, and concepts that say what a backend lacks.
#include <tutti/comm/self.hpp>     // a communicator
#include <tutti/comm/threads.hpp>  // a communicator

using namespace tutti;

#pragma GCC diagnostic error "-Wunused-result"  // a discarded result is an error here

// Works with every communicator that can all-reduce T.
template <class C>
requires comm::can_all_reduce<C, float, sum>
void needs_all_reduce(C&) {}

struct cannot_reduce : comm::self<> {
    cannot_reduce duplicate(std::string_view);
    std::optional<cannot_reduce> split(std::span<const int>, std::string_view);
    void all_reduce() = delete;
};
static_assert(communicator<cannot_reduce>);

void use(comm::self<>& c, comm::threads& t, cannot_reduce& less) {
    needs_all_reduce(c);
    auto moved = std::move(t);
#ifdef COPIED_SELF
    auto copy = c;
#endif
#ifdef COPIED_THREADS
    auto copy = moved;
#endif
#ifdef LACKS_ALL_REDUCE
    needs_all_reduce(less);
#endif
#ifdef NOT_A_COMMUNICATOR
    int number = 0;
    needs_all_reduce(number);
#endif
#ifdef RECEIVE_INTO_CONST
    const std::vector<float> v(3);
    static_cast<void>(comm::receive_from(0, view<const float>(v)));
#endif
#ifdef DISCARDED_DUPLICATE
    c.duplicate("lost");
#endif
#ifdef DISCARDED_SPLIT
    c.split(std::vector<int>{0}, "lost");
#endif
#ifdef DISCARDED_RECORDS
    c.gather_control({});
#endif
    static_cast<void>(less);
}
