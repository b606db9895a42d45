// view<T, Memory>: the only way data is passed around: contiguous, non-owning, typed by where it lives.
// Needs core/memory. Like std::span, except that a device or phantom view cannot be dereferenced by mistake.
#pragma once

#include <cstddef>      // size_t
#include <functional>   // std::less: total order of unrelated pointers
#include <ranges>       // contiguous_range: what a host view can be made from
#include <type_traits>  // conversions that only add const

#include <tutti/core/error.hpp>   // usage_error from sub()
#include <tutti/core/memory.hpp>  // host_memory
#include <tutti/core/text.hpp>    // formatted

namespace tutti {

/// A contiguous run of `size()` elements of T in memory M. Copying a view copies no data.
///
/// Semantics  the referenced storage must outlive every queued use of it; buffers released through their queue do.
/// Aliasing   `overlaps` tells; operations state which overlaps they accept.
/// Cost       two words.
/// Errors     `sub` outside the view throws usage_error.
template <class T, memory M = host_memory> class view {
    T* data_ = nullptr;
    std::size_t size_ = 0;

public:
    using element_type = T;
    using value_type = std::remove_cv_t<T>;
    using memory_type = M;

    constexpr view() noexcept = default;
    constexpr view(T* data, std::size_t size) noexcept : data_(data), size_(size) {}

    /// Adds const, never removes it.
    template <class U>
    requires(!std::same_as<U, T> && std::is_convertible_v<U (*)[], T (*)[]>) constexpr view(view<U, M> other) noexcept
        : data_(other.data()), size_(other.size()) {}

    /// From a container the host can read: std::vector, std::array, std::span. Temporaries that own their elements are
    /// rejected, their storage would be gone before the queue gets to it.
    template <class R>
    requires(M::host_accessible&& std::ranges::contiguous_range<R>&& std::ranges::sized_range<R> &&
             (std::is_lvalue_reference_v<R> ||
              std::ranges::borrowed_range<R>)&&!std::same_as<std::remove_cvref_t<R>, view> &&
             std::is_convertible_v<std::remove_reference_t<std::ranges::range_reference_t<R>> (*)[],
                                   T (*)[]>) constexpr view(R&& range) noexcept
        : data_(std::ranges::data(range)), size_(std::ranges::size(range)) {}

    [[nodiscard]] constexpr T* data() const noexcept { return data_; }
    [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }
    [[nodiscard]] constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
    [[nodiscard]] constexpr bool empty() const noexcept { return size_ == 0; }

    [[nodiscard]] constexpr T& operator[](std::size_t i) const noexcept requires(M::host_accessible) {
        return data_[i];
    }
    [[nodiscard]] constexpr T* begin() const noexcept requires(M::host_accessible) { return data_; }
    [[nodiscard]] constexpr T* end() const noexcept requires(M::host_accessible) { return data_ + size_; }

    /// Elements [first, first + count).
    [[nodiscard]] constexpr view sub(std::size_t first, std::size_t count) const {
        if (first > size_ || count > size_ - first) {
            throw usage_error(formatted("view: sub({}, {}) leaves a view of {} elements", first, count, size_));
        }
        // A phantom view has no address to move.
        return {data_ == nullptr ? nullptr : data_ + first, count};
    }
};

// GCC 12 needs the host default spelled out for class template argument deduction.
template <class T> view(T*, std::size_t) -> view<T, host_memory>;
template <std::ranges::contiguous_range R>
view(R&&) -> view<std::remove_reference_t<std::ranges::range_reference_t<R>>, host_memory>;

/// The bytes of a view.
template <class T, memory M> [[nodiscard]] auto as_bytes(view<T, M> v) noexcept {
    using byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
    return view<byte, M>(reinterpret_cast<byte*>(v.data()), v.size_bytes());
}

/// True when two byte ranges share at least one byte. Empty ranges and phantom views (no address) share none.
[[nodiscard]] inline bool overlaps(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) noexcept {
    if (a == nullptr || b == nullptr || a_bytes == 0 || b_bytes == 0) { return false; }
    const auto* const p = static_cast<const std::byte*>(a);
    const auto* const q = static_cast<const std::byte*>(b);
    const std::less<const std::byte*> before;
    return before(p, q + b_bytes) && before(q, p + a_bytes);
}

}  // namespace tutti

template <class T, tutti::memory M> inline constexpr bool std::ranges::enable_borrowed_range<tutti::view<T, M>> = true;
