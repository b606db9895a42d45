// Sequences of very different lengths on two nodes of eight GPUs: where they go, and how long attention then takes.
#include <cstdint>
#include <vector>

#include <fmt/core.h>

#include <tutti/sequence/sequence.hpp>

int main() {
    namespace sequence = tutti::sequence;
    using sequence::partition::zeppelin_options;
    const std::vector<std::int64_t> lengths{64000, 24000, 24000, 12000, 12000, 9000, 5200, 3100, 2500, 1800};
    const sequence::cluster machines{.nodes = 2, .ranks_per_node = 8};
    const double bytes = sequence::kv_bytes_per_token(8, 128, 2);              // 8 heads of 128, 2 bytes a number
    const sequence::transfer_cost links{bytes, {5e-6, 300e9}, {10e-6, 25e9}};  // NVLink; a NIC between nodes

    const sequence::partition::zeppelin zeppelin(zeppelin_options::hiding(sequence::h100_forward, links));
    const sequence::placement placed = zeppelin(lengths, machines, 12000);  // tokens that a rank can hold
    const sequence::placement even = sequence::partition::even_ring{}(lengths, machines);
    fmt::print("{}", text_of(placed));
    fmt::print("attention {:.2f} ms, on even rings {:.2f} ms\n",
               1e3 * estimated(placed, sequence::h100_forward, links).attention,
               1e3 * estimated(even, sequence::h100_forward, links).attention);
}
