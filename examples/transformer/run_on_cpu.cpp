// Training on the CPU, for ranks that are threads and for processes.
#include "host_device.hpp"
#include "parallel_run.hpp"
#include "run_on_cpu.hpp"

namespace transformer {

template <class T> result run_on_cpu(any_ranks& world, const options& o, const corpus& text, tutti::deadline origin) {
    if (o.of_forward_passes()) { return tune_on_cpu<T>(world, o, text, origin); }
    if (o.of_parts()) { return train_in_parts_on_cpu<T>(world, o, text, origin); }
    host_device<T> cpu;
    return train(world, cpu, o, text, origin);
}

template result run_on_cpu<float>(any_ranks&, const options&, const corpus&, tutti::deadline);
template result run_on_cpu<double>(any_ranks&, const options&, const corpus&, tutti::deadline);

}  // namespace transformer
