// replicate: fine-tuning steps on one rank or many: every rank moves its own weights by the same few scalars, so that
// replicas stay equal without exchanging weights or gradients.
// Needs zeroth/estimator, zeroth/division and a communicator that can gather.
// Source: MeZO, arXiv 2305.17333, algorithm 1; the ways to divide a step: DistZO2, arXiv 2507.03211. One gather whatever
// the division, sums in the order of shards, weights that are never perturbed in place (replicas that restore them drift
// apart), and the checks are ours.
#pragma once

#include <algorithm>  // copy, max
#include <cmath>      // fabs
#include <cstddef>    // size_t
#include <cstdint>    // steps, hashes
#include <cstring>    // memcpy: bits of a number
#include <exception>  // what ends a step
#include <limits>     // infinity
#include <span>       // records
#include <utility>    // move
#include <vector>     // records, losses

#include <tutti/comm/communicator.hpp>  // communicator
#include <tutti/core/buffer.hpp>        // records on the way
#include <tutti/core/deadline.hpp>      // duration
#include <tutti/core/error.hpp>         // usage_error
#include <tutti/core/queue.hpp>         // staging_queue
#include <tutti/core/run.hpp>           // fetch
#include <tutti/core/state.hpp>         // hash_bytes
#include <tutti/core/text.hpp>          // formatted
#include <tutti/core/view.hpp>          // view
#include <tutti/zeroth/division.hpp>    // division
#include <tutti/zeroth/estimator.hpp>   // estimator
#include <tutti/zeroth/probe.hpp>       // pipeline

namespace tutti::zeroth {

/// What a rank tells about one direction and one shard. 16 bytes, whatever the model.
struct scalar_record {
    double value = 0;              ///< the difference, or with two sides this side's loss
    float loss = 0;                ///< with the weights moved by + epsilon
    std::uint32_t normalizer = 0;  ///< 24 bits, and 8 of a hash of what all ranks must do alike in this step
};
static_assert(sizeof(scalar_record) == 16);

struct step_result {
    std::uint64_t step = 0;
    bool skipped = false;             ///< a loss was not finite, or there was none: no weight moved on any rank
    double loss_plus = 0;             ///< mean over directions
    double loss_other = 0;            ///< of the other side
    std::vector<double> derivatives;  ///< along each direction
    double move = 0;  ///< largest step along a direction, in epsilons: far above 1, it left what was probed
    int kept = -1;    ///< conservative: the sign of the step that was kept, 0 for none; else -1
};

/// Makes steps.
///
/// Semantics    step() is collective: every rank makes its forward passes, all gather the scalars, and each updates its
///              own pipeline alike. Directions follow from the seed and the number of the step, so nobody sends them.
///              The pipeline must outlive this; its weights are current after its flush().
/// Determinism  losses, derivatives and weights have the same bits for every division, number of ranks and order of them,
///              if shards and micro-batches are the same and the forward pass gives the same bits on each rank.
/// Cost         (2 or 1 + 1/directions) forward passes a direction, shard and micro-batch, divided by the ranks; one gather
///              of 16 bytes a rank for each of its directions and shards (the conservative rule: a second one of 32). Every
///              `check_every` steps a hash of the weights on the control plane.
/// Errors       usage_error for options that make no sense; mismatch_error, naming the ranks, when options, weights at the
///              start, learning rates or step numbers differ, at once, or weights, at the next check. Losses that are not
///              finite are no error: the step is skipped on all ranks and counted. On virtual ranks, whose losses are all
///              alike, usage_error for the conservative rule. An error in a step, also one of the pipeline or of a learning
///              rate on one rank, ends all ranks: the family is aborted with its text, and it is rethrown here.
template <communicator C, pipeline P>
requires comm::can_all_gather<C, scalar_record>
class replicated {
    C comm_;
    P* pipeline_;
    estimator how_;
    division how_divided_;
    std::uint64_t step_ = 0;
    std::uint64_t skipped_ = 0;
    std::uint64_t flat_ = 0;
    std::uint64_t scalar_bytes_ = 0;
    duration gathering_{};

public:
    replicated(C own, P& weights, estimator how, division divided = {})
        : comm_(std::move(own)), pipeline_(&weights), how_(how), how_divided_(std::move(divided)) {
        how_.validate();
        how_divided_.validate(comm_.size(), how_.directions);
        if (charging_queue<Q> && how_.rule == update_rule::conservative) {
            throw usage_error(
                "zeroth: what the conservative rule does depends on losses, which virtual ranks do not have");
        }
        const std::string text = how_.describe() + "; " + how_divided_.describe();
        comm_.agree(hash_bytes(as_bytes(view<const char>(text.data(), text.size()))), "zeroth's options");
        compare_weights("weights at the start");
    }

    [[nodiscard]] std::uint64_t next_step() const noexcept { return step_; }
    /// Goes on at a step: the directions are those it would have had.
    void resume(std::uint64_t step) {
        comm_.agree(step, "the step to resume at");
        step_ = step;
    }
    /// Steps skipped because of a loss; steps whose losses did not differ at all (epsilon too small for the type).
    [[nodiscard]] std::uint64_t skipped() const noexcept { return skipped_; }
    [[nodiscard]] std::uint64_t flat() const noexcept { return flat_; }
    /// Payload that this rank has sent in gathers.
    [[nodiscard]] std::uint64_t scalar_bytes() const noexcept { return scalar_bytes_; }
    /// Time that this rank has spent in gathers, waiting for the slowest included.
    [[nodiscard]] duration gathering() const noexcept { return gathering_; }
    [[nodiscard]] C& communicator() noexcept { return comm_; }

    step_result step(double learning_rate) {
        try {
            return take_step(learning_rate);
        } catch (const std::exception& e) {
            comm_.abort(e.what());
            throw;
        } catch (...) {
            comm_.abort("zeroth: a step threw something that is no std::exception");
            throw;
        }
    }

private:
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using records = std::vector<scalar_record>;

    static constexpr unsigned tag_shift = 24;

    step_result take_step(double learning_rate) {
        expect_learning_rate(learning_rate);
        const std::uint64_t inputs = hash_of_inputs(learning_rate);
        step_result result;
        result.step = step_;
        const auto losses = losses_of_step(inputs);
        bool finite = true, flat = true;
        for (const batch_losses& l : losses) {
            finite = finite && l.finite;
            flat = flat && l.difference == 0;
            result.loss_plus += l.loss_plus / static_cast<double>(losses.size());
            result.loss_other += l.loss_other / static_cast<double>(losses.size());
            result.derivatives.push_back(l.difference / how_.distance());
        }
        ++step_;
        if (!finite) {
            result.skipped = true;
            ++skipped_;
            return result;
        }
        flat_ += flat ? 1 : 0;
        auto updates = updates_of(how_, result.step, result.derivatives, learning_rate);
        for (const pending_update& u : updates) {
            result.move = std::max(result.move, learning_rate * std::fabs(u.gradient) / how_.epsilon);
        }
        if (how_.rule == update_rule::conservative) {
            result.kept = best_of(updates.front(), inputs);
            updates.front().gradient *= result.kept;
            if (result.kept == 0) { updates.clear(); }
        }
        pipeline_->update(updates);
        if (how_divided_.check_every != 0 && step_ % how_divided_.check_every == 0) {
            compare_weights(formatted("weights after step {}", result.step));
        }
        return result;
    }

    struct place {
        int side;
        std::size_t part, group;
    };
    [[nodiscard]] place mine() const {
        const int p = how_divided_.place_of(comm_.rank());
        const int unit = p / how_divided_.sides;
        return {p % how_divided_.sides, static_cast<std::size_t>(unit % how_divided_.data),
                static_cast<std::size_t>(unit / how_divided_.data)};
    }
    [[nodiscard]] std::size_t shards_of_rank() const {
        return how_divided_.shards / static_cast<std::size_t>(how_divided_.data);
    }
    [[nodiscard]] std::uint32_t directions_of_rank() const {
        return how_.directions / static_cast<std::uint32_t>(how_divided_.directions);
    }

    [[nodiscard]] std::uint64_t hash_of_inputs(double learning_rate) const {
        std::uint64_t words[] = {step_, how_.seed, 0};
        std::memcpy(&words[2], &learning_rate, sizeof learning_rate);
        return hash_bytes(as_bytes(view<const std::uint64_t>(words)));
    }

    void compare_weights(std::string_view what) {
        if (comm_.size() == 1 || how_divided_.check_every == 0) { return; }
        comm_.agree(pipeline_->hash(), what);
    }

    /// Sums over this rank's shards, one after another, of its probes.
    template <class Use> void for_each_shard(std::span<const probe> probes, Use use) {
        const std::size_t first = mine().part * shards_of_rank();
        std::vector<loss_value> losses(probes.size());
        for (std::size_t s = 0; s < shards_of_rank(); ++s) {
            shard_sums sums(probes.size());
            for (std::size_t m = 0; m < how_divided_.micro_batches; ++m) {
                pipeline_->evaluate(probes, (first + s) * how_divided_.micro_batches + m, losses);
                sums.add(losses);
            }
            use(sums);
        }
    }

    /// The combined losses of every direction of this step.
    [[nodiscard]] std::vector<batch_losses> losses_of_step(std::uint64_t inputs) {
        const place me = mine();
        const std::uint32_t count = directions_of_rank();
        const auto first = static_cast<std::uint32_t>(me.group) * count;
        const bool plus = how_divided_.sides == 1 || me.side == 0;
        const bool other = how_divided_.sides == 1 || me.side == 1;
        const bool one_base = how_.sides == estimate::one_sided;  // the other side is the same for all directions
        std::vector<probe> probes;
        for (std::uint32_t k = 0; k < count; ++k) {
            const direction z = how_.direction_of(step_, first + k);
            if (other && (!one_base || k == 0)) { probes.push_back({z, how_.other_side() * how_.epsilon}); }
            if (plus) { probes.push_back({z, how_.epsilon}); }
        }
        records out;
        for_each_shard(probes, [&](const shard_sums& sums) {
            std::size_t next = 0;
            double base = 0;
            for (std::uint32_t k = 0; k < count; ++k) {
                if (other && (!one_base || k == 0)) { base = sums.mean(next++); }
                const double loss = plus ? sums.mean(next++) : base;
                out.push_back({plus && other ? loss - base : loss, static_cast<float>(loss), sums.normalizer()});
            }
        });
        const records all = gathered(std::move(out), inputs);
        const std::size_t each = shards_of_rank() * count;
        std::vector<batch_losses> losses;
        std::vector<shard_record> shards(how_divided_.shards);
        for (std::size_t k = 0; k < how_.directions; ++k) {
            for (std::size_t s = 0; s < shards.size(); ++s) {
                const auto record = [&](int side) -> const scalar_record& {
                    const std::size_t rank = how_divided_.rank_at(side, s / shards_of_rank(), k / count);
                    return all[rank * each + s % shards_of_rank() * count + k % count];
                };
                const scalar_record& a = record(0);
                shards[s] = {a.value, a.loss, a.normalizer};
                if (how_divided_.sides == 2) {
                    const scalar_record& b = record(1);
                    if (a.normalizer != b.normalizer) {
                        throw usage_error(formatted("zeroth: the sides of shard {} have {} and {} loss terms", s,
                                                    a.normalizer, b.normalizer));
                    }
                    shards[s].difference = a.value - b.value;
                }
            }
            losses.push_back(combined(shards));
        }
        return losses;
    }

    /// 1 for the step as it is, -1 for the opposite, 0 for none: whichever has the least loss.
    [[nodiscard]] int best_of(const pending_update& u, std::uint64_t inputs) {
        const double length = u.learning_rate * u.gradient;
        const probe probes[] = {{u.z, 0}, {u.z, -length}, {u.z, length}};
        if (length == 0) { return 0; }
        records out;
        for_each_shard(probes, [&](const shard_sums& sums) {
            for (std::size_t k = 1; k < 3; ++k) { out.push_back({sums.mean(k) - sums.mean(0), 0, sums.normalizer()}); }
        });
        const records all = gathered(std::move(out), inputs);
        double changes[2];
        for (std::size_t k = 0; k < 2; ++k) {
            std::vector<shard_record> shards;
            for (std::size_t s = 0; s < how_divided_.shards; ++s) {
                const std::size_t rank = how_divided_.rank_at(0, s / shards_of_rank(), 0);
                const scalar_record& r = all[rank * 2 * shards_of_rank() + s % shards_of_rank() * 2 + k];
                shards.push_back({r.value, r.loss, r.normalizer});
            }
            const batch_losses l = combined(shards);
            changes[k] = l.finite ? l.difference : std::numeric_limits<double>::infinity();
        }
        if (changes[0] < 0 && changes[0] <= changes[1]) { return 1; }
        return changes[1] < 0 ? -1 : 0;
    }

    /// The records of all ranks, by rank. Ranks that are not in the same step with the same learning rate throw.
    [[nodiscard]] records gathered(records own, std::uint64_t inputs) {
        const auto tag = static_cast<std::uint32_t>(inputs >> 56);
        for (scalar_record& r : own) { r.normalizer |= tag << tag_shift; }
        const std::size_t ranks = static_cast<std::size_t>(comm_.size());
        records all(own.size() * ranks);
        const auto begin = clock_type::now();
        scalar_bytes_ += own.size() * sizeof(scalar_record);
        if constexpr (M::host_accessible) {
            comm_.all_gather(view<const scalar_record>(own), view<scalar_record>(all));
        } else {
            const Q q = comm_.queue();
            const staging_queue<Q> staging;
            const buffer<scalar_record, staging_queue<Q>> here(staging, all.size());
            const buffer<scalar_record, Q> in(q, own.size()), out(q, all.size());
            if constexpr (!charging_queue<Q>) { std::copy(own.begin(), own.end(), here.data()); }
            upload(q, here.view().sub(0, own.size()), in.view());
            comm_.all_gather(view<const scalar_record, M>(in.view()), out.view());
            download(q, out.view(), here.view());
            if constexpr (charging_queue<Q>) {  // it is as if all ranks had the same losses
                for (std::size_t i = 0; i < all.size(); ++i) { all[i] = own[i % own.size()]; }
                static_cast<void>(fetch(q, out.view(), all.front()));
            } else {
                comm_.synchronize();
                std::copy(here.data(), here.data() + all.size(), all.begin());
            }
        }
        gathering_ += clock_type::now() - begin;
        bool same = true;
        for (scalar_record& r : all) {
            same = same && r.normalizer >> tag_shift == tag;
            r.normalizer &= max_normalizer;
        }
        if (!same) { comm_.agree(inputs, formatted("step number, seed or learning rate of step {}", step_)); }
        return all;
    }
};

}  // namespace tutti::zeroth
