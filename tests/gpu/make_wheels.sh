#!/usr/bin/env bash
# Downloads the wheels that a machine with PyTorch alone lacks to run tests/gpu.sh, for `--wheels`.
#
#   bash tests/gpu.sh --make-wheels DIR [--python 3.12] [--platform PLATFORM] [--without NAME]... [--with NAME]...
#
# 27 MiB for Linux on x86-64. PyArrow (53 MiB) is left out: the parts golden and stress need it; add it by
# `--with pyarrow`, or leave out what that machine has, such as `--without numpy`.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-python3}"
names=(
    deepspeed megatron-core pydantic pydantic_core annotated-types typing-inspection typing_extensions xxhash numpy
    zstandard fsspec einops hjson msgpack tqdm py-cpuinfo packaging psutil ninja nvidia-ml-py
    jinja2 MarkupSafe rich Pygments markdown-it-py mdurl typer click shellingham annotated-doc
)
platforms=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux_2_12_x86_64
    manylinux2014_x86_64 manylinux2010_x86_64 manylinux1_x86_64)
version=3.12 folder=""
while [ $# -gt 0 ]; do
    case "$1" in
        --python) version="$2"; shift ;;
        --platform) platforms=("$2"); shift ;;
        --with) names+=("$2"); shift ;;
        --without)
            kept=()
            for name in "${names[@]}"; do [ "${name,,}" = "${2,,}" ] || kept+=("$name"); done
            names=("${kept[@]}")
            shift ;;
        -*) sed -n '2,7p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
        *) folder="$1" ;;
    esac
    shift
done
[ -n "$folder" ] || { echo "make_wheels: name the folder for the wheels" >&2; exit 2; }
mkdir -p "$folder"

wanted=()
for name in "${names[@]}"; do
    pinned="$(grep -i "^${name}==" "$root/launch/constraints.txt" || true)"
    if [ "$name" = deepspeed ]; then
        # On PyPI DeepSpeed is source. Without compiled operators its wheel fits every machine.
        DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps -w "$folder" "${pinned:-$name}"
    else
        wanted+=("${pinned:-$name}")
    fi
done
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]/#/--platform=}" -d "$folder" "${wanted[@]}"
ls -l "$folder"/*.whl | awk '{ bytes += $5 } END { printf "%d wheels, %.1f MiB\n", NR, bytes / 1048576 }'
