// The compressors of buckets, and calls of them that own what they write: for tests.
// Needs compress's quantize, sign, ternary, natural and float8.
#pragma once

#include <algorithm>  // min
#include <cmath>      // isnan
#include <cstddef>    // size_t, byte
#include <cstring>    // memcmp
#include <string>     // names
#include <vector>     // storage

#include <tutti/compress/float8.hpp>
#include <tutti/compress/natural.hpp>
#include <tutti/compress/quantize.hpp>
#include <tutti/compress/sign.hpp>
#include <tutti/compress/ternary.hpp>
#include <tutti/core/philox.hpp>  // inputs
#include <tutti/core/queue.hpp>   // host_queue

namespace tutti::test {

/// Calls f(name, scheme, level) for every scheme and width, with buckets of about that many elements.
template <class F> void for_bucketed(F f, std::size_t bucket = 512) {
    using namespace compress;
    for (const rounding mode : {rounding::stochastic, rounding::nearest}) {
        const std::string end = mode == rounding::stochastic ? ", stochastic" : ", nearest";
        for (int bits = 1; bits <= 8; ++bits) {
            const std::string width = std::to_string(bits) + end;
            f("quantize " + width, quantize(bucket, mode), bits);
            if (bits > 1) { f("qsgd max " + width, qsgd<norm::max>(bucket, mode), bits); }
            if (bits > 1) { f("qsgd l2 " + width, qsgd<norm::l2>(bucket, mode), bits); }
        }
        f("ternary" + end, ternary(bucket, mode), 2);
        f("natural" + end, natural(bucket, mode), 8);
        f("float8 e4m3" + end, float8<float8_format::e4m3>(bucket, mode), 8);
        f("float8 e5m2" + end, float8<float8_format::e5m2>(bucket, mode), 0);
    }
    f(std::string("sign"), sign(bucket), 1);
}

template <class T> std::vector<T> normals(std::size_t n, std::uint32_t stream, double deviation = 1) {
    std::vector<T> v(n);
    for (std::size_t i = 0; i < n; ++i) {
        v[i] = static_cast<T>(deviation * static_cast<double>(random_stream{.seed = 9, .stream = stream}.normal(i)));
    }
    return v;
}

/// One tensor as one segment.
inline compress::segment whole(std::size_t n, int level, std::uint32_t tensor = 3) {
    return {.tensor = tensor, .level = level, .rows = n};
}

struct encoded {
    std::vector<std::byte> wire;
    std::vector<float> residual;
};
/// The wire, whose bytes are poisoned before.
template <class X, class T>
encoded encode(const X& x, compress::layout all, const std::vector<T>& in, std::vector<float> residual = {},
               compress::draw_key key = {1, 2, 3}) {
    encoded e{std::vector<std::byte>(compress::detail::wire_bytes(x, all), std::byte{0xa5}), std::move(residual)};
    x.encode(host_queue{}, all, view<const T>(in), view<float>(e.residual), view<std::byte>(e.wire), key);
    return e;
}
template <class T = float, class X>
std::vector<T> decode(const X& x, compress::layout all, const std::vector<std::byte>& wire, std::size_t n,
                      float factor = 1) {
    std::vector<T> out(n, T(-77.0f));
    x.decode(host_queue{}, all, view<const std::byte>(wire), view<T>(out), factor);
    return out;
}
template <class X, class T>
std::vector<float> round_trip(const X& x, int level, const std::vector<T>& in, compress::draw_key key = {1, 2, 3}) {
    const compress::segment s = whole(in.size(), level);
    const compress::layout all(&s, 1);
    return decode(x, all, encode(x, all, in, {}, key).wire, in.size());
}

}  // namespace tutti::test
