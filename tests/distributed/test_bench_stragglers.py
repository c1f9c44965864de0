"""A sample of the benchmark of stragglers: it runs, and its table follows from what was run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tools.bench.commands import app
from tools.bench.health.options import Case, StragglerOptions
from tools.bench.health.stragglers import Trial, score

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def test_a_sample_of_the_stragglers(tmp_path: Path) -> None:
    """Two replicas, one of them five times as slow, are told apart; the log is not run again."""
    out, log = tmp_path / "out.json", tmp_path / "log.jsonl"
    small = ["--trials", "1", "--clean", "0", "--noises", "0.02", "--ratios", "5", "--replicas", "2", "--sleep", "0.02"]
    for _ in range(2):
        done = CliRunner().invoke(app, ["stragglers", *small, "--log", str(log), "--out", str(out)])
        assert out.exists(), (done.output, done.exception)
    found = json.loads(out.read_text())
    (trial,) = found["trials"]
    assert trial["named"] == [0] and trial["step"] <= 50 and 0 < trial["slept"] <= 1.05
    (row,) = found["rows"]
    assert (row["runs"], row["right"], row["wrong"]) == (1, 1, 0)
    assert done.exit_code == int(not found["passed"]) and len(log.read_text().splitlines()) == 2


def test_rows_count_whom_trials_named() -> None:
    """A wrong name, a missed one, too little sleep: each fails its row; a clean run must name nobody."""
    options = StragglerOptions(trials=2, clean=1, noises=(0.05,))

    def row(ratio: float, *named: list[int], slept: float = 0.95) -> tuple[int, int, bool]:
        trials = [Trial(Case(0.05, ratio, number), one, 16, slept, -1) for number, one in enumerate(named)]
        (found,) = score(trials, options)
        return found.right, found.wrong, found.passed

    assert row(1.3, [0], [1]) == (2, 0, True)
    assert row(1.3, [0], []) == (1, 0, False)
    assert row(1.3, [0], [1, 2]) == (1, 1, False)
    assert row(1.3, [0], [1], slept=0.8) == (2, 0, False)
    assert row(1.0, []) == (0, 0, True)
    assert row(1.0, [3]) == (0, 1, False)
