"""A library that makes the clock of a test host wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

from megasdc.common.errors import LaunchError


def clock_library(folder: Path) -> Path:
    """Build the library that adds to a host's wall clock what its ``/run/clock_off`` says.

    Raises:
        LaunchError: there is no compiler, or it fails.
    """
    library = folder / "clock.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(Path(__file__).with_name("clock.c"))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LaunchError("clocks that are off need a C compiler: install cc") from None
    if done.returncode:
        raise LaunchError(f"clocks that are off: {command} failed: {done.stderr[-500:]}")
    return library
