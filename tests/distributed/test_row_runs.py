"""Do sums of rows find wrong products between audits, name their rank, and leave healthy runs alone?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whole_runs import (
    MODELS,
    checked,
    events_of,
    state_of,
    train_run,
    verdicts_of,
    write_run,
)

from megasdc.sdc.incident import incident_from_json

pytestmark = pytest.mark.distributed

CHECKED = {**checked(coverage="one", parameters=False, finite=False, rows=True), "checkpoint__interval": 0}
WRONG: dict[str, Any] = {"kind": "scale", "factor": 1.5, "steps": [1, None], "same_elements": True}


def _write(tmp_path: Path, data: Path, name: str, **changes: Any) -> Path:
    return write_run(tmp_path, data, name, **{**CHECKED, **changes})


ALL: dict[str, Any] = {
    "sdc": {"always_on": {"enabled": True, "coverage": "all", "rows": True, "slice_elements": 700}},
    "audit": {"enabled": True, "interval": 2, "permuted": True},
    "parallel__tensor": 2,
    "deepspeed__pipeline": {"activation_checkpoint_interval": 1},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__pipeline": 2, "deepspeed__bf16": {"enabled": True}, "model": MODELS["llama"]},
        pytest.param({"parallel__pipeline": 2, "parallel__tensor": 2}, marks=pytest.mark.full),
        ALL,
    ],
    ids=["pp2_bf16_llama", "tp2_pp2", "everything_tp2_recompute"],
)
def test_a_healthy_run_is_the_run_without_checks(tmp_path: Path, data: Path, changes: dict[str, Any]) -> None:
    """Same bits at the end, with every check at once too, and no row is suspicious, whatever product is due."""
    changes = {**changes, "training__steps": 24, "checkpoint__interval": 24}
    off = {"sdc": {}, "audit": {"enabled": False}}
    ranks = changes.get("parallel__pipeline", 1) * changes.get("parallel__tensor", 1)
    for name, more in {"plain": off, "checked": {}}.items():
        results = train_run(_write(tmp_path, data, name, **{**changes, **more}), ranks)
        assert [code for code, _ in results if code] == [], results
    plain, checked = (state_of(tmp_path / name / "checkpoints" / "step_00000024") for name in ("plain", "checked"))
    assert plain == checked and verdicts_of(tmp_path / "checked") == []
    for name in ("row_within_rounding", "row_not_checked"):
        assert events_of(tmp_path / "checked", "sdc", name) == []


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        ((1, 1, 1), {"submodule": "2.*.linear_proj", "rank": 0}),
        ((1, 1, 2), {"submodule": "2.*.linear_qkv", "phase": "backward", "rank": 1}),
        ((2, 1, 1), {"submodule": "2.*.linear_qkv", "phase": "weight_grad", "rank": 1}),
        ((1, 2, 1), {"submodule": "*.linear_proj", "rank": 1}),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else value["submodule"],
)
def test_a_wrong_product_is_found_in_its_turn(
    tmp_path: Path, data: Path, layout: tuple[int, int, int], place: dict[str, Any]
) -> None:
    """With one replica or two, and no audit: rank, submodule and verdict are right, and the page has the element."""
    tensor, pipeline, replicas = layout
    config = _write(
        tmp_path,
        data,
        "run",
        parallel__tensor=tensor,
        parallel__pipeline=pipeline,
        faults=[{**WRONG, **place}],
        training__steps=20,
    )
    results = train_run(config, tensor * pipeline * replicas)
    assert {code for code, _ in results} == {73}, results
    ((step, tier, rank, verdict, basis, action),) = verdicts_of(tmp_path / "run")
    assert (tier, rank, verdict, basis, action) == ("rows", place["rank"], "persistent", "referee", "halt")
    (page,) = (tmp_path / "run" / "reports").glob(f"incident_step_{step:08d}.json")
    incident = incident_from_json(page.read_text(encoding="utf-8"))
    (opinion,) = incident.opinions
    assert str(opinion.address).count(place["submodule"].rpartition(".")[2]) == 1 and opinion.worst is not None


def test_what_was_wrong_once_is_repaired(tmp_path: Path, data: Path) -> None:
    """The step, whose turn that product is, is computed again; the run ends with the bits of one without faults."""
    options = {"training__steps": 4, "checkpoint__interval": 4}
    due = {"submodule": "2.*.linear_qkv", "steps": [2, 2], "micro_batches": [2]}
    once = [{**WRONG, **due, "rank": 0, "once": True}]
    for name, faults in {"clean": [], "harmed": once}.items():
        results = train_run(_write(tmp_path, data, name, faults=faults, **options), 1)
        assert [code for code, _ in results if code] == [], results
    ((_, tier, rank, verdict, _, action),) = verdicts_of(tmp_path / "harmed")
    assert (tier, rank, verdict, action) == ("rows", 0, "not_reproduced", "repair")
    states = [state_of(tmp_path / name / "checkpoints" / "step_00000004") for name in ("clean", "harmed")]
    assert states[0] == states[1]
