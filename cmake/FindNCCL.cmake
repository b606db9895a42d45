# Finds NCCL: nccl.h and libnccl, beside the CUDA toolkit or where packages put them.
#
# Provides NCCL_FOUND, NCCL_VERSION and the imported target NCCL::NCCL, which brings the CUDA runtime. To choose another
# one, set NCCL_ROOT, or NCCL_INCLUDE_DIR and NCCL_LIBRARY.
include(FindPackageHandleStandardArgs)

find_package(CUDAToolkit QUIET)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
if(NCCL_INCLUDE_DIR)
  file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h NCCL_VERSION REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) [0-9]+$")
  list(TRANSFORM NCCL_VERSION REPLACE "^.* " "")
  list(JOIN NCCL_VERSION "." NCCL_VERSION)
endif()

find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR CUDAToolkit_FOUND
  VERSION_VAR NCCL_VERSION)
if(NCCL_FOUND AND NOT TARGET NCCL::NCCL)
  add_library(NCCL::NCCL INTERFACE IMPORTED)
  target_include_directories(NCCL::NCCL SYSTEM INTERFACE ${NCCL_INCLUDE_DIR})
  target_link_libraries(NCCL::NCCL INTERFACE ${NCCL_LIBRARY} CUDA::cudart)
endif()
