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

// steps, on one rank and on many
#include <tutti/zeroth/division.hpp>
#include <tutti/zeroth/replicate.hpp>
