// The device side of zeroth/perturbation: many slices in one launch, the host's bits.
// Needs core/cuda_run and nvcc.
#pragma once

#include <algorithm>    // copy, max, min
#include <cstddef>      // size_t
#include <cstdint>      // positions
#include <span>         // slices, updates
#include <string_view>  // names

#include <tutti/core/cuda_run.cuh>         // start, packs, copies
#include <tutti/zeroth/detail/groups.cuh>  // loads, stores, rounding
#include <tutti/zeroth/perturbation.hpp>   // operations

namespace tutti::zeroth {

namespace detail {

// As kernels see slices: a table among the parameters, and which blocks work on which row. With the directions below
// 4 KiB, which every driver takes.
inline constexpr unsigned rows_of_launch = 32;
struct slice_row {
    std::uint64_t first;
    std::uint64_t offset;
    std::uint64_t count;
    std::uint32_t tensor;
    bool decayed;
    bool packed;  // where the position in the tensor is a multiple of a pack's width, addresses are of its bytes
};
struct slice_table {
    slice_row rows[rows_of_launch];
    unsigned first_block[rows_of_launch + 1];
    unsigned count;
};

/// What is done to the elements of slices.
enum class work { perturb, update, update_and_perturb, sum };

/// `capacity`: of directions.
template <class T, unsigned capacity> struct slice_work {
    const T* in;
    T* weights;
    T* out;
    random_stream z;  // of tensor 0; of the perturbed copy
    master_t<T> scale;
    unsigned directions;
    prepared_update<master_t<T>> of[capacity];
    slice_table table;
};

// Neighbors of a thread: a group. 16 bytes, but not less than the four normals that a block of the generator gives.
template <class T> inline constexpr unsigned group_width = std::max<unsigned>(4, 16 / sizeof(T));
// Groups of a thread. Their loads are under way together, and so are their draws.
template <class T> inline constexpr unsigned groups_per_thread = 16 / group_width<T>;
inline constexpr unsigned slice_threads = 256;

template <distribution kind, unsigned width>
__device__ inline void draw_group(float (&z)[width], const random_stream& s, std::uint64_t group) {
    if constexpr (kind == distribution::rademacher) {  // all of a word of the generator
        const std::uint32_t bits = sign_bits(s, group * width);
#pragma unroll
        for (unsigned lane = 0; lane < width; ++lane) { z[lane] = sign_of(bits, lane); }
    } else {
#pragma unroll
        for (unsigned part = 0; part < width / 4; ++part) {
            const auto four = four_of<kind>(s, group * (width / 4) + part);
#pragma unroll
            for (unsigned lane = 0; lane < 4; ++lane) { z[4 * part + lane] = four[lane]; }
        }
    }
}

// Groups first, first + slice_threads, ... of a slice. `whole`: all their elements are in it, and packs where memory
// has them.
template <bool whole, unsigned groups, class T, distribution kind, work what, unsigned capacity>
__device__ inline void do_groups(const slice_work<T, capacity>& all, const slice_row& row, std::uint64_t first) {
    using real = master_t<T>;
    using rules = arithmetic<real>;
    constexpr unsigned width = group_width<T>;
    const auto each = [&](auto body) {
#pragma unroll
        for (unsigned k = 0; k < groups; ++k) {
#pragma unroll
            for (unsigned lane = 0; lane < width; ++lane) { body(k, lane); }
        }
    };
    const auto at = [&](unsigned k) {  // place of a group in the views; wraps before the slice's first element
        return row.offset + ((first + k * slice_threads) * width - row.first);
    };
    const auto store = [&](T* to, const real(&values)[groups][width]) {
#pragma unroll
        for (unsigned k = 0; k < groups; ++k) {
            if constexpr (whole) {
                store_group(to + at(k), values[k]);
            } else {
#pragma unroll
                for (unsigned lane = 0; lane < width; ++lane) {
                    const std::uint64_t i = at(k) + lane - row.offset;
                    if (i < row.count) { to[row.offset + i] = static_cast<T>(values[k][lane]); }
                }
            }
        }
    };
    real w[groups][width];
    if constexpr (what != work::sum) {
#pragma unroll
        for (unsigned k = 0; k < groups; ++k) {
            if constexpr (whole) {
                load_group(w[k], all.in + at(k));
            } else {
#pragma unroll
                for (unsigned lane = 0; lane < width; ++lane) {
                    const std::uint64_t i = at(k) + lane - row.offset;
                    w[k][lane] = i < row.count ? static_cast<real>(all.in[row.offset + i]) : real(0);
                }
            }
        }
    }
    if constexpr (what != work::perturb) {
        real d[groups][width] = {};
        for (unsigned u = 0; u < all.directions; ++u) {
            const auto& now = all.of[u];
            if (what != work::sum && now.begins) {
                if (u != 0) {
#pragma unroll
                    for (unsigned k = 0; k < groups; ++k) { move_group<T>(w[k], d[k]); }
                }
                const real decay = row.decayed ? now.decay : real(0);
                each([&](unsigned k, unsigned lane) { d[k][lane] = rules::begun(w[k][lane], decay); });
            }
#pragma unroll
            for (unsigned k = 0; k < groups; ++k) {
                float z[width];
                draw_group<kind>(z, now.of(row.tensor), first + k * slice_threads);
#pragma unroll
                for (unsigned lane = 0; lane < width; ++lane) {
                    d[k][lane] = rules::extended(d[k][lane], now.factor, z[lane]);
                }
            }
        }
        if constexpr (what == work::sum) {
            store(all.out, d);
        } else {
#pragma unroll
            for (unsigned k = 0; k < groups; ++k) { move_group<T>(w[k], d[k]); }
            store(all.weights, w);
        }
    }
    if constexpr (what == work::perturb || what == work::update_and_perturb) {
#pragma unroll
        for (unsigned k = 0; k < groups; ++k) {
            float z[width];
            draw_group<kind>(z, {all.z.seed, row.tensor, all.z.step}, first + k * slice_threads);
#pragma unroll
            for (unsigned lane = 0; lane < width; ++lane) {
                w[k][lane] = rules::perturbed(w[k][lane], all.scale, z[lane]);
            }
        }
        store(all.out, w);
    }
}

template <class T, distribution kind, work what, unsigned capacity>
__global__ void __launch_bounds__(slice_threads) work_on_slices(const slice_work<T, capacity> all) {
    constexpr unsigned width = group_width<T>;
    constexpr unsigned groups = groups_per_thread<T>;
    constexpr unsigned tile = slice_threads * groups;
    unsigned low = 0;
    for (unsigned high = all.table.count; high - low > 1;) {
        const unsigned middle = (low + high) / 2;
        (all.table.first_block[middle] <= blockIdx.x ? low : high) = middle;
    }
    const slice_row& row = all.table.rows[low];
    const std::uint64_t end = row.first + row.count;
    const std::uint64_t begin = row.first / width + std::uint64_t{blockIdx.x - all.table.first_block[low]} * tile;
    if (row.packed && begin * width >= row.first && (begin + tile) * width <= end) {
        do_groups<true, groups, T, kind, what>(all, row, begin + threadIdx.x);
    } else {
#pragma unroll 1
        for (unsigned k = 0; k < tile; k += slice_threads) {
            const std::uint64_t group = begin + k + threadIdx.x;
            if (row.packed && group * width >= row.first && (group + 1) * width <= end) {
                do_groups<true, 1, T, kind, what>(all, row, group);
            } else if (group * width < end) {
                do_groups<false, 1, T, kind, what>(all, row, group);
            }
        }
    }
}

/// Launches for all slices that `wanted` says, 32 at a time.
template <distribution kind, work what, class T, unsigned capacity, class Wanted>
void launch_slices(const cuda_queue& q, std::string_view name, slice_work<T, capacity>& all,
                   std::span<const tensor_slice> slices, Wanted wanted) {
    constexpr unsigned width = group_width<T>;
    constexpr std::size_t tile = std::size_t{slice_threads} * groups_per_thread<T>;
    static_assert(sizeof(all) <= 4096);
    slice_table& table = all.table;
    table.count = 0;
    table.first_block[0] = 0;
    const auto flush = [&] {
        const std::size_t blocks = table.first_block[table.count];
        tutti::detail::start(q, name, work_on_slices<T, kind, what, capacity>, blocks * slice_threads, slice_threads,
                             all);
        table.count = 0;
    };
    const auto packed = [&](const T* base, const tensor_slice& s) {
        const auto address = reinterpret_cast<std::uintptr_t>(base) + (s.offset - s.first % width) * sizeof(T);
        return base == nullptr || address % 16 == 0;
    };
    for (const tensor_slice& s : slices) {
        if (s.count == 0 || !wanted(s)) { continue; }
        const std::size_t groups = (s.first + s.count - 1) / width - s.first / width + 1;
        const std::size_t blocks = (groups - 1) / tile + 1;
        if (table.count == rows_of_launch || table.first_block[table.count] + blocks > 0x7fffffff) { flush(); }
        table.rows[table.count] = {s.first,   s.offset,
                                   s.count,   s.tensor,
                                   s.decayed, packed(all.in, s) && packed(all.weights, s) && packed(all.out, s)};
        table.first_block[table.count + 1] =
            table.first_block[table.count] + static_cast<unsigned>(std::min<std::size_t>(blocks, 0x7fffffff));
        ++table.count;
    }
    flush();
}

inline bool is_moving(const tensor_slice& s) noexcept { return !s.frozen; }

template <work what, class T, unsigned capacity, class Wanted>
void launch_slices(const cuda_queue& q, std::string_view name, distribution kind, slice_work<T, capacity>& all,
                   std::span<const tensor_slice> slices, Wanted wanted) {
    if (kind == distribution::normal) {
        launch_slices<distribution::normal, what>(q, name, all, slices, wanted);
    } else {
        launch_slices<distribution::rademacher, what>(q, name, all, slices, wanted);
    }
}

template <class T>
void copy_frozen(const cuda_queue& q, view<const T, device_memory> in, view<T, device_memory> out,
                 std::span<const tensor_slice> slices) {
    if (in.data() == out.data()) { return; }
    for (const tensor_slice& s : slices) {
        if (s.frozen) { copy(q, in.sub(s.offset, s.count), out.sub(s.offset, s.count)); }
    }
}

}  // namespace detail

/// Determinism  the host's bits. Cost: a launch for 32 slices, and a copy for each frozen one. Normals are bound by
///              arithmetic, about 50 instructions an element, as much as fast cards need for 8 bytes. Packs of 16 bytes
///              where `offset - first` is a multiple of them; elsewhere single elements.
template <floating_element T> void launch(const cuda_queue& q, const perturb_operation<T, device_memory>& op) {
    detail::slice_work<T, 1> all{op.in.data(), nullptr, op.out.data(), op.z.stream(0), op.scale, 0, {}, {}};
    detail::launch_slices<detail::work::perturb>(q, op.name, op.z.kind, all, op.slices, detail::is_moving);
    detail::copy_frozen<T>(q, op.in, op.out, op.slices);
}

/// Cost  as perturb; a launch more for each 64 directions or less that the list has beyond the first 64.
template <floating_element T> void launch(const cuda_queue& q, const update_operation<T, device_memory>& op) {
    const auto prepared = detail::prepared<master_t<T>>(op.updates);
    detail::slice_work<T, max_directions> all{
        op.weights.data(), op.weights.data(), nullptr, op.z.stream(0), op.scale, 0, {}, {}};
    for (std::size_t done = 0; done < prepared.size();) {
        std::size_t end = std::min(prepared.size(), done + max_directions);
        while (end < prepared.size() && !prepared[end].begins) { --end; }  // steps stay whole
        all.directions = static_cast<unsigned>(end - done);
        std::copy(prepared.begin() + static_cast<std::ptrdiff_t>(done),
                  prepared.begin() + static_cast<std::ptrdiff_t>(end), all.of);
        done = end;
        if (done == prepared.size() && !op.out.empty()) {
            all.out = op.out.data();
            detail::launch_slices<detail::work::update_and_perturb>(q, op.name, op.z.kind, all, op.slices,
                                                                    detail::is_moving);
        } else {
            detail::launch_slices<detail::work::update>(q, op.name, op.z.kind, all, op.slices, detail::is_moving);
        }
    }
    if (!op.out.empty()) { detail::copy_frozen<T>(q, op.weights, op.out, op.slices); }
}

/// Errors  usage_error for more than max_directions.
template <floating_element T> void launch(const cuda_queue& q, const sum_directions_operation<T, device_memory>& op) {
    using real = master_t<T>;
    if (op.updates.size() > max_directions) {
        throw usage_error(formatted("{}: {} directions are more than {}", op.name, op.updates.size(), max_directions));
    }
    const auto prepared = detail::prepared<real>(op.updates);
    detail::slice_work<T, max_directions> all{
        nullptr, nullptr, op.out.data(), {}, real(0), static_cast<unsigned>(op.updates.size()), {}, {}};
    for (std::size_t u = 0; u < prepared.size(); ++u) {
        all.of[u] = prepared[u];
        all.of[u].factor = static_cast<real>(op.updates[u].gradient);
    }
    detail::launch_slices<detail::work::sum>(q, op.name, detail::kind_of(op.updates), all, op.slices,
                                             detail::is_moving);
    for (const tensor_slice& s : op.slices) {
        if (s.frozen) { fill(q, op.out.sub(s.offset, s.count), T(0.0f)); }
    }
}

}  // namespace tutti::zeroth
