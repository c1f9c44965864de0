"""The pieces of a supervised run are those of its journal, and its productive time is predicted from them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megasdc.common.errors import DataError
from megasdc.config.sections import MegasdcSection
from megasdc.lab.planning.runs.measured import measure_run, pieces_for, predict_run, shares_of
from megasdc.ops.supervise.journal import FOLDER, Journal

STEP_S, START_S, DETECTION_S, DECIDING_S = 0.5, 12.0, {"rank_lost": 4.0, "host_lost": 20.0}, 1.5
SECTIONS = MegasdcSection.model_validate(
    {
        "model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 32},
        "data": {"path": "data", "sequence_length": 32},
        "protect": "off",
        "training": {"steps": 2000},
        "logging": {"run_dir": "run"},
        "checkpoint": {"interval": 50, "memory": {"interval": 10}},
    }
)


def ended(code: int, diagnosis: str, hosts: tuple[str, ...], trained: tuple[float, ...] | None) -> dict[str, Any]:
    """Fields of the end of an attempt."""
    names = ("resumed", "began_at", "last", "last_at")
    said = {"kind": diagnosis, "hosts": hosts, "step": 0, "text": "", "incident": None}
    return {
        "exit_code": code,
        "diagnosis": said,
        "trained": None if trained is None else dict(zip(names, trained, strict=True)),
    }


def write_supervised(folder: Path, steps: int, failures: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The journal of a run whose failures came at random, each after a snapshot every 10 or 50 steps."""
    rng, now = np.random.default_rng(seed), 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Journal(folder / FOLDER, print) as journal:
        journal.write("hosts", slots={"a": 2, "b": 2, "c": 2}, num_hosts=2)
        journal.write("opened", config="x.json")
        step, stops = 0, sorted(rng.integers(1, steps, failures).tolist())
        for attempt, drawn in enumerate([*stops, steps], 1):
            stop = max(drawn, step + 1)
            journal.write("planned", attempt=attempt, slots={"a": 2, "b": 2}, launch_id="x")
            began = now = now + START_S
            now = now + (stop - step) * STEP_S
            trained = (step, began, stop, now)
            if attempt > failures:
                journal.write("ended", **ended(0, "done", (), trained))
                break
            lost = bool(rng.integers(2))
            now += DETECTION_S["host_lost" if lost else "rank_lost"]
            journal.write("ended", **ended(78, "host_lost" if lost else "rank_lost", ("b",), trained))
            action = {"action": "replace hosts" if lost else "start again", "text": "", "pause_s": 0.0}
            journal.write("decided", **action, replaced=["b"] if lost else [])
            now += DECIDING_S
            step = stop - stop % (50 if lost else 10)
        journal.write("finished", exit_code=0, text="")
    return folder


def test_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of starts, decisions and of detection by cause, and which failures replaced a host."""
    run = measure_run(write_supervised(tmp_path, 2000, 8, 1, monkeypatch), 0.0)
    assert run.pieces.start_s == pytest.approx(START_S) and run.pieces.deciding_s == pytest.approx(DECIDING_S)
    assert run.pieces.detection_s == pytest.approx({"host": 20.0, "software": 4.0})
    assert sum(run.failures.values()) == 8 and len(run.pieces.starts) == 9
    assert run.parts["productive"] == pytest.approx(2000 * STEP_S) and run.parts["other"] == 0


@pytest.mark.parametrize("failures", [0, 3, 12, 40])
def test_the_productive_share_is_predicted(tmp_path: Path, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 3 percentage points of what the journal says, for runs of a few failures and of many."""
    run = measure_run(write_supervised(tmp_path, 4000, failures, 2, monkeypatch), 0.0)
    found = predict_run(run, run.pieces, False, SECTIONS, seed=1)
    predicted, measured = found.shares
    parts = found.measured
    assert measured == pytest.approx(parts["productive"] / sum(parts.values()))
    assert abs(predicted - measured) < 0.03 and found.low <= predicted <= found.high
    if failures == 40:
        assert found.predicted["recomputed"] == pytest.approx(parts["recomputed"], rel=0.3)
        assert measured < 0.75


def test_pieces_of_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken where these know each cause of the run's failures, else its own."""
    runs = [measure_run(write_supervised(tmp_path / str(n), 2000, 8, n, monkeypatch), 0.0) for n in range(2)]
    calm = measure_run(write_supervised(tmp_path / "calm", 2000, 0, 1, monkeypatch), 0.0)
    assert pieces_for(runs[0], runs) == (runs[1].pieces, True)
    assert pieces_for(runs[0], [runs[0], calm]) == (runs[0].pieces, False)
    assert pieces_for(runs[0], runs[:1]) == (runs[0].pieces, False)
    others = predict_run(runs[0], *pieces_for(runs[0], runs), SECTIONS, seed=1)
    assert others.others and abs(others.shares[0] - others.shares[1]) < 0.03
    both = [others, predict_run(calm, calm.pieces, False, SECTIONS, seed=1)]
    productive, seconds = 2 * 2000 * STEP_S, sum(sum(one.measured.values()) for one in both)
    assert shares_of(both)[1] == pytest.approx(productive / seconds), "of all together"


def test_runs_that_tell_nothing(tmp_path: Path) -> None:
    """A folder without a journal, and a journal without a step, are refused with the reason."""
    with pytest.raises(DataError, match="no journal of `megasdc supervise`"):
        measure_run(tmp_path, 0.0)
    with Journal(tmp_path / FOLDER, print) as journal:
        journal.write("planned", attempt=1, slots={"a": 1}, launch_id="x")
        journal.write("ended", **ended(1, "launch", (), None))
    with pytest.raises(DataError, match="no step that it kept"):
        measure_run(tmp_path, 0.0)
