// Measures one algorithm at one size: fresh data each iteration, time as the maximum over ranks, W on the same memory.
// Needs tutti's communicator concept; runs unchanged over threads and mpi. Called by all ranks together.
#pragma once

#include <algorithm>   // clamp
#include <chrono>      // steady_clock
#include <cstddef>     // byte
#include <cstring>     // memset
#include <functional>  // calls
#include <string>      // names
#include <utility>     // pair
#include <vector>      // samples

#include <tutti/comm/communicator.hpp>  // communicator
#include <tutti/core/buffer.hpp>        // arena
#include <tutti/core/reduce_op.hpp>     // max

#include "bandwidth.hpp"   // W
#include "data.hpp"        // fill, check
#include "row.hpp"         // variant_result
#include "statistics.hpp"  // summarize
#include "traffic.hpp"     // kind

namespace bench {

[[nodiscard]] inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// How a collective is done: tutti's own way, or another one to compare with.
template <class T> struct algorithm {
    bench::kind kind;
    std::string name;
    std::function<void(tutti::view<const T>, tutti::view<T>)> call;
    bool in_place = has_in_place(kind);        ///< it has this variant
    std::function<void()> together = nullptr;  ///< its own barrier, for what is measured without tutti
};

struct repetition {
    int iterations = 0;  ///< 0: what takes about 0.1 s, 10 to 2000
    int warmup = 0;
    bool check = true;
    bool isolated =
        true;  ///< one call behind a barrier; otherwise `streaming_batch` calls back to back are one iteration
    int root = 0;
};
inline constexpr int streaming_batch = 16;

/// One entry an iteration, the same on all ranks; the wrong elements of all ranks.
struct samples {
    std::vector<double> seconds;
    std::vector<double> bandwidth;  ///< W, empty below roofline_from
    double traffic = 0;
    std::uint64_t wrong = 0;
};

/// Elements of T in the two buffers of a rank for a size column of `bytes`, and the count column.
struct counts {
    std::size_t in;
    std::size_t out;
    std::size_t count;
    std::size_t bytes;  ///< the size column, rounded down to whole elements
};
[[nodiscard]] inline counts counts_of(kind k, std::size_t ranks, std::size_t bytes, std::size_t element) {
    const std::size_t parts = parted(k) ? ranks : 1;
    const std::size_t part = bytes / element / parts;
    const std::size_t all = part * parts;
    return {k == kind::all_gather ? part : all, k == kind::reduce_scatter ? part : all, part, all * element};
}

template <tutti::communicator C> class measurement {
    static constexpr std::size_t alignment = 4096;
    C& comm_;
    tutti::buffer<std::byte> arena_;

public:
    /// Memory for rows of up to `max_bytes`, written once by this rank, so that no row pays for page faults.
    measurement(C& comm, std::size_t max_bytes)
        : comm_(comm), arena_(tutti::host_queue{}, 2 * max_bytes + 2 * alignment) {
        std::memset(arena_.data(), 0, arena_.size());
    }

    template <class T>
    [[nodiscard]] samples run(const algorithm<T>& a, std::size_t bytes, bool in_place, const repetition& how) {
        const std::size_t ranks = static_cast<std::size_t>(comm_.size());
        const std::size_t me = static_cast<std::size_t>(comm_.rank());
        const counts n = counts_of(a.kind, ranks, bytes, sizeof(T));
        T* const base = reinterpret_cast<T*>(aligned(arena_.data()));
        T* in = base;
        T* out = base;
        if (!in_place) {
            out = reinterpret_cast<T*>(aligned(reinterpret_cast<std::byte*>(base + n.in)));
        } else if (a.kind == kind::all_gather) {
            in = base + me * n.count;
        } else if (a.kind == kind::reduce_scatter) {
            out = base + me * n.count;
        }
        const double touched = footprint(a.kind, static_cast<double>(ranks), static_cast<double>(n.bytes), in_place);
        const bool with_bandwidth = touched >= roofline_from;
        const add_arrays arrays(base, static_cast<std::size_t>(touched));
        const int calls = how.isolated ? 1 : streaming_batch;

        std::vector<double> seconds;
        std::vector<double> add_seconds;
        samples result;
        result.traffic = least_traffic(a.kind, static_cast<double>(ranks), static_cast<double>(n.bytes), in_place);
        const auto iterate = [&](int k) {
            if (with_bandwidth) {
                arrays.fill();
                comm_.barrier();
                const double start = now();
                arrays.run();
                add_seconds.push_back(now() - start);
            }
            const situation s{a.kind,
                              static_cast<std::uint32_t>(ranks),
                              static_cast<std::uint32_t>(me),
                              static_cast<std::uint32_t>(how.root),
                              static_cast<std::uint32_t>(k),
                              in_place,
                              calls};
            fill(s, in, n.in);
            if (a.together) {
                a.together();
            } else {
                comm_.barrier();
            }
            const double start = now();
            for (int i = 0; i < calls; ++i) { a.call(tutti::view<const T>(in, n.in), tutti::view<T>(out, n.out)); }
            seconds.push_back((now() - start) / calls);
            if (how.check) { result.wrong += bench::check(s, out, n.out); }
        };
        const double start = now();
        for (int k = 0; k < std::max(how.warmup, 1); ++k) { iterate(k); }
        const double cycle = (now() - start) / std::max(how.warmup, 1);
        int iterations = how.iterations > 0 ? how.iterations : static_cast<int>(std::clamp(0.1 / cycle, 10.0, 2000.0));
        comm_.broadcast(tutti::view<int>(&iterations, 1), 0);  // one opinion on the clock
        seconds.clear();
        add_seconds.clear();
        for (int k = 0; k < iterations; ++k) { iterate(k + how.warmup); }

        result.seconds = over_ranks(seconds);
        for (const double s : over_ranks(add_seconds)) {
            result.bandwidth.push_back(arrays.bytes() * static_cast<double>(ranks) / s);
        }
        comm_.all_reduce(tutti::view<const std::uint64_t>(&result.wrong, 1),
                         tutti::view<std::uint64_t>(&result.wrong, 1), tutti::sum{});
        return result;
    }

    /// Seconds a call of `call`, back to back; samples of `batch` calls each.
    template <class F> [[nodiscard]] summary overhead(F call, int batch = 1000, int repetitions = 30) {
        std::vector<double> seconds;
        for (int k = 0; k <= repetitions; ++k) {
            comm_.barrier();
            const double start = now();
            for (int i = 0; i < batch; ++i) { call(); }
            if (k > 0) { seconds.push_back((now() - start) / batch); }
        }
        return summarize(over_ranks(seconds));
    }

private:
    [[nodiscard]] static std::byte* aligned(std::byte* p) {
        const auto address = reinterpret_cast<std::uintptr_t>(p);
        return p + (alignment - address % alignment) % alignment;
    }
    [[nodiscard]] std::vector<double> over_ranks(std::vector<double> own) {
        comm_.all_reduce(tutti::view<const double>(own), tutti::view<double>(own), tutti::max{});
        return own;
    }
};

/// `calls` of an iteration are already divided out. The roofline is the median of per-iteration ratios: W and the
/// collective of one iteration are neighbors in time, so that a slow phase of the machine meets both.
[[nodiscard]] inline variant_result result_of(const samples& s, bool checked) {
    variant_result v;
    v.seconds = summarize(s.seconds);
    v.bandwidth = summarize(s.bandwidth);
    v.traffic = s.traffic;
    v.wrong = s.wrong;
    v.checked = checked;
    std::vector<double> ratios;
    for (std::size_t i = 0; i < s.bandwidth.size(); ++i) {
        ratios.push_back(s.traffic / s.seconds[i] / s.bandwidth[i]);
    }
    v.roofline = ratios.empty() ? 0 : median(ratios);
    return v;
}

}  // namespace bench
