// The strategies of all pipelines over ranks on the CPU, compiled once for the trainer and its tests.
#include <tutti/comm/counted.hpp>  // what the trainer trains over
#include <tutti/comm/shaped.hpp>   // with a network that the user states

#include "any_ranks.hpp"
#include "make_strategy.hpp"

namespace transformer {

template <class T> using on_host = any_strategy<T, tutti::host_queue>;
using ranks = tutti::comm::counted<tutti::comm::shaped<any_ranks>>;
template on_host<float> make_strategy<float>(ranks, const options&, tutti::schedule::timeline*);
template on_host<float> make_strategy_of_parts<float>(ranks, const options&, tutti::schedule::timeline*, int);
template on_host<double> make_strategy<double>(ranks, const options&, tutti::schedule::timeline*);
template on_host<double> make_strategy_of_parts<double>(ranks, const options&, tutti::schedule::timeline*, int);

}  // namespace transformer
