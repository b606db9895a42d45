// cudnn_attention: cuDNN's fused attention as the kernels of a cuda_attention: graphs made through its C++ frontend.
// Needs cuDNN 9 and its frontend (tutti::cudnn); any C++20 compiler, no nvcc. It takes a minute to compile: include it
// in one file, and pass the object on as a fused_attention.
#pragma once

#include <array>    // strides
#include <bit>      // bits of the scale
#include <compare>  // graphs by shape
#include <cstddef>  // size_t
#include <cstdint>  // calls
#include <limits>   // no limit
#include <map>      // graphs
#include <memory>   // workspace

#include <cudnn_frontend.h>  // cuDNN

#include <tutti/core/buffer.hpp>                  // workspace
#include <tutti/core/cuda_queue.hpp>              // cuda_queue
#include <tutti/core/error.hpp>                   // usage_error
#include <tutti/core/text.hpp>                    // formatted
#include <tutti/sequence/detail/cudnn_graph.hpp>  // graphs
#include <tutti/sequence/fused_attention.hpp>     // the interface

namespace tutti::sequence {

struct cudnn_options {
    std::size_t graphs = 256;  ///< that are kept
    /// Backward gives the same bits in every run. Before Blackwell cuDNN then writes all scores' gradients, of 16 bits,
    /// into its workspace.
    bool deterministic = true;
    /// Bytes for those: calls are to be cut accordingly. For long sequences 16 GiB save about 7 % of the time.
    std::size_t workspace = std::size_t{1} << 31;
};

/// cuDNN's attention, for heads of up to 128 numbers, a multiple of 8.
///
/// Semantics    one queue at a time: calls on another queue wait for those before.
/// Determinism  as the options say.
/// Cost         a graph is built when a shape, with its strides, is first seen: tenths of a second of the host's time.
///              Those that were used last are kept, and a workspace of the largest.
/// Errors       backend_error with cuDNN's code and text, but for shapes that it refuses: those run() declines.
class cudnn_attention final : public fused_attention {
    struct shape {
        dtype element;
        bool backward, causal, padded;
        std::array<std::size_t, 6> extents;  // query heads, kv heads, width, queries, keys, sequences
        std::uint64_t scale;
        std::array<std::size_t, 16> strides;
        friend auto operator<=>(const shape&, const shape&) = default;
    };
    struct entry : detail::cudnn_graph {
        std::uint64_t used = 0;
    };
    // Moves with its owner.
    struct library {
        cudnnHandle_t handle = nullptr;
        int device = -1;
        cudaStream_t stream = nullptr;
        library() = default;
        library(const library&) = delete;
        library& operator=(const library&) = delete;
        ~library() {
            if (handle != nullptr) { cudnnDestroy(handle); }
        }
    };

    cudnn_options options_;
    library library_;
    std::map<shape, entry> graphs_;
    std::uint64_t calls_ = 0;
    std::unique_ptr<cuda_queue> last_;  // whose work uses the graphs and the workspace
    std::unique_ptr<buffer<std::byte, cuda_queue>> workspace_;

public:
    explicit cudnn_attention(cudnn_options options = {}) : options_(options) {
        if (options.graphs == 0) { throw usage_error("cudnn_attention: it cannot work with 0 graphs"); }
    }
    ~cudnn_attention() override {
        workspace_.reset();
        graphs_.clear();
    }
    /// Graphs that are kept, those of refused shapes included.
    [[nodiscard]] std::size_t graphs() const noexcept { return graphs_.size(); }

    [[nodiscard]] std::size_t most_scores() const noexcept override {
        return options_.deterministic ? options_.workspace / 2 : fused_attention::most_scores();
    }
    [[nodiscard]] bool run(const cuda_queue& q, const fused_call& c) override {
        if (c.element != dtype::bfloat16 && c.element != dtype::float16) { return false; }
        if (c.heads.width % 8 != 0 || c.heads.width > 128) { return false; }
        const tutti::detail::on_device scope(q.device());
        use(q);
        const shape s = shape_of(c);
        auto found = graphs_.find(s);
        if (found == graphs_.end()) {
            make_room(q);
            found = graphs_.emplace(s, entry{built(c)}).first;
        }
        found->second.used = ++calls_;
        const entry& e = found->second;
        if (e.graph == nullptr) { return false; }
        if (workspace_ == nullptr || workspace_->size() < e.workspace) {
            workspace_.reset();
            workspace_ = std::make_unique<buffer<std::byte, cuda_queue>>(q, e.workspace);
        }
        auto arguments = detail::cudnn_arguments(c);
        detail::expect_cudnn(e.graph->execute(library_.handle, arguments, workspace_->data()), "cudnn: execute");
        return true;
    }

private:
    static shape shape_of(const fused_call& c) {
        shape s{c.element,
                c.backward,
                c.causal,
                c.seen_keys != nullptr,
                {c.heads.query, c.heads.kv, c.heads.width, c.queries, c.keys, c.sequences},
                std::bit_cast<std::uint64_t>(c.scale),
                {}};
        std::size_t i = 0;
        for (const fused_tensor* t : {&c.query, &c.key, &c.value, &c.out, &c.d_out, &c.d_query, &c.d_key, &c.d_value}) {
            s.strides[i++] = t->token_stride;
            s.strides[i++] = t->head_stride;
        }
        return s;
    }

    // The handle on the queue, behind what another queue has been given.
    void use(const cuda_queue& q) {
        if (library_.handle != nullptr && library_.device != q.device()) {
            throw usage_error(formatted("cudnn_attention: made for device {}, called on a queue of device {}",
                                        library_.device, q.device()));
        }
        if (library_.handle == nullptr) {
            detail::expect_cudnn(cudnnCreate(&library_.handle), "cudnnCreate");
            library_.device = q.device();
        } else if (library_.stream == q.stream()) {
            return;
        }
        if (last_ != nullptr) {
            q.wait(last_->record());
            workspace_.reset();
        }
        detail::expect_cudnn(cudnnSetStream(library_.handle, q.stream()), "cudnnSetStream");
        library_.stream = q.stream();
        last_ = std::make_unique<cuda_queue>(q);
    }

    // A graph may be in use until the queue has come by.
    void make_room(const cuda_queue& q) {
        if (graphs_.size() < options_.graphs) { return; }
        auto oldest = graphs_.begin();
        for (auto i = graphs_.begin(); i != graphs_.end(); ++i) {
            if (i->second.used < oldest->second.used) { oldest = i; }
        }
        q.record().wait_host(after(default_timeout()));
        graphs_.erase(oldest);
    }

    // The deterministic form of a packed call may ask for the square of all rows; one sequence after the other it does not.
    [[nodiscard]] detail::cudnn_graph built(const fused_call& c) const {
        const bool limited = c.sequences != 0 && options_.deterministic;
        return detail::built_cudnn_graph(library_.handle, c, options_.deterministic,
                                         limited ? options_.workspace : std::numeric_limits<std::size_t>::max());
    }
};

namespace detail {
// Programs that include this header have cuDNN as their library.
inline const default_fused_attention::maker before_cudnn = default_fused_attention::provide(
    [] { return std::unique_ptr<fused_attention>(std::make_unique<cudnn_attention>()); });
}  // namespace detail

}  // namespace tutti::sequence
