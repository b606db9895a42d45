// faulty: injects failures, delays, aborts and absences by a plan, to test what is built on communicators.
// Needs comm/decorator. Deterministic: the n-th matching call of a rank, never a random one.
#pragma once

#include <cstddef>   // size_t
#include <cstdint>   // counters
#include <memory>    // one plan for all lanes
#include <mutex>     // lanes count too
#include <optional>  // any operation
#include <span>      // members of a child
#include <string>    // texts
#include <utility>   // move
#include <variant>   // actions
#include <vector>    // the plan

#include <tutti/comm/decorator.hpp>  // decorator, operation
#include <tutti/core/error.hpp>      // backend_error
#include <tutti/core/text.hpp>       // formatted

namespace tutti::comm {

/// What happens to the call that a rule picks, in place of it or before it.
namespace fault {
/// The backend refuses: backend_error with this code and text. As after any error, the family is aborted.
struct fail {
    int code = 1;
    std::string text = "injected failure";
};
/// The rank arrives late.
struct delay {
    duration by{};
};
/// The rank aborts the family and then arrives, to find it aborted.
struct abort {
    std::string why = "injected abort";
};
/// The rank does not arrive. Throws aborted_error once the family is aborted (by peers that waited long enough), or
/// timeout_error when its own deadline passes.
struct absence {};
}  // namespace fault

/// One rule of a plan.
struct fault_rule {
    int rank = 0;                   ///< in the communicator that the plan is given to
    std::optional<operation> on{};  ///< a collective or a control operation; nullopt: any
    std::uint64_t nth = 1;          ///< n-th match on this rank, over all duplicates and splits
    std::string communicator{};     ///< name of the one whose calls match; empty: all of the family
    std::variant<fault::fail, fault::delay, fault::abort, fault::absence> action{};
};

/// A communicator that follows a plan of faults.
///
/// Semantics    rules are looked at in the order of the plan; each strikes once, at its n-th match. gather_control
///              matches also when agree, or a decorator outside this one, calls it. Without a plan for its rank it only
///              forwards.
/// Determinism  exact, as long as the calls that a rule matches come from one thread: with lanes, name the
///              communicator.
/// Cost         a lock and a comparison a rule.
/// Errors       those injected; usage_error for a rule that cannot strike or a timeout that is not positive.
template <decoratable C> class faulty : public decorator<faulty<C>, C> {
    using base = decorator<faulty<C>, C>;
    friend base;
    struct armed_rule {
        fault_rule rule;
        std::uint64_t seen = 0;
    };
    struct plan_state {
        std::mutex mutex;
        std::vector<armed_rule> rules;
        duration timeout;
        std::uint64_t struck = 0;
    };
    std::shared_ptr<plan_state> plan_;

    faulty(std::shared_ptr<plan_state> plan, C inner) : base(std::move(inner)), plan_(std::move(plan)) {}

public:
    /// `plan` may hold rules for all ranks; those of other ranks are ignored. `timeout` bounds an absence.
    faulty(C inner, std::vector<fault_rule> plan, duration timeout = default_timeout())
        : base(std::move(inner)), plan_(std::make_shared<plan_state>()) {
        expect_timeout("faulty", timeout);
        plan_->timeout = timeout;
        for (std::size_t i = 0; i < plan.size(); ++i) {
            const fault_rule& rule = plan[i];
            const auto* const delay = std::get_if<fault::delay>(&rule.action);
            if (rule.rank < 0 || rule.rank >= this->size()) {
                throw usage_error(formatted("faulty: rule {} is for rank {} of {} ranks", i, rule.rank, this->size()));
            }
            if (rule.nth == 0) { throw usage_error(formatted("faulty: rule {} is for match 0; the first is 1", i)); }
            if (delay != nullptr && delay->by < duration::zero()) {
                throw usage_error(formatted("faulty: rule {} delays by {} s", i, seconds(delay->by)));
            }
            if (rule.rank == this->rank()) { plan_->rules.push_back({rule, 0}); }
        }
    }

    /// How many rules have struck on this rank.
    [[nodiscard]] std::uint64_t struck() const {
        const std::lock_guard lock(plan_->mutex);
        return plan_->struck;
    }

    void execute(const call& c) {
        strike(c.kind, context_of(c, this->name(), this->rank()));
        this->inner().execute(c);
    }

private:
    void before(const typename base::control_call& k) { strike(k.kind, this->context(k.kind, k.sequence)); }
    [[nodiscard]] faulty wrap(C child, std::span<const int>) { return faulty(plan_, std::move(child)); }

    void strike(operation what, const error_context& context) {
        std::vector<fault_rule> hits;
        {
            const std::lock_guard lock(plan_->mutex);
            for (armed_rule& armed : plan_->rules) {
                const fault_rule& rule = armed.rule;
                if (rule.on && *rule.on != what) { continue; }
                if (!rule.communicator.empty() && rule.communicator != this->name()) { continue; }
                if (++armed.seen == rule.nth) { hits.push_back(rule); }
            }
            plan_->struck += hits.size();
        }
        for (const fault_rule& rule : hits) {
            std::visit([&](const auto& action) { act(action, context); }, rule.action);
        }
    }

    void act(const fault::fail& f, error_context context) {
        context.backend_code = f.code;
        context.backend_text = f.text;
        const std::string text = formatted("{}: {} (code {}){}", context.operation, f.text, f.code, where(context));
        this->abort(text);
        throw backend_error(text, std::move(context));
    }
    void act(const fault::delay& d, const error_context&) {
        wall_clock clock;
        sleep_watching(this->inner(), clock, after(d.by));
    }
    void act(const fault::abort& a, const error_context&) { this->abort(a.why); }
    void act(const fault::absence&, const error_context& context) {
        wall_clock clock;
        sleep_watching(this->inner(), clock, after(plan_->timeout));
        const std::string text = formatted("{}: rank {} stayed away for {} s{}", context.operation, this->rank(),
                                           seconds(plan_->timeout), where(context));
        this->abort(text);
        throw timeout_error(text, {this->rank()}, context);
    }
};

}  // namespace tutti::comm
