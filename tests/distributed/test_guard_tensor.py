"""Are the tensor ranks of a replica suspects together where a guard compares sums over them?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_distributed

import megasdc
from megasdc.events import read_events
from megasdc.sdc.incident import load_incidents
from tools.trainings.engines import PERSISTENT, Planted, deepspeed_config, llama_engine, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def _guarded(folder: str, planted: Planted | None, **settings: Any) -> tuple[int, str]:
    """Body of a rank of two: train with AutoTP; the exit code, and the layout."""
    engine = llama_engine(deepspeed_config(1, "fp32", {"tensor_parallel": {"autotp_size": 2}}))
    if planted is not None and planted.rank == dist.get_rank():
        planted.plant(engine.module)
    guard = megasdc.attach(engine, {"logging": {"run_dir": folder}, "audit": {"interval": 2}, **settings})
    try:
        train(engine, 2, guard.dims.dp_rank)
    except SystemExit as error:
        return int(str(error.code)), str(guard.dims)
    finally:
        guard.close()
    return 0, str(guard.dims)


@pytest.mark.parametrize(
    ("submodule", "phase", "named"),
    [("down_proj", "forward", False), ("up_proj", "forward", True), ("up_proj", "backward", False)],
)
def test_a_sum_is_of_all_ranks_of_a_replica_and_a_part_of_one(
    tmp_path: Path, submodule: str, phase: str, named: bool
) -> None:
    """Of two replicas: what is added up over tensor ranks is anybody's; a part is computed again by the referee."""
    planted = Planted(3, f"model.layers.1.mlp.{submodule}", phase, PERSISTENT)
    found = run_distributed(_guarded, 4, str(tmp_path), planted)
    assert [code for code, _ in found] == [73] * 4
    ((_, incident),) = load_incidents(tmp_path / "reports", [])
    if named:
        assert ([one.rank for one in incident.flagged], incident.verdict) == ([3], "persistent")
    else:
        assert incident.flagged == () and incident.verdict == "inconclusive"
        assert [one.rank for one in incident.disputed] == [0, 1, 2, 3]
    (finding,) = read_events(tmp_path, kind="sdc", name="finding")
    assert finding.fields["ranks"] == [0, 1, 2, 3], "nobody is accused before"


def test_a_healthy_training_with_tensor_ranks_agrees(tmp_path: Path) -> None:
    """In every audit."""
    found = run_distributed(_guarded, 4, str(tmp_path), None)
    assert [code for code, _ in found] == [0] * 4
    assert len(list(read_events(tmp_path, kind="audit", name="agreed"))) == 2
