// Views: what must not become one, and what must not be read through one.
#include <string>  // not transportable
#include <vector>  // containers

#include <tutti/comm/self.hpp>    // calls that take views
#include <tutti/core/buffer.hpp>  // storage

using namespace tutti;

std::vector<float> fresh();

void use(comm::self<>& c, std::vector<float>& v, const std::vector<float>& constant,
         view<float, device_memory> device) {
    const view<float> good = v;
    const view<const float> more = constant;
    const view<const float> added = good;
    c.all_reduce(v, good, sum{});
#ifdef FROM_TEMPORARY
    const view<const float> dangling = fresh();
#endif
#ifdef TEMPORARY_IN_CALL
    c.all_reduce(fresh(), good, sum{});
#endif
#ifdef REMOVES_CONST
    const view<float> writable = more;
#endif
#ifdef CONST_CONTAINER
    const view<float> writable = constant;
#endif
#ifdef CHANGES_TYPE
    const view<const double> doubles = good;
#endif
#ifdef DEVICE_INDEX
    device[0] = 1;
#endif
#ifdef DEVICE_LOOP
    for (float& x : device) { x = 1; }
#endif
#ifdef DEVICE_AS_HOST
    const view<float> host = device;
#endif
#ifdef CONTAINER_AS_DEVICE
    const view<float, device_memory> on_device = v;
#endif
#ifdef DEVICE_IN_HOST_CALL
    c.all_reduce(device, device, sum{});
#endif
#ifdef PACKED_BOOLS
    std::vector<bool> packed(8);
    const view<bool> bits = packed;
#endif
#ifdef BUFFER_OF_STRINGS
    const buffer<std::string> strings(host_queue{}, 3);
#endif
#ifdef COPIED_BUFFER
    const buffer<float> first(host_queue{}, 3);
    const buffer<float> second = first;
#endif
    static_cast<void>(more);
    static_cast<void>(added);
    static_cast<void>(device);
}
