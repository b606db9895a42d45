// A program of a consumer that asked for the component cublas. It needs no device: without one, it says so.
#include <cstdio>

#include <tutti/core/cuda_blas.hpp>

int main() {
    try {
        const tutti::cuda_blas blas(tutti::cuda_queue(0), 1 << 20);
        std::printf("a handle of cuBLAS %zu\n", cublasLtGetVersion());
    } catch (const tutti::backend_error& e) {
        std::printf("no device for a handle of cuBLAS %zu: %s\n", cublasLtGetVersion(), e.what());
    }
}
