"""`python -m tools.bench detection-overhead` runs every kind of check, and these read what the model says they read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_distributed
from torch import Tensor
from typer.testing import CliRunner

from megasdc.sdc import nonfinite
from megasdc.tensors.checksum import Xxh3
from tools.bench.commands import app
from tools.bench.detection.overhead import ACCELERATOR_SIZES, work_of
from tools.bench.detection.overhead_model import (
    ALWAYS_ON,
    ALWAYS_ON_ALL,
    AMORTISED,
    AUDIT,
    BETWEEN,
    CHAIN,
    OFF,
    PERMUTED,
    ROWS,
    SLICES,
    TOKENS,
    asked_by,
)
from tools.bench.detection.overhead_rank import OverheadRank
from tools.bench.training.options import TrainBenchOptions

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

SMALL = [
    "--kept",
    "20",
    "--blocks",
    "2",
    "--hidden",
    "128",
    "--other",
    "64",
    "--layers",
    "1",
    "--sequence",
    "32",
    "--vocab",
    "500",
]
COMPARED = {"before_step", "after_micro_batches"}
AUDITED = {"attach", "forward", "backward", "recompute", "weight_grad"}
EACH_STEP = {"agreement", "after_step"}


class Tags(HTMLParser):
    """Every tag of a page with its attributes; text inside scripts is none."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.found.append((tag, dict(attrs)))


def test_a_sample(tmp_path: Path, forked_ranks: None) -> None:
    """Every kind of check costs time in the calls that make it up; the exit code says whether the bars are met."""
    out, page = tmp_path / "result.json", tmp_path / "figure.html"
    done = CliRunner().invoke(app, ["detection-overhead", *SMALL, "--out", str(out), "--figure", str(page)])
    found = json.loads(out.read_text())
    assert done.exit_code == int(not found["passed"]), done.output
    assert [model["hidden"] for model in found["models"]] == [128, 64]
    parts = {
        ALWAYS_ON: {*COMPARED, "forward", "backward", "recompute"},
        ALWAYS_ON_ALL: {*COMPARED, "forward", "backward", "recompute"},
        AUDIT: {*COMPARED, *AUDITED, *EACH_STEP},
        BETWEEN: {*COMPARED, *EACH_STEP},
        AMORTISED: {*COMPARED, *AUDITED, *EACH_STEP},
        PERMUTED: {*COMPARED, *AUDITED, *EACH_STEP, "replay"},
        ROWS: {*COMPARED, "before_forward", "after_backward", "forward", "backward", "weight_grad"},
        SLICES: {"before_reduction", "before_optimizer_step", "after_optimizer_step"},
        CHAIN: {*COMPARED, "before_optimizer_step", "after_optimizer_step"},
        TOKENS: {*COMPARED, "before_forward", "after_forward"},
    }
    for model in found["models"]:
        assert model["tiers"].keys() == parts.keys()
        assert all(rate > 0 for rate in model["rates"].values())
        assert 0 < model["kept"]["share"] < 1 and model["kept"]["passed"] == (model["kept"]["share"] <= 0.01)
        assert model["kept"]["period"] >= model["kept"]["cadence"]["every"]
        for name, tier in model["tiers"].items():
            assert tier["own"]["count"] == 2 and tier["own"]["median"] > 0
            assert all(tier["parts"][part] > 0 for part in parts[name]), (name, tier["parts"])
            assert (tier["predicted"] is None) == (name in (ROWS, SLICES, CHAIN, TOKENS))
    assert [tier["bar"] for tier in found["models"][0]["tiers"].values() if tier["bar"]] == [0.003, 0.003, 0.005]
    assert not [tier["bar"] for tier in found["models"][1]["tiers"].values() if tier["bar"]]
    assert list(map(int, found["extrapolated"][ALWAYS_ON])) == list(ACCELERATOR_SIZES)
    assert "weight_grad" in done.output and "after_micro_batches" in done.output
    text = page.read_text()
    assert "always on, measured" in text and "audit, predicted" in text
    tags = Tags(text)
    assert "script" in dict(tags.found)
    linked = [given[name] or "" for _, given in tags.found for name in given.keys() & {"src", "href"}]
    assert all(link.startswith("data:") for link in linked), f"needs the network: {linked}"


def _counted(counts: Counter[str], name: str, call: Callable[..., Any], tensor_at: int) -> Callable[..., Any]:
    """The same call, which also counts itself and the bytes of one of its arguments."""

    def counting(*args: Any, **options: Any) -> Any:
        tensor: Tensor = args[tensor_at] if len(args) > tensor_at else options["tensor"]
        counts[name] += 1
        counts[f"{name} bytes"] += tensor.numel() * tensor.element_size()
        return call(*args, **options)

    return counting


def _counts(options: TrainBenchOptions, folder: Path, names: tuple[str, ...]) -> dict[str, Counter[str]]:
    """What one step of each kind really reads and exchanges on this rank."""
    rank = OverheadRank(options, folder)
    counts: Counter[str] = Counter()
    Xxh3.start = _counted(counts, "checksums", Xxh3.start, 1)  # type: ignore[method-assign]
    nonfinite.is_surely_finite = _counted(counts, "extremes", nonfinite.is_surely_finite, 0)
    dist.all_reduce = _counted(counts, "exchanges", dist.all_reduce, 0)
    found = {}
    for name in names:
        counts.clear()
        rank.step(name)
        found[name] = counts.copy()
    rank.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checks_read_what_the_model_says(precision: str, tmp_path: Path) -> None:
    """Results, bytes and reductions of each kind of step, counted in the calls, are those that are predicted."""
    options = TrainBenchOptions(
        blocks=1,
        steps_per_block=1,
        hidden=128,
        layers=2,
        sequence=32,
        vocab=500,
        micro_batch=2,
        accumulation=3,
        precision=precision,
    )
    names = (OFF, ALWAYS_ON, ALWAYS_ON_ALL, AUDIT, BETWEEN)
    for found in run_distributed(_counts, options.ranks, options, tmp_path, names, init=False):
        for name in names:
            asked = asked_by(work_of(options), name)
            for what, reads in (("checksums", asked.checksums), ("extremes", asked.extremes)):
                assert found[name][what] == pytest.approx(reads.count), (name, what)
                assert found[name][f"{what} bytes"] == pytest.approx(reads.bytes), (name, what)
            assert found[name]["exchanges"] - found[OFF]["exchanges"] == asked.exchanges, name


def test_replays_in_bubbles(tmp_path: Path) -> None:
    """Each pipeline has its share and verdict; replays take as long as what is slept in them, and more."""
    out = tmp_path / "result.json"
    sizes = ["--blocks", "1", "--pass-ms", "10", "--hidden", "64", "--sequence", "32", "--vocab", "256"]
    done = CliRunner().invoke(app, ["bubbles", *sizes, "--out", str(out)])
    found = json.loads(out.read_text())
    assert done.exit_code == int(not found["passed"]), done.output
    slept = [one for one in found["hidden"] if one["shape"]["slept_s"]]
    assert [(one["shape"]["stages"], one["bar"]) for one in slept] == [(2, 0.6), (4, 0.8)]
    for one in slept:
        assert one["replay_s"]["median"] >= 0.03 and one["step_s"]["median"] >= 5 * 0.03
        assert one["passed"] == (one["share"]["median"] >= one["bar"])


@pytest.mark.full
def test_a_short_run_of_what_a_preset_costs(tmp_path: Path) -> None:
    """`python -m tools.bench protect` trains both sides to their ends in turns, and judges their ratio."""
    sizes = ["--hidden", "64", "--layers", "1", "--sequence", "32", "--vocab", "500"]
    few = ["--blocks", "2", "--steps-per-block", "10", "--warmup", "0"]
    done = CliRunner().invoke(app, ["protect", *sizes, *few, "--out", str(tmp_path / "out.json")])
    assert done.exit_code in (0, 1), done.output
    (one,) = json.loads((tmp_path / "out.json").read_text())["comparisons"]
    assert len(one["costs"]) == 2 and one["bar"] == 1.015 and one["budget"] == 0.01
    assert all(cost["wall_s"] > 0 for pair in one["costs"] for cost in pair)
