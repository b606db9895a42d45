# A project that adds tutti as a folder: it gets tutti::tutti alone, and the component it switches on.
include(${CMAKE_CURRENT_LIST_DIR}/steps.cmake)

step(${configure} -S ${CMAKE_CURRENT_LIST_DIR}/add_subdirectory -B ${WORK}/build -DTUTTI_SOURCE=${SOURCE})
step(${CMAKE_COMMAND} --build ${WORK}/build)
step(${WORK}/build/program)
expect_output("tutti ${VERSION}: 3 ranks")
# Its own fmt serves where it has one.
step(${configure} -S ${CMAKE_CURRENT_LIST_DIR}/add_subdirectory -B ${WORK}/own_fmt -DTUTTI_SOURCE=${SOURCE} -DOWN_FMT=ON
  -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON)
if(HAVE_BLAS)
  step(${configure} -S ${CMAKE_CURRENT_LIST_DIR}/add_subdirectory -B ${WORK}/blas -DTUTTI_SOURCE=${SOURCE}
    -DTUTTI_WITH_BLAS=ON)
  step(${CMAKE_COMMAND} --build ${WORK}/blas)
  step(${WORK}/blas/program_blas)
  expect_output("2 * 3 = 6")
endif()
