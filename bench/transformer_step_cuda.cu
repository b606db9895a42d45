// One training step of GPT-2 on one GPU in bfloat16: forward, backward, clipping, AdamW, by the trainer's own model and
// strategy. transformer_step_cuda_torch.py times the same step in PyTorch; alternate the two on one card.
#include <chrono>     // times
#include <cstdint>    // tokens
#include <iostream>   // errors
#include <stdexcept>  // a loss that is not finite
#include <string>     // report
#include <utility>    // move
#include <vector>     // samples

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tutti/comm/self.hpp>
#include <tutti/core/philox.hpp>
#include <tutti/optimize/adamw.hpp>
#include <tutti/strategy/data_parallel.cuh>

#include "cuda/math.cuh"
#include "device.hpp"
#include "support/environment.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

using namespace transformer;
using clock_type = std::chrono::steady_clock;

struct sizes {
    configuration model{.vocabulary = 50257, .context = 1024, .layers = 12, .heads = 12, .width = 768};
    int batch = 64;
    int micro_batch = 0;
    int recompute = 0;
};

/// A step at a time, of tokens drawn at random.
template <class T> class trainer {
    sizes o_;
    tutti::cuda_queue queue_{0};
    model<gpu::cuda_math<T>> net_;
    tutti::strategy::local<tutti::optimize::adamw, T, tutti::cuda_queue> strategy_;
    std::vector<tokens::value_type> text_;
    std::vector<tokens::value_type> in_, targets_;
    std::uint64_t drawn_ = 0;

    void draw(int count) {
        const auto length = static_cast<std::size_t>(o_.model.context);
        in_.clear();
        targets_.clear();
        for (int i = 0; i < count; ++i) {
            const auto first =
                text_.begin() +
                static_cast<std::ptrdiff_t>(tutti::random_stream{.seed = 2}.below(drawn_++, text_.size() - length - 1));
            in_.insert(in_.end(), first, first + static_cast<std::ptrdiff_t>(length));
            targets_.insert(targets_.end(), first + 1, first + static_cast<std::ptrdiff_t>(length) + 1);
        }
    }

public:
    explicit trainer(const sizes& o)
        : o_(o)
        , net_(o.model, o.micro_batch, 1, gpu::cuda_math<T>(queue_), static_cast<recompute>(o.recompute))
        , strategy_(tutti::comm::self<tutti::cuda_queue>(queue_),
                    {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1})
        , text_(std::size_t{1} << 22) {
        for (std::size_t i = 0; i < text_.size(); ++i) {
            text_[i] = static_cast<tokens::value_type>(
                tutti::random_stream{.seed = 1}.below(i, static_cast<std::uint64_t>(o.model.vocabulary)));
        }
        strategy_.attach(net_.parameters());
    }
    /// Returns the mean loss.
    double operator()() {
        const int micro_batches = o_.batch / o_.micro_batch;
        const double tokens_in_step = static_cast<double>(o_.batch) * o_.model.context;
        for (int m = 0; m < micro_batches; ++m) {
            strategy_.begin({m, micro_batches});
            draw(o_.micro_batch);
            net_.forward_training(strategy_, in_, targets_, o_.model.context, static_cast<float>(1 / tokens_in_step));
            net_.backward(strategy_);
        }
        const auto stepped = strategy_.step({.learning_rate = 6e-4, .clip_norm = 1});
        const double loss = net_.take_loss() / tokens_in_step;
        if (stepped.skipped || !(loss > 0)) { throw std::runtime_error("the loss or its gradient is not finite"); }
        return loss;
    }
    void finish() { strategy_.flush(); }
    [[nodiscard]] std::size_t parameters() const { return net_.parameter_count(); }
    [[nodiscard]] std::size_t peak_bytes() const { return queue_.account().peak(); }
};

}  // namespace

int main(int argc, char** argv) try {
    sizes o;
    int steps = 50, warmup = 10;
    std::string json;
    CLI::App app("One training step of GPT-2 on one GPU, bfloat16");
    app.add_option("--steps", steps, "timed steps")->check(CLI::Range(1, 1'000'000))->capture_default_str();
    app.add_option("--warmup", warmup, "steps before them")->check(CLI::Range(1, 1'000'000))->capture_default_str();
    app.add_option("--batch", o.batch, "sequences a step")->check(CLI::Range(1, 100'000))->capture_default_str();
    app.add_option("--micro-batch", o.micro_batch, "sequences at a time; default: all")->check(CLI::Range(1, 100'000));
    app.add_option("--vocabulary", o.model.vocabulary, "tokens there are")
        ->check(CLI::Range(2, 65'536))
        ->capture_default_str();
    app.add_option("--context", o.model.context, "tokens a sequence")
        ->check(CLI::Range(1, 65'536))
        ->capture_default_str();
    app.add_option("--layers", o.model.layers, "layers")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--heads", o.model.heads, "heads")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--width", o.model.width, "width")->check(CLI::Range(1, 8192))->capture_default_str();
    app.add_option("--recompute", o.recompute, "0 nothing, 1 GELU, 2 also norms")
        ->check(CLI::Range(0, 2))
        ->capture_default_str();
    app.add_option("-J,--json", json, "write the report here, besides printing it");
    CLI11_PARSE(app, argc, argv);
    if (o.micro_batch == 0) { o.micro_batch = o.batch; }
    if (o.batch % o.micro_batch != 0 || o.model.width % o.model.heads != 0) {
        throw std::runtime_error("--micro-batch must divide --batch, and --heads must divide --width");
    }
    cudaDeviceProp card{};
    tutti::detail::check_cuda(cudaGetDeviceProperties(&card, 0), "cudaGetDeviceProperties");

    nlohmann::ordered_json environment = bench::environment();
    trainer<tutti::bfloat16> train(o);
    std::vector<double> seconds;
    double first_loss = 0, loss = 0;
    auto before = clock_type::now();
    for (int i = -warmup; i < steps; ++i) {
        loss = train();
        const auto now = clock_type::now();
        if (i == -warmup) { first_loss = loss; }
        if (i >= 0) { seconds.push_back(std::chrono::duration<double>(now - before).count()); }
        before = now;
    }
    train.finish();
    const double tokens_per_step = static_cast<double>(o.batch) * o.model.context;
    const double step = bench::median(seconds);
    const double flops = flops_per_token(o.model, train.parameters()) * tokens_per_step / step;
    const double peak = datasheet_flops(card.name);
    std::string command = argv[0];
    command.erase(0, command.find_last_of('/') + 1);
    for (int i = 1; i < argc; ++i) { command += fmt::format(" {}", argv[i]); }
    nlohmann::ordered_json utilization;  // null where there is no peak to compare with
    if (peak > 0) { utilization = flops / peak; }
    const nlohmann::ordered_json report{
        {"bench", "transformer_step_cuda"},
        {"command", command},
        {"device", card.name},
        {"attention", TRANSFORMER_WITH_CUDNN ? "cudnn" : "own"},
        {"configuration",
         {{"vocabulary", o.model.vocabulary},
          {"layers", o.model.layers},
          {"heads", o.model.heads},
          {"width", o.model.width},
          {"context", o.model.context},
          {"batch", o.batch},
          {"micro_batch", o.micro_batch},
          {"recompute", o.recompute},
          {"precision", "bf16"}}},
        {"parameters", train.parameters()},
        {"warmup", warmup},
        {"steps", steps},
        {"step_milliseconds", {{"median", 1e3 * step}, {"min", 1e3 * bench::summarize(seconds).min}}},
        {"tokens_per_second", tokens_per_step / step},
        {"model_flops_per_second", flops},
        {"model_flop_utilization", utilization},
        {"peak_bytes", train.peak_bytes()},
        {"loss", {{"first", first_loss}, {"last", loss}}},
        {"environment", environment},
    };
    bench::print_report(report, json);
    fmt::print(stderr, "{}: {:.1f} ms a step, {:.0f} tokens/s, {}, {:.1f} GiB\n", card.name, 1e3 * step,
               tokens_per_step / step, utilization_text(flops, peak),
               static_cast<double>(train.peak_bytes()) / (1 << 30));
} catch (const std::exception& e) {
    std::cerr << argv[0] << ": " << e.what() << '\n';
    return 2;
}
