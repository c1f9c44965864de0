#!/usr/bin/env bash
# Runs all checks: lint, types, documentation, unit tests, distributed tests, the real launcher, samples of campaigns.
#
#   bash tests/run.sh [--quick | --all] [pytest options]
#
# --quick: lint, types and unit tests alone, without the few slow ones, for the daily loop.
# --all adds the full campaigns and, without pytest options, runs tests of detection a second time with fused modules.
# Installs what the tests need into the same environment as the quick start.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/install.sh
source "$root/launch/install.sh" test
cd "$root"
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # or each program that a test starts compiles what it imports

select=(-m "not full")
fused=()
quick=0
if [ "${1:-}" = "--quick" ]; then
    quick=1
    shift
    select=(-m "not full and not slow")
    set -- -n 2 tests/unit "$@"
elif [ "${1:-}" = "--all" ]; then
    select=()
    fused=(tests/distributed/test_{detection_runs,fault_injection,golden,golden_runs,layouts,observer}.py)
    shift
fi

echo "== lint"
ruff check .
ruff format --check .
hadolint Dockerfile
if [ $quick = 1 ]; then
    echo "== types"
    mypy
else
    echo "== types, documentation"
    mypy & # one process: the other core has the documentation meanwhile
    types=$!
    # Imports all tests once, so that the processes that run them do not each compile the same files.
    python -m pytest --collect-only -q "${select[@]}" tests >/dev/null &
    collected=$!
    trap 'kill $types $collected 2>/dev/null || true' EXIT
    for page in configuration versions command-line; do
        megasdc config-table --check "docs/reference/$page.md"
    done
    python -m tools.bench reference --check docs/reference/command-line.md
    python -m tools.bench figures --check
    python -m tools.house picture --check docs/design/layers.md
    python -m tools.house hooks --check docs/design/hooks.md
    NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet --config-file .mkdocs.yml
    wait $types
    wait $collected || true # the tests themselves tell what is wrong
    trap - EXIT
fi
echo "== tests"
# A test that starts ranks leaves two cores idle half of its time, so four files of tests run side by side, in order of
# their folders: launches come before unit tests, whose short files fill the end evenly.
workers=(-n 4 --dist loadfile --no-loadscope-reorder)
if [ $# -gt 0 ]; then
    workers=()
    fused=()
fi
# --batch: nobody wakes up in place of who holds a lock: gloo's network thread would wait for the lock by asking again and again.
code=0
chrt --batch 0 python -m pytest -q --durations=40 "${select[@]}" "${workers[@]}" "$@" || code=$?
if [ ${#fused[@]} -gt 0 ]; then
    echo "== tests of detection with fused modules"
    MEGASDC_TESTS_FUSE=1 chrt --batch 0 python -m pytest -q -m "not full" "${workers[@]}" "${fused[@]}" || code=$?
fi
exit $code
