// staged<C>: a device communicator behind host memory, so that the conformance suite, which looks at host memory, runs
// on it. Every call copies its views to the device, runs there, and copies back what was asked for.
// Needs a communicator on a cuda_queue. What overlaps on the host overlaps on the device.
#pragma once

#include <algorithm>    // min, max
#include <cstddef>      // byte
#include <functional>   // less
#include <optional>     // split
#include <span>         // counts
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // messages

#include <tutti/comm/front.hpp>       // typed collectives
#include <tutti/core/buffer.hpp>      // device memory
#include <tutti/core/cuda_queue.hpp>  // copies

namespace tutti::test {

template <class C> class staged : public comm::front<staged<C>, host_queue> {
    C inner_;
    host_queue queue_;

    using storage = buffer<std::byte, cuda_queue>;

    static view<const std::byte> host(const void* p, std::size_t bytes) {
        return {static_cast<const std::byte*>(p), bytes};
    }
    // The whole of both views as one block when they overlap, so that in place stays in place.
    struct placed {
        const std::byte* begin;
        storage memory;
        placed(const cuda_queue& q, const void* p, std::size_t bytes)
            : begin(static_cast<const std::byte*>(p)), memory(q, bytes) {
            upload(q, host(p, bytes), memory.view());
        }
        [[nodiscard]] std::byte* of(const void* p) const {
            return p == nullptr ? nullptr : memory.data() + (static_cast<const std::byte*>(p) - begin);
        }
        void fetch(const cuda_queue& q, void* p, std::size_t bytes) const {
            download(q, view<const std::byte, device_memory>(of(p), bytes),
                     view<std::byte>(static_cast<std::byte*>(p), bytes));
        }
    };

public:
    explicit staged(C inner) : inner_(std::move(inner)) {}
    staged(C inner, const host_queue& parent) : inner_(std::move(inner)), queue_(parent.sibling()) {}

    [[nodiscard]] static constexpr bool reduces(dtype t) noexcept { return C::reduces(t); }
    [[nodiscard]] int rank() const noexcept { return inner_.rank(); }
    [[nodiscard]] int size() const noexcept { return inner_.size(); }
    [[nodiscard]] std::string_view name() const noexcept { return inner_.name(); }
    [[nodiscard]] host_queue queue() const noexcept { return queue_; }
    [[nodiscard]] C& inner() noexcept { return inner_; }
    [[nodiscard]] staged duplicate(std::string_view name) {
        static_cast<void>(this->next_collective());
        return staged(inner_.duplicate(name), queue_);
    }
    [[nodiscard]] std::optional<staged> split(std::span<const int> colors, std::string_view name) {
        static_cast<void>(this->next_collective());
        auto child = inner_.split(colors, name);
        if (!child) { return std::nullopt; }
        return staged(std::move(*child), queue_);
    }
    void synchronize() { inner_.synchronize(); }
    void abort(std::string_view why) noexcept { inner_.abort(why); }
    [[nodiscard]] std::vector<comm::control_record> gather_control(comm::control_record mine) {
        static_cast<void>(this->next_collective());
        return inner_.gather_control(mine);
    }

    void execute(const comm::call& c) {
        const cuda_queue q = inner_.queue();
        comm::call on_device = c;
        if (c.kind == comm::collective::exchange) {
            std::vector<placed> blocks;
            std::vector<comm::message> messages(c.messages.begin(), c.messages.end());
            for (comm::message& m : messages) {
                blocks.emplace_back(q, m.data, m.bytes);
                m.data = blocks.back().memory.data();
            }
            on_device.messages = messages;
            inner_.execute(on_device);
            inner_.synchronize();
            for (std::size_t i = 0; i < messages.size(); ++i) {
                if (!messages[i].sends) { blocks[i].fetch(q, c.messages[i].data, messages[i].bytes); }
            }
            return;
        }
        if (overlaps(c.in, c.in_bytes(), c.out, c.out_bytes())) {
            const auto* const in = static_cast<const std::byte*>(c.in);
            const auto* const out = static_cast<const std::byte*>(c.out);
            const std::byte* const begin = std::min(in, out);
            const std::byte* const end = std::max(in + c.in_bytes(), out + c.out_bytes());
            const placed both(q, begin, static_cast<std::size_t>(end - begin));
            on_device.in = both.of(c.in);
            on_device.out = both.of(c.out);
            inner_.execute(on_device);
            inner_.synchronize();
            both.fetch(q, c.out, c.out_bytes());
            return;
        }
        const placed in(q, c.in, c.in_bytes());
        const placed out(q, c.out, c.out_bytes());
        on_device.in = in.memory.data();
        on_device.out = out.memory.data();
        inner_.execute(on_device);
        inner_.synchronize();
        out.fetch(q, c.out, c.out_bytes());
        // The input must be what it was: copy it back so that the suite's comparison bites.
        if (c.in != nullptr) { in.fetch(q, const_cast<void*>(c.in), c.in_bytes()); }
    }
};

}  // namespace tutti::test
