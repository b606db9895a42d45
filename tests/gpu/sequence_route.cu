// Routed messages between GPUs: dispatch, crossing by proxies, and combining, over NCCL's grouped point-to-point calls.
// Started by mpirun, a process a rank, which NCCL takes for hosts; two of the test's nodes. Skipped without a GPU.
#include <cstddef>  // bytes
#include <cstdint>  // seeds
#include <mutex>    // results of ranks
#include <random>   // messages
#include <vector>   // data

#include <doctest/doctest.h>  // checks

#include <sequence/problem.hpp>                    // direct solution
#include <tutti/comm/counted.hpp>                  // ledger
#include <tutti/comm/mpi.hpp>                      // where ranks meet
#include <tutti/comm/nccl.hpp>                     // ranks
#include <tutti/sequence/cuda_attention.cuh>       // kernels
#include <tutti/sequence/partition/even_ring.hpp>  // placements
#include <tutti/sequence/ring_attention.hpp>       // rings
#include <tutti/sequence/route.hpp>                // under test
#include <tutti/sequence/routed.hpp>               // under test

#include "device.hpp"    // device_of_process
#include "mirrored.hpp"  // mirrored

using namespace tutti;
using namespace tutti::test;
using namespace tutti::sequence;

namespace {

using flows = std::vector<flow>;
constexpr comm::link fast{2e-6, 200e9};
constexpr comm::link slow{10e-6, 20e9};

// The ranks of mpirun on their GPUs.
comm::nccl ranks_on_gpus(comm::mpi& world) {
    return comm::nccl::over(world, cuda_queue(device_of_process(world.rank(), world.size())), {.name = "gpus"});
}
// Two nodes, whose ranks have a NIC each.
comm::topology two_nodes(int ranks) { return comm::topology::uniform(2, ranks / 2, fast, slow, ranks / 2); }

std::byte byte_of(std::size_t message, std::size_t i) {
    return static_cast<std::byte>(message * 37 + i * 11 + i / 256 + 1);
}

// The messages of a list that a rank sends and receives, in device memory; received bytes are 0 before.
struct traffic {
    const flows& list;
    int rank;
    std::vector<buffer<std::byte, cuda_queue>> sent, received;  // by message
    std::vector<comm::transfer<device_memory>> messages;

    traffic(const cuda_queue& q, const flows& all, int me) : list(all), rank(me) {
        for (std::size_t m = 0; m < list.size(); ++m) {
            const flow& f = list[m];
            sent.emplace_back(q, f.source == me ? f.bytes : 0);
            received.emplace_back(q, f.destination == me ? f.bytes : 0);
            std::vector<std::byte> host(sent.back().size());
            for (std::size_t i = 0; i < host.size(); ++i) { host[i] = byte_of(m, i); }
            upload(q, view<const std::byte>(host), sent.back().view());
            const std::vector<std::byte> zeros(received.back().size());
            upload(q, view<const std::byte>(zeros), received.back().view());
        }
        for (std::size_t m = 0; m < list.size(); ++m) {
            if (list[m].source == me) { messages.push_back(comm::send_to(list[m].destination, sent[m].view())); }
            if (list[m].destination == me) {
                messages.push_back(comm::receive_from(list[m].source, received[m].view()));
            }
        }
    }
    [[nodiscard]] bool arrived(const cuda_queue& q) const {
        for (std::size_t m = 0; m < list.size(); ++m) {
            std::vector<std::byte> host(received[m].size());
            download(q, view<const std::byte, device_memory>(received[m].view()), view<std::byte>(host));
            for (std::size_t i = 0; i < host.size(); ++i) {
                if (host[i] != byte_of(m, i)) { return false; }
            }
        }
        return true;
    }
};

}  // namespace

TEST_CASE(
    "messages between two nodes arrive whole, whatever their size and their way, and each sends what is planned") {
    comm::mpi world(MPI_COMM_WORLD);
    if (world.size() < 4) { return; }  // a node's only rank has no proxies
    comm::counted<comm::nccl> c(ranks_on_gpus(world));
    const auto ledger = c.traffic_ledger();
    const comm::topology machines = two_nodes(c.size());
    std::mt19937 random(5);
    std::vector<flows> lists;
    for (const std::size_t bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{16}, std::size_t{4099}, std::size_t{3} << 20}) {
        lists.push_back({{0, c.size() - 1, bytes}});
    }
    lists.emplace_back();
    for (int r = 0; r < c.size(); ++r) { lists.back().push_back({r, (r + 1) % c.size(), 100003}); }  // a step of a ring
    lists.emplace_back();
    for (int i = 0; i < 24; ++i) {
        const auto any = [&] { return static_cast<int>(random() % static_cast<unsigned>(c.size())); };
        lists.back().push_back({any(), any(), random() % 4 == 0 ? random() % 3 : random() % 50000});
    }
    for (const flows& list : lists) {
        for (const std::size_t chunks : {1u, 2u, 5u}) {
            CAPTURE(chunks);
            const route r = route::spread(machines, list, chunks);
            traffic mine(c.queue(), list, c.rank());
            const std::uint64_t before = ledger->total().bytes;
            r.exchange(c, mine.messages);
            c.synchronize();
            CHECK(mine.arrived(c.queue()));
            std::uint64_t planned = 0;
            for (const hop& h : r.hops()) { planned += h.from == c.rank() && h.to != c.rank() ? h.bytes : 0; }
            CHECK(ledger->total().bytes - before == planned);
        }
    }
    // Of a large message a proxy carries half.
    const route halves = route::spread(machines, flows{{0, c.size() - 1, std::size_t{3} << 20}}, 2);
    std::size_t by_proxy = 0;
    for (const hop& h : halves.hops()) { by_proxy += h.from == 1 && !machines.same_node(h.from, h.to) ? h.bytes : 0; }
    CHECK(by_proxy == (std::size_t{3} << 20) / static_cast<std::size_t>(c.size() / 2));
}

TEST_CASE("double: rings over two nodes have the same bits by routes and without, and are the direct solution") {
    using kernel = cuda_attention<double>;
    comm::mpi world(MPI_COMM_WORLD);
    comm::nccl c = ranks_on_gpus(world);
    const comm::topology machines = two_nodes(c.size());
    const problem p({4, 2, 8}, {301, 64, 97, 5, 0, 1}, mask::causal, 13);
    const placement where = partition::even_ring{}(p.lengths, {2, c.size() / 2});
    const auto solved = [&](auto exchange) {
        solution mine(p);
        std::mutex mutex;
        ring_attention<comm::nccl, kernel, decltype(exchange)> engine(c.duplicate("attention"), p.heads, {}, {},
                                                                      std::move(exchange));
        engine.plan(where);
        const cuda_queue q = engine.communicator().queue();
        rank_data<double> data(p, where, c.rank());
        mirrored packed(q, data.packed), out(q, data.out), d_out(q, data.d_out), gradients(q, data.gradients),
            sums(q, data.log_sum_exp);
        const auto query = packed(data.query()), key = packed(data.key()), value = packed(data.value());
        const auto result = out(data.result());
        const auto numbers = sums(data.numbers());
        engine.forward(query, key, value, result, numbers);
        engine.backward(d_out(data.out_gradient()), query, key, value, result, numbers, gradients(data.d_query()),
                        gradients(data.d_key()), gradients(data.d_value()));
        out.fetch();
        sums.fetch();
        gradients.fetch();
        data.collect(mine, mutex, true);
        return mine;
    };
    // Free inside of nodes, slow between them: what has proxies is spread.
    const solution direct = solved(direct_exchange{});
    const comm::topology quick = comm::topology::uniform(2, c.size() / 2, {0, 200e9}, {1e-6, 1e6}, c.size() / 2);
    const routed routes(quick);
    const solution by_routes = solved(routes);
    // Of other ranks' tokens there is NaN here.
    const solution reference = solved_directly(p);
    std::size_t tokens = 0;
    double worst = 0;
    bool same = true;
    for (const auto which :
         {&solution::out, &solution::log_sum_exp, &solution::d_query, &solution::d_key, &solution::d_value}) {
        for (std::size_t s = 0; s < p.lengths.size(); ++s) {
            for (std::size_t i = 0; i < (reference.*which)[s].size(); ++i) {
                const double a = (direct.*which)[s][i], b = (by_routes.*which)[s][i];
                if (std::isnan(a) && std::isnan(b)) { continue; }
                ++tokens;
                same = same && a == b;
                worst = larger(worst, std::fabs(b - (reference.*which)[s][i]));
            }
        }
    }
    CHECK(tokens > 0);
    CHECK(same);
    CHECK(worst <= 1e-12);
    if (c.size() > 2) {
        const routed planned =
            routes.planned(ring_attention<comm::nccl, kernel, routed>::calls_of(where, p.heads), c.rank());
        bool spread = false;
        for (const route& r : planned.routes()) { spread = spread || r.steps() > 1; }
        CHECK(spread);
    }
    c.synchronize();
}
