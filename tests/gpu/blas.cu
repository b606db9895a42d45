// cuda_blas: products in the queue's order with its handle and workspace; what an error says.
#include <tutti/core/cuda_blas.hpp>  // under test

#include <vector>  // matrices

#include <doctest/doctest.h>  // checks

#include <tutti/core/buffer.hpp>  // storage

#include "device.hpp"  // require_device

using namespace tutti;

TEST_CASE("a product by cuBLASLt with the handle and workspace of a queue") {
    test::require_device();
    const cuda_queue q(0);
    const std::size_t before = q.account().live();
    {
        const cuda_blas blas(q, 1 << 20);
        CHECK(blas.workspace().size() == 1 << 20);
        CHECK(q.account().live() == before + (1 << 20));
        const cuda_blas copy = blas;
        CHECK(copy.handle() == blas.handle());
        // Column-major: [1 3; 2 4] * [5 7; 6 8] = [23 31; 34 46]
        const std::vector<float> a{1, 2, 3, 4}, b{5, 6, 7, 8};
        const buffer<float, cuda_queue> da(q, 4), db(q, 4), dc(q, 4);
        upload(q, view<const float>(a), da.view());
        upload(q, view<const float>(b), db.view());
        cublasLtMatmulDesc_t product = nullptr;
        cublasLtMatrixLayout_t layout = nullptr;
        check_cublas(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
        check_cublas(cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 2, 2, 2), "cublasLtMatrixLayoutCreate");
        const float one = 1, zero = 0;
        check_cublas(cublasLtMatmul(blas.handle(), product, &one, da.data(), layout, db.data(), layout, &zero,
                                    dc.data(), layout, dc.data(), layout, nullptr, blas.workspace().data(),
                                    blas.workspace().size(), q.stream()),
                     "cublasLtMatmul");
        std::vector<float> c(4);
        download(q, dc.view(), view<float>(c));
        CHECK(c == std::vector<float>{23, 34, 31, 46});
        cublasLtMatrixLayoutDestroy(layout);
        cublasLtMatmulDescDestroy(product);
    }
    CHECK(q.account().live() == before);
}

TEST_CASE("an error carries the call, cuBLAS's name and its text") {
    try {
        check_cublas(CUBLAS_STATUS_NOT_SUPPORTED, "a product of 3 x 4 x 5");
        FAIL("nothing was thrown");
    } catch (const backend_error& e) {
        CHECK(std::string(e.what()).starts_with("a product of 3 x 4 x 5: CUBLAS_STATUS_NOT_SUPPORTED"));
        CHECK(e.context().backend_code == CUBLAS_STATUS_NOT_SUPPORTED);
    }
}
