"""What do all tests with several ranks need? DeepSpeed's CPU operator, compiled once and not by all ranks."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from harness import extensions_dir


@pytest.fixture(scope="session", autouse=True)
def compiled_operators() -> None:
    """Build the operator that ``deepspeed.init_distributed`` loads; other test runs wait at a file lock."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", extensions_dir())
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    folder = Path(extensions_dir())
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*/deepspeed_shm_comm/*.so")) or any(folder.glob("deepspeed_shm_comm/*.so")):
        return
    with open(folder / "build.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        from deepspeed.comm.torch import build_shm_op

        build_shm_op()
