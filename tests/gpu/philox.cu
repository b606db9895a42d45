// The random numbers of a stream are the same bits on the device as on the host.
#include <tutti/core/philox.hpp>  // random_stream

#include <doctest/doctest.h>  // the test

#include <cstdint>  // words
#include <cstring>  // memcmp: bits, not values
#include <vector>   // the host's copy

#include "device.hpp"  // require_device

namespace {

constexpr std::size_t count = 1 << 20;
constexpr tutti::random_stream stream{.seed = 0x0123456789abcdefu, .stream = 7, .step = 3};

__global__ void draw(std::uint32_t* words, float* normals) {
    const std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
    const tutti::random_stream s{0x0123456789abcdefu, 7, 3};
    words[i] = s.word(i);
    normals[i] = s.normal(i);
}

}  // namespace

TEST_CASE("words and normals are the same bits on host and device") {
    tutti::test::require_device();
    std::uint32_t* words = nullptr;
    float* normals = nullptr;
    REQUIRE(cudaMalloc(&words, count * sizeof *words) == cudaSuccess);
    REQUIRE(cudaMalloc(&normals, count * sizeof *normals) == cudaSuccess);
    draw<<<count / 256, 256>>>(words, normals);
    REQUIRE(cudaGetLastError() == cudaSuccess);

    std::vector<std::uint32_t> device_words(count);
    std::vector<float> device_normals(count);
    REQUIRE(cudaMemcpy(device_words.data(), words, count * sizeof *words, cudaMemcpyDeviceToHost) == cudaSuccess);
    REQUIRE(cudaMemcpy(device_normals.data(), normals, count * sizeof *normals, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(cudaFree(words) == cudaSuccess);
    CHECK(cudaFree(normals) == cudaSuccess);

    std::vector<std::uint32_t> host_words(count);
    std::vector<float> host_normals(count);
    for (std::size_t i = 0; i < count; ++i) {
        host_words[i] = stream.word(i);
        host_normals[i] = stream.normal(i);
    }
    CHECK(std::memcmp(device_words.data(), host_words.data(), count * sizeof(std::uint32_t)) == 0);
    CHECK(std::memcmp(device_normals.data(), host_normals.data(), count * sizeof(float)) == 0);
}
