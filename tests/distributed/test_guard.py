"""Does a guard name what is wrong in trainings that are not megasdc's own, and leave healthy ones as they are?"""

from __future__ import annotations

from pathlib import Path

import pytest
from guarded import Planted, train_guarded
from harness import run_distributed

from megasdc.sdc.incidents.incident import load_incidents

pytestmark = pytest.mark.distributed
ZERO = {stage: {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2)}
AUDIT = {"audit": {"interval": 2}}


def test_a_wrong_rank_is_named(tmp_path: Path) -> None:
    planted = Planted(1, "model.layers.1.mlp.up_proj", "forward")
    found = run_distributed(train_guarded, 3, str(tmp_path), ZERO[1], 4, planted, audit={"interval": 2})
    print(found)
    ((_, incident),) = load_incidents(tmp_path / "reports", [])
    print(incident)
    assert [code for code, *_ in found] == [73] * 3
