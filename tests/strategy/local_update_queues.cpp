// Local-update strategies on queues that do not run inline: the host's bits on a device-like stream; exact times on a
// virtual queue, where what a late mean hides shows.
#include <doctest/doctest.h>  // checks

#include <span>    // ranks of a child
#include <vector>  // values

#include "schedule/stream_queue.hpp"         // a device-like queue
#include "stream_toy.hpp"                    // its backward on a stream
#include "toy.hpp"                           // trainer
#include <tutti/comm/decorator.hpp>          // a link
#include <tutti/comm/self.hpp>               // one replica
#include <tutti/core/virtual_queue.hpp>      // exact times
#include <tutti/optimize/adamw.hpp>          // adamw
#include <tutti/optimize/sgd.hpp>            // sgd
#include <tutti/strategy/data_parallel.hpp>  // local
#include <tutti/strategy/local_update.hpp>   // local_update

using namespace tutti;
using namespace tutti::strategy;
using optimize::adamw;
using optimize::sgd;
using test::slope_operation;
using test::stream_memory;
using test::stream_queue;
using test::toy;

namespace {

// A virtual communicator whose reductions take `slowness` seconds a byte.
class slow_link : public comm::decorator<slow_link, comm::self<virtual_queue>> {
    using base = comm::decorator<slow_link, comm::self<virtual_queue>>;
    friend base;
    double slowness_;

public:
    slow_link(comm::self<virtual_queue> inner, double slowness) : base(std::move(inner)), slowness_(slowness) {}
    void execute(const comm::call& c) {
        if (c.kind == comm::collective::all_reduce) {
            queue().charge("all_reduce", {slowness_ * double(c.in_bytes()), 0});
        }
        inner().execute(c);
    }

private:
    void before(const typename base::control_call&) noexcept {}
    [[nodiscard]] slow_link wrap(comm::self<virtual_queue> child, std::span<const int>) {
        return slow_link(std::move(child), slowness_);
    }
};

std::vector<local_update_rule> rules() {
    return {local_sgd_method{2}.rule(),
            slow_mo_method{.period = 2, .inner = inner_state::average}.rule(),
            co2_method{2}.rule(),
            co2_method{.period = 2, .payload = round_payload::parameters}.rule(),
            co2_method{.period = 2, .gap = elementwise_gap{}, .inner = inner_state::reset}.rule(),
            delayed_diloco_method{.period = 2, .own_weight = 0.5}.rule(),
            eager_diloco_method{2}.rule(),
            co_co_d_method{2}.rule(),
            overlap_local_sgd_method{2}.rule()};
}

}  // namespace

TEST_CASE("a stream gives the bits of the host") {
    for (const local_update_rule& rule : rules()) {
        CAPTURE(rule.describe());
        toy<float> t, u;
        using host = comm::self<host_queue>;
        using device = comm::self<stream_queue>;
        local_update<host, local<adamw>> on_host(host{}, local<adamw>(host{}), rule);
        on_host.attach(t.parameters);
        parameters<float, stream_memory> list;
        for (const auto& p : u.parameters) {
            list.push_back({p.name, p.shape, p.decay, {p.value.data(), p.value.size()}, {}});
        }
        // The communicator's queue is another stream than the inner strategy's.
        local_update<device, local<adamw, float, stream_queue>> on_stream(
            device{}, local<adamw, float, stream_queue>(device{}), rule);
        on_stream.attach(list);
        const stream_queue q = on_stream.queue();
        for (std::uint64_t step = 0; step < 9; ++step) {
            on_host.begin({});
            test::backward(on_host, step, 1, 1.0);
            on_host.step({.learning_rate = 0.05, .clip_norm = 1});
            on_stream.begin({});
            for (std::size_t i = list.size(); i-- > 0;) {
                run(q, slope_operation{on_stream.before_use(i), on_stream.gradient(i), i, step});
                on_stream.after_use(i);
                on_stream.gradient_ready(i);
            }
            on_stream.step({.learning_rate = 0.05, .clip_norm = 1});
            const auto a = on_host.consensus();
            const auto b = on_stream.consensus();
            on_stream.flush();
            CHECK(test::same_bytes(u.values(), t.values()));
        }
        on_host.finish();
        on_stream.finish();
        CHECK(test::same_bytes(u.values(), t.values()));
    }
}

TEST_CASE("a late mean hides behind a round exactly, a mean that is waited for costs its time") {
    // One byte a second for arithmetic. 400 floats; an all_reduce takes `slowness` seconds a byte.
    const auto time_of = [](const local_update_rule& rule, double slowness) {
        virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
        parameters<float, phantom_memory> list{{"p", {400}, true, {nullptr, 400}, {}}};
        using inner = local<sgd, float, virtual_queue>;
        local_update<slow_link, inner> s(slow_link(comm::self<virtual_queue>(q), slowness),
                                         inner(comm::self<virtual_queue>(q)), rule);
        s.attach(list);
        const double before = resolve(q.recording())[0];
        for (int k = 0; k < 40; ++k) {
            s.begin({});
            q.charge("backward", {10000, 0});
            s.gradient_ready(0);
            s.step({.learning_rate = 0.1});
        }
        return resolve(q.recording())[0] - before;
    };
    constexpr double bytes = 1600;
    constexpr double rounds = 10;
    for (const local_update_rule& base : rules()) {
        local_update_rule rule = base;
        rule.period = 4;
        rule.inner = inner_state::keep;
        CAPTURE(rule.describe());
        const double free = time_of(rule, 0);
        CHECK(free > 40 * 10000);
        const double round = free / rounds;
        if (rule.delay == 0) {
            CHECK(time_of(rule, 10) == free + rounds * 10 * bytes);
        } else {
            CHECK(time_of(rule, 10) == free);        // 16000 s behind more than 40000 s
            CHECK(time_of(rule, 24) == free);        // 38400 s: just
            const double much = time_of(rule, 100);  // 160000 s: shows, all but a round of it
            CHECK(much > free + (rounds - 2) * (100 * bytes - 1.5 * round));
            CHECK(much < free + rounds * (100 * bytes - 40000));
        }
    }
}
