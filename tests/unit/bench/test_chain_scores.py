"""What do drills of the chain draw, and what do they call right? Against drills that a person can judge."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from megasdc.config import FaultSpec
from megasdc.config.problems.fault_specs import spec_problems
from tools.bench.detection.live_chain import (
    ACCUSED,
    ALARM,
    BROKEN,
    CLEAN,
    HARMLESS,
    KINDS,
    MISSED,
    NAMED,
    NO_BIT,
    OWNED,
    RIGHT,
    TOLD,
    UNNAMED,
    WHOLE,
    WRONG_END,
    Cell,
    ChainDrill,
    ChainResult,
)
from tools.bench.detection.options import CHAIN_KINDS

DRILL = ChainDrill(0, (1, 1, 2), "fp32", ("rest",), "once", (), (1,), ("state",), (1,), (0, 0), ())
OTHER = ("losses differ in 1 steps, the first is 7",)


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, NAMED),
        ({"codes": (73, 73)}, NAMED),
        ({"named": ()}, UNNAMED),
        ({"named": (0,)}, ACCUSED),
        ({"named": (0, 1)}, ACCUSED),
        ({"differs": OTHER}, WRONG_END),
        ({"found": (), "named": ()}, HARMLESS),
        ({"found": (), "named": (), "differs": OTHER}, MISSED),
        ({"found": (), "named": (), "differs": OTHER, "told": True}, TOLD),
        ({"found": (), "named": (), "changed": ()}, NO_BIT),
        ({"changed": ()}, ACCUSED),
        ({"codes": (75, 0)}, BROKEN),
        ({"codes": ()}, BROKEN),
        ({"kinds": (CLEAN,), "found": (), "named": ()}, RIGHT),
        ({"kinds": (CLEAN,), "named": ()}, ALARM),
        ({"kinds": (CLEAN,), "found": (), "named": (), "codes": (0, 73)}, ALARM),
    ],
)
def test_what_came_of_a_drill(changes: dict[str, object], outcome: str) -> None:
    """A repair that repairs half, a healthy rank that is named, and an end of another kind are failures."""
    drill = replace(DRILL, **changes)
    assert drill.outcome == outcome
    assert TypeAdapter(ChainDrill).validate_python(vars(drill)) == drill
    assert ChainResult([DRILL, drill]).passed is (outcome in (NAMED, UNNAMED, HARMLESS, TOLD, NO_BIT, RIGHT))


def test_kinds_are_those_of_the_command_and_can_be_injected() -> None:
    """Each draw is a valid spec of one rank, or of a parameter alike on all, and a seed draws the same again."""
    assert tuple(KINDS) == CHAIN_KINDS
    owned = [(0, "2.layer.mlp.linear_fc1", "weight.exp_avg", False), (1, "2.layer.mlp.linear_fc1", "bias.master", True)]
    whole = [(rank, "2.layer.mlp.linear_fc1", "weight", False) for rank in (0, 1)]
    for name, draw in KINDS.items():
        for seed in range(8):
            drawn = [draw(Cell((1, 1, 2), {OWNED: owned, WHOLE: whole}, random.Random(seed))) for _ in range(2)]
            assert drawn[0] == drawn[1]
            for spec in drawn[0]:
                assert list(spec_problems(FaultSpec.model_validate(spec))) == [], (name, spec)
                assert ("rank" in spec) == (name != "alike") and spec.get("elements", 1) == 1
