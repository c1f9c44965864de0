"""Do whole runs find wrong ranks before a step is committed, name them, and act by policy?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

pytestmark = pytest.mark.distributed

AUDITED = {"determinism": {"enabled": True}, "audit": {"enabled": True, "interval": 2}}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _write(tmp_path: Path, data: Path, name: str, replicas: int, **changes: Any) -> Path:
    batch = {"deepspeed__train_batch_size": 2 * replicas, "checkpoint__interval": 3}
    return write_config(tmp_path / f"{name}.json", data, tmp_path / name, **{**AUDITED, **batch, **changes})


def _end(run_dir: Path) -> Any:
    return state_of(run_dir / "checkpoints" / "step_00000006"), metrics_of(run_dir)


def _verdicts(run_dir: Path) -> list[tuple[Any, ...]]:
    return [
        (one["step"], one["tier"], one["rank"], one["verdict"], one["basis"], one["action"])
        for one in events_of(run_dir, "sdc", "verdict")
    ]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2)], ids=["dp3", "tp2dp3", "pp2dp3"])
def test_a_fault_of_one_micro_batch_is_named_and_repaired(
    tmp_path: Path, data: Path, tensor: int, pipeline: int
) -> None:
    """A transient fault is detected, the right rank named, and the repaired run ends with the bits of a clean one."""
    layout = {"parallel__tensor": tensor, "parallel__pipeline": pipeline}
    ranks = 3 * tensor * pipeline
    wrong = ranks - 2
    fault = {"submodule": "*.linear_fc2", "phase": "backward", "rank": wrong, "steps": [4, 4], "once": True}
    clean = _write(tmp_path, data, "clean", 3, **layout)
    harmed = _write(tmp_path, data, "harmed", 3, **layout, faults=[{**fault, "micro_batches": [0]}])
    for config in (clean, harmed):
        results = train_run(config, ranks)
        assert [code for code, _ in results if code] == [], results
    assert _verdicts(tmp_path / "clean") == []
    assert len(events_of(tmp_path / "clean", "audit", "agreed")) == 3
    assert _verdicts(tmp_path / "harmed") == [
        (4, "audit", wrong, "not_reproduced", "relative to the majority", "repair")
    ]
    assert _end(tmp_path / "clean") == _end(tmp_path / "harmed")


def test_a_persistent_fault_halts_all_ranks(tmp_path: Path, data: Path) -> None:
    """A rank that is wrong each time is named; nothing of its step is committed, and every rank exits with 73."""
    fault = {"submodule": "*.linear_qkv", "rank": 2, "steps": [4, None], "same_elements": True, "bits": "exponent"}
    results = train_run(_write(tmp_path, data, "run", 3, faults=[fault]), 3)
    assert [code for code, _ in results] == [73, 73, 73]
    assert all("rank 2" in str(message) and "persistent" in str(message) for _, message in results)
    assert _verdicts(tmp_path / "run") == [(4, "audit", 2, "persistent", "relative to the majority", "halt")]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")) == ["step_00000003"]


def test_of_two_replicas_the_one_that_varies_is_named(tmp_path: Path, data: Path) -> None:
    """With two replicas a transient fault is named by replay."""
    fault = {"submodule": "*.linear_fc1", "phase": "weight_grad", "rank": 1, "steps": [2, 2], "micro_batches": [0]}
    results = train_run(_write(tmp_path, data, "run", 2, faults=[{**fault, "once": True}]), 2)
    assert [code for code, _ in results] == [0, 0], results
    assert _verdicts(tmp_path / "run") == [(2, "audit", 1, "not_reproduced", "replay", "repair")]
