"""Commands with what they cannot read, write or print: a documented exit code, no traceback, no leftover, no hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_matrix import COMMANDS, Command, build_base, cases, complaint, preload

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

ALL = [(command, case) for command in COMMANDS for case in cases(command)]
QUICK = ("check-config", "summary", "plan-audit", "launch --dry-run --num-ranks")
"""Their inputs need no run; one of each kind of output and of stream is among them."""


def _names(pairs: list[tuple[Command, str]]) -> list[str]:
    return [f"{command.name} - {case}" for command, case in pairs]


@pytest.fixture(scope="module", autouse=True)
def bound(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where nothing can take from root the right to pass permissions."""
    file = tmp_path_factory.mktemp("bound") / "file"
    file.touch(mode=0)
    program = "from command_matrix import *; bind_to_permissions(); os._exit(os.access(sys.argv[1], os.R_OK))"
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", program, str(file)], cwd=here, check=False)
    if done.returncode != 0:
        pytest.skip("this user passes all permissions, and the capabilities for it cannot be given up")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, a study, checkpoints, golden values: one of everything."""
    folder = tmp_path_factory.mktemp("base")
    build_base(folder)
    preload()
    return folder


@pytest.fixture(scope="module")
def small_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What needs no training: a configuration, and a run folder that has reported nothing."""
    folder = tmp_path_factory.mktemp("small")
    smoke = Path(__file__).parents[2] / "configs" / "smoke.json"
    (folder / "run.json").write_text(smoke.read_text())
    (folder / "run").mkdir()
    return folder


SAMPLE = [
    (command, case)
    for command, case in ALL
    if command.name.startswith(tuple(f"megasdc {name}" for name in QUICK)) and "launch" not in command.name
    if case != "healthy" and not ("summary" in command.name and "stdout" in case)
]


@pytest.mark.parametrize(("command", "case"), SAMPLE, ids=_names(SAMPLE))
def test_a_sample(command: Command, case: str, small_base: Path, tmp_path: Path) -> None:
    """Commands that need no trained run."""
    assert complaint(command, case, small_base, tmp_path / "case") is None


@pytest.mark.full
@pytest.mark.parametrize(("command", "case"), ALL, ids=_names(ALL))
def test_all(command: Command, case: str, base: Path, tmp_path: Path) -> None:
    """Every command with every harm to what it reads, writes and prints."""
    assert complaint(command, case, base, tmp_path / "case") is None
