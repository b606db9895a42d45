# What Open MPI's mpirun needs to run any number of ranks on one small machine, in a container, as root:
#   yield when idle, since a rank that spins starves the ranks it waits for (ornladios/ADIOS2#4991);
#   no binding of ranks to cores, of which there are fewer; only loopback and shared memory, without the
#   process_vm_readv copies that containers forbid.
set(tutti_mpirun_options)
set(tutti_mpirun_is_open_mpi FALSE)
if(TARGET tutti::mpi AND MPIEXEC_EXECUTABLE)
  execute_process(COMMAND ${MPIEXEC_EXECUTABLE} --version OUTPUT_VARIABLE tutti_mpirun_version ERROR_QUIET)
  if(tutti_mpirun_version MATCHES "Open MPI|OpenRTE")
    set(tutti_mpirun_is_open_mpi TRUE)
    set(tutti_mpirun_options --allow-run-as-root --oversubscribe --bind-to none
      --mca mpi_yield_when_idle 1 --mca btl self,vader --mca btl_vader_single_copy_mechanism none
      --mca oob_tcp_if_include lo)
  endif()
endif()
