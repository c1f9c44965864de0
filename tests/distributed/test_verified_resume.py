"""After corruption, does a run go on from a verified checkpoint alone, and are candidates never taken for its own?"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_model import Run
from harness import run_distributed
from whole_runs import events_of, failure_of, prepare_text, pretrain_rank, state_of, train_run, write_config

from megasdc.checkpoint import resume
from megasdc.checkpoint.files import list_steps
from megasdc.checkpoint.load import load_checkpoint
from megasdc.checkpoint.ranks import CheckpointGroup, FolderRanks, find_place
from megasdc.checkpoint.resume import find_checkpoint, quarantine
from megasdc.checkpoint.verify import find_corruption, list_verified, mark_corruption, mark_verified
from megasdc.common.errors import CheckpointError, StorageError
from megasdc.determinism import restore_rng
from megasdc.events import EventLog, read_events

pytestmark = pytest.mark.distributed

NODES = ("a", "b")


def _folder(root: str, storage: str) -> tuple[Path, dict[str, Any]]:
    """Folder and options of this rank; of node-local storage each rank is a node."""
    if storage == "shared":
        return Path(root) / "checkpoints", {}
    node = NODES[torch.distributed.get_rank()]
    return Path(root) / node, {"storage": storage, "node": node}


def _save_often(run: Run, folder: Path, options: dict[str, Any], *steps: int) -> None:
    while run.engine.global_steps < steps[-1]:
        run.train(1)
        if run.engine.global_steps in steps:
            run.save(folder, **options)


def _resume(
    run: Run, folder: Path, events: EventLog | None = None, require_verified: Any = "auto", **options: Any
) -> int | None:
    """As a run does it: choose, load, leave behind what was not trusted."""
    ranks = CheckpointGroup(events=events, **options)
    chosen = find_checkpoint(folder, run.dims, ranks, require_verified=require_verified)
    if chosen is not None:
        loaded = load_checkpoint(run.engine, chosen, run.dims, ranks)
        restore_rng(loaded.rank_state["rng"])
        run.consumed = loaded.rank_state["consumed"]
    quarantine(folder, chosen, ranks)
    return None if chosen is None else chosen.step


def _after_corruption(root: str, storage: str) -> dict[str, Any]:
    folder, options = _folder(root, storage)
    place = find_place(CheckpointGroup(**options))
    run = Run()
    events = EventLog(root, place.rank)
    run.train(2)
    run.save(folder, **options)
    expected = run.digest()
    _save_often(run, folder, options, 4, 6)
    mark_verified(folder, 3, 4, place)
    mark_corruption(folder, 7, "incident_step_00000007.json", place)
    torch.distributed.barrier()
    if storage == "node_local" and place.rank == 1:  # one node did not get its marks written
        (folder / "step_00000002" / "verified.json").unlink()
        (folder / "corruption.json").unlink()
    torch.distributed.barrier()
    other = Run(seed=5)
    ignored = find_checkpoint(folder, other.dims, CheckpointGroup(events=events, **options), require_verified="never")
    assert ignored is not None
    found: dict[str, Any] = {"never": ignored.step}
    found["auto"] = _resume(other, folder, events, **options)
    found["steps"] = list_steps(folder)
    found["aside"] = list_steps(folder / "unverified")
    found["latest"] = (folder / "latest").read_text().strip()
    found["corruption"] = find_corruption(folder)
    found["same state"] = other.digest() == expected
    _save_often(other, folder, options, 3, 5)  # other steps than before: 4 and 6 must not come back
    found["again"] = _resume(other, folder, events, **options)
    torch.distributed.barrier()
    mark_verified(folder, 5, 6, place)
    found["verified"] = list_verified(folder)
    return found


@pytest.mark.parametrize("storage", ["shared", "node_local"])
def test_a_resume_after_corruption_lands_at_the_newest_verified_checkpoint(tmp_path: Path, storage: str) -> None:
    """Candidates are passed over and moved aside on every node, then the mark goes; later saves count as always."""
    answers = run_distributed(_after_corruption, 2, str(tmp_path), storage)
    for answer in answers:
        assert answer["never"] == 6
        assert answer["auto"] == 2
        assert answer["steps"] == [2]
        assert answer["aside"] == [4, 6]
        assert answer["latest"] == "step_00000002"
        assert answer["same state"]
        assert answer["corruption"] is None
        assert answer["again"] == 5
    assert answers[0]["verified"] == [2, 3, 5]
    skips = {event.step: event.fields["reasons"] for event in read_events(tmp_path, kind="skip", name="checkpoint")}
    assert skips == {step: ["it is a candidate: no audit has agreed after it"] for step in (6, 4)}
    assert sorted(event.step or 0 for event in read_events(tmp_path, kind="move", name="checkpoint")) == [4, 6]
    assert len(list(read_events(tmp_path, kind="clear", name="corruption_mark"))) == 1
    marks = [event.fields for event in read_events(tmp_path, kind="warning", name="corruption_mark")]
    assert [fields["ignored"] for fields in marks] == [True, False]
    assert "step 7, see incident_step_00000007.json" in marks[0]["message"]


def _interrupted(root: str) -> dict[str, Any]:
    folder, options = _folder(root, "node_local")
    place = find_place(CheckpointGroup(**options))
    run = Run()
    _save_often(run, folder, options, 2, 4)
    mark_verified(folder, 2, 3, place)
    mark_corruption(folder, 5, "incident.json", place)
    torch.distributed.barrier()
    found: dict[str, Any] = {}
    original = resume.move_aside
    if place.rank == 1:
        resume.move_aside = _refuse  # type: ignore[assignment]
    try:
        _resume(run, folder, **options)
    except StorageError as error:
        found["error"] = str(error)
    finally:
        resume.move_aside = original
    found["mark"] = find_corruption(folder)
    found["steps"] = list_steps(folder)
    found["again"] = _resume(run, folder, **options)
    found["mark then"] = find_corruption(folder)
    found["steps then"] = list_steps(folder)
    return found


def _refuse(*args: Any) -> None:
    raise OSError(30, "Read-only file system")


def test_the_corruption_mark_stays_until_every_node_has_moved_its_candidates(tmp_path: Path) -> None:
    """One node that cannot ends all with its name in the message; the next resume finds the mark and does the rest."""
    first, second = run_distributed(_interrupted, 2, str(tmp_path))
    for answer in (first, second):
        assert "rank 1 on b" in answer["error"]
        assert "step 5" in answer["mark"]
        assert (answer["again"], answer["mark then"], answer["steps then"]) == (2, None, [2])
    assert (first["steps"], second["steps"]) == ([2], [2, 4])


def _refused(root: str) -> dict[str, Any]:
    folder, options = _folder(root, "shared")
    place = find_place(CheckpointGroup())
    run = Run()
    found: dict[str, Any] = {}
    mark_corruption(folder, 1, "incident.json", place)
    torch.distributed.barrier()
    found["nothing there"] = _resume(run, folder)
    found["mark of nothing"] = find_corruption(folder)
    _save_often(run, folder, options, 2, 4)
    found["before"] = _resume(run, folder)
    try:
        _resume(run, folder, require_verified="always")
    except CheckpointError as error:
        found["always"] = (error.exit_code, str(error))
    mark_corruption(folder, 5, "incident.json", place)
    torch.distributed.barrier()
    try:
        _resume(run, folder)
    except CheckpointError as error:
        found["corruption"] = (error.exit_code, str(error))
    found["untouched"] = list_steps(folder)
    found["never"] = _resume(run, folder, require_verified="never")
    found["mark"] = find_corruption(folder)
    torch.distributed.barrier()
    mark_verified(folder, 4, 6, place)
    torch.distributed.barrier()
    found["verified since"] = _resume(run, folder)
    found["mark then"] = find_corruption(folder)
    return found


def test_without_a_verified_checkpoint_a_run_does_not_go_on(tmp_path: Path) -> None:
    """Exit code 72 on all ranks, nothing moved, the remedy named; the mark outlives a resume that ignores it."""
    first, second = run_distributed(_refused, 2, str(tmp_path))
    assert first == second
    assert first["nothing there"] is None
    assert first["mark of nothing"] is None, "a run that starts anew has nothing to be wary of"
    assert first["before"] == 4
    code, text = first["always"]
    assert code == 72
    assert "none of the 2 checkpoints" in text
    assert "require_verified=never" in text
    assert "corruption" not in text
    code, text = first["corruption"]
    assert code == 72
    assert "corruption was found in step 5, see incident.json" in text
    assert "require_verified=never" in text
    assert first["untouched"] == [2, 4]
    assert first["never"] == 4
    assert "step 5" in first["mark"]
    assert first["verified since"] == 4
    assert first["mark then"] is None


def _retention(root: str, storage: str) -> dict[str, Any]:
    folder, options = _folder(root, storage)
    place = find_place(CheckpointGroup(**options))
    run = Run()
    _save_often(run, folder, options, 1, 2)
    if storage == "shared" or place.rank == 0:  # the other node has no mark: both must keep the same
        mark_verified(folder, 1, 2, place)
    torch.distributed.barrier()
    _save_often(run, folder, {**options, "keep_last": 1}, 3, 4, 5)
    kept = list_steps(folder)
    torch.distributed.barrier()
    mark_verified(folder, 5, 6, place)
    torch.distributed.barrier()
    _save_often(run, folder, {**options, "keep_last": 1}, 6)
    return {"kept": kept, "then": list_steps(folder)}


@pytest.mark.parametrize("storage", ["shared", "node_local"])
def test_retention_keeps_the_newest_verified_checkpoint_on_every_node(tmp_path: Path, storage: str) -> None:
    """With keep_last 1 the newest verified one stays beside the newest, until a later one is verified."""
    for answer in run_distributed(_retention, 2, str(tmp_path), storage):
        assert answer == {"kept": [1, 5], "then": [5, 6]}


def test_a_run_goes_on_after_corruption_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Exit code 72 while nothing is verified; then from the verified step on, bit for bit as without the corruption."""
    data = prepare_text(tmp_path)
    clean = write_config(tmp_path / "clean.json", data, tmp_path / "clean", checkpoint__interval=2)
    config = write_config(tmp_path / "run.json", data, tmp_path / "run", checkpoint__interval=2)
    host = socket.gethostname()
    leader = FolderRanks(rank=0, node=host, nodes={host: [0, 1]}, ranks=[0, 1], save_id="x")
    folder = tmp_path / "run" / "checkpoints"
    assert [code for code, _ in train_run(clean, 2)] == [0, 0]
    assert [code for code, _ in train_run(config, 2, "megasdc.training.stop_step=5")] == [0, 0]
    mark_corruption(folder, 6, "incident.json", leader)
    refused = train_run(config, 2)
    assert [code for code, _ in refused] == [72, 72]
    assert "corruption was found in step 6" in str(refused[0][1])
    failed = failure_of(tmp_path / "run")
    assert (failed.exit_code, failed.verified_checkpoint) == (
        72,
        None,
    ) and "corruption was found in step 6" in failed.text
    assert list_steps(folder) == [2, 4, 5]
    mark_verified(folder, 2, 3, leader)
    assert [code for code, _ in train_run(config, 2)] == [0, 0]
    assert [event["step"] for event in events_of(tmp_path / "run", "resume", "checkpoint")] == [2]
    assert list_steps(folder) == [2, 4, 6]
    assert list_steps(folder / "unverified") == [4, 5]
    assert find_corruption(folder) is None
    for step in (4, 6):
        name = f"step_{step:08d}"
        assert state_of(folder / name) == state_of(tmp_path / "clean" / "checkpoints" / name)
    always = (
        "megasdc.checkpoint.require_verified=always",
        "megasdc.audit.enabled=true",
        "megasdc.audit.interval=1000",
        "megasdc.determinism.enabled=true",
    )
    assert [code for code, _ in train_run(config, 2, *always)] == [0, 0]
    assert [event["step"] for event in events_of(tmp_path / "run", "resume", "checkpoint")] == [2, 2]
    assert list_steps(folder / "unverified_2") == [4, 6]


def _watch_passed_over(config: str) -> list[tuple[int, list[int]]]:
    """Train, and note after each step which checkpoints are not of the run's past."""
    from megasdc.train.checkpointer import Saver

    seen = []
    original = Saver.after_step

    def watched(self: Any, run: Any, result: Any) -> None:
        original(self, run, result)
        seen.append((run.step, sorted(run.skipped_checkpoint_steps)))

    Saver.after_step = watched  # type: ignore[method-assign]
    assert pretrain_rank(config, []) == (0, None)
    return seen


def test_a_run_knows_which_checkpoints_are_not_of_its_past(tmp_path: Path) -> None:
    """Damaged ones that the resume left out count as such until the run has saved their step again."""
    data = prepare_text(tmp_path)
    config = write_config(tmp_path / "run.json", data, tmp_path / "run", checkpoint__interval=2)
    assert [code for code, _ in train_run(config, 1, "megasdc.training.stop_step=5")] == [0]
    for step in (4, 5):
        (tmp_path / "run" / "checkpoints" / f"step_{step:08d}" / "manifest.json").unlink()
    assert run_distributed(_watch_passed_over, 1, str(config), init=False)[0] == [
        (3, [4, 5]),
        (4, [5]),
        (5, [5]),
        (6, [5]),
    ]
