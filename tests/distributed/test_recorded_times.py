"""Do the readers of step times find in a real run what was put into it, and the threshold that it chose itself?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from whole_runs import events_of, prepare_text, train_run, write_config

from megasdc.lab.report.imbalance import report_times
from megasdc.lab.report.run_threshold import search_run
from megasdc.lab.report.step_times import load_step_times

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _train(folder: Path, data: Path, ranks: int, **changes: Any) -> Path:
    config = write_config(folder / "c.json", data, folder / "run", training__steps=8, **changes)
    raw = json.loads(config.read_text())
    raw["train_batch_size"] = 12
    config.write_text(json.dumps(raw))
    results = train_run(config, ranks)
    assert [code for code, _ in results if code] == [], results
    return folder / "run"


@pytest.mark.parametrize("rule", ["elapsed", "predictive"])
def test_a_run_and_its_log_give_the_same_threshold(tmp_path: Path, data: Path, rule: str) -> None:
    """From the files the command finds tau, S_eff and Tc of the run's own event, bit for bit."""
    delay = {"kind": "bounded_lognormal", "mean_s": 0.05, "preemptible": True}
    section = {"enabled": True, "warmup_steps": 2, "window_steps": 5, "max_drop_rate": 0.3, "rule": rule}
    run = _train(tmp_path, data, 2, delay=[delay], drop_compute=section)
    (told,) = events_of(run, "drop", "threshold")
    found = search_run(load_step_times(run, 3, 7), 0.3, 1, None)
    assert (told["tau_s"], told["speedup"], told["communication_s"]) == (
        found.at(rule, found.best(rule))["tau_s"],
        found.rules[rule].speedup,
        found.communication_s,
    )


def test_a_slow_stage_of_one_replica_is_named(tmp_path: Path, data: Path) -> None:
    """Its delay, far above any other, makes the loss deterministic; replica and stage are the injected ones."""
    delay = {"kind": "slow_rank", "replica": 1, "stage": 1, "delay_s": 0.25}
    section = {"enabled": True, "threshold": "inf"}
    run = _train(tmp_path, data, 4, delay=[delay], drop_compute=section, parallel__pipeline=2)
    report = report_times(load_step_times(run, 2))
    assert (report.loss.slowest, report.loss.stage) == (1, 1)
    assert report.steps_with_drops == 0
