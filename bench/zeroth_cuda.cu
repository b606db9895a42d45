// Weights moved along random directions on one GPU: time, bandwidth, and the share of the bandwidth of a copy.
#include <cstddef>    // sizes
#include <exception>  // errors
#include <iostream>   // errors
#include <string>     // names
#include <vector>     // sizes

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tutti/core/buffer.hpp>
#include <tutti/core/philox.cuh>
#include <tutti/zeroth/perturbation.cuh>

#include "support/kernel_table.hpp"

namespace {

using namespace tutti;
using namespace tutti::zeroth;
using D = device_memory;

template <class T> void rows_of(bench::kernel_table& t, std::size_t n) {
    const cuda_queue& q = t.queue();
    const buffer<T, cuda_queue> w(q, n), out(q, n);
    fill_normal(q, w.view(), random_stream{1, 2, 3}, 0.02f);
    const std::string type(tutti::name_of(dtype_of<T>));
    // One tensor, and those of a small model.
    const std::vector<tensor_slice> whole{{.count = n}};
    std::vector<tensor_slice> model;
    for (std::uint32_t k = 0; k < 148; ++k) {
        const std::size_t each = n / 148 / 8 * 8;
        model.push_back({.tensor = k, .offset = k * each, .count = each});
    }
    for (const distribution kind : {distribution::normal, distribution::rademacher}) {
        const std::string what(zeroth::name_of(kind));
        const direction z{.seed = 1, .step = 2, .kind = kind};
        const auto scale = static_cast<master_t<T>>(1e-3);
        const std::vector<pending_update> one{{z, 0.5, 1e-6, 0.1}};
        std::vector<pending_update> four;
        for (std::uint64_t s = 0; s < 4; ++s) { four.push_back({{.seed = 1, .step = s, .kind = kind}, 0.5, 1e-6, 0}); }
        t.row("perturb " + what, type, n, perturb_operation<T, D>{w.view(), out.view(), whole, z, scale});
        t.row("perturb " + what + ", 148", type, n, perturb_operation<T, D>{w.view(), out.view(), model, z, scale});
        t.row("update " + what, type, n, update_operation<T, D>{w.view(), {}, whole, one, z, scale});
        t.row("update, perturb " + what, type, n, update_operation<T, D>{w.view(), out.view(), whole, one, z, scale});
        t.row("4 updates, perturb " + what, type, n,
              update_operation<T, D>{w.view(), out.view(), whole, four, z, scale});
    }
}

}  // namespace

int main(int argc, char** argv) try {
    bench::kernel_options options;
    CLI::App app("Perturbed copies and updates against the copy bandwidth of the same run");
    options.add_to(app, 12);
    CLI11_PARSE(app, argc, argv);
    const nlohmann::ordered_json environment = bench::card_environment();
    bench::kernel_table t(options.samples, options.only);
    for (const std::size_t e : options.exponents) {
        const std::size_t n = std::size_t{1} << e;
        rows_of<float>(t, n);
        rows_of<float16>(t, n);
        rows_of<bfloat16>(t, n);
    }
    bench::write_report(options.json, {{"bench", "zeroth_cuda"},
                                       {"command", bench::command_line(argc, argv)},
                                       {"environment", environment},
                                       {"copy_gb_per_s", t.copy_bandwidth() * 1e-9},
                                       {"samples", options.samples},
                                       {"rows", t.rows()}});
} catch (const std::exception& e) {
    std::cerr << argv[0] << ": " << e.what() << '\n';
    return 2;
}
