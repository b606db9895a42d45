// cuda_products: products of matrices on a device through cuBLASLt, with what a kernel can do to them before it stores
// them; plans kept by shape. Needs core/cuda_blas and core/products (tutti::cublas); any C++20 compiler, no nvcc.
// Row-major; 16-bit floats, float or double, sums of the first two in float (float is true float).
#pragma once

#include <algorithm>    // max, min
#include <bit>          // countr_zero
#include <compare>      // plans by shape
#include <cstddef>      // size_t
#include <cstdint>      // addresses
#include <map>          // plans
#include <memory>       // shared by copies
#include <type_traits>  // type_identity_t

#include <cublasLt.h>          // cuBLASLt
#include <cuda_runtime_api.h>  // multiprocessors

#include <tutti/core/cuda_blas.hpp>  // handle, workspace, checks
#include <tutti/core/element.hpp>    // 16-bit floats
#include <tutti/core/error.hpp>      // usage_error, narrow
#include <tutti/core/products.hpp>   // matrix, factor
#include <tutti/core/text.hpp>       // formatted

namespace tutti {

/// What happens to a product before it is stored.
enum class after_product {
    nothing,
    bias,        ///< + bias, one number a column
    bias_gelu,   ///< the same, stored in `kept` if there is one; then GELU, in the tanh form
    gelu_slope,  ///< times GELU's derivative at `kept`
};

/// What a product reads and writes besides its factors. Unset members are not used.
template <class T> struct product_extras {
    after_product after = after_product::nothing;
    const T* bias = nullptr;
    matrix<T> kept{};          ///< of bias_gelu: written; of gelu_slope: read
    matrix<const T> addend{};  ///< what is added to the product: out itself accumulates
};

/// Products on one queue.
///
/// Semantics    a handle; copies share plans, handle and workspace. The first form of `multiply` is that of
///              plain_products: c = scale * a * b + keep * c. The second is out = after(a * b + addend).
/// Shapes       (m x k) * (k x n) into (m x n), after transposition; sizes are the caller's promise. keep = 0 does not
///              read c. Strides may be larger than rows.
/// Aliasing     out may be addend; it overlaps neither a nor b nor kept.
/// Determinism  cuBLASLt's first proposal for a shape is taken, never a timed one, and none that adds up in an order
///              that depends on time: the same bits in every run on the same kind of device and reserve.
/// Cost         2 m n k flops, one kernel, or two where the sum over k is split. A plan is made when a shape is first
///              seen (about 0.1 ms); later calls look it up. After thousands of shapes all are forgotten.
///   reserve    multiprocessors that products do not count on. They fill those that they count on in whole rounds: if
///              collectives hold some of them, a product takes a round more.
/// Errors       backend_error when cuBLASLt has no kernel for the shape; it then has none for any shape like it.
class cuda_products {
    /// All that a plan depends on.
    struct shape {
        std::size_t rows, columns, inner, a_stride, b_stride, c_stride, out_stride, kept_stride;
        bool a_transposed, b_transposed, adds;
        after_product after;
        cudaDataType_t type;
        unsigned a_alignment, b_alignment, c_alignment, out_alignment;
        friend auto operator<=>(const shape&, const shape&) = default;
    };
    struct plan {
        cublasLtMatmulDesc_t product = nullptr;
        cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, out = nullptr;
        cublasLtMatmulAlgo_t algorithm{};
        plan() = default;
        plan(const plan&) = delete;
        plan& operator=(const plan&) = delete;
        ~plan() {
            if (out != nullptr) { cublasLtMatrixLayoutDestroy(out); }
            if (c != nullptr) { cublasLtMatrixLayoutDestroy(c); }
            if (b != nullptr) { cublasLtMatrixLayoutDestroy(b); }
            if (a != nullptr) { cublasLtMatrixLayoutDestroy(a); }
            if (product != nullptr) { cublasLtMatmulDescDestroy(product); }
        }
        template <class Value> void set(cublasLtMatmulDescAttributes_t attribute, Value value) {
            check_cublas(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof value),
                         "cublasLtMatmulDescSetAttribute");
        }
    };
    // Of rows of documents no two steps may have as many; so many plans are a few megabytes.
    static constexpr std::size_t most_plans = 4096;

    cuda_blas blas_;
    std::int32_t multiprocessors_ = 0;  // 0: all
    std::shared_ptr<std::map<shape, plan>> plans_ = std::make_shared<std::map<shape, plan>>();

    template <class T>
    static constexpr cudaDataType_t type_of = std::is_same_v<T, bfloat16>  ? CUDA_R_16BF
                                              : std::is_same_v<T, float16> ? CUDA_R_16F
                                              : std::is_same_v<T, double>  ? CUDA_R_64F
                                                                           : CUDA_R_32F;

    /// The largest power of two, up to 256, that divides an address.
    [[nodiscard]] static unsigned alignment_of(const void* p) {
        const auto address = reinterpret_cast<std::uintptr_t>(p);
        return address == 0 ? 256u : 1u << std::min(std::countr_zero(address), 8);
    }
    void make(plan& p, const shape& s) const;
    [[nodiscard]] plan& plan_for(const shape& s) const {
        if (plans_->size() >= most_plans && !plans_->contains(s)) { plans_->clear(); }
        const auto [entry, is_new] = plans_->try_emplace(s);
        if (is_new) {
            try {
                make(entry->second, s);
            } catch (...) {
                plans_->erase(entry);
                throw;
            }
        }
        return entry->second;
    }
    template <class T>
    void multiply(const factor<T>& a, const factor<T>& b, matrix<T> out, const product_extras<T>& e, master_t<T> scale,
                  master_t<T> keep) const;

public:
    explicit cuda_products(const cuda_queue& q, int reserve = 0) : blas_(q) {
        if (reserve == 0) { return; }
        int all = 0;
        detail::check_cuda(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, q.device()),
                           "cudaDeviceGetAttribute");
        multiprocessors_ = std::max(all - reserve, 1);
    }
    [[nodiscard]] const cuda_queue& queue() const noexcept { return blas_.queue(); }

    template <floating_element T>
    void multiply(factor<T> a, factor<T> b, matrix<T> c, master_t<T> scale, master_t<T> keep) const {
        if (c.rows == 0 || c.columns == 0 || (a.columns() == 0 && keep == 1)) { return; }
        product_extras<T> e;
        if (keep != 0) { e.addend = c; }
        multiply<T>(a, b, c, e, scale, keep);
    }
    template <floating_element T>
    void multiply(std::type_identity_t<factor<T>> a, std::type_identity_t<factor<T>> b, matrix<T> out,
                  const product_extras<std::type_identity_t<T>>& e) const {
        multiply<T>(a, b, out, e, 1, e.addend.data != nullptr ? 1 : 0);
    }
};

inline void cuda_products::make(plan& p, const shape& s) const {
    const auto layout = [&](cublasLtMatrixLayout_t& l, std::size_t rows, std::size_t columns, std::size_t stride) {
        check_cublas(cublasLtMatrixLayoutCreate(&l, s.type, rows, columns, narrow<std::int64_t>(stride, "a stride")),
                     "cublasLtMatrixLayoutCreate");
    };
    const bool is_double = s.type == CUDA_R_64F;
    check_cublas(cublasLtMatmulDescCreate(&p.product, is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                          is_double ? CUDA_R_64F : CUDA_R_32F),
                 "cublasLtMatmulDescCreate");
    // cuBLASLt is column-major: what is row-major here is transposed there, so out^T = b^T a^T is computed.
    p.set(CUBLASLT_MATMUL_DESC_TRANSA, s.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    p.set(CUBLASLT_MATMUL_DESC_TRANSB, s.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    switch (s.after) {
    case after_product::nothing: break;
    case after_product::bias: p.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS); break;
    case after_product::bias_gelu:
        p.set(CUBLASLT_MATMUL_DESC_EPILOGUE,
              s.kept_stride != 0 ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_BIAS);
        break;
    case after_product::gelu_slope: p.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DGELU); break;
    }
    if (s.after == after_product::bias || s.after == after_product::bias_gelu) {
        // Addresses are set before each call; the heuristic wants one that is not null.
        p.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, reinterpret_cast<const void*>(std::uintptr_t{256}));
        p.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, s.type);
    }
    if (s.kept_stride != 0) {
        p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, reinterpret_cast<void*>(std::uintptr_t{256}));
        p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, narrow<std::int64_t>(s.kept_stride, "a stride"));
        p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, s.type);
    }
    if (multiprocessors_ != 0) { p.set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, multiprocessors_); }
    layout(p.a, s.b_transposed ? s.inner : s.columns, s.b_transposed ? s.columns : s.inner, s.b_stride);
    layout(p.b, s.a_transposed ? s.rows : s.inner, s.a_transposed ? s.inner : s.rows, s.a_stride);
    layout(p.c, s.columns, s.rows, s.c_stride);
    layout(p.out, s.columns, s.rows, s.out_stride);

    cublasLtMatmulPreference_t wanted = nullptr;
    check_cublas(cublasLtMatmulPreferenceCreate(&wanted), "cublasLtMatmulPreferenceCreate");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        check_cublas(cublasLtMatmulPreferenceSetAttribute(wanted, attribute, &value, sizeof value),
                     "cublasLtMatmulPreferenceSetAttribute");
    };
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    try {
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{blas_.workspace().size()});
        // Partial sums through the workspace are added in order; in-place ones in the order of arrival.
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
               std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, std::uint32_t{s.b_alignment});
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, std::uint32_t{s.a_alignment});
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, std::uint32_t{s.c_alignment});
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, std::uint32_t{s.out_alignment});
        status =
            cublasLtMatmulAlgoGetHeuristic(blas_.handle(), p.product, p.a, p.b, p.c, p.out, wanted, 1, &found, &count);
    } catch (...) {
        cublasLtMatmulPreferenceDestroy(wanted);
        throw;
    }
    cublasLtMatmulPreferenceDestroy(wanted);
    if (status == CUBLAS_STATUS_SUCCESS && count == 0) { status = CUBLAS_STATUS_NOT_SUPPORTED; }
    check_cublas(status, formatted("a product of {} x {} x {}, epilogue {}", s.rows, s.columns, s.inner,
                                   static_cast<int>(s.after)));
    p.algorithm = found.algo;
}

template <class T>
void cuda_products::multiply(const factor<T>& a, const factor<T>& b, matrix<T> out, const product_extras<T>& e,
                             master_t<T> scale, master_t<T> keep) const {
    const bool adds = e.addend.data != nullptr;
    const matrix<const T> c = adds ? e.addend : matrix<const T>(out);
    const shape s{.rows = out.rows,
                  .columns = out.columns,
                  .inner = a.columns(),
                  .a_stride = a.stored.stride,
                  .b_stride = b.stored.stride,
                  .c_stride = c.stride,
                  .out_stride = out.stride,
                  .kept_stride = e.kept.stride,
                  .a_transposed = a.transposed,
                  .b_transposed = b.transposed,
                  .adds = adds,
                  .after = e.after,
                  .type = type_of<T>,
                  .a_alignment = alignment_of(a.stored.data),
                  .b_alignment = alignment_of(b.stored.data),
                  .c_alignment = alignment_of(c.data),
                  .out_alignment = alignment_of(out.data)};
    plan& p = plan_for(s);
    if (e.bias != nullptr) { p.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(e.bias)); }
    if (e.kept.data != nullptr) { p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(e.kept.data)); }
    const detail::on_device scope(queue().device());
    const auto workspace = blas_.workspace();
    check_cublas(cublasLtMatmul(blas_.handle(), p.product, &scale, b.stored.data, p.a, a.stored.data, p.b, &keep,
                                c.data, p.c, out.data, p.out, &p.algorithm, workspace.data(), workspace.size(),
                                queue().stream()),
                 "cublasLtMatmul");
}

}  // namespace tutti
