// What tests of checkpoints save: entries of every kind whose bytes are functions of (step, name, place), their folder,
// and loads of them at any number of ranks.
// Needs checkpoint and comm/threads.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t
#include <cstdint>    // steps
#include <cstring>    // memcpy
#include <deque>      // storage that does not move
#include <string>     // names
#include <vector>     // entries

#include <support/failure.hpp>              // expect
#include <support/oracle.hpp>               // mixed
#include <tutti/checkpoint/checkpoint.hpp>  // under test
#include <tutti/comm/self.hpp>              // one rank
#include <tutti/comm/threads.hpp>           // ranks

#include "files.hpp"  // folders

namespace tutti::test {

using checkpoint::ownership;
using list = checkpoint::contents<host_queue>;

inline std::string path_of(const std::string& folder, int generation) {
    std::string digits = std::to_string(generation);
    return folder + "/checkpoint-" + std::string(10 - digits.size(), '0') + digits;
}

/// A rank's entries.
class state {
    struct entry {
        std::string name;
        std::vector<std::size_t> shape;
        dtype type;
        ownership whose;
        part range;
        std::vector<std::byte> bytes;
    };
    std::size_t rank_, ranks_;
    std::deque<entry> entries_;

    void put(std::string name, std::vector<std::size_t> shape, dtype type, ownership whose, part range) {
        entries_.push_back({std::move(name), std::move(shape), type, whose, range, {}});
        entries_.back().bytes.resize(range.count * size_of(type));
    }
    void whole(std::string name, std::vector<std::size_t> shape, dtype type, ownership whose) {
        std::size_t all = 1;
        for (const std::size_t extent : shape) { all *= extent; }
        put(std::move(name), std::move(shape), type, whose, {0, all});
    }
    void cut(std::string name, std::vector<std::size_t> shape, dtype type, std::size_t turn) {
        std::size_t all = 1;
        for (const std::size_t extent : shape) { all *= extent; }
        put(std::move(name), std::move(shape), type, ownership::sharded,
            partition(all, ranks_, (rank_ + turn) % ranks_));
    }
    [[nodiscard]] std::byte expected(const entry& e, std::uint64_t step, std::size_t i) const {
        std::uint64_t seed = step * 1000003 + hash_bytes(view(std::as_bytes(std::span(e.name))));
        if (e.whose == ownership::local) { seed += 77 * (rank_ + 1); }
        return static_cast<std::byte>(mixed(seed + e.range.first * size_of(e.type) + i));
    }

public:
    state(std::size_t rank, std::size_t ranks, bool with_local = true) : rank_(rank), ranks_(ranks) {
        cut("w/value", {5, 7}, dtype::float32, 0);
        cut("w/moment", {5, 7}, dtype::float32, 1);  // another rank's than the value
        cut("few", {2}, dtype::int64, 0);            // of which some ranks have none
        cut("half", {3, 11}, dtype::bfloat16, 0);
        cut("empty", {0, 3}, dtype::float64, 0);
        cut("raw", {1001}, dtype::byte, 0);
        if (rank == ranks / 2) { whole("owned", {4, 4}, dtype::float64, ownership::sharded); }
        whole("bias", {13}, dtype::float32, ownership::replicated);
        whole("steps", {}, dtype::uint64, ownership::replicated);
        if (with_local) {
            whole("random", {4}, dtype::uint32, ownership::local);
            whole("residual", {rank + 1, 3}, dtype::float16, ownership::local);
        }
    }

    void fill(std::uint64_t step) {
        for (entry& e : entries_) {
            for (std::size_t i = 0; i < e.bytes.size(); ++i) { e.bytes[i] = expected(e, step, i); }
        }
    }
    /// Throws for the first byte that is not that of the step; local entries may have another.
    void demand(std::uint64_t step, std::uint64_t local_step) const {
        for (const entry& e : entries_) {
            const std::uint64_t s = e.whose == ownership::local ? local_step : step;
            for (std::size_t i = 0; i < e.bytes.size(); ++i) {
                expect(e.bytes[i] == expected(e, s, i), "'{}' differs at byte {} on rank {} of {}", e.name, i, rank_,
                       ranks_);
            }
        }
    }
    void demand(std::uint64_t step) const { demand(step, step); }
    /// Whether the bytes are those of the step.
    [[nodiscard]] bool holds(std::uint64_t step) const {
        for (const entry& e : entries_) {
            for (std::size_t i = 0; i < e.bytes.size(); ++i) {
                if (e.bytes[i] != expected(e, step, i)) { return false; }
            }
        }
        return true;
    }

    [[nodiscard]] list contents() {
        list c;
        for (entry& e : entries_) {
            c.add({e.name, e.shape, e.range.first, e.type, view<std::byte>(e.bytes)}, e.whose);
        }
        return c;
    }
};

/// Saves steps one after the other with a saver of its own.
inline void save_steps(const std::string& folder, int ranks, const std::vector<std::uint64_t>& steps,
                       const checkpoint::saver_options& options = {}) {
    comm::threads::launch(ranks, [&](comm::threads& c) {
        state s(static_cast<std::size_t>(c.rank()), static_cast<std::size_t>(c.size()));
        list contents = s.contents();
        checkpoint::saver saver(c.duplicate("save"), folder, options);
        for (const std::uint64_t step : steps) {
            s.fill(step);
            saver.save(step, contents);
            const auto made = saver.wait();
            expect(made && made->step == step && made->left_over.empty(), "step {} was not saved: {}", step,
                   made ? made->left_over : "");
        }
    });
}

/// Loads at `ranks` ranks and demands that every byte is that of the step that is loaded. Returns what rank 0 got; a
/// generation of 0 for none.
inline checkpoint::loaded load_at(const std::string& folder, int ranks, const checkpoint::load_options& how = {}) {
    checkpoint::loaded first;
    comm::threads::launch(ranks, [&](comm::threads& c) {
        state s(static_cast<std::size_t>(c.rank()), static_cast<std::size_t>(c.size()));
        constexpr std::uint64_t before = 999'999;
        s.fill(before);
        const list contents = s.contents();
        const auto got = checkpoint::load(c, folder, how, contents);
        if (got) {
            s.demand(got->step, got->ranks == ranks ? got->step : before);
        } else {
            s.demand(before);
        }
        c.agree(got ? got->generation : 0, "the checkpoint that ranks have loaded");
        if (c.rank() == 0 && got) { first = *got; }
    });
    return first;
}

}  // namespace tutti::test
