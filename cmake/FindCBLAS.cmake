# Finds the C interface of BLAS: OpenBLAS, or the reference libraries (cblas beside blas, or inside it as in Debian).
# CMake's own FindBLAS looks for the Fortran interface and may pick a library without cblas_*.
#
# Provides CBLAS_FOUND and the imported target CBLAS::CBLAS. To choose another library, set CBLAS_INCLUDE_DIR and
# CBLAS_LIBRARIES; they are verified by linking a call, as every candidate is.
include(CheckCXXSourceCompiles)
include(FindPackageHandleStandardArgs)

find_path(CBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES openblas cblas)

# find_cblas_links(<result> <library>...): does a program that calls cblas_sgemm link with these? What was found out is
# kept for these alone: others may be given next time.
function(find_cblas_links result)
  string(MD5 these "${CBLAS_INCLUDE_DIR};${ARGN}")
  set(CMAKE_REQUIRED_INCLUDES ${CBLAS_INCLUDE_DIR})
  set(CMAKE_REQUIRED_LIBRARIES ${ARGN})
  set(CMAKE_REQUIRED_QUIET ON)
  check_cxx_source_compiles("
    #include <cblas.h>
    int main() {
      float a = 2, b = 3, c = 0;
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1, 1.0f, &a, 1, &b, 1, 0.0f, &c, 1);
      return c == 6 ? 0 : 1;
    }" CBLAS_LINKS_${these})
  set(${result} ${CBLAS_LINKS_${these}} PARENT_SCOPE)
endfunction()

set(CBLAS_REASON "no cblas.h, or no library with cblas_* among openblas, cblas + blas, blas")
set(found_libraries)
if(CBLAS_INCLUDE_DIR AND CBLAS_LIBRARIES)
  find_cblas_links(links ${CBLAS_LIBRARIES})
  if(links)
    set(found_libraries ${CBLAS_LIBRARIES})
  else()
    set(CBLAS_REASON "a call of cblas_sgemm does not link with CBLAS_LIBRARIES=${CBLAS_LIBRARIES}")
  endif()
elseif(CBLAS_INCLUDE_DIR)
  foreach(candidate IN ITEMS openblas "cblas blas" blas)
    string(REPLACE " " ";" names "${candidate}")
    set(libraries)
    foreach(name IN LISTS names)
      find_library(CBLAS_LIBRARY_${name} ${name})
      mark_as_advanced(CBLAS_LIBRARY_${name})
      list(APPEND libraries ${CBLAS_LIBRARY_${name}})
    endforeach()
    if(NOT libraries MATCHES "NOTFOUND")
      find_cblas_links(links ${libraries})
      if(links)
        set(found_libraries ${libraries})
        break()
      endif()
    endif()
  endforeach()
endif()
mark_as_advanced(CBLAS_INCLUDE_DIR)

find_package_handle_standard_args(CBLAS REQUIRED_VARS found_libraries CBLAS_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "${CBLAS_REASON}")
if(CBLAS_FOUND AND NOT TARGET CBLAS::CBLAS)
  add_library(CBLAS::CBLAS INTERFACE IMPORTED)
  target_include_directories(CBLAS::CBLAS SYSTEM INTERFACE ${CBLAS_INCLUDE_DIR})
  target_link_libraries(CBLAS::CBLAS INTERFACE ${found_libraries})
endif()
unset(found_libraries)
