"""Is the first place of NaN or Inf named in whole runs, and every skipped step explained?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import events_of, failure_of, metrics_of, prepare_text, state_of, train_run, write_config

pytestmark = pytest.mark.distributed

CHECKED = {
    "determinism": {"enabled": True},
    "sdc": {"always_on": {"enabled": True, "granularity": "gemm", "coverage": "all"}},
    "checkpoint__interval": 0,
}
NOTHING_COVERED = {"enabled": True, "granularity": "layer", "coverage": "one"}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _run(tmp_path: Path, data: Path, ranks: int, **changes: Any) -> list[dict[str, Any]]:
    """Train with the checks; the events of first places."""
    config = write_config(tmp_path / "run.json", data, tmp_path / "run", **{**CHECKED, **changes})
    results = train_run(config, ranks)
    assert [code for code, _ in results if code] == [], results
    return events_of(tmp_path / "run", "nonfinite", "first")


def _place(event: dict[str, Any]) -> tuple[Any, ...]:
    names = ("step", "rank", "phase", "fqn", "slot", "value", "inputs_finite", "parameters_finite", "reproduced")
    return tuple(event[name] for name in names)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "rank", "fqn"),
    [(2, 1, 1, "2.layer.mlp.linear_fc1"), (1, 2, 1, "3.layer.self_attention.linear_proj")],
    ids=["tp2", "pp2"],
)
@pytest.mark.parametrize("once", [True, False], ids=["once", "each time"])
def test_a_nan_of_one_rank_is_named(
    tmp_path: Path, data: Path, tensor: int, pipeline: int, rank: int, fqn: str, once: bool
) -> None:
    """The rank, submodule and direction where a NaN was put are named, also where it spread to other ranks."""
    fault = {"submodule": fqn, "kind": "value", "value": "nan", "rank": rank, "steps": [3, 3], "micro_batches": [1]}
    layout = {"parallel__tensor": tensor, "parallel__pipeline": pipeline}
    found = _run(tmp_path, data, 2, **layout, faults=[{**fault, "once": once}])
    assert [_place(one) for one in found] == [(3, rank, "forward", fqn, "output", "NaN", True, True, not once)]
    skips = events_of(tmp_path / "run", "skip", "optimizer_step")
    assert [(one["step"], one["rank"]) for one in skips] == [(3, 0), (3, 1)]
    assert all(f"forward of {fqn} (output) on rank {rank}" in one["place"] for one in skips), skips


def test_an_infinite_gradient_is_told_apart(tmp_path: Path, data: Path) -> None:
    """Inf in a backward pass is named as Inf, with its direction, though later results are NaN."""
    fault = {"submodule": "2.layer.mlp.linear_fc2", "phase": "backward", "kind": "value", "value": "inf", "rank": 1}
    found = _run(tmp_path, data, 2, parallel__pipeline=2, faults=[{**fault, "rank": 0, "steps": [2, 2]}])
    assert [_place(one) for one in found] == [
        (2, 0, "backward", "2.layer.mlp.linear_fc2", "input", "Inf", True, True, True)
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_the_checks_did_not_cover_is_found_in_a_repeat(tmp_path: Path, data: Path, precision: str) -> None:
    """A skipped step in whose checked results nothing showed is computed again, and the place named."""
    fault = {"submodule": "*.linear_qkv", "slot": "weight", "phase": "weight_grad", "kind": "value", "value": "nan"}
    options: dict[str, Any] = {"deepspeed__bf16": {"enabled": True}} if precision == "bf16" else {}
    found = _run(
        tmp_path,
        data,
        2,
        sdc={"always_on": NOTHING_COVERED},
        faults=[{**fault, "rank": 1, "steps": [3, 3], "micro_batches": [0]}],
        **options,
    )
    assert [_place(one)[:-2] for one in found] == [
        (3, 1, "weight_grad", "3.layer.self_attention.linear_qkv", "weight", "NaN", True)
    ]
    assert found[0]["reproduced"] is True
    assert found[0]["inputs_read"] is True


def test_what_is_not_reproduced_is_said_to_be_so(tmp_path: Path, data: Path) -> None:
    """A NaN that was not covered and does not come again leaves a skipped step that is explained as not reproduced."""
    fault = {"submodule": "2.layer.mlp.linear_fc1", "slot": "weight", "phase": "weight_grad", "kind": "value"}
    fault |= {"value": "nan", "rank": 0, "steps": [3, 3], "micro_batches": [0], "once": True}
    found = _run(tmp_path, data, 1, sdc={"always_on": NOTHING_COVERED}, faults=[fault])
    assert [(one["rank"], one["reproduced"]) for one in found] == [(None, False)]
    (skip,) = events_of(tmp_path / "run", "skip", "optimizer_step")
    assert skip["place"].startswith("not reproduced")


def test_a_wrong_parameter_is_told_from_a_wrong_computation(tmp_path: Path, data: Path) -> None:
    """A NaN in a parameter is named where it first entered a result, with its inputs finite and parameters not."""
    fault = {"submodule": "3.layer.mlp.linear_fc1", "slot": "weight.master", "phase": "update", "kind": "value"}
    fault |= {"value": "nan", "rank": 0, "steps": [2, 2]}
    config = write_config(
        tmp_path / "run.json", data, tmp_path / "run", **CHECKED, faults=[fault], training__max_skipped_steps=2
    )
    ((code, message),) = train_run(config, 1)
    assert code == 74
    failed = failure_of(tmp_path / "run")
    assert (failed.exit_code, failed.rank, failed.incident, failed.verified_checkpoint) == (74, 0, None, None)
    (suspect,) = failed.suspects
    assert re.fullmatch(
        r"rank 0 on .*: NaN in the forward of 3\.layer\.mlp\.linear_fc1, step \d+, micro-batch \d", suspect
    )
    assert "forward of 3.layer.mlp.linear_fc1" in message
    first = events_of(tmp_path / "run", "nonfinite", "first")[0]
    assert first["fqn"] == "3.layer.mlp.linear_fc1"
    assert (first["inputs_finite"], first["parameters_finite"], first["reproduced"]) == (True, False, True)


def _rank_that_scales(config: str) -> tuple[int, str | None]:
    """Body of a rank whose engine says in every step that it trains in fp16, which DeepSpeed refuses on a CPU."""
    from whole_runs import pretrain_rank

    from megasdc.engine.engine import TrainingEngine

    TrainingEngine.fp16_enabled = lambda self: getattr(self, "_running_step", None) is not None
    return pretrain_rank(config, [])


@pytest.mark.parametrize("covered", [True, False])
def test_overflow_under_a_loss_scale_is_not_repeated(tmp_path: Path, data: Path, covered: bool) -> None:
    """Steps that are skipped while a loss scale adapts say why, with the place if a check saw it; none is repeated."""
    fault = {"submodule": "2.layer.mlp_bda" if covered else "2.layer.mlp.linear_fc1", "phase": "backward"}
    fault |= {"kind": "value", "value": "inf", "rank": 0, "steps": [3, 3], "micro_batches": [3 if covered else 0]}
    options = {**CHECKED, "sdc": {"always_on": NOTHING_COVERED}, "faults": [fault]}
    config = write_config(tmp_path / "run.json", data, tmp_path / "run", **options)
    results = run_distributed(_rank_that_scales, 1, str(config), init=False)
    assert results == [(0, None)]
    found = events_of(tmp_path / "run", "nonfinite", "first")
    (skip,) = events_of(tmp_path / "run", "skip", "optimizer_step")
    if covered:
        assert [(one["fqn"], one["value"], one["reproduced"]) for one in found] == [("2.layer.mlp_bda", "Inf", None)]
        assert "not recomputed" in skip["place"]
    else:
        assert found == []
        assert "overflow is normal" in skip["place"]
    fired = events_of(tmp_path / "run", "fault", "injected")
    assert len(fired) <= 2, "a slot each: nothing was computed again"


def _state_of_model(checkpoint: Path) -> dict[str, str]:
    """What decides how the model goes on; the states of hooks, of which one run has more, left out."""
    return {name: value for name, value in state_of(checkpoint).items() if "hooks" not in name}


def test_checks_leave_every_bit(tmp_path: Path, data: Path) -> None:
    """With the checks on, a run ends with the bits of one without; two tensor ranks, two replicas, bf16, dropout."""
    options = {
        "parallel__tensor": 2,
        "deepspeed__bf16": {"enabled": True},
        "model__hidden_dropout": 0.1,
        "checkpoint__interval": 3,
        "training": {"steps": 6},
        "determinism": {"enabled": True},
    }
    sections = {"off": {}, "on": {"always_on": {"enabled": True, "coverage": "all"}}}
    for name, sdc in sections.items():
        results = train_run(write_config(tmp_path / f"{name}.json", data, tmp_path / name, **options, sdc=sdc), 4)
        assert [code for code, _ in results if code] == [], results
    off, on = (tmp_path / name for name in sections)
    for read in (metrics_of, lambda folder: _state_of_model(folder / "checkpoints" / "step_00000006")):
        assert read(off) == read(on)
    assert events_of(on, "nonfinite", "first") == []
