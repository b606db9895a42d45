// Causal self-attention by cuDNN: graphs made through its C++ frontend, one a shape and direction.
#include "attention_cudnn.hpp"

#include <cmath>          // sqrt
#include <compare>        // graphs by shape
#include <cstdint>        // extents
#include <map>            // graphs
#include <string>         // messages
#include <string_view>    // names
#include <unordered_map>  // arguments
#include <utility>        // move
#include <vector>         // extents

#include <cudnn_frontend.h>

#include <tutti/core/buffer.hpp>  // workspaces
#include <tutti/core/error.hpp>   // backend_error
#include <tutti/core/text.hpp>    // formatted

namespace transformer::gpu {

namespace {

namespace fe = cudnn_frontend;
using tutti::bfloat16;

[[noreturn]] void raise(std::string_view call, int code, const std::string& text) {
    tutti::error_context context;
    context.operation = call;
    context.backend_code = code;
    context.backend_text = text;
    throw tutti::backend_error(tutti::formatted("{}: {} ({})", call, text, code), context);
}
void check(fe::error_t e, std::string_view call) {
    if (e.is_bad()) { raise(call, static_cast<int>(e.get_code()), e.get_message()); }
}
void check(cudnnStatus_t code, std::string_view call) {
    if (code != CUDNN_STATUS_SUCCESS) { raise(call, static_cast<int>(code), cudnnGetErrorString(code)); }
}

// What names a tensor of a graph when arguments are bound to it.
enum tensor : std::int64_t { queries = 1, keys, values, output, statistics, d_output, d_queries, d_keys, d_values };

struct key {
    int batch, length, heads, head_width;
    bool backward;
    fe::DataType_t type;
    friend auto operator<=>(const key&, const key&) = default;
};
struct plan {
    std::shared_ptr<fe::graph::Graph> graph;
    tutti::buffer<std::byte, tutti::cuda_queue> workspace;
};

}  // namespace

struct cudnn_attention::implementation {
    tutti::cuda_queue queue;
    cudnnHandle_t handle = nullptr;
    std::map<key, plan> plans;

    explicit implementation(const tutti::cuda_queue& q) : queue(q) {
        const tutti::detail::on_device scope(q.device());
        check(cudnnCreate(&handle), "cudnnCreate");
        const cudnnStatus_t bound = cudnnSetStream(handle, q.stream());
        if (bound != CUDNN_STATUS_SUCCESS) {
            cudnnDestroy(handle);
            check(bound, "cudnnSetStream");
        }
    }
    implementation(const implementation&) = delete;
    implementation& operator=(const implementation&) = delete;
    ~implementation() {
        plans.clear();
        cudnnDestroy(handle);
    }

    plan make(const key& k) const {
        const std::int64_t b = k.batch, h = k.heads, t = k.length, d = k.head_width, w = h * d;
        const auto graph = std::make_shared<fe::graph::Graph>();
        graph->set_io_data_type(k.type)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        const std::vector<std::int64_t> extents{b, h, t, d};
        const std::vector<std::int64_t> in_qkv{t * 3 * w, d, 3 * w, 1}, in_rows{t * w, d, w, 1};
        const auto input = [&](const char* name, tensor id, const std::vector<std::int64_t>& strides) {
            return graph->tensor(
                fe::graph::Tensor_attributes().set_name(name).set_uid(id).set_dim(extents).set_stride(strides));
        };
        const auto result = [&](const std::shared_ptr<fe::graph::Tensor_attributes>& x, tensor id,
                                const std::vector<std::int64_t>& strides) {
            x->set_output(true).set_uid(id).set_dim(extents).set_stride(strides);
        };
        const auto q = input("queries", queries, in_qkv);
        const auto key_rows = input("keys", keys, in_qkv);
        const auto v = input("values", values, in_qkv);
        const float scale = 1.0f / std::sqrt(static_cast<float>(k.head_width));
        if (!k.backward) {
            const auto [o, s] = graph->sdpa(q, key_rows, v,
                                            fe::graph::SDPA_attributes()
                                                .set_name("attention")
                                                .set_generate_stats(true)
                                                .set_causal_mask(true)
                                                .set_attn_scale(scale));
            result(o, output, in_rows);
            s->set_output(true).set_uid(statistics).set_data_type(fe::DataType_t::FLOAT);
        } else {
            const auto o = input("output", output, in_rows);
            const auto d_o = input("d_output", d_output, in_rows);
            const auto s = graph->tensor(fe::graph::Tensor_attributes()
                                             .set_name("statistics")
                                             .set_uid(statistics)
                                             .set_dim({b, h, t, 1})
                                             .set_stride({h * t, t, 1, 1})
                                             .set_data_type(fe::DataType_t::FLOAT));
            const auto [d_q, d_k, d_v] = graph->sdpa_backward(q, key_rows, v, o, d_o, s,
                                                              fe::graph::SDPA_backward_attributes()
                                                                  .set_name("attention_backward")
                                                                  .set_causal_mask(true)
                                                                  .set_attn_scale(scale)
                                                                  .set_deterministic_algorithm(true));
            result(d_q, d_queries, in_qkv);
            result(d_k, d_keys, in_qkv);
            result(d_v, d_values, in_qkv);
        }
        check(graph->validate(), "cudnn: validate");
        check(graph->build_operation_graph(handle), "cudnn: build_operation_graph");
        check(graph->create_execution_plans({fe::HeurMode_t::A}), "cudnn: create_execution_plans");
        check(graph->check_support(handle), "cudnn: check_support");
        check(graph->build_plans(handle), "cudnn: build_plans");
        std::int64_t bytes = 0;
        check(graph->get_workspace_size(bytes), "cudnn: get_workspace_size");
        return {graph, tutti::buffer<std::byte, tutti::cuda_queue>(queue, static_cast<std::size_t>(bytes))};
    }

    void run(const attention_shape& s, bool backward, std::unordered_map<std::int64_t, void*> arguments,
             fe::DataType_t type = fe::DataType_t::BFLOAT16) {
        const tutti::detail::on_device scope(queue.device());
        const key k{s.batch, s.length, s.heads, s.head_width, backward, type};
        auto found = plans.find(k);
        if (found == plans.end()) { found = plans.emplace(k, make(k)).first; }
        check(found->second.graph->execute(handle, arguments, found->second.workspace.data()), "cudnn: execute");
    }
};

namespace {
/// cuDNN writes through the outputs alone.
void* to_argument(const void* p) { return const_cast<void*>(p); }

template <class T>
std::unordered_map<std::int64_t, void*> forward_arguments(const attention_shape& s, const T* qkv, T* out,
                                                          float* log_sum_exp) {
    const auto width = static_cast<std::size_t>(s.width());
    return {{queries, to_argument(qkv)},
            {keys, to_argument(qkv + width)},
            {values, to_argument(qkv + 2 * width)},
            {output, out},
            {statistics, log_sum_exp}};
}
}  // namespace

cudnn_attention::cudnn_attention(const tutti::cuda_queue& q) : implementation_(std::make_unique<implementation>(q)) {}
cudnn_attention::cudnn_attention(cudnn_attention&&) noexcept = default;
cudnn_attention& cudnn_attention::operator=(cudnn_attention&&) noexcept = default;
cudnn_attention::~cudnn_attention() = default;

void cudnn_attention::forward(const attention_shape& s, const bfloat16* qkv, bfloat16* out, float* log_sum_exp) {
    implementation_->run(s, false, forward_arguments(s, qkv, out, log_sum_exp));
}
void cudnn_attention::forward(const attention_shape& s, const tutti::float16* qkv, tutti::float16* out,
                              float* log_sum_exp) {
    implementation_->run(s, false, forward_arguments(s, qkv, out, log_sum_exp), fe::DataType_t::HALF);
}

void cudnn_attention::backward(const attention_shape& s, const bfloat16* d_out, const bfloat16* qkv,
                               const bfloat16* out, const float* log_sum_exp, bfloat16* d_qkv) {
    const auto width = static_cast<std::size_t>(s.width());
    implementation_->run(s, true,
                         {{queries, to_argument(qkv)},
                          {keys, to_argument(qkv + width)},
                          {values, to_argument(qkv + 2 * width)},
                          {output, to_argument(out)},
                          {statistics, to_argument(log_sum_exp)},
                          {d_output, to_argument(d_out)},
                          {d_queries, d_qkv},
                          {d_keys, d_qkv + width},
                          {d_values, d_qkv + 2 * width}});
}

}  // namespace transformer::gpu
