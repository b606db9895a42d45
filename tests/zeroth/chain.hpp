// A toy model for tests of zeroth: a chain of small dense blocks of unequal size with a scalar loss, on any queue; and
// what it must become, computed tensor by tensor with nothing of the library but the elements of directions.
// Needs zeroth/layout and core/run.
#pragma once

#include <cmath>        // fma
#include <cstddef>      // size_t
#include <cstdint>      // tensors
#include <span>         // updates
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // weights

#include <tutti/core/buffer.hpp>            // activations
#include <tutti/core/config.hpp>            // TUTTI_HOST_DEVICE
#include <tutti/core/philox.hpp>            // first weights
#include <tutti/core/run.hpp>               // run
#include <tutti/zeroth/direction.hpp>       // element_of
#include <tutti/zeroth/layout.hpp>          // model_shape
#include <tutti/zeroth/offload.hpp>         // module_weights
#include <tutti/zeroth/pending_update.hpp>  // pending_update
#include <tutti/zeroth/probe.hpp>           // probe

namespace tutti::test {

inline constexpr std::size_t chain_width = 9;
inline constexpr std::size_t chain_words = 7;

// Embedding (tensor 1) and a bias (2, not decayed); blocks of three tensors (10 i + 10 ...), the last of them not
// decayed and, in every third block, frozen; a gain (3), the embedding again and a frozen scale (4).
struct chain_shape {
    std::size_t blocks = 3;
    [[nodiscard]] static std::size_t hidden(std::size_t i) { return 5 + 11 * i % 17; }
    [[nodiscard]] zeroth::model_shape shape() const {
        zeroth::model_shape m;
        m.head = {{1, chain_words * chain_width}, {2, chain_width, false}};
        for (std::size_t i = 0; i < blocks; ++i) {
            const auto first = static_cast<std::uint32_t>(10 * i + 10);
            m.blocks.push_back({{first, hidden(i) * chain_width},
                                {first + 1, chain_width * hidden(i)},
                                {first + 2, chain_width, false, i % 3 == 1}});
        }
        m.tail = {{3, chain_width}, {1, chain_words * chain_width}, {4, chain_width, true, true}};
        return m;
    }
};

enum class chain_part : std::uint8_t { head, block, tail };

// One module on one branch. x: activations, updated.
template <class T, memory M> struct chain_operation {
    static constexpr std::string_view name = "chain";
    chain_part what;
    std::size_t word;
    view<const T, M> a, b, c;
    view<float, M> x;
    view<double, M> loss;
    [[nodiscard]] tutti::cost cost() const noexcept { return {}; }
    TUTTI_HOST_DEVICE void operator()() const {
        constexpr std::size_t d = chain_width;
        float* const at = x.data();
        if (what == chain_part::head) {
            for (std::size_t k = 0; k < d; ++k) {
                at[k] = static_cast<float>(a.data()[word * d + k]) + static_cast<float>(b.data()[k]);
            }
        } else if (what == chain_part::block) {
            float y[d];
            for (std::size_t k = 0; k < d; ++k) { y[k] = at[k] + static_cast<float>(c.data()[k]); }
            const std::size_t hidden = a.size() / d;
            for (std::size_t h = 0; h < hidden; ++h) {
                float s = 0;
                for (std::size_t k = 0; k < d; ++k) { s += static_cast<float>(a.data()[h * d + k]) * at[k]; }
                s = s / (1 + (s < 0 ? -s : s));
                for (std::size_t k = 0; k < d; ++k) { y[k] += static_cast<float>(b.data()[k * hidden + h]) * s; }
            }
            for (std::size_t k = 0; k < d; ++k) { at[k] = y[k]; }
        } else {
            double sum = 0;
            for (std::size_t v = 0; v < chain_words; ++v) {
                double logit = v == word ? -1 : 0;
                for (std::size_t k = 0; k < d; ++k) {
                    logit += static_cast<double>(static_cast<float>(b.data()[v * d + k])) *
                             static_cast<double>(static_cast<float>(a.data()[k]) * static_cast<float>(c.data()[k])) *
                             static_cast<double>(at[k]);
                }
                sum += logit * logit;
            }
            loss.data()[0] = sum / static_cast<double>(chain_words);
            loss.data()[1] = static_cast<double>(word + 1);
        }
    }
};

// `Pause` is called where the host may be late.
template <queue Q, class T, class Pause> class chain_model {
    using M = typename Q::memory_type;
    std::vector<buffer<float, Q>> x_;
    Pause pause_;

public:
    chain_model(Q q, std::size_t branches, Pause pause) : pause_(pause) {
        for (std::size_t b = 0; b < branches; ++b) { x_.emplace_back(q, chain_width); }
    }
    void head(Q q, zeroth::module_weights<T, M> w, std::size_t branch, std::size_t micro_batch) {
        step(q, chain_part::head, w[0], w[1], {}, branch, micro_batch, {});
    }
    void block(Q q, std::size_t, zeroth::module_weights<T, M> w, std::size_t branch, std::size_t micro_batch) {
        step(q, chain_part::block, w[0], w[1], w[2], branch, micro_batch, {});
    }
    void tail(Q q, zeroth::module_weights<T, M> w, std::size_t branch, std::size_t micro_batch, view<double, M> loss) {
        step(q, chain_part::tail, w[0], w[1], w[2], branch, micro_batch, loss);
    }

private:
    void step(Q q, chain_part what, view<const T, M> a, view<const T, M> b, view<const T, M> c, std::size_t branch,
              std::size_t micro_batch, view<double, M> loss) {
        pause_();
        run(q, chain_operation<T, M>{what, micro_batch % chain_words, a, b, c, x_[branch].view(), loss});
    }
};
struct no_pause {
    void operator()() const {}
};

// Every tensor of the model by its number, in a vector of its own.
template <class T> class chain_reference {
    template <class> friend class chain_reference;
    struct tensor {
        zeroth::tensor_shape shape;
        std::vector<T> values;
    };
    std::size_t blocks_;
    std::vector<tensor> tensors_;

    [[nodiscard]] std::size_t place_of(std::uint32_t number) const {
        for (std::size_t k = 0; k < tensors_.size(); ++k) {
            if (tensors_[k].shape.tensor == number) { return k; }
        }
        throw usage_error("chain_reference: no such tensor");
    }
    void add(const zeroth::tensor_shape& s) {
        tensor& t = tensors_.emplace_back();
        t.shape = s;
        for (std::size_t i = 0; i < s.count; ++i) {
            t.values.push_back(static_cast<T>(0.5f * random_stream{.seed = 99, .stream = s.tensor}.normal(i)));
        }
    }

public:
    explicit chain_reference(const chain_shape& c) : blocks_(c.blocks) {
        const zeroth::model_shape m = c.shape();
        for (const auto& t : m.head) { add(t); }
        for (const auto& block : m.blocks) {
            for (const auto& t : block) { add(t); }
        }
        for (const auto& t : m.tail) {
            if (t.tensor != 1) { add(t); }
        }
    }
    // The same model with every tensor as convert(values) has it.
    template <class From, class Convert>
    chain_reference(const chain_reference<From>& from, Convert convert) : blocks_(from.blocks_) {
        for (const auto& t : from.tensors_) { tensors_.push_back({t.shape, convert(t.values)}); }
    }
    [[nodiscard]] const std::vector<T>& values(std::uint32_t number) const { return tensors_[place_of(number)].values; }

    void set(std::uint32_t number, std::vector<T> values) { tensors_[place_of(number)].values = std::move(values); }

    // Weights and copies are the host's; the model runs on `q`.
    template <queue Q> [[nodiscard]] double loss(Q q, const zeroth::probe& p, std::size_t micro_batch) const {
        using M = typename Q::memory_type;
        std::vector<buffer<T, Q>> there;
        for (const tensor& t : tensors_) {
            std::vector<T> moved = t.values;
            for (std::size_t i = 0; i < moved.size() && !t.shape.frozen && p.scale != 0; ++i) {
                moved[i] = static_cast<T>(std::fma(static_cast<float>(p.scale), element_of(p.z, t.shape.tensor, i),
                                                   static_cast<float>(moved[i])));
            }
            there.emplace_back(q, moved.size());
            zeroth::detail::bring(q, as_bytes(view<const T>(moved)), as_bytes(there.back().view()));
            q.record().wait_host(after(default_timeout()));
        }
        const buffer<float, Q> x(q, chain_width);
        const buffer<double, Q> cells(q, 2);
        const auto at = [&](std::uint32_t number) { return view<const T, M>(there[place_of(number)].view()); };
        const auto step = [&](chain_part what, view<const T, M> a, view<const T, M> b, view<const T, M> c) {
            run(q, chain_operation<T, M>{what, micro_batch % chain_words, a, b, c, x.view(), cells.view()});
        };
        step(chain_part::head, at(1), at(2), {});
        for (std::size_t i = 0; i < blocks_; ++i) {
            const auto first = static_cast<std::uint32_t>(10 * i + 10);
            step(chain_part::block, at(first), at(first + 1), at(first + 2));
        }
        step(chain_part::tail, at(3), at(1), at(4));
        return fetch(q, cells.view(), 0.0);
    }

    // The updates of one step: neighbors of one step are one.
    void update(std::span<const zeroth::pending_update> step) {
        if (step.empty()) { return; }
        for (tensor& t : tensors_) {
            if (t.shape.frozen) { continue; }
            for (std::size_t i = 0; i < t.values.size(); ++i) {
                const auto w = static_cast<float>(t.values[i]);
                const auto decay = static_cast<float>(step[0].learning_rate * step[0].weight_decay);
                float change = t.shape.decayed && decay != 0 ? decay * w : 0.0f;
                for (const zeroth::pending_update& u : step) {
                    change = std::fma(static_cast<float>(u.learning_rate * u.gradient),
                                      element_of(u.z, t.shape.tensor, i), change);
                }
                t.values[i] = static_cast<T>(w - change);
            }
        }
    }
};

}  // namespace tutti::test
