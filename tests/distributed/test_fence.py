"""A launch whose folder another one has taken saves nothing there any more, neither at once nor beside training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import events_of, prepare_text, pretrain_rank, write_config

from megasdc.checkpoint.files import Fence, FencedError
from megasdc.checkpoint.save import DiskSaver, SaveJob
from megasdc.checkpoint.writer_process import Act, act
from megasdc.common.run_lock import RECORD_FILE, Holder
from megasdc.events import read_events
from megasdc.train.checkpointer import Saver
from megasdc.train.stop import FolderWatch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def _take(folder: Path, token: str = "another") -> None:
    record = Holder.this_process(token, "another-launch")
    (folder / RECORD_FILE).write_text(json.dumps(vars(record)))


def _train_and_lose_the_folder(config: str) -> tuple[int, str | None]:
    """Body of a rank: another launch takes the folder once it has a checkpoint, as where this host was frozen."""
    after_step, watch = Saver.after_step, FolderWatch.after_step
    FolderWatch.after_step = lambda *_: None  # type: ignore[method-assign] # it would end rank 0 alone, by its clock

    def taken_before_it(saver: Saver, run: Any, result: Any) -> None:
        if run.dims.rank == 0 and (run.folder / "checkpoints" / "latest").exists():
            _take(run.folder)
        after_step(saver, run, result)

    Saver.after_step = taken_before_it  # type: ignore[method-assign]
    try:
        return pretrain_rank(config, [])
    finally:
        Saver.after_step, FolderWatch.after_step = after_step, watch  # type: ignore[method-assign]


@pytest.mark.parametrize("writing", ["sync", "async"])
def test_the_checkpoints_of_another_launch_are_not_touched(tmp_path: Path, writing: str) -> None:
    """All saves after that fail on all ranks; what was there before stays."""
    checkpoint = {"interval": 2, "keep_last": 1, "writing": writing}
    config = write_config(
        *(tmp_path / "c.json", prepare_text(tmp_path), tmp_path / "run"), training__steps=8, checkpoint=checkpoint
    )
    codes = run_distributed(_train_and_lose_the_folder, 2, str(config), init=False)
    assert {code for code, _ in codes} <= {77, 78}
    assert all("was taken by launch another-launch" in said for _, said in codes)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in sorted(folder.glob("step_*"))] == ["step_00000002"]
    assert (folder / "latest").read_text() == "step_00000002\n"
    told = events_of(tmp_path / "run", "warning", "checkpoint_not_saved")
    assert bool(told) == (writing == "async")


def _lose_the_folder_before_the_old_are_deleted(config: str) -> tuple[int, str | None]:
    """Body of a rank: another launch takes the folder after ``latest`` names the checkpoint of step 6."""
    move, watch = DiskSaver._move_latest, FolderWatch.after_step
    FolderWatch.after_step = lambda *_: None  # type: ignore[method-assign]

    def taken(saver: DiskSaver, job: SaveJob) -> None:
        if job.step == 6 and job.place.leader:
            _take(job.folder.parent)
        move(saver, job)

    DiskSaver._move_latest = taken  # type: ignore[method-assign]
    try:
        return pretrain_rank(config, [])
    finally:
        DiskSaver._move_latest, FolderWatch.after_step = move, watch  # type: ignore[method-assign]


def test_old_checkpoints_of_another_launch_are_not_deleted(tmp_path: Path) -> None:
    """A launch that loses the folder between its last rename and the retention deletes nothing, and says so."""
    config = write_config(
        *(tmp_path / "c.json", prepare_text(tmp_path), tmp_path / "run"),
        training__steps=6,
        checkpoint={"interval": 2, "keep_last": 1},
    )
    run_distributed(_lose_the_folder_before_the_old_are_deleted, 2, str(config), init=False)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in sorted(folder.glob("step_*"))] == [f"step_{step:08d}" for step in (2, 4, 6)]
    told = list(read_events(tmp_path / "run"))
    assert any("was taken by launch another-launch" in str(event.fields) for event in told)


def test_only_the_launch_that_holds_a_folder_changes_it(tmp_path: Path) -> None:
    """A writer checks before it acts; a record that is not there, or cannot be read, stops nobody."""
    fence = Fence(tmp_path, "ours")
    task = Act({tmp_path / "latest": "text"}, fence=fence)
    _take(tmp_path)
    with pytest.raises(FencedError, match="was taken by launch another-launch"):
        act(task)
    assert not (tmp_path / "latest").exists()
    for content in (None, "", json.dumps(vars(Holder.this_process("ours", None)))):
        (tmp_path / RECORD_FILE).unlink(missing_ok=True)
        if content is not None:
            (tmp_path / RECORD_FILE).write_text(content)
        act(task)
        (tmp_path / "latest").unlink()
