"""The console of `megasdc launch` on a terminal: whole lines beside a bar, each thing once, nothing of libraries."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from harness import run_command
from terminal import Terminal
from test_launch_train import prepare_tiny, tiny_config

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(400)]
STEPS = 24
HOOK = '''
import contextlib
import datetime
import logging
import sys

from torch.distributed import DistError, TCPStore

from megasdc import Hook


class Talk(Hook):
    """Each rank logs, and rank 0 prints; c10d logs an error of its own where nobody listens."""

    def after_step(self, run, result):
        if result.step == 2:
            with contextlib.suppress(DistError):
                TCPStore("127.0.0.1", 9, 2, is_master=False, timeout=datetime.timedelta(seconds=0.1))
            print(f"rank {run.dims.rank} has looked for a store.", file=sys.stderr)
        logging.getLogger("megasdc.talk").info("says %s of step %d.", "word " * 30, result.step)
        if run.dims.rank == 0:
            print(f"prints {result.step}.", flush=True)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the launch."""
    return tmp_path_factory.mktemp("console")


@pytest.fixture(scope="module")
def console(folder: Path) -> Terminal:
    """A launch on 80 columns whose ranks log and print, and in which an audit finds a persistent fault of rank 1."""
    config = tiny_config()
    fault = {"submodule": "*.linear_qkv", "phase": "forward", "rank": 1, "steps": [STEPS - 4, None]}
    config["megasdc"] |= {
        "protect": "off",
        "training": {"steps": STEPS},
        "determinism": {"enabled": True},
        "audit": {"enabled": True, "interval": 4},
        "hooks": ["talk.py:Talk"],
        "faults": [{**fault, "bits": "exponent", "same_elements": True}],
    }
    (folder / "talk.py").write_text(HOOK)
    with contextlib.chdir(folder):
        prepare_tiny(folder, config)
    terminal = Terminal(["launch", "--num-ranks", "2", "--config", "config.json"], columns=80, cwd=folder)
    assert terminal.wait(200) == 73, terminal.drawn
    return terminal


def test_lines_are_whole(console: Terminal) -> None:
    """Each line of each rank stands at the begin of a row with nothing of the bar in or behind it."""
    rows = console.lines
    text = "\n".join(rows)
    assert re.search(r"training +[━╸╺ ]*\d+/\d+", console.drawn), text
    for row in rows:
        assert "━" not in row or re.match(r"training +[━╸╺ ]+\d+/\d+", row), (row, text)
    whole = re.sub(r"\n(?!\d\d:\d\d:\d\d \[rank|prints |rank \d has |megasdc launch:|training )", "", text)
    for step in range(1, STEPS - 4):
        for rank in (0, 1):
            assert re.search(rf"^[\d:]+ \[rank {rank}\] I says (word *){{30}} ?of step {step}\.$", whole, re.M), text
        assert re.search(rf"^prints {step}\.$", whole, re.M), text


def test_each_thing_is_said_once(console: Terminal) -> None:
    """What is loaded before ranks say anything; the finding by rank 0 alone, and by its name at the end."""
    said = console.drawn
    assert said.index("loading PyTorch, DeepSpeed and Megatron-core") < said.index("[rank ")
    assert len(re.findall(r"\[rank \d\] E step", said)) == 1, said
    assert "megasdc launch: all 2 ranks ended with exit code 73 (CorruptionError), as rank 0 has said\r\n" in said, said
    assert not re.search(r"rank \d ended with exit code", said), said


def test_nothing_of_libraries(console: Terminal, folder: Path) -> None:
    """DeepSpeed's and c10d's lines are in the log of their rank; what a rank itself prints stays."""
    said = console.drawn
    for rank in (0, 1):
        assert f"rank {rank} has looked for a store." in said, said
        log = (folder / "run" / "logs" / f"deepspeed_{rank:05d}.log").read_text()
        assert re.search(r"\[E\d{4} .*TCPStore.cpp.*\[c10d\] .*failed to connect", log), log
    for raw in ("[WARNING]", "[INFO]", "real_accelerator", "c10d", "Warning:", "socket.cpp", "links:"):
        assert raw not in said, (raw, said)


def test_no_blank_lines_without_a_terminal(console: Terminal, folder: Path) -> None:
    """A bar that is not drawn leaves no empty line."""
    done = run_command("verify-checkpoint", str(folder / "run" / "checkpoints"))
    assert done.returncode == 0 and all(line.strip() for line in (done.stdout + done.stderr).splitlines()), done
