"""A sample of `megasdc bench detection --live`: the checks of runs under way against what was injected."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from megasdc.bench.live import LiveOptions, bench_live
from megasdc.bench.live_cases import ALONE, CLEAN, LONG
from megasdc.bench.live_trial import UNSEEN
from megasdc.cli import app

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def test_a_sample() -> None:
    """One wrong of three replicas is always found and named; clean steps raise nothing; the counts add up."""
    result = bench_live(LiveOptions(faults=20, clean=6, layouts=((1, 1, 3),), precisions=("bf16",)))
    assert result.missed == [] and result.passed
    found = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert sum(row["injected"] for row in found["by_row"].values()) == 20
    assert (found["clean_steps"], found["clean_alarms"]) == (2 * LONG, 0)
    alone = [trial for trial in result.faulty if trial.row == ALONE and trial.harmed]
    assert len(alone) >= 5
    for trial in alone:
        assert {one.rank for one in trial.named} == set(trial.harmed)
        assert [one.address for one in trial.named] == list(trial.shows)
    assert all(not trial.detected for trial in result.faulty if trial.row in UNSEEN)
    assert sum(found["today"]["ours"].values()) == len(alone)
    assert len({(trial.loss, trial.grad_norm) for trial in result.trials if trial.row == CLEAN}) == 2 * LONG


def test_a_layout_without_replicas_is_refused() -> None:
    """One replica has nothing to compare an audit with."""
    done = CliRunner().invoke(app, ["bench", "detection", "--live", "--layouts", "2x1x1"])
    assert done.exit_code != 0
    assert "2x1x1 has one replica" in done.output + str(done.exception)
