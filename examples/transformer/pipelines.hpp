// The list of pipelines: --pipeline and --help know exactly these.
// To add one: write its file under pipelines/ (a name, a `using`, a `make`) and name it at the end of this one; where
// something in it needs a .cuh, cuda/strategies.cu includes that. One of forward passes alone has no `make`.
#pragma once

#include <string>       // help text
#include <string_view>  // names
#include <type_traits>  // type_identity, is_base_of
#include <utility>      // move

#include <fmt/format.h>  // help text

#include "any_strategy.hpp"
#include "pipelines/compressed.hpp"
#include "pipelines/ddp.hpp"
#include "pipelines/documents.hpp"
#include "pipelines/local.hpp"
#include "pipelines/local_update.hpp"
#include "pipelines/mezo.hpp"
#include "pipelines/parallel.hpp"
#include "pipelines/zero.hpp"

namespace transformer {

template <class... Each> struct pipeline_list {
    /// "name  summary" lines.
    [[nodiscard]] static std::string help() {
        std::string text;
        ((text += fmt::format("{:<14}{}\n", Each::name, Each::summary)), ...);
        text.pop_back();
        return text;
    }
    /// "ddp, local": for messages.
    [[nodiscard]] static std::string names() {
        std::string text;
        ((text += fmt::format("{}{}", text.empty() ? "" : ", ", Each::name)), ...);
        return text;
    }
    [[nodiscard]] static bool has(std::string_view name) { return ((name == Each::name) || ...); }
    [[nodiscard]] static bool is_single_rank(std::string_view name) {
        return ((name == Each::name && Each::single_rank) || ...);
    }
    /// Calls visit(std::type_identity<P>()) for the pipeline of that name, which is one that `has` knows.
    template <class Visit> static void with(std::string_view name, Visit visit) {
        ((name == Each::name ? visit(std::type_identity<Each>()) : void()), ...);
    }
    /// The strategy of the pipeline that o names, which has one.
    template <class T, class Comm>
    [[nodiscard]] static any_strategy<T, tutti::queue_of<Comm>> make(Comm comm, const options& o,
                                                                     tutti::schedule::timeline* trace) {
        any_strategy<T, tutti::queue_of<Comm>> made;
        with(o.pipeline, [&]<class P>(std::type_identity<P>) {
            if constexpr (!pipelines::of_forward_passes<P> && !std::is_base_of_v<pipelines::of_parts, P>) {
                made = P::template make<T>(std::move(comm), o, trace);
            }
        });
        return made;
    }
};

using pipelines_known =
    pipeline_list<pipelines::local, pipelines::ddp, pipelines::ddp_4bit, pipelines::ddp_topk, pipelines::ddp_powersgd,
                  pipelines::ddp_lgreco, pipelines::zero1, pipelines::zero2, pipelines::zero3, pipelines::local_sgd,
                  pipelines::slowmo, pipelines::co2, pipelines::co2_zero, pipelines::diloco, pipelines::eager_diloco,
                  pipelines::cocod, pipelines::packed, pipelines::even_ring, pipelines::zeppelin, pipelines::mezo,
                  pipelines::zo2, pipelines::distzo2, pipelines::tp, pipelines::pp, pipelines::three_dimensional>;

}  // namespace transformer
