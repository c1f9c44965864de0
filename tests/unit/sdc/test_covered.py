"""Does the table of coverage say what a configuration checks, and no more?"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.config.load import parse_config
from megasdc.config.sections import MegasdcSection
from megasdc.sdc.coverage import Shape, coverage_notes, coverage_rows, render_coverage, table_head

ROOT = Path(__file__).parents[3]
SHAPE = Shape(replicas=3, tensor=1, micro_batches=4, covered=1, recomputes=True)
ON = {"always_on": {"enabled": True}}
COMPUTED = ["forward", "recompute", "backward", "weight_grad"]
LINKS = ["norm", "clipping", "settings", "state", "update", "copy", "parameter"]
STEP = ["place", "tokens", *COMPUTED, "reduced_grad", *LINKS]
CHAIN = ["tokens", "norm", "clipping", "state", "copy"]
BARE = {"enabled": True, "tokens": False, "chain": False}


def sections(**changes: Any) -> MegasdcSection:
    """Of a deterministic run."""
    base = {
        "data": {"path": "x"},
        "protect": "off",
        "training": {"steps": 9},
        "logging": {"run_dir": "r"},
        "determinism": {"enabled": True},
    }
    raw = {"pipeline": {"activation_checkpoint_interval": 1}, "megasdc": {**base, **changes}}
    return parse_config(raw).megasdc


def exact(shape: Shape = SHAPE, **changes: Any) -> dict[str, str]:
    """How often each phase is compared bit by bit."""
    return {row.phase: row.exact for row in coverage_rows(sections(**changes), shape)}


def test_by_default_nothing_is_compared() -> None:
    """The gradient norm alone is looked at, in the phases that it shows."""
    rows = coverage_rows(sections(), SHAPE)
    assert [row.phase for row in rows] == STEP
    assert {row.exact for row in rows} == {"never"}
    assert {row.phase for row in rows if "NaN" in row.every_step} == {"weight_grad", "reduced_grad"}
    assert len(coverage_notes(rows)) == 1 and all(phase in coverage_notes(rows)[0] for phase in STEP)
    assert [row.phase for row in coverage_rows(sections(), Shape(3, 1, 4, 1, False))] == [
        one for one in STEP if one != "recompute"
    ]


@pytest.mark.parametrize(
    ("changes", "shape", "always", "sometimes"),
    [
        ({"audit": {"enabled": True}}, SHAPE, [], [*COMPUTED, "parameter"]),
        ({"audit": {"enabled": True}}, Shape(1, 1, 4, 1, True), [], []),
        ({"audit": {"enabled": True, "permuted": True}}, Shape(1, 1, 4, 1, True), [], COMPUTED),
        (
            {"sdc": {"always_on": {**BARE, "slice_elements": 9}}},
            Shape(1, 1, 4, 4, False),
            [],
            ["reduced_grad", "clipping", "state", "update"],
        ),
        ({"sdc": ON}, SHAPE, ["settings", "parameter"], [*COMPUTED[:2], *CHAIN]),
        (
            {"sdc": ON},
            Shape(3, 1, 4, 4, True),
            ["settings", "parameter", *COMPUTED[:2], "tokens", "state", "copy"],
            ["norm", "clipping"],
        ),
        ({"sdc": ON}, Shape(3, 1, 4, None, True), ["settings", "parameter"], [*COMPUTED[:2], *CHAIN]),
        ({"sdc": ON}, Shape(3, 1, 4, 1, False), ["settings", "parameter"], CHAIN),
        ({"sdc": ON}, Shape(1, 1, 4, 1, False), [], ["tokens", "state", "copy"]),
        ({"sdc": ON}, Shape(1, 1, 4, 1, False, pipeline=2), [], CHAIN),
        ({"sdc": ON}, Shape(1, 2, 4, 1, False), [], ["parameter", *CHAIN]),
        ({"sdc": {"always_on": {**BARE, "parameters": False, "recompute": False}}}, SHAPE, ["settings"], []),
        ({"sdc": {"always_on": {**BARE, "recompute": False}}}, SHAPE, ["settings", "parameter"], []),
        ({"sdc": {"golden": "g"}}, SHAPE, [], COMPUTED),
        ({"sdc": {"golden": "g", "golden_at_start": False, "golden_interval": 9}}, SHAPE, [], COMPUTED),
    ],
)
def test_each_check_covers_its_phases(
    changes: dict[str, Any], shape: Shape, always: list[str], sometimes: list[str]
) -> None:
    """What looks at NaN alone does not count as seeing a fault."""
    found = exact(shape, **changes)
    placed = ["place"] if "always_on" in changes.get("sdc", {}) else []  # on every rank, with one replica too
    assert {phase for phase, how in found.items() if how == "always"} == {*always, *placed}
    assert {phase for phase, how in found.items() if how == "sometimes"} == set(sometimes)


def test_a_check_that_is_no_longer_exact_is_not_said_to_be() -> None:
    """The row tells since when, and the phase counts as never compared bit by bit."""
    asked = {"sdc": {"always_on": {**ON["always_on"], "slice_elements": 9}}}
    shape = replace(SHAPE, within={"update": "within rounding since step 5"})
    assert exact(**asked)["update"] == "sometimes" and exact(shape, **asked)["update"] == "never"
    (row,) = (one for one in coverage_rows(sections(**asked), shape) if one.phase == "update")
    assert row.every_step == "a slice updated again, within rounding since step 5"


def test_what_cannot_be_compared_at_a_start_is_not_said_to_be() -> None:
    """A golden trace that does not fit, and audits of replicas on other hardware: all of them, or some positions."""
    asked = sections(audit={"enabled": True}, sdc={"golden": "g"})
    for within, audit, exact_now in (
        ({"golden trace": "-", "audit": "-"}, "-", "never"),
        ({"golden trace": "-", "audit": "at 1 of 4 positions"}, "replicas at 1 of 4 positions, 1 of 4", "sometimes"),
        ({}, "replicas, 1 of 4", "sometimes"),
    ):
        shape = replace(SHAPE, tensor=4, within=within)
        rows = {row.phase: row for row in coverage_rows(asked, shape)}
        assert all(rows[phase].golden == ("-" if within else "its own workload") for phase in COMPUTED)
        assert {(rows[phase].audit, rows[phase].exact) for phase in COMPUTED} == {(audit, exact_now)}
        assert rows["parameter"].audit == "replicas", "bits of parameters depend on no hardware"
        assert ("golden trace: does not fit" in render_coverage(asked, shape)[0]) == bool(within)


def test_norms_that_replicas_add_in_another_order_are_not_said_to_be_compared() -> None:
    """On GPUs with more than two ranks of the model: what is left is within rounding, and the phases count so."""
    shape = Shape(replicas=2, tensor=4, micro_batches=4, covered=4, recomputes=True)
    for equal, how in ((True, "sometimes"), (False, "never")):
        rows = {row.phase: row for row in coverage_rows(sections(sdc=ON), replace(shape, equal_norms=equal))}
        assert ("norms of all ranks" in rows["norm"].every_step) is equal and rows["norm"].exact == how
        assert ("factors of all ranks" in rows["clipping"].every_step) is equal and rows["clipping"].exact == how
        assert rows["state"].exact == "always"


def test_what_escapes_between_two_looks_is_told() -> None:
    """Rows whose steps do not all look; a bound that changes gradients in between leaves no slice to compare."""
    for covered, said in ((1, True), (4, False)):
        rows = coverage_rows(sections(sdc=ON), replace(SHAPE, covered=covered))
        notes = [one for one in coverage_notes(rows) if one.startswith("A change that happens once")]
        assert [one.endswith(": tokens, state, copy.") for one in notes] == [True] * said
        assert {row.phase for row in rows if "blocks" in row.every_step} == {"norm", "state", "copy"}
    hooks = {"optimizer_hooks": [{"hook": "absolute", "theta": 0.1, "where": "after_norm"}]}
    asked = {"sdc": {"always_on": {**ON["always_on"], "slice_elements": 9}}}
    for more, sliced in (({}, True), (hooks, False)):
        (row,) = (one for one in coverage_rows(sections(**asked, **more), SHAPE) if one.phase == "clipping")
        assert ("a slice clipped again" in row.every_step) is sliced


def test_nobody_is_said_to_look_who_does_not() -> None:
    """Gradients that lie on the host are not added again."""
    for offloads in (False, True):
        rows = coverage_rows(sections(sdc=ON), replace(SHAPE, offloads=offloads))
        (norm,) = [row.every_step for row in rows if row.phase == "norm"]
        assert ("blocks added again" in norm) != offloads and norm.startswith("norms of all ranks")


def test_headings_say_when() -> None:
    """Intervals are those of the configuration; what is off is said to be off."""
    asked = sections(audit={"enabled": True, "interval": 7}, sdc={"golden": "g", "golden_interval": 9})
    assert table_head(asked, 2)[2:4] == ("audit, every 7 steps", "golden trace, at each start and every 9 steps")
    assert table_head(sections(), 2)[2:4] == ("audit: off", "golden trace: off")
    assert table_head(asked, 1)[2] == "audit: one replica"


def test_each_row_says_how_long_a_fault_stays_unseen() -> None:
    """Of each check of the row: most and mean, in steps and checkpoints; as bounds where the budget decides."""
    asked = sections(
        sdc={"always_on": {**ON["always_on"], "slice_elements": 9, "rows": True}, "golden": "g", "golden_interval": 8},
        audit={"enabled": True, "interval": 10},
        checkpoint={"interval": 4},
    )
    shape = replace(SHAPE, slices=6, products=2)
    shown = {row.phase: row.cells[4:] for row in coverage_rows(asked, shape)}
    assert shown["place"] == ("1 / 1", "0 / 0")
    assert shown["parameter"] == ("1 / 1; audit 10 / 5.5", "0 / 0; audit 2 / 1")
    assert shown["tokens"] == ("4 / 2.5", "1 / 0.375")
    assert shown["state"] == ("4 / 2.5; 6 / 3.5", "1 / 0.375; 2 / 0.625")
    assert shown["weight_grad"][0] == "8 / 4.5; 1 / 1; audit 10 / 5.5; golden trace 8 / 4.5"
    rows = {row.phase: row for row in coverage_rows(asked, replace(shape, covered=None))}
    assert rows["tokens"].cells[4:] == ("<= 200 / 100.5", "<= 50 / 25.25")
    assert rows["settings"].cells[4:] == ("1 / 1", "0 / 0")


@pytest.mark.parametrize(
    ("coverage", "shape", "shown", "seen"),
    [
        (
            "one",
            replace(SHAPE, sets=3, every=2),
            "1 of 3 sets of blocks",
            ("1 / 1; 2 / 1.5; 6 / 3.5", "0 / 0; 1 / 0.5"),
        ),
        ("auto", replace(SHAPE, sets=3, covered=None), "1 of 3 sets of blocks", ("; <= 150 / 75.5", "; <= 38 / 19")),
        ("auto", replace(SHAPE, covered=None), "a set of blocks", ("1 / 1; <= 50 / 25.5", "0 / 0; <= 13 / 6.5")),
        ("all", replace(SHAPE, sets=3, covered=4), "all blocks", ("1 / 1", "0 / 0")),
    ],
)
def test_the_norm_tells_when_its_blocks_are_added_again(
    coverage: str, shape: Shape, shown: str, seen: tuple[str, str]
) -> None:
    """In turn, as long as it takes; all in each step; with the state on the host none are added."""
    asked = sections(sdc={"always_on": {**ON["always_on"], "coverage": coverage}}, checkpoint={"interval": 4})
    (row,) = (one for one in coverage_rows(asked, shape) if one.phase == "norm")
    assert f"; {shown} added again by another rank" in row.every_step
    assert [cell.endswith(last) for cell, last in zip(row.cells[4:], seen, strict=True)] == [True, True], row.cells
    (row,) = (one for one in coverage_rows(asked, replace(shape, offloads=True)) if one.phase == "norm")
    assert row.every_step == "norms of all ranks"
    unknown = {row.phase: row for row in coverage_rows(asked, SHAPE)}
    assert [one.check for one in unknown["update"].latencies] == [] and unknown["update"].cells[4] == "-"


def test_the_guide_shows_what_the_command_prints() -> None:
    """The table in the guide is the output of the command named above it."""
    page = (ROOT / "docs" / "guides" / "detection.md").read_text(encoding="utf-8")
    ((command, shown),) = re.findall(r"<!-- coverage: megasdc (.*?) -->\n(.*?)<!-- end of coverage -->", page, re.S)
    arguments = command.replace("configs/", f"{ROOT}/configs/").split()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == shown, f"run: megasdc {command}"
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [row["phase"] for row in told["phases"]] == STEP and told["notes"][0] in shown
    assert len(render_coverage(sections(), SHAPE)) == 1 + len(STEP) + 1


def test_what_sums_of_rows_see_is_not_called_undetected() -> None:
    """With one replica nothing else looks at products, and no audit is made."""
    asked = sections(sdc={"always_on": {**BARE, "rows": True}}, audit={"enabled": True})
    rows = coverage_rows(asked, replace(SHAPE, replicas=1, products=3))
    never, summed = (
        next(one for one in coverage_notes(rows) if one.startswith(start)) for start in ("Never", "Checked")
    )
    assert summed.endswith(": forward, backward, weight_grad.") or "forward" not in summed
    assert not {"backward", "weight_grad"} & set(re.split(r"[ ,.]+", never))
    assert render_coverage(asked, replace(SHAPE, replicas=1))[0].split("  ")[0] == "phase"
