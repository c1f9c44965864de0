#!/usr/bin/env bash
# Makes the virtual environment and installs pinned versions into it; a second call finds everything there.
#
#   source launch/install.sh [extra]      sets MEGASDC_VENV and puts it on PATH
#
# The environment is .venv in the repository, or $MEGASDC_VENV. Extras: test. Where the repository's path has a space
# the environment is in the user's cache folder, since PyTorch's compiler calls break at spaces (torch 2.13).
# torch is taken by the package index that pip is configured with; without one, and without an NVIDIA GPU,
# from PyTorch's index of CPU builds (a plain PyPI install would fetch gigabytes of CUDA libraries).

megasdc_install() {
    local root extra venv stamp wanted python
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" || return 1
    extra="${1:-}"
    venv="$root/.venv"
    if [[ "$root" = *[[:space:]]* ]]; then
        venv="${XDG_CACHE_HOME:-$HOME/.cache}/megasdc/venv-$(printf '%s' "$root" | cksum | cut -d' ' -f1)"
    fi
    venv="${MEGASDC_VENV:-$venv}"
    if [[ "$venv" = *[[:space:]]* ]]; then
        echo "install: the environment's path has a space, at which PyTorch's compiler calls break: $venv" >&2
        echo "install: set MEGASDC_VENV to a path without" >&2
        return 1
    fi
    python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "install: $python is older than Python 3.11; set PYTHON to a newer one" >&2
        return 1
    fi
    if [ ! -x "$venv/bin/python" ]; then
        mkdir -p "$(dirname "$venv")"
        "$python" -m venv "$venv" || return 1
    fi
    export MEGASDC_VENV="$venv"
    export PATH="$venv/bin:$PATH"
    export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$venv/torch_extensions}"

    stamp="$venv/.megasdc_installed${extra:+_$extra}"
    wanted="$(cat "$root/launch/constraints.txt" "$root/setup.py" | cksum) $root"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return 0
    fi
    echo "install: pinned packages into $venv (about 1.5 GB, a minute or two)"
    local quiet=(--quiet --quiet --disable-pip-version-check)
    if ! "$venv/bin/python" -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "2.13.0")' 2>/dev/null; then
        local index=()
        if ! command -v nvidia-smi >/dev/null && ! megasdc_index_is_configured "$venv/bin/python"; then
            index=(--index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple)
        fi
        "$venv/bin/python" -m pip install "${quiet[@]}" "${index[@]}" -c "$root/launch/constraints.txt" torch==2.13.0 || return 1
    fi
    # setuptools and wheel are in the environment, so that DeepSpeed builds without asking an index for them again.
    "$venv/bin/python" -m pip install "${quiet[@]}" -c "$root/launch/constraints.txt" setuptools wheel ninja || return 1
    "$venv/bin/python" -m pip install "${quiet[@]}" -c "$root/launch/constraints.txt" -e "$root${extra:+[$extra]}" || return 1
    printf '%s' "$wanted" >"$stamp"
}

# Whether the user told pip where to find packages: by a variable, or in any of pip's configuration files.
megasdc_index_is_configured() {
    # grep reads to the end: with -q it may leave first, and pip's broken pipe would count as failure under pipefail
    "$1" -m pip config list 2>/dev/null | grep -E '\.(index-url|extra-index-url|find-links)=' >/dev/null
}

megasdc_install "$@" || { echo "install: failed" >&2; return 1 2>/dev/null || exit 1; }
