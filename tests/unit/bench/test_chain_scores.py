"""What do drills of the chain draw, and what do they call right? Against drills that a person can judge."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from megasdc.config.detection import AlwaysOnSection
from megasdc.config.faults import FaultSpec, fault_spec_problems
from megasdc.config.load import parse_config
from megasdc.events import EventLog
from megasdc.sdc.coverage import Shape, coverage_rows, render_coverage
from tools.bench.detection.live_chain import (
    ACCUSED,
    ALARM,
    ALWAYS,
    BROKEN,
    CLEAN,
    DRAWS,
    HARMLESS,
    KINDS,
    MISSED,
    NAMED,
    NO_BIT,
    ONCE,
    OWNED,
    RESULTS,
    RIGHT,
    ROWS,
    SOMETIMES,
    TOLD,
    UNNAMED,
    WHOLE,
    WRONG_END,
    Cell,
    ChainDrill,
    ChainResult,
    _found,
    _is_declared,
    _passed,
)
from tools.bench.detection.options import CHAIN_KINDS, PRESET_KINDS

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
        ({"differs": OTHER, "told": True}, WRONG_END),
        ({"differs": OTHER, "late": True}, WRONG_END),
        ({"differs": OTHER, "told": True, "late": True}, TOLD),
        ({"found": (), "named": ()}, HARMLESS),
        ({"found": (), "named": (), "differs": OTHER}, MISSED),
        ({"found": (), "named": (), "differs": OTHER, "told": True}, TOLD),
        ({"found": (), "named": (), "changed": ()}, NO_BIT),
        ({"changed": ()}, ACCUSED),
        ({"codes": (74, 74), "found": ("finite",), "named": ()}, UNNAMED),
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


def test_what_has_passed(tmp_path: Path) -> None:
    """Nothing that is found in its step, or is compared in the next; what comes again may, up to the save."""
    log = EventLog(tmp_path, 0)
    for step in (3, 5, 6):
        log.emit("fault", "injected", step=step, changed=1, spec=step)
    assert _passed(tmp_path, 9) == [3, 5, 6]
    log.emit("sdc", "verdict", step=6, tier="state", rank=0)
    assert _passed(tmp_path, 9) == [3, 5]
    log.emit("sdc", "verdict", step=6, tier="copies", rank=0)
    assert _passed(tmp_path, 9) == [3]
    log.emit("fault", "injected", step=8, changed=1, spec=8)
    log.emit("nonfinite", "first", step=3)
    assert _passed(tmp_path, 9) == [8] and _found(tmp_path) == (("copies", "finite", "state"), (0,))
    log.emit("resume", "checkpoint", step=7)
    assert _passed(tmp_path, 9) == []
    log.close()


def test_what_the_table_of_a_run_tells(tmp_path: Path) -> None:
    """A row that is not compared in every step excuses what does not come again; a lacking one excuses nothing."""
    sections = parse_config(
        {"megasdc": {"data": {"path": "x"}, "protect": "off", "training": {"steps": 1}, "logging": {"run_dir": "r"}}}
    ).megasdc
    checks = AlwaysOnSection(enabled=True, slice_elements=64)
    sections = sections.model_copy(update={"sdc": sections.sdc.model_copy(update={"always_on": checks})})
    events, shape = EventLog(tmp_path, 0), Shape(3, 1, 2, 2, False)
    events.emit("start", "coverage", step=0, table=render_coverage(sections, shape))
    events.close()
    assert [_is_declared(tmp_path, ROWS["update"], one) for one in (ONCE, SOMETIMES, ALWAYS)] == [True, True, False]
    assert not _is_declared(tmp_path, ROWS["parameter"], ONCE), "compared in every step"
    assert not _is_declared(tmp_path, "no such row", ONCE)
    assert set(ROWS) == set(DRAWS) and set(ROWS.values()) <= {row.phase for row in coverage_rows(sections, shape)}


def test_kinds_are_those_of_the_command_and_can_be_injected() -> None:
    """Each draw is a valid spec of one rank, or of a parameter alike on all, and a seed draws the same again."""
    assert tuple(KINDS) == CHAIN_KINDS and tuple(DRAWS) == PRESET_KINDS
    owned = [(0, "2.layer.mlp.linear_fc1", "weight.exp_avg", False), (1, "2.layer.mlp.linear_fc1", "bias.master", True)]
    whole = [(rank, "2.layer.mlp.linear_fc1", "weight", False) for rank in (0, 1)]
    addresses = {OWNED: owned, WHOLE: whole, **dict.fromkeys(RESULTS, whole)}
    for name, draw in DRAWS.items():
        for seed in range(8):
            drawn = [draw(Cell((1, 1, 2), addresses, random.Random(seed))) for _ in range(2)]
            assert drawn[0] == drawn[1]
            for spec in drawn[0]:
                assert list(fault_spec_problems(FaultSpec.model_validate(spec))) == [], (name, spec)
                assert ("rank" in spec) == (name != "alike")
                assert spec.get("elements", 1) == 1 or spec["slot"] == "blocks"
