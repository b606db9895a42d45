// The strategies of all pipelines over ranks on the CPU, compiled once for the trainer and its tests.
#include <tutti/comm/counted.hpp>  // what the trainer trains over
#include <tutti/comm/shaped.hpp>   // with a network that the user states
#include <tutti/comm/threads.hpp>  // ranks as threads
#if TRANSFORMER_WITH_MPI
#include <tutti/comm/mpi.hpp>  // ranks as processes
#endif

#include "make_strategy.hpp"

namespace transformer {

template <class T> using on_host = any_strategy<T, tutti::host_queue>;
using threads = tutti::comm::counted<tutti::comm::shaped<tutti::comm::threads>>;
template on_host<float> make_strategy<float>(threads, const options&, tutti::schedule::timeline*);
template on_host<float> make_strategy_of_parts<float>(threads, const options&, tutti::schedule::timeline*, int);
template on_host<double> make_strategy<double>(threads, const options&, tutti::schedule::timeline*);
template on_host<double> make_strategy_of_parts<double>(threads, const options&, tutti::schedule::timeline*, int);
#if TRANSFORMER_WITH_MPI
using mpi = tutti::comm::counted<tutti::comm::shaped<tutti::comm::mpi>>;
template on_host<float> make_strategy<float>(mpi, const options&, tutti::schedule::timeline*);
template on_host<float> make_strategy_of_parts<float>(mpi, const options&, tutti::schedule::timeline*, int);
template on_host<double> make_strategy<double>(mpi, const options&, tutti::schedule::timeline*);
template on_host<double> make_strategy_of_parts<double>(mpi, const options&, tutti::schedule::timeline*, int);
#endif

}  // namespace transformer
