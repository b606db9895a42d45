// lengths: drawn documents against the histograms they come from, batches against their budget.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // sort
#include <cmath>      // fabs
#include <string>     // messages
#include <vector>     // draws

#include <tutti/sequence/lengths.hpp>  // length_distribution_named

using namespace tutti;
using sequence::length_bin;
using sequence::length_distribution;

namespace {
constexpr random_stream stream{5, 6, 7};
constexpr std::uint64_t draws = 40'000;
}  // namespace

TEST_CASE("histograms count what the corpora have") {
    const auto documents = [](std::string_view name) {
        std::int64_t sum = 0;
        std::int64_t last = 0;
        for (const length_bin& b : sequence::length_distribution_named(name).bins) {
            CHECK(b.first == (last == 0 ? b.first : last + 1));
            CHECK(b.first <= b.last);
            last = b.last;
            sum += b.count;
        }
        return sum;
    };
    CHECK(documents("prolong") == 77'932);
    CHECK(documents("wlb") == 99'519);
    CHECK(documents("wikipedia") == 1'000'000);
    CHECK(documents("magi") == 13'463'214);
}

TEST_CASE("draws follow the counts of the bins, and the logarithm inside them") {
    for (const char* const name : {"prolong", "wlb", "wikipedia", "magi"}) {
        const length_distribution& d = sequence::length_distribution_named(name);
        std::vector<double> hits(d.bins.size());
        std::vector<double> lower(d.bins.size());  // below the geometric middle
        double total = 0;
        for (const length_bin& b : d.bins) { total += static_cast<double>(b.count); }
        for (std::uint64_t i = 0; i < draws; ++i) {
            const std::int64_t s = length_at(d, stream, i);
            std::size_t at = 0;
            while (s > d.bins[at].last) { ++at; }
            CHECK_MESSAGE(s >= d.bins[at].first, name);
            ++hits[at];
            const double middle =
                std::sqrt(static_cast<double>(d.bins[at].first) * static_cast<double>(d.bins[at].last + 1));
            lower[at] += static_cast<double>(s) + 0.5 < middle ? 1 : 0;
        }
        for (std::size_t b = 0; b < hits.size(); ++b) {
            const double expected = static_cast<double>(draws) * static_cast<double>(d.bins[b].count) / total;
            CHECK(std::fabs(hits[b] - expected) <= 5 * std::sqrt(expected) + 1);
            if (hits[b] > 400 && d.bins[b].last > 400) {
                CHECK(std::fabs(lower[b] / hits[b] - 0.5) <= 2.5 / std::sqrt(hits[b]) + 0.01);
            }
        }
    }
}

TEST_CASE("means and quantiles are near those that were published") {
    struct row {
        const char* name;
        double mean, median, upper;  // upper: 90 %
    };
    for (const row& r :
         {row{"prolong", 3051.9, 1913, 6051}, row{"wlb", 3961.8, 3227, 5784}, row{"wikipedia", 1013.6, 347, 2112},
          row{"arxiv-surrogate", 17783, 17783 * 0.667, 37600}, row{"github-surrogate", 2054, 2054 * 0.3247, 4560}}) {
        const length_distribution& d = sequence::length_distribution_named(r.name);
        std::vector<double> s;
        double sum = 0;
        for (std::uint64_t i = 0; i < draws; ++i) {
            s.push_back(static_cast<double>(length_at(d, stream, i)));
            sum += s.back();
        }
        std::sort(s.begin(), s.end());
        CAPTURE(r.name);
        CHECK(sum / static_cast<double>(draws) == doctest::Approx(r.mean).epsilon(0.15));
        // Inside its bin a quantile is only where the logarithm puts it.
        CHECK(s[draws / 2] == doctest::Approx(r.median).epsilon(0.2));
        CHECK(s[draws / 10 * 9] == doctest::Approx(r.upper).epsilon(0.2));
    }
}

TEST_CASE("a length is a function of its place") {
    for (const length_distribution& d : sequence::length_distributions) {
        std::vector<std::int64_t> forward;
        for (std::uint64_t i = 0; i < 50; ++i) { forward.push_back(length_at(d, stream, i)); }
        for (std::uint64_t i = 50; i-- > 0;) { CHECK(length_at(d, stream, i) == forward[i]); }
        std::vector<std::int64_t> other;
        for (std::uint64_t i = 0; i < 50; ++i) { other.push_back(length_at(d, {5, 6, 8}, i)); }
        CHECK(forward != other);
        for (const std::int64_t s : forward) { CHECK(s >= 1); }
    }
}

TEST_CASE("a batch is full, its last sequence cut, and none longer than allowed") {
    for (const length_distribution& d : sequence::length_distributions) {
        const auto lengths = drawn_lengths(d, stream, 100'000);
        std::int64_t sum = 0;
        for (std::size_t i = 0; i < lengths.size(); ++i) {
            CHECK(lengths[i] >= 1);
            if (i + 1 < lengths.size()) { CHECK(lengths[i] == length_at(d, stream, i)); }
            sum += lengths[i];
        }
        CHECK(sum == 100'000);
        CHECK(lengths.back() <= length_at(d, stream, lengths.size() - 1));
        for (const std::int64_t s : drawn_lengths(d, stream, 100'000, 333)) { CHECK(s <= 333); }
    }
    CHECK(drawn_lengths(sequence::length_distribution_named("wlb"), stream, 0).empty());
    CHECK_THROWS_WITH_AS(static_cast<void>(drawn_lengths(sequence::length_distribution_named("wlb"), stream, -1)),
                         "lengths: a batch of -1 tokens in sequences of at most 9223372036854775807", usage_error);
    CHECK_THROWS_AS(static_cast<void>(drawn_lengths(sequence::length_distribution_named("wlb"), stream, 1, 0)),
                    usage_error);
}

TEST_CASE("bins without documents are refused") {
    const sequence::length_bin empty[] = {{1, 4, 0}, {5, 8, 0}};
    CHECK_THROWS_WITH_AS(static_cast<void>(sequence::length_at({"mine", empty}, stream, 0)),
                         "lengths: the bins of 'mine' count 0 documents", usage_error);
    const sequence::length_bin one[] = {{1, 4, 0}, {5, 8, 1}, {9, 12, 0}};
    for (std::uint64_t i = 0; i < 20; ++i) {
        const std::int64_t s = sequence::length_at({"mine", one}, stream, i);
        CHECK((s >= 5 && s <= 8));
    }
}

TEST_CASE("names") {
    CHECK_THROWS_WITH_AS(static_cast<void>(sequence::length_distribution_named("arxiv")),
                         "lengths: 'arxiv' is not one of prolong, wlb, wikipedia, magi, arxiv-surrogate, "
                         "github-surrogate, stackexchange-surrogate, books-surrogate",
                         usage_error);
}
