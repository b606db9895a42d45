#!/bin/sh
# virtual_nodes.sh GPUS PROGRAM [ARGUMENTS...]: started by mpirun where ranks are more than the GPUs, runs PROGRAM so that
# each GPUS ranks, one behind the other, are a node of their own for NCCL, with all of the GPUs: rank r is to use GPU
# r modulo GPUS, as the trainer and the tests do. NCCL refuses two ranks of one host on one GPU; between hosts it does not
# ask. Inside such a node it talks over NVLink, between two of them over sockets or InfiniBand: for correctness and for
# the shape of a network, not for its speed.
NCCL_HOSTID="node $((${OMPI_COMM_WORLD_RANK:-$PMI_RANK} / $1))"
export NCCL_HOSTID
shift
exec "$@"
