"""Is a fault between the reduced gradient and the parameters found and named, and is a healthy run left alone?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import (
    checked,
    events_of,
    metrics_of,
    pretrain_rank,
    saved_at_end,
    sizes_of,
    train_run,
    verdicts_of,
    write_run,
)

from megasdc.train.detection import blocks

pytestmark = pytest.mark.distributed

CHECKED = {**checked(coverage="all", finite=False), "deepspeed__gradient_clipping": 0.5}
BF16 = {"deepspeed__bf16": {"enabled": True}}
STEP = 3
"""In which a fault is injected."""


def _write(tmp_path: Path, data: Path, name: str, layout: tuple[int, int, int], **changes: Any) -> Path:
    return write_run(tmp_path, data, name, **{**CHECKED, **sizes_of(layout), **changes})


def _fault(rank: int, step: int, phase: str, slot: str, **more: Any) -> dict[str, Any]:
    """One element of what a rank has, by two per cent, once."""
    scaled = {"kind": "scale", "factor": 1.02, "once": True}
    return {"faults": [{"phase": phase, "slot": slot, "rank": rank, "steps": [step, step], **scaled, **more}]}


PART = _fault(1, STEP, "norm", "part")
ADDS_WRONGLY = {"faults": [*PART["faults"], *_fault(1, STEP, "norm", "blocks", elements=1_000_000)["faults"]]}
"""Its part of the norm and its sums of blocks alike, so that both agree."""
STATE = _fault(2, STEP - 1, "state_at_rest", "weight.exp_avg_sq", submodule="*.linear_fc1")
COPY = _fault(1, STEP - 1, "copy", "*", submodule="*.linear_fc2")
HUGE = {
    "faults": [{"phase": "collective", "kind": "scale", "factor": 1e20, "elements": 10**9, "steps": [STEP, STEP]}],
    "sdc": {"always_on": {**CHECKED["sdc"]["always_on"], "slice_elements": None}},
}
"""Gradients of all ranks alike are finite in one step, and their squares more than fp32 holds."""


@pytest.mark.parametrize(
    ("layout", "changes", "verdict"),
    [
        ((1, 1, 3), _fault(1, STEP, "norm", "total"), (STEP, "norm", 1, "inconclusive", "relative to the majority")),
        ((1, 1, 2), _fault(0, STEP, "norm", "total"), (STEP, "norm", 0, "inconclusive", "parts of the norm")),
        ((1, 1, 2), {**BF16, **PART}, (STEP, "norm", 1, "inconclusive", "parts of the norm")),
        ((1, 2, 1), PART, (STEP, "norm", 1, "inconclusive", "parts of the norm")),
        ((1, 1, 2), ADDS_WRONGLY, (STEP, "norm", 1, "inconclusive", "referee")),
        ((1, 2, 1), ADDS_WRONGLY, (STEP, "norm", 1, "inconclusive", "referee")),
        ((1, 1, 2), _fault(1, STEP, "norm", "factor"), (STEP, "clipping", 1, "inconclusive", "own norm")),
        ((2, 1, 2), {**BF16, **STATE}, (STEP, "state", 2, "inconclusive", "own digest")),
    ],
    ids=[
        "total_of_3",
        "total_of_2",
        "part_bf16",
        "part_pp2",
        "adds_wrongly",
        "adds_wrongly_pp2",
        "factor",
        "state_bf16_tp2",
    ],
)
def test_a_fault_whose_step_is_lost_is_named_before_a_save(
    tmp_path: Path, data: Path, layout: tuple[int, int, int], changes: dict[str, Any], verdict: tuple[Any, ...]
) -> None:
    """Of one rank, once; what is wrong then on all replicas alike too."""
    config = _write(tmp_path, data, "run", layout, **changes)
    results = train_run(config, math.prod(layout))
    assert len(events_of(tmp_path / "run", "fault", "injected")) == len(changes["faults"]), results
    assert verdicts_of(tmp_path / "run") == [(*verdict, "halt")], results
    assert {code for code, _ in results} == {73}, results
    assert f"step {STEP} is the last, and is not saved" in results[0][1]
    assert list((tmp_path / "run" / "reports").glob(f"incident_step_0000000{STEP}.html"))


def _in_small_blocks(config: str) -> tuple[int, str | None]:
    """Body of a rank whose part of a small model is many sets of blocks."""
    blocks.BLOCK = 1500
    return pretrain_rank(config, [])


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 1)], ids=["dp2", "pp2"])
def test_a_rank_that_adds_one_block_wrongly_is_named_in_that_step(
    tmp_path: Path, data: Path, layout: tuple[int, int, int]
) -> None:
    """Whichever of its sets the block is in, though it is off by less than the norm's rounding."""
    changed = {"factor": 1 + 1e-9, "pattern": "indices", "indices": [12]}
    config = _write(tmp_path, data, "run", layout, **_fault(1, STEP, "norm", "blocks", **changed))
    results = run_distributed(_in_small_blocks, 2, str(config), init=False)
    (injected,) = events_of(tmp_path / "run", "fault", "injected")
    assert injected["changed"] == 1, injected
    assert verdicts_of(tmp_path / "run") == [(STEP, "norm", 1, "inconclusive", "referee", "halt")], results
    assert {code for code, _ in results} == {73}, results


@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
def test_a_wrong_copy_that_all_have_gathered_is_put_right(tmp_path: Path, data: Path, changes: dict[str, Any]) -> None:
    """The owner alone can see it: its masters are gathered again, and the step is computed with them."""
    layout = (1, 1, 2)
    config = _write(tmp_path, data, "run", layout, **changes, **COPY)
    results = train_run(config, 2)
    verdict = (STEP, "copy", 1, "not_reproduced", "master shard", "repair")
    assert verdicts_of(tmp_path / "run") == [verdict], results
    assert {code for code, _ in results} == {0}, results
    assert {code for code, _ in train_run(_write(tmp_path, data, "clean", layout, **changes), 2)} == {0}
    assert saved_at_end(tmp_path / "clean") == saved_at_end(tmp_path / "run"), "what was wrong was put right"


def test_a_wrong_copy_is_its_owners_and_another_wrong_parameter_its_ranks(tmp_path: Path, data: Path) -> None:
    """Both in one step: a rank that has only what the owner gave it is not named; all are put right."""
    other = _fault(0, STEP - 1, "parameter", "weight", submodule="3.*.linear_proj")
    config = _write(tmp_path, data, "run", (1, 1, 3), faults=[*COPY["faults"], *other["faults"]])
    results = train_run(config, 3)
    assert len(events_of(tmp_path / "run", "fault", "injected")) == 2, results
    copy = (STEP, "copy", 1, "not_reproduced", "master shard", "repair")
    assert verdicts_of(tmp_path / "run") == [(STEP, "parameters", 0, *copy[3:]), copy], results
    assert {code for code, _ in results} == {0}, results
    assert {code for code, _ in train_run(_write(tmp_path, data, "clean", (1, 1, 3)), 3)} == {0}
    assert saved_at_end(tmp_path / "clean") == saved_at_end(tmp_path / "run")


def _in_fp16(config: str) -> tuple[int, str | None]:
    """Body of a rank that trains in fp16, which DeepSpeed does not say of a CPU, though PyTorch computes it."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    return pretrain_rank(config, [])


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((1, 1, 2), {}),
        ((2, 1, 2), {**BF16, "optimizer_hooks": [{"hook": "absolute", "theta": 1e-3}]}),
        ((1, 2, 1), {"deepspeed__fp16": {"enabled": True, "initial_scale_power": 40}}),
        ((1, 2, 1), HUGE),
        ((1, 1, 2), {**BF16, **HUGE}),
    ],
    ids=["fp32", "bf16_tp2_bounds", "fp16_pp2", "huge_pp2", "huge_bf16"],
)
def test_a_healthy_run_is_the_run_without_checks(
    tmp_path: Path, data: Path, layout: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    """Same bits and no verdict; with fp16 the first steps overflow, and the norm of huge gradients in fp32."""
    for name, more in {"plain": {"sdc": {}}, "checked": {}}.items():
        config = _write(tmp_path, data, name, layout, **{**changes, **more})
        world = math.prod(layout)
        if "deepspeed__fp16" in changes:
            results = run_distributed(_in_fp16, world, str(config), init=False)
        else:
            results = train_run(config, world)
        assert [code for code, _ in results if code] == [], results
        overflows = "faults" in changes or "deepspeed__fp16" in changes
        assert bool(events_of(tmp_path / name, "skip", "optimizer_step")) == overflows
    assert saved_at_end(tmp_path / "plain") == saved_at_end(tmp_path / "checked")
    assert metrics_of(tmp_path / "plain") == metrics_of(tmp_path / "checked")
    assert verdicts_of(tmp_path / "checked") == []
    assert events_of(tmp_path / "checked", "sdc", "finding") == []
