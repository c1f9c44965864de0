"""Do marks tell verified checkpoints from candidates, for their own save only, and do commands show them?"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from hand_made import write_checkpoint
from test_checkpoint_files import make_checkpoint
from typer.testing import CliRunner

from megasdc.checkpoint.files import list_steps, step_folder
from megasdc.checkpoint.manifest import Manifest, read_manifest, write_manifest
from megasdc.checkpoint.ranks import FolderRanks
from megasdc.checkpoint.records import write_record
from megasdc.checkpoint.resume import move_aside
from megasdc.checkpoint.save import Retention, find_due, list_due, plan_retention
from megasdc.checkpoint.verify import (
    Standing,
    clear_corruption,
    find_corruption,
    find_standing,
    find_way_back,
    list_verified,
    mark_corruption,
    mark_verified,
    read_mark,
    verify_checkpoint,
)
from megasdc.checkpoint.writer_process import Act, act
from megasdc.cli import app
from megasdc.common import durable
from megasdc.common.errors import CheckpointError, CorruptionError, StorageError
from megasdc.common.run_lock import LockedFolders
from megasdc.events import EventLog, read_events
from megasdc.lab.checkpoints.views.inspect import inspect_checkpoint
from megasdc.ops.run_folder.summary import render, summarize_run
from megasdc.train.main import report_failure

LEADER = FolderRanks(rank=0, node="n", nodes={"n": [0, 1]}, ranks=[0, 1], save_id="x")
OTHER = FolderRanks(rank=1, node="n", nodes={"n": [0, 1]}, ranks=[0, 1], save_id="x")


def make_folder(folder: Path, *steps: int) -> Path:
    """Write checkpoints of several steps."""
    for step in steps:
        make_checkpoint(folder, step)
    return folder


def test_an_audit_verifies_what_was_saved_before_it(tmp_path: Path) -> None:
    """Whole checkpoints up to the step are marked once, by the leader, with an event; later and left-out ones stay."""
    make_folder(tmp_path, 2, 3, 4, 6)
    (tmp_path / "step_00000003" / "manifest.json").unlink()
    make_checkpoint(tmp_path, 5, storage="node_local")  # without its marker
    events = EventLog(tmp_path, 0)
    assert mark_verified(tmp_path, 5, 6, OTHER) == []
    assert list_verified(tmp_path) == []
    assert mark_verified(tmp_path, 5, 6, LEADER, skipped_checkpoint_steps={4}, events=events) == [2]
    assert mark_verified(tmp_path, 5, 7, LEADER, events=events) == [4]
    marks = {step: read_mark(tmp_path / step_folder(step)) for step in (2, 4, 5, 6)}
    assert {step: mark and (mark.step, mark.audit_step) for step, mark in marks.items()} == {
        2: (2, 6),
        4: (4, 7),
        5: None,
        6: None,
    }
    assert [(event.step, event.fields["audit_step"]) for event in read_events(tmp_path, kind="verify")] == [
        (2, 6),
        (4, 7),
    ]
    assert {event.step for event in read_events(tmp_path, name="checkpoint_not_marked")} == {3}


def test_a_mark_is_of_its_own_save(tmp_path: Path) -> None:
    """A mark of another save of the step, or a changed one, does not count; the next audit writes it anew."""
    path = make_checkpoint(tmp_path)
    mark_verified(tmp_path, 2, 3, LEADER)
    mark = path / "verified.json"
    manifest = read_manifest(path)
    write_manifest(path, Manifest.model_validate({**manifest.model_dump(), "save_id": "4567"}))
    with pytest.raises(CheckpointError, match=r"save 0123.*save 4567"):
        read_mark(path)
    assert list_verified(tmp_path) == []
    standing = find_standing(path)
    assert standing is not None
    assert not standing.verified
    assert "save 4567" in str(standing)
    assert mark_verified(tmp_path, 2, 5, LEADER) == [2]
    assert find_standing(path) == Standing(True, 5)
    mark.write_text(mark.read_text().replace('"audit_step": 5', '"audit_step": 9'))
    with pytest.raises(CheckpointError, match="was changed"):
        read_mark(path)
    assert list_verified(tmp_path) == []


@pytest.mark.slow
def test_a_mark_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk leaves a candidate and no broken file; the run is told and not ended."""
    path = make_checkpoint(tmp_path)
    events = EventLog(tmp_path, 0)

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(durable._process, "limit_s", 0.5)
    with caplog.at_level(logging.WARNING):
        assert mark_verified(tmp_path, 2, 3, LEADER, events=events) == []
    assert "stays a candidate" in caplog.text
    assert read_mark(path) is None
    assert "verified.json" not in {entry.name for entry in path.iterdir()}
    assert [event.step for event in read_events(tmp_path, name="checkpoint_not_marked")] == [2]
    with pytest.raises(StorageError, match="require_verified=always"):
        mark_corruption(tmp_path, 3, "incident.json", LEADER)
    assert mark_verified(tmp_path / ("x" * 300), 2, 3, LEADER) == [], "nor does a folder that cannot be listed end it"


def test_a_corruption_mark_is_there_until_it_is_cleared(tmp_path: Path) -> None:
    """It names step and report of the newest; one that cannot be read still counts; only the leader writes it."""
    folder = tmp_path / "checkpoints"
    assert find_corruption(folder) is None
    mark_corruption(folder, 7, "r/incident_step_00000007.json", OTHER)
    assert find_corruption(folder) is None
    mark_corruption(folder, 7, "r/incident_step_00000007.json", LEADER)
    mark_corruption(folder, 9, "r/incident_step_00000009.json", LEADER)
    assert find_corruption(folder) == "corruption was found in step 9, see r/incident_step_00000009.json"
    (folder / "corruption.json").write_text("{")
    assert "cannot be read" in (find_corruption(folder) or "")
    assert clear_corruption(folder)
    assert not clear_corruption(folder)
    assert find_corruption(folder) is None


def test_retention_keeps_what_a_run_can_go_back_to(tmp_path: Path) -> None:
    """The newest finite one, and the newest from which a finite step was taken; older versions' say nothing of it."""
    states = {4: (4, []), 8: (8, []), 12: (11, []), 16: (11, []), 20: (11, ["a.pt"]), 24: (11, ["a.pt", "b.pt"])}
    for step, (finite_step, not_finite) in states.items():
        write_checkpoint(tmp_path, step, finite_step=finite_step, not_finite=not_finite)
    write_checkpoint(tmp_path, 2)
    due = list_due(tmp_path, 24, Retention(1))
    assert due == [2, 4, 12, 20]
    answer = act(Act(due=lambda: find_due(tmp_path, 24, Retention(1))))
    assert (answer.deleted, answer.failed) == (due, [])
    assert list_steps(tmp_path) == [8, 16, 24], "16 is as finite as 12, and both lead nowhere; 8 led to step 9"
    way = find_way_back(tmp_path)
    assert way is not None and (way.step, way.verified) == (8, False) and "finite step followed" in str(way)
    assert find_way_back(tmp_path / "none") is None


def test_what_is_not_finite_or_not_known_to_be_is_never_verified(tmp_path: Path) -> None:
    """Neither does an audit mark it, nor does a mark count that lies in it."""
    bad, old = write_checkpoint(tmp_path, 2, not_finite=["a.pt"]), write_checkpoint(tmp_path, 4)
    good, events = make_checkpoint(tmp_path, 6), EventLog(tmp_path, 0)
    assert mark_verified(tmp_path, 6, 7, LEADER, events=events) == [6]
    assert {event.step for event in read_events(tmp_path, name="checkpoint_not_marked")} == {2, 4}
    mark = read_mark(good)
    assert mark is not None and read_manifest(bad).save_id == read_manifest(old).save_id == mark.save_id
    write_record(bad / "verified.json", mark.model_copy(update={"step": 2}))
    shutil.copy(good / "verified.json", old)
    for path, problem in ((bad, "a.pt when it was saved"), (old, "is of step 6, the checkpoint is of step 4")):
        with pytest.raises(CheckpointError, match=problem):
            read_mark(path)
    assert list_verified(tmp_path) == [6]
    way = find_way_back(tmp_path)
    assert way is not None and (way.step, way.verified) == (6, True)


def test_retention_keeps_the_newest_verified(tmp_path: Path) -> None:
    """While only candidates are newer, the newest verified checkpoint stays; without marks nothing else does."""
    make_folder(tmp_path, 1, 2, 3, 4, 5)
    assert plan_retention([1, 2, 3, 4, 5], 5, 2, 0) == [1, 2, 3]
    assert plan_retention([1, 2, 3, 4, 5], 5, 2, 0, {1, 2}) == [1, 3]
    assert plan_retention([1, 2, 3, 4, 5], 5, 2, 0, {1, 2, 5}) == [1, 2, 3]
    assert plan_retention([1, 2, 3, 4, 5], 4, 1, 0, {2, 5}) == [1, 3], "the mark of a later step does not count"
    assert plan_retention([1, 2, 3, 4, 5], 5, 1, 0, {2}, {1, 3}) == [1, 4], "the newest of each"
    mark_verified(tmp_path, 2, 3, LEADER)
    assert list_due(tmp_path, 5, Retention(1), list_verified(tmp_path)) == [1, 3, 4]


def test_candidates_moved_aside_stay_readable_and_never_collide(tmp_path: Path) -> None:
    """Each keeps its name in a folder of its own kind; a second move of the same step takes another folder."""
    make_folder(tmp_path, 2, 4, 6)
    assert move_aside(tmp_path, [6, 4, 8]) == [(6, "unverified/step_00000006"), (4, "unverified/step_00000004")]
    assert list_steps(tmp_path) == [2]
    assert verify_checkpoint(tmp_path / "unverified" / "step_00000004").ok
    make_folder(tmp_path, 4, 5)
    assert move_aside(tmp_path, [5]) == [(5, "unverified/step_00000005")]
    assert move_aside(tmp_path, [4]) == [(4, "unverified_2/step_00000004")]
    assert move_aside(tmp_path, [4]) == []


def test_commands_show_marks_only_where_audits_are_in_use(tmp_path: Path) -> None:
    """Without marks nothing is said; with one, each is verified or a candidate, in text and JSON, and still whole."""
    runner = CliRunner()
    make_folder(tmp_path, 2, 4)
    for command in ("verify-checkpoint", "inspect-checkpoint"):
        shown = runner.invoke(app, [command, str(tmp_path)])
        assert shown.exit_code == 0
        assert "verified" not in shown.stdout
        assert "candidate" not in shown.stdout
        assert [
            one["standing"] for one in json.loads(runner.invoke(app, [command, str(tmp_path), "--json"]).stdout)
        ] == [
            None,
            None,
        ]
    mark_verified(tmp_path, 2, 3, LEADER)
    for command in ("verify-checkpoint", "inspect-checkpoint"):
        shown = runner.invoke(app, [command, str(tmp_path)])
        assert shown.exit_code == 0, "a mark is not an unexpected file"
        assert "verified by the audit of step 3" in shown.stdout
        assert "candidate, no audit has agreed after it" in shown.stdout
        found = json.loads(runner.invoke(app, [command, str(tmp_path), "--json"]).stdout)
        assert {one["step"]: (one["standing"]["verified"], one["standing"]["audit_step"]) for one in found} == {
            2: (True, 3),
            4: (False, None),
        }
    alone = runner.invoke(app, ["inspect-checkpoint", str(tmp_path / "step_00000004")])
    assert "candidate" in alone.stdout, "the marks of its neighbours count where it alone is named"
    shutil.rmtree(tmp_path / "step_00000002")
    assert inspect_checkpoint(tmp_path / "step_00000004")["standing"] is None
    mark_corruption(tmp_path, 5, "incident.json", LEADER)
    assert inspect_checkpoint(tmp_path / "step_00000004")["standing"]["verified"] is False


def test_the_summary_of_a_failed_run_tells_the_newest_verified(tmp_path: Path) -> None:
    """Of what is kept the newest that an audit has agreed after, not the newest."""
    checkpoints = make_folder(tmp_path / "checkpoints", 5, 10, 15)
    mark_verified(checkpoints, 10, 12, LEADER)
    (tmp_path / "events").mkdir()
    report_failure(tmp_path, 73, CorruptionError("step 17 is not committed"), 0.0, LockedFolders())
    found = summarize_run(tmp_path)
    assert found.failure is not None and len(found.checkpoints) == 3
    assert found.failure.verified_checkpoint == str(checkpoints / "step_00000010")
    assert f"last verified     {checkpoints / 'step_00000010'}" in render(found)


def test_a_checkpoint_that_stays_a_candidate_is_told_once(tmp_path: Path) -> None:
    """Not anew at each audit; another reason is told, and a checkpoint that has become good is marked."""
    path, events, told = write_checkpoint(tmp_path, 2), EventLog(tmp_path, 0), dict[int, str]()
    for audit_step in (3, 5, 7):
        assert mark_verified(tmp_path, 2, audit_step, LEADER, events=events, told=told) == []
    assert [event.step for event in read_events(tmp_path, name="checkpoint_not_marked")] == [2]
    manifest = read_manifest(path).model_dump()
    write_manifest(path, Manifest.model_validate({**manifest, "not_finite": ["a.pt"]}))
    mark_verified(tmp_path, 2, 9, LEADER, events=events, told=told)
    assert [event.step for event in read_events(tmp_path, name="checkpoint_not_marked")] == [2, 2]
    write_manifest(path, Manifest.model_validate({**manifest, "not_finite": []}))
    assert mark_verified(tmp_path, 2, 11, LEADER, events=events, told=told) == [2]


def test_an_audit_says_nothing_of_what_other_hosts_have_saved(tmp_path: Path) -> None:
    """A host that is not in the start, or with fewer ranks, has not computed the same afterwards."""
    saved_with = {2: {"n": [0], "m": [1]}, 4: {"n": [0, 1]}, 6: {"n": [0], "o": [1]}, 8: {"n": [0]}}
    for step, nodes in saved_with.items():
        manifest = read_manifest(path := make_checkpoint(tmp_path, step))
        ranks = {"layout": {"tensor": 1, "pipeline": 1, "data": 2}, "world_size": 2} if step < 8 else {}
        write_manifest(path, Manifest.model_validate({**manifest.model_dump(), "nodes": nodes, **ranks}))
    now, events = FolderRanks(0, "n", {"n": [0], "m": [1]}, [0, 1], "x"), EventLog(tmp_path, 0)
    assert mark_verified(tmp_path, 8, 9, now, events=events) == [2, 8]
    told = {event.step: event.fields["message"] for event in read_events(tmp_path, name="checkpoint_not_marked")}
    assert told.keys() == {4, 6} and "saved with o" in told[6]
    returned = FolderRanks(0, "o", {"o": [0], "n": [1]}, [0, 1], "x")
    assert mark_verified(tmp_path, 8, 12, returned) == [6], "the host is back, and computes the same"
