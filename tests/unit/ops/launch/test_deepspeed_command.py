"""A command line of DeepSpeed's launcher becomes a request for the same launch, or is refused with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasdc.common.errors import LaunchError
from megasdc.config.guard import GuardLoggingSection, GuardSettings
from megasdc.ops.launch import deepspeed_command, user_program
from megasdc.ops.launch.deepspeed_command import read_command
from megasdc.ops.launch.hosts import place_program_here
from megasdc.ops.launch.plan import program_of
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE, collect

SETTINGS = GuardSettings(logging=GuardLoggingSection(run_dir="runs/of the settings", wait_for_room_s=7.0))


def test_options_of_the_launcher_and_of_the_script_are_told_apart(tmp_path: Path) -> None:
    """What comes after the script is its own, also where the launcher has an option of that name."""
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "train.py").touch()
    words = ["deepspeed", "--num_gpus=4", "--master_port", "29555", "-q", "my/train.py", "--num_gpus", "5", "-e"]
    words += ["--no_python", "x", "--"]
    request = read_command([*words, "", "a b"]).request("runs/x", SETTINGS)
    assert (request.num_gpus, request.hostfile, request.launcher_args) == (4, None, ("--master_port", "29555", "-q"))
    program = request.program
    assert program is not None and (program.name, program.is_module, program.run_dir) == (
        "my/train.py",
        False,
        "runs/x",
    )
    assert program.wait_for_room_s == 7.0 == program_of(request, tmp_path).wait_for_room_s
    assert program.arguments == ("--num_gpus", "5", "-e", "--no_python", "x", "--", "", "a b")


def test_names_and_modules() -> None:
    """The name of a run is that of the script without folder and ending, or the last part of a module."""
    assert read_command(["/venv/bin/deepspeed", "/a/b.c/train.v2.py"]).name == "train.v2"
    read = read_command(["deepspeed", "--module", "pkg.train", "-x"])
    assert (read.name, read.is_module, read.arguments) == ("train", True, ("-x",))


def test_num_nodes_are_the_first_of_the_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with DeepSpeed; its own hostfile is used where no other is named."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=2\nc slots=2\n")
    read = read_command(["deepspeed", "--hostfile", str(hostfile), "--num_nodes", "2", "t.py"])
    assert read.request("r", SETTINGS).include == "a@b"
    with pytest.raises(LaunchError, match="--num_nodes: it cannot be given with --include"):
        read_command(["deepspeed", "-H", str(hostfile), "-i", "a", "--num_nodes", "2", "t.py"]).request("r", SETTINGS)
    assert read_command(["deepspeed", "t.py"]).hostfile is None
    monkeypatch.setattr(deepspeed_command, "DEFAULT_HOSTFILE", hostfile)
    assert read_command(["deepspeed", "t.py"]).hostfile == hostfile


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "got 'no command'"),
        (["python", "t.py"], "got 'python', need deepspeed's command line"),
        (["deepspeed"], "arguments are required: script"),
        (["deepspeed", "--no_such_option", "t.py"], "--no_such_option"),
        (["deepspeed", "--num_gpus", "many", "t.py"], "--num_gpus"),
        (["deepspeed", "--save_pid", "t.py"], "--save_pid: DeepSpeed 0.19.8 fails"),
    ],
)
def test_other_commands_are_refused(words: list[str], text: str) -> None:
    """With the place, and an example."""
    with pytest.raises(LaunchError, match=text):
        read_command(words)


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("", 0, None),
        ("raise SystemExit(3)", 3, "SystemExit"),
        ("raise SystemExit(256 + 3)", 3, "SystemExit"),
        ("import sys; sys.stderr = open(__file__); raise ValueError('nobody is told')", 1, "ValueError"),
        ("import pickle\nclass C: pass\npickle.dumps(C())", 0, None),
        ("raise SystemExit('no data')", 1, "SystemExit"),
        ("raise SystemExit", 0, None),
        ("raise ValueError('x')", 1, "ValueError"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("from megasdc.common.errors import DataError; raise DataError('x')", 71, "DataError"),
        ("import sys; assert sys.argv == [__file__, '--local_rank=1', 'a b'] and __name__ == '__main__'", 0, None),
        ("import beside; assert beside.VALUE == 7", 0, None),
    ],
)
def test_a_script_ends_as_it_would_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: int, error: str | None
) -> None:
    """Its exit code, arguments, name, and the folder beside it are those of ``python script.py``."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text(body)
    settings = {"name": str(script), "is_module": False, "arguments": ["a b"]}
    got, raised = user_program._run(settings, ["--local_rank=1"])
    assert (got, None if raised is None else type(raised).__name__) == (code, error)


def test_slots_of_this_host_are_chosen_as_deepspeed_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By --include localhost:SLOT, and without a hostfile by --num_gpus; where neither says how many, that is asked."""
    environ = {"CUDA_VISIBLE_DEVICES": ""}
    assert place_program_here("localhost:1,3", "", None, environ).slots == {"localhost": [1, 3]}
    assert place_program_here("", "", 2, environ).slots == {"localhost": [0, 1]}
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [])
    with pytest.raises(LaunchError, match="give deepspeed --num_gpus N"):
        place_program_here("", "", None, environ)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path("/dev/nvidia0"), Path("/dev/nvidia1")])
    assert place_program_here("", "", None, environ).slots == {"localhost": [0, 1]}


def test_a_process_that_a_script_forks_leaves_no_record(tmp_path: Path) -> None:
    """Its end is not the rank's, whose record comes once the script has ended."""
    script = tmp_path / "script.py"
    wrote = "os.path.exists('done/x/rank_00000.json')"
    script.write_text(f"import os, sys\nif os.fork() == 0:\n    sys.exit(5)\nos.wait()\nassert not {wrote}\n")
    settings = {"name": str(script), "is_module": False, "arguments": [], "run_dir": str(tmp_path), "watched": False}
    settings["wait_for_room_s"] = 0.0
    env = {**os.environ, "RANK": "0", LAUNCH_ID_VARIABLE: "x"}
    command = [sys.executable, "-m", user_program.__name__, json.dumps(settings)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {rank: one.exit_code for rank, one in collect(tmp_path, "x").done.items()} == {0: 0}
