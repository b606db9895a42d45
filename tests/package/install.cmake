# Installs tutti, moves what was installed, deletes the build, and lets programs find it: without components, with those
# whose packages are here, with one that does not exist, with one whose package is missing.
include(${CMAKE_CURRENT_LIST_DIR}/steps.cmake)

step(${configure} -S ${SOURCE} -B ${WORK}/build -DCMAKE_INSTALL_PREFIX=${WORK}/first
  -DTUTTI_BUILD_TESTS=OFF -DTUTTI_BUILD_BENCH=OFF -DTUTTI_BUILD_EXAMPLES=OFF -DTUTTI_WITH_MPI=OFF -DTUTTI_WITH_BLAS=OFF
  -DTUTTI_WITH_CUDA=OFF -DTUTTI_WITH_NCCL=OFF -DTUTTI_WITH_CHECKPOINT=OFF)
step(${CMAKE_COMMAND} --install ${WORK}/build)
file(REMOVE_RECURSE ${WORK}/build)
file(RENAME ${WORK}/first ${WORK}/prefix)

# Neither the source nor the build nor the first place may still be named in what was installed.
file(GLOB_RECURSE files ${WORK}/prefix/*.cmake)
foreach(file IN LISTS files)
  file(READ ${file} content)
  string(REPLACE ";" " " content "${content}")
  foreach(place IN ITEMS ${SOURCE} ${WORK})
    foreach(before IN ITEMS "\"" " " ":" "=" "(")  # where a path begins; a short one may end others
      string(FIND "${content}" "${before}${place}/" position)
      if(NOT position EQUAL -1)
        message(FATAL_ERROR "${file} names ${place}")
      endif()
    endforeach()
  endforeach()
endforeach()

function(consume name)
  step(${configure} -S ${CMAKE_CURRENT_LIST_DIR}/install -B ${WORK}/${name} -DCMAKE_PREFIX_PATH=${WORK}/prefix
    -DVERSION=${VERSION} ${ARGN})
  step(${CMAKE_COMMAND} --build ${WORK}/${name})
  step(${WORK}/${name}/program)
  expect_output("tutti ${VERSION}: 3 ranks")
endfunction()

consume(no_component)
set(components "")
foreach(component IN ITEMS mpi blas cuda cublas cudnn nccl checkpoint)
  string(TOUPPER ${component} upper)
  if(HAVE_${upper})
    string(APPEND components " ${component}")
  endif()
endforeach()
if(NOT components STREQUAL "")
  set(frontend)
  if(HAVE_CUDNN)
    set(frontend -DCUDNN_FRONTEND_INCLUDE_DIR=${CUDNN_FRONTEND_INCLUDE_DIR})
  endif()
  consume(components "-DCOMPONENTS=${components}" ${frontend})
endif()
if(HAVE_MPI)
  step(${MPIRUN} 2 ${WORK}/components/program_mpi)
  expect_output("rank 0 of 2")
  expect_output("rank 1 of 2")
endif()
if(HAVE_BLAS)
  step(${WORK}/components/program_blas)
  expect_output("2 * 3 = 6")
endif()
if(HAVE_CUDA)
  step(${WORK}/components/program_cuda)
  expect_output("a copy of 3 elements")
endif()
if(HAVE_CUBLAS)
  step(${WORK}/components/program_cublas)
  expect_output("a handle of cuBLAS")
endif()
if(HAVE_CUDNN)
  step(${WORK}/components/program_cudnn)
  expect_output("cuDNN 9")
endif()
if(HAVE_NCCL)
  step(${WORK}/components/program_nccl)
  expect_output("NCCL answers: 0")
endif()
if(HAVE_CHECKPOINT)
  step(${WORK}/components/program_checkpoint ${WORK}/checkpoints)
  expect_output("step 7 comes back: 3")
  expect_output("weights.safetensors has 1 tensor")
endif()

set(refused ${configure} -S ${CMAKE_CURRENT_LIST_DIR}/install -B ${WORK}/refused -DCMAKE_PREFIX_PATH=${WORK}/prefix
  -DVERSION=${VERSION})
step_fails("tutti has no component 'nonsense'" ${refused} -DCOMPONENTS=nonsense)
step_fails("tutti::mpi needs MPI, which was not found" ${refused} -DCOMPONENTS=mpi -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON)
step_fails("tutti::blas needs CBLAS, which was not found" ${refused} -DCOMPONENTS=blas
  -DCMAKE_DISABLE_FIND_PACKAGE_CBLAS=ON)
step_fails("tutti::cuda needs CUDAToolkit, which was not found" ${refused} -DCOMPONENTS=cuda
  -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON)
step_fails("tutti::cublas needs CUDAToolkit, which was not found" ${refused} -DCOMPONENTS=cublas
  -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON)
step_fails("tutti::cudnn needs CUDNN, which was not found" ${refused} -DCOMPONENTS=cudnn
  -DCMAKE_DISABLE_FIND_PACKAGE_CUDNN=ON)
step_fails("tutti::nccl needs NCCL, which was not found" ${refused} -DCOMPONENTS=nccl
  -DCMAKE_DISABLE_FIND_PACKAGE_NCCL=ON)
step_fails("tutti::checkpoint needs ZLIB, which was not found" ${refused} -DCOMPONENTS=checkpoint
  -DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON)
step_fails("tutti::checkpoint needs nlohmann_json, which was not found" ${refused} -DCOMPONENTS=checkpoint
  -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON)
