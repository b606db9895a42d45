// model_layout: a model as a chain of modules (head, blocks, tail), each one run of elements that a single copy moves.
// Needs zeroth/tensor_slice. Tensors that the tail shares with the head (tied embeddings) are stored once.
// Source: Wang et al., ZO2, arXiv:2503.12668 (blocks as the unit of transfer).
#pragma once

#include <algorithm>    // min, max
#include <cstddef>      // size_t
#include <cstdint>      // tensors
#include <functional>   // less
#include <map>          // who has a tensor
#include <span>         // lists
#include <string>       // names
#include <string_view>  // names
#include <vector>       // modules

#include <tutti/core/error.hpp>           // usage_error
#include <tutti/core/partition.hpp>       // part
#include <tutti/core/text.hpp>            // formatted
#include <tutti/zeroth/tensor_slice.hpp>  // tensor_slice

namespace tutti::zeroth {

/// A tensor as its owner describes it: by a name, by a number, or by both.
///
/// Semantics  the number says which random numbers are the tensor's: no two tensors of a model have the same. Names alone
///            are numbered in the order in which they come first; a model has numbers for all of its tensors, or for none.
struct tensor_shape {
    static constexpr std::uint32_t by_name = static_cast<std::uint32_t>(-1);
    std::uint32_t tensor = by_name;
    std::size_t count = 0;  ///< elements
    bool decayed = true;
    bool frozen = false;
    std::string name{};
    friend bool operator==(const tensor_shape&, const tensor_shape&) = default;
};

/// A model in the order in which it runs. A tensor of the tail that the head has too is the head's.
struct model_shape {
    std::vector<tensor_shape> head{};
    std::vector<std::vector<tensor_shape>> blocks{};
    std::vector<tensor_shape> tail{};
};

/// Which tensor of a model: number `slice` of those that module `module` owns.
struct tensor_index {
    std::size_t module = 0, slice = 0;
    friend bool operator==(const tensor_index&, const tensor_index&) = default;
};

/// Where one tensor of a module is: in which module's run, and where in the perturbed copy that the module works on.
struct tensor_place {
    std::size_t owner = 0;   ///< module; another than its own only where it is tied
    tensor_slice at;         ///< whole tensor, by its place in the owner's run
    tensor_slice alone;      ///< whole tensor, in a run of its own
    std::size_t copied = 0;  ///< its first element in the perturbed copy
};

/// The part of `slices` that lies in elements [own.first, own.first + own.count) of their run, by places in that part.
[[nodiscard]] inline std::vector<tensor_slice> slices_within(std::span<const tensor_slice> slices, part own) {
    std::vector<tensor_slice> inside;
    const std::size_t end = own.first + own.count;
    for (const tensor_slice& s : slices) {
        const std::size_t from = std::max(s.offset, own.first);
        const std::size_t to = std::min(s.offset + s.count, end);
        if (from >= to) { continue; }
        tensor_slice piece = s;
        piece.first = s.first + (from - s.offset);
        piece.offset = from - own.first;
        piece.count = to - from;
        inside.push_back(piece);
    }
    return inside;
}

/// Where everything is.
///
/// Semantics  module 0 is the head, 1 to blocks() are the blocks, the last one is the tail. Tensors of a module lie in
///            the order given, each at a multiple of 256 bytes; a run is padded to 256 bytes for each of `ranks`, so
///            that all ranks have equal parts of it.
/// Units      elements, unless said otherwise.
/// Errors     usage_error: elements of a size that does not divide 256 bytes; no block, a tensor without elements, the same
///            tensor twice, a name of two tensors; tensors with a number among some without; a tied tensor that the tail
///            describes otherwise than the head.
class model_layout {
    struct run {
        std::vector<tensor_slice> slices;
        std::vector<tensor_place> places;
        std::size_t size = 0;
        std::size_t copied = 0;
    };
    std::vector<run> modules_;
    std::map<std::string, tensor_index, std::less<>> names_;
    std::size_t ranks_;
    std::size_t grain_;

public:
    static constexpr std::size_t alignment = 256;  ///< bytes: what copy engines and vector loads like

    model_layout(const model_shape& model, std::size_t element_bytes, std::size_t ranks = 1)
        : ranks_(ranks), grain_(grain_of(element_bytes)) {
        if (model.blocks.empty()) { throw usage_error("model_layout: the model has no block"); }
        if (ranks == 0) { throw usage_error("model_layout: 0 ranks, expected 1 or more"); }
        numbering known;
        add(model.head, known, 0);
        for (const auto& block : model.blocks) { add(block, known, modules_.size()); }
        add(model.tail, known, 0);
    }

    [[nodiscard]] std::size_t modules() const noexcept { return modules_.size(); }
    [[nodiscard]] std::size_t blocks() const noexcept { return modules_.size() - 2; }
    [[nodiscard]] std::size_t tail() const noexcept { return modules_.size() - 1; }
    [[nodiscard]] std::size_t ranks() const noexcept { return ranks_; }
    [[nodiscard]] std::size_t grain() const noexcept { return grain_; }

    /// Elements of a module's run, with padding; a tied tensor is not among the tail's.
    [[nodiscard]] std::size_t size(std::size_t m) const { return modules_.at(m).size; }
    /// The tensor of a name, where its owner has it. Errors: usage_error where none is called so.
    [[nodiscard]] tensor_index find(std::string_view name) const {
        const auto found = names_.find(name);
        if (found == names_.end()) { throw usage_error(formatted("model_layout: no tensor is called '{}'", name)); }
        return found->second;
    }
    /// Elements of the tensor of a name. Errors: as find().
    [[nodiscard]] std::size_t count(std::string_view name) const {
        const tensor_index at = find(name);
        return slices(at.module)[at.slice].count;
    }
    /// What the module owns, by places in its run.
    [[nodiscard]] std::span<const tensor_slice> slices(std::size_t m) const { return modules_.at(m).slices; }
    /// What the module uses, in the order given.
    [[nodiscard]] std::span<const tensor_place> places(std::size_t m) const { return modules_.at(m).places; }
    /// Elements of the perturbed copy that the module works on.
    [[nodiscard]] std::size_t copied(std::size_t m) const { return modules_.at(m).copied; }
    [[nodiscard]] std::size_t largest_copy() const noexcept {
        std::size_t most = 0;
        for (const run& r : modules_) { most = std::max(most, r.copied); }
        return most;
    }
    /// The part of a module's run that a rank moves.
    [[nodiscard]] part part_of(std::size_t m, std::size_t rank) const {
        const std::size_t each = size(m) / ranks_;
        return {rank * each, each};
    }

private:
    // While a layout is made.
    struct numbering {
        std::map<std::uint32_t, std::size_t> owners;  // modules, by tensor
        std::map<std::string, std::uint32_t, std::less<>> of_names;
        bool given = false;  // tensors have numbers

        // Its number, which from here on is the name's.
        [[nodiscard]] std::uint32_t of(const tensor_shape& t) {
            const bool numbered = t.tensor != tensor_shape::by_name;
            if (!numbered && t.name.empty()) {
                throw usage_error("model_layout: a tensor has neither a name nor a number");
            }
            if (!owners.empty() && given != numbered) {
                throw usage_error(formatted("model_layout: tensor '{}' has {} number, others have {}", t.name,
                                            numbered ? "a" : "no", numbered ? "none" : "one"));
            }
            given = numbered;
            if (t.name.empty()) { return t.tensor; }
            const auto next = static_cast<std::uint32_t>(of_names.size());
            const auto [at, fresh] = of_names.try_emplace(t.name, numbered ? t.tensor : next);
            if (numbered && at->second != t.tensor) {
                throw usage_error(
                    formatted("model_layout: tensors {} and {} are both called '{}'", at->second, t.tensor, t.name));
            }
            return at->second;
        }
    };

    [[nodiscard]] static std::size_t grain_of(std::size_t element_bytes) {
        if (element_bytes == 0 || alignment % element_bytes != 0) {
            throw usage_error(formatted("model_layout: elements of {} bytes, expected a divisor of {}", element_bytes,
                                        std::size_t{alignment}));
        }
        return alignment / element_bytes;
    }
    [[nodiscard]] std::size_t rounded(std::size_t count, std::size_t to) const { return (count + to - 1) / to * to; }

    [[nodiscard]] static std::string called(const tensor_shape& t) {
        return t.name.empty() ? std::to_string(t.tensor) : "'" + t.name + "'";
    }
    [[nodiscard]] static tensor_slice alone(tensor_slice s) noexcept {
        s.offset = 0;
        return s;
    }
    void add(const std::vector<tensor_shape>& tensors, numbering& numbers, std::size_t tied) {
        const std::size_t m = modules_.size();
        run& r = modules_.emplace_back();
        for (tensor_shape t : tensors) {
            t.tensor = numbers.of(t);
            if (t.count == 0) { throw usage_error(formatted("model_layout: tensor {} has no elements", called(t))); }
            const auto [known, fresh] = numbers.owners.try_emplace(t.tensor, m);
            if (fresh) {
                const tensor_slice at{t.tensor, 0, r.size, t.count, t.decayed, t.frozen};
                if (!t.name.empty()) { names_[t.name] = {m, r.slices.size()}; }
                r.slices.push_back(at);
                r.places.push_back({m, at, alone(at), r.size});
                r.size += rounded(t.count, grain_);
            } else if (m == tied || known->second != tied || !tie(r, t)) {
                throw usage_error(formatted("model_layout: tensor {} is in module {} and again in module {}", called(t),
                                            known->second, m));
            }
        }
        r.size = rounded(r.size, grain_ * ranks_);
        r.copied = r.size;
        for (tensor_place& p : r.places) {
            if (p.owner == m) { continue; }
            p.copied = r.copied;
            r.copied += rounded(p.at.count, grain_);
        }
    }
    // The head's tensor as one of `r`, unless `r` has it already.
    [[nodiscard]] bool tie(run& r, const tensor_shape& t) {
        for (const tensor_place& p : r.places) {
            if (p.at.tensor == t.tensor) { return false; }
        }
        for (const tensor_slice& s : modules_.front().slices) {
            if (s.tensor != t.tensor) { continue; }
            if (s.count != t.count || s.decayed != t.decayed || s.frozen != t.frozen) {
                throw usage_error(formatted("model_layout: tied tensor {} has {} elements in the head and {} in the "
                                            "tail, or is decayed or frozen in one alone",
                                            called(t), s.count, t.count));
            }
            r.places.push_back({0, s, alone(s), 0});
            return true;
        }
        return false;
    }
};

}  // namespace tutti::zeroth
