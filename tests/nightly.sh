#!/usr/bin/env bash
# Runs tests that are marked full, the slices that have not run for longest first, and notes that in tests/nightly.json.
#
#   bash tests/nightly.sh [--minutes 80] [--workers 2] [--only TEXT] [--list]
#
# Installs what the tests need into the same environment as tests/run.sh.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/install.sh
source "$root/launch/install.sh" test
cd "$root"
export OMP_NUM_THREADS=1
exec python -m tools.nightly "$@"
