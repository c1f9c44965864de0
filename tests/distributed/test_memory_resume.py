"""Runs that cannot go on from the newest step in memory take an older one, and end as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from whole_runs import (
    events_of,
    leave_with_the_code,
    metrics_of,
    prepare_text,
    state_of,
    train_run,
    write_config,
)

from megasdc.checkpoint.files import hash_file
from megasdc.checkpoint.host_memory import RESTORE, SLOT_MANIFEST_FILE, find_slots, mark_verified_up_to, memory_folder
from megasdc.checkpoint.in_memory import MemorySaver
from megasdc.checkpoint.ranks import FolderRanks
from megasdc.checkpoint.records import write_record
from megasdc.checkpoint.verify import mark_corruption
from megasdc.common.origin import read_identity

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
STEPS, FAULT = 10, 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Folder of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight")
    config = write_config(folder / "c.json", data, folder / "run", training__steps=STEPS)
    assert train_run(config, 2) == [(0, None)] * 2
    return folder / "run"


@pytest.fixture
def failed(tmp_path: Path, data: Path) -> Iterator[tuple[Path, Path, Path]]:
    """A run whose rank 1 was lost in step 8: its configuration, its folder, and its folder in memory."""
    run_dir = tmp_path / "run"
    config = write_config(
        *(tmp_path / "c.json", data, run_dir),
        training__steps=STEPS,
        checkpoint={"interval": 4, "keep_last": 0, "memory": {"interval": 1}},
        process_faults=[{"kind": "exit", "rank": 1, "steps": [FAULT, FAULT], "exit_code": 17}],
    )
    run_distributed(_leave_with_all_held, 2, str(config), init=False, expect_exit={1: 17})
    memory = memory_folder(_run_of(run_dir))
    assert memory.is_dir()
    yesterday = time.time() - 86_400
    for path in (memory, *memory.rglob("*")):
        os.utime(path, (yesterday, yesterday))  # however long ago it was, it is this run's
    yield config, run_dir, memory
    shutil.rmtree(memory, ignore_errors=True)


def _leave_with_all_held(config: str) -> None:
    """Body of a rank that lets its writer be done with each step: writers run only where a processor is idle."""
    wait_for_copy = MemorySaver.wait_for_copy

    def wait_until_held(saver: MemorySaver) -> None:
        wait_for_copy(saver)
        while saver._sent:
            time.sleep(0.01)
            saver._own_newest()

    MemorySaver.wait_for_copy = wait_until_held  # type: ignore[method-assign]
    leave_with_the_code(config)


def _run_of(run_dir: Path) -> str:
    identity = read_identity(run_dir)
    assert identity is not None
    return identity.run


def _steps_held(memory: Path, run: str) -> list[int]:
    """Steps of which both ranks hold their files."""
    held = {(one.record.step, one.record.rank) for one in find_slots(memory, run)[0]}
    return sorted(step for step, rank in held if rank == 0 and (step, 1) in held)


def _spoil(memory: Path, run: str, step: int) -> None:
    """Make rank 1's optimizer state of a step one that DeepSpeed cannot load, with the digest of what it is now."""
    (slot,) = (one for one in find_slots(memory, run)[0] if (one.record.step, one.record.rank) == (step, 1))
    name = next(one.name for one in slot.record.files if "optim_states" in one.name)
    content: dict[str, Any] = torch.load(slot.folder / name, weights_only=False)
    content["optimizer_state_dict"].pop("base_optimizer_state")
    torch.save(content, slot.folder / name)
    told = {"size_bytes": (slot.folder / name).stat().st_size, "xxh3_128": hash_file(slot.folder / name)}
    files = [file.model_copy(update=told) if file.name == name else file for file in slot.record.files]
    write_record(slot.folder / SLOT_MANIFEST_FILE, slot.record.model_copy(update={"files": files}))


def _ended_as(run_dir: Path, straight: Path) -> None:
    name = f"checkpoints/step_{STEPS:08d}"
    assert state_of(run_dir / name) == state_of(straight / name)
    assert metrics_of(run_dir) == metrics_of(straight)


def test_what_cannot_be_loaded_is_not_met_again(failed: tuple[Path, Path, Path], straight: Path) -> None:
    """The start ends, as its engine was changed; the next one goes on from the step before it in memory."""
    config, run_dir, memory = failed
    run = _run_of(run_dir)
    older, newest = _steps_held(memory, run)[-2:]
    _spoil(memory, run, newest)
    codes = train_run(config, 2)
    assert [code for code, _ in codes] == [72, 72]
    assert "was loaded in part" in codes[0][1] and "it is removed from memory: start the run again" in codes[0][1]
    assert _steps_held(memory, run)[-1] == older
    assert train_run(config, 2) == [(0, None)] * 2
    (event,) = events_of(run_dir, "resume", "memory")
    assert (event["step"], event["disk_step"]) == (older, 4)
    _ended_as(run_dir, straight)


def test_what_cannot_be_put_together_leaves_the_disk(failed: tuple[Path, Path, Path], straight: Path) -> None:
    """A file stands where the folder would be made: the checkpoint of step 4 is taken, and that is told."""
    config, run_dir, memory = failed
    newest = _steps_held(memory, _run_of(run_dir))[-1]
    (memory / RESTORE).write_text("in the way")
    assert train_run(config, 2) == [(0, None)] * 2
    *partly_held, failed_to_restore = events_of(run_dir, "skip", "memory")
    assert all(one["reason"] == "nobody holds rank 1" for one in partly_held), "it was lost before its copy"
    assert (failed_to_restore["step"], newest) == (6, 6)
    assert "cannot be restored from memory" in failed_to_restore["reason"]
    assert [one["step"] for one in events_of(run_dir, "resume", "checkpoint")] == [4]
    assert not memory.exists(), "the run has ended"
    _ended_as(run_dir, straight)


def test_a_start_that_is_stopped_before_its_first_step_leaves_memory(
    failed: tuple[Path, Path, Path], straight: Path
) -> None:
    """What it was to go on from is newer than the disk: the next start takes it."""
    config, run_dir, memory = failed
    run = _run_of(run_dir)
    newest = _steps_held(memory, run)[-1]
    assert train_run(config, 2, f"megasdc.training.stop_step={newest}") == [(0, None)] * 2
    assert newest > 4 and newest in _steps_held(memory, run)
    assert train_run(config, 2) == [(0, None)] * 2
    assert [(one["step"], one["disk_step"]) for one in events_of(run_dir, "resume", "memory")] == [(newest, 4)] * 2
    assert not memory.exists(), "the run has ended"
    _ended_as(run_dir, straight)


def test_candidates_on_the_disk_are_left_behind(failed: tuple[Path, Path, Path], straight: Path) -> None:
    """After corruption an audit has agreed with what memory holds alone: what the disk has never counts again."""
    config, run_dir, memory = failed
    newest = _steps_held(memory, _run_of(run_dir))[-1]
    mark_verified_up_to(memory, newest)
    here = FolderRanks(0, "here", {"here": [0, 1]}, [0, 1], "")
    mark_corruption(run_dir / "checkpoints", 5, "incident.json", here)
    assert train_run(config, 2) == [(0, None)] * 2
    (event,) = events_of(run_dir, "resume", "memory")
    assert (event["step"], event["disk_step"]) == (newest, None)
    assert [one["step"] for one in events_of(run_dir, "move", "checkpoint")] == [4]
    assert (run_dir / "checkpoints" / "unverified" / "step_00000004").is_dir()
    assert not (run_dir / "checkpoints" / "corruption.json").exists()
    _ended_as(run_dir, straight)


def test_another_layout_goes_on_from_memory(failed: tuple[Path, Path, Path], straight: Path) -> None:
    """One rank takes what memory holds of two, newer than the disk; the losses are those of two but for rounding."""
    config, run_dir, memory = failed
    newest = _steps_held(memory, _run_of(run_dir))[-1]
    assert train_run(config, 1, "megasdc.checkpoint.other_layout=convert", "megasdc.process_faults=[]") == [(0, None)]
    (event,) = events_of(run_dir, "resume", "other_layout")
    assert (event["step"], event["saved_layout"], event["layout"]) == (newest, *(f"TP1 x PP1 x DP{n}" for n in (2, 1)))
    assert [one["disk_step"] for one in events_of(run_dir, "resume", "memory")] == [4]
    losses = [[row["train/loss"] for row in metrics_of(one) if "train/loss" in row] for one in (run_dir, straight)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == STEPS
    assert not memory.exists(), "the run has ended"
