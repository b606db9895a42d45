// Training on the CPU, for ranks that are threads and for processes.
#include <tutti/comm/threads.hpp>  // ranks as threads
#if TRANSFORMER_WITH_MPI
#include <tutti/comm/mpi.hpp>  // ranks as processes
#endif

#include "host_device.hpp"
#include "parallel_run.hpp"
#include "run_on_cpu.hpp"

namespace transformer {

template <class T, class Comm>
result run_on_cpu(Comm& world, const options& o, const corpus& text, tutti::deadline origin) {
    if (o.of_forward_passes()) { return tune_on_cpu<T>(world, o, text, origin); }
    if (o.of_parts()) { return train_in_parts_on_cpu<T>(world, o, text, origin); }
    host_device<T> cpu;
    return train(world, cpu, o, text, origin);
}

template result run_on_cpu<float>(tutti::comm::threads&, const options&, const corpus&, tutti::deadline);
template result run_on_cpu<double>(tutti::comm::threads&, const options&, const corpus&, tutti::deadline);
#if TRANSFORMER_WITH_MPI
template result run_on_cpu<float>(tutti::comm::mpi&, const options&, const corpus&, tutti::deadline);
template result run_on_cpu<double>(tutti::comm::mpi&, const options&, const corpus&, tutti::deadline);
#endif

}  // namespace transformer
