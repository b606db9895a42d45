// Draws inputs for a fuzz target where there is no libFuzzer: always the same ones.
// Usage: <program> [inputs]
#include <cstdint>  // bytes
#include <cstdio>   // printf
#include <cstdlib>  // strtoul
#include <vector>   // inputs

#include <support/oracle.hpp>  // mixed

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
    const unsigned long inputs = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 20000;
    for (unsigned long i = 0; i < inputs; ++i) {
        std::vector<std::uint8_t> bytes(tutti::test::mixed(i) % 200);
        for (std::size_t j = 0; j < bytes.size(); ++j) {
            const std::uint64_t word = tutti::test::mixed(i * 1000003 + j);
            // Runs of ones make NaN and infinities.
            bytes[j] = word % 4 == 0 ? std::uint8_t{0xff} : static_cast<std::uint8_t>(word >> 8);
        }
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    std::printf("%lu inputs\n", inputs);
}
