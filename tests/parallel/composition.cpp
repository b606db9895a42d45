// Tensor x pipeline x data parallelism together: losses, gradients and weights as on one rank, under every schedule.
#include <doctest/doctest.h>  // checks

#include <algorithm>    // max
#include <cmath>        // fabs, tanh
#include <cstddef>      // size_t
#include <cstdint>      // words
#include <map>          // parameters by name
#include <span>         // gradients
#include <string>       // names
#include <string_view>  // names
#include <utility>      // as_const, move
#include <vector>       // tensors

#include <tutti/comm/threads.hpp>                       // ranks
#include <tutti/optimize/clip.hpp>                      // clip_factor
#include <tutti/parallel/gradient_norm.hpp>             // under test
#include <tutti/parallel/linear.hpp>                    // layers
#include <tutti/parallel/mesh.hpp>                      // who does what
#include <tutti/parallel/pipeline.hpp>                  // under test
#include <tutti/parallel/schedules/dual_pipe.hpp>       // schedules
#include <tutti/parallel/schedules/one_way.hpp>         // schedules
#include <tutti/parallel/schedules/zero_bubble.hpp>     // schedules
#include <tutti/parallel/tensor_group.hpp>              // who shares layers
#include <tutti/parallel/tied_weights.hpp>              // embedding and head
#include <tutti/parallel/vocabulary.hpp>                // embedding
#include <tutti/parallel/vocabulary_cross_entropy.hpp>  // loss

#include <support/build.hpp>    // full_speed
#include <support/failure.hpp>  // expect
#include <support/oracle.hpp>   // random_element

using namespace tutti;
using namespace tutti::test;
using namespace tutti::parallel;
using comm::threads;
using numbers = std::vector<double>;
using words = std::vector<std::int32_t>;

namespace {

constexpr double bar = 1e-12;
constexpr int blocks = 8;
constexpr int micro_batches = 8;  // of all replicas together
constexpr int steps = full_speed ? 20 : 1;
constexpr int few_steps = full_speed ? 3 : 1;  // of most layouts
constexpr std::size_t rows = 6;                // of a micro-batch
constexpr std::size_t h = 8;
constexpr std::size_t inner = 16;
constexpr std::size_t vocabulary = 13;

words ids(int step, int b) {
    words w;
    for (std::size_t i = 0; i < rows; ++i) {
        w.push_back(static_cast<std::int32_t>(mixed(static_cast<std::size_t>(step * 100 + b) * rows + i) % vocabulary));
    }
    return w;
}
// Other numbers of valid tokens in each micro-batch.
words targets(int step, int b) {
    words w = ids(step, b + 50);
    for (std::size_t i = 0; i < static_cast<std::size_t>(b % 4); ++i) { w[i] = -1; }
    return w;
}
double valid_tokens(int step) {
    double n = 0;
    for (int b = 0; b < micro_batches; ++b) {
        for (const auto w : targets(step, b)) { n += w >= 0 ? 1 : 0; }
    }
    return n;
}

enum class cut { whole, by_rows, by_columns };
struct parameter {
    std::size_t columns = 1;
    cut how = cut::whole;
    numbers value{};  // all of it, or a rank's part
    numbers gradient{};
};
using parameters = std::map<std::string, parameter>;

std::string name_in(int block, const char* what) { return std::to_string(block) + "." + what; }

// The whole model, the same wherever it is made; the table without padding.
parameters drawn_model() {
    parameters all;
    std::uint64_t seed = 0;
    const auto add = [&](const std::string& name, std::size_t count, std::size_t columns, cut how, double scale) {
        parameter p{columns, how};
        ++seed;
        for (std::size_t i = 0; i < count * columns; ++i) {
            p.value.push_back(scale * random_element<double>(seed, i));
        }
        p.gradient.resize(p.value.size());
        all.emplace(name, std::move(p));
    };
    add("table", vocabulary, h, cut::by_rows, 1);
    for (int b = 0; b < blocks; ++b) {
        add(name_in(b, "gain"), h, 1, cut::whole, 1);
        add(name_in(b, "up"), inner, h, cut::by_rows, 0.4);
        add(name_in(b, "up_bias"), inner, 1, cut::by_rows, 0.4);
        add(name_in(b, "down"), h, inner, cut::by_columns, 0.4);
        add(name_in(b, "down_bias"), h, 1, cut::whole, 0.4);
    }
    return all;
}
// Rank r's part of t; rows behind the end are padding, zero.
numbers part_of(const numbers& v, const parameter& p, int t, int r) {
    if (p.how == cut::whole) { return v; }
    const std::size_t columns = p.columns;
    const std::size_t all_rows = v.size() / columns;
    const auto ranks = static_cast<std::size_t>(t);
    const auto rank = static_cast<std::size_t>(r);
    numbers out;
    if (p.how == cut::by_rows) {
        const std::size_t count = (all_rows + ranks - 1) / ranks;
        for (std::size_t i = rank * count * columns; i < (rank + 1) * count * columns; ++i) {
            out.push_back(i < v.size() ? v[i] : 0);
        }
    } else {
        const std::size_t count = columns / ranks;
        for (std::size_t i = 0; i < all_rows; ++i) {
            for (std::size_t j = 0; j < count; ++j) { out.push_back(v[i * columns + rank * count + j]); }
        }
    }
    return out;
}

// What one rank of a tensor group computes of the stages it is asked for.
class part_of_model {
    struct memory {
        std::vector<numbers> in, hidden;  // by block of the stage
        numbers last, logits, normalizer;
        parameters gradient;  // of this micro-batch, until it is added
    };
    tensor_group<threads>& group_;
    const pipeline_schedule& plan_;
    parameters& held_;
    vocabulary_share share_;
    vocabulary_embedding<threads, double> embedding_;
    column_linear<threads, double> up_;
    row_linear<threads, double> down_;
    column_linear<threads, double> head_;
    vocabulary_cross_entropy<threads, double> entropy_;
    std::map<std::pair<int, int>, memory> kept_;

public:
    int step = 0;
    int first_micro_batch = 0;
    double scale = 0;
    double loss = 0;

    part_of_model(tensor_group<threads>& g, const pipeline_schedule& s, parameters& held)
        : group_(g)
        , plan_(s)
        , held_(held)
        , share_(g, vocabulary)
        , embedding_(g, share_, h)
        , up_(g, h, inner)
        , down_(g, inner, h)
        , head_(g, h, share_.padded)
        , entropy_(g, share_) {}

    static int first_block(const pipeline_schedule& s, int stage) { return stage * blocks / s.stages(); }

    void forward(const stage_call& c, view<const double> in, view<double> out) {
        const std::size_t outer = group_.outer_rows(rows);
        const int b = first_micro_batch + c.micro_batch;
        memory m;
        numbers x(in.begin(), in.end());
        if (c.stage == 0) {
            x.resize(outer * h);
            const words in_words = ids(step, b);
            embedding_.forward(in_words, held_.at("table").value, x);
        }
        for (int block = first_block(plan_, c.stage); block < first_block(plan_, c.stage + 1); ++block) {
            numbers u(x.size()), a(rows * up_.outputs()), y(x.size());
            for (std::size_t i = 0; i < x.size(); ++i) { u[i] = x[i] * value(block, "gain")[i % h]; }
            up_.forward(rows, u, value(block, "up"), value(block, "up_bias"), a);
            for (double& v : a) { v = std::tanh(v); }
            down_.forward(rows, a, value(block, "down"), value(block, "down_bias"), y);
            m.in.push_back(x);
            m.hidden.push_back(a);
            for (std::size_t i = 0; i < x.size(); ++i) { x[i] += y[i]; }
        }
        if (c.stage + 1 == plan_.stages()) {
            m.last = x;
            m.logits.resize(rows * share_.count);
            m.normalizer.resize(rows);
            numbers losses(rows);
            head_.forward(rows, x, held_.at("table").value, {}, m.logits);
            const words right = targets(step, b);
            entropy_.forward(m.logits, right, losses, m.normalizer);
            // With recomputation only the second time counts.
            for (const double l : losses) { loss += c.keep ? l * scale : 0; }
        } else {
            std::copy(x.begin(), x.end(), out.begin());
        }
        if (c.keep) { kept_[{c.stage, c.micro_batch}] = std::move(m); }
    }
    void backward_input(const stage_call& c, view<const double> in, view<const double> d_out, view<double> d_in) {
        memory& m = kept_.at({c.stage, c.micro_batch});
        const int b = first_micro_batch + c.micro_batch;
        numbers d(d_out.begin(), d_out.end());
        if (c.stage + 1 == plan_.stages()) {
            d.resize(m.last.size());
            const words right = targets(step, b);
            entropy_.backward(m.logits, right, m.normalizer, scale, m.logits);
            head_.backward(rows, m.last, held_.at("table").value, m.logits, d, gradient(m, "table"), {});
        }
        const int first = first_block(plan_, c.stage);
        for (int block = first_block(plan_, c.stage + 1); block-- > first;) {
            const numbers& x = m.in[static_cast<std::size_t>(block - first)];
            const numbers& s = m.hidden[static_cast<std::size_t>(block - first)];
            const numbers& gain = value(block, "gain");
            numbers u(x.size()), du(x.size()), ds(s.size());
            for (std::size_t i = 0; i < x.size(); ++i) { u[i] = x[i] * gain[i % h]; }
            down_.backward(rows, s, value(block, "down"), d, ds, gradient(m, name_in(block, "down")),
                           gradient(m, name_in(block, "down_bias")));
            for (std::size_t i = 0; i < s.size(); ++i) { ds[i] *= 1 - s[i] * s[i]; }
            up_.backward(rows, u, value(block, "up"), ds, du, gradient(m, name_in(block, "up")),
                         gradient(m, name_in(block, "up_bias")));
            numbers& of_gain = gradient(m, name_in(block, "gain"));
            for (std::size_t i = 0; i < x.size(); ++i) {
                of_gain[i % h] += du[i] * x[i];
                d[i] += du[i] * gain[i % h];
            }
        }
        if (c.stage == 0) {
            const words in_words = ids(step, b);
            embedding_.backward(in_words, d, gradient(m, "table"));
        } else {
            expect(d_in.size() == in.size(), "an input gradient of {}", d_in.size());
            std::copy(d.begin(), d.end(), d_in.begin());
        }
    }
    void backward_weight(const stage_call& c, view<const double>, view<const double>) {
        for (const auto& [name, p] : kept_.at({c.stage, c.micro_batch}).gradient) {
            numbers& sum = held_.at(name).gradient;
            for (std::size_t i = 0; i < sum.size(); ++i) { sum[i] += p.gradient[i]; }
        }
        kept_.erase({c.stage, c.micro_batch});
    }

private:
    [[nodiscard]] const numbers& value(int block, const char* what) const {
        return held_.at(name_in(block, what)).value;
    }
    [[nodiscard]] numbers& gradient(memory& m, const std::string& name) const {
        numbers& g = m.gradient[name].gradient;
        g.resize(held_.at(name).value.size());
        return g;
    }
};

struct run_result {
    std::vector<double> losses, norms;
    parameters first_gradients, early, last;  // weights after a few steps, and all
};

struct layout {
    int tensor = 1, pipeline = 1, data = 1;
    bool sequence = false, overlap = false, recompute = false;
    int steps = few_steps;
};

// Trains on this rank. Its parts of gradients and weights are compared with `reference`, if there is one.
run_result trained(threads& world, const layout& l, const pipeline_schedule& s, const run_result* reference) {
    const mesh m({.pipeline = l.pipeline, .data = l.data, .tensor = l.tensor}, world.size());
    threads data = split_along(world, m, dimension::data);
    threads down_the_pipe = split_along(world, m, dimension::pipeline);
    const int stage_rank = down_the_pipe.rank();
    threads one_model = split_along(world, m, {dimension::pipeline, dimension::tensor});
    tensor_options o;
    o.sequence_parallel = l.sequence;
    o.overlap = l.overlap;
    tensor_group<threads> group(split_along(world, m, dimension::tensor), o);

    // What this rank has: blocks of its stages, the table at the ends.
    const parameters whole = drawn_model();
    parameters held;
    const auto take = [&](const std::string& name) {
        parameter p = whole.at(name);
        p.value = part_of(p.value, p, l.tensor, group.rank());
        p.gradient.assign(p.value.size(), 0.0);
        held.emplace(name, std::move(p));
    };
    for (const auto& route : s.routes) {
        for (int stage = 0; stage < s.stages(); ++stage) {
            if (route[static_cast<std::size_t>(stage)] != stage_rank) { continue; }
            if (stage == 0 || stage + 1 == s.stages()) { take("table"); }
            for (int b = part_of_model::first_block(s, stage); b < part_of_model::first_block(s, stage + 1); ++b) {
                for (const char* what : {"gain", "up", "up_bias", "down", "down_bias"}) { take(name_in(b, what)); }
            }
        }
    }
    tied_weights<threads> ends(down_the_pipe, s, {0, s.stages() - 1});
    if (ends.held()) { ends.expect_same(view<const double>(held.at("table").value)); }
    std::vector<tied_weights<threads>> copies;  // by stage, where there are two
    for (int stage = 0; s.routes.size() > 1 && stage < s.stages(); ++stage) {
        copies.emplace_back(down_the_pipe, s, std::vector{stage});
    }

    // Whether this rank counts a block, of which another one has the copy.
    const auto first_copy = [&](const std::string& name) {
        const int block = std::stoi(name);
        int stage = 0;
        while (part_of_model::first_block(s, stage + 1) <= block) { ++stage; }
        return copies[static_cast<std::size_t>(stage)].counts();
    };

    pipeline_options po;
    po.elements = {group.outer_rows(rows) * h};
    po.overlap = l.overlap;
    po.recompute = l.recompute;
    const int own = micro_batches / l.data;
    part_of_model model(group, s, held);
    model.first_micro_batch = data.rank() * own;
    pipeline<threads, double> pipe(std::move(down_the_pipe), s, po);

    run_result result;
    for (int step = 0; step < l.steps; ++step) {
        model.step = step;
        model.scale = 1 / valid_tokens(step);
        model.loss = 0;
        for (auto& [name, p] : held) { p.gradient.assign(p.value.size(), 0.0); }
        static_cast<void>(pipe.run(model));

        for (auto& [name, p] : held) {
            const view<double> g(p.gradient);
            if (name.find("gain") != std::string::npos) { group.add_up_replicated(g); }
        }
        for (int stage = 0; stage < static_cast<int>(copies.size()); ++stage) {
            if (!copies[static_cast<std::size_t>(stage)].held()) { continue; }
            for (int b = part_of_model::first_block(s, stage); b < part_of_model::first_block(s, stage + 1); ++b) {
                for (const char* what : {"gain", "up", "up_bias", "down", "down_bias"}) {
                    copies[static_cast<std::size_t>(stage)].add_up(view<double>(held.at(name_in(b, what)).gradient));
                }
            }
        }
        if (ends.held()) { ends.add_up(view<double>(held.at("table").gradient)); }
        double loss = model.loss;
        const view<double> total(&loss, 1);
        data.all_reduce(total, total, sum{});
        pipe.communicator().all_reduce(total, total, sum{});
        result.losses.push_back(loss);
        std::vector<held_gradient<double, host_memory>> gradients;
        for (auto& [name, p] : held) {
            const view<double> g(p.gradient);
            data.all_reduce(g, g, sum{});
            if (step == 0) { result.first_gradients[name] = p; }
            const bool whole_counts = p.how != cut::whole || group.counts_replicated();
            gradients.push_back(
                {g, whole_counts && (name == "table" ? ends.counts() : copies.empty() || first_copy(name))});
        }
        const double norm = model_norm<double>(one_model, std::span(std::as_const(gradients)));
        world.agree(hash_bytes(as_bytes(view<const double>(&norm, 1))), "norm");
        result.norms.push_back(norm);
        for (auto& [name, p] : held) {
            const double rate = 0.5 * optimize::clip_factor(norm, 0.4);
            for (std::size_t i = 0; i < p.value.size(); ++i) { p.value[i] -= rate * p.gradient[i]; }
        }
        // Replicas have the same bits, and so have both ends, and all ranks of whole parameters.
        for (auto& [name, p] : held) {
            const auto bits = hash_bytes(as_bytes(view<const double>(p.value)));
            data.agree(bits, name);
            if (p.how == cut::whole) { group.communicator().agree(bits, name); }
        }
        if (ends.held()) { ends.expect_same(view<const double>(held.at("table").value)); }
        if (step + 1 == few_steps) { result.early = held; }
    }
    result.last = held;
    if (reference != nullptr) {
        const auto close = [&](const numbers& got, const numbers& all, const parameter& p, std::string_view what) {
            double most = 0;
            for (const double x : all) { most = std::max(most, std::fabs(x)); }
            const numbers expected = part_of(all, p, l.tensor, group.rank());
            for (std::size_t i = 0; i < expected.size(); ++i) {
                expect(std::fabs(got[i] - expected[i]) <= bar * most, "{}[{}]: {} is not {}", what, i, got[i],
                       expected[i]);
            }
        };
        for (int step = 0; step < l.steps; ++step) {
            const auto i = static_cast<std::size_t>(step);
            expect(std::fabs(result.losses[i] - reference->losses[i]) <= bar * reference->losses[i],
                   "loss {} of step {} is not {}", result.losses[i], step, reference->losses[i]);
            expect(std::fabs(result.norms[i] - reference->norms[i]) <= 1e-13 * reference->norms[i],
                   "norm {} of step {} is not {}", result.norms[i], step, reference->norms[i]);
        }
        for (const auto& [name, p] : held) {
            close(result.first_gradients.at(name).gradient, reference->first_gradients.at(name).gradient, p,
                  "gradient of " + name);
            const parameters& weights = l.steps == steps ? reference->last : reference->early;
            close(p.value, weights.at(name).value, p, name);
        }
    }
    return result;
}

const run_result& on_one_rank() {
    static const run_result result = [] {
        run_result r;
        threads::launch(1, [&](threads& c) { r = trained(c, {.steps = steps}, gpipe(1, micro_batches), nullptr); });
        return r;
    }();
    return result;
}

std::vector<pipeline_schedule> schedules_of(int p, int m) {
    std::vector<pipeline_schedule> all{one_forward_one_backward(p, m), zero_bubble(p, m)};
    if (p == 1) { return all; }
    all.push_back(gpipe(p, m));
    all.push_back(zero_bubble_v(p, m));
    if (m % p == 0) { all.push_back(interleaved(p, m, 2)); }
    if (p % 2 == 0 && m % 2 == 0 && m >= 2 * p) { all.push_back(dual_pipe(p, m)); }
    return all;
}

}  // namespace

TEST_CASE(
    "all (tensor, pipeline, data) of at most 8 ranks, every schedule: losses, gradients and weights of one rank") {
    CHECK(on_one_rank().losses[0] > 1);
    CHECK(on_one_rank().norms[0] > 0.4);  // clipping does something
    int runs = 0;
    for (const int tensor : {1, 2, 4, 8}) {
        for (const int pipeline : {1, 2, 4, 8}) {
            for (const int data : {1, 2, 4, 8}) {
                const int ranks = tensor * pipeline * data;
                if (ranks > 8 || (!full_speed && (ranks != 4 || tensor == 4 || data == 4))) { continue; }
                for (const pipeline_schedule& s : schedules_of(pipeline, micro_batches / data)) {
                    for (const bool sequence : {false, true}) {
                        if (sequence ? tensor == 1 : tensor > 1 && !full_speed) { continue; }
                        // Overlap and recomputation in turn, in all four combinations; to the end in every ninth.
                        const layout l{tensor,
                                       pipeline,
                                       data,
                                       sequence,
                                       runs % 2 == 1,
                                       runs / 2 % 2 == 1,
                                       runs % 9 == 0 ? steps : few_steps};
                        ++runs;
                        CAPTURE(s.name);
                        CAPTURE(ranks);
                        threads::launch(ranks, [&](threads& c) { trained(c, l, s, &on_one_rank()); });
                    }
                }
            }
        }
    }
    CHECK(runs >= (full_speed ? 60 : 15));
}

TEST_CASE("on the same ranks all one-way schedules have the same bits, and so have a hundred runs that overlap") {
    const auto bits = [](const pipeline_schedule& s, bool overlap, bool recompute) {
        std::vector<std::uint64_t> hashes(4);
        const layout l{2, 2, 1, true, overlap, recompute, 1};
        threads::launch(4, [&](threads& c) {
            const auto rank = static_cast<std::size_t>(c.rank());
            std::uint64_t h_of = hash_seed;
            for (const auto& [name, p] : trained(c, l, s, nullptr).last) {
                h_of = hash_bytes(as_bytes(view<const double>(p.value)), h_of);
            }
            hashes[rank] = h_of;
        });
        return hashes;
    };
    const auto reference = bits(gpipe(2, 8), false, false);
    CHECK(bits(gpipe(2, 8), true, true) == reference);
    CHECK(bits(one_forward_one_backward(2, 8), true, false) == reference);
    CHECK(bits(zero_bubble(2, 8), false, true) == reference);
    for (int i = 0; i < (full_speed ? 100 : 3); ++i) {
        REQUIRE(bits(i % 2 == 0 ? zero_bubble(2, 8) : one_forward_one_backward(2, 8), true, i % 3 == 0) == reference);
    }
}
