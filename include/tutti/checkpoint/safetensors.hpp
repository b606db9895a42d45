// safetensors: named tensors in one file, as others read and write them: for weights that come or go.
// Needs checkpoint/detail/{files,safetensors_header}, nlohmann-json. Host memory. In no umbrella: who exchanges weights
// includes it, and nobody else compiles a JSON parser.
#pragma once

#include <algorithm>    // stable_sort, min, find_if
#include <cstddef>      // size_t
#include <cstdint>      // offsets
#include <functional>   // where elements come from
#include <iterator>     // begin, end
#include <map>          // metadata
#include <numeric>      // iota
#include <span>         // lists
#include <string>       // names, paths
#include <string_view>  // names
#include <type_traits>  // is_same
#include <utility>      // move
#include <vector>       // shapes

#include <tutti/checkpoint/detail/codec.hpp>               // decoder
#include <tutti/checkpoint/detail/files.hpp>               // input, files
#include <tutti/checkpoint/detail/layout.hpp>              // shape_text
#include <tutti/checkpoint/detail/safetensors_header.hpp>  // the header
#include <tutti/checkpoint/error.hpp>                      // damaged_error
#include <tutti/core/element.hpp>                          // dtype
#include <tutti/core/error.hpp>                            // usage_error, backend_error
#include <tutti/core/state.hpp>                            // state_entry
#include <tutti/core/text.hpp>                             // formatted
#include <tutti/core/view.hpp>                             // view

namespace tutti::checkpoint {

/// A safetensors file that is read: its checked header, and its tensors on demand.
///
/// Semantics  the constructor takes a file only as a whole: every byte behind the header belongs to exactly one tensor,
///            each of a size that its type and shape need, and no name is there twice. Tensors of types that this library
///            does not compute with (BOOL, F8_E4M3, ...) are listed, and read as bytes. Reading changes nothing: several
///            threads may share a file.
/// Memory     a few times the header, which the file must hold in full before any of it is read: no number of the file
///            is trusted, and nothing that is allocated is larger than the file, or than 64 KiB. For that, a name or a
///            text of the header is at most a quarter of the file long, or 16 KiB. Reads that convert take 64 Ki
///            elements more.
/// Errors     damaged_error names the file and what is wrong with it, down to the tensor, also when it has become
///            shorter since; backend_error with errno when the file system refuses; usage_error: no such tensor, or
///            not these elements of this type.
class safetensors_file {
    static constexpr std::size_t part = std::size_t{1} << 16;  // elements converted at a time: they stay in cache

    detail::input file_;
    detail::safetensors_header header_;
    std::uint64_t data_ = 0;  // where the header ends

public:
    explicit safetensors_file(std::string path) : file_(std::move(path)) {
        std::uint64_t length = 0;
        if (file_.bytes() < sizeof length) { refuse(formatted("{} bytes are too few for a header", file_.bytes())); }
        std::vector<std::byte> start(sizeof length);
        file_.read(0, start);
        length = detail::decoder(start, "the header").number<std::uint64_t>();
        const std::uint64_t behind = file_.bytes() - sizeof length;
        if (length > behind || length > detail::longest_safetensors_header) {
            refuse(formatted("a header of {} bytes is more than the file holds ({}) or the format allows ({})", length,
                             behind, detail::longest_safetensors_header));
        }
        std::string text(static_cast<std::size_t>(length), '\0');
        file_.read(sizeof length, std::as_writable_bytes(std::span(text)));
        data_ = sizeof length + length;
        try {
            header_ = detail::decoded_safetensors(text, behind - length);
        } catch (const damaged_error& e) { refuse(e.what()); }
    }

    [[nodiscard]] const std::string& path() const noexcept { return file_.path(); }
    [[nodiscard]] const std::map<std::string, safetensors_tensor, std::less<>>& tensors() const noexcept {
        return header_.tensors;
    }
    [[nodiscard]] const std::map<std::string, std::string, std::less<>>& metadata() const noexcept {
        return header_.metadata;
    }
    [[nodiscard]] const safetensors_tensor& at(std::string_view name) const {
        const auto found = header_.tensors.find(name);
        if (found == header_.tensors.end()) { misused(name, "is not there"); }
        return found->second;
    }

    /// Bytes [first, first + out.size()) of a tensor, whatever its type.
    void read_bytes(std::string_view name, std::uint64_t first, std::span<std::byte> out) const {
        const safetensors_tensor& t = at(name);
        demand_range(name, first, out.size(), t.last - t.first, "bytes");
        file_.read(data_ + t.first + first, out);
    }

    /// Elements [first, first + out.size()) of a tensor. Floating-point elements are converted where the file has others:
    /// exactly, or rounded once; integers are of the file's type.
    template <element T> void read(std::string_view name, std::uint64_t first, view<T> out) const {
        const safetensors_tensor& t = at(name);
        demand_range(name, first, out.size(), t.elements, "elements");
        if (t.element == dtype_of<T>) {
            return file_.read(data_ + t.first + first * sizeof(T),
                              std::as_writable_bytes(std::span(out.data(), out.size())));
        }
        if constexpr (floating_element<T>) {
            if (t.element == dtype::float32) { return convert<float>(t, first, out); }
            if (t.element == dtype::float64) { return convert<double>(t, first, out); }
            if (t.element == dtype::float16) { return convert<float16>(t, first, out); }
            if (t.element == dtype::bfloat16) { return convert<bfloat16>(t, first, out); }
        }
        misused(name, formatted("has type {}: it cannot be read as {}", t.type, name_of(dtype_of<T>)));
    }
    template <element T> void read(std::string_view name, view<T> out) const { read(name, 0, out); }

private:
    [[noreturn]] void refuse(std::string_view fact) const { throw damaged_error(formatted("'{}': {}", path(), fact)); }
    [[noreturn]] void misused(std::string_view name, std::string_view fact) const {
        throw usage_error(formatted("'{}': tensor '{}' {}", path(), detail::shown(name), fact));
    }
    void demand_range(std::string_view name, std::uint64_t first, std::uint64_t count, std::uint64_t all,
                      std::string_view units) const {
        if (first > all || count > all - first) {
            misused(name, formatted("has {} {}, not {} from {} on", all, units, count, first));
        }
    }
    template <class Stored, class T> void convert(const safetensors_tensor& t, std::uint64_t first, view<T> out) const {
        std::vector<Stored> stored(std::min(part, out.size()));
        for (std::size_t done = 0; done < out.size(); done += stored.size()) {
            stored.resize(std::min(stored.size(), out.size() - done));
            file_.read(data_ + t.first + (first + done) * sizeof(Stored), std::as_writable_bytes(std::span(stored)));
            for (std::size_t i = 0; i < stored.size(); ++i) {
                if constexpr (std::is_same_v<Stored, double>) {
                    out[done + i] = static_cast<T>(stored[i]);
                } else {
                    out[done + i] = static_cast<T>(static_cast<float>(stored[i]));
                }
            }
        }
    }
};

/// Reads pieces of tensors: each entry by its name, from its offset on. Tensors that no entry names are passed over.
/// Errors  usage_error: a tensor is not there, or has another type or shape; no entry has changed then. As
///         safetensors_file.
inline void read_safetensors(const std::string& path, std::span<const state_entry<>> into) {
    const safetensors_file file(path);
    const auto first_byte = [](const state_entry<>& e) { return std::uint64_t{e.offset} * size_of(e.type); };
    for (const state_entry<>& e : into) {
        const safetensors_tensor& t = file.at(e.name);
        const std::vector<std::uint64_t> shape(e.shape.begin(), e.shape.end());
        if (t.element != e.type || t.shape != shape) {
            throw usage_error(formatted("'{}': tensor '{}' is {} {}, not {} {}", path, detail::shown(e.name), t.type,
                                        detail::shape_text(t.shape), name_of(e.type), detail::shape_text(shape)));
        }
        if (e.offset > t.elements || e.data.size() > t.last - t.first - first_byte(e)) {
            throw usage_error(formatted("'{}': tensor '{}' has {} elements, not {} bytes from element {} on", path,
                                        detail::shown(e.name), t.elements, e.data.size(), e.offset));
        }
    }
    for (const state_entry<>& e : into) {
        file.read_bytes(e.name, first_byte(e), std::span(e.data.data(), e.data.size()));
    }
}

/// A tensor that is to be written.
struct safetensors_declaration {
    std::string name;
    dtype type = dtype::float32;
    std::vector<std::uint64_t> shape;
};

struct safetensors_options {
    std::map<std::string, std::string, std::less<>> metadata{};  ///< {"format", "pt"} is what PyTorch's readers expect
    file_hook before_file_operation{};                           ///< for tests of failures
};

/// Takes the next bytes of a tensor.
using byte_sink = std::function<void(std::span<const std::byte>)>;

/// Writes a safetensors file: whole or not at all, durable when it returns.
///
/// Semantics  values(i, put) is called once for each tensor of the list and hands its elements to `put`, in one part or
///            in many. Tensors with large elements come first, others in the order of the list, so that each lies at a
///            multiple of its element's size. The folder must be there. A failure, also an exception of `values`,
///            leaves the old file, and nothing beside it; but for that of the very last step, which makes the new file's
///            name durable: the error then says that the new file is there. One writer of a path at a time.
/// Cost       nothing is kept but the header.
/// Errors     usage_error: a name is there twice, is "__metadata__" or not UTF-8; a type is none of the format's
///            (dtype::byte); tensors, header or one of its strings too large; `values` gives more bytes or fewer than a
///            tensor has. backend_error with errno when the file system refuses.
inline void write_safetensors(const std::string& path, std::span<const safetensors_declaration> list,
                              const std::function<void(std::size_t i, const byte_sink& put)>& values,
                              const safetensors_options& how = {}) {
    const auto refuse = [&path](std::string_view name, std::string_view fact) {
        throw usage_error(formatted("'{}': tensor '{}' {}", path, detail::shown(name), fact));
    };
    std::vector<std::size_t> order(list.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return size_of(list[a].type) > size_of(list[b].type); });
    detail::safetensors_header header{{}, how.metadata};
    std::uint64_t end = 0;
    for (const std::size_t i : order) {
        const safetensors_declaration& d = list[i];
        const auto* const type =
            std::find_if(std::begin(detail::safetensors_types), std::end(detail::safetensors_types),
                         [&](const detail::safetensors_type& t) { return t.element == d.type; });
        if (type == std::end(detail::safetensors_types)) {
            refuse(d.name, formatted("has type {}, which the format has not", name_of(d.type)));
        }
        const auto extent = detail::extent_in(*type, d.shape);
        if (!extent || extent->second > detail::most_bytes - end || d.shape.size() > detail::most_dimensions) {
            refuse(d.name, formatted("of shape {} is too large", detail::shape_text(d.shape)));
        }
        const safetensors_tensor t{type->name, d.type, d.shape, extent->first, end, end + extent->second};
        if (d.name == detail::safetensors_metadata) { refuse(d.name, "has the metadata's name"); }
        if (!header.tensors.emplace(d.name, t).second) { refuse(d.name, "is there twice"); }
        end = t.last;
    }
    std::string start;
    try {
        start = detail::encoded(header);
    } catch (const usage_error& e) { throw usage_error(formatted("'{}': {}", path, e.what())); }
    try {
        detail::demand_short_parts(std::string_view(start).substr(sizeof(std::uint64_t)), start.size() + end);
    } catch (const damaged_error& e) {
        throw usage_error(formatted("'{}' could not be read back: {}", path, e.what()));
    }
    if (start.size() > detail::longest_safetensors_header) {
        throw usage_error(formatted("'{}': a header of {} bytes is more than the format allows", path, start.size()));
    }
    const detail::files files(how.before_file_operation);
    files.replace(path, [&](const byte_sink& put) {
        put(std::as_bytes(std::span(start)));
        for (const std::size_t i : order) {
            const safetensors_tensor& t = header.tensors.at(list[i].name);
            std::uint64_t left = t.last - t.first;
            values(i, [&](std::span<const std::byte> bytes) {
                if (bytes.size() > left) {
                    refuse(list[i].name, formatted("gets more than {} bytes", t.last - t.first));
                }
                left -= bytes.size();
                put(bytes);
            });
            if (left != 0) { refuse(list[i].name, formatted("lacks {} of {} bytes", left, t.last - t.first)); }
        }
    });
    try {
        files.synchronize_directory(detail::parent_of(path));
    } catch (const backend_error& e) {
        const std::string text =
            formatted("{}; '{}' is the new file, but its name may not outlast a loss of power", e.what(), path);
        throw backend_error(text, e.context());
    }
}

/// Writes entries that are whole tensors.
/// Errors  usage_error: an entry is a piece of its tensor. As above.
inline void write_safetensors(const std::string& path, std::span<const state_entry<>> whole,
                              const safetensors_options& how = {}) {
    std::vector<safetensors_declaration> list;
    for (const state_entry<>& e : whole) { list.push_back({e.name, e.type, {e.shape.begin(), e.shape.end()}}); }
    const auto values = [&whole](std::size_t i, const byte_sink& put) {
        put(std::span<const std::byte>(whole[i].data.data(), whole[i].data.size()));
    };
    write_safetensors(path, list, values, how);
}

}  // namespace tutti::checkpoint
