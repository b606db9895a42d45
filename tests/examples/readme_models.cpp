// What the README shows of sequences, plans, virtual clusters and pipelines as types, word for word (readme.py compares),
// compiled and run.
#include <cstdint>  // lengths
#include <span>     // rows
#include <vector>   // tensors

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <tutti/comm/threads.hpp>
#include <tutti/compress/power_sgd.hpp>
#include <tutti/compress/quantize.hpp>
#include <tutti/optimize/adamw.hpp>
#include <tutti/parallel/pipeline.hpp>
#include <tutti/plan/plan.hpp>
#include <tutti/sequence/sequence.hpp>
#include <tutti/simulate/simulate.hpp>
#include <tutti/strategy/compressed_mean.hpp>
#include <tutti/strategy/compressed_shards.hpp>
#include <tutti/strategy/data_parallel.hpp>
#include <tutti/strategy/local_update.hpp>
#include <tutti/strategy/secondary_shards.hpp>
#include <tutti/strategy/selected_mean.hpp>
#include <tutti/strategy/zero.hpp>
#include <tutti/zeroth/offload.hpp>
#include <tutti/zeroth/replicate.hpp>

namespace {

using namespace tutti;

// Comm: comm::threads, comm::mpi, comm::nccl, simulate::communicator, or one of these inside decorators
template <communicator Comm> using ddp = strategy::data_parallel<Comm, optimize::adamw, bfloat16>;
template <communicator Comm>
using low_rank = strategy::data_parallel<Comm, optimize::adamw, float, strategy::compressed_mean<compress::power_sgd>>;
template <communicator Comm>
using l_greco = strategy::data_parallel<Comm, optimize::adamw, float, strategy::selected_mean<compress::quantize>>;
template <communicator Comm> using zero3 = strategy::zero<3, Comm, optimize::adamw, bfloat16>;
template <communicator Comm>
using zero_plus_plus =
    strategy::zero<3, Comm, optimize::adamw, bfloat16, strategy::secondary_shards<strategy::compressed_shards<>>>;
template <communicator Comm> using co2_zero = strategy::co2<Comm, strategy::zero<2, Comm, optimize::adamw>>;
template <communicator Comm>
using co2_in_4_bits = strategy::local_update<Comm, strategy::local<optimize::adamw, float, queue_of<Comm>>,
                                             strategy::co2_method, strategy::compressed_mean<compress::quantize>>;
template <communicator Comm>
using zeppelin = sequence::engine<Comm, sequence::partition::zeppelin, sequence::routed, sequence::remapped>;
template <communicator Comm, class Model>
using distzo2 = zeroth::replicated<Comm, zeroth::offload<queue_of<Comm>, bfloat16, Model>>;
template <communicator Comm> using stages = parallel::pipeline<Comm, bfloat16>;

template <class Comm>
constexpr bool strategies =
    strategy::strategy<ddp<Comm>>&& strategy::strategy<zero3<Comm>>&& strategy::strategy<co2_zero<Comm>>;
static_assert(strategies<comm::threads> && strategies<simulate::communicator>);
static_assert(strategy::strategy<low_rank<comm::threads>> && strategy::strategy<l_greco<comm::threads>>);
static_assert(strategy::strategy<zero_plus_plus<comm::threads>>);
static_assert(strategy::strategy<co2_in_4_bits<comm::threads>>);
static_assert(std::movable<stages<comm::threads>> && std::movable<stages<simulate::communicator>>);

struct empty_model {
    using weights = zeroth::module_weights<bfloat16, host_memory>;
    void head(host_queue, weights, std::size_t, std::size_t) {}
    void block(host_queue, std::size_t, weights, std::size_t, std::size_t) {}
    void tail(host_queue, weights, std::size_t, std::size_t, view<double>) {}
};
static_assert(sizeof(distzo2<comm::threads, empty_model>) > 0);

TEST_CASE("attention over sequences of all lengths") {
    comm::threads::launch(2, [](comm::threads& ranks) {
        const std::vector<std::int64_t> lengths{40, 12, 9, 5, 3};

        zeppelin<comm::threads> attention(ranks.duplicate("attention"), {.query = 4, .kv = 2, .width = 16});
        auto layer = attention.make_memory();  // one a layer: what backward needs
        attention.plan(lengths);               // the same on all ranks, once a batch
        // This rank's rows: attention.sequences() and positions() say which token of which sequence each is.
        std::vector<float> qkv(attention.rows() * (4 + 2 * 2) * 16, 0.1f), out(attention.rows() * 4 * 16);
        attention.forward(qkv, out, layer);
        std::vector<float> d_out = out, d_qkv(qkv.size());
        attention.backward(d_out, d_qkv, layer);

        for (const float x : out) {
            if (!(x > 0.0999f && x < 0.1001f)) { throw std::runtime_error("not the mean of equal values"); }
        }
    });
}

TEST_CASE("what a job takes, and the fastest that fits") {
    const plan::model_shape gpt{.layers = 96, .hidden = 12288, .heads = 96, .vocabulary = 51200, .sequence = 2048};
    const plan::job job{.tensor = 8,
                        .pipeline = 8,
                        .chunks = 3,
                        .schedule = plan::pipelining::interleaved,
                        .recompute = plan::recomputation::full,
                        .micro_batches = 64};
    fmt::print("{:.1f} s a step\n", plan::time_of_step(gpt, job, plan::dgx_a100).total());
    const plan::search_result found = plan::search(gpt, plan::dgx_a100, {.ranks = 512, .sequences = 1536});
    fmt::print("{:.1f} s at best, of {} layouts\n", found.best[0].seconds(), found.layouts);

    CHECK(plan::time_of_step(gpt, job, plan::dgx_a100).total() > 1);
    CHECK(found.best.size() == 5);
}

TEST_CASE("a program of ranks in virtual time") {
    const auto program = [](auto& world) {  // what runs on threads, MPI and GPUs
        const buffer<float, queue_of<std::decay_t<decltype(world)>>> gradient(world.queue(), std::size_t{1} << 20);
        world.all_reduce(gradient.view(), gradient.view(), sum{});
    };
    const simulate::cluster machines(plan::frontier, 1024);
    const simulate::outcome o = machines.run(program);
    fmt::print("{:.1f} us, {} bytes a rank at most\n", 1e6 * o.seconds, o.ranks[0].peak_bytes);

    CHECK(o.ranks.size() == 1024);
    CHECK(o.ranks[0].peak_bytes == std::size_t{4} << 20);
    comm::threads::launch(2, program);
}

}  // namespace
