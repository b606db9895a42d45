# Finds cuDNN with the headers of its C++ frontend: cudnn.h and libcudnn, beside the CUDA toolkit or where packages put
# them, and cudnn_frontend.h, which comes by itself (github.com/NVIDIA/cudnn-frontend, or the Python package
# nvidia-cudnn-frontend).
#
# Provides CUDNN_FOUND, CUDNN_VERSION and the imported target CUDNN::CUDNN, which brings the CUDA runtime. To choose
# others, set CUDNN_ROOT, or CUDNN_INCLUDE_DIR, CUDNN_LIBRARY and CUDNN_FRONTEND_INCLUDE_DIR.
include(FindPackageHandleStandardArgs)

find_package(CUDAToolkit QUIET)
find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(CUDNN_LIBRARY cudnn HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}/lib)
find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h)
mark_as_advanced(CUDNN_INCLUDE_DIR CUDNN_LIBRARY CUDNN_FRONTEND_INCLUDE_DIR)
if(CUDNN_INCLUDE_DIR AND EXISTS ${CUDNN_INCLUDE_DIR}/cudnn_version.h)
  file(STRINGS ${CUDNN_INCLUDE_DIR}/cudnn_version.h CUDNN_VERSION
    REGEX "^#define CUDNN_(MAJOR|MINOR|PATCHLEVEL) [0-9]+$")
  list(TRANSFORM CUDNN_VERSION REPLACE "^.* " "")
  list(JOIN CUDNN_VERSION "." CUDNN_VERSION)
endif()

find_package_handle_standard_args(CUDNN
  REQUIRED_VARS CUDNN_LIBRARY CUDNN_INCLUDE_DIR CUDNN_FRONTEND_INCLUDE_DIR CUDAToolkit_FOUND
  VERSION_VAR CUDNN_VERSION)
if(CUDNN_FOUND AND NOT TARGET CUDNN::CUDNN)
  add_library(CUDNN::CUDNN INTERFACE IMPORTED)
  target_include_directories(CUDNN::CUDNN SYSTEM INTERFACE ${CUDNN_FRONTEND_INCLUDE_DIR} ${CUDNN_INCLUDE_DIR})
  target_link_libraries(CUDNN::CUDNN INTERFACE ${CUDNN_LIBRARY} CUDA::cudart)
endif()
