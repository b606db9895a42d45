// Runs of forward passes alone over ranks on the CPU, compiled once for the trainer and its tests.
#include <algorithm>  // min

#include "forward_tuning.hpp"
#include "host_device.hpp"
#include "run_on_cpu.hpp"

namespace transformer {

template <class T> result tune_on_cpu(any_ranks& world, const options& o, const corpus& text, tutti::deadline origin) {
    host_device<T> cpu;
    return tune(world, cpu, o, text, origin);
}

memory_demand demand_of(const options& o, int ranks) {
    const std::size_t element = o.precision == "double" ? 8 : o.precision == "float" ? 4 : 2;
    const std::size_t parts = o.zeroth.sliced ? static_cast<std::size_t>(o.ranks) : 1;
    const tutti::zeroth::model_layout layout(modules_of(o.model), element, parts);
    std::size_t all = 0, work = 0;  // elements of a rank
    for (std::size_t m = 0; m < layout.modules(); ++m) { all += layout.size(m); }
    const bool offloads = o.zeroth.offloads(o.pipeline);
    if (offloads) {
        const auto resident = static_cast<std::size_t>(o.zeroth.blocks_resident);
        const std::size_t slot_count =
            std::min(static_cast<std::size_t>(o.zeroth.slot_count), layout.blocks() - resident);
        work = layout.size(0) + layout.size(layout.tail()) + (resident + slot_count) * layout.size(1) +
               layout.largest_copy();
    } else {
        work = all;  // the perturbed copy
    }
    const auto of_ranks = [&](std::size_t elements) { return static_cast<std::size_t>(ranks) * elements * element; };
    const auto bits = static_cast<std::size_t>(o.zeroth.upload_bits);
    const std::size_t kept = bits == 0 ? of_ranks(all / parts)
                                       : static_cast<std::size_t>(ranks) * (all / parts) * (sizeof(float) + bits / 8);
    if (o.device == "cuda") { return {offloads ? kept : 0, 0}; }
    const std::size_t activations =
        o.precision == "double" ? forward_model<host_math<double>>::bytes(o.model, o.micro_batch, branches_of(o))
                                : forward_model<host_math<float>>::bytes(o.model, o.micro_batch, branches_of(o));
    return {kept, of_ranks(work) + static_cast<std::size_t>(ranks) * activations};
}

template result tune_on_cpu<float>(any_ranks&, const options&, const corpus&, tutti::deadline);
template result tune_on_cpu<double>(any_ranks&, const options&, const corpus&, tutti::deadline);

}  // namespace transformer
