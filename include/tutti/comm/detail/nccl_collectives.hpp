// nccl_collectives: one call at the byte level, as NCCL operations on a stream.
// Needs comm/detail/nccl_calls. What NCCL has no collective for is another one between copies, or a group of operations.
#pragma once

#include <algorithm>    // max_element
#include <cstddef>      // size_t, byte
#include <cstdint>      // barrier's element
#include <numeric>      // accumulate
#include <string_view>  // names
#include <vector>       // messages to oneself

#include <cuda_runtime_api.h>  // CUDA runtime
#include <nccl.h>              // NCCL

#include <tutti/comm/call.hpp>               // call
#include <tutti/comm/detail/call_check.hpp>  // offset_of
#include <tutti/comm/detail/nccl_calls.hpp>  // checked calls
#include <tutti/core/buffer.hpp>             // scratch
#include <tutti/core/cuda_queue.hpp>         // cuda_queue
#include <tutti/core/error.hpp>              // usage_error
#include <tutti/core/text.hpp>               // formatted

namespace tutti::comm::detail {

/// Enqueues `c` on the queue's stream. `cell` is a byte of device memory for barriers.
///
/// Cost  reduce_scatter_v and all_gather_v of equal parts are the even collective. Of parts that are nearly equal, at
///       most a quarter of the whole smaller than n times the largest one, they are too, between copies: in scratch of
///       that size, allocated and released in the stream's order, every part is as long as the largest. A call reads and
///       writes the whole once more. Other parts, and all unequal ones in a capture, whose graph would keep the scratch:
///       reduce_scatter_v is n reduces in a group, n/2 times the traffic of an even one, and all_gather_v n broadcasts
///       in a group. gather, scatter and all_to_all: grouped messages. One rank: a copy, none in place.
class nccl_collective {
    ncclComm_t comm_;
    const cuda_queue& queue_;
    const call& c_;
    const error_context& context_;
    std::size_t me_;
    std::size_t ranks_;
    std::uint8_t* cell_;

public:
    nccl_collective(ncclComm_t comm, const cuda_queue& q, const call& c, const error_context& context, int rank,
                    int ranks, std::uint8_t* cell)
        : comm_(comm)
        , queue_(q)
        , c_(c)
        , context_(context)
        , me_(static_cast<std::size_t>(rank))
        , ranks_(static_cast<std::size_t>(ranks))
        , cell_(cell) {}

    void run() const {
        if (ranks_ == 1 && c_.kind != collective::exchange) {  // whatever it is, it gives the input
            return copy(c_.in, c_.out, c_.out_bytes());
        }
        switch (c_.kind) {
        case collective::all_reduce:
            return c_.out_count == 0 ? void()
                                     : expect(ncclAllReduce(c_.in, c_.out, c_.out_count, type(), op(), comm_, stream()),
                                              "ncclAllReduce");
        case collective::reduce_scatter: return reduce_scatter(c_.in, c_.out, c_.out_count);
        case collective::reduce:
            return c_.in_count == 0
                       ? void()
                       : expect(ncclReduce(c_.in, c_.out, c_.in_count, type(), op(), c_.root, comm_, stream()),
                                "ncclReduce");
        case collective::all_gather: return all_gather(c_.in, c_.out, c_.in_count);
        case collective::broadcast:
            return c_.out_count == 0
                       ? void()
                       : expect(ncclBroadcast(c_.out, c_.out, c_.out_bytes(), ncclUint8, c_.root, comm_, stream()),
                                "ncclBroadcast");
        case collective::barrier:
            return expect(ncclAllReduce(cell_, cell_, 1, ncclUint8, ncclMax, comm_, stream()), "ncclAllReduce");
        case collective::reduce_scatter_v: return reduce_scatter_v();
        case collective::all_gather_v: return all_gather_v();
        case collective::gather: return gather();
        case collective::scatter: return scatter();
        case collective::all_to_all: return all_to_all();
        case collective::all_to_all_v: return all_to_all_v();
        case collective::exchange: return exchange();
        }
    }

private:
    [[nodiscard]] cudaStream_t stream() const noexcept { return queue_.stream(); }
    [[nodiscard]] ncclDataType_t type() const noexcept { return *nccl_type(c_.type); }  // the front has asked reduces()
    [[nodiscard]] ncclRedOp_t op() const noexcept { return nccl_operator(c_.op); }
    void expect(ncclResult_t code, std::string_view function) const { check_nccl(code, function, context_); }
    [[nodiscard]] const std::byte* in_at(std::size_t element) const noexcept {
        return static_cast<const std::byte*>(c_.in) + element * c_.element_size;
    }
    [[nodiscard]] std::byte* out_at(std::size_t element) const noexcept {
        return static_cast<std::byte*>(c_.out) + element * c_.element_size;
    }

    void send(const void* data, std::size_t bytes, std::size_t peer) const {
        if (bytes == 0) { return; }
        expect(ncclSend(data, bytes, ncclUint8, static_cast<int>(peer), comm_, stream()), "ncclSend");
    }
    void receive(void* data, std::size_t bytes, std::size_t peer) const {
        if (bytes == 0) { return; }
        expect(ncclRecv(data, bytes, ncclUint8, static_cast<int>(peer), comm_, stream()), "ncclRecv");
    }
    void copy(const void* in, void* out, std::size_t bytes) const {
        if (in != out) { queue_.copy(out, in, bytes, cudaMemcpyDeviceToDevice); }
    }

    // How unequal parts travel. Ranks agree: they have the same table, and capture a call all or none.
    enum class parts { equal, nearly_equal, unequal };
    [[nodiscard]] parts shape_of_parts() const {
        const auto [least, most] = std::minmax_element(c_.send_counts.begin(), c_.send_counts.end());
        if (*least == *most) { return parts::equal; }
        const std::size_t total = std::accumulate(c_.send_counts.begin(), c_.send_counts.end(), std::size_t{0});
        const bool nearly = *most * ranks_ <= total + total / 4;
        return nearly && queue_.capture() == 0 ? parts::nearly_equal : parts::unequal;
    }
    [[nodiscard]] std::size_t largest_part() const {
        return *std::max_element(c_.send_counts.begin(), c_.send_counts.end());
    }
    void reduce_scatter(const void* in, void* out, std::size_t each) const {
        if (each == 0) { return; }
        expect(ncclReduceScatter(in, out, each, type(), op(), comm_, stream()), "ncclReduceScatter");
    }
    void all_gather(const void* in, void* out, std::size_t each) const {
        if (each == 0) { return; }
        expect(ncclAllGather(in, out, each * c_.element_size, ncclUint8, comm_, stream()), "ncclAllGather");
    }

    void reduce_scatter_v() const {
        switch (shape_of_parts()) {
        case parts::equal: return reduce_scatter(c_.in, c_.out, c_.out_count);
        case parts::nearly_equal: return reduce_scatter_padded();
        case parts::unequal: return reduce_scatter_grouped();
        }
    }
    // What lies behind a shorter part is reduced too, and nobody looks at it.
    void reduce_scatter_padded() const {
        const std::size_t each = largest_part() * c_.element_size;
        const buffer<std::byte, cuda_queue> scratch(queue_, each * ranks_);
        std::size_t first = 0;
        for (std::size_t r = 0; r < ranks_; ++r) {
            copy(in_at(first), scratch.data() + r * each, c_.send_counts[r] * c_.element_size);
            first += c_.send_counts[r];
        }
        const bool fits = c_.out_bytes() == each;
        std::byte* const own = scratch.data() + me_ * each;
        reduce_scatter(scratch.data(), fits ? c_.out : own, largest_part());
        if (!fits) { copy(own, c_.out, c_.out_bytes()); }
    }
    void reduce_scatter_grouped() const {
        nccl_group(context_, [&] {
            std::size_t first = 0;
            for (std::size_t r = 0; r < ranks_; ++r) {
                const std::size_t n = c_.send_counts[r];
                if (n != 0) {
                    void* const out = r == me_ ? c_.out : nullptr;
                    expect(ncclReduce(in_at(first), out, n, type(), op(), static_cast<int>(r), comm_, stream()),
                           "ncclReduce");
                }
                first += n;
            }
        });
    }
    void all_gather_v() const {
        switch (shape_of_parts()) {
        case parts::equal: return all_gather(c_.in, c_.out, c_.in_count);
        case parts::nearly_equal: return all_gather_padded();
        case parts::unequal: return all_gather_grouped();
        }
    }
    void all_gather_padded() const {
        const std::size_t each = largest_part() * c_.element_size;
        const buffer<std::byte, cuda_queue> scratch(queue_, each * ranks_);
        std::byte* const own = scratch.data() + me_ * each;
        const bool fits = c_.in_bytes() == each;
        if (!fits) { copy(c_.in, own, c_.in_bytes()); }
        all_gather(fits ? c_.in : own, scratch.data(), largest_part());
        std::size_t first = 0;
        for (std::size_t r = 0; r < ranks_; ++r) {
            // A rank's own part may be where it belongs already.
            const void* const from = r == me_ ? c_.in : scratch.data() + r * each;
            copy(from, out_at(first), c_.send_counts[r] * c_.element_size);
            first += c_.send_counts[r];
        }
    }
    void all_gather_grouped() const {
        nccl_group(context_, [&] {
            std::size_t first = 0;
            for (std::size_t r = 0; r < ranks_; ++r) {
                const std::size_t n = c_.send_counts[r];
                if (n != 0) {
                    const void* const in = r == me_ ? c_.in : out_at(first);
                    expect(ncclBroadcast(in, out_at(first), n * c_.element_size, ncclUint8, static_cast<int>(r), comm_,
                                         stream()),
                           "ncclBroadcast");
                }
                first += n;
            }
        });
    }
    // A rank's own part goes through NCCL too, beside the others' instead of before them, unless it is in place.
    void gather() const {
        const auto root = static_cast<std::size_t>(c_.root);
        nccl_group(context_, [&] {
            const bool stays = me_ == root && c_.in == out_at(me_ * c_.in_count);
            if (!stays) { send(c_.in, c_.in_bytes(), root); }
            for (std::size_t r = 0; me_ == root && r < ranks_; ++r) {
                if (r != me_ || !stays) { receive(out_at(r * c_.in_count), c_.in_bytes(), r); }
            }
        });
    }
    void scatter() const {
        const auto root = static_cast<std::size_t>(c_.root);
        nccl_group(context_, [&] {
            const bool stays = me_ == root && c_.out == in_at(me_ * c_.out_count);
            if (!stays) { receive(c_.out, c_.out_bytes(), root); }
            for (std::size_t r = 0; me_ == root && r < ranks_; ++r) {
                if (r != me_ || !stays) { send(in_at(r * c_.out_count), c_.out_bytes(), r); }
            }
        });
    }
    void all_to_all() const {
        const std::size_t part = c_.in_count / ranks_;
        nccl_group(context_, [&] {
            for (std::size_t r = 0; r < ranks_; ++r) {
                send(in_at(r * part), part * c_.element_size, r);
                receive(out_at(r * part), part * c_.element_size, r);
            }
        });
    }
    void all_to_all_v() const {
        nccl_group(context_, [&] {
            std::size_t sent = 0;
            std::size_t received = 0;
            for (std::size_t r = 0; r < ranks_; ++r) {
                send(in_at(sent), c_.send_counts[r] * c_.element_size, r);
                receive(out_at(received), c_.recv_counts[r] * c_.element_size, r);
                sent += c_.send_counts[r];
                received += c_.recv_counts[r];
            }
        });
    }
    void exchange() const {
        exchange_with_self();
        nccl_group(context_, [&] {
            for (const message& m : c_.messages) {
                const auto peer = static_cast<std::size_t>(m.peer);
                if (peer == me_) { continue; }
                m.sends ? send(m.data, m.bytes, peer) : receive(m.data, m.bytes, peer);
            }
        });
    }
    // Messages to oneself are copies. Without a partner they would wait for ever.
    void exchange_with_self() const {
        std::vector<message> sends;
        std::vector<message> receives;
        for (const message& m : c_.messages) {
            if (static_cast<std::size_t>(m.peer) == me_) { (m.sends ? sends : receives).push_back(m); }
        }
        if (sends.size() != receives.size()) {
            throw usage_error(formatted("exchange: {} sends to itself and {} receives{}", sends.size(), receives.size(),
                                        where(context_)),
                              context_);
        }
        for (std::size_t i = 0; i < sends.size(); ++i) {
            if (sends[i].bytes != receives[i].bytes) {
                throw mismatch_error(formatted("exchange: sizes differ (rank {} sent {} bytes, {} were expected){}",
                                               me_, sends[i].bytes, receives[i].bytes, where(context_)),
                                     {static_cast<int>(me_)}, context_);
            }
            copy(sends[i].data, receives[i].data, sends[i].bytes);
        }
    }
};

}  // namespace tutti::comm::detail
