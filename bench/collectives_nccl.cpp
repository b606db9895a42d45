// Collectives over comm::nccl beside NCCL's own calls on the same communicator and stream, alternating in one run: the
// difference is what tutti adds. A thread a GPU. Times as nccl-tests takes them: calls back to back, one wait at the
// end.
#include <algorithm>  // clamp, max_element
#include <barrier>    // ranks start together
#include <fstream>    // report
#include <iostream>   // errors
#include <map>        // shortfall by kind
#include <vector>     // samples

#include <CLI/CLI.hpp>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>
#include <tutti/comm/nccl.hpp>
#include <tutti/core/buffer.hpp>

#include "support/data.hpp"     // exact sums
#include "support/options.hpp"  // command line
#include "support/row.hpp"      // table
#include "support/suite.hpp"    // outcome, command_line

namespace {

using tutti::comm::nccl;
using device_view = tutti::view<float, tutti::device_memory>;

void expect_nccl(ncclResult_t code, const char* function) {
    if (code != ncclSuccess) {
        throw std::runtime_error(fmt::format("{} failed: {}", function, ncclGetErrorString(code)));
    }
}

/// One call of tutti, and the same by NCCL itself.
void call_tutti(nccl& c, bench::kind k, device_view in, device_view out, int root) {
    switch (k) {
    case bench::kind::all_reduce: return c.all_reduce(in, out, tutti::sum{});
    case bench::kind::reduce_scatter: return c.reduce_scatter(in, out, tutti::sum{});
    case bench::kind::all_gather: return c.all_gather(in, out);
    case bench::kind::broadcast: return c.broadcast(out, root);
    case bench::kind::reduce: return c.reduce(in, out, tutti::sum{}, root);
    case bench::kind::all_to_all: return c.all_to_all(in, out);
    case bench::kind::memory_copy: break;
    }
}
void call_nccl(nccl& c, bench::kind k, device_view in, device_view out, int root) {
    const ncclComm_t comm = c.native_handle();
    const cudaStream_t stream = c.queue().stream();
    switch (k) {
    case bench::kind::all_reduce:
        return expect_nccl(ncclAllReduce(in.data(), out.data(), out.size(), ncclFloat32, ncclSum, comm, stream),
                           "ncclAllReduce");
    case bench::kind::reduce_scatter:
        return expect_nccl(ncclReduceScatter(in.data(), out.data(), out.size(), ncclFloat32, ncclSum, comm, stream),
                           "ncclReduceScatter");
    case bench::kind::all_gather:
        return expect_nccl(ncclAllGather(in.data(), out.data(), in.size(), ncclFloat32, comm, stream), "ncclAllGather");
    case bench::kind::broadcast:
        return expect_nccl(ncclBroadcast(out.data(), out.data(), out.size(), ncclFloat32, root, comm, stream),
                           "ncclBroadcast");
    case bench::kind::reduce:
        return expect_nccl(ncclReduce(in.data(), out.data(), in.size(), ncclFloat32, ncclSum, root, comm, stream),
                           "ncclReduce");
    case bench::kind::all_to_all: {
        const std::size_t part = in.size() / static_cast<std::size_t>(c.size());
        expect_nccl(ncclGroupStart(), "ncclGroupStart");
        for (int r = 0; r < c.size(); ++r) {
            const std::size_t first = static_cast<std::size_t>(r) * part;
            expect_nccl(ncclSend(in.data() + first, part, ncclFloat32, r, comm, stream), "ncclSend");
            expect_nccl(ncclRecv(out.data() + first, part, ncclFloat32, r, comm, stream), "ncclRecv");
        }
        return expect_nccl(ncclGroupEnd(), "ncclGroupEnd");
    }
    case bench::kind::memory_copy: break;
    }
}

constexpr std::array kinds = {bench::kind::all_reduce, bench::kind::reduce_scatter, bench::kind::all_gather,
                              bench::kind::broadcast,  bench::kind::reduce,         bench::kind::all_to_all};

struct settings {
    bench::options common;
    int repetitions = 11;
};

class rank_bench {
    nccl& comm_;
    const settings& how_;
    std::barrier<>& together_;
    std::vector<double>& slots_;  // one a rank
    std::vector<std::uint64_t>& wrong_;
    bench::outcome& outcome_;  // rank 0's
    tutti::buffer<float, tutti::cuda_queue> memory_;

public:
    rank_bench(nccl& c, const settings& s, std::barrier<>& together, std::vector<double>& slots,
               std::vector<std::uint64_t>& wrong, bench::outcome& o)
        : comm_(c)
        , how_(s)
        , together_(together)
        , slots_(slots)
        , wrong_(wrong)
        , outcome_(o)
        , memory_(c.queue(), 2 * s.common.max_bytes / sizeof(float) + 1024) {}

    void run() {
        for (const bench::kind k : kinds) {
            if (!how_.common.wants(k)) { continue; }
            print("\n# {} (nccl, {} ranks, streaming)   tutti, then NCCL itself; \"of NCCL\": busbw of tutti / NCCL's, "
                  "median of pairs\n",
                  name_of(k), comm_.size());
            print("{}", bench::table_head());
            for (const std::size_t bytes : how_.common.sizes()) { measure(k, bytes); }
        }
        host_time();
    }

private:
    [[nodiscard]] bool first() const { return comm_.rank() == 0; }
    [[nodiscard]] std::size_t me() const { return static_cast<std::size_t>(comm_.rank()); }
    template <class... A> void print(fmt::format_string<A...> text, A&&... a) const {
        if (!first()) { return; }
        fmt::print(text, std::forward<A>(a)...);
        std::fflush(stdout);
    }
    void wait() const {
        tutti::detail::check_cuda(cudaStreamSynchronize(comm_.queue().stream()), "cudaStreamSynchronize");
    }
    // The largest over ranks.
    [[nodiscard]] double largest(double mine) {
        slots_[me()] = mine;
        together_.arrive_and_wait();
        const double most = *std::max_element(slots_.begin(), slots_.end());
        together_.arrive_and_wait();
        return most;
    }
    struct pair_of_views {
        device_view in, out;
    };
    [[nodiscard]] pair_of_views place(bench::kind k, const bench::counts& n, bool in_place) const {
        const device_view all = memory_.view();
        const device_view apart = all.sub(how_.common.max_bytes / sizeof(float) + 512, n.out);
        if (!in_place) { return {all.sub(0, n.in), apart}; }
        if (k == bench::kind::all_gather) { return {all.sub(me() * n.in, n.in), all.sub(0, n.out)}; }
        if (k == bench::kind::reduce_scatter) { return {all.sub(0, n.in), all.sub(me() * n.out, n.out)}; }
        return {all.sub(0, n.in), all.sub(0, n.out)};
    }

    // Time of a call, over enough of them back to back.
    [[nodiscard]] double time(bool own, bench::kind k, pair_of_views v, int calls) {
        wait();
        together_.arrive_and_wait();
        const double start = bench::now();
        for (int i = 0; i < calls; ++i) {
            own ? call_tutti(comm_, k, v.in, v.out, how_.common.root)
                : call_nccl(comm_, k, v.in, v.out, how_.common.root);
        }
        wait();
        return largest((bench::now() - start) / calls);
    }

    // Wrong elements on all ranks.
    [[nodiscard]] std::uint64_t verify(bench::kind k, pair_of_views v, bool in_place) {
        const bench::situation s{k,
                                 static_cast<std::uint32_t>(comm_.size()),
                                 static_cast<std::uint32_t>(comm_.rank()),
                                 static_cast<std::uint32_t>(how_.common.root),
                                 7,
                                 in_place,
                                 1};
        const bool copies_root = k == bench::kind::broadcast;
        std::vector<float> host((copies_root ? v.out : v.in).size());
        bench::fill(s, host.data(), host.size());
        upload(comm_.queue(), tutti::view<const float>(host), copies_root ? v.out : v.in);
        call_tutti(comm_, k, v.in, v.out, how_.common.root);
        host.resize(v.out.size());
        download(comm_.queue(), tutti::view<const float, tutti::device_memory>(v.out), tutti::view<float>(host));
        wrong_[me()] = bench::check(s, host.data(), host.size());
        together_.arrive_and_wait();
        std::uint64_t all = 0;
        for (const std::uint64_t w : wrong_) { all += w; }
        together_.arrive_and_wait();
        return all;
    }

    void measure(bench::kind k, std::size_t bytes) {
        const auto ranks = static_cast<std::size_t>(comm_.size());
        const bench::counts n = bench::counts_of(k, ranks, bytes, sizeof(float));
        if (n.count == 0) { return; }
        bench::row rows[2];
        for (const bool raw : {false, true}) {
            rows[raw] = {k,       raw ? "NCCL" : "tutti", comm_.size(), n.bytes, n.count,
                         "float", how_.common.root,       "streaming",  {},      {}};
        }
        std::string shares;
        nlohmann::json ratios;
        for (const bool in_place : {false, true}) {
            if (in_place ? !bench::has_in_place(k) : !bench::has_out_of_place(k)) { continue; }
            const pair_of_views v = place(k, n, in_place);
            bench::variant_result results[2];
            constexpr std::size_t largest_check = std::size_t{64} << 20;  // the host computes what is right
            if (how_.common.check && n.bytes <= largest_check) {
                results[0].wrong = verify(k, v, in_place);
                results[0].checked = true;
                outcome_.wrong += first() ? results[0].wrong : 0;
            }
            static_cast<void>(time(true, k, v, how_.common.warmup + 1));
            const double once = time(false, k, v, 3);
            const int calls = how_.common.iterations > 0 ? how_.common.iterations
                                                         : static_cast<int>(std::clamp(8e-3 / once, 4.0, 400.0));
            std::vector<double> samples[2];
            std::vector<double> shares_of_pairs;
            for (int i = 0; i < how_.repetitions; ++i) {
                for (const bool turn : {false, true}) {
                    const bool raw = (i % 2 == 0) == turn;  // who goes first alternates
                    samples[raw].push_back(time(!raw, k, v, calls));
                }
                shares_of_pairs.push_back(samples[1].back() / samples[0].back());
            }
            for (const bool raw : {false, true}) {
                results[raw].seconds = bench::summarize(samples[raw]);
                (in_place ? rows[raw].in_place : rows[raw].out_of_place) = results[raw];
            }
            const double share = bench::median(shares_of_pairs);
            const double extra = (results[0].seconds.p50 - results[1].seconds.p50) * 1e6;
            shares += fmt::format("  {}{:.3f}", in_place ? "in place " : "", share);
            ratios[in_place ? "in_place" : "out_of_place"] = {
                {"busbw_of_nccl", share}, {"extra_us", extra}, {"calls", calls}};
            // The bar: 2 % from 1 MiB up, below the larger of 2 % and 1 us.
            if (share < 0.98 && (n.bytes >= (1u << 20) || extra > 1.0)) { ++outcome_.below_floor; }
        }
        if (!first()) { return; }
        fmt::print("{}\n{}   of NCCL:{}\n", bench::table_line(rows[0]), bench::table_line(rows[1]), shares);
        std::fflush(stdout);
        for (const bool raw : {false, true}) {
            nlohmann::json j = bench::json_of(rows[raw]);
            if (!raw) { j["beside_nccl"] = ratios; }
            outcome_.report["rows"].push_back(std::move(j));
        }
    }

    // What a call keeps the host: few enough calls that none waits for the device.
    void host_time() {
        const bench::counts n =
            bench::counts_of(bench::kind::all_reduce, static_cast<std::size_t>(comm_.size()), 1024, sizeof(float));
        const pair_of_views v = place(bench::kind::all_reduce, n, false);
        constexpr int calls = 50;
        std::vector<double> samples[2];
        for (int i = 0; i < 101; ++i) {
            for (const bool turn : {false, true}) {
                const bool raw = (i % 2 == 0) == turn;
                wait();
                together_.arrive_and_wait();
                const double start = bench::now();
                for (int j = 0; j < calls; ++j) {
                    raw ? call_nccl(comm_, bench::kind::all_reduce, v.in, v.out, 0)
                        : call_tutti(comm_, bench::kind::all_reduce, v.in, v.out, 0);
                }
                samples[raw].push_back((bench::now() - start) / calls);
            }
        }
        wait();
        const bench::summary own = bench::summarize(samples[0]), raw = bench::summarize(samples[1]);
        print("\n# host time of an all_reduce call of 1 KiB: tutti {:.3f} us, NCCL {:.3f} us, difference {:.3f} us "
              "(medians of 101 batches of {}, rank 0)\n",
              own.p50 * 1e6, raw.p50 * 1e6, (own.p50 - raw.p50) * 1e6, calls);
        if (!first()) { return; }
        outcome_.report["host_time"] = {{"tutti_us", bench::json_of(own, 1e6)},
                                        {"nccl_us", bench::json_of(raw, 1e6)},
                                        {"difference_us", (own.p50 - raw.p50) * 1e6}};
        if (own.p50 - raw.p50 > 1e-6) { ++outcome_.below_floor; }
    }
};

int run(int argc, char** argv) {
    CLI::App app("Collectives of tutti over NCCL, beside NCCL itself; a thread a GPU");
    settings s;
    s.common.min_bytes = 1024;
    s.common.max_bytes = std::size_t{1} << 30;
    s.common.factor = 4;
    bench::add_options(app, s.common, true);
    for (const char* not_here : {"--bind", "--no-baselines", "--blocking", "--min-roofline"}) {
        app.remove_option(app.get_option(not_here));
    }
    app.add_option("--repetitions", s.repetitions, "pairs of measurements of a row")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    try {
        app.parse(argc, argv);
        bench::validate(s.common, s.common.ranks);
        if (s.common.type != "float") { throw std::runtime_error("--datatype: this bench sums floats"); }
    } catch (const CLI::ParseError& e) { return app.exit(e); } catch (const std::runtime_error& e) {
        std::cerr << argv[0] << ": " << e.what() << '\n';
        return 2;
    }
    nlohmann::json environment = bench::environment();
    cudaDeviceProp card{};
    tutti::detail::check_cuda(cudaGetDeviceProperties(&card, 0), "cudaGetDeviceProperties");
    int version = 0;
    expect_nccl(ncclGetVersion(&version), "ncclGetVersion");
    environment["card"] = card.name;
    environment["nccl"] = version;
    fmt::print("# {} x {}, NCCL {}, tutti {} ({})\n", s.common.ranks, card.name, version, tutti::version_string,
               environment["commit"].get<std::string>());

    const auto ranks = static_cast<std::size_t>(s.common.ranks);
    std::barrier<> together(s.common.ranks);
    std::vector<double> slots(ranks);
    std::vector<std::uint64_t> wrong(ranks);
    std::vector<bench::outcome> outcomes(ranks);
    nccl::launch(s.common.ranks, [&](nccl& c) {
        const auto me = static_cast<std::size_t>(c.rank());
        rank_bench(c, s, together, slots, wrong, outcomes[me]).run();
    });
    bench::outcome& o = outcomes.front();
    fmt::print("# {} wrong elements, {} figures below the bar (2 % of NCCL's bus bandwidth, or 1 us below 1 MiB)\n",
               o.wrong, o.below_floor);
    return bench::conclude(std::move(o), s.common, environment, "nccl", s.common.ranks,
                           bench::command_line(argc, argv));
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (const std::exception& e) {
        std::cerr << "collectives_nccl: " << e.what() << '\n';
        return 1;
    }
}
