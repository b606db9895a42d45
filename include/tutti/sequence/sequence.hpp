// The umbrella of sequence: long and short sequences of one batch on all ranks.
// Apart from tutti.hpp, whose users need not wait for it to compile. No source: it only re-exports.
#pragma once

// where tokens are, and whether that can work
#include <tutti/sequence/placement.hpp>
#include <tutti/sequence/render.hpp>
#include <tutti/sequence/validate.hpp>

// what it costs
#include <tutti/sequence/calibration.hpp>
#include <tutti/sequence/cost.hpp>
#include <tutti/sequence/estimate.hpp>

// how it is chosen
#include <tutti/sequence/packing.hpp>
#include <tutti/sequence/partition/even_ring.hpp>
#include <tutti/sequence/partition/hybrid.hpp>
#include <tutti/sequence/partition/llama_all_gather.hpp>
#include <tutti/sequence/partition/ring_sizes.hpp>
#include <tutti/sequence/partition/whole.hpp>
#include <tutti/sequence/partition/zeppelin.hpp>

// lengths to try it on
#include <tutti/sequence/lengths.hpp>
