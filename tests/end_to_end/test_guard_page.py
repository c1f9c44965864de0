"""The page "Protect the run you have": its script and its command, as a reader copies them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megasdc.parallel.local_ranks import EXTENSIONS_VARIABLE, free_port
from megasdc.sdc.incident import load_incidents

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "attach.md"
PYTORCHS = ', "torch_adam": True'
FAULT = r"\n    if engine.global_rank == 1.*\n.*register_forward_hook.*"


def _run(folder: Path, script: str, command: str, extensions: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    """Run the command; ``programs`` has its ``deepspeed``."""
    text = PAGE.read_text(encoding="utf-8").partition("## Try it")[2].partition("## Settings")[0]
    assert re.findall(r"```bash\n(.*?)\n```", text, re.DOTALL) == [command]
    folder.mkdir()
    (folder / "train.py").write_text(script)
    path = f"{programs}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", EXTENSIONS_VARIABLE: str(extensions)}
    launcher, *arguments = shlex.split(command)
    words = [launcher, "--master_port", str(free_port()), *arguments]  # other tests run beside this one
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("adam", ["PyTorch's", pytest.param("DeepSpeed's", marks=pytest.mark.full)])
def test_the_wrong_rank_is_named(tmp_path: Path, adam: str, shm_operator: Path, programs: Path) -> None:
    """Started by DeepSpeed's own launcher; also with its own optimizer, which it compiles for longer than a minute.

    The second training, without the fault, is of forks.
    """
    (script,) = re.findall(r"```python\n(import deepspeed\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert script.count(PYTORCHS) == 1
    if adam == "DeepSpeed's":
        script = script.replace(PYTORCHS, "")
    command = "deepspeed --num_gpus 3 train.py"
    done = _run(tmp_path / "wrong", script, command, shm_operator, Path(sys.executable).parent)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "the step is not taken" in said, done.stdout + done.stderr
    assert "rank 1 at step 15, micro-batch 0, forward of model.layers.1.mlp.up_proj (output): persistent" in said
    assert "exits with return code = 73" in said
    ((_, incident),) = load_incidents(tmp_path / "wrong" / "runs" / "train" / "reports", [])
    assert (incident.step, [one.rank for one in incident.flagged]) == (15, [1])
    right, count = re.subn(FAULT, "", script)
    assert count == 1
    done = _run(tmp_path / "right", right, command, shm_operator, programs)
    assert done.returncode == 0, done.stdout + done.stderr
    own = "megasdc guard: protect standard, set in another way by you: audit.interval 5 (preset: 100)"
    assert own in done.stderr and "closed after step 20: 20 steps, 5 audits agreed, 0 findings" in done.stderr
    assert not (tmp_path / "right" / "runs" / "train" / "reports").exists()
