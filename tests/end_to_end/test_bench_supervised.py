"""A sample of the campaign of supervised runs: its verdict follows from what happened."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megasdc.supervisor.goodput import PARTS
from tools.bench.commands import app
from tools.bench.supervised.campaign import Drill, SupervisedResult
from tools.bench.supervised.options import SupervisedOptions
from tools.hosts import unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(600),
]
RIGHT = Drill(("rank",), (1, 1, 2), (("rank_lost", ("a", "b")), ("done", ("a", "b"))), (), 60.0, (), {}, ())


def test_one_run_that_is_not_right_decides() -> None:
    """Whatever its problem is; all rows count it."""
    drills = [RIGHT, replace(RIGHT, problems=("losses differ in 1 steps, the first is 7",))]
    result = SupervisedResult("here", SupervisedOptions(), drills)  # type: ignore[arg-type]
    assert not result.passed and replace(result, drills=drills[:1]).passed
    assert list(result.report())[-1] == "run 1, 1x1x2, rank: losses differ in 1 steps, the first is 7"


@pytest.mark.full
def test_a_sample(tmp_path: Path) -> None:
    """A rank is killed on real test hosts: the run ends as without that, in two attempts at most."""
    out, log = tmp_path / "out.json", tmp_path / "log.jsonl"
    options = ["--drills", "1", "--faults", "1", "--kinds", "rank", "--layouts", "1x1x2"]
    done = CliRunner().invoke(app, ["supervised", *options, "--log", str(log), "--out", str(out)])
    assert out.exists(), (done.output, done.exception)
    (line,) = map(json.loads, log.read_text().splitlines()[1:])
    assert not line["problems"] and done.exit_code == 0
    kinds = [kind for kind, _ in line["attempts"]]
    assert kinds[-1] == "done" and set(kinds[:-1]) <= {"rank_lost"} and len(kinds) <= 2
    assert tuple(line["parts"]) == PARTS and line["parts"]["productive"] > 0
    assert sum(line["parts"].values()) == pytest.approx(line["seconds"], rel=0.3)
