// Masters from a file of weights, and for one: what the optimizer works on where the model computes in fewer bits.
// Needs any_strategy.hpp, model.hpp and weights.hpp. Strategies that share masters out among ranks have pieces of them.
#pragma once

#include <algorithm>    // find, copy
#include <cstddef>      // size_t
#include <span>         // state
#include <stdexcept>    // logic_error
#include <string>       // names
#include <type_traits>  // is_same
#include <vector>       // values

#include <tutti/core/element.hpp>      // master_t
#include <tutti/core/elementwise.hpp>  // copy
#include <tutti/core/state.hpp>        // state_entry
#include <tutti/core/view.hpp>         // views

#include "model.hpp"
#include "weights.hpp"

namespace transformer {

template <class T> inline constexpr bool has_masters = !std::is_same_v<T, tutti::master_t<T>>;

namespace detail {

/// The entry of that name, as elements of R. Errors: logic_error where there is none.
template <class R, tutti::memory M>
[[nodiscard]] const tutti::state_entry<M>& entry_of(std::span<const tutti::state_entry<M>> state,
                                                    const std::string& name) {
    const auto found = std::find_if(state.begin(), state.end(), [&](const auto& e) { return e.name == name; });
    if (found == state.end() || found->type != tutti::dtype_of<R>) {
        throw std::logic_error("the strategy's state has no '" + name + "' of the optimizer's type");
    }
    return *found;
}
template <class R, tutti::memory M> [[nodiscard]] tutti::view<R, M> elements_of(const tutti::state_entry<M>& e) {
    return {reinterpret_cast<R*>(e.data.data()), e.data.size() / sizeof(R)};
}

}  // namespace detail

/// The strategy's masters become the file's weights, all bits of them, and rounds begin there; it is attached, and its
/// values are those weights already, rounded.
template <class Math, class Strategy> void read_masters(weights_file& file, model<Math>& net, Strategy& strategy) {
    using R = tutti::master_t<typename Math::element>;
    using M = typename model<Math>::memory_type;
    const auto state = strategy.state();
    for (std::size_t i = 0; i < net.parameters().size(); ++i) {
        const auto e = detail::entry_of<R, M>(state, net.parameters()[i].name + "/value");
        const tutti::view<R, M> own = detail::elements_of<R, M>(e);
        std::vector<R> all(net.parameters()[i].value.size());
        file.read(i, tutti::view<R>(all));
        const auto first = all.begin() + static_cast<std::ptrdiff_t>(e.offset);
        net.put(std::vector<R>(first, first + static_cast<std::ptrdiff_t>(own.size())), own);
    }
    for (const auto& e : state) {
        if (e.name == "local_update/anchor") {
            tutti::copy(strategy.queue(), strategy.owned(), detail::elements_of<R, M>(e));
        }
    }
    strategy.restored();
}

/// All masters by parameter, on rank 0; collective over `world`. Every element is some rank's.
/// Cost  the largest parameter on every rank, times the replicas of it; all of them on rank 0.
template <class World, class Math, class Strategy>
[[nodiscard]] auto gather_masters(World& world, model<Math>& net, Strategy& strategy) {
    using R = tutti::master_t<typename Math::element>;
    using M = typename model<Math>::memory_type;
    std::vector<std::vector<R>> all;
    const auto state = strategy.state();
    for (const auto& p : net.parameters()) {
        const auto e = detail::entry_of<R, M>(state, p.name + "/value");
        const tutti::view<const R, M> own = detail::elements_of<R, M>(e);
        // A replica's ranks have its elements once. Of a piece that several ranks have the first one sends it.
        const auto pieces = world.gather_control({e.offset, own.size(), 0, 0});
        std::vector<std::size_t> counts;
        std::size_t total = 0;
        for (auto piece = pieces.begin(); piece != pieces.end(); ++piece) {
            counts.push_back(std::find(pieces.begin(), piece, *piece) == piece ? (*piece)[1] : 0);
            total += counts.back();
        }
        std::vector<R> mine;
        if (counts[static_cast<std::size_t>(world.rank())] != 0) {
            const auto values = net.on_host(own);
            mine.assign(values.begin(), values.end());
        }
        std::vector<R> sent(total);
        world.all_gather_v(tutti::view<const R>(mine), tutti::view<R>(sent), counts);
        if (world.rank() != 0) { continue; }
        std::vector<R>& whole = all.emplace_back(p.value.size());
        auto from = sent.begin();
        for (std::size_t r = 0; r < counts.size(); ++r) {
            const auto to = from + static_cast<std::ptrdiff_t>(counts[r]);
            std::copy(from, to, whole.begin() + static_cast<std::ptrdiff_t>(pieces[r][0]));
            from = to;
        }
    }
    return all;
}

}  // namespace transformer
