// critical_regime: which layers are in a critical phase of training, where compression must be careful.
// Needs core/error. Its state is one norm a layer.
// Source: Agarwal et al., Accordion, MLSys 2021 (arXiv 2010.16248); as a budget, L-GreCo (arXiv 2210.17357).
#pragma once

#include <cmath>    // fabs, isfinite
#include <cstddef>  // size_t
#include <span>     // norms, options
#include <vector>   // state

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::compress {

/// Accordion's detector: a layer is critical when the norm of its accumulated gradient changed by at least the share
/// `eta` since the last call.
///
/// Semantics    the options it returns take the place of the uniform choice in choose_levels: critical layers count with
///              the `careful` option, the others with the `relaxed` one, so the budget breathes with training and the
///              choice is never dearer than Accordion alone. A norm of 0, at the start too, tells nothing: critical.
///              So does one that is not finite, which is not remembered.
/// Determinism  of the norms alone; ranks that pass the same norms, such as those of averaged gradients, agree.
/// Errors       usage_error when eta is not positive and finite, a count differs from that of layers, or a norm is
///              negative.
class critical_regime {
    double eta_;
    std::vector<double> norms_;

public:
    explicit critical_regime(std::size_t layers, double eta = 0.5) : eta_(eta), norms_(layers, 0.0) {
        if (!std::isfinite(eta) || eta <= 0) {
            throw usage_error(formatted("critical_regime: eta is {}, not positive and finite", eta));
        }
    }

    /// Compares with the norms of the last call, remembers these, and picks an option a layer.
    [[nodiscard]] std::vector<std::size_t> update(std::span<const double> norms, std::span<const std::size_t> relaxed,
                                                  std::span<const std::size_t> careful) {
        if (norms.size() != norms_.size() || relaxed.size() != norms_.size() || careful.size() != norms_.size()) {
            throw usage_error(formatted("critical_regime: {} norms, {} relaxed and {} careful options for {} layers",
                                        norms.size(), relaxed.size(), careful.size(), norms_.size()));
        }
        for (const double n : norms) {
            if (n < 0) { throw usage_error(formatted("critical_regime: {} is not a norm", n)); }
        }
        std::vector<std::size_t> options(careful.begin(), careful.end());
        for (std::size_t l = 0; l < norms.size(); ++l) {
            if (norms[l] > 0 && std::fabs(norms[l] - norms_[l]) < eta_ * norms_[l]) { options[l] = relaxed[l]; }
            if (std::isfinite(norms[l])) { norms_[l] = norms[l]; }
        }
        return options;
    }

    /// The norms of the last call, 0 before the first: all that a resume needs.
    [[nodiscard]] std::span<double> norms() noexcept { return norms_; }
};

}  // namespace tutti::compress
