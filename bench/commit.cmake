# Writes ${OUT}, which names the commit that a bench is built from; run at every build, rewritten only when it changes.
#   cmake -DOUT=<header> -DSOURCE=<folder> -P commit.cmake
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND git describe --always --dirty --abbrev=12 --match= WORKING_DIRECTORY ${SOURCE}
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit "unknown")
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "// Generated.\n#pragma once\n#define BENCH_COMMIT \"@commit@\"\n" @ONLY)
