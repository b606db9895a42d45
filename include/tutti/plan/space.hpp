// space: what a search for jobs may choose among, and the numbers that divide.
// Needs plan/model.
#pragma once

#include <algorithm>    // find, count, all_of
#include <cmath>        // isfinite
#include <cstdint>      // counts
#include <numeric>      // gcd
#include <string>       // messages
#include <string_view>  // messages
#include <vector>       // lists

#include <tutti/core/text.hpp>   // formatted
#include <tutti/plan/model.hpp>  // job

namespace tutti::plan {

/// What may be chosen. An empty list of tensor, pipeline, sequence or micro_batches is every number that divides; heads
/// need not be divided evenly, nor tokens of a sequence. Ranks that share layers, and those that share sequences with
/// them, lie alike on nodes (machine::lies_evenly): groups of six on nodes of eight are left out, since some of them would
/// be inside a node and some not.
struct search_space {
    int ranks = 1;
    std::int64_t sequences = 1;  ///< of a step, of all ranks together: never changed, since training depends on it
    std::vector<int> tensor{};
    std::vector<int> pipeline{};
    std::vector<int> sequence{};
    std::vector<std::int64_t> micro_batches{};  ///< sequences of each
    std::vector<int> zero_stages{0, 1, 2, 3};   ///< 2 and 3 where there is no pipeline, see can_run
    std::vector<recomputation> recomputations{recomputation::selective, recomputation::full};
    std::vector<pipelining> schedules{pipelining::gpipe,         pipelining::one_forward_one_backward,
                                      pipelining::interleaved,   pipelining::zero_bubble,
                                      pipelining::zero_bubble_v, pipelining::dual_pipe};
    // These change what is learned, so there are none unless they are listed.
    std::vector<double> compressions{};  ///< ratios; 1 is always among them
    std::vector<int> taus{};             ///< steps of rounds; synchronous steps are always among them
    bool delayed = false;                ///< rounds may be adopted late as well
    bool kept_scores = false;            ///< of attention, as in time_of_step
    /// Only what this library's trainer runs: two chunks, scores or whole stages recomputed, no node_shards nor
    /// secondary_shards, and rounds, or compression, of whole models without ZeRO.
    bool of_trainer = false;
    double margin = 0.1;  ///< of memory, as in fits
};

namespace detail {

template <class T> [[nodiscard]] std::vector<T> divisors(T of) {
    std::vector<T> low;
    std::vector<T> high;
    for (T d = 1; d * d <= of; ++d) {
        if (of % d != 0) { continue; }
        low.push_back(d);
        if (d != of / d) { high.insert(high.begin(), of / d); }
    }
    low.insert(low.end(), high.begin(), high.end());
    return low;
}
// Those of `listed`, or all where none is, that divide `of`, in ascending order.
template <class T> [[nodiscard]] std::vector<T> dividing(const std::vector<T>& listed, T of) {
    std::vector<T> all = divisors(of);
    if (!listed.empty()) {
        std::erase_if(all, [&](T d) { return std::find(listed.begin(), listed.end(), d) == listed.end(); });
    }
    return all;
}
template <class T> [[nodiscard]] bool has(const std::vector<T>& list, const T& value) {
    return std::find(list.begin(), list.end(), value) != list.end();
}

inline void validate(const search_space& s) {
    expect(s.ranks > 0 && s.sequences > 0,
           [&] { return formatted("{} ranks and {} sequences a step; both must be positive", s.ranks, s.sequences); });
    expect(!s.zero_stages.empty() && !s.recomputations.empty() && !s.schedules.empty(),
           [] { return std::string("a search needs a ZeRO stage, a recomputation and a schedule at least"); });
    expect(!s.of_trainer ||
               std::all_of(s.recomputations.begin(), s.recomputations.end(),
                           [](recomputation r) { return r == recomputation::selective || r == recomputation::stages; }),
           [] { return std::string("this library's trainer recomputes selective or stages"); });
    expect(s.margin >= 0 && s.margin < 1, [&] { return formatted("a margin of {}; 0 to below 1", s.margin); });
    const auto expect_once = [](const auto& list, const char* what) {
        for (const auto& value : list) {
            expect(std::count(list.begin(), list.end(), value) == 1,
                   [&] { return formatted("a search has each {} once", what); });
        }
    };
    expect_once(s.zero_stages, "ZeRO stage");
    expect_once(s.recomputations, "recomputation");
    expect_once(s.schedules, "schedule");
    expect_once(s.taus, "tau");
    for (const int stage : s.zero_stages) {
        expect(stage >= 0 && stage <= 3, [&] { return formatted("ZeRO stage {} of 0 to 3", stage); });
    }
    for (const double ratio : s.compressions) {
        expect(ratio >= 1 && std::isfinite(ratio),
               [&] { return formatted("compression {}; at least 1, and finite", ratio); });
    }
    expect_once(s.compressions, "compression");
    for (const int tau : s.taus) {
        expect(tau > 0, [&] { return formatted("rounds of {} steps; at least 1", tau); });
    }
}

// Ranks that a layer can be divided over: they divide the vocabulary, and each has a head at least.
[[nodiscard]] inline std::vector<int> tensor_ranks(const model_shape& m, const search_space& s) {
    std::vector<int> all = dividing(s.tensor, static_cast<int>(std::gcd(m.vocabulary, std::int64_t{s.ranks})));
    std::erase_if(all, [&](int t) { return t > m.heads; });
    return all;
}
// Ranks that `rest` can be divided over, of which each has two chunks of every sequence.
[[nodiscard]] inline std::vector<int> sequence_ranks(const model_shape& m, const search_space& s, int rest) {
    std::vector<int> all = dividing(s.sequence, rest);
    std::erase_if(all, [&](int ranks) { return ranks > 1 && m.sequence < 2 * std::int64_t{ranks}; });
    return all;
}
// Chunks of a rank of an interleaved pipeline.
[[nodiscard]] inline std::vector<std::int64_t> chunks_of(const model_shape& m, const search_space& s, int pipeline) {
    std::vector<std::int64_t> all = divisors(m.layers / pipeline);
    std::erase_if(all, [&](std::int64_t chunks) { return s.of_trainer ? chunks != 2 : chunks == 1; });
    return all;
}
// ", with stages of 4, 8": what a list allows; "" where it allows everything.
template <class T> [[nodiscard]] std::string allowed(const std::vector<T>& listed, std::string_view what) {
    std::string text;
    for (const T& value : listed) { text += formatted("{}{}", text.empty() ? "" : ", ", value); }
    return listed.empty() ? "" : formatted(", {} of {}", what, text);
}

}  // namespace detail

}  // namespace tutti::plan
