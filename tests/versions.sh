#!/usr/bin/env bash
# Runs unit tests and a smoke run (two ranks, the real launcher: train, save, resume, as replicas, pipeline stages and
# tensor ranks, whose losses must agree) under other versions, each combination in an environment of its own.
#
#   bash tests/versions.sh [--all | --torch 2.12.1 --python 3.12 --megatron 0.18.2] [--deepspeed 0.19.8] [--smoke]
#                          [--cache DIR] [--remove]
#
# Without a choice: the combinations of megasdc/common/versions.py that have the oldest and the newest PyTorch; --all:
# every one of them but those of GPU machines. --smoke leaves the unit tests out. Environments lie in --cache (default
# ~/.cache/megasdc/versions) and are used again; --remove deletes each after its turn.
# A combination that cannot be had here is skipped with the reason: no such Python (it is looked for in pyenv and on
# PATH), or what pip says of PyTorch. pip takes PyTorch's CPU build where its index has one; PyPI's CUDA build runs on a
# CPU too, but needs 5 to 8 GB of disk. Where megasdc and the rest cannot be installed beside it, that has failed.
# Exit code: 0 all that was run passed; 1 something failed; 3 nothing could be run.
set -euo pipefail

usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/megasdc/versions" select=ends torch='' python='' megatron='' deepspeed=''
remove='' unit=1
while [ "$#" -gt 0 ]; do
    case $1 in
    --all) select=all ;;
    --smoke) unit='' ;;
    --remove) remove=1 ;;
    --torch | --python | --megatron | --deepspeed | --cache)
        [ "$#" -ge 2 ] || usage
        printf -v "${1#--}" '%s' "$2"
        shift
        ;;
    *) usage ;;
    esac
    shift
done
given="$torch$python$megatron"
if [ -n "$given" ] && { [ -z "$torch" ] || [ -z "$python" ] || [ -z "$megatron" ] || [ "$select" = all ]; }; then
    usage
fi

# Lines "PYTHON TORCH DEEPSPEED MEGATRON" of the list.
combinations() {
    PYTHONPATH="$root" "${PYTHON:-python3}" - "$1" <<'EOF'
import sys
from megasdc.common.versions import COMBINATIONS, RUN_ON_GPU, version_numbers

rows = [one for one in COMBINATIONS if one.state != RUN_ON_GPU]
rows.sort(key=lambda one: version_numbers(one.torch))
if sys.argv[1] == "ends":
    rows = [one for one in rows if one.torch in (rows[0].torch, rows[-1].torch)]
for one in rows:
    print(one.python, one.torch, one.deepspeed, one.megatron_core)
EOF
}

# A Python of that minor release: pyenv's of the exact version, another of pyenv's, one on PATH.
find_python() {
    local minor found
    minor="$(cut -d. -f1,2 <<<"$1")"
    for found in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1/bin/python" \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$minor".*/bin/python "$(command -v "python$minor" || true)"; do
        if [ -x "$found" ]; then
            echo "$found"
            return
        fi
    done
    return 1
}

# install VENV PYTHON TORCH DEEPSPEED MEGATRON; what pip says goes to VENV.log. Returns 3 where PyTorch cannot be had,
# 1 where anything else fails.
install() {
    local venv=$1 pins="$1.constraints" pip=("$1/bin/python" -m pip install --quiet --no-cache-dir)
    [ -e "$venv/.done" ] || "$2" -m venv --clear "$venv" || return 1
    {
        grep -vE '^(#|torch==|deepspeed==|megatron-core==|numpy==)' "$root/launch/constraints.txt"
        printf 'torch==%s\ndeepspeed==%s\nmegatron-core==%s\n' "$3" "$4" "$5"
        # Triton's interpreter in version 3.6, which PyTorch 2.10 and 2.11 bring, does not know numpy 2.4.
        case $3 in 2.10.* | 2.11.*) echo 'numpy<2.4' ;; *) grep '^numpy==' "$root/launch/constraints.txt" ;; esac
    } >"$pins"
    "${pip[@]}" -c "$pins" "torch==$3" || return 3
    "${pip[@]}" -c "$pins" setuptools wheel || return 1
    DS_BUILD_OPS=0 "${pip[@]}" -c "$pins" --no-build-isolation -e "$root[test]" || return 1
    touch "$venv/.done"
}

# smoke VENV FOLDER: trains in FOLDER, with two replicas and with two stages; prints losses
smoke() {
    local megasdc="$1/bin/megasdc" layout run small
    cd "$2"
    small=(--config "$root/configs/smoke.json" --set megasdc.data.path=data)
    small+=(--set megasdc.training.steps=8 --set megasdc.training.eval_interval=8)
    small+=(--set megasdc.checkpoint.interval=4 --set megasdc.logging.interval=2)
    small+=(--set 'megasdc.data.sources=[{"kind": "stdlib", "pattern": "json/*.py"}]')
    small+=(--set megasdc.data.tokenizer.vocab_size=512 --set megasdc.data.sequence_length=64)
    "$megasdc" prepare-data "${small[@]}" || return
    for layout in tensor=1 pipeline=2 tensor=2; do
        run=("${small[@]}" --set "megasdc.parallel.$layout" --set "megasdc.logging.run_dir=run-$layout")
        "$megasdc" launch --num-ranks 2 "${run[@]}" --set megasdc.training.stop_step=4 || return
        "$megasdc" launch --num-ranks 2 "${run[@]}" --set megasdc.checkpoint.resume=must || return
        "$megasdc" summary "run-$layout" --require-finished --json >"summary-$layout.json" || return
        "$1/bin/python" -c 'import json, sys
steps = [json.loads(line) for line in open(f"run-{sys.argv[1]}/metrics.jsonl")]
losses = [one["train/loss"] for one in steps if "train/loss" in one]
print(f"smoke {sys.argv[1]}: loss {losses[0]:.5f} to {losses[-1]:.5f}")
with open("losses", "a") as file:
    print(*losses, file=file)' "$layout" || return
    done
    "$1/bin/python" -c 'rows = [[float(one) for one in line.split()] for line in open("losses")]
pairs = [(a, b) for column in zip(*rows, strict=True) for a in column for b in column]
# Not the largest difference, which may hide a NaN.
assert all(abs(a - b) < 1e-4 for a, b in pairs), f"layouts differ by 1e-4 nats or more: {rows}"'
}

run_one() {
    local name="py$1-torch$2-deepspeed$3-megatron$4" found venv log failed='' installed=0
    venv="$cache/$name" log="$cache/$name.log"
    mkdir -p "$cache"
    if ! found="$(find_python "$1")"; then
        results+=("skipped  $name: Python $(cut -d. -f1,2 <<<"$1") is not here, neither in pyenv nor on PATH")
        return
    fi
    echo "== $name ($found); log: $log"
    install "$venv" "$found" "$2" "$3" "$4" >"$log" 2>&1 || installed=$?
    if [ "$installed" -ne 0 ]; then
        local state=skipped
        if [ "$installed" -ne 3 ]; then state='FAILED  install' code=1; fi
        results+=("$state  $name: $(grep -m 1 -E '^ *ERROR' "$log" || tail -n 1 "$log")")
        return
    fi
    local folder counts='unit tests not run'
    folder="$(mktemp -d)"
    export PATH="$venv/bin:$path" TORCH_EXTENSIONS_DIR="$venv/torch_extensions" MEGASDC_VENV="$venv"
    if ! (smoke "$venv" "$folder") >>"$log" 2>&1; then failed="smoke run"; fi
    grep '^smoke ' "$log" || true
    rm -rf "$folder"
    if [ -n "$unit" ]; then
        (cd "$root" && "$venv/bin/python" -m pytest -q -p no:cacheprovider -m 'not full' -n 2 tests/unit) >>"$log" 2>&1 ||
            failed="${failed:+$failed, }unit tests"
        counts="$(tail -n 1 "$log")"
    fi
    results+=("${failed:+FAILED  }${failed:-passed}  $name: $counts")
    if [ -n "$failed" ]; then code=1; elif [ "$code" -eq 3 ]; then code=0; fi
    if [ -n "$remove" ]; then rm -rf "$venv"; fi
}

export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONPATH="$root"
path=$PATH results=() code=3
if [ -n "$given" ]; then
    rows="$python $torch ${deepspeed:-$(sed -n 's/^deepspeed==//p' "$root/launch/constraints.txt")} $megatron"
else
    rows="$(combinations "$select")"
fi
while read -r row_python row_torch row_deepspeed row_megatron <&3; do
    run_one "$row_python" "$row_torch" "${deepspeed:-$row_deepspeed}" "$row_megatron"
done 3<<<"$rows"

printf '%s\n' '== results' "${results[@]}"
exit "$code"
