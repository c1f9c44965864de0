"""A run that saves beside training, in memory and to an archive has the bits of one that waits for its saves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import events_of, metrics_of, prepare_text, pretrain_rank, state_of, train_run, write_config

from megasdc.checkpoint.snapshot import Snapshot

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
STEPS = 8
RESET = {"hook": "momentum_reset", "interval": 3, "warmup_steps": 1, "restart_bias_correction": True}


def train_with_slow_copies(config: str) -> tuple[int, str | None]:
    """Body of a rank whose snapshots are copied long after the passes of the step that follows have begun."""
    copy = Snapshot._copy

    def late(snapshot: Snapshot, *args: Any) -> Any:
        time.sleep(0.3)
        return copy(snapshot, *args)

    Snapshot._copy = late  # type: ignore[method-assign]
    try:
        return pretrain_rank(config, [])
    finally:
        Snapshot._copy = copy  # type: ignore[method-assign]


def test_nothing_of_the_next_step_is_in_a_snapshot(tmp_path: Path) -> None:
    """Moments are reset in the step after each save; copies wait for it, and are whole before it."""
    data = prepare_text(tmp_path)
    checkpoint: dict[str, Any] = {"interval": 2, "keep_last": 0, "writing": "sync"}
    common: dict[str, Any] = {"training__steps": STEPS, "optimizer_hooks": [RESET]}
    waiting = write_config(tmp_path / "sync.json", data, tmp_path / "sync", checkpoint=checkpoint, **common)
    assert train_run(waiting, 2) == [(0, None)] * 2
    archive = {"address": str(tmp_path / "archive")}
    checkpoint |= {"writing": "async", "memory": {"interval": 1}, "archive": archive}
    beside = write_config(tmp_path / "async.json", data, tmp_path / "async", checkpoint=checkpoint, **common)
    # What pushes to the archive has the time that nobody else wants.
    assert run_distributed(train_with_slow_copies, 2, str(beside), init=False, timeout_s=400) == [(0, None)] * 2
    assert metrics_of(tmp_path / "async") == metrics_of(tmp_path / "sync")
    for step in range(2, STEPS + 1, 2):
        name = f"checkpoints/step_{step:08d}"
        assert state_of(tmp_path / "async" / name) == state_of(tmp_path / "sync" / name), step
    assert [one["step"] for one in events_of(tmp_path / "async", "archive", "pushed")] == [2, 4, 6, 8]
    failed = [events_of(tmp_path / "async", "warning", name) for name in ("memory_not_kept", "checkpoint_not_saved")]
    assert failed == [[], []]
