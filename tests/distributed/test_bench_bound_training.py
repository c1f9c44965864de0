"""A sample of `python -m tools.bench bound-training`: faults get in, bounds act on them, and the table says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from whole_runs import prepare_text

from tools.bench.bounds.options import SHARES, BoundTrainOptions, Setting
from tools.bench.bounds.training import bench_bound_training

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

THETA = 1.0
"""Above nearly every element of a healthy gradient here, and below the harmed ones that would stop a step."""


def test_a_sample(tmp_path: Path) -> None:
    """Faults keep the model from learning, and a bound that no healthy element reaches gives the loss back."""
    options = BoundTrainOptions(
        steps=150,
        seeds=1,
        hidden=64,
        layers=1,
        sequence=32,
        micro_batch=8,
        learning_rate=5e-3,
        fault_probability=0.2,
        eval_samples=16,
        data=prepare_text(tmp_path),
        absolute=(THETA,),
        spike_aware=(),
    )
    told: list[tuple[str, int, int]] = []
    result = bench_bound_training(options, lambda *what: told.append(what))
    bound = Setting("absolute", THETA)
    runs = {(run.setting, run.faulty): run for run in result.runs}
    assert list(runs) == [(Setting(), False), (Setting(), True), (bound, False), (bound, True)]
    assert [run.faults > 0 for run in runs.values()] == [False, True, False, True]
    assert {run.steps for run in runs.values()} == {150}
    healthy, harmed = runs[Setting(), False], runs[Setting(), True]
    bounded, bounded_harmed = runs[bound, False], runs[bound, True]
    assert harmed.faults == bounded_harmed.faults, "the same seed harms the same"
    assert (healthy.share, harmed.share) == (None, None)
    assert bounded.share is not None and bounded_harmed.share is not None
    assert bounded_harmed.share > 2 * bounded.share, "it is the faults that are bounded"
    assert bounded.loss == pytest.approx(healthy.loss, rel=1e-2)
    assert healthy.loss < result.diverged_above, "something was learned"
    assert harmed.loss - healthy.loss > 3 * abs(bounded_harmed.loss - healthy.loss)
    for sizes in result.healthy_sizes.values():
        assert list(sizes) == list(SHARES)
        assert 0 < sizes["tight"] < sizes["moderate"] < sizes["loose"]
    assert result.healthy_sizes["absolute"]["loose"] < THETA
    assert told[-1] == ("runs", 4, 4) and options.num_runs == 4

    found = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert [one["loss"] for one in found["runs"]] == [run.loss for run in result.runs]
    printed = Console(record=True, width=200)
    result.render(printed)
    text = printed.export_text()
    assert all(f"{run.loss:.4f}" in text for run in (healthy, bounded, bounded_harmed))
    assert result.verdict in text
