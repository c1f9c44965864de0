"""Command line that starts the ranks: DeepSpeed's launcher with one encoded argument for every rank.

DeepSpeed's runner, which reads the hostfile and reaches hosts, and on each host its launch.py, which starts the ranks
there. On a single local host launch.py is started directly: the runner would only add seconds of imports.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megasdc.common.errors import LaunchError
from megasdc.ops.launch.environment import SAFE_FOR_SHELL
from megasdc.ops.launch.hosts import LOCAL_HOST, Placement
from megasdc.ops.launch.own_lines import folder_option
from megasdc.ops.launch.rank import RankCommand
from megasdc.ops.launch.request import LaunchRequest

NODE_MODULE = "megasdc.ops.launch.node"
RANK_MODULE = "megasdc.ops.launch.rank"
GRACE_OPTION = "--stop_grace_s="
DEFAULT_MASTER_PORT = 29500
LOCAL_ADDRESS = "127.0.0.1"
"""Master address for a single local host, whatever ``--master_addr`` is: DeepSpeed's runner sets it too."""
BACKENDS = ("pdsh", "openmpi", "mpich", "impi", "slurm", "mvapich")
BACKENDS_WITH_FILTERS = ("pdsh", "slurm")
BACKEND_PROGRAM = {
    "pdsh": "pdsh",
    "openmpi": "mpirun",
    "mpich": "mpirun",
    "impi": "mpirun",
    "slurm": "srun",
    "mvapich": "mpirun",
}
OF_PROGRAMS = ("--no_local_rank",)
"""Options below that a program which is not megasdc's own may have."""
FRONT_OPTIONS = {
    "--hostfile": "give --hostfile to megasdc launch itself",
    "-H": "give --hostfile to megasdc launch itself",
    "--include": "give --include to megasdc launch itself",
    "-i": "give --include to megasdc launch itself",
    "--exclude": "give --exclude to megasdc launch itself",
    "-e": "give --exclude to megasdc launch itself",
    "--num_gpus": "give --num-ranks to megasdc launch itself",
    "--num_accelerators": "give --num-ranks to megasdc launch itself",
    "--num_nodes": "name the hosts with --include",
    "--launcher": "give --launcher to megasdc launch itself",
    "--no_ssh": "use launch/no_ssh.sh, once on every host",
    "--node_rank": "use launch/no_ssh.sh, once on every host",
    "--module": "megasdc launch starts ranks through a module of its own",
    "--no_python": "ranks are Python processes",
    "--no_local_rank": "remove it; the training script accepts --local_rank",
    "--save_pid": "DeepSpeed 0.19.8 fails with it where hosts share /tmp",
    "--autotuning": "megasdc has no autotuning",
}


@dataclass(frozen=True)
class LauncherOptions:
    """Extra options of DeepSpeed's launcher that the front needs; empty or None if not given.

    ``others`` are words that only DeepSpeed's runner knows.
    """

    master_addr: str
    master_port: int | None
    ssh_port: int | None
    others: tuple[str, ...] = ()


def parse_launcher_args(arguments: Sequence[str], allowed: Sequence[str] = ()) -> LauncherOptions:
    """Read the extra options, and refuse those that the front sets itself or a remote shell would interpret.

    Args:
        allowed: options that are not refused nevertheless.

    Returns the options that the front needs too.

    Raises:
        LaunchError: options are invalid; lists every problem.
    """
    problems = [
        f"launcher option {word}: {FRONT_OPTIONS[word.split('=')[0]]}"
        for word in arguments
        if word.split("=")[0] in FRONT_OPTIONS and word not in allowed
    ]
    for before, word in zip(["", *arguments], arguments, strict=False):
        # --launcher_args is split on this host and goes to pdsh, srun or mpirun, not to a remote shell.
        if not SAFE_FOR_SHELL.fullmatch(word) and before != "--launcher_args" and "--launcher_args=" not in word:
            problems.append(f"launcher option `{word}` holds characters that a remote shell would interpret")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--master_addr", default="")
    parser.add_argument("--master_port", type=int)
    parser.add_argument("--ssh_port", type=int)
    try:
        known, others = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        problems.append(f"launcher option {error}")
    if problems:
        raise LaunchError("\n".join(problems))
    return LauncherOptions(known.master_addr, known.master_port, known.ssh_port, tuple(others))


def backend_problems(backend: str, filtered: bool) -> list[str]:
    """Problems for which DeepSpeed would refuse a backend; ``filtered``: only part of the hostfile is used."""
    if backend not in BACKENDS:
        return [f"--launcher {backend}: DeepSpeed has {', '.join(BACKENDS)}"]
    program = BACKEND_PROGRAM[backend]
    if shutil.which(program) is None:
        return [f"--launcher {backend}: {program} is not on PATH; install it on this host, or choose another backend"]
    if filtered and backend not in BACKENDS_WITH_FILTERS:
        return [
            f"--launcher {backend} takes neither --include nor --exclude nor --num-ranks; "
            "write a hostfile with the hosts that take part"
        ]
    return []


def node_words(grace_s: float, logs: str | None) -> list[str]:
    """Return the module that runs launch.py on a host, with its options; ``logs`` None: its log goes to the console."""
    return [NODE_MODULE, f"{GRACE_OPTION}{grace_s:g}", *([folder_option(logs)] if logs else [])]


def node_command(
    placement: Placement, rank: RankCommand, launch_id: str, *, grace_s: float, logs: str, master_port: int
) -> list[str]:
    """Return the command that starts all ranks on this host, as DeepSpeed's runner would build it.

    ``launch_id`` identifies this launch on the command lines; ``logs``: folder for the log of DeepSpeed's launcher.
    """
    world = base64.urlsafe_b64encode(json.dumps(placement.slots).encode()).decode()
    command = [sys.executable, "-u", "-m", *node_words(grace_s, logs), f"--world_info={world}"]
    command += ["--master_addr", LOCAL_ADDRESS, "--master_port", str(master_port)]
    return [*command, "--module", RANK_MODULE, launch_id, rank.encode()]


def runner_command(
    placement: Placement,
    rank: RankCommand,
    launch_id: str,
    request: LaunchRequest,
    *,
    master_addr: str | None,
    master_port: int | None = None,
) -> list[str]:
    """Return the command that starts all ranks.

    ``launch_id`` identifies this launch on the command lines of all hosts; ``master_addr`` and ``master_port`` None:
    left to DeepSpeed or to ``launcher_args``.
    """
    command = [sys.executable, "-u", "-m", "megasdc.ops.launch.runner"]
    if request.hostfile is None:
        slots = placement.slots[LOCAL_HOST]
        # A path that cannot exist: the default, /job/hostfile, would silently be used if it exists.
        command += ["--hostfile", "/dev/null/none"]
        if slots == list(range(len(slots))):
            command += ["--num_gpus", str(len(slots))]
        else:
            command += ["--include", f"localhost:{','.join(map(str, slots))}"]
    else:
        command += ["--hostfile", str(request.hostfile), "--launcher", request.backend]
        command += ["--include", request.include] if request.include else []
        command += ["--exclude", request.exclude] if request.exclude else []
        command += ["--num_gpus", str(request.num_gpus)] if request.num_gpus is not None else []
        # With one host DeepSpeed would not use SSH but start the ranks on this host.
        command += ["--force_multi"] if len(placement.hosts) == 1 else []
    command += ["--master_addr", master_addr] if master_addr else []
    command += ["--master_port", str(master_port)] if master_port else []
    if request.backend == "slurm":
        # srun needs no SSH, which nodes often refuse. The backend has no --module; no shell reads its command, so a
        # path is safe.
        words = ["--no_ssh_check", *request.launcher_args, str(Path(__file__).with_name("rank.py"))]
    else:
        words = [*request.launcher_args, "--module", RANK_MODULE]
    return [*command, *words, launch_id, rank.encode()]
