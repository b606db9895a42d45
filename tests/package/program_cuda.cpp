// A program of a consumer that asked for the component cuda. It needs no device: without one, it says so.
#include <cstdio>
#include <vector>

#include <tutti/core/buffer.hpp>
#include <tutti/core/cuda_queue.hpp>

int main() {
    std::vector<float> in{1, 2, 3};
    std::vector<float> out(3);
    try {
        const tutti::cuda_queue q(0);
        const tutti::buffer<float, tutti::cuda_queue> b(q, 3);
        tutti::upload(q, tutti::view<const float>(in), b.view());
        tutti::download(q, b.view(), tutti::view<float>(out));
    } catch (const tutti::backend_error& e) {
        std::printf("no device to copy on: %s\n", e.what());
        out = in;
    }
    std::printf("a copy of %d elements\n", in == out ? 3 : 0);
}
