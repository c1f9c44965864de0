"""A sample of the benchmark of what health costs: it runs, and its verdict follows from what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tools.bench.commands import app
from tools.bench.health.cost import LayoutCost, first_difference, shares_of
from tools.bench.health.cost_clocks import AgentCost, StepCost
from tools.bench.health.cost_rank import PARTS, RankCost

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

SMALL = ("--hidden", "32", "--layers", "1", "--sequence", "16", "--micro-batches", "2", "--steps", "120")


def test_a_sample_of_the_cost(tmp_path: Path) -> None:
    """Every hook of health is timed, a run without it has none and the same bits, and its agent was found."""
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["health-cost", *SMALL, "--settle", "0.5", "--weeks", "0", "--out", str(out)])
    assert out.exists(), (done.output, done.exception)
    found = json.loads(out.read_text())
    (layout,) = found["layouts"]
    assert layout["differs"] is None and layout["left"] == []
    assert [rank["rank"] for rank in layout["ranks"]] == [0, 1]
    for rank in layout["ranks"]:
        assert set(PARTS.values()) < rank["parts"].keys() and all(share > 0 for share in rank["parts"].values())
        assert rank["calls"] > 7 * 2 + 4 * len(PARTS) and 0 < rank["total"] < 1
    assert 0 < layout["clock"] < layout["ranks"][0]["total"]
    assert 0 <= layout["agent_share"] < 1 and layout["agent"]["wall_s"] > 0
    assert done.exit_code == int(not found["passed"])


def rank_cost(*seconds: float) -> RankCost:
    """A rank whose steps take a second, and whose calls take this of it."""
    return RankCost(0, [StepCost(1.0, {"links": one}, 9) for one in seconds], 0.0, [4.0, 3.0, 2.5], [])


def test_each_bar_fails_alone() -> None:
    """The usual step, all steps together, the agent, other bits, and a hook that is left: each is enough."""
    agent = AgentCost(0.1, 0.5, 100.0, (1, 1))
    good = LayoutCost((1, 1, 2), [shares_of(rank_cost(*[0.0004] * 9))], 0.0, agent, None, [])
    assert good.passed
    timed = replace(good, ranks=[shares_of(rank_cost(*[0.0006] * 9))], clock=0.00015)
    assert timed.passed and not replace(timed, clock=0.00005).passed
    for bad in (
        replace(good, ranks=[shares_of(rank_cost(*[0.0006] * 9))]),
        replace(good, ranks=[*good.ranks, shares_of(rank_cost(*[0.0001] * 20, 0.05))]),
        replace(good, agent=replace(agent, cpu_s=1.5)),
        replace(good, agent=None),
        replace(good, differs=3),
        replace(good, left=["Health"]),
    ):
        assert not bad.passed


def test_the_first_other_bit_is_told() -> None:
    """A loss that differs in its last bit, or that one run alone has, is a difference; equal ones are none."""
    rank = rank_cost(0.1)
    assert first_difference([rank], [rank]) is None
    assert first_difference([rank], [replace(rank, losses=[4.0, 3.0000000000000004, 2.5])]) == 2
    assert first_difference([rank], [replace(rank, losses=[4.0, 3.0])]) == 3
