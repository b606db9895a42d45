// Exchanges of shards on two GPUs: the bits of two ranks on the host, whose sums of two are the same in any order; shards
// kept inside nodes, second copies inside nodes, gradients and values in few bits. With one GPU it is skipped.
#include <tutti/compress/buckets.cuh>  // quantize on a GPU
#include <tutti/strategy/zero.cuh>     // under test

#include <string>   // the reason
#include <utility>  // move
#include <vector>   // outcomes

#include <cuda_runtime_api.h>  // devices

#include <doctest/doctest.h>  // checks

#include <tutti/comm/nccl.hpp>                   // ranks on GPUs
#include <tutti/comm/threads.hpp>                // ranks on the host
#include <tutti/comm/topology.hpp>               // nodes
#include <tutti/optimize/adamw.hpp>              // optimizer
#include <tutti/strategy/compressed_shards.hpp>  // under test
#include <tutti/strategy/node_shards.hpp>        // under test
#include <tutti/strategy/secondary_shards.hpp>   // under test

#include "device.hpp"    // require_device
#include "training.hpp"  // train

using namespace tutti;
using comm::topology;
using optimize::adamw;

namespace {

template <class Ranks, class T, class Make> std::vector<test::outcome<T>> trained(Make make, bool own_gradients) {
    std::vector<test::outcome<T>> all(2);
    Ranks::launch(2, [&](Ranks& world) {
        all[static_cast<std::size_t>(world.rank())] = test::train<T>(world.duplicate("zero"), make, own_gradients);
    });
    return all;
}

template <int Stage, class T, class Exchange> void expect_equal_bits(const Exchange& exchange) {
    test::require_device();
    int devices = 0;
    REQUIRE(cudaGetDeviceCount(&devices) == cudaSuccess);
    if (devices < 2) { test::skip("two GPUs are needed, there is " + std::to_string(devices)); }
    const auto make = [&]<communicator C>(C c) {
        return strategy::zero<Stage, C, adamw, T, Exchange>(std::move(c), {}, {.bucket_bytes = 8192}, exchange);
    };
    const auto host = trained<comm::threads, T>(make, false);
    const auto device = trained<comm::nccl, T>(make, false);
    for (std::size_t rank = 0; rank < 2; ++rank) {
        CAPTURE(rank);
        test::expect_same_bits(host[rank], device[rank]);
    }
}

}  // namespace

TEST_CASE("shards inside nodes: of one GPU each, or one of both") {
    expect_equal_bits<2, bfloat16>(strategy::node_shards{topology::uniform(2, 1)});
    expect_equal_bits<3, bfloat16>(strategy::node_shards{topology::uniform(2, 1)});
    expect_equal_bits<3, bfloat16>(strategy::node_shards{topology::one_node(2)});
}

TEST_CASE("gradients and values in few bits, with feedback") {
    expect_equal_bits<2, bfloat16>(strategy::compressed_shards<>{.feedback = true});
    expect_equal_bits<3, bfloat16>(strategy::compressed_shards<>{.feedback = true});
}

TEST_CASE("a second copy inside nodes, of plain and of compressed shards") {
    expect_equal_bits<3, bfloat16>(strategy::secondary_shards<>{topology::uniform(2, 1)});
    expect_equal_bits<3, bfloat16>(
        strategy::secondary_shards<strategy::compressed_shards<>>{topology::one_node(2), {.feedback = true}});
}
