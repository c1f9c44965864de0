"""Which starts of a run count, by its events?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megasdc.common.errors import DataError
from megasdc.config.load import load_config
from megasdc.dropcompute.gate import StepDecisions
from megasdc.events import EventLog
from megasdc.lab.triage.history import RunHistory, RunStart, read_history
from megasdc.lab.triage.positions import RunPast
from megasdc.lab.triage.step_settings import settings_of_starts
from megasdc.lab.triage.triage import _plan as plan_replay

SMOKE = Path(__file__).parents[4] / "configs" / "smoke.json"


class Told:
    """Events of rank 0 of a run of two replicas."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = EventLog(folder, 0)

    def __call__(self, kind: str, name: str, step: int | None = None, **fields: Any) -> None:
        self._log.emit(kind, name, step=step, **fields)

    def start(self) -> None:
        self("start", "run", layout={"tensor": 1, "pipeline": 1, "data": 2}, world_size=2)


def test_a_resume_takes_back_what_came_after_its_step(tmp_path: Path) -> None:
    """Checkpoints and requested audits of steps that are taken again do not count, nor what those starts changed."""
    told = Told(tmp_path)
    told.start()
    told("start", "phases", 1)
    told("save", "checkpoint", 4)
    told("audit", "requested", 6)
    told("save", "checkpoint", 8)
    told.start()
    told("resume", "checkpoint", 8)
    told("resume", "changed", 8, path="megasdc.audit.interval", old=5, new=7)
    told("audit", "requested", 10)
    told.start()
    told("resume", "checkpoint", 4)
    told("resume", "changed", 4, path="train_micro_batch_size_per_gpu", old=1, new=2)
    told("resume", "memory", 4)
    told("save", "checkpoint", 12)
    history = read_history(tmp_path)
    assert [(one.step, one.changed) for one in history.starts] == [(0, {}), (4, {"train_micro_batch_size_per_gpu": 1})]
    assert history.saved == [4, 12] and history.requested == set()


def test_a_refused_start_changes_nothing(tmp_path: Path) -> None:
    """A start that ended before it resumed is none; one that trains without resuming began at step 0."""
    told = Told(tmp_path)
    told.start()
    told("save", "checkpoint", 4)
    told.start()
    told("end", "failed", exit_code=72)
    assert [one.step for one in read_history(tmp_path).starts] == [0]
    assert read_history(tmp_path).saved == [4]
    told.start()
    told("start", "phases", 1)
    assert read_history(tmp_path).saved == []


def test_a_universal_checkpoint_is_where_a_run_begins(tmp_path: Path) -> None:
    """What differs from the run that it comes from is no change of this run."""
    told = Told(tmp_path)
    told.start()
    told("resume", "changed", 6, path="train_batch_size", old=4, new=8)
    told("resume", "universal", 6, path="elsewhere/universal_step_00000006")
    (start,) = read_history(tmp_path).starts
    assert (start.step, start.universal, start.changed) == (6, "elsewhere/universal_step_00000006", {})


def test_no_run(tmp_path: Path) -> None:
    """Events that tell of no start that trained are refused, with the folder."""
    Told(tmp_path).start()
    with pytest.raises(DataError, match=rf"{tmp_path}/events tells of no start"):
        read_history(tmp_path)


def test_settings_are_those_of_each_start(tmp_path: Path) -> None:
    """A changed batch or audit acts from its resume on; before it the old values hold."""
    told = Told(tmp_path)
    told.start()
    told("start", "phases", 1)
    told.start()
    told("resume", "checkpoint", 10)
    told("resume", "changed", 10, path="train_micro_batch_size_per_gpu", old=1, new=2)
    told("resume", "changed", 10, path="gradient_accumulation_steps", old=4, new=2)
    told("resume", "changed", 10, path="megasdc.audit.enabled", old=False, new=True)
    now = ["train_batch_size=8", "train_micro_batch_size_per_gpu=2", "gradient_accumulation_steps=2"]
    config = load_config(SMOKE, [*now, "megasdc.audit.enabled=true", "megasdc.determinism.enabled=true"])
    first, second = settings_of_starts(config, read_history(tmp_path).starts)
    assert (first.start, first.micro_batch_size, first.micro_batches, first.audit.enabled) == (0, 1, 4, False)
    assert (second.start, second.micro_batch_size, second.micro_batches, second.audit.enabled) == (10, 2, 2, True)


def test_steps_whose_micro_batches_are_not_divided_evenly_are_refused() -> None:
    """Which samples they took is not followed; the number of replicas and the batch are said."""
    batch = ["train_batch_size=16", "train_micro_batch_size_per_gpu=1"]
    (even,) = settings_of_starts(load_config(SMOKE, [*batch, "gradient_accumulation_steps=4"]), [RunStart(0, 4)])
    assert even.micro_batches == 4
    config = load_config(SMOKE, [*batch, "gradient_accumulation_steps=6"])
    with pytest.raises(DataError, match=r"on 3 replicas took different numbers .*train_batch_size 16"):
        settings_of_starts(config, [RunStart(0, 3)])


def test_a_replay_is_not_given_the_decisions_of_later_starts(tmp_path: Path) -> None:
    """Backward passes that ended after the granularity was changed are not in the log of a step before."""
    batch = ["train_batch_size=8", "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=4"]
    drop = ["enabled=true", 'granularity="backward"', 'gradients="computed"']
    config = load_config(SMOKE, [*batch, *(f"megasdc.drop_compute.{one}" for one in drop)])
    changed = {"megasdc.drop_compute.granularity": "micro_batch"}
    history = RunHistory([RunStart(0, 2), RunStart(4, 2, changed=changed)])
    settings = settings_of_starts(config, history.starts)
    before, after = StepDecisions(4, (4, 3)), StepDecisions(4, (4, 4), (None, 1), 4)
    decisions = {step: before if step <= 4 else after for step in range(1, 9)}
    past = RunPast("run", history, settings, decisions, tmp_path / "checkpoints", rows=[{"step": 4, "train/loss": 1.0}])
    plan = plan_replay(tmp_path, config, past, 3)
    assert plan.decisions is not None and plan.config.megasdc.drop_compute.granularity == "micro_batch"
    assert [plan.decisions[step] for step in range(1, 6)] == [before] * 4 + [StepDecisions(4, (4, 4))]
