// probe: a decorator that counts what reaches the communicator below it. Shared by the tests of decorators.
#pragma once

#include <cstdint>  // counts
#include <memory>   // counts shared with children
#include <span>     // members
#include <utility>  // move

#include <tutti/comm/decorator.hpp>  // decorator

namespace tutti::test {

struct probe_counts {
    std::uint64_t executed = 0;
    std::uint64_t controls = 0;
    std::uint64_t last_sequence = 0;
};

template <comm::decoratable C> class probe : public comm::decorator<probe<C>, C> {
    using base = comm::decorator<probe<C>, C>;
    friend base;
    std::shared_ptr<probe_counts> counts_;

public:
    explicit probe(C inner, std::shared_ptr<probe_counts> counts = std::make_shared<probe_counts>())
        : base(std::move(inner)), counts_(std::move(counts)) {}

    [[nodiscard]] const probe_counts& counts() const noexcept { return *counts_; }
    void execute(const comm::call& c) {
        ++counts_->executed;
        counts_->last_sequence = c.sequence;
        this->inner().execute(c);
    }

private:
    void before(const typename base::control_call& k) {
        ++counts_->controls;
        counts_->last_sequence = k.sequence;
    }
    [[nodiscard]] probe wrap(C child, std::span<const int>) { return probe(std::move(child), counts_); }
};

}  // namespace tutti::test
