#!/usr/bin/env bash
# Do all hosts hold the same checkpoint? Reads it on every host over SSH, brings small manifests back, compares them:
#
#   launch/compare_nodes.sh --hostfile HOSTFILE --path PATH [--out DIR] [--timeout SECONDS] [--json]
#
# PATH is the same on every host: a checkpoint, or a folder of several (then each step is compared, and the first that
# differs is named). Every line of HOSTFILE names a host, as for `megasdc launch`. HOST.manifest of each host, and
# HOST.log of what it said, go to DIR (default: compare_nodes.DATE in this folder). --timeout is for each host, default
# 3600. Optional environment: PYTHON (interpreter on this host and on the others, default python), PYTHONPATH.
#
# Exit code 0: all are the same; 1: something differs, and the odd host is named; 2: a host gave no manifest - it is
# named, the others are compared all the same -, or nothing could be compared.
# Run between three test hosts by tests/end_to_end/test_compare_nodes.py.
set -euo pipefail

usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
}

hostfile='' path='' out=compare_nodes.$(date -u +%Y%m%dT%H%M%SZ) timeout_s=3600 json=()
while [ "$#" -gt 0 ]; do
    case $1 in
    --hostfile | --path | --out | --timeout)
        [ "$#" -ge 2 ] || usage
        case $1 in
        --hostfile) hostfile=$2 ;;
        --path) path=$2 ;;
        --out) out=$2 ;;
        --timeout) timeout_s=$2 ;;
        esac
        shift 2
        ;;
    --json) json=(--json) && shift ;;
    *) usage ;;
    esac
done
[ -n "$hostfile" ] && [ -n "$path" ] || usage

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
# The names reach ssh's command line, so they are read and checked as those of a launch are.
if ! names=$("$python" -c 'import sys; from megasdc.ops.launch.hosts import read_hostfile
print(*read_hostfile(sys.argv[1]), sep="\n")' "$hostfile" 2>&1); then
    echo "compare_nodes.sh: error: ${names##*$'\n'}" >&2
    exit 2
fi
mapfile -t hosts <<<"$names"
mkdir -p "$out"

# printf %q makes each word one that the remote shell takes as it is.
command=$(printf '%q ' env ${PYTHONPATH:+"PYTHONPATH=$PYTHONPATH"} DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" \
    "$python" -m megasdc manifest "$path" --out -)

read_host() {
    local host=$1
    rm -f "$out/$host.manifest"
    # A manifest is one line, the last: what a login says before it does no harm.
    timeout "$timeout_s" ssh -o BatchMode=yes -o ConnectTimeout=10 -- "$host" "exec $command" \
        2>"$out/$host.log" </dev/null | tail -n 1 >"$out/$host.part" || return
    mv "$out/$host.part" "$out/$host.manifest"
}

declare -A process_of
for host in "${hosts[@]}"; do
    read_host "$host" &
    process_of[$host]=$!
done
manifests=() failed=0
for host in "${hosts[@]}"; do
    code=0
    wait "${process_of[$host]}" || code=$?
    if [ "$code" -eq 0 ]; then
        manifests+=("$out/$host.manifest")
        continue
    fi
    failed=1
    rm -f "$out/$host.part"
    reason=$(tail -n 1 "$out/$host.log")
    [ "$code" -eq 124 ] && reason="gave no answer in $timeout_s s; see whether it hangs, or raise --timeout"
    echo "compare_nodes.sh: error: $host gave no manifest: ${reason:-exit code $code}" >&2
done

if [ "${#manifests[@]}" -lt 2 ]; then
    echo "compare_nodes.sh: error: ${#manifests[@]} of ${#hosts[@]} hosts gave a manifest; two are needed" >&2
    exit 2
fi
code=0
"$python" -m megasdc compare "${manifests[@]}" "${json[@]}" || code=$?
[ "$failed" -eq 0 ] || code=2
exit "$code"
