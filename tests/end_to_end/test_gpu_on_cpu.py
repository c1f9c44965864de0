"""Does ``tests/gpu.sh`` run where there is no GPU?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.distributed
def test_parts_run_on_a_processor(tmp_path: Path) -> None:
    """Parts that train and profile pass, what means nothing here is listed with its reason, the picture is there."""
    result = tmp_path / "result.json"
    call = ["bash", "tests/gpu.sh", "--device", "cpu", "--minutes", "4", "--json", str(result)]
    done = subprocess.run(
        [*call, "--only", "optimizers", "profile", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert [(one["name"], one["state"]) for one in found["parts"]] == [("optimizers", "passed"), ("profile", "passed")]
    assert {"device", "torch", "deepspeed", "megatron-core", "python", "commit", "cuda", "nccl", "triton"} <= set(found)
    assert found["parts"][0]["not_run"][0]["name"] == "DeepSpeed FusedAdam"
    assert "DeepSpeed FusedAdam: it is compiled" in done.stdout and "2 passed" in done.stdout
    picture = (tmp_path / "out" / "profile" / "step_fp32.svg").read_text()
    assert picture.startswith("<svg") and "aten::mm" in picture
    assert (
        json.loads((tmp_path / "out" / "profile" / "step_fp32.json").read_text())["by_group_ms"]["matrix product"] > 0
    )
