# cmake -DPROGRAM=<program> -DSOURCES=<examples> -P place_sequences.cmake
# place_sequences prints zones, and the times that the README says.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND ${PROGRAM} OUTPUT_VARIABLE says COMMAND_ERROR_IS_FATAL ANY)
file(READ ${SOURCES}/../README.md readme)
string(REGEX MATCH "attention [0-9.]+ ms, on even rings [0-9.]+ ms" times "${says}")
if(NOT says MATCHES "\nworld ring of sequence 0, " OR NOT says MATCHES "\nnode ring of sequence 1, " OR times STREQUAL "")
  message(FATAL_ERROR "place_sequences says:\n${says}")
endif()
string(FIND "${readme}" "${times}" position)
if(position EQUAL -1)
  message(FATAL_ERROR "the README does not say '${times}'")
endif()
message(STATUS "${times}")
