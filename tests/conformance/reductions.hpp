// Conformance of all_reduce, reduce, reduce_scatter and reduce_scatter_v for one element type.
// Needs conformance/suite. Data whose result is exact is compared by bits everywhere; random floats by bits where the
// backend promises the rank order, by the error bound of the exact sum elsewhere.
#pragma once

#include <conformance/suite.hpp>  // backend, helpers

namespace tutti::test {

/// Inputs of all ranks and what must come out.
template <element T> struct reduction_case {
    rows<T> in;
    std::vector<T> want;
    op_kind op;
    bool by_bits;

    [[nodiscard]] std::size_t count() const { return want.size(); }

    /// Elements [first, first + got.size()) of the result.
    void judge(guarded<T>& got, std::size_t first, std::string_view what) const {
        const std::vector<T> part(want.begin() + static_cast<std::ptrdiff_t>(first),
                                  want.begin() + static_cast<std::ptrdiff_t>(first + got.all().size()));
        if (by_bits) { return expect_same(got, part, what); }
        expect(got.intact(), "{}: wrote outside of its output", what);
        for (std::size_t i = 0; i < part.size(); ++i) {
            const bounded b = summed_exactly(op, in, first + i, true);
            const auto value = static_cast<long double>(static_cast<accumulator_t<T>>(got.all()[i]));
            expect(std::fabs(value - b.value) <= b.error, "{}: element {} is {}, exact {}, bound {}", what, first + i,
                   value, b.value, b.error);
        }
    }
};

/// Whole numbers: exact in every order. Integers are random over their whole range, since wrapping is exact as well.
template <element T> reduction_case<T> exact_case(op_kind op, std::size_t ranks, std::size_t count) {
    reduction_case<T> k{rows<T>(ranks, std::vector<T>(count)), {}, op, true};
    for (std::size_t r = 0; r < ranks; ++r) {
        for (std::size_t i = 0; i < count; ++i) {
            k.in[r][i] = std::is_integral_v<T> ? random_element<T>(r + 1, i) : small_element<T>(op, r, i);
        }
    }
    k.want = reduced_in_rank_order(op, k.in);
    return k;
}
template <element T> reduction_case<T> random_case(op_kind op, std::size_t ranks, std::size_t count) {
    reduction_case<T> k{rows<T>(ranks, std::vector<T>(count)), {}, op, true};
    for (std::size_t r = 0; r < ranks; ++r) {
        for (std::size_t i = 0; i < count; ++i) { k.in[r][i] = random_element<T>(r + 1, i); }
    }
    k.want = reduced_in_rank_order(op, k.in);
    k.by_bits = backend::deterministic || op == op_kind::max || op == op_kind::min;
    return k;
}

template <element T, class Comm, class Op> void all_reduce_conforms(Comm& c, const reduction_case<T>& k, Op op) {
    const std::string what = fmt::format("all_reduce {} of {} {}", name_of(Op::kind), k.count(), name_of(dtype_of<T>));
    std::vector<T> in = k.in[me_of(c)];
    guarded<T> out(k.count());
    c.all_reduce(in, out.all(), op);
    k.judge(out, 0, what);
    expect_same(in, k.in[me_of(c)], what + ", the input");
    expect_equal_on_all(c, out.all(), what);

    guarded<T> both(in);
    c.all_reduce(both.all(), both.all(), op);
    k.judge(both, 0, what + " in place");

    // In place is each rank's own choice.
    guarded<T> own(in), apart(k.count());
    const bool in_place = c.rank() % 2 == 0;
    c.all_reduce(in_place ? view<const T>(own.all()) : view<const T>(in), in_place ? own.all() : apart.all(), op);
    k.judge(in_place ? own : apart, 0, what + " in place on every other rank");
}

template <element T, class Comm, class Op> void reduce_conforms(Comm& c, const reduction_case<T>& k, Op op) {
    const std::vector<T> in = k.in[me_of(c)];
    for (int root = 0; root < c.size(); ++root) {
        const std::string what =
            fmt::format("reduce {} of {} {} to rank {}", name_of(Op::kind), k.count(), name_of(dtype_of<T>), root);
        guarded<T> out(k.count());
        c.reduce(in, out.all(), op, root);
        if (c.rank() == root) {
            k.judge(out, 0, what);
        } else {
            expect(out.untouched(), "{}: rank {} was given an output", what, c.rank());
        }

        guarded<T> both(in);
        if (c.rank() == root) {
            c.reduce(both.all(), both.all(), op, root);
        } else {
            c.reduce(in, view<T>(), op, root);
        }  // elsewhere no output is needed
        if (c.rank() == root) { k.judge(both, 0, what + " in place"); }
    }
}

template <element T, class Comm, class Op> void reduce_scatter_conforms(Comm& c, const reduction_case<T>& k, Op op) {
    const std::size_t part = k.count() / ranks_of(c);
    const std::string what = fmt::format("reduce_scatter {} of {} {}", name_of(Op::kind), part, name_of(dtype_of<T>));
    std::vector<T> in = k.in[me_of(c)];
    guarded<T> out(part);
    c.reduce_scatter(in, out.all(), op);
    k.judge(out, me_of(c) * part, what);
    expect_same(in, k.in[me_of(c)], what + ", the input");

    guarded<T> both(in);
    const view<T> mine = both.sub(me_of(c) * part, part);
    c.reduce_scatter(both.all(), mine, op);
    guarded<T> result(std::vector<T>(mine.begin(), mine.end()));
    k.judge(result, me_of(c) * part, what + " in place");
    expect(both.intact(), "{} in place: wrote outside", what);
}

template <element T, class Comm, class Op>
void reduce_scatter_v_conforms(Comm& c, const reduction_case<T>& k, const std::vector<std::size_t>& table, Op op) {
    const std::string what =
        fmt::format("reduce_scatter_v {} of {} {}", name_of(Op::kind), k.count(), name_of(dtype_of<T>));
    const std::size_t first = offset(table, me_of(c));
    const std::size_t count = table[me_of(c)];
    const std::vector<T> in = k.in[me_of(c)];
    guarded<T> out(count);
    c.reduce_scatter_v(in, out.all(), table, op);
    k.judge(out, first, what);

    guarded<T> both(in);
    const view<T> mine = both.sub(first, count);
    c.reduce_scatter_v(both.all(), mine, table, op);
    guarded<T> result(std::vector<T>(mine.begin(), mine.end()));
    k.judge(result, first, what + " in place");
    expect(both.intact(), "{} in place: wrote outside", what);
}

/// Cases of one type and operator: exact data, and random data for floats.
template <element T, class Check> void for_cases(op_kind op, std::size_t ranks, std::size_t count, Check check) {
    check(exact_case<T>(op, ranks, count));
    if constexpr (!std::is_integral_v<T>) {
        // Products of random numbers have no bound worth checking in a free order: the exact case judges them.
        if (backend::deterministic || op != op_kind::product) { check(random_case<T>(op, ranks, count)); }
    }
}

template <element T> void reductions_conform() {
    for_ranks([](auto& c) {
        for_operators<T>([&]<class Op>(Op op) {
            for (const std::size_t count : edge_counts<T>()) {
                for_cases<T>(Op::kind, ranks_of(c), count, [&](const auto& k) { all_reduce_conforms(c, k, op); });
            }
            for (const std::size_t count : {0u, 1u, 65u, 5000u}) {
                for_cases<T>(Op::kind, ranks_of(c), count, [&](const auto& k) { reduce_conforms(c, k, op); });
            }
            for (const std::size_t part : {0u, 1u, 7u, 64u, 1025u}) {
                for_cases<T>(Op::kind, ranks_of(c), part * ranks_of(c),
                             [&](const auto& k) { reduce_scatter_conforms(c, k, op); });
            }
            for (const auto& table : uneven_tables(ranks_of(c))) {
                for_cases<T>(Op::kind, ranks_of(c), total(table),
                             [&](const auto& k) { reduce_scatter_v_conforms(c, k, table, op); });
            }
        });
    });
}

template <element T> void all_reductions_conform() {
    if constexpr (!backend::communicator::reduces(dtype_of<T>)) {
        static_assert(!comm::can_all_reduce<backend::communicator, T, sum>, "what a backend lacks it does not offer");
        return;
    } else {
        reductions_conform<T>();
    }
}

template <element T> void large_sums_conform() {
    for_ranks([](auto& c) {
        for (const std::size_t count : large_counts()) {
            for_cases<T>(op_kind::sum, ranks_of(c), count, [&](const auto& k) { all_reduce_conforms(c, k, sum{}); });
        }
        const std::size_t part = large_counts().back() / ranks_of(c);
        for_cases<T>(op_kind::sum, ranks_of(c), part * ranks_of(c),
                     [&](const auto& k) { reduce_scatter_conforms(c, k, sum{}); });
        for_cases<T>(op_kind::sum, ranks_of(c), 65537, [&](const auto& k) { reduce_conforms(c, k, sum{}); });
    });
}

/// Outputs of all ranks that no cache holds, where backends may write past it. Not for many ranks: it takes memory.
inline void sums_beyond_caches_conform() {
    for_ranks([](auto& c) {
        if (!full_speed || c.size() > 3) { return; }
        const std::size_t count = (std::size_t{64} << 20) / sizeof(float) / ranks_of(c) + 13;
        const auto value = [](std::size_t rank, std::size_t i) { return static_cast<float>((i * 5 + rank * 3) % 11); };
        const auto judge = [&](guarded<float>& out, std::string_view what) {
            expect(out.intact(), "{}: wrote outside of its output", what);
            const view<float> v = out.all();
            for (std::size_t i = 0; i < count; ++i) {
                float want = 0;
                for (std::size_t r = 0; r < ranks_of(c); ++r) { want += value(r, i); }
                expect(v[i] == want, "{}: element {} is {}, not {}", what, i, v[i], want);
            }
        };
        std::vector<float> in(count);
        for (std::size_t i = 0; i < count; ++i) { in[i] = value(me_of(c), i); }
        guarded<float> out(count), own(in), again(count);
        c.all_reduce(in, out.all(), sum{});
        judge(out, "large all_reduce");
        const bool in_place = c.rank() == 0;
        c.all_reduce(in_place ? view<const float>(own.all()) : view<const float>(in),
                     in_place ? own.all() : again.all(), sum{});
        judge(in_place ? own : again, "large all_reduce in place on rank 0");
        guarded<float> result(count);
        c.reduce(in, result.all(), sum{}, c.size() - 1);
        if (c.rank() == c.size() - 1) { judge(result, "large reduce"); }
    });
}

/// A NaN that one rank brings reaches every rank, whatever the operator.
template <element T> void nan_reaches_all() {
    for_ranks([](auto& c) {
        const T nan = static_cast<T>(std::numeric_limits<float>::quiet_NaN());
        for_operators<T>([&]<class Op>(Op op) {
            if (!backend::keeps_nan && (Op::kind == op_kind::max || Op::kind == op_kind::min)) { return; }
            for (const std::size_t count : {std::size_t{3}, std::size_t{6000}}) {
                for (std::size_t from = 0; from < ranks_of(c); ++from) {
                    std::vector<T> v(count, static_cast<T>(1.0f));
                    if (me_of(c) == from) { v[count / 2] = nan; }
                    c.all_reduce(v, view<T>(v), op);
                    expect(std::isnan(static_cast<float>(v[count / 2])), "all_reduce {}: the NaN of rank {} is lost",
                           name_of(Op::kind), from);
                    expect(static_cast<float>(v[0]) > 0, "all_reduce {}: a NaN spread to its neighbors",
                           name_of(Op::kind));
                }
            }
        });
    });
}

}  // namespace tutti::test
