"""Does a killed process stop those that come after it? DeepSpeed's operator and the lock it is built under."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
from harness import extensions_dir, run_distributed

from megasdc.launcher.operator_build import build_operator_here
from megasdc.parallel import groups
from megasdc.parallel.cpu_operator import EXTENSIONS_VARIABLE, OPERATOR, STAMP, load_built_operator
from megasdc.parallel.shared_buffers import PREFIX

pytestmark = pytest.mark.distributed

STARTS = 10


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the built operator, and a lock that nobody holds."""
    folder = tmp_path / "torch_extensions" / OPERATOR
    shutil.copytree(Path(extensions_dir()) / OPERATOR, folder)
    (folder / "lock").touch()
    monkeypatch.setenv(EXTENSIONS_VARIABLE, str(folder.parent))
    return folder


def _join_and_sum() -> tuple[float, bool]:
    import torch
    from deepspeed.ops.op_builder.builder import OpBuilder

    groups.init_process_group(60.0)
    value = torch.ones(1)
    torch.distributed.all_reduce(value)
    return value.item(), OPERATOR in OpBuilder._loaded_ops


def test_ranks_wait_for_no_lock(own: Path) -> None:
    """The operator is built, so they load it and leave the lock alone."""
    environment = {EXTENSIONS_VARIABLE: str(own.parent)}
    assert run_distributed(_join_and_sum, 2, init=False, env=environment, timeout_s=60.0) == [(2.0, True)] * 2
    assert (own / "lock").exists()


def _join_and_reduce() -> tuple[float, list[str], str]:
    import deepspeed
    import torch

    groups.init_process_group(60.0)
    value = torch.ones(1)
    deepspeed.comm.inference_all_reduce(value)  # through the buffers
    names = [path.name for path in Path("/dev/shm").glob(f"*_{os.environ['MASTER_PORT']}_[01]")]
    return value.item(), names, Path("/proc/self/maps").read_text(encoding="utf-8")


def test_no_buffer_outlives_its_run() -> None:
    """Ranks of one host reduce through shared memory that has no name any more, and a killed run's is removed.

    By the first start in whose time no other one makes buffers, as other tests' ranks here may.
    """
    left = Path(f"/dev/shm/{PREFIX}_{os.getuid()}_test_{os.getpid()}_0")
    left.write_bytes(b"")
    try:
        for _start in range(STARTS):
            results = run_distributed(_join_and_reduce, 2, init=False, env={"LOCAL_SIZE": "2"}, timeout_s=60.0)
            for value, names, maps in results:
                assert (value, names) == (2.0, [])
                assert len(set(re.findall(rf"{PREFIX}\S+_[01] \(deleted\)", maps))) == 2
            if not left.exists():
                return
        pytest.fail(f"{left} is still there after {STARTS} starts")
    finally:
        left.unlink(missing_ok=True)


def test_the_lock_is_removed_before_ranks_start(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a word; what is built stays as it is."""
    before = (own / f"{OPERATOR}.so").stat().st_mtime_ns
    with caplog.at_level(logging.WARNING):
        build_operator_here()
    assert not (own / "lock").exists()
    assert f"removed stale build lock {own / 'lock'}" in caplog.text
    assert (own / f"{OPERATOR}.so").stat().st_mtime_ns == before


@pytest.mark.parametrize("what", ["python", "torch", "deepspeed", "library", "torn", "none"])
def test_only_what_this_environment_built_is_loaded(own: Path, what: str) -> None:
    """Anything else is left to DeepSpeed, which builds."""
    stamp = json.loads((own / STAMP).read_text())
    if what in ("torch", "deepspeed"):
        stamp["versions"][what] = "0.1"
    else:
        stamp[what] = "0.1"
    (own / STAMP).write_text(json.dumps(stamp)[: 20 if what == "torn" else None])
    if what == "none":
        (own / STAMP).unlink()
    assert not load_built_operator()
