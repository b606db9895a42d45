// Files of the planner and of simulate_cluster: a machine with what was measured on it, jobs whose time is asked for.
// Needs nlohmann-json. What a file says too much or too little is an error that names the file and the place.
#pragma once

#include <algorithm>         // find, min
#include <charconv>          // sizes in texts
#include <cstddef>           // size_t
#include <cstdint>           // sizes
#include <fstream>           // files
#include <initializer_list>  // keys
#include <span>              // measurements
#include <string>            // names
#include <string_view>       // keys
#include <system_error>      // errc
#include <type_traits>       // kinds of values
#include <utility>           // move, in_range
#include <vector>            // jobs

#include <fmt/format.h>       // messages
#include <nlohmann/json.hpp>  // files

#include <transformer/bad_input.hpp>  // errors of requests

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/plan/plan.hpp>   // machines, models, jobs

namespace plan_a_job {

using nlohmann::json;
using transformer::bad_input;
namespace plan = tutti::plan;

[[nodiscard]] inline json read_json(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) { throw bad_input(fmt::format("cannot read '{}'", path)); }
    try {
        return json::parse(file);
    } catch (const json::exception& e) { throw bad_input(fmt::format("{}: {}", path, e.what())); }
}

/// An object of a file, whose keys must be known and whose values must be of the right kind.
class object {
    const json& value_;
    std::string where_;

public:
    object(const json& value, std::string where, std::initializer_list<std::string_view> keys)
        : value_(value), where_(std::move(where)) {
        if (!value.is_object()) { throw bad_input(where_ + ": not an object"); }
        for (const auto& [key, unused] : value.items()) {
            if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
                throw bad_input(fmt::format("{}: '{}' is not known", where_, key));
            }
        }
    }
    [[nodiscard]] bool has(const char* key) const { return value_.contains(key); }
    template <class T> [[nodiscard]] T get(const char* key) const {
        if (!has(key)) { throw bad_input(fmt::format("{}: '{}' is missing", where_, key)); }
        const json& found = value_.at(key);
        bool right = std::is_same_v<T, std::string> ? found.is_string() : found.is_number();
        if constexpr (std::is_same_v<T, bool>) {
            right = found.is_boolean();
        } else if constexpr (std::is_integral_v<T>) {  // not rounded, nor cut off
            right = found.is_number_integer() &&
                    (!found.is_number_unsigned() || std::in_range<T>(found.get<std::uint64_t>())) &&
                    (found.is_number_unsigned() || std::in_range<T>(found.get<std::int64_t>()));
        }
        if (!right) {
            throw bad_input(fmt::format("{}: '{}' is {}, which is not {}", where_, key, found.dump(), kind_of<T>()));
        }
        return found.get<T>();
    }
    template <class T> [[nodiscard]] T get(const char* key, T otherwise) const {
        return has(key) ? get<T>(key) : otherwise;
    }
    /// A number above 0; a share is at most 1.
    void positive(const char* key, double& into, bool is_share = false) const {
        if (!has(key)) { return; }
        into = get<double>(key);
        if (!(into > 0)) { throw bad_input(fmt::format("{}: '{}' is {}; it must be positive", where_, key, into)); }
        if (is_share && into > 1) {
            throw bad_input(fmt::format("{}: '{}' is {}; it is a share of the peak, at most 1", where_, key, into));
        }
    }
    /// f(member, where it stands) for each member of a list; none where there is no list.
    template <class F> void each(const char* key, F f) const {
        if (!has(key)) { return; }
        if (!value_.at(key).is_array()) { throw bad_input(fmt::format("{}: '{}' is not a list", where_, key)); }
        std::size_t at = 0;
        for (const json& member : value_.at(key)) { f(member, fmt::format("{}: {}[{}]", where_, key, at++)); }
    }
    [[nodiscard]] const json& at(const char* key) const { return value_.at(key); }
    [[nodiscard]] const std::string& where() const { return where_; }

private:
    template <class T> [[nodiscard]] static constexpr const char* kind_of() {
        return std::is_same_v<T, std::string> ? "a text"
               : std::is_same_v<T, bool>      ? "true or false"
               : std::is_integral_v<T>        ? "a whole number of this size"
                                              : "a number";
    }
};

/// The value whose name it is, of an enumeration that counts from 0.
template <class E>
[[nodiscard]] E value_named(std::string_view name, std::initializer_list<E> all, const std::string& where) {
    std::string names;
    for (const E e : all) {
        if (name_of(e) == name) { return e; }
        names += (names.empty() ? "" : ", ") + std::string(name_of(e));
    }
    throw bad_input(fmt::format("{}: '{}' is not one of {}", where, name, names));
}
[[nodiscard]] inline plan::pipelining schedule_named(std::string_view name, const std::string& where) {
    using enum plan::pipelining;
    return value_named(name, {gpipe, one_forward_one_backward, interleaved, zero_bubble, zero_bubble_v, dual_pipe},
                       where);
}
[[nodiscard]] inline plan::recomputation recomputation_named(std::string_view name, const std::string& where) {
    using enum plan::recomputation;
    return value_named(name, {none, selective, full, stages}, where);
}
[[nodiscard]] inline plan::kept_bytes keeping_of(std::string_view trainer, const std::string& where) {
    if (trainer == "megatron") { return plan::megatron_keeps; }
    if (trainer == "tutti") { return plan::trainer_keeps; }
    throw bad_input(fmt::format("{}: '{}' is not one of megatron, tutti", where, trainer));
}

/// A published name, or LAYERS,HIDDEN,HEADS,VOCABULARY,SEQUENCE.
[[nodiscard]] inline plan::model_shape model_of(const std::string& text) {
    if (text.find(',') == std::string::npos) { return plan::model_named(text); }
    plan::model_shape m;
    std::int64_t* const sizes[] = {&m.layers, &m.hidden, &m.heads, &m.vocabulary, &m.sequence};
    std::size_t from = 0;
    for (std::size_t i = 0; i < 5; ++i) {
        const std::size_t comma = std::min(text.find(',', from), text.size());
        const char* const end = text.data() + comma;
        const auto read = std::from_chars(text.data() + from, end, *sizes[i]);
        const bool last = comma == text.size();
        if (read.ec != std::errc{} || read.ptr != end || *sizes[i] < 1 || *sizes[i] > 1'000'000'000 ||
            last != (i == 4)) {
            throw bad_input(fmt::format(
                "'{}' is neither a model's name nor LAYERS,HIDDEN,HEADS,VOCABULARY,SEQUENCE of positive numbers",
                text));
        }
        from = comma + 1;
    }
    return m;
}

/// A job of a list: {"model": "gpt2-1558m", "tp": 2, "pp": 1, "dp": 2, "micro_batch": 4, "micro_batches": 8, ...}.
[[nodiscard]] inline plan::measured_step step_of(const json& value, const std::string& where) {
    const object o(value, where,
                   {"model",         "tp",         "pp",       "dp",          "sp",        "micro_batch",
                    "micro_batches", "zero_stage", "schedule", "chunks",      "recompute", "sequence_parallel",
                    "replicas",      "tau",        "delayed",  "compression", "secondary", "kept_scores",
                    "trainer",       "seconds"});
    plan::measured_step s{
        model_of(o.get<std::string>("model")), {}, o.get<double>("seconds", 0), o.get<bool>("kept_scores", false)};
    if (s.seconds < 0) { throw bad_input(fmt::format("{}: a step of {} seconds", where, s.seconds)); }
    s.model.keeps = keeping_of(o.get<std::string>("trainer", "megatron"), where);
    plan::job& j = s.how;
    j.tensor = o.get<int>("tp", 1);
    j.pipeline = o.get<int>("pp", 1);
    j.data = o.get<int>("dp", 1);
    j.sequence = o.get<int>("sp", 1);
    j.micro_batch = o.get<std::int64_t>("micro_batch");
    j.micro_batches = o.get<std::int64_t>("micro_batches", 1);
    j.zero_stage = o.get<int>("zero_stage", 0);
    j.schedule = schedule_named(o.get<std::string>("schedule", "1f1b"), where);
    j.chunks = o.get<int>("chunks", 1);
    j.recompute = recomputation_named(o.get<std::string>("recompute", "selective"), where);
    j.sequence_parallel = o.get<bool>("sequence_parallel", false);
    j.replicas = o.get<int>("replicas", 1);
    j.tau = o.get<int>("tau", 0);
    j.delayed = o.get<bool>("delayed", false);
    j.compression = o.get<double>("compression", 1);
    j.secondary = o.get<int>("secondary", 0);
    try {
        plan::validate(s.model, j);
    } catch (const tutti::usage_error& e) { throw bad_input(fmt::format("{}: {}", where, e.what())); }
    return s;
}
[[nodiscard]] inline std::vector<plan::measured_step> steps_of(const std::string& path) {
    std::vector<plan::measured_step> steps;
    const json file = read_json(path);
    object(file, path, {"steps"}).each("steps", [&](const json& s, const std::string& where) {
        steps.push_back(step_of(s, where));
    });
    if (steps.empty()) { throw bad_input(fmt::format("{}: no 'steps'", path)); }
    return steps;
}

inline void read_link(const object& o, const char* key, tutti::comm::link& into, plan::machine_evidence& known) {
    if (!o.has(key)) { return; }
    const object l(o.at(key), o.where() + ": " + key, {"latency_seconds", "bytes_per_second"});
    l.positive("latency_seconds", into.latency_seconds);
    l.positive("bytes_per_second", into.bytes_per_second);
    if (l.has("latency_seconds")) { known.latencies = plan::evidence::given; }
    if (l.has("bytes_per_second")) { known.links = plan::evidence::given; }
}

/// For --help.
inline constexpr const char* machine_help =
    "frontier, dgx-a100, hgx-h100, hgx-h200, or a JSON file: its figures, and products, collectives or steps that were "
    "measured on it";

/// A --machine: a published one, or a file's figures, those of a published one it is like, and what was measured on it:
/// products and collectives, from which launches and efficiencies of products and of links are fitted, or whole steps,
/// which fit all three efficiencies. `name` becomes what a file's machine is called, and outlives what is returned.
[[nodiscard]] inline plan::machine machine_of(const std::string& path, std::string& name) {
    if (!path.ends_with(".json")) { return plan::machine_named(path); }
    const json file = read_json(path);
    const object o(file, path,
                   {"name", "like", "flops", "memory_bytes", "memory_bandwidth", "ranks_per_node", "inside", "between",
                    "host_bandwidth", "product_efficiency", "memory_efficiency", "link_efficiency", "launch_seconds",
                    "interference", "processors", "products", "collectives", "steps"});
    plan::machine m;
    if (o.has("like")) {
        m = plan::machine_named(o.get<std::string>("like"));
    } else {
        for (const char* const key :
             {"flops", "memory_bytes", "memory_bandwidth", "ranks_per_node", "inside", "between"}) {
            if (!o.has(key)) {
                throw bad_input(fmt::format("{}: neither '{}' nor 'like', which names a published machine", path, key));
            }
        }
        m.inside.latency_seconds = plan::dgx_a100.inside.latency_seconds;  // assumed, as those of all machines here
        m.between.latency_seconds = plan::dgx_a100.between.latency_seconds;
    }
    name = o.get<std::string>("name", path);
    m.name = name;
    const auto figure = [&o](const char* key, double& into, plan::evidence& known, bool is_share = false) {
        o.positive(key, into, is_share);
        if (o.has(key)) { known = plan::evidence::given; }
    };
    figure("flops", m.flops, m.known.flops);
    figure("memory_bytes", m.memory_bytes, m.known.memory);
    figure("memory_bandwidth", m.memory_bandwidth, m.known.memory);
    m.ranks_per_node = o.get<int>("ranks_per_node", m.ranks_per_node);
    if (m.ranks_per_node < 1) { throw bad_input(fmt::format("{}: {} ranks a node", path, m.ranks_per_node)); }
    if (o.has("ranks_per_node")) { m.known.links = plan::evidence::given; }
    read_link(o, "inside", m.inside, m.known);
    read_link(o, "between", m.between, m.known);
    figure("host_bandwidth", m.host_bandwidth, m.known.host);
    figure("product_efficiency", m.product_efficiency, m.known.product_efficiency, true);
    figure("memory_efficiency", m.memory_efficiency, m.known.memory_efficiency);
    figure("link_efficiency", m.link_efficiency, m.known.link_efficiency, true);
    figure("launch_seconds", m.launch_seconds, m.known.launch);
    m.interference = o.get<double>("interference", m.interference);
    if (m.interference < 0) { throw bad_input(fmt::format("{}: interference {}", path, m.interference)); }
    if (o.has("interference")) { m.known.interference = plan::evidence::given; }
    if (o.has("processors")) {
        const int processors = o.get<int>("processors");
        if (processors < 1) { throw bad_input(fmt::format("{}: {} processors", path, processors)); }
        m.wave = plan::detail::wave_of(processors);
        m.known.wave = plan::evidence::given;
    }

    std::vector<plan::measured_product> products;
    o.each("products", [&](const json& p, const std::string& where) {
        const object v(p, where, {"m", "n", "k", "seconds"});
        products.push_back({v.get<double>("m"), v.get<double>("n"), v.get<double>("k"), v.get<double>("seconds")});
    });
    std::vector<plan::measured_collective> collectives;
    o.each("collectives", [&](const json& c, const std::string& where) {
        using enum tutti::comm::collective;
        const object v(c, where, {"kind", "ranks", "stride", "bytes", "seconds"});
        collectives.push_back({value_named(v.get<std::string>("kind"), {all_reduce, all_gather, reduce_scatter}, where),
                               v.get<int>("ranks"), v.get<int>("stride", 1), v.get<double>("bytes"),
                               v.get<double>("seconds")});
    });
    std::vector<plan::measured_step> steps;
    o.each("steps", [&](const json& s, const std::string& where) { steps.push_back(step_of(s, where)); });
    try {
        plan::validate(m);
        if (!products.empty()) { m = calibrated(m, std::span<const plan::measured_product>(products)); }
        if (!collectives.empty()) { m = calibrated(m, std::span<const plan::measured_collective>(collectives)); }
        if (!steps.empty()) { m = calibrated(m, std::span<const plan::measured_step>(steps)); }
    } catch (const tutti::usage_error& e) { throw bad_input(fmt::format("{}: {}", path, e.what())); }
    return m;
}

}  // namespace plan_a_job
