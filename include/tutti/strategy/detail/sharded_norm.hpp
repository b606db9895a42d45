// sharded_norm: the global gradient norm where every rank holds the shards of a shard_plan.
// Needs optimize/clip and strategy/detail/shard_plan. Same blocks, same order, same bits as optimize::global_norm.
#pragma once

#include <algorithm>  // min, lower_bound, sort
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
///              norm_block a bucket. One fetch. Construction: buckets times ranks.
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
        const std::size_t elements = plan.buckets().elements;
        const auto end_of = [&](std::size_t k) { return std::min((k + 1) * grain, elements); };
        ends_of_buckets ends(plan);
        std::size_t shared = 0;
        for (std::size_t k = 0; k < ends.blocks.size(); ++k) {
            if (ends.owner[k] != ends_of_buckets::several) { continue; }
            const std::size_t block = ends.blocks[k];
            const std::size_t count = end_of(block) - block * grain;
            ends.shared_place[k] = shared;
            extend(shared_, block, 1, count, shared);
            shared += count;
        }
        together_ = buffer<T, Q>(q, shared);
        for (std::size_t b = plan.size(); b-- > 0;) {
            const owned_piece& own = plan.own(b);
            const std::size_t end = own.first + own.count;
            for (std::size_t at = own.first; at < end;) {
                const std::size_t block = at / grain;
                const std::size_t place = own.place + (at - own.first);
                const std::size_t k = ends.find(block);
                if (k < ends.blocks.size() && ends.owner[k] == ends_of_buckets::several) {
                    const std::size_t next = std::min(end_of(block), end);
                    pieces_.push_back({place, next - at, ends.shared_place[k] + (at - block * grain)});
                    at = next;
                    continue;
                }
                // All blocks up to the last of the piece, which ends a bucket or is the rank's own.
                const std::size_t last = (end - 1) / grain;
                const std::size_t next = last > block ? last * grain : end;
                if (at == block * grain) {  // else the block is in its run already, with the bucket before
                    const std::size_t count = last > block ? last - block : 1;
                    extend(own_, block, count, end_of(block + count - 1) - at, place);
                    at = next;
                } else {
                    at = std::min(end_of(block), end);
                }
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
    // The blocks in which buckets begin and end, ascending, and who owns elements of them. All others lie inside a part
    // of a bucket, or are cut off from the next part at their own end.
    struct ends_of_buckets {
        static constexpr int nobody = -1;
        static constexpr int several = -2;
        std::vector<std::size_t> blocks, shared_place;
        std::vector<int> owner;

        explicit ends_of_buckets(const shard_plan& plan) {
            constexpr std::size_t grain = optimize::norm_block;
            for (std::size_t b = plan.size(); b-- > 0;) {
                if (plan.bucket(b).size == 0) { continue; }
                blocks.push_back(plan.bucket(b).offset / grain);
                blocks.push_back((plan.bucket(b).offset + plan.bucket(b).size - 1) / grain);
            }
            std::sort(blocks.begin(), blocks.end());
            blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
            shared_place.resize(blocks.size());
            owner.resize(blocks.size(), nobody);
            for (std::size_t b = 0; b < plan.size(); ++b) {
                std::size_t first = plan.bucket(b).offset;
                for (std::size_t r = 0; r < plan.ranks(); ++r) {
                    const std::size_t end = first + plan.counts(b)[r];
                    if (first != end) {
                        add(first / grain, static_cast<int>(r));
                        add((end - 1) / grain, static_cast<int>(r));
                    }
                    first = end;
                }
            }
        }
        /// Its place; blocks.size() for a block inside a bucket.
        [[nodiscard]] std::size_t find(std::size_t block) const {
            const auto at = std::lower_bound(blocks.begin(), blocks.end(), block);
            return at != blocks.end() && *at == block ? static_cast<std::size_t>(at - blocks.begin()) : blocks.size();
        }

    private:
        void add(std::size_t block, int rank) {
            const std::size_t k = find(block);
            if (k == blocks.size()) { return; }
            owner[k] = owner[k] == nobody || owner[k] == rank ? rank : several;
        }
    };

    static void extend(std::vector<run_of_blocks>& runs, std::size_t block, std::size_t count, std::size_t elements,
                       std::size_t place) {
        if (!runs.empty() && runs.back().block + runs.back().count == block) {
            runs.back().count += count;
            runs.back().elements += elements;
        } else {
            runs.push_back({block, count, place, elements});
        }
    }
};

}  // namespace tutti::strategy::detail
