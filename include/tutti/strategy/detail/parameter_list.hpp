// What every strategy does with a parameter list: checks it, agrees on it over ranks, puts it in buckets, lists the state
// of it, finds contiguous storage.
// Needs strategy/strategy and a communicator with agree().
#pragma once

#include <algorithm>      // sort
#include <concepts>       // invocable, same_as
#include <cstddef>        // size_t
#include <cstdint>        // hashes
#include <exception>      // errors of checks
#include <optional>       // a seed
#include <span>           // entries
#include <string>         // names
#include <string_view>    // names
#include <unordered_set>  // duplicates
#include <utility>        // move
#include <vector>         // sizes

#include <tutti/comm/communicator.hpp>         // communicator
#include <tutti/core/error.hpp>                // usage_error
#include <tutti/core/state.hpp>                // hash_bytes, state_entry
#include <tutti/core/stochastic_rounding.hpp>  // half_element
#include <tutti/core/text.hpp>                 // formatted
#include <tutti/optimize/optimizer.hpp>        // segment, optimizer_state
#include <tutti/schedule/bucket.hpp>           // plan_buckets
#include <tutti/strategy/strategy.hpp>         // parameters

namespace tutti::strategy::detail {

/// "'h.0.weight', float32 [768, 3072], no decay"
template <class T, memory M> [[nodiscard]] std::string describe(const parameter<T, M>& p) {
    std::string shape;
    for (const std::size_t n : p.shape) { shape += formatted("{}{}", shape.empty() ? "" : ", ", n); }
    return formatted("'{}', {} [{}]{}", p.name, name_of(dtype_of<T>), shape, p.decay ? "" : ", no decay");
}

[[nodiscard]] inline std::uint64_t hash_text(std::string_view text) noexcept {
    return hash_bytes(as_bytes(view<const char>(text.data(), text.size())));
}

/// Errors: usage_error naming two views of a parameter list that share memory, which one would overwrite for the other.
template <class T, memory M> void expect_apart(const parameters<T, M>& list) {
    struct run {
        std::uintptr_t begin, end;
        std::size_t of;
        std::string_view what;
    };
    std::vector<run> runs;
    const auto add = [&](std::size_t i, std::string_view what, view<T, M> v) {
        const auto begin = reinterpret_cast<std::uintptr_t>(v.data());
        if (!v.empty()) { runs.push_back({begin, begin + v.size() * sizeof(T), i, what}); }
    };
    for (std::size_t i = 0; i < list.size(); ++i) {
        add(i, "value", list[i].value);
        add(i, "gradient", list[i].gradient);
    }
    std::sort(runs.begin(), runs.end(), [](const run& a, const run& b) { return a.begin < b.begin; });
    for (std::size_t k = 1; k < runs.size(); ++k) {
        const run &a = runs[k - 1], &b = runs[k];
        if (a.end > b.begin) {
            throw usage_error(formatted(
                "attach: the {} of '{}' and the {} of '{}' share memory; list a tensor that is used twice once", a.what,
                list[a.of].name, b.what, list[b.of].name));
        }
    }
}

/// Errors: usage_error naming the parameter whose name, shape or views make no sense.
template <class T, memory M> void expect_valid(const parameters<T, M>& list) {
    std::unordered_set<std::string_view> names;
    for (std::size_t i = 0; i < list.size(); ++i) {
        const auto& p = list[i];
        if (p.name.empty()) { throw usage_error(formatted("attach: parameter {} has no name", i)); }
        if (!names.insert(p.name).second) {
            throw usage_error(formatted("attach: two parameters are named '{}'", p.name));
        }
        std::size_t product = 1;
        for (const std::size_t n : p.shape) {
            if (n != 0 && product > static_cast<std::size_t>(-1) / n) {
                throw usage_error(formatted("attach: {}: the shape overflows", describe(p)));
            }
            product *= n;
        }
        if (product != p.value.size()) {
            throw usage_error(
                formatted("attach: {}: the shape has {} elements, the value {}", describe(p), product, p.value.size()));
        }
        if constexpr (!std::same_as<M, phantom_memory>) {
            if (!p.value.empty() && p.value.data() == nullptr) {
                throw usage_error(formatted("attach: {}: the value is null", describe(p)));
            }
            if (!p.gradient.empty() && p.gradient.data() == nullptr) {
                throw usage_error(formatted("attach: {}: the gradient is null", describe(p)));
            }
        }
        if (!p.gradient.empty() && p.gradient.size() != p.value.size()) {
            throw usage_error(formatted("attach: {}: the value has {} elements, the gradient {}", describe(p),
                                        p.value.size(), p.gradient.size()));
        }
    }
    if constexpr (!std::same_as<M, phantom_memory>) { expect_apart(list); }
}

/// What strategies that send buckets ask besides. Errors: usage_error.
template <class T, memory M>
void expect_valid(const parameters<T, M>& list, std::size_t bucket_bytes,
                  const std::optional<std::uint64_t>& rounding) {
    expect_valid(list);
    if (bucket_bytes < sizeof(T)) { throw usage_error(formatted("attach: bucket_bytes is {}", bucket_bytes)); }
    if (rounding && !half_element<T>) {
        throw usage_error(
            formatted("attach: stochastic rounding is for values of 16 bits, these are {}", name_of(dtype_of<T>)));
    }
}

/// Runs what this rank checks by itself, which the other ranks are about to wait for. Errors: those of `work`, which
/// end the communicator's family.
template <communicator C, std::invocable Work> void check_alone(C& comm, Work work) {
    try {
        work();
    } catch (const std::exception& e) {
        comm.abort(e.what());
        throw;
    }
}

/// Collective. Errors: mismatch_error naming the first parameter in which ranks differ, and the ranks.
template <communicator C, class T, memory M>
void agree_on(C& comm, const parameters<T, M>& list, const std::string& setup) {
    comm.agree(list.size(), formatted("number of parameters (here {})", list.size()));
    for (std::size_t i = 0; i < list.size(); ++i) {
        const std::string text = describe(list[i]);
        comm.agree(hash_text(text), formatted("parameter {} (here {})", i, text));
    }
    comm.agree(hash_text(setup), formatted("setup (here {})", setup));
}

/// Buckets of whole tensors.
template <class T, memory M>
[[nodiscard]] schedule::bucket_plan plan_of(const parameters<T, M>& list, std::size_t bucket_bytes) {
    std::vector<std::size_t> sizes;
    for (const auto& p : list) { sizes.push_back(p.value.size()); }
    return schedule::plan_buckets(sizes, sizeof(T), bucket_bytes);
}

/// What a rank has of a tensor: `count` elements from its element `first` on, in a flat view from element `place` on.
struct tensor_part {
    std::size_t first = 0, count = 0, place = 0;
};
/// What a resume needs: masters and moments, each flat, by tensor; the number of updates; what the exchange keeps.
/// part(i) says what of tensor i is here.
template <class T, memory M, queue Q, class Part>
[[nodiscard]] std::vector<state_entry<M>> entries_of(const parameters<T, M>& list, ownership whose, Part part,
                                                     view<master_t<T>, M> masters,
                                                     const optimize::optimizer_state<T, Q>& moments,
                                                     std::span<const state_entry<M>> exchange) {
    std::vector<state_entry<M>> all;
    const auto add = [&](std::string_view what, view<master_t<T>, M> flat) {
        for (std::size_t i = 0; i < list.size(); ++i) {
            const tensor_part own = part(i);
            auto shape = list[i].shape.empty() ? std::vector<std::size_t>{1} : list[i].shape;
            all.push_back(state_of(formatted("{}/{}", list[i].name, what), flat.sub(own.place, own.count), whose,
                                   std::move(shape), own.first));
        }
    };
    add("value", masters);
    for (const auto& m : moments.moments()) { add(m.name, m.values.view()); }
    all.push_back(state_of("optimizer/steps", moments.counter(), ownership::replicated));
    all.insert(all.end(), exchange.begin(), exchange.end());
    return all;
}

/// The one view that the given views make up in their order, or an empty view when they do not lie one behind the
/// other. Phantom memory has no addresses: there, as with a trainer that cares, they do.
template <class T, memory M>
[[nodiscard]] view<T, M> contiguous(const parameters<T, M>& list, view<T, M> parameter<T, M>::*which) {
    T* begin = nullptr;
    std::size_t size = 0;
    for (const auto& p : list) {
        const view<T, M> v = p.*which;
        if (v.size() != p.value.size()) { return {}; }  // a gradient that the strategy is to provide
        if (v.empty()) { continue; }
        if (size == 0) { begin = v.data(); }
        if (v.data() != (begin == nullptr ? nullptr : begin + size)) { return {}; }
        size += v.size();
    }
    return {begin, size};
}

/// Runs of this rank's elements with the same decay flag, as few as possible; with `split_values` also one behind the
/// other in the trainer's memory. part(i) says what of tensor i is here.
template <class T, memory M, class Part>
[[nodiscard]] std::vector<optimize::segment> decay_segments(const parameters<T, M>& list, Part part,
                                                            bool split_values = false) {
    std::vector<optimize::segment> segments;
    const T* behind = nullptr;  // the last value
    for (std::size_t i = 0; i < list.size(); ++i) {
        const tensor_part own = part(i);
        const auto& p = list[i];
        if (own.count == 0) { continue; }
        const bool joined = !split_values || p.value.data() == behind;
        if (!segments.empty() && segments.back().decay == p.decay && joined) {
            segments.back().count += own.count;
        } else {
            segments.push_back({own.place, own.count, p.decay});
        }
        behind =
            p.value.data() == nullptr ? nullptr : p.value.data() + p.value.size();  // phantom memory has no addresses
    }
    return segments;
}

/// The trainer's values by segment, each of which is one run of its memory.
template <class T, memory M>
[[nodiscard]] std::vector<view<T, M>> values_of(const parameters<T, M>& list,
                                                const std::vector<optimize::segment>& segments) {
    std::vector<view<T, M>> values;
    std::size_t first = 0;
    for (const auto& p : list) {
        const bool begins = values.size() < segments.size() && segments[values.size()].first == first;
        if (p.value.size() != 0 && begins) { values.emplace_back(p.value.data(), segments[values.size()].count); }
        first += p.value.size();
    }
    return values;
}

}  // namespace tutti::strategy::detail
