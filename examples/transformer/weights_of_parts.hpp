// weights_of_parts: the weights of a whole model, from a file into the parts of it that ranks have, and from these again.
// Needs stages.hpp, weights.hpp and masters.hpp. Net is stages<...>.
#pragma once

#include <algorithm>  // copy_n, find
#include <cstddef>    // size_t
#include <cstdint>    // pieces
#include <numeric>    // reduce
#include <string>     // files
#include <vector>     // weights

#include <tutti/core/element.hpp>  // master_t
#include <tutti/core/view.hpp>     // views

#include "cut.hpp"
#include "masters.hpp"
#include "parameters.hpp"
#include "weights.hpp"

namespace transformer {

namespace detail {

template <class U, class Net>
[[nodiscard]] std::vector<U> part_of_file(const Net& net, const weights_file& file,
                                          const std::vector<declaration>& whole, std::size_t i) {
    std::vector<U> all(whole[i].size()), own(net.declared(i).size());
    file.read(i, tutti::view<U>(all));
    for_each_run(i, net.config(), net.part(), whole[i], [&](std::size_t from, std::size_t to, std::size_t n) {
        std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(from), n, own.begin() + static_cast<std::ptrdiff_t>(to));
    });
    return own;
}

}  // namespace detail

/// What this rank has of a file's weights becomes its own.
template <class Net> void load(Net& net, const std::string& path) {
    using T = typename Net::element;
    const weights_file file(path, net.config());
    const auto whole = parameters_of(net.config());
    for (std::size_t i = 0; i < whole.size(); ++i) {
        if (net.place_of(i) == net.nowhere) { continue; }
        put<T>(net.queue(), detail::part_of_file<T>(net, file, whole, i), net.parameters()[net.place_of(i)].value);
    }
}

/// The strategy is attached; its masters become the file's weights, all bits of them.
template <class Net, class Strategy> void load_masters(Net& net, const std::string& path, Strategy& strategy) {
    using R = tutti::master_t<typename Net::element>;
    using M = typename Net::memory_type;
    const weights_file file(path, net.config());
    const auto whole = parameters_of(net.config());
    const auto state = strategy.state();
    for (std::size_t i = 0; i < whole.size(); ++i) {
        if (net.place_of(i) == net.nowhere) { continue; }
        const auto e = detail::entry_of<R, M>(state, net.declared(i).name + "/value");
        const tutti::view<R, M> own = detail::elements_of<R, M>(e);
        const std::vector<R> part = detail::part_of_file<R>(net, file, whole, i);
        const auto first = part.begin() + static_cast<std::ptrdiff_t>(e.offset);
        put<R>(net.queue(), std::vector<R>(first, first + static_cast<std::ptrdiff_t>(own.size())), own);
    }
    strategy.restored();
}

/// Parameter i of the whole model as the ranks' strategies have its masters, on rank 0 of the world; empty elsewhere.
/// Collective over the world. Of what several ranks have the first one sends it.
template <class Net, class World, class Strategy>
[[nodiscard]] auto gathered(Net& net, World& world, Strategy& strategy, std::size_t i) {
    using R = tutti::master_t<typename Net::element>;
    using M = typename Net::memory_type;
    const configuration& model = net.config();
    const bool has = net.place_of(i) != net.nowhere;
    tutti::view<const R, M> own;
    std::size_t offset = 0;
    if (has) {
        const auto state = strategy.state();
        const auto e = detail::entry_of<R, M>(state, net.declared(i).name + "/value");
        own = detail::elements_of<R, M>(e);
        offset = e.offset;
    }
    const auto tensor = static_cast<std::uint64_t>(net.part().rank);
    const auto pieces = world.gather_control({offset, own.size(), tensor, has ? 1u : 0u});
    std::vector<std::size_t> counts;
    for (auto piece = pieces.begin(); piece != pieces.end(); ++piece) {
        counts.push_back(std::find(pieces.begin(), piece, *piece) == piece ? (*piece)[1] : 0);
    }
    std::vector<R> mine;
    if (counts[static_cast<std::size_t>(world.rank())] != 0) {
        const auto values = on_host<R>(net.queue(), own);
        mine.assign(values.begin(), values.end());
    }
    std::vector<R> sent(std::reduce(counts.begin(), counts.end()));
    world.all_gather_v(tutti::view<const R>(mine), tutti::view<R>(sent), counts);
    std::vector<R> all;
    if (world.rank() != 0) { return all; }
    const auto whole = parameters_of(model);
    all.resize(whole[i].size());
    std::vector<tensor_part> whose(static_cast<std::size_t>(net.part().ranks), net.part());
    std::vector<std::vector<R>> parts;
    for (std::size_t t = 0; t < whose.size(); ++t) {
        whose[t].rank = static_cast<int>(t);
        parts.emplace_back(parameters_of(model, whose[t])[i].size());
    }
    auto from = sent.begin();
    for (std::size_t r = 0; r < counts.size(); ++r) {
        auto& part = parts[static_cast<std::size_t>(pieces[r][2])];
        std::copy_n(from, counts[r], part.begin() + static_cast<std::ptrdiff_t>(pieces[r][0]));
        from += static_cast<std::ptrdiff_t>(counts[r]);
    }
    for (std::size_t t = 0; t < (cut_of(i, model) == cut::whole ? 1 : parts.size()); ++t) {
        for_each_run(i, model, whose[t], whole[i], [&](std::size_t first, std::size_t at_part, std::size_t n) {
            std::copy_n(parts[t].begin() + static_cast<std::ptrdiff_t>(at_part), n,
                        all.begin() + static_cast<std::ptrdiff_t>(first));
        });
    }
    return all;
}

}  // namespace transformer
