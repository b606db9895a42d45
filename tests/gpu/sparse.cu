// The sparsifiers on a device: the host's bytes and bits, for every element type, distribution and placement, where a
// sample leads well and where it does not; damaged wires; and segments beyond 2^31 and 2^32 elements.
#include <tutti/compress/random_k.cuh>   // under test
#include <tutti/compress/threshold.cuh>  // under test
#include <tutti/compress/top_k.cuh>      // under test

#include <cmath>   // fabs
#include <limits>  // NaN
#include <vector>  // storage

#include <doctest/doctest.h>  // checks

#include <tutti/compress/momentum_feedback.hpp>  // under test
#include <tutti/core/philox.cuh>                 // normals

#include "compress/sparse.hpp"  // gradients
#include "device.hpp"           // require_device

using namespace tutti;
using namespace tutti::test;
using compress::draw_key;
using compress::momentum_feedback;
using compress::random_k;
using compress::segment;
using compress::threshold;
using compress::top_k;
using D = device_memory;

namespace {

// Storage with a margin on both sides that must stay as it is.
constexpr std::size_t margin = 16;
template <class T> class guarded {
    buffer<T, cuda_queue> storage_;
    std::size_t size_;
    std::size_t shift_;
    cuda_queue q_;

public:
    guarded(const cuda_queue& q, const std::vector<T>& host, std::size_t shift = 0)
        : storage_(q, host.size() + 2 * margin), size_(host.size()), shift_(shift), q_(q) {
        std::vector<T> all(storage_.size(), T{});
        std::copy(host.begin(), host.end(), all.begin() + static_cast<std::ptrdiff_t>(margin + shift));
        upload(q, tutti::view<const T>(all), storage_.view());
    }
    [[nodiscard]] tutti::view<T, D> view() const { return storage_.view().sub(margin + shift_, size_); }
    [[nodiscard]] std::vector<T> host() const {
        std::vector<T> all(storage_.size()), blank(all.size(), T{});
        download(q_, tutti::view<const T, D>(storage_.view()), tutti::view<T>(all));
        const std::size_t front = margin + shift_, back = all.size() - front - size_;
        CHECK(std::memcmp(all.data(), blank.data(), front * sizeof(T)) == 0);
        CHECK(std::memcmp(all.data() + front + size_, blank.data(), back * sizeof(T)) == 0);
        return {all.begin() + static_cast<std::ptrdiff_t>(front),
                all.begin() + static_cast<std::ptrdiff_t>(front + size_)};
    }
};

// In every bit, but for NaN, whose bits are the machine's own.
template <class T> bool same_values(const std::vector<T>& a, const std::vector<T>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
        const bool nan = std::isnan(static_cast<float>(a[i])) && std::isnan(static_cast<float>(b[i]));
        if (!nan && std::memcmp(&a[i], &b[i], sizeof(T)) != 0) { return false; }
    }
    return a.size() == b.size();
}

// Host and device encode and decode the same; `shift` moves the arrays off their alignment.
template <class X, class T>
void same_as_host(const cuda_queue& q, const std::vector<segment>& all, const std::vector<T>& in, bool feedback,
                  std::size_t shift = 0, draw_key key = {1, 2, 3}) {
    const X x;
    std::vector<float> residual = feedback ? gradient<float>("laplace", in.size(), 5) : std::vector<float>{};
    const guarded<T> device_in(q, in, shift);
    const guarded<float> device_residual(q, residual, shift);
    const std::vector<std::byte> dirty(compress::detail::wire_bytes(x, all), std::byte{0x5a});
    const guarded<std::byte> device_wire(q, dirty);
    x.encode(q, all, view<const T, D>(device_in.view()), feedback ? device_residual.view() : view<float, D>{},
             device_wire.view(), key);
    const auto wire = encoded(x, all, in, residual, key);
    REQUIRE(same_bits(device_wire.host(), wire));
    REQUIRE(same_bits(device_residual.host(), residual));
    REQUIRE(same_bits(device_in.host(), in));

    const guarded<T> out(q, std::vector<T>(in.size(), T(7.0f)), shift);
    const view<const std::byte, D> received = device_wire.view();
    x.decode(q, all, received, out.view(), 0.3f);
    std::vector<T> expected_out(in.size(), T(7.0f));
    x.decode(host_queue{}, all, view<const std::byte>(wire), view<T>(expected_out), 0.3f);
    REQUIRE(same_values(out.host(), expected_out));
}
template <class X, class T>
void both(const cuda_queue& q, const std::vector<tensor>& tensors, const std::vector<T>& in) {
    for (const bool feedback : {false, true}) { same_as_host<X>(q, laid_out(tensors), in, feedback); }
}

}  // namespace

TEST_CASE_TEMPLATE("small tensors of every type, distribution and level", T, float, bfloat16, float16, double) {
    require_device();
    const cuda_queue q(0);
    for (const std::string_view distribution : distributions) {
        CAPTURE(distribution);
        for (const std::size_t n : {1ul, 33ul, 8193ul}) {
            CAPTURE(n);
            for (const int level : {1, 100, 10000}) {
                CAPTURE(level);
                both<top_k, T>(q, {{n, level}}, gradient<T>(distribution, n));
                both<threshold, T>(q, {{n, level}}, gradient<T>(distribution, n));
            }
        }
    }
}

TEST_CASE("large tensors, in which a sample tells where to look") {
    require_device();
    const cuda_queue q(0);
    for (const std::string_view distribution : distributions) {
        CAPTURE(distribution);
        constexpr std::size_t n = 300007;
        const auto in = gradient<float>(distribution, n);
        for (const int level : {1, 100, 2400, 2600}) {
            CAPTURE(level);
            both<top_k, float>(q, {{n, level}}, in);
            both<threshold, float>(q, {{n, level}}, in);
        }
    }
    for (const int level : {10, 100}) {
        both<top_k, bfloat16>(q, {{300007, level}}, gradient<bfloat16>("t(2)", 300007));
        both<top_k, double>(q, {{300007, level}}, gradient<double>("t(2)", 300007));
        both<threshold, float16>(q, {{300007, level}}, gradient<float16>("t(2)", 300007));
    }
}

TEST_CASE("a sample that misleads, upward and downward") {
    require_device();
    const cuda_queue q(0);
    constexpr std::size_t n = 65536 + 17;
    const draw_key key{1, 2, 3};
    for (const std::size_t huge : {300ul, 4096ul}) {
        auto in = gradient<float>("gaussian", n), other = in;
        for (std::size_t j = 0; j < huge; ++j) {
            in[compress::detail::sample_position(key.stream(0, top_k::purpose), n, j)] = 1e6f;
            other[compress::detail::sample_position(key.stream(0, threshold::purpose), n, j)] = 1e6f;
        }
        same_as_host<top_k>(q, laid_out({{n, 100}}), in, false, 0, key);
        same_as_host<threshold>(q, laid_out({{n, 100}}), other, false, 0, key);
    }
    // All but the sample are large: more candidates than there is room for.
    auto in = std::vector<float>(n, 2.0f), other = in;
    for (std::size_t j = 0; j < 4096; ++j) {
        in[compress::detail::sample_position(key.stream(0, top_k::purpose), n, j)] = 1.0f;
        other[compress::detail::sample_position(key.stream(0, threshold::purpose), n, j)] = 1.0f;
    }
    same_as_host<top_k>(q, laid_out({{n, 100}}), in, true, 0, key);
    same_as_host<threshold>(q, laid_out({{n, 100}}), other, true, 0, key);
}

TEST_CASE_TEMPLATE("many tensors, at every alignment", T, float, bfloat16, double) {
    require_device();
    const cuda_queue q(0);
    std::vector<tensor> tensors;
    for (std::size_t i = 0; i < 75; ++i) {
        tensors.push_back(
            {i % 7 == 3 ? 0 : (i * i * 37) % 3001 + (i == 40 ? 70000 : 0), static_cast<int>(1 + i * 131 % 9999)});
    }
    const auto all = laid_out(tensors);
    const std::size_t n = all.back().offset + all.back().size();
    const auto in = gradient<T>("t(2)", n);
    for (const std::size_t shift : {0ul, 1ul, 2ul, 4ul}) {
        same_as_host<top_k>(q, all, in, true, shift);
        same_as_host<threshold>(q, all, in, true, shift);
    }
    // Some of them, in another order.
    const std::vector<segment> some{all[70], all[40], all[2], all[3]};
    same_as_host<top_k>(q, some, in, true);
    same_as_host<threshold>(q, some, in, true);
}

TEST_CASE("what is not finite") {
    require_device();
    const cuda_queue q(0);
    for (const std::size_t n : {1000ul, 70000ul}) {
        for (const std::size_t count : {1ul, n / 500, n / 7}) {  // fewer and more than are sent
            auto in = gradient<float>("gaussian", n);
            for (std::size_t j = 0; j < count; ++j) {
                in[n - 1 - 7 * j] =
                    j % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
            }
            both<top_k, float>(q, {{n, 100}}, in);
            both<threshold, float>(q, {{n, 100}}, in);
        }
    }
}

TEST_CASE_TEMPLATE("decode_add adds wires in their order", X, top_k, threshold) {
    require_device();
    const cuda_queue q(0);
    const auto all = laid_out({{900, 1000}, {0, 1}, {70001, 500}});
    std::vector<std::byte> wires;
    std::vector<float> none, sum(70901, 1e-3f);
    for (std::uint32_t r = 0; r < 5; ++r) {
        const auto wire = encoded(X{}, all, gradient<float>("t(2)", 70901, r), none);
        wires.insert(wires.end(), wire.begin(), wire.end());
    }
    const guarded<std::byte> device_wires(q, wires);
    const guarded<float> device_sum(q, sum, 1);
    X{}.decode_add(q, all, view<const std::byte, D>(device_wires.view()), 5, device_sum.view());
    X{}.decode_add(host_queue{}, all, view<const std::byte>(wires), 5, view<float>(sum));
    CHECK(same_bits(device_sum.host(), sum));
    CHECK_THROWS_AS(X{}.decode(q, all, view<const std::byte, D>(device_wires.view().data() + 1, wires.size() / 5),
                               device_sum.view(), 1.0f),
                    usage_error);
}

TEST_CASE_TEMPLATE("arbitrary bytes stay inside", X, top_k, threshold) {
    require_device();
    const cuda_queue q(0);
    const auto all = laid_out({{50, 5000}, {3000, 100}, {7, 1}});
    for (std::uint32_t round = 0; round < 20; ++round) {
        std::vector<std::byte> wire(compress::detail::wire_bytes(X{}, all));
        const random_stream draws{.seed = 3, .stream = round};
        for (std::size_t i = 0; i < wire.size(); ++i) {
            const std::uint32_t w = draws.word(i);
            wire[i] = static_cast<std::byte>(round % 3 == 0 ? w : round % 3 == 1 ? (w % 4 == 0 ? w >> 8 : 0) : 0xff);
        }
        const guarded<std::byte> device_wire(q, wire);
        const guarded<float> out(q, std::vector<float>(3057));
        X{}.decode(q, all, view<const std::byte, D>(device_wire.view()), out.view(), 1.0f);
        X{}.decode_add(q, all, view<const std::byte, D>(device_wire.view()), 1, out.view());
        CHECK(out.host().size() == 3057);
    }
}

TEST_CASE_TEMPLATE("random_k", T, float, bfloat16, float16, double) {
    require_device();
    const cuda_queue q(0);
    std::vector<tensor> tensors;
    for (std::size_t i = 0; i < 40; ++i) {
        tensors.push_back({i * i * 3 + (i == 20 ? 40000u : 0u), static_cast<int>(1 + i * 251)});
    }
    const auto all = laid_out(tensors);
    const std::size_t n = all.back().offset + all.back().size();
    for (const bool feedback : {false, true}) {
        for (const bool spoiled : {false, true}) {
            const random_k x{.unbiased = !feedback};
            auto in = gradient<T>("gaussian", n);
            if (spoiled) { in[n / 2] = T(std::numeric_limits<float>::infinity()); }
            std::vector<float> residual = feedback ? gradient<float>("laplace", n, 5) : std::vector<float>{};
            const std::size_t count = compress::detail::wire_count(x, all, 0);
            const guarded<T> device_in(q, in, 1);
            const guarded<float> device_residual(q, residual, 1);
            const guarded<float> device_wire(q, std::vector<float>(count, 9));
            const auto owed = feedback ? device_residual.view() : view<float, D>{};
            std::vector<float> wire(count, 9);
            const host_queue h;
            auto host_state = x.make_state(h, all);
            auto state = x.make_state(q, all);
            x.contribute(q, all, state, 0, view<const T, D>(device_in.view()), owed, device_wire.view(), {4, 5, 6});
            x.contribute(h, all, host_state, 0, view<const T>(in), view<float>(residual), view<float>(wire), {4, 5, 6});
            REQUIRE(same_bits(device_wire.host(), wire));
            REQUIRE(same_bits(device_residual.host(), residual));
            x.absorb(q, all, state, 0, device_wire.view(), 3);
            x.absorb(h, all, host_state, 0, view<float>(wire), 3);
            x.finish(q, all, state, view<const T, D>(device_in.view()), owed, device_in.view());
            x.finish(h, all, host_state, view<const T>(in), view<float>(residual), view<T>(in));
            REQUIRE(same_values(device_in.host(), in));
            REQUIRE(same_bits(device_residual.host(), residual));
        }
    }
}

TEST_CASE_TEMPLATE("momentum_feedback", T, float, bfloat16, float16, double) {
    require_device();
    const cuda_queue q(0);
    const host_queue h;
    constexpr std::size_t n = 5003;
    const auto all = laid_out({{3000, 100}, {2003, 10000}});
    for (const bool nesterov : {false, true}) {
        momentum_feedback<cuda_queue> device(q, n, {.nesterov = nesterov});
        momentum_feedback<host_queue> host(h, n, {.nesterov = nesterov});
        const guarded<std::byte> device_wire(q, std::vector<std::byte>(compress::detail::wire_bytes(top_k{}, all)));
        std::vector<std::byte> wire(compress::detail::wire_bytes(top_k{}, all));
        for (std::uint32_t t = 0; t < 6; ++t) {
            auto g = gradient<T>("laplace", n, t);
            if (t == 2) { g[77] = g[4000] = T(std::numeric_limits<float>::infinity()); }
            const guarded<T> device_g(q, g);
            device.add(q, device_g.view());
            host.add(h, view<const T>(g));
            top_k{}.encode(q, all, device.in(), device.residual(), device_wire.view(), {});
            top_k{}.encode(h, all, host.in(), host.residual(), view<std::byte>(wire), {});
            device.sent(q, all);
            host.sent(h, all);
            REQUIRE(same_bits(device_wire.host(), wire));
            for (const auto& [device_part, host_part] :
                 {std::pair(device.in(), host.in()),
                  std::pair(view<const float, D>(device.residual()), view<const float>(host.residual()))}) {
                std::vector<float> a(n), b(host_part.begin(), host_part.end());
                download(q, device_part, view<float>(a));
                REQUIRE(same_bits(a, b));
            }
        }
    }
}

namespace {
__global__ void count_above(const float* x, std::size_t n, float bound, unsigned long long* larger) {
    unsigned long long own = 0;
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
         i += std::size_t{gridDim.x} * blockDim.x) {
        own += fabsf(x[i]) > bound ? 1 : 0;
    }
    atomicAdd(larger, own);
}
bool has_room(std::size_t bytes) {
    std::size_t free = 0, all = 0;
    detail::check_cuda(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
    if (free < bytes) { MESSAGE("left out: the device has ", free >> 30, " GiB free of ", bytes >> 30, " needed"); }
    return free >= bytes;
}
std::vector<std::byte> on_host(const cuda_queue& q, const buffer<std::byte, cuda_queue>& b) {
    std::vector<std::byte> host(b.size());
    download(q, view<const std::byte, D>(b.view()), view<std::byte>(host));
    return host;
}
}  // namespace

// github.com/bitsandbytes-foundation/bitsandbytes/issues/1785, 2067: 2^31 elements and more.
TEST_CASE_TEMPLATE("2^31 + 1 normal elements", X, top_k, threshold) {
    require_device();
    constexpr std::size_t n = (std::size_t{1} << 31) + 1;
    if (!has_room(n * 5)) { return; }
    const cuda_queue q(0);
    const buffer<float, cuda_queue> x(q, n);
    fill_normal(q, x.view(), random_stream{.seed = 5});
    fill(q, x.view().sub(n - 1, 1), -9.0f);  // the very last is the largest
    const auto all = laid_out({{n, 10}});
    const auto format = X::format(all[0]);
    const std::size_t k = X::kept(all[0]);
    const buffer<std::byte, cuda_queue> wire(q, format.bytes());
    X{}.encode(q, all, view<const float, D>(x.view()), view<float, D>{}, wire.view(), {});
    const auto got = on_host(q, wire);
    const std::size_t entries = format.entries(got.data());
    CHECK(entries >= k);
    CHECK(entries <= X::capacity(k));
    CHECK(format.index(got.data(), entries - 1) == n - 1);
    CHECK(format.value(got.data(), entries - 1) == -9.0f);
    float least = 9;
    std::size_t wrong = 0;
    for (std::size_t e = 0; e < entries; ++e) {
        const std::size_t i = format.index(got.data(), e);
        const float v = format.value(got.data(), e);
        wrong += e > 0 && i <= format.index(got.data(), e - 1) ? 1 : 0;
        wrong += i + 1 < n && std::fabs(v - random_stream{.seed = 5}.normal(i)) != 0 ? 1 : 0;
        least = std::min(least, std::fabs(v));
    }
    CHECK(wrong == 0);
    const buffer<unsigned long long, cuda_queue> larger(q, 1);
    fill(q, larger.view(), 0ull);
    // All that is larger than the least was sent; threshold does not tell 3 % apart.
    const float bound = X::exact ? least : least * (1 + 1.0f / 32);
    count_above<<<1024, 256, 0, q.stream()>>>(x.data(), n, bound, larger.data());
    const auto above = fetch(q, view<unsigned long long, D>(larger.view()), 0ull);
    CHECK(above < entries);
    if constexpr (X::exact) { CHECK(entries - above <= 64); }
}

TEST_CASE("2^32 + 5 elements: 64-bit indices, and nearly all equal") {
    require_device();
    constexpr std::size_t n = (std::size_t{1} << 32) + 5;
    if (!has_room(n * 5 / 2)) { return; }
    const cuda_queue q(0);
    const buffer<bfloat16, cuda_queue> x(q, n);
    fill(q, x.view(), bfloat16(0.0f));
    const std::vector<std::size_t> places{3, std::size_t{1} << 31, (std::size_t{1} << 32) - 1, std::size_t{1} << 32,
                                          n - 1};
    for (const std::size_t i : places) { fill(q, x.view().sub(i, 1), bfloat16(static_cast<float>(i % 5) + 1)); }
    const auto all = laid_out({{n, 1}});
    const auto check = [&](const auto& scheme, std::size_t zeros) {
        const auto format = scheme.format(all[0]);
        CHECK(format.wide);
        const buffer<std::byte, cuda_queue> wire(q, format.bytes());
        scheme.encode(q, all, view<const bfloat16, D>(x.view()), view<float, D>{}, wire.view(), {});
        const auto got = on_host(q, wire);
        std::vector<std::size_t> want;  // the first zeros, and the others in their places
        for (std::size_t i = 0, left = zeros; left > 0; ++i) {
            want.push_back(i);
            left -= i == places[0] ? 0 : 1;
        }
        want.insert(want.end(), places.begin() + (zeros > 0 ? 1 : 0), places.end());
        REQUIRE(format.entries(got.data()) == want.size());
        std::size_t wrong = 0;
        for (std::size_t e = 0; e < want.size(); ++e) {
            wrong += format.index(got.data(), e) != want[e] ? 1 : 0;
            const bool zero = std::find(places.begin(), places.end(), want[e]) == places.end();
            wrong += format.value(got.data(), e) != (zero ? 0.0f : static_cast<float>(want[e] % 5) + 1) ? 1 : 0;
        }
        CHECK(wrong == 0);
    };
    check(top_k{}, top_k::kept(all[0]) - places.size());
    check(threshold{}, 0);
}
