#!/usr/bin/env bash
# Starts this host's part of a run without SSH. Call it once on every host, with the same arguments but NODE_RANK:
#
#   launch/no_ssh.sh NODE_RANK HOSTFILE CONFIG [--set a.b.c=value ...] [--allow-changed a.b.c ...]
#
# NODE_RANK is the host's line in HOSTFILE, from 0; HOSTFILE names every host of the run. Optional environment:
#   MASTER_ADDR        address of the first host; default: its name in HOSTFILE
#   MASTER_PORT        default 29500
#   MEGASDC_LAUNCH_ID  the same on every host; ranks then write done records in RUN_DIR/done/MEGASDC_LAUNCH_ID
#   PYTHON             interpreter of the environment; default: python
#   SCRIPT             training script; default: pretrain_gpt.py beside this file
#
# The exit code is this host's own: that of a rank that failed here, 0 when all ranks of this host are done.
# Run between two test hosts by tests/end_to_end/test_launch_examples.py.
set -euo pipefail

if [ "$#" -lt 3 ]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
node_rank=$1 hostfile=$2 config=$3
shift 3
if [ ! -r "$hostfile" ]; then
    echo "no_ssh.sh: hostfile $hostfile cannot be read; DeepSpeed would run on this host alone" >&2
    exit 78
fi

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
first_host=$(awk '!/^[[:space:]]*(#|$)/ { print $1; exit }' "$hostfile")
prefix=$("$python" -c 'import sys; print(sys.prefix)')
# What DeepSpeed compiles is kept for this environment alone, made with the tools that lie beside its interpreter.
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$prefix/torch_extensions}
export PATH=$prefix/bin:$PATH

# DeepSpeed's own lines go there; what is wrong with the configuration is told by the ranks.
logs='import sys; from megasdc.config.load import load_config; from megasdc.ops.launch.own_lines import logs_folder
print(logs_folder(load_config(sys.argv[1], sys.argv[3::2]).megasdc.logging.run_dir).absolute())'
if folder_of_logs=$("$python" -c "$logs" "$config" "$@" 2>/dev/null); then
    export MEGASDC_LAUNCHER_LOGS=$folder_of_logs
fi

exec "$python" -m megasdc.ops.launch.runner \
    --hostfile "$hostfile" --no_ssh --node_rank "$node_rank" \
    --master_addr "${MASTER_ADDR:-${first_host##*@}}" --master_port "${MASTER_PORT:-29500}" \
    "${SCRIPT:-$folder/pretrain_gpt.py}" --config "$config" "$@"
