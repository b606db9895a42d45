// bucket_plan: how parameters are grouped into messages. A pure function of sizes: equal on all ranks, in all runs.
// Needs core/error. Buckets are numbered in launch order, the reverse of the parameter list: backward produces
// gradients last to first (Li et al., PyTorch Distributed, VLDB 2020, section 3.2).
#pragma once

#include <cstddef>  // size_t
#include <limits>   // overflow
#include <span>     // sizes
#include <vector>   // plan

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::schedule {

/// Parameters [first, first + count), stored at elements [offset, offset + size).
struct bucket {
    std::size_t first = 0;
    std::size_t count = 0;
    std::size_t offset = 0;
    std::size_t size = 0;
    friend bool operator==(const bucket&, const bucket&) = default;
};

/// Where parameters live in one flat storage and which range of it each message covers.
struct bucket_plan {
    std::vector<bucket> buckets;         ///< in launch order
    std::vector<std::size_t> offsets;    ///< by parameter: its first element
    std::vector<std::size_t> bucket_of;  ///< by parameter: index in `buckets`
    std::size_t elements = 0;            ///< of the whole storage
    friend bool operator==(const bucket_plan&, const bucket_plan&) = default;
};

/// Groups neighboring parameters until a bucket would exceed `bucket_bytes`; a larger parameter is a bucket by itself,
/// none is split.
///
/// Semantics    the storage holds the parameters in list order without gaps, whatever the bucket size: so a bucket is
///              one contiguous range, the whole is one view for norms and optimizers, and it lines up with weights that
///              a trainer keeps in one allocation. Padding each parameter to a cache line would break that, and gain
///              nothing: collectives cut ranges at cache lines themselves.
/// Determinism  depends on the arguments alone. The order in which gradients become ready plays no part
///              (pytorch/pytorch#72843, pytorch/pytorch#45933).
/// Cost         linear in the number of parameters.
/// Errors       usage_error when a size overflows or bucket_bytes is smaller than one element.
[[nodiscard]] inline bucket_plan plan_buckets(std::span<const std::size_t> sizes, std::size_t element_size,
                                              std::size_t bucket_bytes) {
    if (element_size == 0 || bucket_bytes < element_size) {
        throw usage_error(formatted("bucket plan: bucket of {} bytes cannot hold an element of {} bytes", bucket_bytes,
                                    element_size));
    }
    bucket_plan plan;
    plan.offsets.reserve(sizes.size());
    for (const std::size_t size : sizes) {
        plan.offsets.push_back(plan.elements);
        if (size > std::numeric_limits<std::size_t>::max() / element_size - plan.elements) {
            throw usage_error(formatted("bucket plan: parameter {} of {} elements overflows the address space",
                                        plan.offsets.size() - 1, size));
        }
        plan.elements += size;
    }
    plan.bucket_of.resize(sizes.size());
    const std::size_t limit = bucket_bytes / element_size;
    for (std::size_t i = sizes.size(); i-- > 0;) {
        const bool fits =
            !plan.buckets.empty() && plan.buckets.back().size <= limit && sizes[i] <= limit - plan.buckets.back().size;
        if (!fits) { plan.buckets.push_back({i + 1, 0, plan.offsets[i] + sizes[i], 0}); }
        bucket& last = plan.buckets.back();
        last.first = i;
        last.count += 1;
        last.offset = plan.offsets[i];
        last.size += sizes[i];
        plan.bucket_of[i] = plan.buckets.size() - 1;
    }
    return plan;
}

}  // namespace tutti::schedule
