// Every operation that has a kernel, on one GPU: time, bandwidth, and the share of the bandwidth of a copy that was
// measured in the same run. Then what the host pays for an event and for storage. Sizes that fit in the card's cache
// may beat the copy, which does not.
#include <algorithm>    // max
#include <chrono>       // host times
#include <cstdio>       // flush
#include <exception>    // errors
#include <fstream>      // report
#include <iostream>     // errors
#include <string>       // names
#include <string_view>  // names
#include <vector>       // samples

#include <cuda_runtime_api.h>  // events with times, properties

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tutti/compress/buckets.cuh>
#include <tutti/compress/float8.hpp>
#include <tutti/compress/natural.hpp>
#include <tutti/compress/quantize.hpp>
#include <tutti/compress/random_k.cuh>
#include <tutti/compress/sign.hpp>
#include <tutti/compress/ternary.hpp>
#include <tutti/compress/threshold.cuh>
#include <tutti/compress/top_k.cuh>
#include <tutti/core/buffer.hpp>
#include <tutti/core/philox.cuh>
#include <tutti/core/stochastic_rounding.hpp>
#include <tutti/optimize/adamw.hpp>
#include <tutti/optimize/clip.cuh>
#include <tutti/optimize/sgd.hpp>
#include <tutti/strategy/data_parallel.cuh>

#include "support/kernel_table.hpp"
#include "support/statistics.hpp"

namespace {

using namespace tutti;
using D = device_memory;
template <class T> using array = buffer<T, cuda_queue>;

template <class T> array<T> noise(const cuda_queue& q, std::size_t n, std::uint32_t stream) {
    array<T> a(q, n);
    fill_normal(q, a.view(), random_stream{.seed = 1, .stream = stream}, 0.02f);
    return a;
}

template <class T> void rows_of(bench::kernel_table& t, std::size_t n) {
    using real = master_t<T>;
    const cuda_queue& q = t.queue();
    const std::string type(name_of(dtype_of<T>));
    const std::string both = fmt::format("{} and {}", type, name_of(dtype_of<real>));
    {
        const array<T> a = noise<T>(q, n, 1), b = noise<T>(q, n, 2);
        const array<double> sums(q, optimize::norm_blocks(n));
        t.row("fill", type, n, fill_operation<T, D>{b.view(), T(1.5f)});
        t.row("scale", type, n, scale_operation<T, D>{a.view(), b.view(), real(1.1)});
        t.row("add_scaled", type, n, add_scaled_operation<T, D>{a.view(), b.view(), real(1e-3)});
        t.row("fill_normal", type, n, fill_normal_operation<T, D>{b.view(), random_stream{1, 2, 3}, 0, 0.02f});
        t.row("square_sums", type, n, optimize::square_sums_operation<T, D>{a.view(), sums.view()});
        if constexpr (std::same_as<T, double>) {
            t.row("ordered_sum", type, sums.size(),
                  optimize::ordered_sum_operation<D>{sums.view(), b.view().sub(0, 1)});
        }
        if constexpr (std::same_as<T, float>) {
            const array<std::uint64_t> hash(q, 1);
            t.row("hash", type, n, hash_operation<D>{as_bytes(view<const float, D>(a.view())), hash.view()});
        }
        if constexpr (half_element<T>) {
            const array<real> wide = noise<real>(q, n, 3);
            t.row("cast", both + " to it", n, copy_operation<T, real, D>{a.view(), wide.view()});
            t.row("cast", fmt::format("{} to {}", name_of(dtype_of<real>), type), n,
                  copy_operation<real, T, D>{wide.view(), b.view()});
            t.row("stochastic_copy", fmt::format("{} to {}", name_of(dtype_of<real>), type), n,
                  stochastic_copy_operation<T, D>{wide.view(), b.view(), random_stream{1, 2, 3}, 0});
        }
    }
    const array<real> x = noise<real>(q, n, 1), m = noise<real>(q, n, 2), v(q, n);
    const array<T> g = noise<T>(q, n, 4);
    fill(q, v.view(), real(1e-4));
    using adam = optimize::adamw_operation<T, D>;
    const adam adamw{x.view(),  g.view(),    m.view(),    v.view(),   real(0.7), real(0.9999), real(0.9),
                     real(0.1), real(0.999), real(0.001), real(1e-4), real(1.2), real(1e-8)};
    t.row("adamw", both, n, adamw);
    if constexpr (half_element<T>) {
        const array<T> out(q, n);
        using rounding = copy_operation<real, T, D>;
        t.row("adamw, published", both, n,
              optimize::publishing_operation<adam, rounding>{adamw, {x.view(), out.view()}});
        using chance = stochastic_copy_operation<T, D>;
        t.row("adamw, stochastic", both, n,
              optimize::publishing_operation<adam, chance>{adamw, {x.view(), out.view(), random_stream{1, 2, 3}, 0}});
    }
    using sgd = optimize::sgd_operation<T, D, optimize::momentum_kind::classic>;
    t.row("sgd", both, n, sgd{x.view(), g.view(), m.view(), real(0.7), real(0.01), real(0.9), real(1e-3)});
}

// Sparsifiers at 1 %: of one tensor, of one with a residual, and of the tensors of a model.
template <class T, class C> void sparsifier_rows(bench::kernel_table& t, std::size_t n) {
    using compress::segment;
    namespace sparse = compress::detail;
    const cuda_queue& q = t.queue();
    const std::string type(name_of(dtype_of<T>)), name(C::name);
    const array<T> x = noise<T>(q, n, 1), out(q, n);
    const array<float> residual(q, n);
    const std::vector<segment> whole{{0, 100, 0, 0, n, 1}};
    std::vector<segment> model;
    for (std::uint32_t i = 0; i < 148; ++i) { model.push_back({i, 100, n / 148 * i, 0, n / 148, 1}); }
    const auto row = [&](const std::string& what, compress::layout all, bool feedback) {
        const array<std::byte> wire(q, sparse::wire_bytes(C{}, all));
        fill(q, residual.view(), 0.0f);
        t.row(name + what, type, n,
              sparse::sparse_encode_operation<C, T, D>{
                  C{}, all, x.view(), feedback ? residual.view() : view<float, D>{}, wire.view(), {1, 2, 3}});
        if (feedback) { return; }
        t.row(name + ", decode", type, n,
              sparse::sparse_decode_operation<C, T, D>{C{}, all, wire.view(), out.view(), 1.0f});
        t.row(name + ", decode_add", type, n,
              sparse::sparse_add_operation<C, D>{C{}, all, wire.view(), 1, residual.view()});
    };
    row("", whole, false);
    row(", residual", whole, true);
    row(", 148 tensors", model, true);
}
template <class T> void random_rows(bench::kernel_table& t, std::size_t n) {
    using compress::random_k;
    const cuda_queue& q = t.queue();
    const std::string type(name_of(dtype_of<T>));
    const array<T> x = noise<T>(q, n, 1);
    const array<float> residual = noise<float>(q, n, 2), wire(q, n / 100);
    const std::vector<compress::segment> all{{0, 100, 0, 0, n, 1}};
    t.row("random_k", type, n,
          compress::detail::random_gather_operation<random_k, T, D>{
              random_k{}, all, x.view(), residual.view(), wire.view(), {1, 2, 3}});
    t.row("random_k, finish", type, n,
          compress::detail::random_scatter_operation<random_k, T, D>{
              random_k{}, all, wire.view(), residual.view(), x.view(), {1, 2, 3}, 8});
}

// Encoding without and with a residual, decoding, and adding one decoded wire; of one tensor.
template <class T, class X>
void rows_of_scheme(bench::kernel_table& t, const std::string& name, const X& x, int level, std::size_t n) {
    const cuda_queue& q = t.queue();
    const std::string type(name_of(dtype_of<T>));
    const compress::segment s{.tensor = 1, .level = level, .rows = n};
    const compress::layout all(&s, 1);
    const array<T> g = noise<T>(q, n, 1), out(q, n);
    const array<float> residual = noise<float>(q, n, 2);
    const array<std::byte> wire(q, x.wire_bytes(s));
    const compress::draw_key key{1, 2, 3};
    using encode = compress::encode_buckets<X, T, D>;
    using decode = compress::decode_buckets<X, T, D>;
    using add = compress::add_buckets<X, D>;
    t.row(name + " + residual", type, n, encode{x, all, g.view(), residual.view(), wire.view(), key});
    t.row(name, type, n, encode{x, all, g.view(), {}, wire.view(), key});
    t.row(name + " decode", type, n, decode{x, all, wire.view(), out.view(), 1});
    if constexpr (std::same_as<T, float>) { t.row(name + " add", type, n, add{x, all, wire.view(), 1, out.view()}); }
}

void rows_of_compressors(bench::kernel_table& t, std::size_t n) {
    using namespace compress;
    for (const int bits : {2, 4, 8}) {
        rows_of_scheme<float>(t, fmt::format("quantize {}", bits), quantize(), bits, n);
    }
    rows_of_scheme<float>(t, "quantize 4 nearest", quantize(512, rounding::nearest), 4, n);
    rows_of_scheme<bfloat16>(t, "quantize 4", quantize(), 4, n);
    rows_of_scheme<bfloat16>(t, "quantize 8", quantize(), 8, n);
    rows_of_scheme<float16>(t, "quantize 4", quantize(), 4, n);
    rows_of_scheme<float>(t, "qsgd 4", qsgd<compress::norm::max>(), 4, n);
    rows_of_scheme<float>(t, "sign", sign(), 1, n);
    rows_of_scheme<float>(t, "ternary", ternary(), 2, n);
    rows_of_scheme<float>(t, "natural", natural(), 8, n);
    rows_of_scheme<float>(t, "float8", float8<>(), 8, n);
}

// Microseconds of the host for one call, the device being idle or busy with what was queued.
template <class Call> nlohmann::ordered_json host_row(const cuda_queue& q, const std::string& what, Call call) {
    std::vector<double> times;
    for (int s = 0; s < 20; ++s) {
        constexpr int repeats = 500;
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < repeats; ++i) { call(); }
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() /
                        repeats);
        q.record().wait_host(after(default_timeout()));
    }
    const auto s = bench::summarize(times);
    fmt::print("# host: {:<50} {:>8.3f} us, least {:.3f}\n", what, s.p50, s.min);
    return {{"what", what}, {"us", {{"min", s.min}, {"p50", s.p50}, {"max", s.max}}}};
}

}  // namespace

int main(int argc, char** argv) try {
    bench::kernel_options options;
    CLI::App app("Kernels of one GPU against the copy bandwidth of the same run");
    options.add_to(app, 10);
    CLI11_PARSE(app, argc, argv);

    const nlohmann::ordered_json environment = bench::card_environment();

    bench::kernel_table t(options.samples, options.only);
    for (const std::size_t e : options.exponents) {
        const std::size_t n = std::size_t{1} << e;
        rows_of<float>(t, n);
        rows_of<bfloat16>(t, n);
        rows_of<float16>(t, n);
        rows_of<double>(t, n);
        sparsifier_rows<float, compress::top_k>(t, n);
        sparsifier_rows<float, compress::threshold>(t, n);
        sparsifier_rows<bfloat16, compress::top_k>(t, n);
        random_rows<float>(t, n);
        rows_of_compressors(t, n);
    }

    const cuda_queue q(0);
    const cuda_queue other = q.sibling();
    nlohmann::ordered_json host = nlohmann::ordered_json::array();
    host.push_back(host_row(q, "record, and wait on another queue", [&] { other.wait(q.record()); }));
    host.push_back(host_row(q, "record", [&] { static_cast<void>(q.record()); }));
    host.push_back(host_row(q, "allocate and release 1 MiB", [&] { q.release(q.allocate(1 << 20), 1 << 20); }));
    const array<float> small(q, 1024);
    host.push_back(host_row(q, "fill 1024 floats", [&] { fill(q, small.view(), 1.0f); }));
    for (const std::size_t tensors : {std::size_t{1}, std::size_t{64}, std::size_t{65}, std::size_t{200}}) {
        std::vector<compress::segment> all;
        for (std::uint32_t i = 0; i < tensors; ++i) {
            all.push_back({.tensor = i, .level = 4, .offset = i, .rows = 1});
        }
        const compress::quantize x;
        const array<std::byte> wire(q, compress::detail::wire_bytes(x, all));
        host.push_back(host_row(q, fmt::format("quantize {} tensors of one element", tensors),
                                [&] { x.encode(q, all, small.view(), {}, wire.view(), {}); }));
    }

    bench::write_report(options.json, {{"bench", "cuda_kernels"},
                                       {"command", bench::command_line(argc, argv)},
                                       {"environment", environment},
                                       {"copy_gb_per_s", t.copy_bandwidth() * 1e-9},
                                       {"samples", options.samples},
                                       {"rows", t.rows()},
                                       {"host", host}});
} catch (const std::exception& e) {
    std::cerr << argv[0] << ": " << e.what() << '\n';
    return 2;
}
