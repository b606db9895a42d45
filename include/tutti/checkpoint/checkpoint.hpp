// The umbrella of checkpoint: what training needs to go on after a crash, at as many ranks as there then are.
// Needs zlib: link tutti::checkpoint. Not part of tutti.hpp. No source: it only re-exports.
#pragma once

#include <tutti/checkpoint/contents.hpp>
#include <tutti/checkpoint/error.hpp>
#include <tutti/checkpoint/load.hpp>
#include <tutti/checkpoint/saver.hpp>
