"""What does the live campaign call right of toleranced checks? Against trials that a person can judge."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from megasdc.train.detection.toleranced import PAST, REDUCTION, REPLICAS, UPDATE
from tools.bench.detection.live_cases import CLEAN, LASTING, OTHER, SHARD, STATE, STEPPED, SUM, TOLERANCED_ROWS
from tools.bench.detection.live_tolerance_sizes import Seen, feature_sizes
from tools.bench.detection.live_tolerance_trial import (
    COVERED,
    UNCOVERED,
    ToleranceResult,
    ToleranceTrial,
    size_class,
)
from tools.bench.result import plain

STEP = 7


def _trial(row: str, sizes: dict[str, float], *warnings: tuple[int, str], **changes: Any) -> ToleranceTrial:
    options: dict[str, Any] = {
        "layout": "1x1x3",
        "precision": "fp32",
        "recompute": False,
        "dropout": False,
        "row": row,
        "kind": "sign",
        "address": "step 7, reduced_grad of 2.layer.mlp (weight)",
        "ranks": (1,),
        "steps": 3,
        "fault_step": STEP,
        "harmed": True,
        "skipped": False,
        "covered": True,
        "sizes": sizes,
        "thresholds": {REDUCTION: 1e-6, UPDATE: 20.0, REPLICAS: 12.0, PAST: 24.0},
        "warnings": warnings,
        "audit": bool(warnings),
        "accused": (),
    }
    return ToleranceTrial(**{**options, **changes})


HEALTHY: dict[str, Any] = {"fault_step": 0, "harmed": False, "ranks": ()}


@pytest.mark.parametrize(
    ("trial", "met"),
    [
        (_trial(SUM, {REDUCTION: 3.0}, (STEP, REDUCTION)), True),
        (_trial(SUM, {REDUCTION: 3.0}), False),
        (_trial(SUM, {REDUCTION: 3.0}, (STEP, UPDATE)), False),
        (_trial(SUM, {REDUCTION: 3.0}, (STEP + 1, REDUCTION)), False),
        (_trial(SUM, {REDUCTION: 3.0}, (STEP, REDUCTION), audit=False), False),
        (_trial(SUM, {REDUCTION: 3.0}, (STEP, REDUCTION), accused=(1,)), True),
        (_trial(SUM, {REDUCTION: 3.0}, (STEP, REDUCTION), accused=(0,)), False),
        (_trial(SUM, {REDUCTION: 3.0}, (STEP - 1, PAST), (STEP, REDUCTION)), False),
        (_trial(SUM, {REDUCTION: 1.5}), True),
        (_trial(SUM, {REDUCTION: 3.0}, skipped=True), True),
        (_trial(SUM, {}, (STEP, REDUCTION), harmed=False), False),
        (_trial(OTHER, {REPLICAS: 0.5, PAST: 2.5}, (STEP, REPLICAS)), False),
        (_trial(OTHER, {REPLICAS: 2.5, PAST: 0.5}, (STEP, REPLICAS)), True),
        (_trial(STEPPED, {}, covered=False), True),
        (_trial(LASTING, {}, covered=False), False),
        (_trial(LASTING, {UPDATE: 9.0}, (STEP + 2, UPDATE)), True),
        (_trial(LASTING, {UPDATE: 9.0}, (STEP + 2, UPDATE), audit=False), False),
        (_trial(LASTING, {UPDATE: 9.0}, (STEP + 2, REDUCTION)), False),
        (_trial(STATE, {}, covered=False), True),
        (_trial(CLEAN, {}, **HEALTHY), True),
        (_trial(CLEAN, {}, (STEP, PAST), **HEALTHY), False),
    ],
)
def test_what_is_right_of_a_toleranced_check(trial: ToleranceTrial, met: bool) -> None:
    """A fault that cannot be hidden is warned of in its step, an audit follows, nobody healthy is ever named."""
    assert trial.met is met


def test_every_row_is_covered_or_says_why_not() -> None:
    """Each row of the campaign has checks that may see it, or a reason."""
    assert set(COVERED) == set(TOLERANCED_ROWS)
    assert {row for row, checks in COVERED.items() if not checks} == set(UNCOVERED)


def test_faults_are_counted_by_size() -> None:
    """Each check has a row of its own, with what it found of each size; a skipped step has no size."""
    result = ToleranceResult(
        [
            _trial(OTHER, {REPLICAS: 3.0, PAST: 0.5}, (STEP, REPLICAS)),
            _trial(OTHER, {REPLICAS: 1.5, PAST: 2.5}),
            _trial(OTHER, {}, skipped=True),
            _trial(SHARD, {}, harmed=False),
            _trial(STEPPED, {}, covered=False),
            _trial(CLEAN, {}, (STEP, PAST), steps=40, **HEALTHY),
        ]
    )
    counts = result.by_row
    assert counts[f"{OTHER}: {REPLICAS}"] == Counter(
        {"injected": 3, "step skipped": 1, "larger": 1, "larger, found": 1, "up to twice": 1, "first": 1, "audits": 1}
    )
    assert counts[f"{OTHER}: {PAST}"] == Counter(
        {"injected": 3, "step skipped": 1, "smaller": 1, "larger": 1, "audits": 1}
    )
    assert counts[f"{SHARD}: {REDUCTION}"] == Counter({"injected": 1, "no bit changed": 1})
    assert counts[f"{STEPPED}: {UPDATE}"] == Counter({"injected": 1, "not looked at": 1})
    assert (result.clean_steps, result.false_warnings) == (40, 1)
    assert [trial.row for trial in result.missed] == [OTHER, CLEAN]
    assert not result.passed
    assert [size_class(size) for size in (1.0, 2.0, math.inf)] == ["smaller", "up to twice", "larger"]


def test_nothing_large_is_no_pass() -> None:
    """A campaign in which no fault was large enough to be seen for certain shows nothing."""
    small, large = _trial(SUM, {REDUCTION: 1.5}), _trial(SUM, {REDUCTION: 3.0}, (STEP, REDUCTION))
    assert not ToleranceResult([small]).passed
    assert ToleranceResult([small, large]).passed


def test_an_infinite_size_is_text() -> None:
    """In the result's JSON, which has no infinity."""
    trial = _trial(SUM, {REDUCTION: math.inf}, (STEP, REDUCTION))
    (found,) = json.loads(json.dumps(plain(ToleranceResult([trial])), allow_nan=False))["trials"]
    assert found["sizes"] == {REDUCTION: "inf"}


@pytest.mark.parametrize("factor", [math.e**6, math.inf])
def test_a_feature_moves_by_its_logarithm(factor: float) -> None:
    """Of three replicas one whose norm grows e^6-fold moves 6 from the median, which stays; in thresholds."""
    scales = (torch.tensor([[0.5, 1.0]]), torch.tensor([[0.25, 0.25]]))
    clean = Seen({REPLICAS: 4.0, PAST: 8.0}, torch.ones(1), {}, torch.ones(3, 1, 2), scales)
    features = torch.ones(3, 1, 2)
    features[1, 0, 0] = factor
    assert feature_sizes(clean, replace(clean, features=features)) == pytest.approx(
        {REPLICAS: math.log(factor) / 0.5 / 4.0, PAST: 0.0}, rel=1e-6
    )
    features[:] = factor
    moved = feature_sizes(clean, replace(clean, features=features))
    assert math.isinf(factor) or moved[REPLICAS] == 0.0
    assert moved[PAST] == pytest.approx(math.log(factor) / 0.25 / 8.0, rel=1e-6)
