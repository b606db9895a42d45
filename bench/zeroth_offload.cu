// Zeroth-order steps of models of OPT's shapes in float16 whose blocks stream through one GPU, against what the link
// and the matrix products take alone, measured in the same run: step time, tokens a second, memory.
#include <algorithm>  // max, min
#include <chrono>     // host times
#include <cmath>      // sqrt
#include <cstdio>     // flush
#include <cstring>    // memcpy
#include <exception>  // errors
#include <fstream>    // report
#include <iostream>   // errors
#include <map>        // products by shape
#include <memory>     // attention
#include <optional>   // pipelines
#include <string>     // names
#include <tuple>      // shapes
#include <vector>     // times

#include <cublasLt.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tutti/core/cuda_blas.hpp>
#include <tutti/core/philox.cuh>
#include <tutti/sequence/cuda_attention.cuh>
#include <tutti/zeroth/offload.hpp>
#include <tutti/zeroth/perturbation.cuh>

#include "support/kernel_table.hpp"
#include "support/statistics.hpp"

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
const std::vector<shape> shapes{{"opt-1.3b", 24, 2048, 32, 24},
                                {"opt-6.7b", 32, 4096, 32, 32},
                                {"opt-13b", 40, 5120, 40, 40},
                                {"opt-175b", 96, 12288, 96, 8}};
constexpr std::size_t words = 50272;
constexpr std::size_t positions = 2050;

// 12 d^2 + 13 d numbers.
std::vector<zeroth::tensor_shape> block_of(std::uint32_t first, std::size_t d) {
    const std::size_t counts[] = {d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d};
    std::vector<zeroth::tensor_shape> all;
    for (const std::size_t n : counts) { all.push_back({first++, n, n >= d * d}); }
    return all;
}
zeroth::model_shape model_of(const shape& s) {
    zeroth::model_shape m;
    m.head = {{0, words * s.width}, {1, positions * s.width}};
    for (std::size_t i = 0; i < s.blocks; ++i) {
        m.blocks.push_back(block_of(static_cast<std::uint32_t>(100 + 12 * i), s.width));
    }
    m.tail = {{2, s.width, false}, {3, s.width, false}, {4, words * s.width}};
    return m;
}

__device__ float sum_of_block(float v) {
    __shared__ float parts[32];
    for (int o = 16; o > 0; o /= 2) { v += __shfl_xor_sync(0xffffffffu, v, o); }
    __syncthreads();
    if (threadIdx.x % 32 == 0) { parts[threadIdx.x / 32] = v; }
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0;
    for (int o = 16; o > 0; o /= 2) { v += __shfl_xor_sync(0xffffffffu, v, o); }
    return v;
}
__global__ void embed(const number* table, const number* place, const int* tokens, number* x, std::size_t d) {
    const std::size_t t = blockIdx.x;
    for (std::size_t k = threadIdx.x; k < d; k += blockDim.x) {
        x[t * d + k] = number(static_cast<float>(table[static_cast<std::size_t>(tokens[t]) * d + k]) +
                              static_cast<float>(place[(t + 2) * d + k]));
    }
}
__global__ void normalize(const number* x, const number* gain, const number* bias, number* y, std::size_t d) {
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
__global__ void cross_entropy(const number* logits, const int* tokens, float* losses) {
    const std::size_t t = blockIdx.x;
    const number* const row = logits + t * words;
    float sum = 0;
    for (std::size_t k = threadIdx.x; k < words; k += blockDim.x) { sum += expf(static_cast<float>(row[k])); }
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) { losses[t] = logf(sum) - static_cast<float>(row[tokens[t + 1]]); }
}
__global__ void mean_of(const float* losses, std::size_t n, double* out) {
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
    array<number> h_, qkv_, wide_;
    array<float> out_, sums_, losses_;
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
        , qkv_(q, 3 * n_ * s.width)
        , wide_(q, std::max(4 * n_ * s.width, std::min(n_, logits_of) * words))
        , out_(q, n_ * s.width)
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
        products_.multiply(h_.data(), w[2].data(), w[3].data(), qkv_.data(), n_, d, 3 * d, false, false);
        const std::size_t each = d / s_.heads;
        const auto part = [&](std::size_t k) {
            return sequence::token_view<const number, D>(
                view<const number, D>(qkv_.view().sub(k * d, qkv_.size() - k * d)), n_, s_.heads, each, 3 * d, each);
        };
        sequence::forward_block<number, D> call;
        call.query = part(0);
        call.key = part(1);
        call.value = part(2);
        call.seen.rule = sequence::mask::causal;
        call.scale = 1 / std::sqrt(static_cast<double>(each));
        call.out = {out_.view(), n_, s_.heads, each};
        call.log_sum_exp = {sums_.view(), n_, s_.heads, 1};
        attention_.forward(q, call);
        copy(q, view<const float, D>(out_.view()), h_.view());
        products_.multiply(h_.data(), w[4].data(), w[5].data(), x, n_, d, d, false, true);
        normalize<<<static_cast<unsigned>(n_), threads, 0, q.stream()>>>(x, w[6].data(), w[7].data(), h_.data(), d);
        products_.multiply(h_.data(), w[8].data(), w[9].data(), wide_.data(), n_, d, 4 * d, true, false);
        products_.multiply(wide_.data(), w[10].data(), w[11].data(), x, n_, 4 * d, d, false, true);
    }
    template <class W>
    void tail(const cuda_queue& q, const W& w, std::size_t branch, std::size_t, view<double, D> loss) {
        normalize<<<static_cast<unsigned>(n_), threads, 0, q.stream()>>>(x_[branch].data(), w[0].data(), w[1].data(),
                                                                         h_.data(), s_.width);
        for (std::size_t t = 0; t < n_;
             t += logits_of) {  // not of all tokens at once: they would be the largest buffer
            const std::size_t count = std::min(logits_of, n_ - t);
            products_.multiply(h_.data() + t * s_.width, w[2].data(), nullptr, wide_.data(), count, s_.width, words,
                               false, false);
            cross_entropy<<<static_cast<unsigned>(count), threads, 0, q.stream()>>>(wide_.data(), tokens_.data() + t,
                                                                                    losses_.data() + t);
        }
        mean_of<<<1, 1, 0, q.stream()>>>(losses_.data(), n_, loss.data());
        tutti::detail::check_cuda(cudaGetLastError(), "tail");
    }
    // The products of a block alone.
    void multiply_block(const number* w) {
        const std::size_t d = s_.width;
        products_.multiply(h_.data(), w, nullptr, qkv_.data(), n_, d, 3 * d, false, false);
        products_.multiply(h_.data(), w, nullptr, x_[0].data(), n_, d, d, false, false);
        products_.multiply(h_.data(), w, nullptr, wide_.data(), n_, d, 4 * d, false, false);
        products_.multiply(wide_.data(), w, nullptr, x_[0].data(), n_, 4 * d, d, false, false);
    }
    void multiply_tail(const number* w) {
        for (std::size_t t = 0; t < n_; t += logits_of) {
            products_.multiply(h_.data() + t * s_.width, w, nullptr, wide_.data(), std::min(logits_of, n_ - t),
                               s_.width, words, false, false);
        }
    }
};

double now() { return seconds(clock_type::now().time_since_epoch()); }
void settle(const cuda_queue& q) { q.record().wait_host(after(default_timeout())); }
// Seconds of each of `count` calls, the host waiting once.
template <class Enqueue> double each_of(const cuda_queue& q, int count, Enqueue enqueue) {
    enqueue();
    settle(q);
    const double begin = now();
    for (int i = 0; i < count; ++i) { enqueue(); }
    settle(q);
    return (now() - begin) / count;
}

// What the parts of a step take alone, a block.
struct alone {
    double up, duplex, products, compute, tail;
};

template <class Store> void randomize(Store& store) {
    std::vector<number> pattern(std::size_t{1} << 20);
    for (std::size_t i = 0; i < pattern.size(); ++i) {
        pattern[i] = number(0.02f * random_stream{.seed = 1}.normal(i));
    }
    for (std::size_t m = 0; m < store.layout().modules(); ++m) {
        const auto image = store.image(m);
        for (std::size_t at = 0; at < image.size(); at += pattern.size()) {
            std::memcpy(image.data() + at, pattern.data(),
                        std::min(pattern.size(), image.size() - at) * sizeof(number));
        }
    }
}

alone measure_alone(const shape& s, std::size_t tokens, zeroth::distribution kind) {
    const cuda_queue q(0);
    const zeroth::model_layout layout(model_of({s.name, 1, s.width, s.heads, 1}), sizeof(number));
    const std::size_t n = layout.size(1);
    const array<number> a(q, n), b(q, n), scratch(q, std::max(n, words * s.width));
    fill_normal(q, a.view(), random_stream{.seed = 2}, 0.02f);
    fill_normal(q, b.view(), random_stream{.seed = 3}, 0.02f);
    fill_normal(q, scratch.view(), random_stream{.seed = 4}, 0.02f);
    opt_model model(q, s, tokens, 2);
    alone t{};
    {
        const pinned_queue memory;
        const buffer<number, pinned_queue> from(memory, n), to(memory, n);
        std::fill_n(from.data(), n, number{});
        const cuda_queue other = q.sibling();
        settle(q);
        const auto up = [&] { upload(q, view<const number, pinned_memory>(from.view()), a.view()); };
        t.up = each_of(q, 8, up);
        t.duplex = each_of(q, 8, [&] {
            up();
            download(other, b.view(), to.view());
        });
        settle(other);
        fill_normal(q, a.view(), random_stream{.seed = 2}, 0.02f);
    }
    t.products = 2 * each_of(q, 10, [&] { model.multiply_block(a.data()); });
    t.tail = 2 * each_of(q, 10, [&] { model.multiply_tail(scratch.data()); });
    std::vector<view<const number, D>> weights;
    for (const auto& p : layout.places(1)) { weights.push_back(scratch.view().sub(p.copied, p.at.count)); }
    const std::vector<zeroth::pending_update> updates{{{.seed = 1, .step = 1, .kind = kind}, 0.1, 1e-7, 0}};
    t.compute = each_of(q, 10, [&] {
        const zeroth::direction z{.seed = 1, .step = 2, .kind = kind};
        zeroth::update_then_perturb(q, a.view(), scratch.view().sub(0, n), layout.slices(1), updates, z, 1e-3);
        model.block(q, 0, weights, 0, 0);
        zeroth::perturb(q, a.view(), scratch.view().sub(0, n), layout.slices(1), z, -1e-3);
        model.block(q, 0, weights, 1, 0);
    });
    return t;
}

}  // namespace zeroth_bench

int main(int argc, char** argv) try {
    using namespace zeroth_bench;
    std::string json;
    std::vector<std::string> names{"opt-1.3b", "opt-6.7b", "opt-13b", "opt-175b"};
    std::vector<std::size_t> slot_count{2, 3}, every{1, 8};
    std::vector<std::string> kinds{"normal", "rademacher"};
    std::size_t tokens = 2048;
    int steps = 6;
    CLI::App app("Zeroth-order steps with offloaded blocks against the link and the products alone, on one GPU");
    app.add_option("-m,--models", names, "opt-1.3b opt-6.7b opt-13b opt-175b (8 of its 96 blocks)")
        ->capture_default_str();
    app.add_option("--slots", slot_count, "blocks on the device")->capture_default_str();
    app.add_option("--write-back-every", every, "steps")->capture_default_str();
    app.add_option("--directions", kinds, "normal, rademacher")->check(CLI::IsMember({"normal", "rademacher"}));
    app.add_option("--tokens", tokens, "of the one sample")->check(CLI::Range(128, 2048))->capture_default_str();
    app.add_option("--steps", steps, "timed, after two")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("-J,--json", json, "write the report here, besides printing it");
    CLI11_PARSE(app, argc, argv);
    const nlohmann::ordered_json environment = bench::card_environment();
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    fmt::print("# {:<9} {:>6} {:>10} {:>5} {:>5} {:>9} {:>9} {:>7} {:>9} {:>8} {:>8}\n", "model", "blocks", "z",
               "slots", "every", "step ms", "bound ms", "ratio", "tokens/s", "overlap", "GiB");
    for (const shape& s : shapes) {
        if (std::find(names.begin(), names.end(), s.name) == names.end()) { continue; }
        zeroth::pinned_store<number, cuda_queue> store(zeroth::model_layout(model_of(s), sizeof(number)));
        randomize(store);
        for (const std::string& kind_name : kinds) {
            const auto kind = kind_name == "normal" ? zeroth::distribution::normal : zeroth::distribution::rademacher;
            const alone t = measure_alone(s, tokens, kind);
            for (const std::size_t k : slot_count) {
                for (const std::size_t p : every) {
                    const cuda_queue q(0);
                    opt_model model(q, s, tokens, 2);
                    zeroth::offload<cuda_queue, number, opt_model> pipeline(q, model, store,
                                                                            {.slot_count = k, .write_back_every = p});
                    std::vector<double> times;
                    std::vector<zeroth::loss_value> losses(2);
                    for (int step = 0; step < steps + 2; ++step) {
                        const zeroth::direction z{.seed = 42, .step = static_cast<std::uint64_t>(step), .kind = kind};
                        const zeroth::probe probes[] = {{z, 1e-3}, {z, -1e-3}};
                        const double begin = now();
                        pipeline.evaluate(probes, 0, losses);
                        const double g = (losses[0].mean - losses[1].mean) / 2e-3;
                        const zeroth::pending_update u{z, g, 1e-7, 0};
                        pipeline.update({&u, 1});
                        if (step >= 2) { times.push_back(now() - begin); }
                    }
                    double total = 0;  // of whole periods where there are: steps that write back are dearer
                    for (const double x : times) { total += x; }
                    const double mean = total / static_cast<double>(times.size());
                    const auto layers = static_cast<double>(s.blocks);
                    const double down = t.duplex / static_cast<double>(p) + t.up * (1 - 1 / static_cast<double>(p));
                    const double bound = layers * std::max(down, t.products) + t.tail;
                    const double busy = layers * std::max(down, t.compute);
                    const double rate = static_cast<double>(tokens) / mean;
                    const double gib = static_cast<double>(pipeline.peak_device_bytes()) / (1 << 30);
                    fmt::print(
                        "{:<11} {:>6} {:>10} {:>5} {:>5} {:>9.2f} {:>9.2f} {:>7.3f} {:>9.0f} {:>8.3f} {:>8.2f}\n",
                        s.name, s.blocks, kind_name, k, p, mean * 1e3, bound * 1e3, mean / bound, rate, busy / mean,
                        gib);
                    std::fflush(stdout);
                    rows.push_back({{"model", s.name},
                                    {"blocks", s.blocks},
                                    {"of_blocks", s.layers},
                                    {"directions", kind_name},
                                    {"slots", k},
                                    {"write_back_every", p},
                                    {"step_ms", mean * 1e3},
                                    {"bound_ms", bound * 1e3},
                                    {"ratio", mean / bound},
                                    {"tokens_per_s", rate},
                                    {"overlap_efficiency", busy / mean},
                                    {"peak_device_gib", gib},
                                    {"loss", losses[0].mean},
                                    {"block_bytes", store.wire_bytes(1)},
                                    {"block_upload_ms", t.up * 1e3},
                                    {"block_duplex_ms", t.duplex * 1e3},
                                    {"block_products_ms", t.products * 1e3},
                                    {"block_compute_ms", t.compute * 1e3}});
                }
            }
        }
    }
    bench::write_report(json, {{"bench", "zeroth_offload"},
                               {"command", bench::command_line(argc, argv)},
                               {"environment", environment},
                               {"tokens", tokens},
                               {"steps", steps},
                               {"rows", rows}});
} catch (const std::exception& e) {
    std::cerr << argv[0] << ": " << e.what() << '\n';
    return 2;
}
