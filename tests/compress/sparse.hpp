// What the tests of the sparsifiers share: gradients of several distributions, encode and decode over a layout, and the
// selection by sorting that judges them.
// Needs tutti/compress; standard library.
#pragma once

#include <algorithm>    // sort
#include <cmath>        // log
#include <cstddef>      // size_t
#include <cstdint>      // bits
#include <cstring>      // memcmp
#include <numeric>      // iota
#include <string_view>  // distributions
#include <vector>       // storage

#include <tutti/compress/compressor.hpp>  // segment, draw_key
#include <tutti/core/element.hpp>         // element types
#include <tutti/core/philox.hpp>          // random_stream
#include <tutti/core/view.hpp>            // view

namespace tutti::test {

inline constexpr std::string_view distributions[] = {"gaussian", "laplace", "t(2)", "1% dense", "constant",
                                                     "few",      "zeros",   "ramp", "tiny"};

/// Element i of a gradient.
inline float drawn(std::string_view distribution, std::size_t i, std::uint32_t stream = 1) {
    const random_stream s{.seed = 77, .stream = stream};
    const float z = s.normal(2 * i);
    const float u = s.uniform(2 * i + 1);
    const float sign = z < 0 ? -1.0f : 1.0f;
    if (distribution == "gaussian") { return z; }
    if (distribution == "laplace") { return sign * -std::log(u); }
    if (distribution == "t(2)") { return z / std::sqrt(-std::log(u)); }
    if (distribution == "1% dense") { return u < 0.01f ? z : 0; }
    if (distribution == "constant") { return sign * 0.25f; }
    if (distribution == "few") { return sign * static_cast<float>(1 + s.word(2 * i + 1) % 3); }  // ties everywhere
    if (distribution == "ramp") { return static_cast<float>(i) * 1e-3f; }
    if (distribution == "tiny") { return z * 1e-40f; }  // subnormal
    return 0;                                           // "zeros"
}
template <class T> std::vector<T> gradient(std::string_view distribution, std::size_t n, std::uint32_t stream = 1) {
    std::vector<T> v(n);
    for (std::size_t i = 0; i < n; ++i) { v[i] = static_cast<T>(drawn(distribution, i, stream)); }
    return v;
}

template <class T> bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Segments one behind the other.
struct tensor {
    std::size_t size;
    int level;
};
inline std::vector<compress::segment> laid_out(const std::vector<tensor>& tensors) {
    std::vector<compress::segment> all;
    std::size_t at = 0;
    for (const tensor& t : tensors) {
        all.push_back({static_cast<std::uint32_t>(all.size()), t.level, at, 0, t.size, 1});
        at += t.size;
    }
    return all;
}

/// What a compressor makes of x. Storage is dirty before.
template <class X, class T>
std::vector<std::byte> encoded(const X& x, const std::vector<compress::segment>& all, const std::vector<T>& in,
                               std::vector<float>& residual, compress::draw_key key = {1, 2, 3}) {
    std::vector<std::byte> wire(compress::detail::wire_bytes(x, all), std::byte{0xaa});
    x.encode(host_queue{}, all, view<const T>(in), view<float>(residual), view<std::byte>(wire), key);
    return wire;
}
template <class T, class X>
std::vector<T> decoded(const X& x, const std::vector<compress::segment>& all, const std::vector<std::byte>& wire,
                       std::size_t n, float factor = 1) {
    std::vector<T> out(n, static_cast<T>(-77.0f));
    x.decode(host_queue{}, all, view<const std::byte>(wire), view<T>(out), factor);
    return out;
}

/// in + residual as floats, one rounding.
template <class T> std::vector<float> sums(const std::vector<T>& in, const std::vector<float>& residual) {
    std::vector<float> x(in.size());
    for (std::size_t i = 0; i < in.size(); ++i) {
        const auto g = static_cast<double>(static_cast<master_t<T>>(in[i]));
        const double exact = residual.empty() ? g : g + static_cast<double>(residual[i]);  // of two floats: exact
        x[i] = static_cast<float>(exact);
    }
    return x;
}

/// The places of the k largest by magnitude, of equal ones the first, ascending: by sorting all. Not finite is largest.
inline std::vector<std::size_t> largest(const float* x, std::size_t n, std::size_t k) {
    std::vector<std::size_t> places(n);
    std::iota(places.begin(), places.end(), std::size_t{0});
    const auto size = [x](std::size_t i) { return std::isfinite(x[i]) ? std::fabs(x[i]) : HUGE_VALF; };
    std::stable_sort(places.begin(), places.end(), [&](std::size_t a, std::size_t b) { return size(a) > size(b); });
    places.resize(k);
    std::sort(places.begin(), places.end());
    return places;
}

}  // namespace tutti::test
