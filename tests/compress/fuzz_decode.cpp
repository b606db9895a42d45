// Decodes bytes that nobody encoded: nothing outside of the views is read or written, whatever they are.
// For libFuzzer (clang++ -fsanitize=fuzzer,address,undefined), and linked with a driver that draws the bytes.
#include <tutti/compress/float8.hpp>     // under test
#include <tutti/compress/natural.hpp>    // under test
#include <tutti/compress/quantize.hpp>   // under test
#include <tutti/compress/sign.hpp>       // under test
#include <tutti/compress/ternary.hpp>    // under test
#include <tutti/compress/threshold.hpp>  // under test
#include <tutti/compress/top_k.hpp>      // under test

#include <cstddef>  // size_t
#include <cstdint>  // bytes
#include <cstdlib>  // abort
#include <cstring>  // memcpy
#include <memory>   // arrays of exactly the size
#include <new>      // aligned storage

#include <tutti/core/queue.hpp>  // host_queue

using namespace tutti;
using namespace tutti::compress;

namespace {

// Exactly as many bytes as asked for, so that a sanitizer sees one too many.
struct exact_bytes {
    std::byte* data;
    explicit exact_bytes(std::size_t n)
        : data(static_cast<std::byte*>(::operator new (n, std::align_val_t{wire_alignment}))) {}
    exact_bytes(const exact_bytes&) = delete;
    exact_bytes& operator=(const exact_bytes&) = delete;
    ~exact_bytes() { ::operator delete (data, std::align_val_t{wire_alignment}); }
};

template <class X> void decode_all(const X& x, int level, std::size_t n, const std::uint8_t* data, std::size_t size) {
    const segment parts[] = {{.tensor = 1, .level = level, .offset = 2, .rows = n},
                             {.tensor = 2, .level = level, .offset = n + 2, .rows = n / 3}};
    const std::size_t count = 1 + size % 3;
    const std::size_t bytes = compress::detail::wire_bytes(x, parts);
    const exact_bytes wires(count * bytes);
    for (std::size_t i = 0; i < count * bytes; ++i) {
        wires.data[i] = static_cast<std::byte>(size == 0 ? 0xff : data[i % size]);
    }
    const std::size_t elements = n + 2 + n / 3;
    const auto out = std::make_unique<float[]>(elements);
    const auto halves = std::make_unique<bfloat16[]>(elements);
    out[0] = out[1] = 7;
    const host_queue q;
    const view<const std::byte> all(wires.data, count * bytes);
    x.decode(q, parts, all.sub(0, bytes), view<float>(out.get(), elements), 2.0f);
    x.decode(q, parts, all.sub(0, bytes), view<bfloat16>(halves.get(), elements), 1.0f);
    x.decode_add(q, parts, all, count, view<float>(out.get(), elements));
    if (out[0] != 7 || out[1] != 7) { std::abort(); }
}

}  // namespace

// The first bytes choose scheme, width and size, the rest is the wire.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 4) { return 0; }
    const std::size_t n = data[0] + std::size_t{256} * (data[1] % 8);
    const int bits = 1 + data[2] % 8;
    const std::size_t bucket = 8 * (1 + std::size_t{data[3]} % 128);
    const int density = 1 + data[3] * 39;  // in 10,000
    const unsigned scheme = data[2] / 8 % 10;
    data += 4;
    size -= 4;
    switch (scheme) {
    case 0: decode_all(quantize(bucket), bits, n, data, size); break;
    case 1: decode_all(qsgd<norm::max>(bucket), bits < 2 ? 2 : bits, n, data, size); break;
    case 2: decode_all(qsgd<norm::l2>(bucket), bits < 2 ? 2 : bits, n, data, size); break;
    case 3: decode_all(sign(bucket), 1, n, data, size); break;
    case 4: decode_all(ternary(bucket), 2, n, data, size); break;
    case 5: decode_all(natural(bucket), 8, n, data, size); break;
    case 6: decode_all(float8<float8_format::e4m3>(bucket), 8, n, data, size); break;
    case 7: decode_all(float8<float8_format::e5m2>(bucket), 8, n, data, size); break;
    case 8: decode_all(top_k(), density, n, data, size); break;
    default: decode_all(threshold(), density, n, data, size); break;
    }
    return 0;
}
