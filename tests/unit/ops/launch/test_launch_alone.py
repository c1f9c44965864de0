"""DeepSpeed's launch.py is run without what its package imports, and starts the same ranks."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megasdc.common.host import NAME_VARIABLE
from megasdc.ops.launch.command import node_command, node_words
from megasdc.ops.launch.hosts import Placement
from megasdc.ops.launch.launch_alone import NVML_VARIABLE
from megasdc.ops.launch.orphans import NODE_PID_VARIABLE
from megasdc.ops.launch.rank import RankCommand

RANK = """
import json, os, pathlib, sys
found = {"argv": sys.argv, "environment": dict(os.environ), "cwd": os.getcwd()}
pathlib.Path(sys.argv[-1], os.environ["RANK"]).write_text(json.dumps(found))
"""


def start(folder: Path, words: list[str], environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Run a launcher of two of four ranks; returns what each rank saw, and the launcher's exit code."""
    folder.mkdir()
    script = folder.parent / "rank.py"
    script.write_text(RANK)
    world = base64.urlsafe_b64encode(json.dumps({"a": [0, 1], "b": [2, 5]}).encode()).decode()
    argv = [sys.executable, "-u", "-m", *words, f"--world_info={world}", "--master_addr=10.0.0.7", "--node_rank=1"]
    argv += ["--master_port=4321", str(script), *arguments, str(folder)]
    env = {**os.environ, "NCCL_DEBUG": "WARN", **environment}
    env.pop(NVML_VARIABLE, None)  # tests that have imported DeepSpeed have it
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] = {path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}
    for seen in found.values():
        seen["environment"].pop(NODE_PID_VARIABLE, None)
        seen["environment"].pop(NAME_VARIABLE, None)
        seen["environment"].pop("TORCHINDUCTOR_CACHE_DIR", None)  # set by the import of PyTorch 2.10
        seen["argv"].remove(str(folder))
    return {**found, "exit code": done.returncode}


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["cpu", None])
def test_ranks_are_started_as_by_deepspeed(tmp_path: Path, accelerator: str | None) -> None:
    """The same command lines, environment and exit code as under DeepSpeed's own launch.py."""
    env = {"CUDA_VISIBLE_DEVICES": "7"} if accelerator is None else {"DS_ACCELERATOR": accelerator}
    theirs = start(tmp_path / "theirs", ["deepspeed.launcher.launch"], env, "7", "x y")
    ours = start(tmp_path / "ours", node_words(30.0, None), env, "7", "x y")
    for rank in ("2", "3"):
        theirs[rank]["environment"].setdefault(NVML_VARIABLE, "1")  # DeepSpeed 0.19.0 does not set it
    assert ours == theirs
    assert sorted(ours) == ["2", "3", "exit code"]
    assert ours["2"]["environment"]["CUDA_VISIBLE_DEVICES"] == "2,5"
    assert ours["2"]["environment"][NVML_VARIABLE] == "1"


@pytest.mark.slow
def test_nothing_of_pytorch_is_imported(tmp_path: Path) -> None:
    """Nor is anything of the stand-ins left for who imports DeepSpeed later; what launch.py says goes to the file."""
    code = (
        "import sys, megasdc.ops.launch.node as node\n"
        "heavy = {'torch', 'numpy', 'deepspeed'} & {name.partition('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy\nassert node.launch.__file__.endswith('deepspeed/launcher/launch.py')\n"
        "import deepspeed\nassert deepspeed.initialize\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_accelerator_of_another_kind_takes_all_of_deepspeed() -> None:
    """Its devices may be listed by another variable, which DeepSpeed knows."""
    command = [sys.executable, "-c", "import megasdc.ops.launch.node"]
    env = {**os.environ, "DS_ACCELERATOR": "mps"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert "MPS_Accelerator requires torch.mps" in done.stderr, done.stderr


@pytest.mark.slow
def test_more_than_the_stand_ins_have_takes_all_of_deepspeed() -> None:
    """A release whose launch.py asks for another name is launched all the same, and the reason is printed."""
    code = (
        "from megasdc.ops.launch import launch_alone\n"
        "whole = launch_alone._package\n"
        "launch_alone._package = lambda name, folder, **rest: whole(name, folder)\n"
        "launch = launch_alone.import_launch()\n"
        "import deepspeed\nassert launch.main and deepspeed.initialize\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "all of DeepSpeed is imported" in done.stderr and "cannot import name" in done.stderr


@pytest.mark.slow
def test_exit_code_of_the_rank_that_failed(tmp_path: Path) -> None:
    """A whole local launch without DeepSpeed's runner: the ranks' command, the log, and the code that ends it."""
    script = tmp_path / "fails.py"
    script.write_text("import os, sys\nprint(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])\nsys.exit(75)\n")
    command = RankCommand(str(tmp_path), [str(script)], ["--config", "c"], {}, [], {"MASTER_PORT": "1"})
    placement = Placement({"localhost": [0]}, remote=False)
    argv = node_command(placement, command, "id", grace_s=5.0, logs=str(tmp_path / "logs"), master_port=4321)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (75, "127.0.0.1 4321\n")
    (log,) = (tmp_path / "logs").iterdir()
    assert "exits with return code = 75" in log.read_text()
