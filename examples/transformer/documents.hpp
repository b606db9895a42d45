// documents: what a step learns from where documents keep their lengths: how long they are, where they are in the text,
// and which rows a rank has of them. Needs sequence/lengths and data.hpp. --lengths.
#pragma once

#include <algorithm>     // any_of, min
#include <cctype>        // isspace
#include <cerrno>        // why a file cannot be read
#include <charconv>      // from_chars
#include <cstddef>       // size_t
#include <cstdint>       // lengths
#include <filesystem>    // is_directory
#include <fstream>       // files of lengths
#include <iterator>      // whole files
#include <map>           // counts
#include <span>          // pieces
#include <string>        // names
#include <string_view>   // words
#include <system_error>  // errc
#include <vector>        // documents

#include <fmt/format.h>                  // messages
#include <tutti/core/state.hpp>          // hash_bytes
#include <tutti/sequence/lengths.hpp>    // distributions
#include <tutti/sequence/placement.hpp>  // piece

#include "bad_input.hpp"
#include "data.hpp"
#include "parameters.hpp"

namespace transformer {

/// How long documents are: a corpus that sequence/lengths.hpp knows, or a file of lengths, drawn as often as they are there.
class document_lengths {
    tutti::sequence::length_distribution distribution_;
    std::vector<tutti::sequence::length_bin> bins_;  // of a file

public:
    /// "prolong, wlb, ...": for messages.
    [[nodiscard]] static std::string names() {
        std::string text;
        for (const auto& d : tutti::sequence::length_distributions) {
            text += fmt::format("{}{}", text.empty() ? "" : ", ", d.name);
        }
        return text;
    }

    /// Errors  bad_input: neither a name nor a file that can be read, or one with anything but numbers of tokens.
    explicit document_lengths(const std::string& source) {
        for (const auto& d : tutti::sequence::length_distributions) {
            if (d.name == source) {
                distribution_ = d;
                return;
            }
        }
        if (std::error_code ignored; std::filesystem::is_directory(source, ignored)) {
            throw bad_input(fmt::format("--lengths: '{}' is a folder", source));
        }
        std::ifstream in(source, std::ios::binary);
        const std::string text{std::istreambuf_iterator<char>(in), {}};
        if (!in || in.bad()) {
            throw bad_input(fmt::format("--lengths: '{}' is not one of {}, nor a file that can be read: {}", source,
                                        names(), std::make_error_code(static_cast<std::errc>(errno)).message()));
        }
        std::map<std::int64_t, std::int64_t> counts;
        const auto blank = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
        for (std::size_t at = 0; at < text.size();) {
            if (blank(text[at])) {
                ++at;
                continue;
            }
            std::size_t end = at;
            while (end < text.size() && !blank(text[end])) { ++end; }
            std::int64_t length = 0;
            const auto [rest, problem] = std::from_chars(text.data() + at, text.data() + end, length);
            if (problem != std::errc{} || rest != text.data() + end || length < 1) {
                throw bad_input(fmt::format("--lengths: '{}': '{}' is not a number of tokens, 1 or more", source,
                                            text.substr(at, std::min<std::size_t>(end - at, 40))));
            }
            ++counts[length];
            at = end;
        }
        if (counts.empty() || counts.rbegin()->first == 1) {
            throw bad_input(fmt::format("--lengths: '{}' has no length of 2 or more: a document of one token predicts "
                                        "nothing",
                                        source));
        }
        for (const auto& [length, count] : counts) { bins_.push_back({length, length, count}); }
        distribution_.name = "file";
    }

    /// Of the documents of a step that has `all` tokens: the last is cut to what is left, each to `longest`.
    /// Determinism  of the arguments: every rank draws the same.
    [[nodiscard]] std::vector<std::int64_t> of_step(std::uint64_t seed, int step, std::int64_t all,
                                                    std::int64_t longest) const {
        auto d = distribution_;
        if (!bins_.empty()) { d.bins = bins_; }
        return tutti::sequence::drawn_lengths(d, random_for(seed, purpose::lengths, static_cast<std::uint32_t>(step)),
                                              all, longest);
    }

    /// Of all that it draws from.
    [[nodiscard]] std::uint64_t hash(std::uint64_t h) const {
        const std::string_view name = distribution_.name;
        h = tutti::hash_bytes(tutti::as_bytes(tutti::view<const char>(name.data(), name.size())), h);
        for (const auto& b : bins_) {
            const std::int64_t words[] = {b.first, b.count};
            h = tutti::hash_bytes(tutti::as_bytes(tutti::view<const std::int64_t>(words, 2)), h);
        }
        return h;
    }
};

/// Where the document of number `i` of a step starts in the text: a function of (seed, step, i), as samples are.
[[nodiscard]] inline std::size_t document_start(tokens training, std::uint64_t seed, int step, int i, int longest) {
    const tutti::random_stream stream = random_for(seed, purpose::data, static_cast<std::uint32_t>(step));
    return stream.below(static_cast<std::uint64_t>(i), training.size() - static_cast<std::size_t>(longest));
}

/// Makes `out` the rows of these pieces of a step's documents. A token's target is the next one of its document; the last
/// has none. Returns how many have one.
[[nodiscard]] inline std::uint64_t draw(batch& out, tokens training, std::uint64_t seed, int step, int longest,
                                        std::span<const std::int64_t> lengths,
                                        std::span<const tutti::sequence::piece> pieces) {
    out.clear();
    std::uint64_t valid = 0;
    for (const auto& p : pieces) {
        if (p.size() == 0) { continue; }
        const std::size_t start = document_start(training, seed, step, p.sequence, longest);
        out.append(training, start + static_cast<std::size_t>(p.begin), static_cast<std::size_t>(p.size()));
        valid += static_cast<std::uint64_t>(p.size());
        if (p.end == lengths[static_cast<std::size_t>(p.sequence)]) {
            out.targets.back() = no_target;
            --valid;
        }
    }
    return valid;
}

}  // namespace transformer
