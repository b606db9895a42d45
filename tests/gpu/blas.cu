// cuda_blas: products in the queue's order with its handle and workspace; what an error says. cuda_products, and layers
// that are made of them, on one GPU, and cut over two where there are as many and NCCL: values in fp64 on the host.
#include <tutti/core/cuda_blas.hpp>                     // under test
#include <tutti/core/cuda_products.hpp>                 // under test
#include <tutti/parallel/bias.cuh>                      // under test
#include <tutti/parallel/vocabulary.cuh>                // under test
#include <tutti/parallel/vocabulary_cross_entropy.cuh>  // likewise

#include <algorithm>    // max, min
#include <cmath>        // fabs
#include <cstdint>      // words
#include <string>       // messages
#include <type_traits>  // precision
#include <utility>      // move
#include <vector>       // matrices

#include <cuda_runtime_api.h>  // devices

#include <doctest/doctest.h>  // checks

#include <tutti/core/buffer.hpp>  // storage
#if TUTTI_TEST_NCCL
#include <tutti/comm/nccl.hpp>  // ranks
#endif

#include "device.hpp"               // require_device
#include "parallel/cut_layers.hpp"  // the oracle

using namespace tutti;
using test::numbers;

namespace {

// Of the largest element: roundings of products of rounded numbers, one behind the other.
template <class T>
constexpr double bar = std::is_same_v<T, double>    ? 1e-12
                       : std::is_same_v<T, float>   ? 1e-5
                       : std::is_same_v<T, float16> ? 5e-3
                                                    : 4e-2;

template <class T> numbers rounded(numbers v) {
    for (double& x : v) { x = static_cast<double>(static_cast<T>(x)); }
    return v;
}
// Of matrices with two numbers behind each row.
constexpr std::size_t margin = 2;
numbers rows_with_margin(std::uint64_t seed, std::size_t rows, std::size_t columns) {
    return test::drawn(seed, rows * (columns + margin), 1);
}

template <class T> void products_as_plain_ones(std::size_t m, std::size_t n, std::size_t k) {
    const cuda_queue q(0);
    const cuda_products products(q);
    const test::tensors_on<T, cuda_queue> on(q);
    for (const bool across_a : {false, true}) {
        for (const bool across_b : {false, true}) {
            for (const double keep : {0.0, 1.0, -0.5}) {
                CAPTURE(keep);
                const std::size_t a_rows = across_a ? k : m, b_rows = across_b ? n : k;
                const std::size_t a_columns = across_a ? m : k, b_columns = across_b ? k : n;
                const auto a = rounded<T>(rows_with_margin(1, a_rows, a_columns));
                const auto b = rounded<T>(rows_with_margin(2, b_rows, b_columns));
                auto c = rounded<T>(rows_with_margin(3, m, n));
                const auto da = on.of(a), db = on.of(b), dc = on.of(c);
                const auto sized = [](auto* data, std::size_t rows, std::size_t columns) {
                    return matrix<std::remove_pointer_t<decltype(data)>>{data, rows, columns, columns + margin};
                };
                products.multiply(factor<T>{sized(da.data(), a_rows, a_columns), across_a},
                                  factor<T>{sized(db.data(), b_rows, b_columns), across_b}, sized(dc.data(), m, n),
                                  master_t<T>(0.25), master_t<T>(keep));
                const auto before = c;
                plain_products::multiply(factor<double>{sized(a.data(), a_rows, a_columns), across_a},
                                         factor<double>{sized(b.data(), b_rows, b_columns), across_b},
                                         sized(c.data(), m, n), 0.25, keep);
                const auto got = on.values(dc);
                double worst = 0, largest = 0;
                bool margin_is_left = true;
                for (std::size_t i = 0; i < c.size(); ++i) {
                    if (i % (n + margin) >= n) {
                        margin_is_left = margin_is_left && got[i] == before[i];
                        continue;
                    }
                    worst = std::max(worst, std::fabs(got[i] - c[i]));
                    largest = std::max(largest, std::fabs(c[i]));
                }
                CHECK(worst <= bar<T> * largest);
                CHECK(margin_is_left);
            }
        }
    }
}

// The device's arrays afterwards are the host's, to `allowed` of the largest. Work is to follow on.queue(), whose copies
// are not waited for.
template <class T, class OnHost, class OnDevice>
void as_on_host(const numbers& changed, double allowed, OnHost on_host, OnDevice on_device) {
    const cuda_queue q(0);
    const test::tensors_on<T, cuda_queue> on(q);
    numbers expected = changed;
    on_host(view<double>(expected));
    const auto b = on.of(changed);
    on_device(on, b.view());
    const auto got = on.values(b);
    double worst = 0, largest = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        worst = std::max(worst, std::fabs(got[i] - expected[i]));
        largest = std::max(largest, std::fabs(expected[i]));
    }
    CHECK(worst <= allowed * largest);
}

template <class T> void biases(std::size_t rows, std::size_t columns) {
    CAPTURE(rows);
    CAPTURE(columns);
    const auto y = rounded<T>(test::drawn(1, rows * columns, 1)), bias = rounded<T>(test::drawn(2, columns, 1));
    as_on_host<T>(
        y, bar<T>,
        [&](view<double> v) {
            parallel::add_bias_operation<double, host_memory>{bias, v}();
        },
        [&](const auto& on, view<T, device_memory> v) {
            const auto b = on.of(bias);
            run(on.queue(), parallel::add_bias_operation<T, device_memory>{b.view(), v});
        });
    as_on_host<T>(
        bias, bar<T>,
        [&](view<double> v) {
            parallel::add_bias_gradient_operation<double, host_memory>{y, v}();
        },
        [&](const auto& on, view<T, device_memory> v) {
            const auto d = on.of(y);
            run(on.queue(), parallel::add_bias_gradient_operation<T, device_memory>{d.view(), v});
        });
}

template <class T> void looked_up(std::size_t count, std::size_t words, std::size_t width) {
    CAPTURE(count);
    CAPTURE(width);
    constexpr std::size_t first = 100;  // two words in three are here
    std::vector<std::int32_t> list;
    for (std::size_t i = 0; i < count; ++i) {
        list.push_back(static_cast<std::int32_t>(first - words / 4 + test::mixed(i) % (words * 3 / 2)));
    }
    const auto table = rounded<T>(test::drawn(1, words * width, 1)), d = rounded<T>(test::drawn(2, count * width, 1));
    const auto there = test::tensors_on<std::int32_t, cuda_queue>(cuda_queue(0)).of(list);
    as_on_host<T>(
        numbers(count * width, 7.0), 0,
        [&](view<double> v) {
            parallel::look_up_operation<double, host_memory>{list, table, v, width, first}();
        },
        [&](const auto& on, view<T, device_memory> v) {
            const auto t = on.of(table);
            run(on.queue(), parallel::look_up_operation<T, device_memory>{there.view(), t.view(), v, width, first});
        });
    as_on_host<T>(
        table, bar<T>,
        [&](view<double> v) {
            parallel::add_looked_up_operation<double, host_memory>{list, d, v, width, first}();
        },
        [&](const auto& on, view<T, device_memory> v) {
            const auto dy = on.of(d);
            run(on.queue(),
                parallel::add_looked_up_operation<T, device_memory>{there.view(), dy.view(), v, width, first});
        });
}

#if TUTTI_TEST_NCCL
// Odd widths, of which no row is aligned, and rows that do not divide over ranks; more than one block of everything.
template <class T> void layers_solve(comm::nccl& world) {
    using test::model, test::problem;
    const std::vector<problem> problems{problem::of<T>(model(101, 24, 48), 29), problem::of<T>(model(13, 5, 120), 5),
                                        problem::of<T>(model(513, 192, 320), 401)};
    for (const problem& p : problems) {
        for (const bool sequence : {false, true}) {
            for (const bool overlap : {false, true}) {
                if (&p == &problems.back() && overlap != sequence) { continue; }  // of the largest two forms
                parallel::tensor_options o;
                o.sequence_parallel = sequence;
                o.overlap = overlap;
                comm::nccl own = world.duplicate("tensor");
                const cuda_products products(own.queue());
                test::expect_solved<T>(p, std::move(own), o, products, bar<T>);
            }
        }
    }
}
#endif

}  // namespace

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

TEST_CASE_TEMPLATE("products of rows with margins, transposed or not, over or onto what is there", T, double, float,
                   bfloat16, float16) {
    test::require_device();
    products_as_plain_ones<T>(1, 1, 1);
    products_as_plain_ones<T>(5, 3, 7);
    products_as_plain_ones<T>(64, 126, 254);
    products_as_plain_ones<T>(333, 257, 191);
    // Nothing to add leaves what is there; of nothing there is none.
    const cuda_queue q(0);
    const test::tensors_on<T, cuda_queue> on(q);
    const auto c = on.of(numbers{1, 2});
    const cuda_products products(q);
    products.multiply(factor<T>{{nullptr, 0, 1, 1}, true}, factor<T>{{nullptr, 0, 2, 2}, false},
                      matrix<T>{c.data(), 1, 2, 2}, master_t<T>(1), master_t<T>(1));
    products.multiply(factor<T>{{c.data(), 1, 2, 2}, false}, factor<T>{{nullptr, 2, 0, 0}, false},
                      matrix<T>{nullptr, 1, 0, 0}, master_t<T>(1), master_t<T>(0));
    CHECK(on.values(c) == numbers{1, 2});
}

TEST_CASE_TEMPLATE("biases and rows of words are the host's", T, double, float, bfloat16, float16) {
    test::require_device();
    for (const std::size_t columns : {1, 127, 128, 129, 768}) {
        for (const std::size_t rows : {0, 1, 31, 64, 65, 2500}) { biases<T>(rows, columns); }
    }
    biases<T>(1100000, 1);  // more rows than a grid has blocks for, sixteen a block
    looked_up<T>(1, 4, 3);
    looked_up<T>(1000, 7, 520);
    looked_up<T>(3000, 1000, 64);
    looked_up<T>(0, 4, 3);
}

#if TUTTI_TEST_NCCL
TEST_CASE_TEMPLATE("layers on one GPU and cut over two: loss and every gradient, in one call and in two", T, double,
                   float, bfloat16, float16) {
    test::require_device();
    int devices = 0;
    REQUIRE(cudaGetDeviceCount(&devices) == cudaSuccess);
    for (int ranks = 1; ranks <= std::min(devices, 2); ++ranks) {
        CAPTURE(ranks);
        comm::nccl::launch(ranks, [](comm::nccl& world) { layers_solve<T>(world); });
    }
}
#endif
