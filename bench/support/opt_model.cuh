// Models of OPT's shapes in float16 for benches of zeroth, which run block by block: random weights, one sample of tokens.
// Needs nvcc, cuBLAS, and cuDNN's attention where TUTTI_BENCH_CUDNN is 1 (zeroth_offload_cudnn.cpp).
#pragma once

#include <algorithm>  // max, min
#include <cmath>      // sqrt
#include <cstddef>    // sizes
#include <cstdint>    // strides
#include <cstring>    // memcpy
#include <map>        // products by shape
#include <memory>     // attention
#include <string>     // names
#include <thread>     // first weights
#include <tuple>      // shapes
#include <vector>     // shapes

#include <cublasLt.h>

#include <tutti/core/cuda_blas.hpp>
#include <tutti/core/philox.hpp>
#include <tutti/sequence/cuda_attention.cuh>
#include <tutti/zeroth/layout.hpp>

#if TUTTI_BENCH_CUDNN
namespace tutti::bench_cudnn {
std::unique_ptr<sequence::fused_attention> kernels();
}  // namespace tutti::bench_cudnn
#endif

// Not an anonymous one: nvcc takes members that a concept asks for, there, for functions that nobody uses.
namespace zeroth_bench {

using namespace tutti;
using D = device_memory;
using number = float16;
template <class T> using array = buffer<T, cuda_queue>;

struct shape {
    std::string name;
    std::size_t layers, width, heads;
    std::size_t blocks;  // that the bench has
};
inline const std::vector<shape> shapes{{"opt-1.3b", 24, 2048, 32, 24},
                                       {"opt-6.7b", 32, 4096, 32, 32},
                                       {"opt-13b", 40, 5120, 40, 40},
                                       {"opt-66b", 64, 9216, 72, 16},
                                       {"opt-175b", 96, 12288, 96, 8}};
inline constexpr std::size_t words = 50272;
inline constexpr std::size_t positions = 2050;

// 12 d^2 + 13 d numbers.
inline std::vector<zeroth::tensor_shape> block_of(std::uint32_t first, std::size_t d) {
    const std::size_t counts[] = {d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d};
    std::vector<zeroth::tensor_shape> all;
    for (const std::size_t n : counts) { all.push_back({first++, n, n >= d * d}); }
    return all;
}
inline zeroth::model_shape model_of(const shape& s) {
    zeroth::model_shape m;
    m.head = {{0, words * s.width}, {1, positions * s.width}};
    for (std::size_t i = 0; i < s.blocks; ++i) {
        m.blocks.push_back(block_of(static_cast<std::uint32_t>(100 + 12 * i), s.width));
    }
    m.tail = {{2, s.width, false}, {3, s.width, false}, {4, words * s.width}};
    return m;
}

__device__ inline float sum_of_block(float v) {
    __shared__ float parts[32];
    for (int o = 16; o > 0; o /= 2) { v += __shfl_xor_sync(0xffffffffu, v, o); }
    __syncthreads();
    if (threadIdx.x % 32 == 0) { parts[threadIdx.x / 32] = v; }
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0;
    for (int o = 16; o > 0; o /= 2) { v += __shfl_xor_sync(0xffffffffu, v, o); }
    return v;
}
__global__ inline void embed(const number* table, const number* place, const int* tokens, number* x, std::size_t d) {
    const std::size_t t = blockIdx.x;
    for (std::size_t k = threadIdx.x; k < d; k += blockDim.x) {
        x[t * d + k] = number(static_cast<float>(table[static_cast<std::size_t>(tokens[t]) * d + k]) +
                              static_cast<float>(place[(t + 2) * d + k]));
    }
}
__global__ inline void normalize(const number* x, const number* gain, const number* bias, number* y, std::size_t d) {
    const number* const row = x + blockIdx.x * d;
    float sum = 0, squares = 0;
    for (std::size_t k = threadIdx.x; k < d; k += blockDim.x) { sum += static_cast<float>(row[k]); }
    const float mean = sum_of_block(sum) / static_cast<float>(d);
    for (std::size_t k = threadIdx.x; k < d; k += blockDim.x) {
        const float c = static_cast<float>(row[k]) - mean;
        squares += c * c;
    }
    const float scale = rsqrtf(sum_of_block(squares) / static_cast<float>(d) + 1e-5f);
    for (std::size_t k = threadIdx.x; k < d; k += blockDim.x) {
        const float c = (static_cast<float>(row[k]) - mean) * scale;
        y[blockIdx.x * d + k] = number(c * (1 + static_cast<float>(gain[k])) + static_cast<float>(bias[k]));
    }
}
// The loss of each token, then of all, in a fixed order.
__global__ inline void cross_entropy(const number* logits, const int* tokens, float* losses) {
    const std::size_t t = blockIdx.x;
    const number* const row = logits + t * words;
    float sum = 0;
    for (std::size_t k = threadIdx.x; k < words; k += blockDim.x) { sum += expf(static_cast<float>(row[k])); }
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) { losses[t] = logf(sum) - static_cast<float>(row[tokens[t + 1]]); }
}
__global__ inline void mean_of(const float* losses, std::size_t n, double* out) {
    double sum = 0;
    for (std::size_t t = 0; t < n; ++t) { sum += static_cast<double>(losses[t]); }
    out[0] = sum / static_cast<double>(n);
    out[1] = static_cast<double>(n);
}

// y = x w' (+ bias) (+ y), of rows: x n by in, w out by in.
class products {
    struct plan {
        cublasLtMatmulDesc_t product = nullptr;
        cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
        cublasLtMatmulAlgo_t algorithm{};
    };
    cuda_blas blas_;
    std::map<std::tuple<std::size_t, std::size_t, std::size_t, int, bool>, plan> plans_;

    plan& plan_of(std::size_t n, std::size_t in, std::size_t out, cublasLtEpilogue_t epilogue, bool adds) {
        const auto [at, fresh] = plans_.try_emplace({n, in, out, static_cast<int>(epilogue), adds});
        plan& p = at->second;
        if (!fresh) { return p; }
        check_cublas(cublasLtMatmulDescCreate(&p.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
        const cublasOperation_t transposed = CUBLAS_OP_T;
        const auto set = [&](cublasLtMatmulDescAttributes_t a, const void* v, std::size_t bytes) {
            check_cublas(cublasLtMatmulDescSetAttribute(p.product, a, v, bytes), "cublasLtMatmulDescSetAttribute");
        };
        set(CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
        check_cublas(cublasLtMatrixLayoutCreate(&p.w, CUDA_R_16F, in, out, static_cast<std::int64_t>(in)), "layout");
        check_cublas(cublasLtMatrixLayoutCreate(&p.x, CUDA_R_16F, in, n, static_cast<std::int64_t>(in)), "layout");
        check_cublas(cublasLtMatrixLayoutCreate(&p.y, CUDA_R_16F, out, n, static_cast<std::int64_t>(out)), "layout");
        cublasLtMatmulPreference_t preference = nullptr;
        check_cublas(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
        const std::size_t bytes = blas_.workspace().size();
        check_cublas(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                                          sizeof bytes),
                     "cublasLtMatmulPreferenceSetAttribute");
        cublasLtMatmulHeuristicResult_t found{};
        int count = 0;
        check_cublas(cublasLtMatmulAlgoGetHeuristic(blas_.handle(), p.product, p.w, p.x, p.y, p.y, preference, 1,
                                                    &found, &count),
                     "cublasLtMatmulAlgoGetHeuristic");
        cublasLtMatmulPreferenceDestroy(preference);
        if (count == 0) { throw usage_error("no algorithm for a product"); }
        p.algorithm = found.algo;
        return p;
    }

public:
    explicit products(const cuda_queue& q) : blas_(q) {}
    products(const products&) = delete;
    products& operator=(const products&) = delete;
    ~products() {
        for (auto& [key, p] : plans_) {
            cublasLtMatmulDescDestroy(p.product);
            for (const auto layout : {p.w, p.x, p.y}) { cublasLtMatrixLayoutDestroy(layout); }
        }
    }
    void multiply(const number* x, const number* w, const number* bias, number* y, std::size_t n, std::size_t in,
                  std::size_t out, bool relu, bool adds) {
        const cublasLtEpilogue_t epilogue = bias == nullptr ? CUBLASLT_EPILOGUE_DEFAULT
                                            : relu          ? CUBLASLT_EPILOGUE_RELU_BIAS
                                                            : CUBLASLT_EPILOGUE_BIAS;
        plan& p = plan_of(n, in, out, epilogue, adds);
        if (bias != nullptr) {
            check_cublas(
                cublasLtMatmulDescSetAttribute(p.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias),
                "cublasLtMatmulDescSetAttribute");
        }
        const float one = 1, keep = adds ? 1 : 0;
        check_cublas(cublasLtMatmul(blas_.handle(), p.product, &one, w, p.w, x, p.x, &keep, y, p.y, y, p.y,
                                    &p.algorithm, blas_.workspace().data(), blas_.workspace().size(),
                                    blas_.queue().stream()),
                     "cublasLtMatmul");
    }
};

class opt_model {
    shape s_;
    std::size_t n_;
    products products_;
    sequence::cuda_attention<number> attention_;
    std::vector<array<number>> x_;
    array<number> h_, work_;  // work: queries, keys and values; the wide layer; logits
    array<float> sums_, losses_;
    array<int> tokens_;
    static constexpr unsigned threads = 256;
    static constexpr std::size_t logits_of = 512;  // tokens

public:
    opt_model(const cuda_queue& q, const shape& s, std::size_t tokens, std::size_t branches)
        : s_(s)
        , n_(tokens)
        , products_(q)
#if TUTTI_BENCH_CUDNN
        , attention_(bench_cudnn::kernels())
#endif
        , h_(q, n_ * s.width)
        , work_(q, std::max(4 * n_ * s.width, std::min(n_, logits_of) * words))
        , sums_(q, n_ * s.heads)
        , losses_(q, n_)
        , tokens_(q, n_ + 1) {
        for (std::size_t b = 0; b < branches; ++b) { x_.emplace_back(q, n_ * s.width); }
        std::vector<int> tokens_of(n_ + 1);
        for (std::size_t t = 0; t <= n_; ++t) { tokens_of[t] = static_cast<int>(t * 7919 % words); }
        upload(q, view<const int>(tokens_of), tokens_.view());
        q.record().wait_host(after(default_timeout()));
    }
    template <class W> void head(const cuda_queue& q, const W& w, std::size_t branch, std::size_t) {
        embed<<<static_cast<unsigned>(n_), threads, 0, q.stream()>>>(w[0].data(), w[1].data(), tokens_.data(),
                                                                     x_[branch].data(), s_.width);
    }
    template <class W> void block(const cuda_queue& q, std::size_t, const W& w, std::size_t branch, std::size_t) {
        const std::size_t d = s_.width;
        number* const x = x_[branch].data();
        normalize<<<static_cast<unsigned>(n_), threads, 0, q.stream()>>>(x, w[0].data(), w[1].data(), h_.data(), d);
        products_.multiply(h_.data(), w[2].data(), w[3].data(), work_.data(), n_, d, 3 * d, false, false);
        const std::size_t each = d / s_.heads;
        const auto part = [&](std::size_t k) {
            return sequence::token_view<const number, D>(
                view<const number, D>(work_.view().sub(k * d, 3 * n_ * d - k * d)), n_, s_.heads, each, 3 * d, each);
        };
        sequence::final_forward_block<number, D> call;
        call.query = part(0);
        call.key = part(1);
        call.value = part(2);
        call.seen.rule = sequence::mask::causal;
        call.scale = 1 / std::sqrt(static_cast<double>(each));
        call.out = {h_.view(), n_, s_.heads, each};
        call.log_sum_exp = {sums_.view(), n_, s_.heads, 1};
        attention_.forward(q, call);
        products_.multiply(h_.data(), w[4].data(), w[5].data(), x, n_, d, d, false, true);
        normalize<<<static_cast<unsigned>(n_), threads, 0, q.stream()>>>(x, w[6].data(), w[7].data(), h_.data(), d);
        products_.multiply(h_.data(), w[8].data(), w[9].data(), work_.data(), n_, d, 4 * d, true, false);
        products_.multiply(work_.data(), w[10].data(), w[11].data(), x, n_, 4 * d, d, false, true);
    }
    template <class W>
    void tail(const cuda_queue& q, const W& w, std::size_t branch, std::size_t, view<double, D> loss) {
        normalize<<<static_cast<unsigned>(n_), threads, 0, q.stream()>>>(x_[branch].data(), w[0].data(), w[1].data(),
                                                                         h_.data(), s_.width);
        for (std::size_t t = 0; t < n_;
             t += logits_of) {  // not of all tokens at once: they would be the largest buffer
            const std::size_t count = std::min(logits_of, n_ - t);
            products_.multiply(h_.data() + t * s_.width, w[2].data(), nullptr, work_.data(), count, s_.width, words,
                               false, false);
            cross_entropy<<<static_cast<unsigned>(count), threads, 0, q.stream()>>>(work_.data(), tokens_.data() + t,
                                                                                    losses_.data() + t);
        }
        mean_of<<<1, 1, 0, q.stream()>>>(losses_.data(), n_, loss.data());
        tutti::detail::check_cuda(cudaGetLastError(), "tail");
    }
    // The products of a block alone.
    void multiply_block(const number* w) {
        const std::size_t d = s_.width;
        products_.multiply(h_.data(), w, nullptr, work_.data(), n_, d, 3 * d, false, false);
        products_.multiply(h_.data(), w, nullptr, x_[0].data(), n_, d, d, false, false);
        products_.multiply(h_.data(), w, nullptr, work_.data(), n_, d, 4 * d, false, false);
        products_.multiply(work_.data(), w, nullptr, x_[0].data(), n_, 4 * d, d, false, false);
    }
    void multiply_tail(const number* w) {
        for (std::size_t t = 0; t < n_; t += logits_of) {
            products_.multiply(h_.data() + t * s_.width, w, nullptr, work_.data(), std::min(logits_of, n_ - t),
                               s_.width, words, false, false);
        }
    }
};

// The same weights for every module, in a pattern, by several threads.
template <class T> void randomize(view<T, pinned_memory> image) {
    static const std::vector<T> pattern = [] {
        std::vector<T> p(std::size_t{1} << 20);
        for (std::size_t i = 0; i < p.size(); ++i) {
            p[i] = static_cast<T>(static_cast<float>(number(0.02f * random_stream{.seed = 1}.normal(i))));
        }
        return p;
    }();
    constexpr std::size_t threads = 8;
    std::vector<std::thread> all;
    for (std::size_t t = 0; t < threads; ++t) {
        all.emplace_back([=] {
            for (std::size_t at = t * pattern.size(); at < image.size(); at += threads * pattern.size()) {
                std::memcpy(image.data() + at, pattern.data(), std::min(pattern.size(), image.size() - at) * sizeof(T));
            }
        });
    }
    for (std::thread& t : all) { t.join(); }
}

}  // namespace zeroth_bench
