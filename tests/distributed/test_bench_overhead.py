"""A sample of `megasdc bench detection-overhead`: two ranks, every kind of check, and a figure."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megasdc.bench.overhead import ACCELERATOR_SIZES
from megasdc.bench.overhead_model import ALWAYS_ON, ALWAYS_ON_ALL, AMORTISED, AUDIT, BETWEEN, TOLERANCED
from megasdc.cli import app

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

SMALL = ["--blocks", "2", "--hidden", "128", "--other", "64", "--layers", "1", "--sequence", "32", "--vocab", "500"]
COMPARED = {"before_step", "after_micro_batches"}
AUDITED = {"attach", "forward", "backward", "recompute", "weight_grad"}
EACH_STEP = {"before_optimizer_step", "after_step"}


class Tags(HTMLParser):
    """Every tag of a page with its attributes; text inside scripts is none."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.found.append((tag, dict(attrs)))


def test_a_sample(tmp_path: Path) -> None:
    """Every kind of check costs time in the calls that make it up; the exit code says whether the bars are met."""
    out, page = tmp_path / "result.json", tmp_path / "figure.html"
    done = CliRunner().invoke(app, ["bench", "detection-overhead", *SMALL, "--out", str(out), "--figure", str(page)])
    found = json.loads(out.read_text())
    assert done.exit_code == int(not found["passed"]), done.output
    assert [model["hidden"] for model in found["models"]] == [128, 64]
    parts = {
        ALWAYS_ON: {*COMPARED, "forward", "backward", "recompute"},
        ALWAYS_ON_ALL: {*COMPARED, "forward", "backward", "recompute"},
        AUDIT: {*COMPARED, *AUDITED, *EACH_STEP},
        BETWEEN: {*COMPARED, *EACH_STEP},
        AMORTISED: {*COMPARED, *AUDITED, *EACH_STEP},
        TOLERANCED: {"before_reduction", "before_optimizer_step", "update", "after_step"},
    }
    for model in found["models"]:
        assert model["tiers"].keys() == parts.keys()
        assert all(rate > 0 for rate in model["rates"].values())
        for name, tier in model["tiers"].items():
            assert tier["own"]["count"] == 2 and tier["own"]["median"] > 0
            assert all(tier["parts"][part] > 0 for part in parts[name]), (name, tier["parts"])
            assert (tier["predicted"] is None) == (name == TOLERANCED)
    assert [tier["bar"] for tier in found["models"][0]["tiers"].values() if tier["bar"]] == [0.01, 0.005]
    assert not [tier["bar"] for tier in found["models"][1]["tiers"].values() if tier["bar"]]
    assert list(map(int, found["extrapolated"][ALWAYS_ON])) == list(ACCELERATOR_SIZES)
    assert "weight_grad" in done.output and "after_micro_batches" in done.output
    text = page.read_text()
    assert "always on, measured" in text and "audit, predicted" in text
    tags = Tags(text)
    assert "script" in dict(tags.found)
    assert not [(tag, given) for tag, given in tags.found if given.keys() & {"src", "href"}], "needs the network"
