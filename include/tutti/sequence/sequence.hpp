// The umbrella of sequence: long and short sequences of one batch on all ranks.
// Apart from tutti.hpp, whose users need not wait for it to compile. No source: it only re-exports.
#pragma once

// where tokens are, and whether that can work
#include <tutti/sequence/placement.hpp>
#include <tutti/sequence/render.hpp>
#include <tutti/sequence/validate.hpp>

// what it costs
#include <tutti/sequence/calibration.hpp>
#include <tutti/sequence/calibration_json.hpp>
#include <tutti/sequence/cost.hpp>
#include <tutti/sequence/estimate.hpp>
#include <tutti/sequence/measured_link.hpp>

// how it is chosen
#include <tutti/sequence/packing.hpp>
#include <tutti/sequence/partition/even_ring.hpp>
#include <tutti/sequence/partition/hybrid.hpp>
#include <tutti/sequence/partition/llama_all_gather.hpp>
#include <tutti/sequence/partition/ring_sizes.hpp>
#include <tutti/sequence/partition/whole.hpp>
#include <tutti/sequence/partition/zeppelin.hpp>

// attention over it
#include <tutti/sequence/attention_options.hpp>
#include <tutti/sequence/block_attention.hpp>
#include <tutti/sequence/engine.hpp>
#include <tutti/sequence/flow.hpp>
#include <tutti/sequence/gather_attention.hpp>
#include <tutti/sequence/host_attention.hpp>
#include <tutti/sequence/products.hpp>
#include <tutti/sequence/ring_attention.hpp>
#include <tutti/sequence/token_operations.hpp>
#include <tutti/sequence/token_view.hpp>
#include <tutti/sequence/ulysses_attention.hpp>

// how its messages and tokens move
#include <tutti/sequence/remap.hpp>
#include <tutti/sequence/route.hpp>
#include <tutti/sequence/route_plan.hpp>
#include <tutti/sequence/route_time.hpp>
#include <tutti/sequence/round_exchange.hpp>
#include <tutti/sequence/routed.hpp>
#include <tutti/sequence/token_moves.hpp>

// lengths to try it on
#include <tutti/sequence/lengths.hpp>
