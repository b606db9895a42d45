// sharded_norm: the global gradient norm where every rank holds the shards of a shard_plan.
// Needs optimize/clip and strategy/detail/shard_plan. Same blocks, same order, same bits as optimize::global_norm.
#pragma once

#include <algorithm>  // min, max
#include <cmath>      // sqrt
#include <cstddef>    // size_t
#include <vector>     // runs of blocks

#include <tutti/comm/communicator.hpp>           // can_all_reduce
#include <tutti/core/buffer.hpp>                 // storage
#include <tutti/core/elementwise.hpp>            // fill, copy
#include <tutti/core/reduce_op.hpp>              // sum
#include <tutti/optimize/clip.hpp>               // sums of squares
#include <tutti/strategy/detail/shard_plan.hpp>  // shard_plan

namespace tutti::strategy::detail {

/// Semantics    blocks that one rank owns are summed there. Blocks that ranks share, at the ends of buckets, are put
///              together on every rank first: all_reduce over copies that are zero where a rank owns nothing.
/// Determinism  depends on the elements alone: neither on ranks, buckets nor timing (x + 0 is exact).
/// Cost         one read of the shard; all_reduce of 8 bytes a block, and of shared_elements() gradients: at most
///              norm_block a bucket. One fetch.
template <communicator C, floating_element T>
requires comm::can_all_reduce<C, double, sum> && comm::can_all_reduce<C, T, sum>
class sharded_norm {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    // Blocks [block, block + count), from element `place` of the rank's shard or of the shared elements on.
    struct run_of_blocks {
        std::size_t block, count, place, elements;
    };
    struct copied_piece {
        std::size_t place, count, shared;
    };
    std::vector<run_of_blocks> own_;
    std::vector<run_of_blocks> shared_;
    std::vector<copied_piece> pieces_;
    std::size_t blocks_;
    buffer<double, Q> scratch_;
    buffer<T, Q> together_;

public:
    sharded_norm(Q q, const shard_plan& plan)
        : blocks_(optimize::norm_blocks(plan.buckets().elements)), scratch_(q, blocks_ + 1), together_(q, 0) {
        constexpr std::size_t grain = optimize::norm_block;
        constexpr int nobody = -1;
        constexpr int several = -2;
        const std::size_t elements = plan.buckets().elements;
        std::vector<int> owner(blocks_, nobody);
        for (std::size_t b = 0; b < plan.size(); ++b) {
            std::size_t first = plan.bucket(b).offset;
            for (std::size_t r = 0; r < plan.ranks(); ++r) {
                const std::size_t end = first + plan.counts(b)[r];
                for (std::size_t k = first / grain; k * grain < end && first != end; ++k) {
                    int& now = owner[k];
                    now = now == nobody || now == static_cast<int>(r) ? static_cast<int>(r) : several;
                }
                first = end;
            }
        }
        const auto end_of = [&](std::size_t k) { return std::min((k + 1) * grain, elements); };
        std::vector<std::size_t> shared_place(blocks_);
        std::size_t shared = 0;
        for (std::size_t k = 0; k < blocks_; ++k) {
            if (owner[k] != several) { continue; }
            shared_place[k] = shared;
            extend(shared_, k, end_of(k) - k * grain, shared);
            shared += end_of(k) - k * grain;
        }
        together_ = buffer<T, Q>(q, shared);
        for (std::size_t b = plan.size(); b-- > 0;) {
            const owned_piece& own = plan.own(b);
            const std::size_t end = own.first + own.count;
            for (std::size_t at = own.first; at < end;) {
                const std::size_t k = at / grain;
                const std::size_t next = std::min(end_of(k), end);
                const std::size_t place = own.place + (at - own.first);
                if (owner[k] == several) {
                    pieces_.push_back({place, next - at, shared_place[k] + (at - k * grain)});
                } else if (at == k * grain) {  // else the block is in its run already, with the bucket before
                    extend(own_, k, end_of(k) - at, place);
                }
                at = next;
            }
        }
    }

    /// Elements of blocks that ranks share.
    [[nodiscard]] std::size_t shared_elements() const noexcept { return together_.size(); }

    /// Collective. `shard` is what this rank owns of the gradient.
    [[nodiscard]] double operator()(C& comm, view<const T, M> shard) const {
        const Q q = comm.queue();
        const view<double, M> sums = scratch_.view().sub(0, blocks_);
        fill(q, sums, 0.0);
        for (const run_of_blocks& r : own_) {
            run(q, optimize::square_sums_operation<T, M>{shard.sub(r.place, r.elements), sums.sub(r.block, r.count)});
        }
        comm.all_reduce(sums, sums, sum{});
        const view<T, M> together = together_.view();
        if (!together.empty()) {
            fill(q, together, T{});
            for (const copied_piece& p : pieces_) {
                copy(q, shard.sub(p.place, p.count), together.sub(p.shared, p.count));
            }
            comm.all_reduce(together, together, sum{});
            for (const run_of_blocks& r : shared_) {
                const view<const T, M> in = together.sub(r.place, r.elements);
                run(q, optimize::square_sums_operation<T, M>{in, sums.sub(r.block, r.count)});
            }
        }
        const view<double, M> total = scratch_.view().sub(blocks_, 1);
        run(q, optimize::ordered_sum_operation<M>{sums, total});
        return std::sqrt(fetch(q, total, 0.0));
    }

private:
    static void extend(std::vector<run_of_blocks>& runs, std::size_t block, std::size_t elements, std::size_t place) {
        if (!runs.empty() && runs.back().block + runs.back().count == block) {
            runs.back().count += 1;
            runs.back().elements += elements;
        } else {
            runs.push_back({block, 1, place, elements});
        }
    }
};

}  // namespace tutti::strategy::detail
