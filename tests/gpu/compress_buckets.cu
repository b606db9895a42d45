// Compressors of buckets on a device: the host's bytes on the wire, its residuals, its decoded bits, for every scheme,
// width, type, alignment and number of tensors; nothing is written beside the views; more than 2^31 elements.
#include <tutti/compress/buckets.cuh>  // under test

#include <algorithm>  // min
#include <cmath>      // isnan
#include <cstring>    // memcmp
#include <limits>     // infinity
#include <string>     // messages
#include <vector>     // arrays

#include <doctest/doctest.h>  // checks

#include <tutti/core/buffer.hpp>  // storage
#include <tutti/core/philox.cuh>  // fill_normal

#include "../compress/bucketed.hpp"  // schemes
#include "device.hpp"                // require_device
#include "support/oracle.hpp"        // mixed

using namespace tutti;
using namespace tutti::compress;
using test::whole;

namespace {

using D = device_memory;
template <class T> using array = buffer<T, cuda_queue>;

// Storage with a margin behind it that must stay as it is.
constexpr std::size_t margin = 64;
template <class T> struct guarded {
    std::vector<T> expected;  // with the margin
    array<T> storage;
    std::size_t shift;
    guarded(const cuda_queue& q, const std::vector<T>& values, std::size_t shift_)
        : expected(shift_, T{}), storage(q, values.size() + margin + shift_), shift(shift_) {
        expected.insert(expected.end(), values.begin(), values.end());
        expected.resize(expected.size() + margin, T{});
        upload(q, view<const T>(expected), storage.view());
    }
    [[nodiscard]] view<T, D> device() const { return storage.view().sub(shift, expected.size() - margin - shift); }
    [[nodiscard]] view<T> host() { return view<T>(expected).sub(shift, expected.size() - margin - shift); }
    // Elements that differ; two NaN are the same.
    [[nodiscard]] std::size_t differing(const cuda_queue& q) const {
        std::vector<T> got(expected.size());
        download(q, storage.view(), view<T>(got));
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < got.size(); ++i) {
            if (std::memcmp(&got[i], &expected[i], sizeof(T)) == 0) { continue; }
            if constexpr (floating_element<T>) {
                using real = master_t<T>;
                if (std::isnan(static_cast<real>(got[i])) && std::isnan(static_cast<real>(expected[i]))) { continue; }
            }
            ++wrong;
        }
        return wrong;
    }
};

// Encodes, decodes and adds on both, and compares everything.
template <class T, class X>
void same_as_host(const cuda_queue& q, const X& x, layout all, const std::vector<T>& in,
                  const std::vector<float>& before, std::size_t shift) {
    const host_queue h;
    const std::size_t bytes = compress::detail::wire_bytes(x, all);
    const draw_key key{77, 5, 3};
    guarded<T> input(q, in, shift);
    for (const bool with_residual : {false, true}) {
        CAPTURE(with_residual);
        guarded<float> residual(q, before, shift);
        guarded<std::byte> wires(q, std::vector<std::byte>(3 * bytes, std::byte{0xa5}), 0);
        for (std::uint32_t rank = 0; rank < 3; ++rank) {
            const draw_key own{key.seed, key.step, rank};
            x.encode(q, all, view<const T, D>(input.device()), with_residual ? residual.device() : view<float, D>(),
                     wires.device().sub(rank * bytes, bytes), own);
            x.encode(h, all, view<const T>(input.host()), with_residual ? residual.host() : view<float>(),
                     wires.host().sub(rank * bytes, bytes), own);
        }
        CHECK(wires.differing(q) == 0);
        CHECK(residual.differing(q) == 0);
        guarded<T> out(q, std::vector<T>(in.size(), T(3.0f)), shift);
        x.decode(q, all, view<const std::byte, D>(wires.device().sub(0, bytes)), out.device(), 0.3f);
        x.decode(h, all, view<const std::byte>(wires.host().sub(0, bytes)), out.host(), 0.3f);
        CHECK(out.differing(q) == 0);
        guarded<float> sum(q, before, shift);
        x.decode_add(q, all, view<const std::byte, D>(wires.device()), 3, sum.device());
        x.decode_add(h, all, view<const std::byte>(wires.host()), 3, sum.host());
        CHECK(sum.differing(q) == 0);
    }
    CHECK(input.differing(q) == 0);
}

template <class T> std::vector<T> mixed_input(std::size_t n) {
    std::vector<T> in = test::normals<T>(n, 1, 0.02);
    for (std::size_t i = 0; i < n; ++i) {
        if (i / 512 % 5 == 1) { in[i] = T(0.25f); }                                            // constant
        if (i / 512 % 5 == 2) { in[i] = static_cast<T>(static_cast<float>(in[i]) * 1e-36f); }  // subnormal
    }
    if (n > 4 * 512) { in[3 * 512 + 100] = static_cast<T>(std::numeric_limits<float>::quiet_NaN()); }
    if (n > 9 * 512) { in[8 * 512 + 7] = static_cast<T>(-std::numeric_limits<float>::infinity()); }
    return in;
}

template <class T, class X> void sizes_and_places(const X& x, int level, bool few) {
    const cuda_queue q(0);
    std::vector<std::size_t> sizes{1, 7, 8, 9, 255, 511, 512, 513, 1024, 1025, 10007};
    if (few) { sizes = {1, 513, 3001}; }
    for (const std::size_t n : sizes) {
        CAPTURE(n);
        const segment s{.tensor = 2, .level = level, .first = 7 * x.granularity(), .rows = n};
        for (const std::size_t shift : {std::size_t{0}, std::size_t{3}}) {
            CAPTURE(shift);
            same_as_host<T>(q, x, layout(&s, 1), mixed_input<T>(n), test::normals<float>(n, 2, 0.01), shift);
        }
    }
}

// Tensors of all sizes, aligned and not, some empty.
std::vector<segment> many_tensors(std::size_t count, int level, std::size_t& end) {
    std::vector<segment> all;
    end = 0;
    for (std::uint32_t t = 0; t < count; ++t) {
        const std::size_t n = test::mixed(t) % (t % 10 == 0 ? 5000 : 70) * (t % 7 == 3 ? 0 : 1);
        all.push_back({.tensor = t, .level = level, .offset = end, .rows = n});
        end += n + t % 3;
    }
    return all;
}

}  // namespace

TEST_CASE("floats, every scheme and width") {
    test::require_device();
    for (const std::size_t bucket : {512ul, 1024ul, 48ul, 32ul}) {
        CAPTURE(bucket);
        test::for_bucketed(
            [&](const std::string& name, const auto& x, int level) {
                CAPTURE(name);
                sizes_and_places<float>(x, level, bucket != 512);
            },
            bucket);
    }
}

TEST_CASE_TEMPLATE("other types", T, double, float16, bfloat16) {
    test::require_device();
    for (int bits = 1; bits <= 8; ++bits) { sizes_and_places<T>(quantize(), bits, bits % 4 != 0); }
    sizes_and_places<T>(quantize(512, rounding::nearest), 4, true);
    sizes_and_places<T>(sign(), 1, false);
    sizes_and_places<T>(natural(), 8, true);
}

// Threads have one, two or eight chunks of pairs, and measure them as pairs.
TEST_CASE_TEMPLATE("buckets of 16-bit elements", T, float16, bfloat16) {
    test::require_device();
    for (const std::size_t bucket : {8ul, 16ul, 64ul, 120ul, 128ul, 1024ul}) {
        CAPTURE(bucket);
        sizes_and_places<T>(quantize(bucket), 4, true);
        sizes_and_places<T>(qsgd<compress::norm::max>(bucket), 8, true);
    }
    // All extremes are found: of buckets of one sign, and wherever the largest is.
    const cuda_queue q(0);
    const segment s = whole(64 * 512, 4);
    std::vector<T> in = test::normals<T>(s.size(), 3);
    for (std::size_t b = 0; b < 64; ++b) {
        for (std::size_t i = 0; i < 512; ++i) {
            const float x = std::fabs(static_cast<float>(in[512 * b + i])) + (i == 8 * b + b / 8 ? 9.0f : 0.0f);
            in[512 * b + i] = static_cast<T>(b % 2 == 0 ? x : -x);
        }
    }
    same_as_host<T>(q, quantize(), layout(&s, 1), in, test::normals<float>(s.size(), 4), 0);
    same_as_host<T>(q, qsgd<compress::norm::max>(), layout(&s, 1), in, test::normals<float>(s.size(), 4), 0);
}

// The numbers of random blocks have two words: one bucket of 48 elements has six blocks on both sides of 2^32.
TEST_CASE_TEMPLATE("draws where the upper word of a block's number changes", T, float, bfloat16) {
    test::require_device();
    const cuda_queue q(0);
    for (const std::size_t bucket : {48ul, 512ul, 1000ul}) {
        CAPTURE(bucket);
        const std::size_t last = (std::size_t{1} << 35) / bucket;
        const segment s{.tensor = 2, .level = 4, .first = (last - 2) * bucket, .rows = 6 * bucket};
        same_as_host<T>(q, quantize(bucket), layout(&s, 1), test::normals<T>(s.size(), 1),
                        test::normals<float>(s.size(), 2), 0);
    }
}

TEST_CASE("many tensors, in one launch or a few") {
    test::require_device();
    const cuda_queue q(0);
    for (const std::size_t count : {63ul, 64ul, 65ul, 300ul}) {
        CAPTURE(count);
        std::size_t end = 0;
        auto all = many_tensors(count, 4, end);
        same_as_host<float>(q, quantize(), all, mixed_input<float>(end), test::normals<float>(end, 2), 0);
        for (segment& s : all) { s.level = 1 + static_cast<int>(s.tensor % 8); }
        same_as_host<float>(q, quantize(64), all, mixed_input<float>(end), test::normals<float>(end, 2), 0);
    }
}

// What compute-sanitizer looks at: everything once, on little data; bytes that nobody encoded, too.
TEST_CASE("little of everything") {
    test::require_device();
    const cuda_queue q(0);
    for (const std::size_t bucket : {512ul, 1024ul, 40ul}) {
        test::for_bucketed(
            [&](const std::string& name, const auto& x, int level) {
                CAPTURE(name);
                if (level > 2 && level % 4 != 0) { return; }
                std::size_t end = 0;
                const auto all = many_tensors(20, level, end);
                same_as_host<float>(q, x, all, mixed_input<float>(end), test::normals<float>(end, 2), 1);
                const std::size_t bytes = compress::detail::wire_bytes(x, all);
                std::vector<std::byte> drawn(2 * bytes);
                for (std::size_t i = 0; i < drawn.size(); ++i) { drawn[i] = static_cast<std::byte>(test::mixed(i)); }
                for (std::size_t i = 3; i < drawn.size(); i += 64) { drawn[i] = std::byte{0xff}; }
                guarded<std::byte> wires(q, drawn, 0);
                guarded<float> sum(q, test::normals<float>(end, 2), 0);
                x.decode(q, all, view<const std::byte, D>(wires.device().sub(bytes, bytes)), sum.device());
                x.decode(host_queue{}, all, view<const std::byte>(wires.host().sub(bytes, bytes)), sum.host());
                x.decode_add(q, all, view<const std::byte, D>(wires.device()), 2, sum.device());
                x.decode_add(host_queue{}, all, view<const std::byte>(wires.host()), 2, sum.host());
                CHECK(sum.differing(q) == 0);
            },
            bucket);
    }
}

TEST_CASE("a captured call does the same at each replay") {
    test::require_device();
    const cuda_queue q(0);
    constexpr std::size_t n = 5000;
    const segment s = whole(n, 4);
    const layout all(&s, 1);
    const quantize x;
    const array<float> in(q, n), residual(q, n);
    const array<std::byte> wire(q, x.wire_bytes(s));
    const std::vector<float> gradient = test::normals<float>(n, 1), zeros(n);
    upload(q, view<const float>(gradient), in.view());
    upload(q, view<const float>(zeros), residual.view());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    REQUIRE(cudaStreamBeginCapture(q.stream(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    {
        const segment gone = s;  // read while the call runs, and not kept
        x.encode(q, layout(&gone, 1), view<const float, D>(in.view()), residual.view(), wire.view(), {1, 2, 3});
    }
    REQUIRE(cudaStreamEndCapture(q.stream(), &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&ready, graph, 0) == cudaSuccess);
    std::vector<std::byte> expected(wire.size()), got(wire.size());
    std::vector<float> kept(n);
    for (int i = 0; i < 3; ++i) {
        REQUIRE(cudaGraphLaunch(ready, q.stream()) == cudaSuccess);
        x.encode(host_queue{}, all, view<const float>(gradient), view<float>(kept), view<std::byte>(expected),
                 {1, 2, 3});
        download(q, wire.view(), view<std::byte>(got));
        CHECK(std::memcmp(got.data(), expected.data(), got.size()) == 0);
    }
    cudaGraphExecDestroy(ready);
    cudaGraphDestroy(graph);
}

// bitsandbytes-foundation/bitsandbytes#1785, #2067, #1784: more than 2^30 or 2^31 elements; torch_cgx counts bits in
// int, which ends at 2^31 bits; bytedance/byteps#299: 16-bit indices.
TEST_CASE("2^31 + 1 elements") {
    test::require_device();
    const cuda_queue q(0);
    std::size_t free = 0, total = 0;
    REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
    constexpr std::size_t n = (std::size_t{1} << 31) + 1;
    if (free < 3 * n * sizeof(float)) {
        MESSAGE("left out: it needs 26 GB of device memory");
        return;
    }
    const quantize x;
    for (const int bits : {2, 8}) {
        const segment s = whole(n, bits);
        const layout all(&s, 1);
        const array<float> in(q, n), out(q, n);
        const array<std::byte> wire(q, x.wire_bytes(s));
        fill_normal(q, in.view(), random_stream{.seed = 4}, 0.02f);
        x.encode(q, all, view<const float, D>(in.view()), {}, wire.view(), {1, 2, 3});
        x.decode(q, all, view<const std::byte, D>(wire.view()), out.view());
        const auto shape = compress::detail::shape_of(x, s);
        for (const std::size_t at :
             {std::size_t{0}, std::size_t{1} << 28, (std::size_t{1} << 30) - 1024, (std::size_t{1} << 31) - 1024}) {
            // A part that begins at a bucket has the codes that it has in the whole.
            const std::size_t count = std::min<std::size_t>(1536, n - at);
            std::vector<float> part(count), decoded(count), expected(count);
            download(q, in.view().sub(at, count), view<float>(part));
            download(q, out.view().sub(at, count), view<float>(decoded));
            const segment cut{.tensor = s.tensor, .level = bits, .first = at, .rows = count};
            const auto alone = test::encode(x, layout(&cut, 1), part);
            expected = test::decode(x, layout(&cut, 1), alone.wire, count);
            CHECK(std::memcmp(decoded.data(), expected.data(), count * sizeof(float)) == 0);
            const std::size_t bytes = compress::detail::chunks_of(count) * static_cast<std::size_t>(bits);
            std::vector<std::byte> codes(bytes);
            download(q, wire.view().sub(shape.codes + at / 8 * static_cast<std::size_t>(bits), bytes),
                     view<std::byte>(codes));
            const auto cut_shape = compress::detail::shape_of(x, cut);
            CHECK(std::memcmp(codes.data(), alone.wire.data() + cut_shape.codes, bytes) == 0);
        }
    }
}
