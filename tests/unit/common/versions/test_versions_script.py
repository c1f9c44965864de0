"""Does ``tests/versions.sh`` end with the exit code that it documents?"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "versions.sh"
PYTHON = """#!/usr/bin/env bash
# Stands for python and for megasdc: makes its environment, and fails where it is told to.
case "$*" in
"-m venv --clear "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" && cp "$0" "${@: -1}/bin/megasdc" ;;
*"-m pip "*torch==*) what=torch ;;
*"-m pip "*-e*) what=pip ;;
"-c import json"*) echo "5.0 $LOSS" >>losses ;;
"-c rows"*) exec python3 "$@" ;;
*"-m pytest "*) what=unit; echo '7 passed' ;;
"launch "*) what=launch; echo "smoke of a rank" ;;
esac
[ "${what:-none}" != "$FAILS" ] || { echo "ERROR: no such thing: passed"; exit 1; }
"""
RUN = ["--python", "3.12.1", "--torch", "2.12.1", "--megatron", "0.18.2"]


@pytest.mark.parametrize(
    ("arguments", "fails", "code", "said"),
    [
        (RUN, "", 0, "passed  py3.12.1-torch2.12.1-"),
        ([*RUN, "--smoke"], "unit", 0, "unit tests not run"),
        (RUN, "unit", 1, "FAILED  unit tests  py3.12.1"),
        (RUN, "launch", 1, "FAILED  smoke run  py3.12.1"),
        (RUN, "torch", 3, "skipped  py3.12.1-torch2.12.1-deepspeed0.19.8-megatron0.18.2: ERROR: no such thing: passed"),
        (RUN, "pip", 1, "FAILED  install  py3.12.1-torch2.12.1-deepspeed0.19.8-megatron0.18.2: ERROR: no such thing"),
        (["--python", "3.99.0", *RUN[2:]], "", 3, "Python 3.99 is not here, neither in pyenv nor on PATH"),
        (RUN[:4], "", 2, "Exit code: 0 all that was run passed"),
        (["--fast"], "", 2, "Exit code: 0 all that was run passed"),
    ],
)
def test_exit_codes(tmp_path: Path, arguments: list[str], fails: str, code: int, said: str) -> None:
    """0 passed, 1 something failed, 2 wrong options, 3 nothing could be run; the reason is printed.

    A combination is skipped where there is no such Python or PyTorch; what else cannot be installed has failed.
    """
    done = _run(tmp_path, arguments, fails, "3.5")
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


def test_losses_that_are_no_numbers_fail_the_smoke_run(tmp_path: Path) -> None:
    """NaN in every layout is no agreement."""
    done = _run(tmp_path, [*RUN, "--smoke"], "", "nan")
    assert done.returncode == 1 and "FAILED  smoke run" in done.stdout, done.stdout + done.stderr


def _run(tmp_path: Path, arguments: list[str], fails: str, loss: str) -> subprocess.CompletedProcess[str]:
    python = tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {**os.environ, "PYENV_ROOT": str(tmp_path / "pyenv"), "FAILS": fails, "LOSS": loss}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments, "--cache", str(tmp_path / "cache")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
