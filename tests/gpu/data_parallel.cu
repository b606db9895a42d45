// data_parallel on a GPU, one rank: the bits of the same strategy on the host, over whole steps with clipping.
#include <tutti/strategy/data_parallel.cuh>  // under test

#include <algorithm>  // copy
#include <cstdint>    // streams
#include <cstring>    // memcmp
#include <optional>   // seed
#include <string>     // names
#include <utility>    // pair
#include <vector>     // values

#include <doctest/doctest.h>  // checks

#include <tutti/comm/self.hpp>       // one rank
#include <tutti/core/buffer.hpp>     // storage
#include <tutti/optimize/adamw.hpp>  // optimizer

#include "device.hpp"  // require_device
#include "toy.hpp"     // what is trained

using namespace tutti;

namespace {

using test::initial;
using test::slope_operation;
using test::toy_sizes;

// Five steps of two micro-batches each; gives the values and the norms.
template <class T, queue Q, class Copy>
std::pair<std::vector<std::vector<T>>, std::vector<double>> train(Q q, Copy to_memory, bool own_gradients,
                                                                  std::optional<std::uint64_t> seed) {
    using M = typename Q::memory_type;
    std::vector<buffer<T, Q>> values;
    std::vector<buffer<T, Q>> gradients;
    strategy::parameters<T, M> list;
    for (std::size_t p = 0; p < toy_sizes.size(); ++p) {
        values.emplace_back(q, toy_sizes[p]);
        gradients.emplace_back(q, own_gradients ? toy_sizes[p] : 0);
        to_memory(q, initial<T>(p), values.back().view());
        list.push_back(
            {"p" + std::to_string(p), {toy_sizes[p]}, p % 2 == 0, values.back().view(), gradients.back().view()});
    }
    strategy::data_parallel<comm::self<Q>, optimize::adamw, T> s(
        comm::self<Q>(q), {}, {.bucket_bytes = 4096, .stochastic_rounding_seed = seed});
    s.attach(list);
    std::vector<double> norms;
    for (std::uint32_t step = 0; step < 5; ++step) {
        for (std::uint32_t m = 0; m < 2; ++m) {
            s.begin({static_cast<int>(m), 2});
            for (std::size_t p = toy_sizes.size(); p-- > 0;) {
                const auto sample = 100 * step + 10 * static_cast<std::uint32_t>(p) + m;
                run(s.queue(), slope_operation<T, M>{s.before_use(p), s.gradient(p), sample});
                s.after_use(p);
                s.gradient_ready(p);
            }
        }
        norms.push_back(s.step({.learning_rate = 0.01, .clip_norm = 1}).norm);
    }
    s.finish();
    std::vector<std::vector<T>> result;
    for (std::size_t p = 0; p < toy_sizes.size(); ++p) {
        result.emplace_back(toy_sizes[p]);
        if constexpr (Q::executes_inline) {
            std::copy_n(values[p].data(), toy_sizes[p], result.back().begin());
        } else {
            download(q, values[p].view(), view<T>(result.back()));
        }
    }
    return {result, norms};
}

}  // namespace

TEST_CASE_TEMPLATE("a GPU gives the bits of the host", T, float, bfloat16) {
    test::require_device();
    for (const int setup : {0, 1, 2}) {
        CAPTURE(setup);
        const bool own_gradients = setup == 1;
        std::optional<std::uint64_t> seed;
        if (setup == 2) {
            if (!half_element<T>) { continue; }
            seed = 77;
        }
        const auto [host, host_norms] = train<T>(
            host_queue{},
            [](const host_queue&, const std::vector<T>& v, view<T> to) { std::copy(v.begin(), v.end(), to.begin()); },
            own_gradients, seed);
        const auto [device, device_norms] = train<T>(
            cuda_queue(0),
            [](const cuda_queue& q, const std::vector<T>& v, view<T, device_memory> to) {
                upload(q, view<const T>(v), to);
            },
            own_gradients, seed);
        CHECK(host_norms == device_norms);
        for (std::size_t p = 0; p < toy_sizes.size(); ++p) {
            CAPTURE(p);
            CHECK(std::memcmp(host[p].data(), device[p].data(), toy_sizes[p] * sizeof(T)) == 0);
        }
        CHECK(host_norms.front() > 1);  // clipping took part
    }
}
