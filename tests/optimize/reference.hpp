// Optimizers written down once more, one element at a time in double, as their papers and PyTorch's manual state them.
// Needs nothing of the library: the judge of its loops.
#pragma once

#include <cmath>    // sqrt, pow
#include <cstddef>  // size_t
#include <vector>   // elements

namespace tutti::test {

struct reference_adamw {
    double beta1, beta2, epsilon, weight_decay;
    std::vector<double> m{}, v{};
    int t = 0;

    void step(std::vector<double>& x, const std::vector<double>& g, double rate, const std::vector<bool>& decays) {
        m.resize(x.size());
        v.resize(x.size());
        ++t;
        for (std::size_t i = 0; i < x.size(); ++i) {
            if (decays[i]) { x[i] -= rate * weight_decay * x[i]; }
            m[i] += (g[i] - m[i]) * (1 - beta1);
            v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
            const double mean = m[i] / (1 - std::pow(beta1, t));
            const double square = v[i] / (1 - std::pow(beta2, t));
            x[i] -= rate * mean / (std::sqrt(square) + epsilon);
        }
    }
};

struct reference_sgd {
    double momentum, weight_decay;
    bool nesterov;
    std::vector<double> buffer{};

    void step(std::vector<double>& x, const std::vector<double>& g, double rate, const std::vector<bool>& decays) {
        const bool first = buffer.empty();
        buffer.resize(x.size());
        for (std::size_t i = 0; i < x.size(); ++i) {
            double d = g[i];
            if (decays[i]) { d += weight_decay * x[i]; }
            if (momentum != 0) {
                buffer[i] = first ? d : momentum * buffer[i] + d;
                d = nesterov ? d + momentum * buffer[i] : buffer[i];
            }
            x[i] -= rate * d;
        }
    }
};

}  // namespace tutti::test
