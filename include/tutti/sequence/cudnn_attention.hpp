// cudnn_attention: cuDNN's fused attention as the kernels of a cuda_attention: graphs made through its C++ frontend.
// Needs cuDNN 9 and its frontend (tutti::cudnn); any C++20 compiler, no nvcc. It takes a minute to compile: include it
// in one file, and pass the object on as a fused_attention.
#pragma once

#include <array>          // strides
#include <bit>            // bits of the scale
#include <compare>        // graphs by shape
#include <cstddef>        // size_t
#include <cstdint>        // extents
#include <map>            // graphs
#include <memory>         // graphs
#include <string>         // texts
#include <string_view>    // names
#include <unordered_map>  // arguments
#include <vector>         // extents

#include <cudnn_frontend.h>  // cuDNN

#include <tutti/core/buffer.hpp>               // workspace
#include <tutti/core/cuda_queue.hpp>           // cuda_queue
#include <tutti/core/error.hpp>                // backend_error
#include <tutti/core/text.hpp>                 // formatted
#include <tutti/sequence/fused_attention.hpp>  // the interface

namespace tutti::sequence {

struct cudnn_options {
    std::size_t graphs = 256;  ///< that are kept
    /// Backward gives the same bits in every run. Before Blackwell cuDNN then writes all scores' gradients, of 16 bits,
    /// into its workspace.
    bool deterministic = true;
    std::size_t workspace = std::size_t{1} << 31;  ///< bytes for those: calls are to be cut accordingly
};

/// cuDNN's attention, for heads of up to 128 numbers, a multiple of 8.
///
/// Semantics    one queue at a time: calls on another queue wait for those before.
/// Determinism  as the options say.
/// Cost         a graph is built when a shape, with its strides, is first seen: tenths of a second of the host's time.
///              Those that were used last are kept, and a workspace of the largest.
/// Errors       backend_error with cuDNN's code and text, but for shapes that it refuses: those run() declines.
class cudnn_attention final : public fused_attention {
    // What names a tensor of a graph when arguments are bound to it.
    enum tensor_name : std::int64_t {
        queries_name = 1,
        keys_name,
        values_name,
        out_name,
        sums_name,
        d_out_name,
        d_queries_name,
        d_keys_name,
        d_values_name,
        seen_queries_name,
        seen_keys_name,
        offsets_name = 100  ///< and the name of the tensor whose offsets they are
    };
    struct shape {
        dtype element;
        bool backward, causal, padded;
        std::array<std::size_t, 6> extents;  // query heads, kv heads, width, queries, keys, sequences
        std::uint64_t scale;
        std::array<std::size_t, 16> strides;
        friend auto operator<=>(const shape&, const shape&) = default;
    };
    using graph_type = cudnn_frontend::graph::Graph;
    struct entry {
        std::shared_ptr<graph_type> graph;  // none: cuDNN has no kernel for it
        std::size_t workspace = 0;
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
            found = graphs_.emplace(s, built(c)).first;
        }
        found->second.used = ++calls_;
        const entry& e = found->second;
        if (e.graph == nullptr) { return false; }
        if (workspace_ == nullptr || workspace_->size() < e.workspace) {
            workspace_.reset();
            workspace_ = std::make_unique<buffer<std::byte, cuda_queue>>(q, e.workspace);
        }
        std::unordered_map<std::int64_t, void*> arguments{{queries_name, c.query.data},
                                                          {keys_name, c.key.data},
                                                          {values_name, c.value.data},
                                                          {out_name, c.out.data},
                                                          {sums_name, c.log_sum_exp}};
        if (c.backward) {
            arguments.insert({{d_out_name, c.d_out.data},
                              {d_queries_name, c.d_query.data},
                              {d_keys_name, c.d_key.data},
                              {d_values_name, c.d_value.data}});
        }
        if (c.seen_keys != nullptr) {
            arguments.insert({{seen_queries_name, const_cast<std::int32_t*>(c.seen_queries)},
                              {seen_keys_name, const_cast<std::int32_t*>(c.seen_keys)}});
        }
        if (c.sequences != 0) {
            const auto bind = [&](tensor_name of, const std::int64_t* offsets) {
                arguments.insert({offsets_name + of, const_cast<std::int64_t*>(offsets)});
            };
            bind(queries_name, c.query.offsets);
            bind(keys_name, c.key.offsets);
            bind(values_name, c.value.offsets);
            bind(out_name, c.out.offsets);
            bind(sums_name, c.log_sum_exp_offsets);
            if (c.backward) {
                bind(d_out_name, c.d_out.offsets);
                bind(d_queries_name, c.d_query.offsets);
                bind(d_keys_name, c.d_key.offsets);
                bind(d_values_name, c.d_value.offsets);
            }
        }
        expect_success(e.graph->execute(library_.handle, arguments, workspace_->data()), "cudnn: execute");
        return true;
    }

private:
    [[noreturn]] static void raise(std::string_view call, int code, const std::string& text) {
        error_context context;
        context.operation = call;
        context.backend_code = code;
        context.backend_text = text;
        throw backend_error(formatted("{}: {} ({})", call, text, code), context);
    }
    static void expect_success(cudnn_frontend::error_t e, std::string_view call) {
        if (e.is_bad()) { raise(call, static_cast<int>(e.get_code()), e.get_message()); }
    }
    static void expect_success(cudnnStatus_t code, std::string_view call) {
        if (code != CUDNN_STATUS_SUCCESS) { raise(call, static_cast<int>(code), cudnnGetErrorString(code)); }
    }
    static std::int64_t extent(std::size_t n) { return static_cast<std::int64_t>(n); }

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
            expect_success(cudnnCreate(&library_.handle), "cudnnCreate");
            library_.device = q.device();
        } else if (library_.stream == q.stream()) {
            return;
        }
        if (last_ != nullptr) {
            q.wait(last_->record());
            workspace_.reset();
        }
        expect_success(cudnnSetStream(library_.handle, q.stream()), "cudnnSetStream");
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

    [[nodiscard]] entry built(const fused_call& c) const {
        namespace fe = cudnn_frontend;
        using attributes = fe::graph::Tensor_attributes;
        const std::int64_t width = extent(c.heads.width);
        const bool packed = c.sequences != 0;
        const std::int64_t sequences = packed ? extent(c.sequences) : 1;
        const auto graph = std::make_shared<graph_type>();
        graph->set_io_data_type(c.element == dtype::bfloat16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        const auto extents = [&](std::size_t heads, std::size_t rows) {
            return std::vector<std::int64_t>{sequences, extent(heads), extent(rows), width};
        };
        // Where the sequences of a packed tensor begin.
        const auto pack = [&](attributes& x, tensor_name id) {
            if (!packed) { return; }
            x.set_ragged_offset(graph->tensor(attributes()
                                                  .set_name("offsets")
                                                  .set_uid(offsets_name + id)
                                                  .set_dim({sequences + 1, 1, 1, 1})
                                                  .set_stride({1, 1, 1, 1})
                                                  .set_data_type(fe::DataType_t::INT64)));
        };
        const auto strides = [&](const fused_tensor& t, std::size_t heads, std::size_t rows) {
            // Sequences of a batch are one, or where their offsets say: this stride is what lies behind all.
            const std::size_t last = (heads - 1) * t.head_stride + (rows - 1) * t.token_stride + c.heads.width;
            return std::vector<std::int64_t>{extent((last + 7) / 8 * 8), extent(t.head_stride), extent(t.token_stride),
                                             1};
        };
        const auto input = [&](const char* name, tensor_name id, const fused_tensor& t, std::size_t heads,
                               std::size_t rows) {
            auto x = attributes();
            x.set_name(name).set_uid(id).set_dim(extents(heads, rows)).set_stride(strides(t, heads, rows));
            pack(x, id);
            return graph->tensor(x);
        };
        const auto result = [&](const std::shared_ptr<attributes>& x, tensor_name id, const fused_tensor& t,
                                std::size_t heads, std::size_t rows) {
            x->set_output(true).set_uid(id).set_dim(extents(heads, rows)).set_stride(strides(t, heads, rows));
            pack(*x, id);
        };
        const auto count = [&](const char* name, tensor_name id) {
            return graph->tensor(attributes()
                                     .set_name(name)
                                     .set_uid(id)
                                     .set_dim({sequences, 1, 1, 1})
                                     .set_stride({1, 1, 1, 1})
                                     .set_data_type(fe::DataType_t::INT32));
        };
        const auto configure = [&](auto& how) {
            how.set_causal_mask(c.causal).set_attn_scale(static_cast<float>(c.scale));
            if (c.seen_keys != nullptr) {
                how.set_padding_mask(true)
                    .set_seq_len_q(count("seen queries", seen_queries_name))
                    .set_seq_len_kv(count("seen keys", seen_keys_name));
            }
        };
        const auto q = input("queries", queries_name, c.query, c.heads.query, c.queries);
        const auto k = input("keys", keys_name, c.key, c.heads.kv, c.keys);
        const auto v = input("values", values_name, c.value, c.heads.kv, c.keys);
        const std::int64_t heads = extent(c.heads.query);
        const auto describe_sums = [&](attributes& x) {
            x.set_uid(sums_name)
                .set_dim({sequences, heads, extent(c.queries), 1})
                .set_stride({heads * extent(c.queries), packed ? 1 : extent(c.queries), packed ? heads : 1, 1})
                .set_data_type(fe::DataType_t::FLOAT);
            pack(x, sums_name);
        };
        if (!c.backward) {
            auto how = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
            configure(how);
            const auto outputs = graph->sdpa(q, k, v, how);
            result(outputs[0], out_name, c.out, c.heads.query, c.queries);
            describe_sums(outputs[1]->set_output(true));
        } else {
            const auto o = input("out", out_name, c.out, c.heads.query, c.queries);
            const auto d_o = input("gradient of out", d_out_name, c.d_out, c.heads.query, c.queries);
            auto described = attributes();
            describe_sums(described.set_name("logarithms of sums"));
            const auto sums = graph->tensor(described);
            auto how = fe::graph::SDPA_backward_attributes()
                           .set_name("attention backward")
                           .set_deterministic_algorithm(options_.deterministic);
            configure(how);
            const auto outputs = graph->sdpa_backward(q, k, v, o, d_o, sums, how);
            result(outputs[0], d_queries_name, c.d_query, c.heads.query, c.queries);
            result(outputs[1], d_keys_name, c.d_key, c.heads.kv, c.keys);
            result(outputs[2], d_values_name, c.d_value, c.heads.kv, c.keys);
        }
        // These say no where there is no kernel; the same call of a shape that cuDNN takes does not fail.
        if (graph->validate().is_bad() || graph->build_operation_graph(library_.handle).is_bad() ||
            graph->create_execution_plans({fe::HeurMode_t::A}).is_bad() ||
            graph->check_support(library_.handle).is_bad()) {
            return {};
        }
        expect_success(graph->build_plans(library_.handle), "cudnn: build_plans");
        std::int64_t bytes = 0;
        expect_success(graph->get_workspace_size(bytes), "cudnn: get_workspace_size");
        // The deterministic form of a packed call may ask for the square of all rows; sequence by sequence it does not.
        if (packed && options_.deterministic && static_cast<std::size_t>(bytes) > options_.workspace) { return {}; }
        return {graph, static_cast<std::size_t>(bytes), 0};
    }
};

namespace detail {
// Programs that include this header have cuDNN as their library.
inline const default_fused_attention::maker before_cudnn = default_fused_attention::provide(
    [] { return std::unique_ptr<fused_attention>(std::make_unique<cudnn_attention>()); });
}  // namespace detail

}  // namespace tutti::sequence
