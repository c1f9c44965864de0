"""Drills: whole runs of a tiny model, whose ranks are processes of this machine that train as the entry script does."""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megasdc.common.errors import ConfigError
from megasdc.parallel.local_ranks import LocalMeeting, local_rank_environment
from megasdc.parallel.processes import Process, start_module
from tools.bench.rank import Messages, request_of
from tools.bench.small.gpt import prepare_library, raw_config

if TYPE_CHECKING:
    from megasdc.engine.hooks import Hook
    from megasdc.train.build import Start
    from tools.bench.campaign import Layout

    Build = Callable[[Start], list[Hook]]
POLL_S = 0.01
RANK = request_of.__module__
"""That the processes of ranks run."""
_NEW_NAMES = 0x04000000
"""CLONE_NEWUTS of unshare(2)."""


def prepare_texts(folder: Path) -> Path:
    """Tokens of some modules of Python's library, in a folder in this one, which is returned."""
    return prepare_library(folder / "data", 500, "[at]*.py", characters=200_000)


def write_drill(
    path: Path,
    data: Path,
    layout: Layout,
    steps: int,
    sections: Mapping[str, Mapping[str, Any] | Sequence[Any]],
    deepspeed: Mapping[str, Any] | None = None,
) -> Path:
    """Write the configuration of a drill to a file, which is returned; the run's folder is ``run`` beside it.

    Args:
        data: prepared.
        sections: of megasdc; of those that are here, too, their fields come first.
        deepspeed: more of DeepSpeed's.
    """
    tensor, pipeline, replicas = layout
    own: dict[str, Any] = {
        "parallel": {"tensor": tensor, "pipeline": pipeline, "timeout_s": 120.0},
        "logging": {"interval": 1, "progress_bar": False},
    }
    for name, values in sections.items():
        own[name] = {**own.get(name, {}), **values} if isinstance(values, Mapping) else values
    model = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    more = {"train_batch_size": 2 * replicas, **(deepspeed or {})}
    raw = raw_config(path.parent / "run", data, model, 32, steps, own, more)
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


class DrillRanks:
    """Ranks of a drill.

    Args:
        function: that each calls with a ``Messages``, as ``run_in_ranks`` has it, and its own of the arguments.
        folder: gets their output.
        environment: more of it, of each rank.

    Attributes:
        killed: whether they had to be ended.
    """

    def __init__(
        self,
        function: Callable[..., None],
        arguments: Sequence[dict[str, Any]],
        folder: Path,
        environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    ) -> None:
        self._meeting = LocalMeeting()
        self.processes: list[Process] = []
        self.killed = False
        for rank, own in enumerate(arguments):
            common = local_rank_environment(rank, len(arguments), 1, self._meeting.environment)
            request = [json.dumps(request_of(function, own))]
            with open(folder / f"rank_{rank}.log", "ab") as log:
                streams = (subprocess.DEVNULL, log.fileno(), log.fileno())
                self.processes.append(start_module(RANK, request, {**common, **environment(rank)}, *streams))

    def wait(self, until: float, follow_s: float = math.inf) -> list[int]:
        """Wait until all have ended, and end them at a time, on ``time.monotonic``, or so long after one has failed.

        Returns:
            Exit codes by rank.
        """
        while (codes := [process.poll() for process in self.processes]).count(None):
            if any(codes):
                until = min(until, time.monotonic() + follow_s)
            if time.monotonic() > until:
                self.killed = True
                self.kill(range(len(codes)))
            time.sleep(POLL_S)
        return [process.wait() for process in self.processes]

    def kill(self, ranks: Sequence[int]) -> None:
        """End ranks at once."""
        for rank in ranks:
            self.processes[rank].kill()


def flip_bit(path: Path, chance: random.Random) -> None:
    """Flip a bit of a file, if it is there and holds any, and see that it is on the disk."""
    with suppress(FileNotFoundError), open(path, "r+b", buffering=0) as file:
        if size := file.seek(0, os.SEEK_END):
            place = chance.randrange(size)
            byte = os.pread(file.fileno(), 1, place)
            if byte:
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << chance.randrange(8)]), place)
                os.fsync(file.fileno())


def last_step(run: Path) -> int:
    """Last step of which a metric was written; 0: there is none."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    except OSError:
        return 0
    return max((json.loads(line)["step"] for line in lines[-3:] if line.endswith(b"\n")), default=0)


# --- in a rank --------------------------------------------------------------------------------------------------------


def train_with(
    config: Path, change: Callable[[Build, Start], list[Hook]], expected: type[BaseException] | None = None
) -> None:
    """Train as the entry script does, with other hooks; if that fails this process ends with the exit code.

    Args:
        change: makes the hooks, from what builds a run's own and what they are built of.
        expected: the error that is to end it, which is no failure; None: none is.
    """
    change_hooks(change)
    from megasdc.pretrain import pretrain

    code, error = pretrain(str(config), ())
    if code if expected is None else not isinstance(error, expected):
        sys.exit(code or 1)


def change_hooks(change: Callable[[Build, Start], list[Hook]]) -> None:
    """Let runs of this process have other hooks, see ``train_with``."""
    from megasdc import features
    from megasdc.train.build import Features

    build = features.FEATURES.build_hooks
    features.FEATURES = Features(lambda start: change(build, start), features.FEATURES.share_launch)


def train_and_leave(messages: Messages, config: Path, overrides: Sequence[str] = (), host: str = "") -> NoReturn:
    """Train as the entry script does, on a host of that name, see ``name_host``, and end this process as it does."""
    from megasdc.pretrain import pretrain

    def leave(code: int, _error: BaseException | None) -> NoReturn:
        os._exit(code)

    name_host(host)
    leave(*pretrain(str(config), overrides, (), leave))


def name_host(name: str) -> None:
    """Give this process, and those that it starts, a host name of their own; an empty one: keep that of the machine.

    Raises:
        ConfigError: this user cannot.
    """
    if not name:
        return
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NAMES):
        raise ConfigError(f"this user cannot give processes host names of their own: {os.strerror(ctypes.get_errno())}")
    socket.sethostname(name)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the name has no address
