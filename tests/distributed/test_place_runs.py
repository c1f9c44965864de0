"""Is a rank's place in the data compared with what steps and decisions make of it, in a step and at a resume?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from whole_runs import (
    checked,
    events_of,
    failure_of,
    metrics_of,
    state_of,
    train_run,
    verdicts_of,
    write_run,
)

from megasdc.checkpoint.verify import verify_checkpoint

pytestmark = pytest.mark.distributed

CHECKED = checked(parameters=False, finite=False, tokens=True)
WRONG: dict[str, Any] = {"phase": "place", "rank": 1, "bits": [1], "once": True}


def _write(tmp_path: Path, data: Path, name: str, **changes: Any) -> Path:
    return write_run(tmp_path, data, name, **changes)


def _dropping(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Replays decisions of two replicas that complete different numbers of micro-batches."""
    lines: list[dict[str, Any]] = [{"start": {"step": 0, "data": 2, "micro_batches": 2}}]
    lines += [{"step": step, "planned": 2, "completed": [1 + step % 2, 1]} for step in range(1, 20)]
    log = tmp_path / "decisions.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"drop_compute": {"enabled": True, "replay_decisions": str(log), **changes}}


@pytest.mark.parametrize("case", ["audited", "dropped", "pp2"])
def test_a_place_that_changes_is_put_right_within_the_step(tmp_path: Path, data: Path, case: str) -> None:
    """The rank is named, the step's samples are read anew, and audits and saves included the run keeps its bits."""
    changes: dict[str, Any] = {
        "audited": {"audit": {"enabled": True, "interval": 3}, "checkpoint": {"interval": 3}},
        "dropped": _dropping(tmp_path, samples="discard", compensation="resample"),
        "pp2": {"parallel__pipeline": 2},
    }[case]
    for name, faults in {"clean": [], "harmed": [{**WRONG, "steps": [3, 3]}]}.items():
        results = train_run(_write(tmp_path, data, name, **CHECKED, **changes, faults=faults), 2)
        assert [code for code, _ in results] == [0, 0], results
    assert verdicts_of(tmp_path / "clean") == []
    assert verdicts_of(tmp_path / "harmed") == [(3, "place", 1, "not_reproduced", "step and decisions", "repair")]
    states = [state_of(tmp_path / name / "checkpoints" / "step_00000006") for name in ("clean", "harmed")]
    assert states[0] == states[1]
    assert metrics_of(tmp_path / "clean") == metrics_of(tmp_path / "harmed")


def test_a_place_that_is_accepted_costs_one_step(tmp_path: Path, data: Path) -> None:
    """With policy ``warn`` the step keeps what it has read; the next ones, and a resume, go on from the right place."""
    changes = {**CHECKED, "sdc": {**CHECKED["sdc"], "policy": {"not_reproduced": "warn"}}}
    changes |= {"checkpoint": {"interval": 2}, **_dropping(tmp_path, samples="discard")}
    config = _write(tmp_path, data, "run", **changes, faults=[{**WRONG, "steps": [3, 3]}])
    for override in ("megasdc.training.stop_step=4", "megasdc.training.steps=6"):
        results = train_run(config, 2, override)
        assert [code for code, _ in results] == [0, 0], results
    assert [one[:3] for one in verdicts_of(tmp_path / "run")] == [(3, "place", 1)]
    assert events_of(tmp_path / "run", "skip", "checkpoint") == []
    (started,) = events_of(tmp_path / "run", "resume", "metrics_cut_back")
    assert started["step"] == 4


def test_a_place_that_was_saved_wrong_is_not_resumed_from(tmp_path: Path, data: Path) -> None:
    """Without checks of steps it is saved; that deletes no right checkpoint, and a resume goes back to that."""
    kept = {"checkpoint": {"interval": 2, "keep_last": 1}}
    config = _write(tmp_path, data, "run", **kept, faults=[{**WRONG, "steps": [4, 4]}])
    wrong = "megasdc.json: replicas have consumed {} samples of the stream, {} follow from its steps and decisions"
    saves = tmp_path / "run" / "checkpoints"
    results = train_run(config, 2)
    assert [code for code, _ in results] == [73, 73], results
    assert f"step_00000006 is the last checkpoint, and {wrong.format(22, 24)}; go back to {saves}/step_00000002" in str(
        results[0][1]
    )
    assert failure_of(tmp_path / "run").exit_code == 73
    told = events_of(tmp_path / "run", "warning", "checkpoint_wrong_place")
    assert [(one["step"], one["reason"]) for one in told] == [(4, wrong.format(14, 16)), (6, wrong.format(22, 24))]
    assert sorted(path.name for path in saves.glob("step_*")) == ["step_00000002", "step_00000006"]
    report = verify_checkpoint(saves / "step_00000006")
    assert report.problems == [wrong.format(22, 24)] and not report.ok
    assert verify_checkpoint(saves / "step_00000002").ok
    results = train_run(config, 2, "megasdc.faults=[]")
    assert [code for code, _ in results] == [0, 0], results
    (skip,) = events_of(tmp_path / "run", "skip", "checkpoint")
    assert skip["reasons"] == [wrong.format(22, 24)]
    (loaded,) = events_of(tmp_path / "run", "resume", "metrics_cut_back")
    assert loaded["step"] == 2
    assert verify_checkpoint(saves / "step_00000006").ok
