"""Samples of the benchmarks of guards: a Trainer of Hugging Face with a fault and without, and every cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench.guard.campaign import bench_guard
from tools.bench.guard.cost import GuardCostResult, GuardWordResult, bench_guard_cost
from tools.bench.guard.cost_rank import CALLS
from tools.bench.guard.options import GuardCostOptions, GuardOptions

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def test_a_trainer_is_guarded_too(tmp_path: Path) -> None:
    """Of Hugging Face, in a sample of `python -m tools.bench guard`; the counts add up, also when it goes on."""
    options, log = GuardOptions(trainings=2, names="trainer"), tmp_path / "log"
    result = bench_guard(options, log)
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]) + '{"case"')  # ended while it wrote
    assert bench_guard(options, log).trainings == result.trainings
    assert [one.problems for one in result.trainings] == [(), ()] and result.passed
    assert [(one.case.kind, one.audits) for one in result.trainings] == [("clean", 4), ("persistent", 1)]
    assert [one.verdicts for one in result.trainings] == [(), ("persistent",)]


@pytest.mark.full
def test_a_sample_of_the_costs() -> None:
    """Every protection is measured, the golden trace and audits too."""
    options = GuardCostOptions(pairs=1, steps=1, audits=2, hidden=32, layers=1, sequence=8, micro_batches=2)
    result = bench_guard_cost(options)
    assert isinstance(result, GuardCostResult)
    assert [one.name for one in result.always] == list(CALLS)
    assert all(one.seconds.median > 0 and one.share > 0 for one in result.sometimes)


@pytest.mark.full
def test_a_sample_of_the_cost_of_a_word() -> None:
    """A ratio that audits are in, against its bar, which decides the exit code."""
    sizes = {"hidden": 32, "layers": 1, "sequence": 8, "micro_batches": 2}
    options = GuardCostOptions(pairs=2, steps=5, warmup=97, protect="standard", **sizes)
    result = bench_guard_cost(options)
    assert isinstance(result, GuardWordResult)
    (found,) = result.comparisons
    assert found.bar == 1.03 and found.audit.count == 6, "of each block that was guarded one at first, one at step 100"
    assert found.step_s[0] > 1 / 100 * found.audit.median > 0
    assert result.passed == found.ratios["wall"].passes(1.03) and result.as_dict()["exit_code"] == int(
        not result.passed
    )
