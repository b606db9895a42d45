// A training run that is saved as it goes on, lost, and resumed: the same bits as without the loss.
#include <doctest/doctest.h>  // test cases

#include <atomic>       // counts over ranks
#include <cstdint>      // steps
#include <string_view>  // names
#include <vector>       // values

#include "state.hpp"

#include <tutti/compress/top_k.hpp>            // residuals of ranks
#include <tutti/optimize/adamw.hpp>            // optimizer
#include <tutti/strategy/compressed_mean.hpp>  // residuals of ranks
#include <tutti/strategy/data_parallel.hpp>    // strategy

#include "strategy/toy.hpp"  // trainer

using namespace tutti;
using namespace tutti::test;

namespace {

using trained =
    strategy::data_parallel<comm::threads, optimize::adamw, float, strategy::compressed_mean<compress::top_k>>;

bool is_residual(std::string_view name) { return name.find("residual") != std::string_view::npos; }

// What a trainer writes: its strategy's state and its own.
struct job {
    toy<float> model = matrices();
    trained strategy;
    std::uint64_t samples = 0;
    list contents;

    job(comm::threads& world, std::string_view name)
        : strategy(world.duplicate(name), {}, {.bucket_bytes = 600}, {.level = 500}) {
        strategy.attach(model.parameters);
    }
    void list_state(auto&& wanted) {
        for (const state_entry<>& e : strategy.state()) {
            expect(e.whose == (is_residual(e.name) ? ownership::local : ownership::replicated), "{}", e.name);
        }
        for (const state_entry<>& e : strategy.state()) {
            if (wanted(e.name)) { contents.add(e, e.whose); }
        }
        contents.add(state_of("samples", view<std::uint64_t>(&samples, 1)), ownership::replicated);
    }
    void train(comm::threads& world, int first, int steps) {
        test::train(strategy, world.rank(), world.size(), {.steps = steps, .first_step = first});
        samples += 12 * static_cast<std::uint64_t>(steps);
    }
};

// Ranks on which a run that is saved after 5 of 10 steps, and resumed with the entries that `wanted` names, ends with
// the bits of the run that was not interrupted.
int equal_ranks(bool (*wanted)(std::string_view)) {
    const scratch_directory scratch;
    std::atomic<int> equal = 0;
    comm::threads::launch(3, [&](comm::threads& world) {
        const auto every = [](std::string_view) { return true; };
        job whole(world, "whole");
        whole.list_state(every);
        {
            checkpoint::saver saver(world.duplicate("save"), scratch.folder());
            whole.train(world, 0, 5);
            saver.save(5, whole.contents);
            whole.train(world, 5, 5);  // beside the save
            whole.strategy.flush();
            expect(saver.wait()->step == 5, "not saved");
        }
        job resumed(world, "resumed");
        resumed.list_state(wanted);
        const auto found = checkpoint::load(world, scratch.folder(), {.allow_unused = true}, resumed.contents);
        expect(found && found->step == 5 && resumed.samples == 60, "not loaded");
        resumed.strategy.restored();
        resumed.train(world, 5, 5);
        resumed.strategy.flush();
        equal += same_bytes(resumed.model.values(), whole.model.values()) ? 1 : 0;
    });
    return equal;
}

}  // namespace

TEST_CASE("a resumed run ends with the bits of one that was not interrupted, and with nothing less than its state") {
    CHECK(equal_ranks([](std::string_view) { return true; }) == 3);
    CHECK(equal_ranks([](std::string_view name) { return !is_residual(name); }) == 0);
    CHECK(equal_ranks([](std::string_view name) { return name != "optimizer/steps"; }) == 0);
    CHECK(equal_ranks([](std::string_view name) { return name.ends_with("/value") || name.find('/') == name.npos; }) ==
          0);
}
