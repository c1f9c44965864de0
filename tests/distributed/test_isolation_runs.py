"""Replicas that are wrong are left out: the others go on in the same processes, with the bits of a run without them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whole_runs import MODELS, events_of, metrics_of, prepare_text, state_of, train_run, verdicts_of, write_config

from megasdc.checkpoint.snapshots.held import memory_folder
from megasdc.metrics.writer import read_metrics
from megasdc.run_identity import read_identity
from megasdc.sdc.incident import load_incidents

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
STEPS, FOUND = 9, 5
CONVERT = "megasdc.checkpoint.other_layout=convert"
ISOLATE = {"persistent": "isolate", "intermittent": "isolate"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def without_memory(tmp_path: Path) -> Iterator[None]:
    """Remove what failed runs of a test have left in shared memory."""
    yield
    for identity in tmp_path.glob("*/run.json"):
        shutil.rmtree(memory_folder(_id(identity.parent)), ignore_errors=True)


def _id(run: Path) -> str:
    identity = read_identity(run)
    assert identity is not None
    return str(identity.run)


def _config(folder: Path, data: Path, name: str, layout: tuple[int, int, int], **changes: Any) -> Path:
    """A run of 12 samples a step whose steps are all checked: every product, every element of the optimizer."""
    tensor, pipeline, _ = layout
    checks = {"enabled": True, "coverage": "all", "slice_elements": 1_000_000, "rows": True}
    sdc = changes.pop("sdc", {})
    return write_config(
        *(folder / f"{name}.json", data, folder / name),
        deepspeed__train_batch_size=12,
        deepspeed__gradient_clipping=1.0,
        deepspeed__pipeline={"activation_checkpoint_interval": 1},
        parallel={"tensor": tensor, "pipeline": pipeline, "timeout_s": 60.0},
        training__steps=STEPS,
        determinism={"enabled": True},
        sdc={"always_on": checks, "policy": ISOLATE, **sdc},
        **{
            "checkpoint": {
                "keep_last": 0,
                "memory": {"interval": 1, "partners": True},
                "other_layout": "convert",
                "require_verified": "never",
            },
            **changes,
        },
    )


def _wrong_forward(replica: int, first: int = FOUND, **place: Any) -> dict[str, Any]:
    where = {"phase": "forward", "submodule": "*.linear_fc1", "replica": replica, "steps": [first, None]}
    return {"kind": "scale", "factor": 4.0, "seed": 3, **where, **place}


@pytest.mark.parametrize(
    ("layout", "replica", "changes"),
    [
        ((1, 1, 3), 0, {}),
        ((1, 2, 3), 1, {"model": MODELS["llama"]}),
        pytest.param((2, 1, 3), 2, {"deepspeed__bf16": {"enabled": True}}, marks=pytest.mark.full),
        pytest.param((1, 1, 3), 2, {"model__hidden_dropout": 0.1}, marks=pytest.mark.full),
    ],
    ids=["first", "pipeline", "tensor_bf16", "dropout"],
)
def test_the_others_go_on_with_the_bits_of_a_run_without_it(
    tmp_path: Path, data: Path, layout: tuple[int, int, int], replica: int, changes: dict[str, Any]
) -> None:
    """Wrong from step 5 on: no bit differs from three replicas up to a step and then two, whose checks are silent."""
    tensor, pipeline, replicas = layout
    ranks = tensor * pipeline * replicas
    faults = [_wrong_forward(replica)]
    config = _config(tmp_path, data, "run", layout, faults=faults, **changes)
    assert train_run(config, ranks) == [(0, None)] * ranks
    (begun,) = events_of(tmp_path / "run", "isolation", "begun")
    left_out = [rank for rank in range(ranks) if rank // tensor % replicas == replica]
    assert (begun["step"], begun["left_out"], begun["replicas"]) == (FOUND, left_out, 2)
    ((_, incident),) = load_incidents(tmp_path / "run" / "reports", [])
    assert (incident.step, incident.done, {one.dp_rank for one in incident.flagged}) == (FOUND, "isolated", {replica})
    (resumed,) = (one["step"] for one in events_of(tmp_path / "run", "resume", "memory"))
    assert 0 < resumed < FOUND, "what writers have made whole by then; the step before, where they have time"
    without = _config(tmp_path, data, "without", layout, **changes)
    assert train_run(without, ranks, f"megasdc.training.stop_step={resumed}") == [(0, None)] * ranks
    assert train_run(without, ranks - ranks // replicas, "megasdc.sdc.policy={}") == [(0, None)] * (ranks - ranks // 3)
    last = f"checkpoints/step_{STEPS:08d}"
    assert state_of(tmp_path / "run" / last) == state_of(tmp_path / "without" / last)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "without")
    assert {step for step, *_ in verdicts_of(tmp_path / "run")} == {FOUND}
    ends = [row["data/stream_end"] for row in read_metrics(tmp_path / "run") if "data/stream_end" in row]
    assert ends == [12 * (step + 1) for step in range(STEPS)], "no sample is lost, none is used twice"


def test_a_run_ends_after_so_many_steps_without_a_replica(tmp_path: Path, data: Path) -> None:
    """It saves its last step, and ends with the corruption code and what to do; ranks that are left out end well."""
    sdc = {"isolation": {"max_steps": 2}}
    config = _config(tmp_path, data, "run", (1, 1, 3), faults=[_wrong_forward(1)], sdc=sdc)
    codes = train_run(config, 3)
    assert [code for code, _ in codes] == [73, 0, 73]
    assert f"step {FOUND + 1} is saved" in str(codes[0][1]) and "replace their hosts" in str(codes[0][1])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == [f"step_{FOUND + 1:08d}"]
