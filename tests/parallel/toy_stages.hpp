// Toy stages of a pipeline in double, whose every operation is in a fixed order, and the sequential run of them.
// Needs parallel/pipeline_schedule. Sizes differ from border to border.
#pragma once

#include <cstddef>  // size_t
#include <cstring>  // memcmp
#include <map>      // what forwards kept
#include <utility>  // pair
#include <vector>   // weights

#include <tutti/core/view.hpp>                   // view
#include <tutti/parallel/pipeline.hpp>           // stage_call
#include <tutti/parallel/pipeline_schedule.hpp>  // routes

#include <support/failure.hpp>  // expect
#include <support/oracle.hpp>   // random_element, same_bytes

namespace tutti::test {

inline std::vector<std::size_t> toy_sizes(int stages) {
    std::vector<std::size_t> sizes;
    for (int s = 0; s + 1 < stages; ++s) { sizes.push_back(3 + static_cast<std::size_t>(s) * 5 % 7); }
    return sizes;
}

/// All stages of all copies; a rank of a pipeline uses those it is asked for.
///
/// forward: pre[i] = w[i] * in[i mod size], out = pre / (1 + pre^2); the loss is half the sum of squares of the last
/// out.
struct toy_stages {
    static constexpr std::size_t ends = 4;  // numbers of a sample, and of the last stage
    parallel::pipeline_schedule plan;
    std::vector<std::size_t> sizes;
    std::vector<std::vector<double>> weight, gradient;  // by route and stage
    std::vector<double> loss;
    std::vector<int> asked;  // calls, by rank of the stage
    std::map<std::pair<int, int>, std::vector<double>> kept;

    explicit toy_stages(const parallel::pipeline_schedule& s)
        : plan(s), sizes(toy_sizes(s.stages())), loss(static_cast<std::size_t>(s.micro_batches), -1) {
        for (std::size_t route = 0; route < s.routes.size(); ++route) {
            for (int stage = 0; stage < s.stages(); ++stage) {
                std::vector<double> w(width(stage));
                for (std::size_t i = 0; i < w.size(); ++i) {
                    w[i] = 1 + random_element<double>(7, static_cast<std::size_t>(stage) * 100 + i);
                }
                weight.push_back(w);
                gradient.emplace_back(w.size(), 0.0);
            }
        }
    }
    [[nodiscard]] std::size_t width(int stage) const {
        return stage + 1 == plan.stages() ? ends : sizes[static_cast<std::size_t>(stage)];
    }
    [[nodiscard]] std::size_t copy(const parallel::stage_call& c) const {
        const int route = plan.route_of(c.micro_batch);
        expect(c.chunk == plan.chunk_of(route, c.stage), "stage {} of micro-batch {} is called chunk {}", c.stage,
               c.micro_batch, c.chunk);
        return static_cast<std::size_t>(route * plan.stages() + c.stage);
    }
    [[nodiscard]] static std::vector<double> sample(int micro_batch) {
        std::vector<double> x(ends);
        for (std::size_t i = 0; i < ends; ++i) {
            x[i] = random_element<double>(11, static_cast<std::size_t>(micro_batch) * ends + i);
        }
        return x;
    }
    [[nodiscard]] std::vector<double> input(const parallel::stage_call& c, view<const double> in) const {
        expect(in.size() == (c.stage == 0 ? 0 : width(c.stage - 1)), "{}: an input of {}", c.stage, in.size());
        return c.stage == 0 ? sample(c.micro_batch) : std::vector<double>(in.begin(), in.end());
    }

    void forward(const parallel::stage_call& c, view<const double> in, view<double> out) {
        const auto x = input(c, in);
        const auto& w = weight[copy(c)];
        std::vector<double> pre(w.size());
        for (std::size_t i = 0; i < w.size(); ++i) { pre[i] = w[i] * x[i % x.size()]; }
        const bool last = c.stage + 1 == plan.stages();
        expect(out.size() == (last ? 0 : w.size()), "{}: an output of {}", c.stage, out.size());
        double total = 0;
        for (std::size_t i = 0; i < w.size(); ++i) {
            const double y = pre[i] / (1 + pre[i] * pre[i]);
            if (last) {
                total += y * y / 2;
            } else {
                out[i] = y;
            }
        }
        if (last) { loss[static_cast<std::size_t>(c.micro_batch)] = total; }
        if (c.keep) { expect(kept.emplace(std::pair{c.stage, c.micro_batch}, pre).second, "kept twice"); }
    }
    [[nodiscard]] std::vector<double> d_pre(const parallel::stage_call& c, view<const double> d_out) const {
        const auto found = kept.find({c.stage, c.micro_batch});
        expect(found != kept.end(), "stage {} has kept nothing of micro-batch {}", c.stage, c.micro_batch);
        const auto& pre = found->second;
        const bool last = c.stage + 1 == plan.stages();
        expect(d_out.size() == (last ? 0 : pre.size()), "{}: a gradient of {}", c.stage, d_out.size());
        std::vector<double> d(pre.size());
        for (std::size_t i = 0; i < d.size(); ++i) {
            const double q = 1 + pre[i] * pre[i];
            const double dy = last ? pre[i] / q : d_out[i];
            d[i] = dy * (1 - pre[i] * pre[i]) / (q * q);
        }
        return d;
    }
    void backward_input(const parallel::stage_call& c, view<const double> in, view<const double> d_out,
                        view<double> d_in) const {
        const auto d = d_pre(c, d_out);
        expect(d_in.size() == in.size(), "{}: an input gradient of {}", c.stage, d_in.size());
        if (c.stage == 0) { return; }
        for (double& g : d_in) { g = 0; }
        for (std::size_t i = 0; i < d.size(); ++i) { d_in[i % in.size()] += weight[copy(c)][i] * d[i]; }
    }
    void backward_weight(const parallel::stage_call& c, view<const double> in, view<const double> d_out) {
        const auto d = d_pre(c, d_out);
        const auto x = input(c, in);
        for (std::size_t i = 0; i < d.size(); ++i) { gradient[copy(c)][i] += d[i] * x[i % x.size()]; }
        kept.erase({c.stage, c.micro_batch});
    }

    /// One micro-batch after the other through all stages and back, in one memory.
    void run_sequentially() {
        for (int b = 0; b < plan.micro_batches; ++b) {
            std::vector<std::vector<double>> activation(1);
            const auto call = [&](int s) {
                return parallel::stage_call{s, plan.chunk_of(plan.route_of(b), s), b, true};
            };
            for (int s = 0; s < plan.stages(); ++s) {
                activation.emplace_back(s + 1 == plan.stages() ? 0 : width(s));
                forward(call(s), activation[static_cast<std::size_t>(s)], activation.back());
            }
            std::vector<double> d_out;
            for (int s = plan.stages(); s-- > 0;) {
                const auto& in = activation[static_cast<std::size_t>(s)];
                std::vector<double> d_in(in.size());
                backward_input(call(s), in, d_out, d_in);
                backward_weight(call(s), in, d_out);
                d_out = d_in;
            }
        }
    }
    /// Whether what `rank` holds has the bits of `reference`.
    void expect_same(const toy_stages& reference, int rank) const {
        for (std::size_t route = 0; route < plan.routes.size(); ++route) {
            for (int s = 0; s < plan.stages(); ++s) {
                const std::size_t i = route * static_cast<std::size_t>(plan.stages()) + static_cast<std::size_t>(s);
                if (plan.routes[route][static_cast<std::size_t>(s)] != rank) { continue; }
                expect(same_bytes(gradient[i], reference.gradient[i]), "{}, rank {}: gradient of stage {} on route {}",
                       plan.name, rank, s, route);
            }
        }
        for (int b = 0; b < plan.micro_batches; ++b) {
            if (plan.rank_of(plan.stages() - 1, b) != rank) { continue; }
            const auto i = static_cast<std::size_t>(b);
            expect(std::memcmp(&loss[i], &reference.loss[i], sizeof(double)) == 0, "{}, rank {}: loss of {}", plan.name,
                   rank, b);
        }
        expect(kept.empty(), "{}, rank {}: {} are kept for ever", plan.name, rank, kept.size());
    }
};

}  // namespace tutti::test
