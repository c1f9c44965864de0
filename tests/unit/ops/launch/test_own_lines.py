"""What DeepSpeed's launcher says goes to a file, what its children say does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megasdc.ops.launch.own_lines import FOLDER_VARIABLE, folder_option, last_lines, pop_folder_option

PROGRAM = """
import subprocess, sys
from megasdc.ops.launch.own_lines import own_lines_to
with own_lines_to(sys.argv[1], ["the", "command"]):
    from deepspeed.utils import logger
logger.warning("process 1 spawned with command " + "e" * 1000)
subprocess.run([sys.executable, "-c", "print('a rank')"])
print("ours")
raise RuntimeError("no such host")
"""


@pytest.mark.slow
def test_only_the_launchers_own_lines_are_moved(tmp_path: Path) -> None:
    """Ranks and tracebacks stay on the console; the last lines can be shown, encoded arguments cut."""
    folder = tmp_path / "run dir" / "logs"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n") == ["a rank", "ours", ""]
    assert "RuntimeError: no such host" in done.stderr and "spawned" not in done.stderr
    (path,) = folder.iterdir()
    assert "the command" in path.read_text().splitlines()[0]
    spawned = last_lines(folder)[-1]
    assert "process 1 spawned" in spawned and spawned.endswith(" ...") and len(spawned) < 400
    assert last_lines(tmp_path) == []


WITHOUT_A_NAME = """
import runpy, sys
from megasdc.common import versions
versions.OWNERS = (versions.NameOwner("deepspeed.launcher.launch", "a test", ("gone",), used_by="node"),)
runpy.run_module("megasdc.ops.launch.node", run_name="__main__")
"""


@pytest.mark.slow
def test_a_missing_name_is_told_on_the_console(tmp_path: Path) -> None:
    """What megasdc itself says of DeepSpeed's launcher is not moved into the file: 78 and the message."""
    command = [sys.executable, "-c", WITHOUT_A_NAME, "--stop_grace_s=1", folder_option(str(tmp_path / "logs"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert "has no deepspeed.launcher.launch: gone, which a test needs" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_loses_nothing(tmp_path: Path) -> None:
    """The lines stay where they were, and why is told."""
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file" / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "process 1 spawned" in done.stdout
    assert "file/logs cannot be written" in done.stderr


def test_the_folder_reaches_other_hosts_past_their_shells() -> None:
    """Any path is one plain word on the way, and itself again there; without it nothing changes."""
    folder = "/runs/a b;touch $HOME/'x'/logs"
    word = folder_option(folder)
    assert word.replace("-", "").replace("_", "").replace("=", "").isalnum()
    argv = ["node.py", "--stop_grace_s=600", word, "--node_rank=0"]
    assert pop_folder_option(argv) == folder
    assert argv == ["node.py", "--stop_grace_s=600", "--node_rank=0"]
    assert pop_folder_option(["node.py", "--stop_grace_s=600", "script.py"]) is None
    assert FOLDER_VARIABLE.startswith("MEGASDC_")
