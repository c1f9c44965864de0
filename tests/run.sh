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
pytest=(python -m pytest -q --durations=40 "${select[@]}")
if [ $# -gt 0 ]; then
    exec "${pytest[@]}" "$@"
fi
# Either lane leaves a core idle most of its time, so the two run side by side; the second is shown when the first ends.
log="$(mktemp)"
trap 'rm -f "$log"; kill "$second" 2>/dev/null || true' EXIT
"${pytest[@]}" tests/unit tests/end_to_end >"$log" 2>&1 &
second=$!
failed=0
"${pytest[@]}" tests/distributed || failed=$?
echo "== unit tests, tests with the real launcher"
wait "$second" || failed=$?
cat "$log"
exit "$failed"
