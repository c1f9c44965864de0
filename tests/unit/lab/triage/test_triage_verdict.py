"""Which cause follows from replays and records?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megasdc.lab.triage.conclusion import (
    Far,
    FarSample,
    LargeUpdate,
    StepComparison,
    StepEvidence,
    decide_triage,
    deviations,
    find_far,
    find_far_samples,
    find_large_updates,
)
from megasdc.lab.triage.triage import compare_numbers
from megasdc.metrics.writer import ParameterDetails, SampleLosses, StepDetails

EQUAL = StepComparison(1000)
WRONG = StepComparison(1000, "rank 3 computed something else", 3, "node7")
CLEAN = StepEvidence(EQUAL, True, EQUAL, far=[], num_samples=16, updates=[])
SPIKE = [Far("loss", 9.0, 3.0, 20.0)]
STRANGE = [FarSample((1, 0, 0), 11.0, 3.0, 25.0)]
LARGE = [LargeUpdate("2.layer.mlp.weight", "update over weight", 0.5, 9.0)]

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("nothing", {}, "nothing", "Nothing of the step is far"),
    ("replays differ", {"replays": WRONG}, "hardware", "transient or intermittent"),
    ("on other hosts", {"replays": WRONG, "same_hosts": False}, "hardware", "some of these hosts"),
    ("other versions", {"replays": replace(WRONG, foreign=["torch"])}, "inconclusive", "may round otherwise: torch"),
    ("the run differs", {"recorded": WRONG, "far": SPIKE, "samples": STRANGE}, "hardware", "rank 3 computed"),
    ("run of other versions", {"recorded": replace(WRONG, foreign=["torch"])}, "inconclusive", "may round otherwise"),
    ("a check found it", {"found": "rank 1", "replays": StepComparison(0)}, "hardware", "rank 1"),
    ("few samples", {"far": SPIKE, "samples": STRANGE, "updates": LARGE}, "data", "1 of 16 samples"),
    ("many samples", {"far": SPIKE, "samples": STRANGE * 5, "updates": LARGE}, "optimizer", "mlp.weight 9 times"),
    ("spread", {"far": SPIKE, "updates": LARGE}, "optimizer", "spread over the samples"),
    ("not a number", {"non_finite": ["2.w"], "updates": []}, "inconclusive", "2.w has NaN or Inf"),
    ("nothing large", {"far": SPIKE}, "inconclusive", "no update or gradient is large"),
    ("few steps replayed", {"far": SPIKE, "updates": None}, "inconclusive", "too few steps"),
    ("few steps known", {"far": None}, "inconclusive", "Fewer than 8 steps"),
    ("nothing recorded", {"recorded": StepComparison(0)}, "nothing", "recorded nothing of these steps"),
]


@pytest.mark.parametrize(("changes", "verdict", "why"), [one[1:] for one in CASES], ids=[one[0] for one in CASES])
def test_verdicts(changes: dict[str, Any], verdict: str, why: str) -> None:
    """Bits come first, then few documents, then updates; what is not known is inconclusive."""
    found = decide_triage(replace(CLEAN, **changes))
    assert found.verdict == verdict
    assert why in " ".join(found.because)


def test_deviations_are_robust() -> None:
    """Of values around 10 with median distance 1, 20 is 10 / 1.4826 deviations away; an outlier moves nothing."""
    usual = [9.0, 11.0] * 6 + [1e9]
    assert deviations(20.0, usual) == pytest.approx((20 - 11) / (1.4826 * 2))
    assert deviations(20.0, [9.0, 10.0, 11.0] * 3) == pytest.approx(10 / 1.4826)
    assert deviations(5.1, [5.0] * 9) == pytest.approx(0.1 / 0.05)
    assert deviations(math.nan, usual) == math.inf
    assert deviations(5.0, [5.0] * 7 + [math.nan] * 9) is None


def step(number: int, losses: list[float], update: float = 0.1, gradient: float = 1.0) -> StepDetails:
    """A step of two replicas with one parameter."""
    half = len(losses) // 2
    samples = [SampleLosses(0, 0, losses[:half]), SampleLosses(1, 0, losses[half:])]
    parameters = {"w": ParameterDetails(gradient, 1.0, 0, 10.0, update, 2.0)}
    return StepDetails(number, sum(losses) / len(losses), 1.0, samples, parameters)


def test_samples_and_updates_that_are_far() -> None:
    """A sample is judged by all others of these steps, low losses too; updates by those of the steps before."""
    usual = [3.0, 3.1, 2.9, 3.05]
    before = [step(number, usual) for number in range(1, 5)]
    found = find_far_samples(step(5, [3.0, 3.1, 9.0, 0.1]), before)
    assert [one.place for one in found] == [(1, 0, 0), (1, 0, 1)]
    assert find_far_samples(step(5, usual), before) == []
    assert find_large_updates(step(5, usual), before) == []
    (large,) = find_large_updates(step(5, usual, update=0.6), before) or []
    assert (large.name, large.what, large.times) == ("w", "update over weight", pytest.approx(6.0))
    (large,) = find_large_updates(step(5, usual, gradient=7.0), before) or []
    assert (large.what, large.value) == ("gradient over moment", 3.5)
    assert find_large_updates(step(5, usual), before[:2]) is None


def test_numbers_that_are_far() -> None:
    """Only what is far above is unusual; without enough steps before nothing is known."""
    usual = {"loss": [3.0, 3.1, 2.9] * 3, "gradient norm": [1.0] * 3}
    (far,) = find_far({"loss": 5.0, "gradient norm": 9.0}, usual) or []
    assert (far.name, far.usual) == ("loss", 3.0)
    assert find_far({"loss": 0.5}, usual) == []
    assert find_far({"gradient norm": 1.0}, usual) is None


def test_logged_numbers_are_compared_bit_by_bit() -> None:
    """One bit counts; a loss that is a mean of several steps is left out, and steps outside of the replay."""
    replayed: dict[int, dict[str, Any]] = {
        number: {"train/loss": 3.0 + number, "train/grad_norm": 1.0} for number in range(3, 8)
    }
    rows: list[dict[str, Any]] = [
        {"step": 1, "train/loss": 0.0, "train/grad_norm": 0.0},
        {"step": 4, "train/loss": 0.0, "train/grad_norm": 1.0},
        {"step": 5, "train/loss": 8.0, "train/grad_norm": 1.0},
        {"step": 5, "eval/loss": 0.0},
        {"step": 9, "train/loss": 0.0, "train/grad_norm": 0.0},
    ]
    assert compare_numbers(rows, replayed, 2, 7) == StepComparison(3)
    rows[2]["train/grad_norm"] = math.nextafter(1.0, 2.0)
    found = compare_numbers(rows, replayed, 2, 7)
    assert found.first == "train/grad_norm of step 5 is 1.0, recorded was 1.0000000000000002"
    assert compare_numbers(rows, replayed, 5, 7) == StepComparison(0)
