// token_view: tokens x heads x width numbers with strides, the shape in which attention takes and gives its data; and
// packed_rows, the parts of rows that hold queries, keys and values side by side.
// Needs core/view.
#pragma once

#include <concepts>     // conversions
#include <cstddef>      // size_t
#include <type_traits>  // conversions that only add const

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted
#include <tutti/core/view.hpp>   // view

namespace tutti::sequence {

/// Heads of an attention. `query` is a multiple of `kv`: query head h attends to key and value head h / (query / kv).
struct attention_heads {
    std::size_t query = 1;
    std::size_t kv = 1;
    std::size_t width = 1;
    [[nodiscard]] constexpr std::size_t group() const noexcept { return query / kv; }
    friend constexpr bool operator==(const attention_heads&, const attention_heads&) = default;
};

/// `tokens` x `heads` x `width` numbers: element (t, h, c) is data[t * token_stride + h * head_stride + c].
///
/// Semantics  refers, like a view. A part of a packed row of queries, keys and values, [tokens][heads][width] and
///            [heads][tokens][width] are all token_views. Numbers of a head are next to each other.
/// Errors     usage_error from the constructor when the last element is outside of the view.
template <class T, memory M = host_memory> struct token_view {
    T* data = nullptr;
    std::size_t tokens = 0;
    std::size_t heads = 0;
    std::size_t width = 0;
    std::size_t token_stride = 0;
    std::size_t head_stride = 0;

    constexpr token_view() noexcept = default;
    token_view(view<T, M> all, std::size_t token_count, std::size_t head_count, std::size_t head_width,
               std::size_t stride_of_tokens, std::size_t stride_of_heads)
        : data(all.data())
        , tokens(token_count)
        , heads(head_count)
        , width(head_width)
        , token_stride(stride_of_tokens)
        , head_stride(stride_of_heads) {
        if (tokens == 0 || heads == 0 || width == 0) { return; }
        // By division: products could wrap around.
        std::size_t left = all.size();
        if (width <= left) {
            left -= width;
            if (token_stride == 0 || tokens - 1 <= left / token_stride) {
                left -= (tokens - 1) * token_stride;
                if (head_stride == 0 || heads - 1 <= left / head_stride) { return; }
            }
        }
        throw usage_error(formatted("token_view: {} tokens of {} heads of {}, {} and {} apart, do not fit into {} "
                                    "elements",
                                    tokens, heads, width, token_stride, head_stride, all.size()));
    }
    /// [tokens][heads][width], one behind the other.
    token_view(view<T, M> all, std::size_t token_count, std::size_t head_count, std::size_t head_width)
        : token_view(all, token_count, head_count, head_width, head_count * head_width, head_width) {}

    /// Adds const, never removes it.
    template <class U>
    requires(!std::same_as<U, T> &&
             std::is_convertible_v<U (*)[], T (*)[]>) constexpr token_view(const token_view<U, M>& other) noexcept
        : data(other.data)
        , tokens(other.tokens)
        , heads(other.heads)
        , width(other.width)
        , token_stride(other.token_stride)
        , head_stride(other.head_stride) {}

    /// Tokens [first, first + count), which the caller knows to be there.
    [[nodiscard]] constexpr token_view rows(std::size_t first, std::size_t count) const noexcept {
        token_view part = *this;
        part.tokens = count;
        if (count != 0 && data != nullptr) { part.data = data + first * token_stride; }
        return part;
    }
    /// Heads [first, first + count), which the caller knows to be there.
    [[nodiscard]] constexpr token_view some_heads(std::size_t first, std::size_t count) const noexcept {
        token_view part = *this;
        part.heads = count;
        if (count != 0 && data != nullptr) { part.data = data + first * head_stride; }
        return part;
    }
    [[nodiscard]] constexpr std::size_t size() const noexcept { return tokens * heads * width; }
    [[nodiscard]] constexpr bool empty() const noexcept { return size() == 0; }
    /// Of the first number of head h of token t.
    [[nodiscard]] constexpr T* at(std::size_t t, std::size_t h) const noexcept {
        return data + t * token_stride + h * head_stride;
    }
    template <class U> [[nodiscard]] constexpr bool same_shape(const token_view<U, M>& other) const noexcept {
        return tokens == other.tokens && heads == other.heads && width == other.width;
    }
};

/// One number for each head and token, head by head: the logarithms of the sums of a softmax.
template <class T, memory M>
[[nodiscard]] token_view<T, M> numbers_by_head(view<T, M> all, std::size_t tokens, std::size_t heads) {
    return token_view<T, M>(all, tokens, heads, 1, 1, tokens);
}

/// Queries, keys and values of tokens, of which each has a row of [query heads | kv heads | kv heads] * width numbers.
template <class T, memory M> struct packed_rows {
    token_view<T, M> query, key, value;

    packed_rows(view<T, M> all, std::size_t tokens, attention_heads h)
        : query(part(all, tokens, h, 0, h.query))
        , key(part(all, tokens, h, h.query, h.kv))
        , value(part(all, tokens, h, h.query + h.kv, h.kv)) {}

    /// Numbers of a row.
    [[nodiscard]] static constexpr std::size_t width(attention_heads h) noexcept {
        return (h.query + 2 * h.kv) * h.width;
    }

private:
    static token_view<T, M> part(view<T, M> all, std::size_t tokens, attention_heads h, std::size_t first,
                                 std::size_t count) {
        const std::size_t skipped = tokens == 0 ? 0 : first * h.width;
        return {all.sub(skipped, all.size() - skipped), tokens, count, h.width, width(h), h.width};
    }
};

}  // namespace tutti::sequence
