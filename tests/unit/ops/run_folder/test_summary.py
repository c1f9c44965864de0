"""What does the summary of a run say to people? A summary in, lines out; a folder that has none is refused."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_folder import add_hang, add_incident, losses, write_replicas, write_run
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import (
    CheckpointError,
    ConfigError,
    CorruptionError,
    DataError,
    HangError,
    LaunchError,
    MegasdcError,
    NonFiniteError,
    PeerError,
)
from megasdc.common.origin import Origin
from megasdc.common.run_lock import Holder, LockedFolders, acquire_lock
from megasdc.engine.hooks import RunEnd, RunProgress
from megasdc.events import EventLog, read_events
from megasdc.lab.report.run_pages.facts import highlights
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE, write_done, write_started
from megasdc.ops.run_folder.record import load_run
from megasdc.ops.run_folder.replicas import load_rounds
from megasdc.ops.run_folder.status import status_of
from megasdc.ops.run_folder.summary import LaunchFailure, RunSummary, render, summarize_run
from megasdc.ops.supervise.journal import FOLDER, Journal
from megasdc.ops.top.view import RunWatcher
from megasdc.pretrain import pretrain
from megasdc.train.main import report_end, report_failure

RUN = RunSummary(
    run_dir="runs/a",
    steps=40,
    planned_steps=60,
    first_loss=7.0,
    last_loss=5.25,
    eval_loss=5.5,
    unigram_entropy=6.0,
    tokens=81_920,
    tokens_per_s=12_345.6,
    skipped_steps=2,
    resumed_from=[10, 20],
    changed_settings=["optimizer.params.lr: 0.01 -> 0.001 after step 20"],
    checkpoints=["runs/a/checkpoints/step_00000040"],
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "0.500 nats better than knowing token frequencies alone (6.000)"),
        ({"unigram_entropy": 5.25}, "0.250 nats worse than knowing token frequencies alone (5.250)"),
        ({"eval_loss": None}, "0.750 nats better than knowing token frequencies alone (6.000)"),
        ({"unigram_entropy": None}, None),
    ],
)
def test_a_loss_is_held_against_token_frequencies(changes: dict[str, float | None], line: str | None) -> None:
    """The validation loss, or without one the training loss; nothing is said where frequencies are not known."""
    said = [text for text in render(replace(RUN, **changes)).splitlines() if text.startswith("against frequency")]
    assert said == ([] if line is None else [f"against frequency {line}"])


def test_what_is_not_there_is_said_or_left_out() -> None:
    """Skipped steps, resumes and the validation loss have their place; without checkpoints it says so."""
    whole, bare = (
        render(run) for run in (RUN, replace(RUN, eval_loss=None, skipped_steps=0, resumed_from=[], checkpoints=[]))
    )
    assert "40 of 60 (2 skipped)" in whole and "resumed from step 10, 20" in whole and "5.500" in whole
    assert "changed           optimizer.params.lr: 0.01 -> 0.001 after step 20" in whole
    assert "skipped" not in bare and "resumed" not in bare and "validation" not in bare
    assert "checkpoints       none" in bare


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """Nothing there, or a study, whose replicas are the runs."""
    with pytest.raises(DataError, match="holds no run that has reported a step"):
        summarize_run(tmp_path)
    (tmp_path / "study").mkdir()
    with pytest.raises(DataError, match="holds a study; give one of its folders replica_K"):
        summarize_run(tmp_path)


def test_replicas_of_local_sgd_are_summarised_together(tmp_path: Path) -> None:
    """Rounds, who was left out, why and when it returned, bytes, waiting, DropCompute; of one replica, too; as JSON."""
    write_replicas(tmp_path / "run")
    page = add_incident(tmp_path / "run" / "replica_1", 10)
    found = summarize_run(tmp_path / "run")
    assert (found.steps, found.tokens_per_s, found.finished, found.state) == (30, 2 * 1016.0, True, "done")
    assert found.last_loss == (losses(30, seed=0)[-1] + losses(30, seed=1)[-1]) / 2
    rounds = found.rounds
    assert rounds is not None and (rounds.rounds, rounds.planned_rounds, rounds.replicas) == (6, 6, 2)
    out = [(one.replica, one.first, one.last, one.kind, one.returned) for one in rounds.left_out]
    assert out == [(1, 2, 2, "wrong", 3), (1, 4, 5, "late", 6)]
    assert (rounds.fetched_bytes, rounds.waited_s, rounds.members) == (6000, 9 * 0.25, (0, 1))
    assert [(one.replica, one.rounds, one.tokens) for one in rounds.of_replicas] == [(0, 6, 6000), (1, 3, 2500)]
    assert rounds.drop_share == pytest.approx(5 / 90)
    (met,) = found.met
    assert met.page == str(page)
    said = render(found)
    for text in ("6 of 6", "replica 1, round 2, wrong: its weights are not finite; it returned in round 3", "5.6%"):
        assert text in said
    write_replicas(tmp_path / "whole", threshold='"inf"')
    whole = summarize_run(tmp_path / "whole").rounds
    assert whole is not None and whole.drop_share is None, "one that returned within a round has dropped nothing"
    alone = summarize_run(tmp_path / "run" / "replica_0")
    assert alone.rounds == rounds and not alone.of_replicas
    told = [one.what for one in alone.met]
    assert told == [
        "round 2 was made without replica 1, wrong: its weights are not finite",
        "rounds 4 to 5 were made without replica 1, late: it was late, or not there",
    ]
    late = [one for one in summarize_run(tmp_path / "run" / "replica_1").met if one.kind == "left out"]
    assert [one.what for one in late] == ["rounds 4 to 5 were made without this replica, late: it was late"]
    assert late[0].done == "it took part again in round 6" and late[0].to_do == ""
    result = CliRunner().invoke(app, ["summary", str(tmp_path / "run"), "--json", "--require-finished"])
    assert result.exit_code == 0 and json.loads(result.stdout)["rounds"]["left_out"][0]["first"] == 2


def test_rounds_are_read_as_far_as_they_can_be(tmp_path: Path) -> None:
    """Torn and damaged lines are noted; of rounds that were made again, after a resume, the later, and none after."""
    rounds = write_replicas(tmp_path / "run")
    path, notes = tmp_path / "run" / "rounds.jsonl", list[str]()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], '{"round": 4}\n', '{"round": 4, "tokens": []}\n', lines[3][:40]]))
    assert load_rounds(path.parent, notes) == rounds[:3]
    assert "2 of 5 lines cannot be read" in notes[0] and "the last line has no end" in notes[1]
    assert "note              rounds.jsonl: 2 of 5 lines" in render(summarize_run(path.parent))
    path.write_text("".join([*lines, lines[2]]))
    assert load_rounds(path.parent, []) == rounds[:3]


def test_replicas_that_have_not_reported_a_step_are_refused(tmp_path: Path) -> None:
    """Their launch has begun."""
    (tmp_path / "rounds.jsonl").touch()
    with pytest.raises(DataError, match="none of which has reported a step"):
        summarize_run(tmp_path)


def _fails(folder: Path, error: MegasdcError, monkeypatch: pytest.MonkeyPatch, rank: int = 0, began: float = 0) -> None:
    monkeypatch.setenv("RANK", str(rank))
    report_failure(folder, error.exit_code, error, began, LockedFolders())


@pytest.mark.parametrize("kind", [CheckpointError, NonFiniteError, HangError, PeerError])
def test_a_failed_run_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[MegasdcError]
) -> None:
    """Exit code, meaning, cause, rank and host, without a front too; it is not finished, and the report says so too."""
    folder = write_run(tmp_path / "run", losses(20), ended=False)
    _fails(folder, kind("it went wrong\nin detail"), monkeypatch, rank=1)
    found = summarize_run(folder)
    failure = found.failure
    assert failure is not None and not found.finished and (found.steps, found.planned_steps) == (20, 20)
    assert (failure.exit_code, failure.rank, failure.incident, failure.verdict) == (kind.exit_code, 1, None, None)
    assert failure.text.endswith("it went wrong") and failure.verified_checkpoint is None
    said = render(found)
    assert f"exit code {kind.exit_code}: {kind.__doc__.splitlines()[0]}" in said
    assert f"first to fail     rank 1 on {failure.host}" in said and "last verified     none" in said
    assert status_of(load_run(folder)).state == "failed"


def test_corruption_is_told_with_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdict, who, which page says what to do, and the newest checkpoint that an audit has verified."""
    folder = write_run(tmp_path / "run", losses(20), ended=False)
    page = add_incident(folder, 20)
    (incident,) = (folder / "reports").glob("*.json")
    content = {**json.loads(incident.read_text()), "policy": "halt", "done": "halted"}
    incident.write_text(json.dumps({**content, "time": "2999-01-01T00:00:00+00:00"}))
    _fails(folder, CorruptionError("step 20 is not committed"), monkeypatch)
    failure = summarize_run(folder).failure
    assert failure is not None
    assert (failure.exit_code, failure.verdict, failure.incident) == (73, "persistent", str(page))
    assert failure.suspects == ["rank 1 on node7 (cpu)"]
    said = render(summarize_run(folder))
    assert "verdict           persistent (wrong by the same value in 2 of 2 repeats)" in said
    assert "on purpose" not in said
    assert "who               rank 1 on node7 (cpu)" in said
    assert f"what to do        {page}" in said
    incident.write_text(json.dumps({**content, "time": "2999-01-01T00:00:00+00:00", "injected": ["megasdc.faults"]}))
    assert "to restart without them: --set 'megasdc.faults=[]'" in render(summarize_run(folder))
    earlier = {**content, "step": 8, "verdict": "not_reproduced", "time": "2999-01-01T00:00:00+00:00"}
    incident.with_name("incident_step_00000008.json").write_text(json.dumps(earlier))
    latest = summarize_run(folder).failure
    assert latest is not None and latest.verdict == "persistent", "of two in the same second that of the later step"
    for path in incident.parent.glob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "done": "repaired"}))
    went_on = summarize_run(folder).failure
    assert went_on is not None and (went_on.verdict, went_on.suspects) == (None, []), "the run went on after them"
    incident.with_name("incident_step_00000008.json").unlink()
    incident.write_text(json.dumps({**content, "verdict": "inconclusive", "time": "2999-01-01T00:00:00+00:00"}))
    assert "one of            rank 1 on node7 (cpu)" in render(summarize_run(folder))
    incident.write_text(json.dumps({**content, "time": "2001-01-01T00:00:00+00:00"}))
    old = summarize_run(folder).failure
    assert old is not None and old.incident is None, "a report of an earlier start is not this one's"


def test_a_hang_is_told_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the failure who hung, and the file; of the run how many hangs; one of an earlier start is not the cause."""
    folder = write_run(tmp_path / "run", losses(20), ended=False)
    assert "hangs" not in render(replace(RUN, failure=None))
    before = add_hang(folder, 10, "before")
    before.write_text(json.dumps({**json.loads(before.read_text()), "time": 1e9}))
    _fails(folder, PeerError("lost"), monkeypatch)
    failure = summarize_run(folder).failure
    assert failure is not None and failure.incident is None and failure.suspects == []
    path = add_hang(folder, 20)
    found = summarize_run(folder)
    assert found.failure is not None and found.failure.incident == str(path)
    assert found.failure.suspects == ["rank 1 on node1 (forward of step 20, micro-batch 0)"]
    assert [(one.path, one.kind, one.ranks, one.hosts) for one in found.hangs] == [
        (str(place), "hang/behind", (1,), ("node1",)) for place in (before, path)
    ]
    said = render(found)
    assert "who               rank 1 on node1 (forward of step 20, micro-batch 0)" in said
    assert f"evidence          {path}" in said
    assert f"hangs             2, the last (hang/behind, rank 1 on node1): {path}" in said
    _fails(folder, HangError(f"nothing moved; see {before}"), monkeypatch)
    failure = summarize_run(folder).failure
    assert failure is not None and failure.incident == str(before), "the one that its message names"


def test_nan_is_told_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place that the search named since the start."""
    folder = write_run(tmp_path / "run", losses(20), ended=False)
    log = EventLog(folder, 0)
    place = {"rank": 3, "host": "node3", "phase": "forward", "fqn": "2.layer.mlp", "value": "NaN"}
    log.emit("nonfinite", "first", step=21, micro_batch=1, **{**place, "rank": None, "host": None})
    log.emit("nonfinite", "first", step=21, micro_batch=1, **place)
    log.close()
    _fails(folder, NonFiniteError("skipped"), monkeypatch)
    failure = summarize_run(folder).failure
    assert failure is not None
    assert failure.suspects == ["rank 3 on node3: NaN in the forward of 2.layer.mlp, step 21, micro-batch 1"]


def test_the_cause_is_not_who_lost_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks of one start the first that did not end for the loss of a peer; earlier starts do not count."""
    folder = write_run(tmp_path / "run", losses(20), ended=False)
    began = load_run(folder).started_at or 0.0
    _fails(folder, CorruptionError("of an earlier start"), monkeypatch, began=began)
    between = max(one.time for one in load_run(folder).events) + 1e-6
    _fails(folder, PeerError("lost"), monkeypatch, rank=0, began=between)
    _fails(folder, HangError("given up"), monkeypatch, rank=1, began=between)
    failure = summarize_run(folder).failure
    assert failure is not None and (failure.exit_code, failure.rank) == (75, 1)
    log = EventLog(folder, 0)
    log.emit("start", "run", layout={}, world_size=2, versions={})
    log.close()
    assert summarize_run(folder).failure is None, "it was started again"


def test_a_rank_of_an_earlier_start_that_ends_late_is_no_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose host comes back, or that is woken, after the run has gone on elsewhere and ended well."""
    folder = write_run(tmp_path / "run", losses(3))
    for attempt, launch in ((1, "one"), (2, "two")):
        monkeypatch.setenv(LAUNCH_ID_VARIABLE, launch)
        log = EventLog(folder, 0, Origin("id", attempt))
        log.emit("start", "run")
        write_started(folder, 0)
        if attempt == 2:
            log.emit("end", "run", step=3, reason="all steps done")
            write_done(folder, 0, 0)
            said = {"exit_code": 0, "lines": ["all 2 ranks are done"], "failed_rank": None, "failed_host": None}
            (folder / "done" / launch / "launch.json").write_text(json.dumps(said))
        log.close()
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "one")
    write_started(folder, 1)
    late = EventLog(folder, 1, Origin("id", 1))
    late.emit("end", "failed", exit_code=79, error="PeerError", message="another rank has gone", process_started=0.0)
    late.close()
    started = folder / "done" / "one" / "started_00001.json"
    started.write_text(started.read_text().replace('"time": ', '"time": 0.'))  # before the second start
    write_done(folder, 1, 79, PeerError("another rank has gone"))
    assert summarize_run(folder).failure is None and load_run(folder).ending.exit_code == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("is_supervised", [True, False])
def test_the_end_of_a_launch_that_made_no_start_is_known_by_no_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_supervised: bool
) -> None:
    """By the order in which a supervisor planned, though files of the launch before are newer, as after its clock was
    set back; else by the file system's clock, and not by the dates of events, whose host is a day ahead.
    """
    folder = write_run(tmp_path / "run", losses(3))
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "one")
    log = EventLog(folder, 0, Origin("id", 1))
    log.emit("start", "run")
    log.emit("end", "failed", exit_code=79, error="PeerError", message="another has gone", process_started=0.0)
    log.close()
    events = folder / "events" / "rank_00000.jsonl"
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    events.write_text("".join(json.dumps({**row, "time": row["time"] + 86_400.0}) + "\n" for row in rows))
    write_started(folder, 0)
    (folder / "done" / "two").mkdir()
    said = {"exit_code": 78, "lines": ["rank 1 on b never started"], "failed_rank": 1, "failed_host": "b"}
    path = folder / "done" / "two" / "launch.json"
    path.write_text(json.dumps(said))
    if is_supervised:
        with Journal(folder / FOLDER, lambda line: None) as journal:
            for number, launch in enumerate(("one", "two"), 1):
                journal.write("planned", attempt=number, slots={"b": 1}, launch_id=launch)
        os.utime(path, (1.0, 1.0))
    ending = load_run(folder).ending
    assert ending is not None and (ending.launch, ending.exit_code) == ("two", 78)


def test_a_front_says_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks recorded for the front, and its own verdict where it has written one, come first."""
    folder = write_run(tmp_path / "run", losses(20), ended=False)
    _fails(folder, HangError("given up"), monkeypatch)
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "one")
    write_done(folder, 1, 75, HangError("given up by rank 1"))
    failure = summarize_run(folder).failure
    assert failure is not None and failure.text.endswith("given up by rank 1") and failure.rank == 1
    said = {"exit_code": 79, "lines": ["rank 1 on b was killed"], "failed_rank": 1, "failed_host": "b"}
    (folder / "done" / "one" / "launch.json").write_text(json.dumps(said))
    failure = summarize_run(folder).failure
    assert failure == LaunchFailure(79, "rank 1 on b was killed", 1, "b", None, [], None, None)


def test_a_run_that_failed_before_its_first_step_has_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was reported and no configuration written: what is known is how it ended."""
    folder = tmp_path / "run"
    (folder / "events").mkdir(parents=True)
    _fails(folder, CheckpointError("no verified checkpoint"), monkeypatch)
    found = summarize_run(folder)
    assert (found.steps, found.planned_steps, found.finished, found.first_loss) == (0, None, False, None)
    said = render(found)
    assert "steps             0\n" in said and "exit code 72" in said and "training loss" not in said
    assert said.count("no verified checkpoint") == 1
    report_failure(tmp_path / "absent", 71, MegasdcError("no data"), 0.0, LockedFolders())
    assert not (tmp_path / "absent").exists(), "a folder is not made to say that nothing was done there"


@pytest.mark.parametrize(
    ("first", "reason", "told"),
    [
        (5, None, "stopped at step 20 of 20: all steps done"),
        (20, None, "nothing to train: {folder} is already at step 20 of 20; for a new run set another"),
        (20, "signal", "stopped at step 20 of 20: signal"),
    ],
)
def test_a_launch_with_nothing_to_train_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, reason: str | None, told: str
) -> None:
    """It names the folder and both remedies; the event of the end is that of any finished run."""
    caplog.set_level(logging.INFO)
    events = EventLog(tmp_path, 0)
    run: Any = SimpleNamespace(step=20, steps=20, folder=tmp_path, events=events)
    run.progress, run.end = RunProgress(20, 20), RunEnd(reason)
    report_end(run, first)
    events.close()
    (line,) = caplog.records
    assert line.getMessage().startswith(told.format(folder=tmp_path))
    assert (line.levelname == "WARNING") == told.startswith("nothing")
    (event,) = read_events(tmp_path, kind="end")
    assert event.fields["reason"] == (reason or "all steps done")


def test_a_start_that_was_refused_is_no_end_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second launch into the folder of a run ends with 78: of the first, which goes on, nothing is told."""
    folder = write_run(tmp_path / "run", losses(20), ended=False)
    _fails(folder, LaunchError("the folder is in use"), monkeypatch)
    assert summarize_run(folder).failure is None
    lock = acquire_lock(folder, Holder.this_process("first", "one"), print)
    _fails(folder, DataError("refused before it looked for the lock"), monkeypatch)
    (folder / "done" / "two").mkdir(parents=True)
    said = {"exit_code": 78, "lines": ["the folder is in use"], "failed_rank": 0, "failed_host": "b"}
    (folder / "done" / "two" / "launch.json").write_text(json.dumps(said))
    assert summarize_run(folder).failure is None
    lock.release()
    failure = summarize_run(folder).failure
    assert failure is not None and failure.exit_code == 78, "nobody works there: it is the last that is known"


def test_a_start_refused_after_the_last_step_leaves_the_run_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told beside the run's state; a start that was not refused, or that took a step, is how the run ended."""
    folder = write_run(tmp_path / "run", losses(20))
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "two")
    _fails(folder, CheckpointError("saved with another configuration"), monkeypatch)
    found = summarize_run(folder)
    assert found.finished and found.state == "done" and found.failure is None
    assert f"refused           a start after that, {found.refused}" in render(found)
    assert found.refused.startswith("exit code 72: rank 0") and found.refused in status_of(load_run(folder)).text
    log = EventLog(folder, 0)
    log.emit("skip", "optimizer_step", step=20)
    log.close()
    assert summarize_run(folder).state == "failed"
    hangs = write_run(tmp_path / "hangs", losses(20))
    _fails(hangs, HangError("it hangs"), monkeypatch)
    assert summarize_run(hangs).state == "failed"


def test_a_rank_that_cannot_start_leaves_the_record_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training itself writes it, with its own rank, exit code and error; the console names the rank."""
    config, folder = tmp_path / "config.json", tmp_path / "run"
    sections = {"data": {"path": "x"}, "protect": "off", "training": {"steps": 1}, "logging": {"run_dir": str(folder)}}
    config.write_text(json.dumps({"megasdc": {**sections, "determinism": {"enabled": True}}}))
    folder.mkdir()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    own = logging.getLogger("megasdc")
    handlers, level, propagate = own.handlers[:], own.level, own.propagate
    try:
        code, error = pretrain(str(config), [])
    finally:
        own.handlers[:], own.level, own.propagate = handlers, level, propagate
    assert (code, type(error)) == (ConfigError.exit_code, ConfigError)
    (event,) = read_events(folder, kind="end", name="failed")
    assert (event.rank, event.fields["exit_code"], event.fields["error"]) == (1, code, "ConfigError")
    assert "[rank 1] E " in capsys.readouterr().err


def test_the_archive_has_its_line(tmp_path: Path) -> None:
    """The newest that is in it, and what failed; a run without an archive has none."""
    folder = write_run(tmp_path / "run", losses(20))
    assert summarize_run(folder).archive is None and "archived" not in render(summarize_run(folder))
    log = EventLog(folder, 0)
    log.emit("archive", "failed", step=10, problem="no route", exit_code=77)
    assert summarize_run(folder).archive == "nothing; 1 failed, the last of step 10: no route"
    for step in (20, 15):
        log.emit("archive", "pushed", step=step, address="s3://b/a", size_bytes=1)
    log.close()
    said = render(summarize_run(folder)).splitlines()
    assert "archived          up to step 20 in s3://b/a; 1 failed, the last of step 10: no route" in said


def _guarded(folder: Path, *, closed: bool) -> Path:
    """The run folder of a training with a guard: two audits that agreed, and one finding that was put right."""
    log = EventLog(folder, 0)
    checks = ["audits every 5 steps", "NaN and Inf"]
    log.emit("guard", "attached", layout="TP1 x PP1 x DP2", interval=5, watched=["a"], checks=checks)
    for step in (1, 5):
        log.emit("audit", "agreed", step=step, compared=10, seconds=0.1)
    log.emit("sdc", "verdict", step=6, tier="state", action="repair")
    for step in (2, 4, 5, 4):
        saved = folder / "own" / f"global_step{step}"
        saved.mkdir(parents=True, exist_ok=step == 4)
        log.emit("guard", "saved", step=step, path=str(saved))
    (folder / "own" / "global_step2").rmdir()
    (folder / "own" / "global_step5" / "megasdc_verified.json").touch()
    if closed:
        log.emit("guard", "closed", step=7, steps=7, audits=2, agreed=2, findings=1)
    log.close()
    return folder


def test_a_training_with_a_guard_is_summarized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, audits, checks, checkpoints and the end; one whose guard was not closed is not finished."""
    found = summarize_run(_guarded(tmp_path / "closed", closed=True))
    said = render(found)
    assert (found.state, found.steps, found.finished) == ("done", 7, True)
    assert "7 steps, 2 audits agreed, 1 finding; TP1 x PP1 x DP2 (audits every 5 steps, NaN and Inf)" in said
    assert "end               done at step 7." in said
    left = [str(tmp_path / "closed" / "own" / f"global_step{step}") for step in (5, 4)]  # 4 was saved again
    assert f"checkpoints       {', '.join(left)}" in said.splitlines()
    assert f"verified          up to {left[0]}" in said.splitlines() and "protection" not in said
    running = summarize_run(_guarded(tmp_path / "open", closed=False))
    assert (running.state, running.steps, running.finished) == ("running", 5, False), "step 6 may not be taken"
    assert "guard             2 audits agreed, 1 finding; TP1" in render(running)
    _fails(tmp_path / "open", CorruptionError("it went wrong"), monkeypatch)
    failed = summarize_run(tmp_path / "open").failure
    assert failed is not None and failed.verified_checkpoint == str(tmp_path / "open" / "own" / "global_step5")


def test_top_and_report_tell_of_a_guard(tmp_path: Path) -> None:
    """They called a training that had ended well unfinished, and one under way starting."""
    view = RunWatcher(_guarded(tmp_path / "closed", closed=True)).read()
    assert (view.state, view.over, view.step) == ("done", True, 7) and "7 steps, 2 audits" in str(view.guard)
    assert RunWatcher(_guarded(tmp_path / "open", closed=False)).read().state == "running"
    assert "2 audits agreed" in highlights(load_run(tmp_path / "closed"))["guard"]
