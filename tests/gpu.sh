#!/usr/bin/env bash
# Shows what runs on this machine's GPU and what does not, in a few minutes; see `bash tests/gpu.sh --help`.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ "${1:-}" = "--make-wheels" ]; then
    shift
    exec bash "$root/tests/gpu/make_wheels.sh" "$@"
fi
export PYTHONPATH="$root:$root/tests:$root/tests/distributed${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m gpu "$@"
