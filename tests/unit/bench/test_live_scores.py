"""What does the live campaign draw, and what does it call right? Against cases that a person can judge."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megasdc.common.addresses import BACKWARD, FORWARD, MICRO_BATCH_PHASES, PARAMETER, REDUCED_GRAD, UPDATE, Address
from megasdc.config.load import parse_config
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import MAJORITY as RELATIVE
from tools.bench.detection.golden_rank import KINDS, campaign_config
from tools.bench.detection.live_cases import (
    ALONE,
    CLEAN,
    EVERYTHING,
    MAJORITY,
    MAJORITY_GOLDEN,
    ONCE,
    PAIR,
    PAIR_GOLDEN,
    RECOMPUTED,
    SHARD,
    TWO_WRONG,
    Cases,
    deal_rows,
    weights_of_rows,
)
from tools.bench.detection.live_rank import detecting, differs_from_repeat, live_config
from tools.bench.detection.live_today import compare_with_today
from tools.bench.detection.live_trial import LiveTrial, Named
from tools.bench.detection.options import LiveOptions

PLACE = "step 4, micro-batch 0, forward of 2.layer.mlp (output)"


def _trial(row: str, *named: tuple[int | None, str], **changes: Any) -> LiveTrial:
    options: dict[str, Any] = {
        "layout": "1x1x3",
        "precision": "fp32",
        "recompute": False,
        "dropout": False,
        "uneven": False,
        "row": row,
        "persistence": ONCE,
        "kinds": ("sign",),
        "ranks": (1,),
        "addresses": (PLACE,),
        "harmed": (1,),
        "shows": (PLACE,),
        "reproduced": False,
        "golden_harmed": False,
        "detected": bool(named),
        "named": tuple(Named("audit", rank, "persistent", RELATIVE, address) for rank, address in named),
        "loss": 5.0,
        "grad_norm": 1.0,
        "replayed": False,
    }
    return LiveTrial(**{**options, **changes})


NOBODY = (None, PLACE)
RIGHT, ELSEWHERE, HEALTHY = (1, PLACE), (1, "step 4, micro-batch 0, forward of 3.layer.mlp (output)"), (0, PLACE)


@pytest.mark.parametrize(
    ("trial", "met"),
    [
        (_trial(ALONE, RIGHT), True),
        (_trial(ALONE), False),
        (_trial(ALONE, ELSEWHERE), False),
        (_trial(ALONE, RIGHT, HEALTHY), False),
        (_trial(ALONE, NOBODY, reproduced=True), False),
        (_trial(ALONE, harmed=(), shows=()), True),
        (_trial(ALONE, RIGHT, harmed=(), shows=()), False),
        (_trial(PAIR, NOBODY), False),
        (_trial(PAIR, NOBODY, reproduced=True), True),
        (_trial(PAIR, reproduced=True), False),
        (_trial(PAIR_GOLDEN, NOBODY, reproduced=True, golden_harmed=True), False),
        (_trial(PAIR_GOLDEN, NOBODY, reproduced=True), True),
        (_trial(TWO_WRONG, RIGHT, NOBODY, harmed=(1, 2), reproduced=True), True),
        (_trial(TWO_WRONG, NOBODY, harmed=(1, 2), reproduced=True), False),
        (_trial(MAJORITY, HEALTHY, harmed=(1, 2)), True),
        (_trial(MAJORITY_GOLDEN, HEALTHY, harmed=(1, 2)), False),
        (_trial(SHARD, shows=()), True),
        (_trial(SHARD, HEALTHY, shows=()), False),
        (_trial(CLEAN, ranks=(), harmed=(), shows=()), True),
        (_trial(CLEAN, HEALTHY, ranks=(), harmed=(), shows=()), False),
    ],
)
def test_what_is_right(trial: LiveTrial, met: bool) -> None:
    """A fault has to be named where that can be proved, and a healthy rank never but by a wrong majority."""
    assert trial.met is met


def test_rows_are_dealt_by_weight() -> None:
    """Every row comes as often as its weight says, and the same seed deals the same."""
    weights = weights_of_rows(3, recompute=True)
    rows = deal_rows(weights, 10 * sum(weights.values()), random.Random(3))
    assert Counter(rows) == {row: 10 * weight for row, weight in weights.items()}
    assert rows == deal_rows(weights, 10 * sum(weights.values()), random.Random(3))
    assert len(deal_rows(weights, 17, random.Random(3))) == 17


def _cases(seed: int) -> Cases:
    names = [f"{layer}.layer" for layer in range(4)]
    places = [(phase, 0) for phase in MICRO_BATCH_PHASES] + [
        (phase, None) for phase in (REDUCED_GRAD, UPDATE, PARAMETER)
    ]
    addresses = [Address(1, number, phase, name, "weight") for phase, number in places for name in names]
    return Cases([addresses] * 3, ParallelDims(1, 1, 3), KINDS, "bf16", random.Random(seed), 2, [names] * 3)


def test_cases_are_what_their_rows_say() -> None:
    """All draws of a seed repeat; two wrong are at different places; a wrong majority is all replicas but one."""
    cases, again = _cases(1), _cases(1)
    for row in [*weights_of_rows(3, recompute=True)] * 20:
        case = cases.case(row)
        assert case == again.case(row)
        addresses = [target.address for target in case.targets]
        if row == TWO_WRONG:
            assert len({(one.phase, one.fqn) for one in addresses}) == len(set(case.ranks)) == 2
        if row in (MAJORITY, MAJORITY_GOLDEN):
            assert len(set(case.ranks)) == 2 and len(set(addresses)) == 1
            assert len({(*(one.spec.indices or ()), *map(str, one.spec.bits)) for one in case.targets}) == 1
        if row == RECOMPUTED:
            assert {one.phase for one in addresses} == {FORWARD} and not case.targets[0].spec.same_elements
        if row == SHARD:  # a shard that is not finite on one rank makes BF16_Optimizer hang
            assert case.targets[0].kind not in ("NaN", "Inf", "exponent", "one bit", "stuck at 1")


def test_self_replay_compares_with_the_first_repeat() -> None:
    """Gradients that differ in the first repeat are seen; equal ones, and none repeated, are not."""
    places = [Address(4, 0, BACKWARD, name, "weight") for name in ("a", "b")]
    assert not differs_from_repeat(Trace())
    assert not differs_from_repeat(Trace(places, [1, 2]))
    assert not differs_from_repeat(Trace(places * 3, [1, 2, 1, 2, 1, 9]))
    assert differs_from_repeat(Trace(places * 2, [1, 2, 1, 9]))


def test_rules_of_today() -> None:
    """NaN, ten times the largest clean value, and six robust deviations from the median raise their rule alone."""
    norms = (0.9, 1.0, 1.0, 1.1)
    clean = [_trial(CLEAN, ranks=(), harmed=(), shows=(), grad_norm=norm) for norm in norms]
    fault = _trial(ALONE, RIGHT)
    faults = [
        replace(fault, loss=math.nan),
        replace(fault, grad_norm=math.inf),
        replace(fault, loss=50.0),
        replace(fault, loss=49.0),
        replace(fault, grad_norm=11.0),
        replace(fault, grad_norm=1.5),
        replace(fault, replayed=True),
    ]
    found = {rule: counts[ONCE] for rule, counts in compare_with_today([*clean, *faults]).items()}
    assert found == {
        "faults or steps": 7,
        "NaN check": 2,
        "loss spike, Megatron": 1,
        "large gradients, Megatron": 1,
        "gradient norm outlier": 2,
        "self-replay, torchtitan": 1,
        "ours": 7,
    }


@pytest.mark.parametrize("fuse", [False, True])
def test_fused_modules_are_in_every_model_of_a_campaign(fuse: bool) -> None:
    """The option reaches the configuration of each layout and type, with what detects too."""
    for cell in LiveOptions(fuse=fuse).cells:
        raw = live_config({**cell, "folder": "unused"})
        assert detecting(raw, EVERYTHING, Path("unused")).megasdc.model.fuse is fuse
        assert parse_config(campaign_config({**cell, "folder": "unused"})).megasdc.model.fuse is fuse
