"""DeepSpeed's lines leave the console, all others stay on it, and none is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from pathlib import Path
from megasdc.train.logs import LibraryLines
from megasdc.train.logs import set_up_logging

set_up_logging(3)
library = LibraryLines()
with library:
    from deepspeed.utils import logger
    from deepspeed.runtime.pipe import module
    logger.warning("found no accelerator")
    print("the user's own")
exec('print("topology")', vars(module))
if sys.argv[2] == "fails":
    library.keep_on_console()
    raise ValueError("no run")
library.keep_in(Path(sys.argv[1]), 3)
logger.warning("later")
logger.error("out of memory")
print("the end")
"""


@pytest.fixture(scope="module")
def run_program(tmp_path_factory: pytest.TempPathFactory):
    """Run the program in a process whose import of DeepSpeed is its first; returns streams and the file."""

    def run(how: str) -> tuple[str, str, str]:
        folder = tmp_path_factory.mktemp("run")
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder), how], capture_output=True, text=True, check=False
        )
        path = folder / "logs" / "deepspeed_00003.log"
        return done.stdout, done.stderr, path.read_text() if path.exists() else ""

    return run


@pytest.mark.slow
def test_a_run_that_starts(run_program) -> None:
    """DeepSpeed's lines are in the file in their order; its errors are on the console too, in our form."""
    out, err, kept = run_program("starts")
    assert out == "the user's own\nthe end\n"
    lines = [line for line in kept.splitlines() if "get_accelerator" not in line]
    assert len(lines) == 4 and lines[1] == "topology"
    for line, text in zip([lines[0], *lines[2:]], ["found no accelerator", "later", "out of memory"], strict=True):
        assert line.endswith(text) and "test_" not in line
    assert "[rank 3] E out of memory" in err and "later" not in err


@pytest.mark.slow
def test_a_start_that_fails(run_program) -> None:
    """Then everything is on the console, with the traceback."""
    out, err, kept = run_program("fails")
    assert "found no accelerator" in out and "topology\n" in out and "the user's own\n" in out
    assert "ValueError: no run" in err
    assert kept == ""
