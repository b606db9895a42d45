// checked: before anything moves, ranks show each other what they are about to do, and who differs is named.
// Needs comm/decorator and comm/detail/intent.
#pragma once

#include <algorithm>    // copy_n, find, min
#include <array>        // characters of names
#include <bit>          // names as words
#include <cstddef>      // size_t
#include <cstdint>      // words
#include <span>         // tables
#include <string>       // texts
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // values by rank

#include <tutti/comm/decorator.hpp>      // decorator
#include <tutti/comm/detail/intent.hpp>  // intent, finding
#include <tutti/core/error.hpp>          // mismatch_error
#include <tutti/core/text.hpp>           // formatted

namespace tutti::comm {

/// A communicator on which ranks that disagree get an error instead of a hang or wrong numbers.
///
/// Semantics  ahead of every collective, duplicate, split and gather_control all ranks compare: which one it is, its
///            number, root, type, element size, operator and count; the counts of the _v forms; names of children and
///            the colors of split. all_to_all_v: what r sends to s is what s expects from r. When anything differs
///            every rank throws that finding, no data has moved, and the family is aborted.
///            exchange is not compared: only the ranks it names take part.
/// Cost       one control gather a call, for which a device queue waits for the host: a tool for debugging and tests.
///            A disagreement about a table costs up to n/2 + 1 further gathers, which name the entry.
/// Errors     mismatch_error, whose ranks() differ from the majority (of equal parties, the one with the lowest rank):
///            `all_reduce: count differs (rank 0: 1024, rank 3: 1023), call 17 on 'dp', rank 0`.
template <decoratable C> class checked : public decorator<checked<C>, C> {
    using base = decorator<checked<C>, C>;
    friend base;
    using intent = detail::intent;
    using finding = detail::finding;
    using by_rank = std::vector<std::uint64_t>;

public:
    /// Algorithms with more to compare than counts ask whether somebody compares.
    static constexpr bool compares_calls = true;

    explicit checked(C inner) : base(std::move(inner)) {}

    void execute(const call& c) {
        if (c.kind != collective::exchange) {
            compare(intent(c, this->rank()), c.count(),
                    [&](const std::vector<intent>& all) { return explain(c, all); });
        }
        this->inner().execute(c);
    }

private:
    void before(const typename base::control_call& k) {
        if (k.kind == control::split && k.colors.size() != static_cast<std::size_t>(this->size())) {
            const error_context context = this->context(k.kind, k.sequence);
            throw usage_error(
                formatted("split: {} colors for {} ranks{}", k.colors.size(), this->size(), where(context)), context);
        }
        intent i(k.kind, k.sequence);
        i.first = detail::hash_of(std::span(k.name));
        i.second = detail::hash_of(k.colors);
        compare(i, 0, [&](const std::vector<intent>& all) { return explain(k, all); });
    }
    [[nodiscard]] checked wrap(C child, std::span<const int>) { return checked(std::move(child)); }

    // All ranks get the same records, so that all return, or none does.
    template <class Explain> void compare(const intent& mine, std::size_t count, Explain explain) {
        const std::vector<control_record> all = this->inner().gather_control(mine.record());
        if (intent::agree(all)) { return; }
        std::vector<intent> intents;
        for (const control_record& r : all) { intents.emplace_back(r); }
        finding found;
        if (!detail::differ_in_fields(intents, found)) { found = explain(intents); }
        error_context context = this->context(mine.what, mine.sequence);
        context.count = count;
        context.type = mine.type;
        const std::string text = formatted("{}: {}{}", context.operation, found.text, where(context));
        detail::abort_together(this->inner(), text);
        throw mismatch_error(text, std::move(found.ranks), std::move(context));
    }

    [[nodiscard]] finding explain(const call& c, const std::vector<intent>& all) {
        finding found;
        if (c.kind == collective::all_to_all_v) {
            found.text = "count differs";
            return refined(found, [&] { return unequal_pair(c); });
        }
        if (differ_in(all, &intent::first, "count", "{}", found)) { return found; }
        static_cast<void>(differ_in(all, &intent::second, "counts", "{:016x}", found));
        return refined(found, [&] { return unequal_entry("counts", c.send_counts); });
    }
    [[nodiscard]] finding explain(const typename base::control_call& k, const std::vector<intent>& all) {
        finding found;
        if (differ_in(all, &intent::first, "name", "{:016x}", found)) {
            return refined(found, [&] { return unequal_name(k.name, all); });
        }
        static_cast<void>(differ_in(all, &intent::second, "colors", "{:016x}", found));
        return refined(found, [&] { return unequal_entry("colors", k.colors); });
    }
    [[nodiscard]] static bool differ_in(const std::vector<intent>& all, std::uint64_t intent::*word,
                                        std::string_view what, std::string_view format, finding& found) {
        by_rank values;
        for (const intent& i : all) { values.push_back(i.*word); }
        const auto text = [&](std::size_t r) {
            const tutti::detail::text_argument value(values[r]);
            return tutti::detail::compose(format, &value);
        };
        return detail::differ(values, what, text, found);
    }

    // `detail` asks the other ranks again; when that fails, what is known stands.
    template <class Detail> [[nodiscard]] static finding refined(const finding& known, Detail detail) {
        try {
            return detail();
        } catch (const error&) { return known; }
    }

    // The first entry in which the ranks' tables (one entry a rank) differ.
    template <class T> [[nodiscard]] finding unequal_entry(std::string_view name, std::span<const T> mine) {
        finding found;
        for (std::size_t first = 0; first < mine.size(); first += 4) {
            control_record words{};
            const std::size_t n = std::min<std::size_t>(4, mine.size() - first);
            for (std::size_t i = 0; i < n; ++i) { words[i] = static_cast<std::uint64_t>(mine[first + i]); }
            const auto all = this->inner().gather_control(words);
            for (std::size_t i = 0; i < n && found.ranks.empty(); ++i) {
                by_rank values;
                for (const control_record& r : all) { values.push_back(r[i]); }
                const auto text = [&](std::size_t r) { return formatted("{}", static_cast<T>(values[r])); };
                static_cast<void>(detail::differ(values, formatted("{}[{}]", name, first + i), text, found));
            }
        }
        return found;
    }

    // Names travel up to their 32nd character.
    [[nodiscard]] finding unequal_name(std::string_view mine, const std::vector<intent>& intents) {
        using letters = std::array<char, sizeof(control_record)>;
        letters own{};
        std::copy_n(mine.data(), std::min(mine.size(), own.size()), own.data());
        const auto all = this->inner().gather_control(std::bit_cast<control_record>(own));
        by_rank hashes;
        for (const intent& i : intents) { hashes.push_back(i.first); }
        const auto text = [&](std::size_t r) {
            const auto name = std::bit_cast<letters>(all[r]);
            return formatted("'{}'", std::string(name.begin(), std::find(name.begin(), name.end(), '\0')));
        };
        finding found;
        static_cast<void>(detail::differ(hashes, "name", text, found));
        return found;
    }

    [[nodiscard]] finding unequal_pair(const call& c) {
        const std::size_t n = c.send_counts.size();
        std::vector<by_rank> sent(n, by_rank(n));  // [from][to]
        std::vector<by_rank> expected(n, by_rank(n));
        for (std::size_t first = 0; first < n; first += 2) {
            const std::size_t width = std::min<std::size_t>(2, n - first);
            control_record words{};
            for (std::size_t i = 0; i < width; ++i) {
                words[2 * i] = c.send_counts[first + i];
                words[2 * i + 1] = c.recv_counts[first + i];
            }
            const auto all = this->inner().gather_control(words);
            for (std::size_t r = 0; r < n; ++r) {
                for (std::size_t i = 0; i < width; ++i) {
                    sent[r][first + i] = all[r][2 * i];
                    expected[first + i][r] = all[r][2 * i + 1];
                }
            }
        }
        for (std::size_t from = 0; from < n; ++from) {
            for (std::size_t to = 0; to < n; ++to) {
                if (sent[from][to] == expected[from][to]) { continue; }
                return {formatted("count differs (rank {} sends {} to rank {}, which expects {})", from, sent[from][to],
                                  to, expected[from][to]),
                        {static_cast<int>(from)}};
            }
        }
        return {"count differs", {}};  // not reached: equal counts have equal sums
    }
};

}  // namespace tutti::comm
