"""Where a run goes back to, from what it has written, and the settings of its next attempts."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hand_made import write_checkpoint

from megasdc.checkpoint.ranks import FolderRanks
from megasdc.checkpoint.verify import mark_verified
from megasdc.common.origin import Launch
from megasdc.events import EventLog
from megasdc.ops.supervise.diagnosis import AttemptEvidence, RewindTarget, diagnose
from megasdc.ops.supervise.history import Attempt, JournalHistory
from megasdc.ops.supervise.journal import JournalEntry
from megasdc.ops.supervise.launch_backend import find_back, overrides_of


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that reported every second step, four samples a step."""
    rows = [{"step": step, "time": 0.0, "data/stream_end": 4 * step} for step in range(2, 21, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def skip(log: EventLog, *steps: int) -> None:
    """Steps that the optimizer did not take."""
    for step in steps:
        log.emit("skip", "optimizer_step", step=step, stream_end=4 * step)


def test_before_the_first_of_the_last_skipped_steps(run_dir: Path) -> None:
    """The newest reported step that is far enough before, and all samples from there to the last skipped step."""
    with closing(EventLog(run_dir, 0)) as log:
        skip(log, 7, 15, 16)
        since = time.time()
        skip(log, 17, 18)
    assert find_back(run_dir, Launch("x", since), 1) == RewindTarget(14, (56, 72))
    assert find_back(run_dir, Launch("x", since), 4) == RewindTarget(10, (40, 72))
    assert find_back(run_dir, Launch("x", since), 100) == RewindTarget(0, (0, 72)), "it begins anew"
    assert find_back(run_dir, Launch("x", since), 0) is None, "it was not asked for"
    assert find_back(run_dir, Launch("x", time.time() + 1), 1) is None, "it was another attempt's"
    assert find_back(run_dir / "absent", Launch("x", since), 1) is None


def test_to_the_newest_checkpoint_that_a_finite_step_followed(run_dir: Path) -> None:
    """Where no data are to be skipped, and the attempt that met NaN has not gone on from there itself."""
    folder = run_dir / "checkpoints"
    for step, finite_step, not_finite in ((4, 4, []), (8, 8, []), (12, 11, []), (16, 11, []), (20, 11, ["layer_0.pt"])):
        write_checkpoint(folder, step, finite_step=finite_step, not_finite=not_finite)
    (run_dir / "resolved.json").write_text(json.dumps({"megasdc": {"checkpoint": {"folder": None}}}))
    with closing(EventLog(run_dir, 0)) as log:
        skip(log, 17, 18)
        assert find_back(run_dir, Launch("x", 0.0), 0) is None, (
            "it has not gone on from a checkpoint: the next start does"
        )
        log.emit("resume", "checkpoint", step=16)
        assert find_back(run_dir, Launch("x", 0.0), 0) == RewindTarget(8)
        log.emit("resume", "other_layout", step=12)
        assert find_back(run_dir, Launch("x", 0.0), 0) == RewindTarget(8)
        log.emit("resume", "other_layout", step=8)
        assert find_back(run_dir, Launch("x", 0.0), 0) is None, "it was tried with fewer hosts"
        log.emit("resume", "memory", step=8)
        assert find_back(run_dir, Launch("x", 0.0), 0) is None, "it was tried"
        log.emit("resume", "checkpoint", step=12)
        mark_verified(folder, 4, 5, FolderRanks(0, "n", {"n": [0]}, [0], "x"))
        assert find_back(run_dir, Launch("x", 0.0), 0) == RewindTarget(4), "no audit has agreed after a newer one"
        (run_dir / "resolved.json").write_text("[" * 100_000)
        assert find_back(run_dir, Launch("x", 0.0), 0) is None, "a damaged file says nothing"
    (run_dir / "resolved.json").unlink()
    assert find_back(run_dir, Launch("x", 0.0), 0) is None


def test_before_a_checkpoint_that_could_not_be_loaded(run_dir: Path) -> None:
    """Whether data may be skipped or not; none are."""
    with closing(EventLog(run_dir, 0)) as log:
        log.emit("resume", "not_loaded", step=12)
    assert find_back(run_dir, Launch("x", 0.0), 0) == find_back(run_dir, Launch("x", 0.0), 5) == RewindTarget(11)
    assert find_back(run_dir, Launch("x", time.time() + 1), 0) is None


def test_to_the_beginning_where_no_checkpoint_can_be_used(run_dir: Path) -> None:
    """As long as the first one is among them; a run that has saved more, and deleted that, is not begun anew."""
    with closing(EventLog(run_dir, 0)) as log:
        log.emit("resume", "none_usable", steps=[5])
        assert find_back(run_dir, Launch("x", 0.0), 0) == RewindTarget(0), (
            "the run was killed before it could report that save"
        )
        for step in (5, 10):
            log.emit("save", "checkpoint", step=step)
        log.emit("resume", "none_usable", steps=[5, 10])
        assert find_back(run_dir, Launch("x", 0.0), 0) == RewindTarget(0)
        assert find_back(run_dir, Launch("x", time.time() + 1), 0) is None, "it was another attempt's"
        log.emit("resume", "none_usable", steps=[10, 15])
    assert find_back(run_dir, Launch("x", 0.0), 0) is None


def test_only_what_going_back_may_help_has_a_place_to_go_back_to() -> None:
    """NaN and Inf, and checkpoints; not a rank that failed in the same attempt."""
    kinds = {
        code: diagnose(AttemptEvidence(code, 0, "a", ["it"], ["a"], back=RewindTarget(4))).back
        for code in (72, 74, 1, 77)
    }
    assert kinds == {72: RewindTarget(4), 74: RewindTarget(4), 1: None, 77: None}


def entry(kind: str, **fields: Any) -> JournalEntry:
    """As the journal returns it, through JSON."""
    return JournalEntry(1, 0.0, kind, json.loads(json.dumps(fields)))


def test_attempts_go_back_until_one_has_gone_on_from_there() -> None:
    """Then the newest checkpoint counts again; the samples are skipped for good."""
    history = JournalHistory(slots={"a": 1}, num_hosts=1)

    def attempt(trained: dict[str, Any] | None) -> tuple[int | None, tuple[tuple[int, int], ...]]:
        planned = entry("planned", attempt=1, slots={"a": 1}, launch_id="x", at_most=history.at_most, skip=history.skip)
        history.add(planned)
        said = {"kind": "non_finite", "hosts": [], "step": 9, "text": "t"}
        history.add(entry("ended", exit_code=74, diagnosis=said, trained=trained))
        assert history.attempt is not None
        return history.attempt.at_most, history.attempt.skip

    def decided(back: dict[str, Any] | None) -> None:
        history.add(entry("decided", action="go back", text="t", replaced=[], pause_s=0.0, back=back))

    assert attempt({"resumed": 0}) == (None, ())
    decided({"at_most": 4, "skip": [16, 32]})
    assert history.decision is not None and history.decision.back == RewindTarget(4, (16, 32))
    assert attempt(None) == (4, ((16, 32),)), "it ended before its first step"
    assert attempt({"resumed": 4}) == (4, ((16, 32),))
    decided({"at_most": 2, "skip": None})
    assert attempt({"resumed": 2}) == (2, ((16, 32),))
    assert attempt({"resumed": 8}) == (None, ((16, 32),))
    assert history.went_back == 2


def test_an_attempt_is_told_with_the_ranges_of_the_configuration() -> None:
    """They ascend and do not overlap; where it does not go back and skips nothing, nothing is said."""
    plain = Attempt(1, {"a": 1}, "x", 0.0)
    assert overrides_of(plain, [[3, 5]]) == []
    back = Attempt(2, {"a": 1}, "y", 0.0, at_most=0, skip=((40, 60), (8, 12), (10, 16)))
    assert overrides_of(back, [[60, 61], [0, 2]]) == [
        "megasdc.checkpoint.resume_at_most=0",
        "megasdc.data.skip=[[0, 2], [8, 16], [40, 61]]",
    ]
