// changed_gradients: what a caller of a strategy's update does to its gradients, and what it says of them.
// Needs core/view.
#pragma once

#include <functional>   // invoke
#include <optional>     // a norm that was given
#include <type_traits>  // invoke_result

namespace tutti::strategy::detail {

/// A caller that leaves gradients as they are.
struct no_change {
    template <class View> void operator()(View) const noexcept {}
};

/// Calls change(gradient). The norm that it returns: that of a whole model, of which the strategy has a part; none where
/// it returns nothing.
template <class Change, class View> [[nodiscard]] std::optional<double> changed(Change& change, View gradient) {
    if constexpr (std::is_void_v<std::invoke_result_t<Change&, View>>) {
        std::invoke(change, gradient);
        return std::nullopt;
    } else {
        return std::invoke(change, gradient);
    }
}

}  // namespace tutti::strategy::detail
