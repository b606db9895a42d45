// The random numbers of a stream are the same bits on the device as on the host.
#include <tutti/core/philox.hpp>  // random_stream

#include <doctest/doctest.h>  // the test

#include <array>    // normals
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

constexpr std::size_t cells = 1 << 23;

// z of the k-th of all radii and the k-th of all angles.
TUTTI_HOST_DEVICE std::array<float, 4> normals_of_cell(std::uint32_t k) {
    return tutti::normals_from({k << 9, k << 9, k << 9, ~(k << 9)});
}
__global__ void draw_all(std::array<float, 4>* z) {
    const std::uint32_t k = blockIdx.x * blockDim.x + threadIdx.x;
    z[k] = normals_of_cell(k);
}

}  // namespace

// The device takes a root without the test for extreme numbers: it is right for all that there are.
TEST_CASE("every radius and every angle has the bits of the host") {
    tutti::test::require_device();
    std::array<float, 4>* z = nullptr;
    REQUIRE(cudaMalloc(&z, cells * sizeof *z) == cudaSuccess);
    draw_all<<<cells / 256, 256>>>(z);
    REQUIRE(cudaGetLastError() == cudaSuccess);
    std::vector<std::array<float, 4>> device(cells);
    REQUIRE(cudaMemcpy(device.data(), z, cells * sizeof *z, cudaMemcpyDeviceToHost) == cudaSuccess);
    cudaFree(z);
    std::size_t wrong = 0;
    for (std::uint32_t k = 0; k < cells; ++k) {
        const auto host = normals_of_cell(k);
        wrong += std::memcmp(&host, &device[k], sizeof host) != 0;
    }
    CHECK(wrong == 0);
}

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
