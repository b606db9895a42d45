// Runs of forward passes alone over ranks on the CPU, compiled once for the trainer and its tests.
#include <tutti/comm/threads.hpp>  // ranks as threads
#if TRANSFORMER_WITH_MPI
#include <tutti/comm/mpi.hpp>  // ranks as processes
#endif

#include "forward_tuning.hpp"
#include "host_device.hpp"
#include "run_on_cpu.hpp"

namespace transformer {

template <class T, class Comm>
result tune_on_cpu(Comm& world, const options& o, const corpus& text, tutti::deadline origin) {
    host_device<T> cpu;
    return tune(world, cpu, o, text, origin);
}

using tutti::comm::threads;
template result tune_on_cpu<float>(threads&, const options&, const corpus&, tutti::deadline);
template result tune_on_cpu<double>(threads&, const options&, const corpus&, tutti::deadline);
#if TRANSFORMER_WITH_MPI
using tutti::comm::mpi;
template result tune_on_cpu<float>(mpi&, const options&, const corpus&, tutti::deadline);
template result tune_on_cpu<double>(mpi&, const options&, const corpus&, tutti::deadline);
#endif

}  // namespace transformer
