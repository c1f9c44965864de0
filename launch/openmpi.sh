#!/usr/bin/env bash
# Starts a run through OpenMPI instead of pdsh:
#
#   launch/openmpi.sh HOSTFILE CONFIG [--set a.b.c=value ...] [--allow-changed a.b.c ...]
#
# HOSTFILE has lines `NAME slots=RANKS`, which OpenMPI reads too. Hosts are checked over SSH first, environment and
# rank numbers reach ranks through megasdc.ops.launch.rank (mpi4py is not needed), and the exit code is true as with
# pdsh. OpenMPI takes no --exclude: write a hostfile with the hosts that take part. Optional environment:
#   MPI_INTERFACE  network card that mpirun uses; default eth0, which is DeepSpeed's default too
#   PYTHON         interpreter of the environment; default: python
#
# Run between two test hosts with OpenMPI 4.1.4 by tests/end_to_end/test_launch_examples.py where openmpi-bin is
# installed.
set -euo pipefail

if [ "$#" -lt 2 ]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
hostfile=$1 config=$2
shift 2

mpirun_options="--mca btl_tcp_if_include ${MPI_INTERFACE:-eth0} --mca oob_tcp_if_include ${MPI_INTERFACE:-eth0}"
if [ "$(id -u)" -eq 0 ]; then
    mpirun_options="$mpirun_options --allow-run-as-root"
fi

exec "${PYTHON:-python}" -m megasdc launch --hostfile "$hostfile" --config "$config" --launcher openmpi "$@" \
    -- --launcher_args "$mpirun_options"
