// Tickets: claims on work that must be kept.
#include <tutti/comm/self.hpp>      // one rank
#include <tutti/schedule/lane.hpp>  // tickets

using namespace tutti;

#pragma GCC diagnostic error "-Wunused-result"  // a discarded result is an error here

void use(schedule::lane<comm::self<>>& lane) {
    const auto work = [](comm::self<>&) {};
    auto kept = lane.submit("kept", work);
#ifdef DISCARDED
    lane.submit("lost", work);
#endif
#ifdef COPIED
    auto copy = kept;
#endif
#ifdef WRONG_WORK
    auto other = lane.submit("work", [](int) {});
#endif
}
