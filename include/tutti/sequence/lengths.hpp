// lengths: how long the documents of real corpora are, to draw batches from where the corpora are not at hand.
// Needs core/philox. For training on made-up text, benches and tests.
// Source: the histograms are counts over public files, named at each; shapes called "surrogate" are assumptions.
#pragma once

#include <algorithm>    // clamp, min
#include <array>        // histograms
#include <cmath>        // exp, log
#include <cstddef>      // size_t
#include <cstdint>      // tokens
#include <span>         // bins
#include <string>       // messages
#include <string_view>  // names
#include <vector>       // lengths

#include <tutti/core/error.hpp>          // usage_error
#include <tutti/core/philox.hpp>         // random_stream
#include <tutti/core/text.hpp>           // formatted
#include <tutti/sequence/placement.hpp>  // no_capacity

namespace tutti::sequence {

/// So many documents have first to last tokens, both included.
struct length_bin {
    std::int64_t first = 1;
    std::int64_t last = 1;
    std::int64_t count = 0;
};

/// 77,932 documents of a sample of ProLong: distca/simulator/data/dist_prolong.json of hao-ai-lab/DistCA on GitHub.
inline constexpr std::array<length_bin, 10> prolong_bins{{{575, 1024, 11669},
                                                          {1025, 2048, 29937},
                                                          {2049, 4096, 21002},
                                                          {4097, 8192, 11227},
                                                          {8193, 16384, 3329},
                                                          {16385, 32768, 607},
                                                          {32769, 65536, 114},
                                                          {65537, 131072, 30},
                                                          {131073, 262144, 13},
                                                          {262145, 340149, 4}}};
/// 99,519 documents as WLB-LLM's are distributed, by dist_wlbllm.json in the same folder.
inline constexpr std::array<length_bin, 11> wlb_bins{{{1, 128, 1984},
                                                      {129, 256, 2008},
                                                      {257, 512, 3900},
                                                      {513, 1024, 7993},
                                                      {1025, 2048, 15712},
                                                      {2049, 4096, 31793},
                                                      {4097, 8192, 33768},
                                                      {8193, 16384, 1031},
                                                      {16385, 32768, 449},
                                                      {32769, 65536, 353},
                                                      {65537, 124913, 528}}};
/// 1,000,000 articles of Wikipedia: galvatron/datasets/wikipedia.txt of AFDWang/Hetu-Galvatron, branch flexsp.
inline constexpr std::array<length_bin, 13> wikipedia_bins{{{1, 128, 214454},
                                                            {129, 256, 202045},
                                                            {257, 512, 210355},
                                                            {513, 1024, 161233},
                                                            {1025, 2048, 108382},
                                                            {2049, 4096, 59582},
                                                            {4097, 8192, 27959},
                                                            {8193, 16384, 11221},
                                                            {16385, 32768, 3465},
                                                            {32769, 65536, 1027},
                                                            {65537, 131072, 228},
                                                            {131073, 262144, 42},
                                                            {262145, 1823777, 7}}};
/// 13.4 million documents of the corpus that MagiAttention is measured with, in
/// exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv of SandAI-org/MagiAttention. Its first bin
/// starts at 0; a document without tokens is none.
inline constexpr std::array<length_bin, 14> magi_bins{{{1, 10, 30254},
                                                       {11, 50, 391188},
                                                       {51, 100, 699596},
                                                       {101, 200, 1377757},
                                                       {201, 500, 3794735},
                                                       {501, 1024, 3316785},
                                                       {1025, 2048, 2106566},
                                                       {2049, 4096, 988525},
                                                       {4097, 8192, 410002},
                                                       {8193, 16384, 173574},
                                                       {16385, 32768, 115007},
                                                       {32769, 65536, 18428},
                                                       {65537, 131072, 22513},
                                                       {131073, 196608, 18284}}};

/// Lengths of documents: a histogram, or, without bins, a lognormal of the given mean.
struct length_distribution {
    std::string_view name;
    std::span<const length_bin> bins{};
    double mean = 0;   ///< tokens
    double sigma = 0;  ///< deviation of the logarithm
};

/// All that are known. The surrogates have the mean of public counts (tokens and documents of RedPajama, in the
/// configurations of alibaba/data-juicer) and a deviation that is guessed.
inline constexpr std::array<length_distribution, 8> length_distributions{{{"prolong", prolong_bins},
                                                                          {"wlb", wlb_bins},
                                                                          {"wikipedia", wikipedia_bins},
                                                                          {"magi", magi_bins},
                                                                          {"arxiv-surrogate", {}, 17783, 0.9},
                                                                          {"github-surrogate", {}, 2054, 1.5},
                                                                          {"stackexchange-surrogate", {}, 687, 0.9},
                                                                          {"books-surrogate", {}, 126533, 0.8}}};

/// Errors  usage_error that lists the names there are.
[[nodiscard]] inline const length_distribution& length_distribution_named(std::string_view name) {
    std::string known;
    for (const length_distribution& d : length_distributions) {
        if (d.name == name) { return d; }
        known += formatted("{}{}", known.empty() ? "" : ", ", d.name);
    }
    throw usage_error(formatted("lengths: '{}' is not one of {}", name, known));
}

/// The length of document `i` of a stream: a bin by its count, then uniform in the logarithm.
/// Determinism  of the arguments, and of the last bits of the machine's exp and log. At least 1.
/// Errors       usage_error when the bins count no document.
[[nodiscard]] inline std::int64_t length_at(const length_distribution& d, random_stream stream, std::uint64_t i) {
    const auto words = stream.block(i);
    if (d.bins.empty()) {
        const double mu = std::log(d.mean) - d.sigma * d.sigma / 2;
        const double length = std::exp(mu + d.sigma * static_cast<double>(normals_from(words)[0]));
        return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(length, 0x1p53)));
    }
    std::int64_t total = 0;
    for (const length_bin& b : d.bins) { total += b.count; }
    if (total <= 0) { throw usage_error(formatted("lengths: the bins of '{}' count {} documents", d.name, total)); }
    auto left = static_cast<std::int64_t>(stream.below(i, static_cast<std::uint64_t>(total)));
    std::size_t at = 0;
    while (left >= d.bins[at].count) { left -= d.bins[at++].count; }
    const length_bin& b = d.bins[at];
    // `below` took the first two words.
    const std::uint64_t rest = std::uint64_t{words[2]} << 32 | words[3];
    const double uniform = static_cast<double>(rest >> 11) * 0x1p-53;
    const double low = std::log(static_cast<double>(b.first));
    const double high = std::log(static_cast<double>(b.last) + 1);
    return std::clamp(static_cast<std::int64_t>(std::exp(low + uniform * (high - low))), b.first, b.last);
}

/// Lengths of a batch of exactly `tokens`: documents 0, 1, ... of the stream until it is full; the last is cut to what
/// is left, and each to `longest`. One `step` of the stream a batch.
/// Errors  usage_error when tokens are negative, or longest is not positive.
[[nodiscard]] inline std::vector<std::int64_t> drawn_lengths(const length_distribution& d, random_stream stream,
                                                             std::int64_t tokens, std::int64_t longest = no_capacity) {
    if (tokens < 0 || longest < 1) {
        throw usage_error(formatted("lengths: a batch of {} tokens in sequences of at most {}", tokens, longest));
    }
    std::vector<std::int64_t> lengths;
    for (std::uint64_t i = 0; tokens > 0; ++i) {
        lengths.push_back(std::min({length_at(d, stream, i), longest, tokens}));
        tokens -= lengths.back();
    }
    return lengths;
}

}  // namespace tutti::sequence
