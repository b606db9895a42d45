// fragments: what rounds send, as an exchange takes it: tensors of one flat payload, and the parts whose rounds end in
// turn. Needs strategy/strategy and schedule/bucket.
#pragma once

#include <cstddef>  // size_t
#include <string>   // names
#include <utility>  // move
#include <vector>   // tensors

#include <tutti/core/text.hpp>          // formatted
#include <tutti/schedule/bucket.hpp>    // bucket_plan
#include <tutti/strategy/strategy.hpp>  // parameters

namespace tutti::strategy::detail {

/// Tensors whose values are a replica's own and whose gradients are the payload; one bucket a fragment.
template <floating_element R, memory M> struct fragments {
    parameters<R, M> tensors;
    schedule::bucket_plan plan;

    void add(std::string name, std::vector<std::size_t> shape, std::size_t size) {
        tensors.push_back({std::move(name), std::move(shape), true, {}, {}});
        plan.offsets.push_back(plan.elements);
        plan.elements += size;
    }
    /// The tensors since the last fragment are the next one.
    void close() {
        const bool first = plan.buckets.empty();
        schedule::bucket b;
        b.first = first ? 0 : plan.buckets.back().first + plan.buckets.back().count;
        b.count = tensors.size() - b.first;
        b.offset = first ? 0 : plan.buckets.back().offset + plan.buckets.back().size;
        b.size = plan.elements - b.offset;
        plan.bucket_of.resize(tensors.size(), plan.buckets.size());
        plan.buckets.push_back(b);
    }
};

/// The elements of `own` in `count` fragments of about the same size, some of them empty where tensors are large.
///
/// Semantics  where `own` is the model, its tensors, none of them cut. Where it is a shard, which begins and ends in the
///            middle of tensors, matrices with rows of 512 elements, and a vector of what is left.
template <floating_element T, memory M>
[[nodiscard]] fragments<master_t<T>, M> cut_into_fragments(const parameters<T, M>& list, view<master_t<T>, M> own,
                                                           view<master_t<T>, M> payload, std::size_t count) {
    fragments<master_t<T>, M> all;
    std::size_t elements = 0;
    for (const auto& p : list) { elements += p.value.size(); }
    if (elements == own.size()) {
        std::size_t next = 0;
        for (std::size_t f = 1; f <= count; ++f) {
            // A tensor belongs to the fragment that its middle lies in.
            const double end = static_cast<double>(elements) * static_cast<double>(f) / static_cast<double>(count);
            for (; next < list.size(); ++next) {
                const std::size_t size = list[next].value.size();
                if (f != count && static_cast<double>(all.plan.elements) + static_cast<double>(size) / 2 >= end) {
                    break;
                }
                all.add(list[next].name, list[next].shape, size);
            }
            all.close();
        }
    } else {
        constexpr std::size_t columns = 512;
        const std::size_t rows = own.size() / columns;
        for (std::size_t f = 0; f < count; ++f) {
            const std::size_t first = rows / count * f + rows % count * f / count;
            const std::size_t last = rows / count * (f + 1) + rows % count * (f + 1) / count;
            if (first != last) { all.add(formatted("rows {}", f), {last - first, columns}, (last - first) * columns); }
            if (f + 1 == count) { all.add("rest", {own.size() % columns}, own.size() % columns); }
            all.close();
        }
    }
    for (std::size_t i = 0; i < all.tensors.size(); ++i) {
        const std::size_t end = i + 1 < all.tensors.size() ? all.plan.offsets[i + 1] : all.plan.elements;
        all.tensors[i].value = own.sub(all.plan.offsets[i], end - all.plan.offsets[i]);
        all.tensors[i].gradient = payload.sub(all.plan.offsets[i], end - all.plan.offsets[i]);
    }
    return all;
}

}  // namespace tutti::strategy::detail
