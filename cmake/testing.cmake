# How a test is added. Every test has a name "<module>.<what>", labels, and a deadline; a test that cannot run is
# reported as skipped, with its reason, never as passed.
#
#   tutti_add_test(NAME core.philox SOURCES philox.cpp [LIBRARIES tutti::blas ...] [LABELS unit ...] [TIMEOUT s] ...)
#   tutti_add_mpi_test(NAME comm.mpi SOURCES mpi.cpp RANKS 1 2 4 [...])
#   tutti_add_test(NAME gpu.philox SOURCES philox.cu LABELS gpu)    # skipped without nvcc
#   tutti_add_skipped_test(NAME x REASON "no nvcc" [LABELS ...])
#
# Common arguments of all but the last:
#   LIBRARIES        besides tutti::tutti and doctest
#   LABELS           unit (default) conformance mpi headers compile_fail package data gpu long sanitize asan.
#                    sanitize: also built by the target sanitizer_tests, for the presets tsan and asan-ubsan;
#                    asan: for asan-ubsan alone, since the test starts no thread that tsan could watch;
#                    gpu: also built by the target gpu_tests, for the preset cuda; alone on the device; the program
#                    calls tutti::test::skip where there is none. A .cu test for no device at hand is compiled to PTX
#                    alone, not linked, and skipped
#   TIMEOUT          seconds; default 120 (mpi: 240), as others may share the processors; multiplied in sanitizer builds
#   PROCESSORS       how many cores the test keeps busy, so that ctest does not start others beside it; default 1
#   COMPILE_OPTIONS  for this test alone, such as -march=native
#   ARGUMENTS        of the program
#   EXPECT_FAILURE   text: the program must exit with a failure and print this text
#   OWN_MAIN         the sources define main() and may use doctest or not
include(ptx)
include(sanitizers)

# What ./dev builds for these presets, instead of everything.
add_custom_target(sanitizer_tests)
add_custom_target(gpu_tests)

function(tutti_set_test_properties name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;PROCESSORS" "LABELS")
  math(EXPR timeout "${arg_TIMEOUT} * ${TUTTI_TEST_TIMEOUT_FACTOR}")
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${timeout} PROCESSORS ${arg_PROCESSORS}
    SKIP_RETURN_CODE 77 ENVIRONMENT "${TUTTI_TEST_ENVIRONMENT}")
  if("gpu" IN_LIST arg_LABELS)
    set_tests_properties(${name} PROPERTIES RESOURCE_LOCK gpu)
  endif()
endfunction()

# Whether sources are compiled for no device of this machine. The host compiler's part would take most of the time, and
# nothing could run it. nvcc's front end still checks host and device code on the way to PTX; what goes unseen here, and
# is seen by the preset cuda, are the host compiler's own warnings and the link.
function(tutti_is_ptx_alone result)
  set(${result} OFF PARENT_SCOPE)
  if(ARGN MATCHES "\\.cu(;|$)" AND CMAKE_CUDA_ARCHITECTURES MATCHES "virtual")
    set(${result} ON PARENT_SCOPE)
  endif()
endfunction()
set(tutti_ptx_alone_reason "there was no GPU at configure time, so it was compiled to PTX alone")

# The program of a test: a target named like the test, with '_' for '.'.
function(tutti_add_test_program name main)
  cmake_parse_arguments(PARSE_ARGV 2 arg "OWN_MAIN" "" "SOURCES;LIBRARIES;LABELS;COMPILE_OPTIONS")
  if(NOT arg_SOURCES)
    message(FATAL_ERROR "test '${name}' has no SOURCES")
  endif()
  string(REPLACE "." "_" target ${name})
  tutti_is_ptx_alone(ptx_alone ${arg_SOURCES})
  if(ptx_alone)
    add_library(${target} OBJECT ${arg_SOURCES})
    tutti_compile_to_ptx(${target})
  else()
    add_executable(${target} ${arg_SOURCES})
  endif()
  target_link_libraries(${target} PRIVATE tutti::tutti doctest::doctest ${arg_LIBRARIES})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_compile_options(${target} PRIVATE ${arg_COMPILE_OPTIONS})
  # Options of its own but definitions, or of the trainer, may not fit what was precompiled without them.
  if(NOT arg_OWN_MAIN AND NOT "${arg_COMPILE_OPTIONS}" MATCHES "(^|;)-[^D]" AND NOT "${arg_LIBRARIES}" MATCHES "transformer")
    target_precompile_headers(${target} REUSE_FROM tutti_test_headers)
  endif()
  if(NOT arg_OWN_MAIN)
    target_link_libraries(${target} PRIVATE ${main})
  endif()
  if("sanitize" IN_LIST arg_LABELS OR ("asan" IN_LIST arg_LABELS AND NOT TUTTI_SANITIZE MATCHES "thread"))
    add_dependencies(sanitizer_tests ${target})
  endif()
  if("gpu" IN_LIST arg_LABELS)
    add_dependencies(gpu_tests ${target})
  endif()
endfunction()

function(tutti_add_skipped_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;REASON" "LABELS")
  add_test(NAME ${arg_NAME} COMMAND ${CMAKE_COMMAND} -E echo "skipped: ${arg_REASON}")
  message(STATUS "test ${arg_NAME} is skipped: ${arg_REASON}")
  set_tests_properties(${arg_NAME} PROPERTIES LABELS "${arg_LABELS}" SKIP_REGULAR_EXPRESSION "skipped: ")
endfunction()

# Parses the arguments of the calling function into arg_*, refuses what it does not know, and fills the defaults.
macro(tutti_parse_test timeout label)
  cmake_parse_arguments(PARSE_ARGV 0 arg "OWN_MAIN" "NAME;TIMEOUT;PROCESSORS;EXPECT_FAILURE"
    "SOURCES;LIBRARIES;LABELS;COMPILE_OPTIONS;ARGUMENTS;RANKS")
  if(arg_UNPARSED_ARGUMENTS OR arg_KEYWORDS_MISSING_VALUES OR NOT arg_NAME)
    message(FATAL_ERROR "test '${arg_NAME}': bad arguments ${arg_UNPARSED_ARGUMENTS} ${arg_KEYWORDS_MISSING_VALUES}")
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT ${timeout})
  endif()
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS ${label})
  endif()
  set(arg_FLAGS)
  if(arg_OWN_MAIN)
    set(arg_FLAGS OWN_MAIN)
  endif()
  set(arg_BEHIND)
  if(arg_EXPECT_FAILURE)
    string(REPLACE ";" "\\;" expect "${arg_EXPECT_FAILURE}")
    set(arg_BEHIND ${CMAKE_COMMAND} "-DEXPECT=${expect}" -P ${PROJECT_SOURCE_DIR}/cmake/expect_failure.cmake --)
  endif()
  string(REPLACE "." "_" arg_TARGET ${arg_NAME})
endmacro()

function(tutti_add_test)
  tutti_parse_test(120 unit)
  if("gpu" IN_LIST arg_LABELS)
    if(NOT CMAKE_CUDA_COMPILER)
      tutti_add_skipped_test(NAME ${arg_NAME} LABELS ${arg_LABELS}
        REASON "no nvcc was found at configure time, or TUTTI_WITH_CUDA is OFF")
      return()
    endif()
    list(APPEND arg_LIBRARIES tutti::cuda)
  endif()
  tutti_add_test_program(${arg_NAME} tutti_test_main ${arg_FLAGS} SOURCES ${arg_SOURCES} LIBRARIES ${arg_LIBRARIES}
    LABELS ${arg_LABELS} COMPILE_OPTIONS ${arg_COMPILE_OPTIONS})
  tutti_is_ptx_alone(ptx_alone ${arg_SOURCES})
  if(ptx_alone)
    tutti_add_skipped_test(NAME ${arg_NAME} LABELS ${arg_LABELS} REASON ${tutti_ptx_alone_reason})
    return()
  endif()
  add_test(NAME ${arg_NAME}
    COMMAND ${arg_BEHIND} ${TUTTI_TEST_LAUNCHER} $<TARGET_FILE:${arg_TARGET}> ${arg_ARGUMENTS})
  tutti_set_test_properties(${arg_NAME} TIMEOUT ${arg_TIMEOUT} PROCESSORS ${arg_PROCESSORS} LABELS ${arg_LABELS})
endfunction()

# --- MPI -------------------------------------------------------------------------------------------------------------
include(mpirun)

function(tutti_add_mpi_test)
  tutti_parse_test(240 mpi)
  if(NOT arg_RANKS)
    message(FATAL_ERROR "MPI test '${arg_NAME}' has no RANKS")
  endif()
  if(NOT "mpi" IN_LIST arg_LABELS)
    list(APPEND arg_LABELS mpi)
  endif()
  if(NOT TARGET tutti::mpi OR NOT MPIEXEC_EXECUTABLE)
    foreach(ranks IN LISTS arg_RANKS)
      tutti_add_skipped_test(NAME ${arg_NAME}.${ranks} LABELS ${arg_LABELS}
        REASON "no MPI with its mpirun was found at configure time, or TUTTI_WITH_MPI is OFF")
    endforeach()
    return()
  endif()
  tutti_add_test_program(${arg_NAME} tutti_mpi_test_main ${arg_FLAGS} SOURCES ${arg_SOURCES}
    LIBRARIES tutti::mpi ${arg_LIBRARIES} LABELS ${arg_LABELS} COMPILE_OPTIONS ${arg_COMPILE_OPTIONS})
  tutti_is_ptx_alone(ptx_alone ${arg_SOURCES})
  if(ptx_alone)
    foreach(ranks IN LISTS arg_RANKS)
      tutti_add_skipped_test(NAME ${arg_NAME}.${ranks} LABELS ${arg_LABELS} REASON ${tutti_ptx_alone_reason})
    endforeach()
    return()
  endif()
  set(limit)
  if(tutti_mpirun_is_open_mpi)
    # mpirun ends all of its ranks itself, just before ctest would kill mpirun alone and leave them behind.
    math(EXPR seconds "${arg_TIMEOUT} * ${TUTTI_TEST_TIMEOUT_FACTOR} - 5")
    set(limit --timeout ${seconds})
  endif()
  foreach(ranks IN LISTS arg_RANKS)
    add_test(NAME ${arg_NAME}.${ranks}
      COMMAND ${arg_BEHIND} ${MPIEXEC_EXECUTABLE} ${tutti_mpirun_options} ${limit} ${MPIEXEC_NUMPROC_FLAG} ${ranks}
        ${TUTTI_TEST_LAUNCHER} $<TARGET_FILE:${arg_TARGET}> ${arg_ARGUMENTS})
    tutti_set_test_properties(${arg_NAME}.${ranks} TIMEOUT ${arg_TIMEOUT} PROCESSORS ${ranks} LABELS ${arg_LABELS})
  endforeach()
endfunction()
