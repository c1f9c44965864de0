"""What do all tests with several ranks need? DeepSpeed's CPU operator, compiled once and not by all ranks."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest
from harness import extensions_dir

from megasdc.launcher.operator_build import build_operator_here

sys.path.append(str(Path(__file__).parents[1] / "unit" / "config"))  # field_values


@pytest.fixture(scope="session", autouse=True)
def compiled_operators() -> None:
    """Build the operator that every rank loads; other test runs wait at a file lock."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", extensions_dir())
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    folder = Path(extensions_dir())
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "build.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_operator_here()
