"""Do the toleranced checks warn of what they are for in whole runs, stay silent otherwise, and accuse nobody?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

pytestmark = pytest.mark.distributed

CHECKED = {
    "determinism": {"enabled": True},
    "sdc": {"always_on": {"enabled": True, "toleranced": True, "finite": False, "parameters": False}},
    "checkpoint__interval": 0,
    "training": {"steps": 30},
}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _run(tmp_path: Path, data: Path, ranks: int, name: str = "run", **changes: Any) -> Path:
    config = write_config(tmp_path / f"{name}.json", data, tmp_path / name, **{**CHECKED, **changes})
    results = train_run(config, ranks)
    assert [code for code, _ in results if code] == [], results
    return tmp_path / name


def _warnings(folder: Path) -> list[tuple[int, str]]:
    return [(one["step"], one["check"]) for one in events_of(folder, "sdc", "warning")]


LAYOUTS = {
    "dp2": (2, {}),
    "tp2dp2": (4, {"parallel__tensor": 2}),
    "pp2dp2": (4, {"parallel__pipeline": 2}),
    "dp2 bf16": (2, {"deepspeed__bf16": {"enabled": True}}),
    "dp2 masked": (2, {"data__mask_end_of_document": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clean_run_raises_no_warning(tmp_path: Path, data: Path, layout: str) -> None:
    """Thirty clean steps print every threshold and warn of nothing."""
    ranks, changes = LAYOUTS[layout]
    folder = _run(tmp_path, data, ranks, **changes)
    assert {one["check"] for one in events_of(folder, "sdc", "threshold")} == {
        "reduction",
        "update",
        "replicas",
        "past",
    }
    assert events_of(folder, "sdc", "warning") == []


@pytest.mark.parametrize("phase", ["collective", "reduced_grad"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_harmed_reduction_breaks_the_linear_check(tmp_path: Path, data: Path, precision: str, phase: str) -> None:
    """What goes into the sum or comes out of it wrong is warned of, in its step alone."""
    fault = {"submodule": "*.linear_fc1", "slot": "weight", "phase": phase, "kind": "scale", "factor": -1e3}
    fault |= {"elements": 64}  # a single one may have next to no gradient
    # Alone: with BF16_Optimizer the exact comparison of the norm's parts sees the same, and ends the run.
    options: dict[str, Any] = {"sdc__always_on__chain": False}
    options |= {"deepspeed__bf16": {"enabled": True}} if precision == "bf16" else {}
    folder = _run(tmp_path, data, 2, **options, faults=[{**fault, "rank": 1, "steps": [24, 24], "once": True}])
    assert (24, "reduction") in _warnings(folder)
    assert {step for step, check in _warnings(folder) if check in ("reduction", "update")} == {24}
    assert events_of(folder, "sdc", "verdict") == []


def test_a_harmed_update_differs_from_its_formula(tmp_path: Path, data: Path) -> None:
    """A moment that is not what Adam's formula makes of its inputs is warned of, and seen on the right rank."""
    fault = {"submodule": "*.linear_fc2", "slot": "weight.exp_avg", "phase": "update", "kind": "scale", "factor": 1.001}
    folder = _run(tmp_path, data, 2, faults=[{**fault, "rank": 1, "steps": [24, 24]}])
    (found,) = [one for one in events_of(folder, "sdc", "warning") if one["check"] == "update"]
    assert (found["step"], found["seen_on"], found["place"]) == (24, 1, "exp_avg after the update")
    assert found["value"] > found["threshold"]


def test_an_unusual_gradient_calls_an_audit(tmp_path: Path, data: Path) -> None:
    """A gradient unlike those of the other replicas is warned of with its submodule and replica; the audit follows."""
    fault = {"submodule": "2.layer.mlp.linear_fc1", "slot": "weight", "phase": "weight_grad", "kind": "scale"}
    fault |= {"factor": 1e18, "elements": 64, "rank": 2, "steps": [24, 24]}
    folder = _run(
        tmp_path,
        data,
        3,
        deepspeed__train_batch_size=6,
        audit={"enabled": True, "interval": 1000},
        faults=[fault],
    )
    (found,) = [one for one in events_of(folder, "sdc", "warning") if one["check"] == "replicas"]
    assert found["step"] == 24
    assert found["place"].endswith("of the gradient of 2.layer.mlp.linear_fc1, replica 2")
    assert (found["seen_on"], found["audit_requested"]) == (2, True)
    assert 26 in [one["step"] for one in events_of(folder, "audit", "agreed")]
    assert events_of(folder, "sdc", "verdict") == []


@pytest.mark.parametrize("checks", ["finite", "toleranced"])
def test_checks_leave_every_bit(tmp_path: Path, data: Path, checks: str) -> None:
    """With the checks on, a run ends with the bits of one without; two tensor ranks, two replicas, bf16, dropout."""
    options = {
        "parallel__tensor": 2,
        "deepspeed__bf16": {"enabled": True},
        "model__hidden_dropout": 0.1,
        "checkpoint__interval": 3,
        "training": {"steps": 6},
    }
    off = _run(tmp_path, data, 4, "off", **options, sdc={})
    on = _run(tmp_path, data, 4, "on", **options, sdc={"always_on": {"enabled": True, "coverage": "all", checks: True}})
    for read in (metrics_of, lambda folder: state_of_model(folder / "checkpoints" / "step_00000006")):
        assert read(off) == read(on)
    assert events_of(on, "nonfinite", "first") == []


def state_of_model(checkpoint: Path) -> dict[str, str]:
    """What decides how the model goes on; the states of hooks, of which one run has more, left out."""
    return {name: value for name, value in state_of(checkpoint).items() if "hooks" not in name}


def test_what_was_measured_goes_on_over_a_resume(tmp_path: Path, data: Path) -> None:
    """Values that a check judges after a resume are judged by thresholds measured before it."""
    fault = {"submodule": "*.linear_fc2", "slot": "weight.exp_avg", "phase": "update", "kind": "scale", "factor": 1.001}
    changes = {"faults": [{**fault, "rank": 1, "steps": [16, 16]}], "checkpoint__interval": 15}
    config = write_config(tmp_path / "run.json", data, tmp_path / "run", **{**CHECKED, **changes})
    for stop in ("15", "18"):
        results = train_run(config, 2, f"megasdc.training.stop_step={stop}")
        assert [code for code, _ in results if code] == [], results
    assert (16, "update") in _warnings(tmp_path / "run")
