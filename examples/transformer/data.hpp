// Text as bytes: files are read, split 90/10 into training and validation, and sampled by position.
// Needs model.hpp for the random streams. Which samples a step sees is a function of (seed, global sample index) alone.
#pragma once

#include <algorithm>    // sort, find
#include <array>        // names of text files
#include <cstdint>      // bytes
#include <filesystem>   // folders
#include <fstream>      // files
#include <span>         // tokens
#include <stdexcept>    // bad_input
#include <string>       // messages
#include <string_view>  // file names
#include <vector>       // the text

#include <fmt/format.h>           // messages
#include <tutti/core/philox.hpp>  // sampling

#include "model.hpp"

namespace transformer {

/// The user asked for something that cannot be done: one line on stderr, exit code 2, nothing written.
class bad_input : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

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

/// One run's text.
class corpus {
    std::vector<std::uint8_t> text_;
    std::size_t training_;

public:
    /// Errors  bad_input when either part is shorter than one sequence and its next byte.
    corpus(std::vector<std::uint8_t> text, int context) : text_(std::move(text)), training_(text_.size() * 9 / 10) {
        const auto sequence = static_cast<std::size_t>(context) + 1;
        if (training_ < sequence || text_.size() - training_ < sequence) {
            throw bad_input(fmt::format("--data: {} bytes are too few: a tenth is kept for validation, and a context "
                                        "of {} needs {} there",
                                        text_.size(), context, sequence));
        }
    }
    [[nodiscard]] tokens training() const { return tokens(text_).first(training_); }
    [[nodiscard]] tokens validation() const { return tokens(text_).subspan(training_); }
    [[nodiscard]] std::size_t size() const { return text_.size(); }
};

/// Input and target bytes of `count` sequences, one after the other; targets are the inputs' next bytes.
struct batch {
    std::vector<std::uint8_t> in;
    std::vector<std::uint8_t> targets;
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
    }
};

/// Samples [first, first + count) of the endless shuffled stream of a seed: each starts at a uniformly random byte.
inline void draw(batch& out, tokens training, std::uint64_t seed, std::uint64_t first, std::size_t count, int context) {
    const auto length = static_cast<std::size_t>(context);
    const tutti::random_stream stream = random_for(seed, purpose::data);
    out.clear();
    for (std::uint64_t sample = first; sample < first + count; ++sample) {
        out.append(training, stream.below(sample, training.size() - length), length);
    }
}

}  // namespace transformer
