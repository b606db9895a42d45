// The umbrella of simulate: programs of thousands of ranks, in virtual time, on one thread.
// Apart from tutti.hpp, whose users need not wait for it to compile. No source: it only re-exports.
#pragma once

#include <tutti/simulate/cluster.hpp>
#include <tutti/simulate/communicator.hpp>
#include <tutti/simulate/outcome.hpp>
