// A second copy of stage 3's values inside nodes: the bits of the exchange it is over, and traffic between nodes once an
// update; over plain shards and over compressed ones.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // all_of
#include <cstdint>    // bytes
#include <map>        // traffic by collective
#include <memory>     // one account for all lanes
#include <mutex>      // lanes count at once
#include <set>        // buckets
#include <span>       // members
#include <string>     // texts
#include <utility>    // move
#include <vector>     // results

#include "schedule/stream_queue.hpp"             // a device-like queue
#include "sharded_toy.hpp"                       // trainer
#include "stream_toy.hpp"                        // its backward on a stream
#include "support/build.hpp"                     // sanitized
#include "support/oracle.hpp"                    // same_bytes
#include <tutti/comm/cost.hpp>                   // wire_bytes
#include <tutti/comm/decorator.hpp>              // by_link
#include <tutti/comm/threads.hpp>                // ranks
#include <tutti/comm/topology.hpp>               // nodes
#include <tutti/core/partition.hpp>              // who is sent what by all_reduce
#include <tutti/core/virtual_queue.hpp>          // no host memory
#include <tutti/optimize/adamw.hpp>              // adamw
#include <tutti/strategy/compressed_shards.hpp>  // under the second copy
#include <tutti/strategy/data_parallel.hpp>      // what it has to equal
#include <tutti/strategy/node_shards.hpp>        // has none
#include <tutti/strategy/secondary_shards.hpp>   // tested
#include <tutti/strategy/zero.hpp>               // zero

using namespace tutti;
using comm::collective;
using comm::threads;
using comm::topology;
using optimize::adamw;
using strategy::compressed_shards;
using strategy::plain_shards;
using strategy::secondary_shards;
using strategy::zero;
using strategy::detail::shard_plan;
using test::nodes;
using test::outcome;
using test::plan_of_steps;
using test::refusal;
using test::restore;
using test::same_bytes;
using test::saved;
using test::several_blocks;
using test::sized_toy;
using test::train_sharded;

namespace {

/// What one rank sent to ranks of its own node, and to those of others, in bytes.
struct sent {
    std::uint64_t inside = 0, between = 0;
    friend bool operator==(const sent&, const sent&) = default;
};
struct link_account {
    topology nodes;
    std::mutex mutex{};
    std::map<collective, sent> by_kind{};

    explicit link_account(topology t) : nodes(std::move(t)) {}
    std::map<collective, sent> take() {
        const std::lock_guard lock(mutex);
        return std::exchange(by_kind, {});
    }
};
/// Where the bytes that `wire_bytes` counts go: each rank is sent its part by every rank that has it.
class by_link : public comm::decorator<by_link, threads> {
    friend comm::decorator<by_link, threads>;
    std::shared_ptr<link_account> account_;
    std::vector<int> members_;  // ranks of the root

    [[nodiscard]] std::uint64_t bytes_to(const comm::call& c, std::size_t m) const {
        const auto n = static_cast<std::size_t>(this->size()), me = static_cast<std::size_t>(this->rank());
        switch (c.kind) {
        case collective::all_gather_v: return c.in_bytes();
        case collective::reduce_scatter_v:
        case collective::all_to_all_v: return c.send_counts[m] * c.element_size;
        case collective::all_reduce:
            return (partition(c.in_count, n, m).count + partition(c.in_count, n, me).count) * c.element_size;
        default: return 0;
        }
    }

public:
    by_link(threads inner, std::shared_ptr<link_account> into, std::vector<int> members)
        : decorator(std::move(inner)), account_(std::move(into)), members_(std::move(members)) {}

    void execute(const comm::call& c) {
        this->inner().execute(c);
        const auto me = static_cast<std::size_t>(this->rank());
        sent all;
        for (std::size_t m = 0; m < members_.size(); ++m) {
            if (m == me) { continue; }
            (account_->nodes.same_node(members_[me], members_[m]) ? all.inside : all.between) += bytes_to(c, m);
        }
        if (c.kind != collective::broadcast) {
            REQUIRE(all.inside + all.between == comm::wire_bytes(c, this->rank(), this->size()));
        }
        const std::lock_guard lock(account_->mutex);
        sent& kind = account_->by_kind[c.kind];
        kind.inside += all.inside;
        kind.between += all.between;
    }

private:
    void before(const control_call&) noexcept {}
    [[nodiscard]] by_link wrap(threads child, std::span<const int> members) {
        std::vector<int> roots;
        for (const int m : members) { roots.push_back(members_[static_cast<std::size_t>(m)]); }
        return {std::move(child), account_, std::move(roots)};
    }
};
by_link counting(threads& world, std::shared_ptr<link_account> into) {
    std::vector<int> all;
    for (int r = 0; r < world.size(); ++r) { all.push_back(r); }
    return {world.duplicate("dp"), std::move(into), std::move(all)};
}

constexpr std::size_t count = 10;  // parameters of several_blocks
constexpr std::size_t bucket_bytes = 40000;
using in_bits = compressed_shards<>;
template <class T, class Exchange> using stage_3 = zero<3, threads, adamw, T, Exchange>;

static_assert(strategy::shardable<zero<3, comm::self<virtual_queue>, adamw, bfloat16, secondary_shards<>>>);
static_assert(strategy::shard_exchange<secondary_shards<in_bits>, by_link, float>);
static_assert(strategy::gathers_again<strategy::shard_state_of<secondary_shards<>, threads, float>, threads, float>);
static_assert(!strategy::gathers_again<strategy::shard_state_of<plain_shards, threads, float>, threads, float>);
static_assert(
    !strategy::gathers_again<strategy::shard_state_of<strategy::node_shards, threads, float>, threads, float>);

template <class T> sized_toy<T> matrices() {
    sized_toy<T> t(several_blocks);
    t.parameters[1].shape = {90, 100};
    t.parameters[4].shape = {64, 8, 8};
    t.parameters[7].shape = {9, 727};
    t.parameters[9].shape = {30, 100};
    return t;
}

/// Trains, and looks at all values in between, where no micro-batch is under way.
template <class S> auto trained(int n, const plan_of_steps& r, const auto& options, const auto& exchange) {
    using T = typename S::element_type;
    return test::of_all_ranks<T>(n, [&](threads& world) {
        auto t = matrices<T>();
        S s(world.duplicate("dp"), {}, options, exchange);
        s.attach(t.parameters);
        outcome<T> mine;
        for (int step = 0; step < r.steps; ++step) {
            plan_of_steps one = r;
            one.steps = 1;
            one.first_step = step;
            mine.norms.push_back(train_sharded(s, count, world.rank(), n, one).front());
            for (int again = 0; again < 2; ++again) {
                const auto now = test::values_of(s, count);
                mine.values.insert(mine.values.end(), now.begin(), now.end());
            }
        }
        s.finish();
        return mine;
    });
}
template <class T, class Exchange>
outcome<T> trained_by(int n, const plan_of_steps& r, const Exchange& exchange,
                      strategy::zero_options options = {.bucket_bytes = bucket_bytes}) {
    return trained<stage_3<T, Exchange>>(n, r, options, exchange);
}

/// The gathers of a step, in order: every bucket for each pass, forward and backward, less those that are there still.
std::vector<std::size_t> gathers(const shard_plan& plan, int micro) {
    std::vector<std::size_t> buckets, list;
    for (std::size_t b = 0; b < plan.size(); ++b) {
        if (plan.bucket(b).size != 0) { buckets.push_back(b); }
    }
    REQUIRE(buckets.size() > 3);
    for (int m = 0; m < micro; ++m) {
        for (std::size_t k = buckets.size(); k-- > 0;) {
            if (m > 0 && k + 1 == buckets.size()) { continue; }
            list.push_back(buckets[k]);
        }
        for (std::size_t k = 2; k < buckets.size(); ++k) { list.push_back(buckets[k]); }
    }
    return list;
}

}  // namespace

TEST_CASE("the bits of plain shards, and of data parallelism where sums are the same, wherever the nodes are") {
    const plan_of_steps one{.steps = 3}, three{.steps = 2, .micro = 3, .clip_norm = 5};
    const auto replicated = [](int n, const plan_of_steps& r) {
        return trained<strategy::data_parallel<threads, adamw, double>>(n, r, strategy::data_parallel_options{},
                                                                        strategy::plain_mean{});
    };
    for (const int n : test::sanitized ? std::vector{4} : std::vector{3, 4}) {
        const auto expected = replicated(n, one), accumulated = replicated(n, three);
        const auto plain = trained_by<double>(n, three, plain_shards{});
        CHECK(test::distance(plain, accumulated) <= 1e-12);
        const std::vector<topology> places =
            n == 3 ? std::vector{nodes({0, 0, 1}), topology::uniform(3, 1), topology::one_node(3)}
                   : std::vector{topology::uniform(2, 2), nodes({1, 0, 0, 1}), nodes({0, 1, 0, 0})};
        for (const auto& where : places) {
            CHECK(trained_by<double>(n, one, secondary_shards<>{where}) == expected);
            CHECK(trained_by<double>(n, three, secondary_shards<>{where}) == plain);
            CHECK(trained_by<double>(n, three, secondary_shards<>{where}, {.bucket_bytes = sizeof(double)}) == plain);
        }
    }
}

TEST_CASE("values of 16 bits, rounded by chance, and values that are compressed, are gathered again as they are") {
    const plan_of_steps r{.steps = 3, .micro = 2};
    const topology where = topology::uniform(2, 2);
    const strategy::zero_options rounded{.bucket_bytes = 20000, .stochastic_rounding_seed = 5};
    CHECK(trained_by<bfloat16>(4, r, secondary_shards<>{where}, rounded) ==
          trained_by<bfloat16>(4, r, plain_shards{}, rounded));
    const in_bits lossy{.feedback = true};
    const auto expected = trained_by<float>(4, r, lossy, {.bucket_bytes = 20000});
    CHECK(trained_by<float>(4, r, secondary_shards<in_bits>{where, lossy}, {.bucket_bytes = 20000}) == expected);
    CHECK_FALSE(trained_by<float>(4, r, plain_shards{}, {.bucket_bytes = 20000}) == expected);
}

TEST_CASE("bytes inside nodes and between them, and bytes held, are those of the documentation") {
    for (const auto& where :
         {topology::uniform(2, 2), topology::uniform(2, 4), nodes({0, 1, 1}), topology::uniform(3, 1)}) {
        if (test::sanitized && where.ranks() == 8) { continue; }
        for (const int micro : {1, 4}) {
            CAPTURE(where.ranks());
            CAPTURE(micro);
            threads::launch(where.ranks(), [&](threads& world) {
                const auto account = std::make_shared<link_account>(where);
                sized_toy<double> t(several_blocks);
                zero<3, by_link, adamw, double, secondary_shards<>> s(counting(world, account), {},
                                                                      {.bucket_bytes = bucket_bytes}, {where});
                s.attach(t.parameters);
                const plan_of_steps one{.steps = 1, .micro = micro};
                train_sharded(s, count, world.rank(), world.size(), one);  // the first step records an order
                s.flush();
                account->take();
                train_sharded(s, count, world.rank(), world.size(), one);
                s.flush();
                auto step = account->take();

                const shard_plan& plan = s.shards();
                const shard_plan& second = s.exchange().cut();
                const int node = where.node_of(world.rank());
                const std::size_t g = where.ranks_on(node).size(), n = static_cast<std::size_t>(where.ranks());
                CHECK(second.ranks() == g);
                sent values, gradients;
                std::set<std::size_t> seen;
                for (const std::size_t b : gathers(plan, micro)) {
                    if (seen.insert(b).second) {
                        values.inside += sizeof(double) * plan.own(b).count * (g - 1);
                        values.between += sizeof(double) * plan.own(b).count * (n - g);
                    } else {
                        values.inside += sizeof(double) * second.own(b).count * (g - 1);
                    }
                }
                CHECK(step[collective::all_gather_v] == values);
                for (std::size_t b = 0; b < plan.size(); ++b) {
                    for (int r = 0; r < where.ranks(); ++r) {
                        if (r == world.rank()) { continue; }
                        (where.node_of(r) == node ? gradients.inside : gradients.between) +=
                            sizeof(double) * static_cast<std::size_t>(micro) *
                            plan.counts(b)[static_cast<std::size_t>(r)];
                    }
                }
                CHECK(step[collective::reduce_scatter_v] == gradients);

                const std::size_t P = plan.buckets().elements, p = plan.owned(), L = plan.largest_bucket();
                const std::size_t shared =
                    strategy::detail::sharded_norm<threads, double>(host_queue(), plan).shared_elements();
                const std::size_t elements = 3 * p + ((P + 4095) / 4096 + 1) + shared  // masters, two moments; the norm
                                             + p + 2 * L + 2 * L                       // gradients, values
                                             + second.owned();
                const std::size_t held = sizeof(double) * elements + sizeof(std::uint64_t);
                CHECK(world.queue().account().peak() == held);
                CHECK(world.queue().account().live() == held);
                double all[] = {static_cast<double>(second.owned())};  // the parts of a node are the model
                by_link group = counting(world, account);
                comm::split_inside(group, where).all_reduce(all, view<double>(all), sum{});
                CHECK(all[0] == static_cast<double>(P));
                s.finish();
            });
        }
    }
}

TEST_CASE("compressed values leave the node once an update, in their bits; backward reads them inside, dense") {
    const topology where = topology::uniform(2, 2);
    for (const int micro : {1, 3}) {
        threads::launch(4, [&](threads& world) {
            const auto account = std::make_shared<link_account>(where);
            auto t = matrices<float>();
            zero<3, by_link, adamw, float, secondary_shards<in_bits>> s(counting(world, account), {},
                                                                        {.bucket_bytes = 20000}, {where, {}});
            s.attach(t.parameters);
            const plan_of_steps one{.steps = 1, .micro = micro};
            train_sharded(s, count, world.rank(), 4, one);
            s.flush();
            account->take();
            train_sharded(s, count, world.rank(), 4, one);
            s.flush();
            auto step = account->take();
            const compress::dense_or x(compress::quantize{});
            const shard_plan& second = s.exchange().cut();
            sent values;
            std::uint64_t as_floats = 0;
            std::set<std::size_t> seen;
            for (const std::size_t b : gathers(s.shards(), micro)) {
                if (seen.insert(b).second) {
                    const auto wire = compress::detail::wire_bytes(x, s.exchange().value_parts()[b].of(world.rank()));
                    values.inside += wire;
                    values.between += 2 * wire;
                    as_floats += 2 * sizeof(float) * s.shards().own(b).count;
                } else {
                    values.inside += sizeof(float) * second.own(b).count;
                }
            }
            CHECK(step[collective::all_gather_v] == values);
            CHECK(values.between < as_floats / 3);
            s.finish();
        });
    }
}

TEST_CASE("a resumed run continues bit by bit, whatever was gathered before") {
    constexpr int n = 4;
    const secondary_shards<in_bits> exchange{topology::uniform(2, 2), {.feedback = true}};
    using tested = stage_3<float, secondary_shards<in_bits>>;
    std::vector<test::saved_state> checkpoint(n), ends(n);
    threads::launch(n, [&](threads& world) {
        const auto rank = static_cast<std::size_t>(world.rank());
        auto t = matrices<float>();
        tested s(world.duplicate("dp"), {}, {.bucket_bytes = 20000}, exchange);
        s.attach(t.parameters);
        train_sharded(s, count, world.rank(), n, {.steps = 3, .micro = 2});
        checkpoint[rank] = saved(s);
        train_sharded(s, count, world.rank(), n, {.steps = 2, .micro = 2, .first_step = 3});
        ends[rank] = saved(s);
        s.finish();
    });
    for (const int steps_before : {0, 1}) {  // that are forgotten
        threads::launch(n, [&](threads& world) {
            const auto rank = static_cast<std::size_t>(world.rank());
            auto t = matrices<float>();
            tested s(world.duplicate("dp"), {}, {.bucket_bytes = 20000}, exchange);
            s.attach(t.parameters);
            train_sharded(s, count, world.rank(), n, {.steps = steps_before});
            static_cast<void>(test::values_of(s, count));
            restore(s, checkpoint[rank]);
            train_sharded(s, count, world.rank(), n, {.steps = 2, .micro = 2, .first_step = 3});
            CHECK(saved(s) == ends[rank]);
            s.finish();
        });
    }
}

TEST_CASE("masters that an outer strategy changes are gathered among all, though no update was made") {
    threads::launch(4, [](threads& world) {
        sized_toy<double> t(several_blocks);
        stage_3<double, secondary_shards<>> s(world.duplicate("dp"), {}, {.bucket_bytes = bucket_bytes},
                                              {topology::uniform(2, 2)});
        s.attach(t.parameters);
        train_sharded(s, count, world.rank(), 4, {.steps = 1});
        for (const double mark : {1.0, 2.0}) {
            for (double& x : s.owned()) { x = mark; }
            s.publish();
            for (int again = 0; again < 2; ++again) {
                const auto all = test::values_of(s, count);
                CHECK(std::all_of(all.begin(), all.end(), [m = mark](double x) { return x == m; }));
            }
        }
        s.finish();
    });
}

TEST_CASE("one rank's bad gradient skips the step on all, and values are gathered from as they were") {
    threads::launch(4, [](threads& world) {
        sized_toy<double> t(several_blocks);
        stage_3<double, secondary_shards<>> s(world.duplicate("dp"), {}, {.bucket_bytes = bucket_bytes},
                                              {topology::uniform(2, 2)});
        s.attach(t.parameters);
        train_sharded(s, count, world.rank(), 4, {.steps = 1});
        test::check_skips_bad_gradient(s, count, world.rank());
        s.finish();
    });
}

// deepspeedai/DeepSpeed: a module order that differs between ranks, on one node or on two
TEST_CASE("ranks that use values in different orders are told, also where only their nodes gather") {
    for (const bool recording : {true, false}) {
        for (const int who : {1, 3}) {
            std::vector<std::string> texts(4);
            CHECK_THROWS(threads::launch(4, [&](threads& world) {
                sized_toy<double> t(several_blocks);
                stage_3<double, secondary_shards<>> s(world.duplicate("dp"), {}, {.bucket_bytes = 8},
                                                      {topology::uniform(2, 2)});
                s.attach(t.parameters);
                try {
                    if (!recording) { train_sharded(s, count, world.rank(), 4, {.steps = 1}); }
                    s.begin({});
                    for (std::size_t i = 0; i < count; ++i) {
                        static_cast<void>(s.before_use(i));
                        s.after_use(i);
                    }
                    for (std::size_t i = count; i-- > 0;) {  // gathered inside
                        const std::size_t used = world.rank() == who && i == 4 ? 1 : i;
                        static_cast<void>(s.before_use(used));
                        static_cast<void>(s.gradient(i));
                        s.after_use(used);
                        s.gradient_ready(i);
                    }
                    s.step({0.1});
                } catch (const error& e) {
                    texts[static_cast<std::size_t>(world.rank())] = e.what();
                    throw;
                }
            }));
            for (const auto& text : texts) {
                CAPTURE(text);
                CHECK(text.find(recording ? "agree: what is used next (here 'p" : "order of use: rank ") !=
                      std::string::npos);
            }
            CHECK(texts[static_cast<std::size_t>(who)].find(recording ? "here 'p1'" : "uses 'p1'") !=
                  std::string::npos);
        }
    }
}

TEST_CASE("nodes of other ranks are refused before anything is sent, and ranks that state different nodes") {
    threads::launch(3, [](threads& world) {
        sized_toy<double> t(several_blocks);
        stage_3<double, secondary_shards<>> s(world.duplicate("dp"), {}, {}, {topology::uniform(2, 2)});
        CHECK(refusal([&] { s.attach(t.parameters); }) ==
              "secondary shards: nodes of 4 ranks together, 'world/dp' has 3");
    });
    threads::launch(4, [](threads& world) {
        sized_toy<double> t(several_blocks);
        stage_3<double, secondary_shards<>> s(world.duplicate("dp"), {}, {},
                                              {world.rank() == 1 ? nodes({0, 1, 0, 1}) : topology::uniform(2, 2)});
        CHECK(refusal<mismatch_error>([&] {
                  s.attach(t.parameters);
              }).find(world.rank() == 1 ? ", kept inside nodes 0 1 0 1" : ", kept inside nodes 0 0 1 1") !=
              std::string::npos);
    });
    CHECK_THROWS_AS((secondary_shards<in_bits>{topology::one_node(1), {.value_level = 0}}.validate()), usage_error);
}

TEST_CASE("a stream gives the bits of the host") {
    using device = comm::self<test::stream_queue>;
    sized_toy<float> t(several_blocks), u(several_blocks);
    const secondary_shards<> one{topology::one_node(1)};
    zero<3, comm::self<host_queue>, adamw, float, secondary_shards<>> on_host(comm::self<host_queue>(), {},
                                                                              {.bucket_bytes = 20000}, one);
    zero<3, device, adamw, float, secondary_shards<>> on_stream(device{}, {}, {.bucket_bytes = 20000}, one);
    auto list = test::on_stream_of(u);
    on_host.attach(t.parameters);
    on_stream.attach(list);
    test::check_same_bits(on_host, on_stream, count);
    on_stream.finish();
}
