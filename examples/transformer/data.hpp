// What a run learns from: text, a token a byte, or files of GPT-2 tokens; its training and validation parts; samples.
// Needs token_file.hpp, parameters.hpp for the random streams. Samples are a function of (seed, global index) alone.
#pragma once

#include <algorithm>     // sort, find
#include <array>         // names of text files
#include <cerrno>        // why a file cannot be read
#include <cstddef>       // sizes
#include <cstdint>       // bytes
#include <filesystem>    // folders
#include <fstream>       // files
#include <span>          // tokens
#include <string>        // messages
#include <string_view>   // file names
#include <system_error>  // why a file cannot be read
#include <utility>       // move
#include <vector>        // the text

#include <fmt/format.h>           // messages
#include <tutti/core/philox.hpp>  // sampling

#include "bad_input.hpp"
#include "parameters.hpp"
#include "token_file.hpp"

namespace transformer {

/// What a folder given as data contributes.
[[nodiscard]] inline bool is_text(const std::filesystem::path& file) {
    constexpr std::array<std::string_view, 9> suffixes{".md", ".txt", ".hpp",   ".cpp", ".cuh",
                                                       ".cu", ".h",   ".cmake", ".py"};
    return std::find(suffixes.begin(), suffixes.end(), file.extension().string()) != suffixes.end();
}

/// The bytes of files in the order given; of folders, their text files by path, hidden ones left out.
/// Errors  bad_input names the path that cannot be read.
[[nodiscard]] inline std::vector<std::uint8_t> read_text(std::span<const std::string> paths) {
    namespace fs = std::filesystem;
    std::vector<fs::path> files;
    for (const std::string& path : paths) {
        std::error_code failed;
        if (!fs::is_directory(path, failed)) {
            files.emplace_back(path);
            continue;
        }
        std::vector<fs::path> found;
        for (fs::recursive_directory_iterator it(path, failed), end; !failed && it != end; it.increment(failed)) {
            const bool hidden = it->path().filename().string().starts_with('.');
            if (hidden) { it.disable_recursion_pending(); }
            if (!hidden && it->is_regular_file() && is_text(it->path())) { found.push_back(it->path()); }
        }
        if (failed) { throw bad_input(fmt::format("--data: cannot read '{}': {}", path, failed.message())); }
        std::sort(found.begin(), found.end());
        files.insert(files.end(), found.begin(), found.end());
    }
    std::vector<std::uint8_t> text;
    for (const fs::path& file : files) {
        std::ifstream in(file, std::ios::binary);
        text.insert(text.end(), std::istreambuf_iterator<char>(in), {});
        if (!in || in.bad()) {
            const std::string reason = std::make_error_code(static_cast<std::errc>(errno)).message();
            throw bad_input(fmt::format("--data: cannot read '{}': {}", file.string(), reason));
        }
    }
    return text;
}

/// One run's tokens, in memory or mapped.
class corpus {
    std::vector<std::uint16_t> text_;
    std::vector<token_file> files_;
    tokens training_, validation_;  // moving the above does not move what these see

    void keep_a_tenth(tokens all, int context, const char* option, const char* unit) {
        training_ = all.first(all.size() * 9 / 10);
        validation_ = all.subspan(training_.size());
        const std::size_t needed = window_of(context);
        if (training_.size() < needed || validation_.size() < needed) {
            throw bad_input(fmt::format("{}: {} {} are too few: a tenth is kept for validation, and a context of {} "
                                        "needs {} there",
                                        option, all.size(), unit, context, needed));
        }
    }
    static void require_window(tokens part, int context, const char* option) {
        if (part.size() >= window_of(context)) { return; }
        throw bad_input(fmt::format("{}: {} tokens are too few: a context of {} needs {}", option, part.size(), context,
                                    window_of(context)));
    }
    /// A sequence and the target of its last token.
    static std::size_t window_of(int context) { return static_cast<std::size_t>(context) + 1; }

public:
    /// Text, a token a byte; its last tenth is for validation.
    /// Errors  bad_input when either part is shorter than one sequence and its next byte.
    corpus(const std::vector<std::uint8_t>& text, int context) : text_(text.begin(), text.end()) {
        keep_a_tenth(text_, context, "--data", "bytes");
    }
    /// GPT-2 tokens. Without a path for validation the last tenth is kept.
    /// Errors  bad_input when a file is not what it should be, holds a token outside the vocabulary, or is too short.
    /// Cost    reads all tokens once; they stay in their files.
    corpus(const std::string& training, const std::string& validation, const configuration& c) {
        files_.emplace_back("--tokens", training);
        if (!validation.empty()) { files_.emplace_back("--validation-tokens", validation); }
        for (const token_file& file : files_) { file.require_below(c.vocabulary); }
        if (validation.empty()) {
            keep_a_tenth(files_[0].values(), c.context, "--tokens", "tokens");
        } else {
            training_ = files_[0].values();
            validation_ = files_[1].values();
            require_window(training_, c.context, "--tokens");
            require_window(validation_, c.context, "--validation-tokens");
        }
    }
    corpus(corpus&&) noexcept = default;
    corpus& operator=(corpus&&) noexcept = default;

    [[nodiscard]] tokens training() const { return training_; }
    [[nodiscard]] tokens validation() const { return validation_; }
    [[nodiscard]] std::size_t size() const { return training_.size() + validation_.size(); }
};

/// Input and target tokens of `count` sequences, one after the other; targets are the inputs' next tokens.
struct batch {
    std::vector<std::uint16_t> in;
    std::vector<std::uint16_t> targets;
    std::vector<std::int64_t> lengths;  // of sequences that ranks share, whose rows these are on one; none: all is here
    /// Appends the sequence of `length` tokens that starts at `first`.
    void append(tokens text, std::size_t first, std::size_t length) {
        const auto at = text.begin() + static_cast<std::ptrdiff_t>(first);
        const auto end = at + static_cast<std::ptrdiff_t>(length);
        in.insert(in.end(), at, end);
        targets.insert(targets.end(), at + 1, end + 1);
    }
    void clear() {
        in.clear();
        targets.clear();
        lengths.clear();
    }
};

/// Where a sample starts: at a uniformly random token.
[[nodiscard]] inline std::size_t sample_start(tokens training, std::uint64_t seed, std::uint64_t sample,
                                              std::size_t length) {
    return random_for(seed, purpose::data).below(sample, training.size() - length);
}

/// Samples [first, first + count) of the endless shuffled stream of a seed.
inline void draw(batch& out, tokens training, std::uint64_t seed, std::uint64_t first, std::size_t count, int context) {
    const auto length = static_cast<std::size_t>(context);
    out.clear();
    for (std::uint64_t sample = first; sample < first + count; ++sample) {
        out.append(training, sample_start(training, seed, sample, length), length);
    }
}

}  // namespace transformer
