// cudnn_graph: a fused_call as a graph of cuDNN, made through its C++ frontend, and its arguments by name.
// Needs cuDNN 9 and its frontend; sequence/cudnn_attention keeps and runs them.
#pragma once

#include <cstddef>        // size_t
#include <cstdint>        // extents
#include <memory>         // graphs
#include <string>         // texts
#include <string_view>    // names
#include <unordered_map>  // arguments
#include <vector>         // extents

#include <cudnn_frontend.h>  // cuDNN

#include <tutti/core/error.hpp>                // backend_error
#include <tutti/core/text.hpp>                 // formatted
#include <tutti/sequence/fused_attention.hpp>  // fused_call

namespace tutti::sequence::detail {

[[noreturn]] inline void raise_cudnn(std::string_view call, int code, const std::string& text) {
    error_context context;
    context.operation = call;
    context.backend_code = code;
    context.backend_text = text;
    throw backend_error(formatted("{}: {} ({})", call, text, code), context);
}
inline void expect_cudnn(cudnn_frontend::error_t e, std::string_view call) {
    if (e.is_bad()) { raise_cudnn(call, static_cast<int>(e.get_code()), e.get_message()); }
}
inline void expect_cudnn(cudnnStatus_t code, std::string_view call) {
    if (code != CUDNN_STATUS_SUCCESS) { raise_cudnn(call, static_cast<int>(code), cudnnGetErrorString(code)); }
}

// What names a tensor of a graph when arguments are bound to it.
enum cudnn_name : std::int64_t {
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

/// Where the tensors of a call are.
[[nodiscard]] inline std::unordered_map<std::int64_t, void*> cudnn_arguments(const fused_call& c) {
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
        const auto bind = [&](cudnn_name of, const std::int64_t* offsets) {
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
    return arguments;
}

struct cudnn_graph {
    std::shared_ptr<cudnn_frontend::graph::Graph> graph;
    std::size_t workspace = 0;
};

/// The graph of a call; none where cuDNN has no kernel for it, or one that wants a workspace of more than `most` bytes.
[[nodiscard]] inline cudnn_graph built_cudnn_graph(cudnnHandle_t handle, const fused_call& c, bool deterministic,
                                                   std::size_t most) {
    namespace fe = cudnn_frontend;
    using attributes = fe::graph::Tensor_attributes;
    const auto extent = [](std::size_t n) { return static_cast<std::int64_t>(n); };
    const std::int64_t width = extent(c.heads.width);
    const bool packed = c.sequences != 0;
    const std::int64_t sequences = packed ? extent(c.sequences) : 1;
    const auto graph = std::make_shared<cudnn_frontend::graph::Graph>();
    graph->set_io_data_type(c.element == dtype::bfloat16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    const auto extents = [&](std::size_t heads, std::size_t rows) {
        return std::vector<std::int64_t>{sequences, extent(heads), extent(rows), width};
    };
    // Where the sequences of a packed tensor begin.
    const auto pack = [&](attributes& x, cudnn_name id) {
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
        return std::vector<std::int64_t>{extent((last + 7) / 8 * 8), extent(t.head_stride), extent(t.token_stride), 1};
    };
    const auto input = [&](const char* name, cudnn_name id, const fused_tensor& t, std::size_t heads,
                           std::size_t rows) {
        auto x = attributes();
        x.set_name(name).set_uid(id).set_dim(extents(heads, rows)).set_stride(strides(t, heads, rows));
        pack(x, id);
        return graph->tensor(x);
    };
    const auto result = [&](const std::shared_ptr<attributes>& x, cudnn_name id, const fused_tensor& t,
                            std::size_t heads, std::size_t rows) {
        x->set_output(true).set_uid(id).set_dim(extents(heads, rows)).set_stride(strides(t, heads, rows));
        pack(*x, id);
    };
    const auto count = [&](const char* name, cudnn_name id) {
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
                       .set_deterministic_algorithm(deterministic);
        configure(how);
        const auto outputs = graph->sdpa_backward(q, k, v, o, d_o, sums, how);
        result(outputs[0], d_queries_name, c.d_query, c.heads.query, c.queries);
        result(outputs[1], d_keys_name, c.d_key, c.heads.kv, c.keys);
        result(outputs[2], d_values_name, c.d_value, c.heads.kv, c.keys);
    }
    // These say no where there is no kernel; the same call of a shape that cuDNN takes does not fail.
    if (graph->validate().is_bad() || graph->build_operation_graph(handle).is_bad() ||
        graph->create_execution_plans({fe::HeurMode_t::A}).is_bad() || graph->check_support(handle).is_bad()) {
        return {};
    }
    expect_cudnn(graph->build_plans(handle), "cudnn: build_plans");
    std::int64_t bytes = 0;
    expect_cudnn(graph->get_workspace_size(bytes), "cudnn: get_workspace_size");
    if (static_cast<std::size_t>(bytes) > most) { return {}; }
    return {graph, static_cast<std::size_t>(bytes)};
}

}  // namespace tutti::sequence::detail
