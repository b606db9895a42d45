// engine: attention of a batch of sequences of all lengths, between layers that see each token by itself.
// Needs sequence/ring_attention, sequence/remap and a partitioner; what else travels with tokens it says by pieces.
// Source: the parts and their order are those of Zeppelin (Chen et al., EuroSys 2026, arXiv 2509.21841).
#pragma once

#include <concepts>     // policies
#include <cstddef>      // size_t
#include <cstdint>      // tokens
#include <optional>     // topology, remap
#include <span>         // lengths
#include <string>       // messages
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // pieces

#include <tutti/comm/communicator.hpp>           // can_exchange, can_gather_control
#include <tutti/comm/topology.hpp>               // topology
#include <tutti/core/buffer.hpp>                 // what a layer keeps
#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/state.hpp>                  // hash_bytes
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/core/view.hpp>                   // views
#include <tutti/sequence/attention_options.hpp>  // options of attention
#include <tutti/sequence/block_attention.hpp>    // kernels
#include <tutti/sequence/host_attention.hpp>     // the host's kernel
#include <tutti/sequence/placement.hpp>          // partitioner
#include <tutti/sequence/remap.hpp>              // remap
#include <tutti/sequence/ring_attention.hpp>     // ring_attention
#include <tutti/sequence/token_view.hpp>         // parts of a row

namespace tutti::sequence {

/// Where rows are outside of attention: evenly spread over the ranks.
struct remapped {
    static constexpr bool moves_tokens = true;
};
/// Where rows are outside of attention: where attention has them.
struct in_place {
    static constexpr bool moves_tokens = false;
};
/// One of both, said when the engine is made.
struct chosen_layout {
    bool moves_tokens = true;
};

/// The same on all ranks but for attention.timeout and attention.trace.
template <partitioner Partition> struct engine_options {
    Partition partition{};
    std::optional<comm::topology> machines{};  ///< not given: all ranks on one node
    std::int64_t capacity = no_capacity;       ///< tokens that a rank holds in attention
    attention_options attention{};
};

/// What all ranks send for one forward and one backward pass of one layer.
struct engine_traffic {
    std::uint64_t inside = 0;        ///< bytes between ranks of a node
    std::uint64_t between = 0;       ///< bytes between nodes
    std::uint64_t moved_tokens = 0;  ///< whose rows change ranks on the way to attention, and back
    friend constexpr bool operator==(const engine_traffic&, const engine_traffic&) = default;
};

/// Attention of whole batches: the partitioner places each, rows move to where attention wants them and back, and rings
/// attend.
///
/// Semantics    plan(lengths): collective, once a batch, with the same lengths on all ranks. It says what this rank's
///              rows are (pieces, sequences, positions): the rest of the model works on these, with embeddings of
///              `positions` and loss weights by `sequences`. forward and backward: all ranks, in the same order, as
///              often as there are layers, each with a `memory` of its own from forward to backward. Batches may be in
///              flight together: before its backward a batch is planned again, which gives the same rows.
///   connect    see comm/connect.hpp: for plans to come, whoever talks to whom in them. Collective, at any time.
///   loss_scale what a rank multiplies the sum of its tokens' losses by, so that the sum over ranks is the mean over all
///              valid tokens, not a mean of means. Gradients of that are summed over ranks too; a strategy that averages
///              them wants its loss, or its gradient, times the number of ranks. Collective.
/// Shapes       rows() rows: qkv and d_qkv of [query heads | kv heads | kv heads] * width numbers, out and d_out of query
///              heads * width. A rank without rows passes empty views, and takes part.
/// Aliasing     what is written overlaps nothing else. qkv and out stay as they are until backward has read them.
/// Determinism  as Block, by ring_attention: of data, lengths and options. Route and Layout change no bit of out.
/// Cost         as ring_attention; with `remapped` also four exchanges of remap, of qkv and out forward and of both
///              gradients backward; none for batches that are even as they are placed. A layer's memory: a logarithm for
///              each query head and token in attention; where tokens move also 2 (query heads + kv heads) * width
///              elements a token, and the engine has as much once.
/// Errors       mismatch_error from plan when lengths or options differ; usage_error from plan, on all ranks, when the
///              partitioner refuses; usage_error from forward and backward, before anything moved, for shapes that do
///              not fit, an output that overlaps its input, or the memory of another plan: those abort the
///              communicator, since other ranks would wait.
template <comm::can_exchange C, partitioner Partition, class Route = direct_exchange, class Layout = remapped,
          block_attention Block = typename default_attention<queue_of<C>>::type>
requires(round_exchange<Route, C> && (std::same_as<Layout, remapped> || std::same_as<Layout, in_place> ||
                                      std::same_as<Layout, chosen_layout>)) class engine {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using T = typename Block::element_type;
    using P = accumulator_t<T>;
    using rings = ring_attention<C, Block, Route>;

public:
    using element_type = T;
    using queue_type = Q;
    using options = engine_options<Partition>;

    /// What a layer keeps for backward. Grows only.
    class memory {
        friend engine;
        explicit memory(const Q& q) : moved_qkv(q, 0), moved_out(q, 0), log_sum_exp(q, 0) {}
        buffer<T, Q> moved_qkv, moved_out;  // where attention has them, if that is elsewhere
        buffer<P, Q> log_sum_exp;
        view<const T, M> qkv, out;
        std::optional<std::uint64_t> plan;
    };
    [[nodiscard]] memory make_memory() { return memory(comm().queue()); }

    /// Errors  usage_error: the topology has another number of ranks, or nodes that cluster_of refuses.
    engine(C own, attention_heads heads, options o = {}, Block block = {}, Layout layout = {})
        : options_(std::move(o))
        , layout_(layout)
        , topology_(options_.machines ? *options_.machines : comm::topology::one_node(own.size()))
        , machines_(cluster_of(topology_))
        , rings_(std::move(own), heads, options_.attention, std::move(block), made_for(topology_))
        , moved_d_out_(comm().queue(), 0)
        , moved_d_qkv_(comm().queue(), 0) {
        if (machines_.ranks() != comm().size()) {
            throw usage_error(formatted("engine: a topology of {} ranks, '{}' has {}", machines_.ranks(), comm().name(),
                                        comm().size()));
        }
    }

    void plan(std::span<const std::int64_t> lengths) {
        moves_.reset();
        planned_.reset();
        if constexpr (std::same_as<Layout, chosen_layout>) {
            comm().agree(layout_.moves_tokens ? 1 : 0, "the layout of the engine");
        }
        where_ = placed(lengths);
        rings_.plan(where_);
        const auto me = static_cast<std::size_t>(comm().rank());
        own_ = where_.pieces[me];
        if (layout_.moves_tokens) {
            moves_.emplace(where_);
            own_ = moves_->balanced_pieces(where_)[me];
        }
        sequences_.clear();
        positions_.clear();
        for (const piece& p : own_) {
            sequences_.insert(sequences_.end(), static_cast<std::size_t>(p.size()), p.sequence);
            for (std::int64_t t = p.begin; t < p.end; ++t) { positions_.push_back(t); }
        }
        planned_ = hash_of(where_);
    }

    void connect() { rings_.connect(); }

    /// Of the batch planned last, the same on all ranks.
    [[nodiscard]] const placement& placed() const noexcept { return where_; }
    /// This rank's rows, in their order.
    [[nodiscard]] std::span<const piece> pieces() const noexcept { return own_; }
    [[nodiscard]] std::size_t rows() const noexcept { return positions_.size(); }
    /// Of each row: its sequence, and its position in it.
    [[nodiscard]] std::span<const int> sequences() const noexcept { return sequences_; }
    [[nodiscard]] std::span<const std::int64_t> positions() const noexcept { return positions_; }
    [[nodiscard]] attention_heads heads() const noexcept { return rings_.heads(); }
    [[nodiscard]] const Route& exchange() const noexcept { return rings_.exchange(); }

    /// 1 / (valid tokens of all ranks), 0 where there are none.
    [[nodiscard]] double loss_scale(std::uint64_t own_valid_tokens) requires comm::can_gather_control<C> {
        std::uint64_t all = 0;
        for (const auto& record : comm().gather_control({own_valid_tokens, 0, 0, 0})) { all += record[0]; }
        return all == 0 ? 0 : 1 / static_cast<double>(all);
    }

    /// Of the batch planned last. Exact: a message that is spread counts on each of its hops.
    [[nodiscard]] engine_traffic traffic() const {
        engine_traffic t;
        const auto send = [&](int from, int to, std::uint64_t bytes) {
            (machines_.node_of(from) == machines_.node_of(to) ? t.inside : t.between) += bytes;
        };
        if constexpr (requires { exchange().routes(); }) {
            for (const auto& call : exchange().routes()) {
                t.inside += call.bytes().inside;
                t.between += call.bytes().between;
            }
        } else {
            for (const auto& call : rings::calls_of(where_, heads())) {
                for (const flow& f : call) { send(f.source, f.destination, f.bytes); }
            }
        }
        if (moves()) {
            for (const token_move& m : moves_->moves()) {
                const auto tokens = static_cast<std::uint64_t>(m.tokens);
                send(m.from, m.to, 2 * tokens * (qkv_width() + out_width()) * sizeof(T));
                t.moved_tokens += tokens;
            }
        }
        return t;
    }

    void forward(view<const T, M> qkv, view<T, M> out, memory& kept) {
        expect("qkv", qkv, qkv_width());
        expect("out", view<const T, M>(out), out_width());
        expect_apart("qkv", qkv, "out", out);
        kept.qkv = to_attention(qkv, kept.moved_qkv, qkv_width());
        const view<T, M> there = room_for(out, kept.moved_out, out_width());
        kept.out = there;
        reserve(kept.log_sum_exp, rings_.tokens() * heads().query);
        const auto in = parts_of(kept.qkv);
        rings_.forward(in.query, in.key, in.value, heads_of(there), sums(kept));
        from_attention(there, out, out_width());
        kept.plan = planned_;
    }

    void backward(view<const T, M> d_out, view<T, M> d_qkv, const memory& kept) {
        if (!planned_ || kept.plan != planned_) {
            refuse("engine: backward of a batch whose forward was not made by the plan that holds");
        }
        expect("d_out", d_out, out_width());
        expect("d_qkv", view<const T, M>(d_qkv), qkv_width());
        expect_apart("d_out", d_out, "d_qkv", d_qkv);
        expect_apart("qkv", kept.qkv, "d_qkv", d_qkv);  // without moves they are the forward's own
        expect_apart("out", kept.out, "d_qkv", d_qkv);
        const view<const T, M> of_out = to_attention(d_out, moved_d_out_, out_width());
        const view<T, M> there = room_for(d_qkv, moved_d_qkv_, qkv_width());
        const token_view<const P, M> logarithms = sums(kept);
        const auto in = parts_of(kept.qkv);
        const auto d_in = parts_of(there);
        rings_.backward(heads_of(of_out), in.query, in.key, in.value, heads_of(kept.out), logarithms, d_in.query,
                        d_in.key, d_in.value);
        from_attention(there, d_qkv, qkv_width());
    }

private:
    [[nodiscard]] C& comm() noexcept { return rings_.communicator(); }
    [[nodiscard]] static Route made_for(const comm::topology& machines) {
        if constexpr (std::constructible_from<Route, const comm::topology&>) {
            return Route(machines);
        } else {
            return Route();
        }
    }
    [[nodiscard]] std::size_t qkv_width() const noexcept { return packed_rows<T, M>::width(heads()); }
    [[nodiscard]] std::size_t out_width() const noexcept { return heads().query * heads().width; }
    /// Not where every rank already has what it should: that is so on all ranks, or on none.
    [[nodiscard]] bool moves() const noexcept { return moves_ && !moves_->moves().empty(); }

    // A rank that is refused says so where the others agree: they may have got other lengths, and would wait.
    [[nodiscard]] placement placed(std::span<const std::int64_t> lengths) {
        try {
            return options_.partition(lengths, machines_, options_.capacity);
        } catch (const usage_error& e) {
            const std::string_view why = e.what();
            comm().agree(hash_bytes(as_bytes(view<const char>(why.data(), why.size()))), "the plan of attention");
            throw;
        }
    }

    [[noreturn]] void refuse(const std::string& why) {
        comm().abort(why);
        throw usage_error(why);
    }
    void expect(std::string_view name, view<const T, M> given, std::size_t width) {
        if (!planned_) { refuse("engine: no batch is planned"); }
        if (given.size() != rows() * width) {
            refuse(formatted("engine: {} has {} elements, rank {} has {} rows of {}", name, given.size(), comm().rank(),
                             rows(), width));
        }
    }

    void expect_apart(std::string_view a, view<const T, M> read, std::string_view b, view<const T, M> written) {
        if (overlaps(read.data(), read.size_bytes(), written.data(), written.size_bytes())) {
            refuse(formatted("engine: {} and {} overlap", a, b));
        }
    }

    template <class U> void reserve(buffer<U, Q>& grows, std::size_t count) {
        if (grows.size() < count) {
            grows = buffer<U, Q>(comm().queue(), 0);  // the old one goes first: peaks are counted
            grows = buffer<U, Q>(comm().queue(), count);
        }
    }
    // Rows where attention has them: themselves, unless they move.
    [[nodiscard]] view<T, M> room_for(view<T, M> here, buffer<T, Q>& there, std::size_t width) {
        if (!moves()) { return here; }
        reserve(there, rings_.tokens() * width);
        return there.view().sub(0, rings_.tokens() * width);
    }
    [[nodiscard]] view<const T, M> to_attention(view<const T, M> here, buffer<T, Q>& there, std::size_t width) {
        if (!moves()) { return here; }
        const view<T, M> moved = room_for({}, there, width);
        const token_rows<M> kind[] = {rows_of(here, moved, width)};
        moves_->inverse(comm(), kind);
        return moved;
    }
    void from_attention(view<const T, M> there, view<T, M> here, std::size_t width) {
        if (!moves()) { return; }
        const token_rows<M> kind[] = {rows_of(there, here, width)};
        moves_->forward(comm(), kind);
    }

    // Rows in attention.
    template <class U> [[nodiscard]] packed_rows<U, M> parts_of(view<U, M> v) const {
        return {v, rings_.tokens(), heads()};
    }
    template <class U> [[nodiscard]] token_view<U, M> heads_of(view<U, M> v) const {
        return {v, rings_.tokens(), heads().query, heads().width};
    }
    [[nodiscard]] token_view<P, M> sums(const memory& kept) const {
        return numbers_by_head(kept.log_sum_exp.view().sub(0, rings_.tokens() * heads().query), rings_.tokens(),
                               heads().query);
    }

    options options_;
    Layout layout_;
    comm::topology topology_;
    cluster machines_;
    rings rings_;
    buffer<T, Q> moved_d_out_, moved_d_qkv_;
    placement where_;
    std::optional<remap> moves_;
    std::vector<piece> own_;
    std::vector<int> sequences_;
    std::vector<std::int64_t> positions_;
    std::optional<std::uint64_t> planned_;  // hash of the plan that holds
};

}  // namespace tutti::sequence
