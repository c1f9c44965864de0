#!/usr/bin/env bash
# Makes the virtual environment and installs pinned versions into it; a second call finds everything there.
#
#   source launch/install.sh [extra]      sets MEGASDC_VENV and puts it on PATH
#
# The environment is .venv in the repository, or $MEGASDC_VENV. Extras: test, docs. One that was not made here and holds a
# permitted PyTorch, as the image of a cluster does, keeps all that fits: what is missing is installed without pins. Where the repository's path has a space
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
    if [ -x "$venv/bin/python" ]; then
        python="$venv/bin/python"
    fi
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
        echo "install: $python is not Python 3.11 to 3.13; set PYTHON to one that is" >&2
        return 1
    fi
    if [ ! -x "$venv/bin/python" ]; then
        mkdir -p "$(dirname "$venv")"
        "$python" -m venv "$venv" || return 1
        touch "$venv/.megasdc_made"
        # Python 3.11 brings a pip that takes twice as long for the same packages.
        "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --upgrade pip || true
    fi
    export MEGASDC_VENV="$venv"
    export PATH="$venv/bin:$PATH"
    export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$venv/torch_extensions}"

    stamp="$venv/.megasdc_installed${extra:+_$extra}"
    wanted="$(cat "$root/launch/constraints.txt" "$root/setup.py" | cksum) $root"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return 0
    fi
    local quiet=(--quiet --quiet --disable-pip-version-check) pins="$root/launch/constraints.txt" present
    if [ -z "${PYTHONDONTWRITEBYTECODE:-}" ]; then
        quiet+=(--no-compile) # Python compiles and keeps what is imported; pip would compile all, which nobody imports
    fi
    present="$(megasdc_torch_in "$venv/bin/python" || true)"
    if [ -e "$venv/.megasdc_present" ] || { [ -n "$present" ] && ! compgen -G "$venv/.megasdc_*" >/dev/null; }; then
        megasdc_torch_is_permitted "$venv/bin/python" "$root" "$present" || return 1
        echo "install: $venv holds PyTorch $present, which stays; what is missing is installed around it"
        pins="$venv/.megasdc_present"
        printf 'torch==%s\n' "$present" >"$pins"
    else
        echo "install: pinned packages into $venv (about 1.5 GB, a minute or two)"
    fi
    if [ "${pins##*/}" = constraints.txt ] && [ "${present%%+*}" != 2.13.0 ]; then
        local index=()
        if ! command -v nvidia-smi >/dev/null && ! megasdc_index_is_configured "$venv/bin/python"; then
            index=(--index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple)
        fi
        "$venv/bin/python" -m pip install "${quiet[@]}" "${index[@]}" -c "$pins" torch==2.13.0 || return 1
    fi
    # setuptools and wheel are in the environment, so that DeepSpeed builds without asking an index for them again.
    "$venv/bin/python" -m pip install "${quiet[@]}" -c "$pins" setuptools wheel || return 1
    "$venv/bin/python" -m pip install "${quiet[@]}" -c "$pins" -e "$root${extra:+[$extra]}" || return 1
    if ! compgen -G "$venv/lib/python3*/site-packages/torch/__pycache__/*" >/dev/null; then
        "$venv/bin/python" -c 'import megasdc.train.build' >/dev/null 2>&1 || true # or each start of who cannot write there compiles
    fi
    printf '%s' "$wanted" >"$stamp"
}

# The version of PyTorch in an environment, as pip has it; nothing where there is none.
megasdc_torch_in() {
    "$1" -c 'from importlib import metadata; print(metadata.version("torch"))' 2>/dev/null
}

megasdc_torch_is_permitted() {
    PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" "$1" - "$3" <<'EOF'
import sys

from megasdc.common.versions import range_problems

if problems := range_problems({"torch": sys.argv[1]}):
    sys.exit(f"install: {problems[0]}: use another environment (MEGASDC_VENV), or install a permitted PyTorch there")
EOF
}

# Whether the user told pip where to find packages: by a variable, or in any of pip's configuration files.
megasdc_index_is_configured() {
    # grep reads to the end: with -q it may leave first, and pip's broken pipe would count as failure under pipefail
    "$1" -m pip config list 2>/dev/null | grep -E '\.(index-url|extra-index-url|find-links)=' >/dev/null
}

megasdc_install "$@" || { echo "install: failed" >&2; return 1 2>/dev/null || exit 1; }
