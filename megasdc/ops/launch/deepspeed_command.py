"""Reads a command line of DeepSpeed's launcher: what it would start becomes a request for a launch."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megasdc.common.errors import LaunchError
from megasdc.config.guard import GuardSettings
from megasdc.config.sections import OFF
from megasdc.ops.launch.hosts import read_hostfile
from megasdc.ops.launch.request import LaunchRequest, UserProgram

DEFAULT_HOSTFILE = Path("/job/hostfile")
"""DeepSpeed's own: used where it exists and no other is named (``deepspeed/launcher/runner.py``, 0.19)."""
EXAMPLE = "megasdc run -- deepspeed --num_gpus 8 train.py --my-option 1"
VALUED = (
    *("--master_port", "--master_addr", "--launcher_args", "--enable_each_rank_log", "--bind_core_list", "--ssh_port"),
    *("--venv_script", "--log_level"),
)
FLAGS = ("--no_local_rank", "--no_ssh_check", "--force_multi", "--bind_cores_to_rank", "--quiet", "-q")
"""Options with and without a value that DeepSpeed's launcher gets as they are."""
REFUSED = {
    "--no_python": "ranks are Python programs, whose end is recorded in their own process",
    "--no_ssh": "all hosts are checked and heard from here; start `deepspeed` without megasdc, or give --hostfile",
    "--node_rank": "see --no_ssh",
    "--autotuning": "tune first, with `deepspeed` alone",
    "--save_pid": "DeepSpeed 0.19.8 fails with it where hosts share /tmp; the launch id finds all processes",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"deepspeed: {message}; as in `{EXAMPLE}`")


@dataclass(frozen=True)
class DeepSpeedCommand:
    """What a command line of DeepSpeed's launcher asks for; see ``LaunchRequest`` and ``UserProgram``.

    Attributes:
        num_hosts: the first so many of the hostfile; None: all.
        script: path of a Python script, or name of a module.
        protect: word of `megasdc run` itself; None: none.
    """

    hostfile: Path | None
    num_hosts: int | None
    num_gpus: int | None
    include: str
    exclude: str
    backend: str
    launcher_args: tuple[str, ...]
    script: str
    is_module: bool
    arguments: tuple[str, ...]
    protect: str | None = None

    @property
    def name(self) -> str:
        """Of the script or the module, without folder and ending."""
        return self.script.rpartition(".")[2] if self.is_module else Path(self.script).stem

    def request(self, run_dir: str, settings: GuardSettings) -> LaunchRequest:
        """The launch that it asks for; ``run_dir``: folder of the run, whatever the settings say.

        Raises:
            LaunchError: the number of hosts contradicts other options, or the hostfile is wrong.
        """
        include, health = self.include, settings.health
        if self.num_hosts is not None and self.hostfile is not None:
            if include or self.exclude:
                raise LaunchError("deepspeed --num_nodes: it cannot be given with --include or --exclude")
            include = "@".join(itertools.islice(read_hostfile(self.hostfile), self.num_hosts))
        return LaunchRequest(
            None,
            hostfile=self.hostfile,
            num_gpus=self.num_gpus,
            include=include,
            exclude=self.exclude,
            backend=self.backend,
            launcher_args=self.launcher_args,
            program=UserProgram(
                *(self.script, self.is_module, self.arguments, run_dir),
                *(health.enabled, health.hang_floor_s, health.slow_floor_s, health.hang_factor),
                alert_command=tuple(health.alert_command),
                wait_for_room_s=settings.logging.wait_for_room_s,
                protect=self.protect,
                guard=None if settings.protect == OFF else settings.model_dump(mode="json", exclude_unset=True),
            ),
        )


def read_command(words: Sequence[str]) -> DeepSpeedCommand:
    """Read a command line: ``deepspeed``, its options, the script, and the script's arguments.

    Raises:
        LaunchError: it is no such command, or has options that are refused.
    """
    if not words or Path(words[0]).name not in ("deepspeed", "ds"):
        raise LaunchError(f"got {words[0] if words else 'no command'!r}, need deepspeed's command line: `{EXAMPLE}`")
    given = _parsed(words[1:])
    default = DEFAULT_HOSTFILE if DEFAULT_HOSTFILE.is_file() else None
    return DeepSpeedCommand(
        hostfile=Path(given.hostfile) if given.hostfile else default,
        num_hosts=given.num_nodes if given.num_nodes > 0 else None,
        num_gpus=given.num_gpus if given.num_gpus > 0 else None,
        include=given.include,
        exclude=given.exclude,
        backend=given.launcher.lower(),
        launcher_args=tuple(given.passed),
        script=given.script,
        is_module=given.module,
        arguments=tuple(given.arguments),
    )


def _parsed(words: Sequence[str]) -> Any:
    """Options, script, and its arguments; ``passed`` are options that DeepSpeed's launcher gets as they are."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-H", "--hostfile", default="")
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    parser.add_argument("--launcher", default="pdsh")
    parser.add_argument("--module", action="store_true")
    passed: list[str] = []
    for name in VALUED:
        parser.add_argument(name, action=_Keep, passed=passed)
    for name in FLAGS:
        parser.add_argument(name, action=_Keep, passed=passed, nargs=0)
    for name in REFUSED:
        parser.add_argument(name, action=_Refuse, nargs="?")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    found = parser.parse_args(list(words))
    found.passed = passed
    return found


class _Keep(argparse.Action):
    """Keeps an option with its value in a list."""

    def __init__(self, *args: Any, passed: list[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._passed = passed

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        self._passed += [str(option), *([values] if isinstance(values, str) else [])]


class _Refuse(argparse.Action):
    """Refuses an option, with the reason."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        raise LaunchError(f"deepspeed {option}: {REFUSED[str(option)]}")
