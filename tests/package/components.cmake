# Configures tutti itself where the package of a component is missing: an error where the component was asked for, a
# build without it where it was not, and a refusal of any other value.
include(${CMAKE_CURRENT_LIST_DIR}/steps.cmake)

set(lean ${configure} -S ${SOURCE} -DTUTTI_BUILD_TESTS=OFF -DTUTTI_BUILD_BENCH=OFF -DTUTTI_BUILD_EXAMPLES=OFF)
set(without_cuda ${lean} -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON -DTUTTI_WITH_MPI=OFF -DTUTTI_WITH_BLAS=OFF)
set(without_nccl ${lean} -DCMAKE_DISABLE_FIND_PACKAGE_NCCL=ON -DTUTTI_WITH_MPI=OFF -DTUTTI_WITH_BLAS=OFF)
set(without_mpi ${lean} -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON -DTUTTI_WITH_BLAS=OFF)
set(without_blas ${lean} -DCMAKE_DISABLE_FIND_PACKAGE_CBLAS=ON -DTUTTI_WITH_MPI=OFF)
step(${without_mpi} -B ${WORK}/mpi_auto)
expect_output("tutti::mpi: not provided")
step_fails("TUTTI_WITH_MPI=ON, but no MPI was found" ${without_mpi} -B ${WORK}/mpi_on -DTUTTI_WITH_MPI=ON)
step(${without_blas} -B ${WORK}/blas_auto)
expect_output("tutti::blas: not provided")
step_fails("TUTTI_WITH_BLAS=ON, but no CBLAS was found" ${without_blas} -B ${WORK}/blas_on -DTUTTI_WITH_BLAS=ON)
foreach(package IN ITEMS ZLIB nlohmann_json)
  set(without ${lean} -DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON -DTUTTI_WITH_MPI=OFF -DTUTTI_WITH_BLAS=OFF)
  step(${without} -B ${WORK}/checkpoint_auto_${package})
  expect_output("tutti::checkpoint: not provided")
  step_fails("TUTTI_WITH_CHECKPOINT=ON, but no ${package} was found" ${without} -B ${WORK}/checkpoint_on_${package}
    -DTUTTI_WITH_CHECKPOINT=ON)
endforeach()
step(${without_cuda} -B ${WORK}/cuda_auto)
expect_output("tutti::cuda: not provided")
step_fails("TUTTI_WITH_CUDA=ON, but no CUDAToolkit was found" ${without_cuda} -B ${WORK}/cuda_on -DTUTTI_WITH_CUDA=ON)
step(${without_nccl} -B ${WORK}/nccl_auto)
expect_output("tutti::nccl: not provided")
step_fails("TUTTI_WITH_NCCL=ON, but no NCCL was found" ${without_nccl} -B ${WORK}/nccl_on -DTUTTI_WITH_NCCL=ON)
step_fails("TUTTI_WITH_MPI is 'maybe', expected AUTO, ON or OFF" ${without_mpi} -B ${WORK}/mpi_maybe
  -DTUTTI_WITH_MPI=maybe)
# A library without cblas_* is not taken for a CBLAS.
step_fails("does not link with CBLAS_LIBRARIES=m" ${lean} -B ${WORK}/wrong -DTUTTI_WITH_MPI=OFF -DTUTTI_WITH_BLAS=ON
  -DCBLAS_INCLUDE_DIR=${CMAKE_CURRENT_LIST_DIR} -DCBLAS_LIBRARIES=m)
