"""A sample of `python -m tools.bench trace`: it runs, and what it prints follows from what it measured."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megasdc.model.kinds import GRANULARITIES
from megasdc.sdc.cost import RankWork, reads_of_step, total
from tools.bench.commands import app
from tools.bench.detection.trace import HIDDEN_SIZES, Accelerator, bench_trace, extrapolate
from tools.bench.training.options import TrainBenchOptions, run_config

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

SMALL = ["--blocks", "2", "--hidden", "64", "--layers", "1", "--sequence", "32", "--vocab", "500"]


def test_a_sample(tmp_path: Path, forked_ranks: None) -> None:
    """The rank records as many checksums as the model counts; the prediction is bytes and calls over the step."""
    out = tmp_path / "result.json"
    done = CliRunner().invoke(app, ["trace", *SMALL, "--call-us", "7", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert list(found["costs"]) == list(GRANULARITIES)
    options = TrainBenchOptions(**found["options"])
    model = run_config(options, tmp_path).megasdc.model
    work = RankWork(model, vocab=512, sequence=32, micro_batch=1, accumulation=2)
    assert found["flop_per_s"] == pytest.approx(work.flops / found["step_s"]["median"])
    for name, cost in found["costs"].items():
        reads = total(reads_of_step(work, name))
        assert (cost["checksums"], cost["bytes"]) == (reads.count, reads.bytes)
        expected = (reads.bytes / found["bytes_per_s"] + reads.count * found["call_s"]) / found["step_s"]["median"]
        assert cost["predicted"] == pytest.approx(expected)
        assert cost["own"]["count"] == 2 and cost["own"]["median"] > 0
        assert f"{100 * cost['predicted']:.2f}" in done.output
    assert found["accelerator"]["call_s"] == pytest.approx(7e-6)
    assert "7 us a call" in " ".join(done.output.split())


def test_the_rank_is_one_whatever_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is one step of each kind on one rank, so that ratios are of neighbouring steps."""
    seen = {}

    def run_in_ranks(function: object, arguments: dict, ranks: int, *_: object, **__: object) -> None:
        seen.update(asdict(arguments["options"]), ranks_started=ranks)
        raise RuntimeError("enough")

    monkeypatch.setattr("tools.bench.detection.trace.run_in_ranks", run_in_ranks)
    with pytest.raises(RuntimeError, match="enough"):
        bench_trace(TrainBenchOptions(ranks=2, steps_per_block=10), Accelerator(), lambda *_: None)
    assert (seen["ranks"], seen["steps_per_block"], seen["ranks_started"]) == (1, 1, 1)


def test_extrapolation_uses_every_assumption() -> None:
    """Twice the bandwidth, arithmetic or launch time each change the share as they should."""
    base = extrapolate(Accelerator())["gemm"]
    assert list(base) == list(HIDDEN_SIZES)
    assert base[4096] > base[8192] > base[12288]
    faster = extrapolate(replace(Accelerator(), flop_per_s=2 * Accelerator().flop_per_s))["gemm"]
    assert faster[8192] == pytest.approx(2 * base[8192])
    no_calls = extrapolate(replace(Accelerator(), call_s=0.0))["gemm"][8192]
    twice = extrapolate(replace(Accelerator(), call_s=0.0, bytes_per_s=2 * Accelerator().bytes_per_s))["gemm"][8192]
    assert 0 < twice < no_calls < base[8192]
    assert twice == pytest.approx(no_calls / 2)
