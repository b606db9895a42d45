// look(): fills a `seen`. Static on purpose: each unit that includes this has its own, made from what it saw.
// Needs the umbrella.
// No source.
#pragma once

#include <tutti/tutti.hpp>  // everything

#include <cstddef>      // size_t
#include <type_traits>  // what a type can do is part of its layout
#include <vector>       // the lists

#include "seen.hpp"  // seen

template <class... T> static std::vector<std::size_t> layouts_of() {
    return {(sizeof(T) * 1024 + alignof(T) * 4 + (std::is_trivially_copyable_v<T> ? 2 : 0) + std::is_empty_v<T>)...};
}

using comm_type = tutti::comm::checked<tutti::comm::counted<tutti::comm::threads>>;
using lane_type = tutti::schedule::lane<comm_type>;

static seen look() {
    using namespace tutti;
    return {
        .addresses = {&version_number, &version_string, reinterpret_cast<const void*>(&default_timeout)},
        .layouts =
            layouts_of<view<float>, buffer<float, host_queue>, host_queue, virtual_queue, error, mismatch_error,
                       float16, bfloat16, state_entry<host_memory>, comm::self<host_queue>, comm::call, comm_type,
                       lane_type, schedule::ticket<queue_of<comm_type>>, schedule::timeline, schedule::bucket_plan,
                       strategy::parameter<float>, strategy::data_parallel<comm_type, optimize::adamw>>(),
    };
}
