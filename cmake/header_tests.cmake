# Tests of the headers as such. For every public header (none in a folder detail/) a translation unit that holds nothing
# but that header, so that it must bring all it needs and survive being included twice; and one translation unit that has
# all headers behind poison.hpp. Both are linked into one program, so a definition that is not inline shows as a duplicate.
#
#   tutti_add_header_tests(<name> LIBRARIES <target>... HEADERS <path below include/>... BEFORE <system header>...)
#
# BEFORE: headers of others that must be seen before the poison. A header that uses one more than poison.hpp and BEFORE
# list fails loudly in the poisoned unit.
function(tutti_add_header_tests name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LIBRARIES;HEADERS;BEFORE")
  set(sources)
  set(poisoned "")
  foreach(header IN LISTS arg_BEFORE)
    string(APPEND poisoned "#include <${header}>\n")
  endforeach()
  string(APPEND poisoned "#include \"headers/poison.hpp\"\n")
  foreach(header IN LISTS arg_HEADERS)
    if(NOT header MATCHES "/detail/")
      string(MAKE_C_IDENTIFIER ${header} unit)
      set(source ${CMAKE_CURRENT_BINARY_DIR}/${name}/${unit}.cpp)
      file(CONFIGURE OUTPUT ${source} CONTENT "#include <${header}>\n#include <${header}>\n")
      list(APPEND sources ${source})
    endif()
    string(APPEND poisoned "#include <${header}>\n")
  endforeach()
  # main() makes it a program: linking it is the test of the definitions, running it of their initialization.
  string(APPEND poisoned "\nint main() { return 0; }\n")
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${name}/poisoned.cpp CONTENT "${poisoned}")
  string(REPLACE "." "_" target ${name})
  add_executable(${target} ${sources} ${CMAKE_CURRENT_BINARY_DIR}/${name}/poisoned.cpp)
  target_link_libraries(${target} PRIVATE ${arg_LIBRARIES})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  # Only the front end matters here.
  target_compile_options(${target} PRIVATE -O0)
  add_test(NAME ${name} COMMAND ${TUTTI_TEST_LAUNCHER} $<TARGET_FILE:${target}>)
  tutti_set_test_properties(${name} TIMEOUT 120 PROCESSORS 1 LABELS headers)
endfunction()
