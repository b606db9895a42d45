# Tests of what must not compile, and of the words the compiler then says.
#
#   tutti_add_compile_fail_test(NAME view.device_index SOURCE view.cpp SECTION DEVICE_INDEX EXPECT "text"
#     [LIBRARIES tutti::mpi])
#
# SOURCE holds one '#ifdef <SECTION>' branch for each mistake. Without a section it must compile (a test of its own,
# added once a source, which the others require); with the section it must fail, and the diagnostics must hold EXPECT.
#
# Run as a script it is the test:
#   cmake -DCOMPILE=<file with the command> -DSOURCE=<cpp> [-DSECTION=<macro> -DEXPECT=<text>] -P compile_fail.cmake
if(CMAKE_SCRIPT_MODE_FILE)
  cmake_minimum_required(VERSION 3.25)
  file(STRINGS ${COMPILE} command)
  set(ENV{LC_ALL} C)  # the diagnostics in English, with plain quotes
  if(NOT SECTION)
    execute_process(COMMAND ${command} ${SOURCE} RESULT_VARIABLE result ERROR_VARIABLE diagnostics)
    if(NOT result STREQUAL "0")
      message(FATAL_ERROR "${SOURCE} must compile as long as no section is chosen:\n${diagnostics}")
    endif()
    return()
  endif()
  file(STRINGS ${SOURCE} section REGEX "^#(el)?ifdef ${SECTION}$|defined\\(${SECTION}\\)")
  if(NOT section)
    message(FATAL_ERROR "${SOURCE} has no section ${SECTION}")
  endif()
  execute_process(COMMAND ${command} -D${SECTION} ${SOURCE} RESULT_VARIABLE result ERROR_VARIABLE diagnostics)
  if(result STREQUAL "0")
    message(FATAL_ERROR "${SOURCE} compiles with ${SECTION}; it must fail with: ${EXPECT}")
  endif()
  string(FIND "${diagnostics}" "${EXPECT}" position)
  if(position EQUAL -1)
    message("${diagnostics}")
    message(FATAL_ERROR "${SOURCE} fails with ${SECTION}, as it must, but does not say: ${EXPECT}")
  endif()
  return()
endif()

function(tutti_add_compile_fail_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;SOURCE;SECTION;EXPECT" "LIBRARIES")
  foreach(required IN ITEMS NAME SOURCE SECTION EXPECT)
    if("${arg_${required}}" STREQUAL "")
      message(FATAL_ERROR "compile-fail test '${arg_NAME}' has no ${required}")
    endif()
  endforeach()
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "compile-fail test '${arg_NAME}': unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  get_filename_component(source ${arg_SOURCE} ABSOLUTE)
  get_filename_component(stem ${arg_SOURCE} NAME_WE)
  set(target compile_fail_${stem})
  set(command_file ${CMAKE_CURRENT_BINARY_DIR}/${stem}.CXX.command)
  set(run ${CMAKE_COMMAND} -DCOMPILE=${command_file} -DSOURCE=${source})
  if(NOT TARGET ${target})
    # Never built: it collects the include folders and definitions of its libraries.
    add_library(${target} OBJECT EXCLUDE_FROM_ALL ${source})
    target_link_libraries(${target} PRIVATE tutti::tutti ${arg_LIBRARIES})
    set(includes "$<FILTER:$<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>,EXCLUDE,^/usr/include$>")
    set(definitions "$<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>")
    # One word a line; a line each, since paths may hold spaces. Only the front end runs: nothing is written.
    string(JOIN "\n" words ${CMAKE_CXX_COMPILER} -std=c++20 -fsyntax-only
      "$<$<BOOL:${includes}>:-I$<JOIN:${includes},\n-I>>" "$<$<BOOL:${definitions}>:-D$<JOIN:${definitions},\n-D>>")
    # A file a language, since what is included and defined may depend on it.
    file(GENERATE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${stem}.$<COMPILE_LANGUAGE>.command CONTENT "${words}\n"
      TARGET ${target})
    add_test(NAME compile_fail.${stem} COMMAND ${run} -P ${CMAKE_CURRENT_FUNCTION_LIST_FILE})
    tutti_set_test_properties(compile_fail.${stem} TIMEOUT 120 PROCESSORS 1 LABELS compile_fail)
    set_tests_properties(compile_fail.${stem} PROPERTIES FIXTURES_SETUP compile_fail.${stem})
  endif()
  add_test(NAME compile_fail.${arg_NAME}
    COMMAND ${run} -DSECTION=${arg_SECTION} "-DEXPECT=${arg_EXPECT}" -P ${CMAKE_CURRENT_FUNCTION_LIST_FILE})
  tutti_set_test_properties(compile_fail.${arg_NAME} TIMEOUT 120 PROCESSORS 1 LABELS compile_fail)
  set_tests_properties(compile_fail.${arg_NAME} PROPERTIES FIXTURES_REQUIRED compile_fail.${stem})
endfunction()
