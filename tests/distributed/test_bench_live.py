"""Samples of `python -m tools.bench detection`: the checks of runs under way against what was injected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_switch import fused
from harness import run_distributed
from typer.testing import CliRunner

from megasdc.config.faults import OPTIMIZER_STATE
from megasdc.sdc.golden import GoldenComparison, judge_cell
from tools.bench.commands import app
from tools.bench.detection.golden_rank import Campaign
from tools.bench.detection.live import bench_live
from tools.bench.detection.live_cases import ALONE, CLEAN, LONG
from tools.bench.detection.live_chain import HARMLESS, NAMED, TOLD, UNNAMED, ChainPlan, PresetPlan, run_chain_drills
from tools.bench.detection.live_trial import UNSEEN
from tools.bench.detection.options import LiveOptions

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def test_a_sample() -> None:
    """One wrong of three replicas is always found and named; clean steps raise nothing; the counts add up."""
    options = LiveOptions(faults=20, clean=6, layouts=((1, 1, 3),), precisions=("bf16",), fuse=fused())
    result = bench_live(options)
    assert result.missed == [] and result.passed
    found = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert sum(row["injected"] for row in found["by_row"].values()) == 20
    assert (found["clean_steps"], found["clean_alarms"]) == (2 * LONG, 0)
    assert found["clean_uneven_steps"] > 0, "replicas completed different numbers of micro-batches"
    alone = [trial for trial in result.faulty if trial.row == ALONE and trial.harmed]
    assert len(alone) >= 5
    for trial in alone:
        assert {one.rank for one in trial.named} == set(trial.harmed)
        assert [one.address for one in trial.named] == list(trial.shows)
    assert all(not trial.detected for trial in result.faulty if trial.row in UNSEEN)
    assert sum(found["today"]["ours"].values()) == len(alone)
    assert len({(trial.loss, trial.grad_norm) for trial in result.trials if trial.row == CLEAN}) == 2 * LONG


@pytest.mark.full
def test_a_sample_with_fused_modules() -> None:
    """A wrong value in any submodule is found and named, and clean steps raise nothing, with ``model.fuse`` too."""
    options = LiveOptions(faults=8, clean=2, layouts=((1, 1, 3),), precisions=("bf16",), fuse=True)
    result = bench_live(options)
    assert result.missed == [] and result.passed
    assert result.as_dict()["clean_alarms"] == 0


@pytest.mark.parametrize("arguments", [["--live", "--faults", "0"], ["--faults", "0"]])
def test_a_campaign_of_nothing_is_refused(arguments: list[str]) -> None:
    """Without any fault there is nothing to score."""
    done = CliRunner().invoke(app, ["detection", *arguments])
    assert done.exit_code != 0
    assert "--faults" in done.output + str(done.exception)


def test_drills_are_of_running_jobs() -> None:
    """Whole runs and a log are no part of the campaign of golden traces, and an unknown kind is refused."""
    for option, text in (("--drills=5", "--drills and --kinds need --live"), ("--log=log.jsonl", "--log needs --live")):
        done = CliRunner().invoke(app, ["detection", option])
        assert done.exit_code == 2 and text in done.output
    done = CliRunner().invoke(app, ["detection", "--live", "--drills", "5", "--kinds", "state,stat"])
    assert done.exit_code != 0 and "'stat' is none of tokens, place" in done.output + str(done.exception)


def test_a_sample_of_whole_runs(tmp_path: Path) -> None:
    """Weights that one rank has wrong are found, and the run ends with the right bits; a log is gone on from."""
    plan = ChainPlan(1, ("parameter",), ((1, 1, 2),), 2, 4, ("fp32",))
    result = run_chain_drills(plan, tmp_path / "log", lambda what, done, total: None)
    assert result.passed and result.clean_steps == {"1x1x2": 2}
    (drill,) = result.faulty
    assert drill.outcome == NAMED and drill.named == drill.changed and drill.found
    assert run_chain_drills(plan, tmp_path / "log", lambda what, done, total: None) == result


@pytest.mark.full
def test_a_sample_of_runs_that_a_preset_alone_protects() -> None:
    """A result that one of three replicas computes wrongly from some step on is found, or told as one that may pass."""
    plan = PresetPlan(2, ("forward", "parameter"), ((1, 1, 3),), 20, 1, ("fp32",))
    result = run_chain_drills(plan, None, lambda what, done, total: None)
    assert not result.failed and result.clean_steps == {"1x1x3": 20}
    assert {one.kinds[0] for one in result.faulty} == {"forward", "parameter"}
    assert all(one.changed and one.outcome in (NAMED, UNNAMED, HARMLESS, TOLD) for one in result.faulty)


def _blind(folder: str, seed: int) -> list[Any]:
    """Trials of a campaign whose detector sees nothing."""
    common = {"layout": (1, 1, 1), "precision": "fp32", "style": "gpt", "fuse": False}
    campaign = Campaign({**common, "seed": seed, "folder": folder})
    assert torch.are_deterministic_algorithms_enabled()
    campaign._judge = lambda _trace: judge_cell({0: [GoldenComparison(1, 0)]}, campaign.dims)  # type: ignore[method-assign]
    trials = [campaign.harm() for _ in range(60)]
    return [trial for trial in trials if trial.changed]


def test_a_detector_that_sees_nothing_has_misses(tmp_path: Path) -> None:
    """Whether a fault had an effect is found without the detector, of stored states too."""
    trials = run_distributed(_blind, 1, str(tmp_path), 3, init=False)[0]
    assert not any(trial.detected for trial in trials)
    stored = [trial for trial in trials if trial.phase == OPTIMIZER_STATE]
    assert len(stored) > 3 and sum(trial.effect for trial in stored) > 0.7 * len(stored)
    assert all(trial.effect for trial in trials if trial.phase != OPTIMIZER_STATE)
