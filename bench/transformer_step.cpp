// The trainer's step at nanoGPT's CPU configuration on one core: tokens/s, model FLOP rate, its share of sgemm's.
// Needs a CBLAS and the trainer's headers. bench/transformer_step_torch.py is the same step in PyTorch.
//
// Model FLOPs of a token are counted as nanoGPT and PaLM do (Chowdhery et al. 2022, appendix B): 6 N + 12 L T C, with N
// the weights that enter products (the tied classifier once, the position table not) and full attention, although
// causal attention needs half of it. The sgemm (512 cubed) alternates with the steps, so that both see one machine.
#include <chrono>    // times
#include <cstdint>   // tokens
#include <iostream>  // errors
#include <string>    // report
#include <vector>    // samples

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tutti/strategy/data_parallel.hpp>

#include "data.hpp"
#include "host_math.hpp"
#include "options.hpp"
#include "support/environment.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

using namespace transformer;
using element = float;

double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// One optimizer step of one rank: forward, backward, clipping, AdamW.
class step {
    options o_;
    corpus text_;
    host_model<element> net_;
    tutti::strategy::local<tutti::optimize::adamw, element> strategy_;
    batch batch_;
    int done_ = 0;

    static std::vector<std::uint8_t> noise() {
        std::vector<std::uint8_t> text(1 << 20);
        for (std::size_t i = 0; i < text.size(); ++i) {
            text[i] = static_cast<std::uint8_t>(tutti::random_stream{.seed = 1}.word(i));
        }
        return text;
    }

public:
    explicit step(const options& o)
        : o_(o)
        , text_(noise(), o.model.context)
        , net_(o.model, o.micro_batch, o.seed)
        , strategy_(tutti::comm::self<tutti::host_queue>(), o.optimizer()) {
        strategy_.attach(net_.parameters());
    }
    void operator()() {
        const int micro_batches = o_.batch / o_.micro_batch;
        const auto scale = static_cast<element>(1.0 / (o_.batch * o_.model.context));
        for (int m = 0; m < micro_batches; ++m) {
            strategy_.begin({m, micro_batches});
            const auto first = static_cast<std::uint64_t>(done_) * static_cast<std::uint64_t>(o_.batch) +
                               static_cast<std::uint64_t>(m * o_.micro_batch);
            draw(batch_, text_.training(), o_.seed, first, static_cast<std::size_t>(o_.micro_batch), o_.model.context);
            net_.forward_training(strategy_, batch_.in, batch_.targets, o_.model.context, scale);
            net_.backward(strategy_);
        }
        (void)strategy_.step({.learning_rate = o_.learning_rate, .clip_norm = o_.clip_norm});
        (void)net_.take_loss();
        ++done_;
    }
};

double model_flops_per_token(const configuration& c) {
    const double width = c.width, layers = c.layers;
    const double weights = layers * 12 * width * width + c.vocabulary * width;
    return 6 * weights + 12 * layers * c.context * width;
}

}  // namespace

int main(int argc, char** argv) try {
    options o;
    o.ranks = 1;
    int steps = 200;
    std::string json;
    CLI::App app("One training step of the transformer on one core, against sgemm");
    app.add_option("--steps", steps, "timed steps")->check(CLI::Range(1, 1'000'000))->capture_default_str();
    app.add_option("--batch", o.batch, "sequences a step")->check(CLI::Range(1, 100'000))->capture_default_str();
    app.add_option("--micro-batch", o.micro_batch, "sequences at a time; default: the trainer's")
        ->check(CLI::Range(1, 100'000));
    app.add_option("--context", o.model.context, "tokens a sequence")
        ->check(CLI::Range(1, 65'536))
        ->capture_default_str();
    app.add_option("--layers", o.model.layers, "layers")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--heads", o.model.heads, "heads")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--width", o.model.width, "width")->check(CLI::Range(1, 65'536))->capture_default_str();
    app.add_option("-J,--json", json, "write the report here, besides printing it");
    CLI11_PARSE(app, argc, argv);
    complete(o, true, 0);
    one_thread_per_rank();

    nlohmann::ordered_json environment = bench::environment();
    step one(o);
    constexpr int n = 512;
    std::vector<element> a(n * n, 0.5f), b(n * n, 0.25f), c(n * n);
    std::vector<double> step_times, product_times;
    for (int i = -10; i < steps; ++i) {  // ten to warm up
        const auto begin = std::chrono::steady_clock::now();
        one();
        const double step_time = seconds_since(begin);
        const auto middle = std::chrono::steady_clock::now();
        multiply<element>(matrix<const element>(a.data(), n, n), matrix<const element>(b.data(), n, n),
                          matrix<element>(c.data(), n, n));
        const double product_time = seconds_since(middle);
        if (i < 0) { continue; }
        step_times.push_back(step_time);
        product_times.push_back(product_time);
    }
    const double step_time = bench::median(step_times);
    const double tokens_per_step = static_cast<double>(o.batch) * o.model.context;
    const double model_rate = model_flops_per_token(o.model) * tokens_per_step / step_time;
    const double product_rate = 2.0 * n * n * n / bench::median(product_times);
    std::string command = argv[0];
    command.erase(0, command.find_last_of('/') + 1);
    for (int i = 1; i < argc; ++i) { command += fmt::format(" {}", argv[i]); }
    const nlohmann::ordered_json report{
        {"bench", "transformer_step"},
        {"command", command},
        {"configuration",
         {{"layers", o.model.layers},
          {"heads", o.model.heads},
          {"width", o.model.width},
          {"context", o.model.context},
          {"batch", o.batch},
          {"micro_batch", o.micro_batch},
          {"precision", "float"}}},
        {"steps", steps},
        {"step_milliseconds", {{"median", 1e3 * step_time}, {"min", 1e3 * bench::summarize(step_times).min}}},
        {"tokens_per_second", tokens_per_step / step_time},
        {"model_flops_per_token", model_flops_per_token(o.model)},
        {"model_gflops", model_rate / 1e9},
        {"sgemm_512_gflops", product_rate / 1e9},
        {"share_of_sgemm", model_rate / product_rate},
        {"environment", environment},
    };
    bench::print_report(report, json);
} catch (const std::exception& e) {
    std::cerr << argv[0] << ": " << e.what() << '\n';
    return 2;
}
