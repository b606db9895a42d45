// What weights are where the device updates float masters every few steps: in between, what travels takes the updates.
// Needs trial.hpp.
#pragma once

#include <algorithm>  // copy_n
#include <cstddef>    // size_t, byte
#include <cstring>    // memcmp
#include <vector>     // weights

#include <tutti/zeroth/float8_wire.hpp>    // eight bits
#include <tutti/zeroth/renewed_store.hpp>  // masters

#include "trial.hpp"  // runs of the toy

namespace tutti::test {

// As the device sees the weights of a tensor.
template <class T> std::vector<T> in_16_bits(const std::vector<float>& v) {
    std::vector<T> r;
    for (const float x : v) { r.push_back(static_cast<T>(x)); }
    return r;
}
inline std::vector<float> in_8_bits(std::vector<float> v) {
    const std::size_t count = v.size();
    v.resize((count + 63) / 64 * 64);
    const zeroth::float8_wire<> wire;
    std::vector<std::byte> bytes(wire.bytes(v.size()));
    wire.encode(host_queue(), view<const float>(v), view<std::byte>(bytes));
    wire.decode(host_queue(), view<const std::byte>(bytes), view<float>(v));
    v.resize(count);
    return v;
}

// `convert`: masters as they travel; `round`: for modules that stay. The model runs on a queue, all else here.
template <class T, class Convert, class Round> struct renewed_reference {
    trial t;
    Convert convert;
    Round round;
    chain_reference<float> masters;
    chain_reference<T> seen;
    std::vector<double> losses;

    renewed_reference(const trial& of, Convert c, Round r)
        : t(of), convert(c), round(r), masters({of.blocks}), seen(masters, r) {}

    template <queue Q> void run(const Q& q, std::size_t every, std::size_t residents, bool replay = true) {
        const zeroth::model_layout layout(chain_shape{t.blocks}.shape(), sizeof(T));
        const auto stays = [&](std::size_t m) { return m <= residents || m == layout.tail(); };
        const auto renew = [&](std::size_t m) {
            for (const zeroth::tensor_slice& s : layout.slices(m)) {
                const auto& now = masters.values(s.tensor);
                seen.set(s.tensor, stays(m) ? round(now) : convert(now));
            }
        };
        std::vector<std::size_t> done(layout.modules(), 0);
        std::size_t updates = 0;
        const auto renew_due = [&](bool of_those_that_stay) {
            for (std::size_t m = 0; m < layout.modules(); ++m) {
                const std::size_t behind = updates - done[m];
                const bool due = behind != 0 && (behind >= every || (updates + m) % every == 0);
                if (!due || stays(m) != of_those_that_stay) { continue; }
                renew(m);
                done[m] = updates;
            }
        };
        for (std::size_t m = 0; m < layout.modules(); ++m) { renew(m); }
        for (std::size_t step = 0; step < t.steps; ++step) {
            renew_due(true);
            std::vector<zeroth::loss_value> found;
            for (const zeroth::probe& p : t.probes(step)) {
                found.push_back({seen.loss(q, p, step), 1});
                losses.push_back(found.back().mean);
            }
            renew_due(false);  // what has come is as it was
            const auto change = t.updates(step, found);
            const chain_reference<T> before = seen;
            masters.update(change);
            seen.update(change);
            updates += change.empty() ? 0u : 1u;
            for (std::size_t m = 0; m < layout.modules() && !replay; ++m) {
                if (stays(m)) { continue; }
                for (const zeroth::tensor_slice& s : layout.slices(m)) { seen.set(s.tensor, before.values(s.tensor)); }
            }
        }
    }
};

// Calls body(elements that the store has, those of `all`) for each tensor.
template <class Store, class Body> void for_each_master(Store& store, const chain_reference<float>& all, Body body) {
    const zeroth::model_layout& layout = store.layout();
    for (std::size_t m = 0; m < layout.modules(); ++m) {
        const auto here = store.master(m);
        for (const zeroth::tensor_slice& s : zeroth::slices_within(layout.slices(m), store.own(m))) {
            body(here.data() + s.offset, all.values(s.tensor).data() + s.first, s.count);
        }
    }
}
template <class Store> void fill_masters(Store& store, const chain_reference<float>& from) {
    for_each_master(store, from, [](float* to, const float* value, std::size_t n) { std::copy_n(value, n, to); });
}
template <class Store> bool holds_masters(Store& store, const chain_reference<float>& expected) {
    bool same = true;
    for_each_master(store, expected, [&](const float* found, const float* right, std::size_t n) {
        same = same && std::memcmp(found, right, n * sizeof(float)) == 0;
    });
    return same;
}

}  // namespace tutti::test
