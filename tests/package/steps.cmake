# What the package tests are made of: steps that must succeed, or must fail and say why.
cmake_minimum_required(VERSION 3.25)
set(ENV{CMAKE_BUILD_PARALLEL_LEVEL} 2)

# step(<command>...): must succeed; its output is shown only when it does not. Leaves it in `output`.
macro(step)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result STREQUAL "0")
    string(JOIN " " shown ${ARGV})
    message(FATAL_ERROR "failed (${result}): ${shown}\n${output}")
  endif()
endmacro()

# step_fails(<text> <command>...): must fail and print the text.
macro(step_fails text)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(JOIN " " shown ${ARGN})
  if(result STREQUAL "0")
    message(FATAL_ERROR "succeeded, but must fail with '${text}': ${shown}\n${output}")
  endif()
  # CMake wraps its messages.
  string(REGEX REPLACE "[ \n]+" " " unwrapped "${output}")
  string(FIND "${unwrapped}" "${text}" position)
  if(position EQUAL -1)
    message(FATAL_ERROR "failed without '${text}': ${shown}\n${output}")
  endif()
endmacro()

# expect_output(<text>): in the output of the last step.
macro(expect_output text)
  string(FIND "${output}" "${text}" position)
  if(position EQUAL -1)
    message(FATAL_ERROR "no '${text}' in the output:\n${output}")
  endif()
endmacro()

set(configure ${CMAKE_COMMAND} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_BUILD_TYPE=Debug)
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
