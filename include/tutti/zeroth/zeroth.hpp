// The umbrella of zeroth: fine-tuning by forward passes alone, on one rank and on many.
// Apart from tutti.hpp, whose users need not wait for it to compile. No source: it only re-exports.
#pragma once

// directions, and weights moved along them
#include <tutti/zeroth/direction.hpp>
#include <tutti/zeroth/pending_update.hpp>
#include <tutti/zeroth/perturbation.hpp>
#include <tutti/zeroth/tensor_slice.hpp>

// estimates of the derivative along them, on weights that stay where they are
#include <tutti/zeroth/estimator.hpp>
#include <tutti/zeroth/in_memory.hpp>
#include <tutti/zeroth/probe.hpp>

// weights on the host, brought to the device block by block, whole or in slices
#include <tutti/zeroth/block_model.hpp>
#include <tutti/zeroth/block_store.hpp>
#include <tutti/zeroth/disk_store.hpp>
#include <tutti/zeroth/float8_wire.hpp>
#include <tutti/zeroth/gather_by_copies.hpp>
#include <tutti/zeroth/layout.hpp>
#include <tutti/zeroth/master_store.hpp>
#include <tutti/zeroth/offload.hpp>
#include <tutti/zeroth/renewed_store.hpp>
#include <tutti/zeroth/slice.hpp>
#include <tutti/zeroth/transfer_counters.hpp>
#include <tutti/zeroth/transfer_overlap.hpp>
#include <tutti/zeroth/update_log.hpp>
#include <tutti/zeroth/weight_wire.hpp>

// steps, on one rank and on many
#include <tutti/zeroth/division.hpp>
#include <tutti/zeroth/replicate.hpp>
