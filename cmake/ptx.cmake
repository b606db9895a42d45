# tutti_compile_to_ptx(<target>): for an object library whose .cu files no device of this machine will run. nvcc checks
# them whole on the way to PTX.
function(tutti_compile_to_ptx target)
  set_target_properties(${target} PROPERTIES CUDA_PTX_COMPILATION ON)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)  # knows how to optimize less; others read most of the time
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
  endif()
endfunction()
