// A strategy that keeps gradients in memory and notes who announced what: tests of the model see its contract there.
// Needs strategy/strategy for the parameter list. It does not update anything.
#pragma once

#include <algorithm>  // all_of, fill
#include <cstddef>    // size_t
#include <span>       // results
#include <stdexcept>  // logic_error
#include <vector>     // gradients

#include <tutti/strategy/strategy.hpp>  // parameters, micro_batch

namespace trainer_test {

template <class T> class memory_strategy {
    tutti::strategy::parameters<T>* parameters_ = nullptr;
    std::vector<std::vector<T>> gradients_;
    std::vector<int> ready_;
    std::vector<int> in_use_;

public:
    void attach(tutti::strategy::parameters<T>& p) {
        parameters_ = &p;
        for (const auto& x : p) { gradients_.emplace_back(x.value.size()); }
        in_use_.assign(p.size(), 0);
    }
    void begin(tutti::strategy::micro_batch m) {
        if (m.index == 0) {
            for (auto& g : gradients_) { std::fill(g.begin(), g.end(), T{}); }
        }
        ready_.assign(parameters_->size(), 0);
    }
    tutti::view<const T> before_use(std::size_t i) {
        ++in_use_[i];
        return (*parameters_)[i].value;
    }
    void after_use(std::size_t i) { --in_use_[i]; }
    /// Throws once the gradient was announced: a real strategy may be sending it by then.
    tutti::view<T> gradient(std::size_t i) {
        if (ready_[i] > 0) {
            throw std::logic_error("gradient " + (*parameters_)[i].name + " is used after it was announced");
        }
        return gradients_[i];
    }
    /// The same, for the test to read.
    [[nodiscard]] std::span<const T> result(std::size_t i) const { return gradients_[i]; }
    void gradient_ready(std::size_t i) { ++ready_[i]; }

    [[nodiscard]] bool all_ready_once() const {
        return std::all_of(ready_.begin(), ready_.end(), [](int n) { return n == 1; });
    }
    [[nodiscard]] bool none_in_use() const {
        return std::all_of(in_use_.begin(), in_use_.end(), [](int n) { return n == 0; });
    }
};

}  // namespace trainer_test
