#!/usr/bin/env bash
# Runs all checks: lint, types, unit tests, distributed tests, the real launcher, and a sample of every campaign.
#
#   bash tests/run.sh [--all] [pytest options]
#
# --all adds the full campaigns. Installs what the tests need into the same environment as the quick start.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/install.sh
source "$root/launch/install.sh" test
cd "$root"
export OMP_NUM_THREADS=1

select=(-m "not full")
if [ "${1:-}" = "--all" ]; then
    select=()
    shift
fi

echo "== lint"
ruff check .
ruff format --check .
echo "== types"
mypy
echo "== README's configuration table"
megasdc config-table --check README.md
echo "== tests"
# A test that starts ranks leaves two cores idle half of its time, so three files of tests run side by side, in order of
# their folders: launches come before unit tests, whose short files fill the end evenly.
workers=(-n 3 --dist loadfile --no-loadscope-reorder)
if [ $# -gt 0 ]; then
    workers=()
fi
exec python -m pytest -q --durations=40 "${select[@]}" "${workers[@]}" "$@"
