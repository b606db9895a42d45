// The umbrella of plan: what a training job takes, before it runs.
// Apart from tutti.hpp, whose users need not wait for it to compile. No source: it only re-exports.
#pragma once

#include <tutti/plan/calibrate.hpp>
#include <tutti/plan/catalog.hpp>
#include <tutti/plan/evidence.hpp>
#include <tutti/plan/exchange.hpp>
#include <tutti/plan/explain.hpp>
#include <tutti/plan/machine.hpp>
#include <tutti/plan/memory.hpp>
#include <tutti/plan/model.hpp>
#include <tutti/plan/render.hpp>
#include <tutti/plan/rings.hpp>
#include <tutti/plan/search.hpp>
#include <tutti/plan/space.hpp>
#include <tutti/plan/tables.hpp>
#include <tutti/plan/time.hpp>
