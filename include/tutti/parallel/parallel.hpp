// The umbrella of parallel: one model over many ranks, by layers and by parts of layers.
// Apart from tutti.hpp, whose users need not wait for it to compile. No source: it only re-exports.
#pragma once

// which rank does what
#include <tutti/parallel/mesh.hpp>
