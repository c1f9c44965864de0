"""`megasdc launch --replicas N`: the replicas of Local-SGD, each a launch of its own, and the meeting that leads them.

Each replica is a process of `megasdc launch` with a folder `replica_K` in the run folder, and with the ranks, or with
its part of the hosts, that a single launch would have. What they print is shown with the replica's name before it.
A replica that was killed or hangs does not stop the others: it is started again, and returns at a later round.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from megasdc.common.durable import LineFile
from megasdc.common.errors import ConfigError, HangError, LaunchError
from megasdc.common.wire import own_address_towards
from megasdc.config.load import load_config
from megasdc.config.local_sgd import AUTO
from megasdc.config.sections import MegasdcSection
from megasdc.localsgd.meeting import MeetingServer
from megasdc.localsgd.round_clock import RoundWindow
from megasdc.localsgd.rounds import ROUNDS_FILE, Meeting, Round, read_rounds
from megasdc.ops.launch.environment import stop_grace_s
from megasdc.ops.launch.hosts import place_on_hosts, read_hostfile
from megasdc.ops.launch.request import DEFAULT_SCRIPT, LaunchRequest
from megasdc.ops.launch.supervision import print_front_message
from megasdc.parallel.local_ranks import LocalMeeting
from megasdc.parallel.rendezvous import (
    LOOPBACK,
    MEETING_VARIABLE,
    ROUNDS_VARIABLE,
    TOGETHER_VARIABLE,
    launch_secret,
)

RETURNS = 3
"""Number of times that a replica is started again."""
STOP_S = 60.0
"""Seconds that launches of replicas have to end after their ranks' time to save, which they wait for, is over."""
_POLL_S = 0.2
DEVICES = Path("/dev")
"""Where each GPU has a file."""


@dataclass(frozen=True)
class ReplicaEnd:
    """How a replica has ended: its exit code, its run folder, and how many times it was started."""

    replica: int
    exit_code: int
    run_dir: str
    starts: int


@dataclass(frozen=True)
class ReplicasResult:
    """How a launch of replicas has ended.

    ``exit_code``: 0 if all replicas are done, else that of the first to end otherwise; ``rounds``: number of the last
    round that was agreed on; ``incomplete``: rounds of this launch that were made without some replica.
    """

    exit_code: int
    run_dir: str
    rounds: int
    incomplete: int
    replicas: tuple[ReplicaEnd, ...]

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class _Replica:
    """A process of `megasdc launch`, and what it prints."""

    def __init__(self, number: int, command: Sequence[str], environment: dict[str, str], run_dir: Path) -> None:
        self.number, self.run_dir, self.starts = number, run_dir, 0
        self._command, self._environment = list(command), environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, for the first time or again."""
        self.starts += 1
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a signal of the terminal goes to this process, which passes it on
        )
        assert self.process.stdout is not None, "it is a pipe"
        threading.Thread(target=self._show, args=(self.process.stdout,), daemon=True).start()

    def _show(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                print(f"replica {self.number}: {text}", file=sys.stderr, flush=True)


def launch_replicas(request: LaunchRequest, replicas: int, *, dry_run: bool = False) -> ReplicasResult:
    """Start all replicas, lead them through their rounds, and wait until they have ended.

    Args:
        replicas: number of replicas, at least 2.
        dry_run: only check each of them.

    Raises:
        ConfigError: the configuration is wrong.
        LaunchError: the hosts cannot be divided among the replicas.
        SystemExit: this process was told to stop; the replicas have saved and ended.
    """
    if request.config_path is None:
        raise ConfigError("--replicas needs a configuration")
    sections = load_config(request.config_path, request.overrides).megasdc
    section, folder = sections.local_sgd, Path(sections.logging.run_dir)
    if section.replicas not in (None, replicas):
        raise ConfigError(
            f"megasdc.local_sgd.replicas: got {section.replicas}, and --replicas {replicas}; give one of them"
        )
    parts = _divide(request, replicas)
    devices = devices_of_replicas(request, replicas, share=sections.parallel.share_devices)
    together = LocalMeeting()
    os.environ[MEETING_VARIABLE] = str(together.folder)
    secret = launch_secret()
    del os.environ[MEETING_VARIABLE]
    assert secret is not None, "the folder has one"
    folder.mkdir(parents=True, exist_ok=True)
    rounds = None if dry_run else LineFile(folder / ROUNDS_FILE)
    made: list[Round] = []

    def record(one: Round) -> None:
        made.append(one)
        if rounds is not None:
            rounds.write(json.dumps(one.as_dict()) + "\n")
        if one.left_out or one.absent:
            reasons = [f"replica {replica}: {reason}" for replica, reason in one.left_out.items()]
            reasons += [f"replica {replica} is late or not there" for replica in one.absent]
            print_front_message(f"round {one.round} goes on with replicas {list(one.members)}; {'; '.join(reasons)}")

    hosts = [] if request.hostfile is None else list(read_hostfile(request.hostfile))
    address = own_address_towards(*hosts) if hosts else LOOPBACK
    replayed = {} if section.replay_rounds is None else read_rounds(section.replay_rounds)
    chooses = section.threshold == AUTO and not replayed
    window = RoundWindow(section.window_rounds, section.max_drop_rate) if chooses else None
    meeting = Meeting(replicas, section.deadline_s, record, window=window, replayed=replayed)
    server = MeetingServer(meeting, replicas, address, secret)
    environment = {
        **os.environ,
        ROUNDS_VARIABLE: f"{server.address}:{server.port}",
        TOGETHER_VARIABLE: str(together.folder),
    }
    every = []
    for number, part in enumerate(parts):
        command = command_of_replica(part, number, replicas, sections, dry_run=dry_run)
        every.append(_Replica(number, command, environment | devices[number], folder / f"replica_{number}"))
    try:
        ends = _run(every, server)
    finally:
        server.close()
        if rounds is not None:
            rounds.close()
        together.close()
    code = next((one.exit_code for one in ends if one.exit_code), 0)
    by_number = tuple(sorted(ends, key=lambda one: one.replica))
    incomplete = sum(len(one.members) < replicas for one in made)
    return ReplicasResult(code, str(folder), made[-1].round if made else 0, incomplete, by_number)


def _divide(request: LaunchRequest, replicas: int) -> list[LaunchRequest]:
    """A request for each replica, with its part of the hosts.

    Raises:
        LaunchError: the hosts cannot be divided.
    """
    if request.hostfile is None:
        return [request] * replicas
    pool = read_hostfile(request.hostfile)
    placement = place_on_hosts(pool, include=request.include, exclude=request.exclude, num_gpus=request.num_gpus)
    hosts = placement.hosts
    if len(hosts) % replicas:
        raise LaunchError(
            f"{len(hosts)} hosts ({', '.join(hosts)}) cannot be divided among {replicas} replicas, each of which needs "
            "equally many; use another number of either, or choose hosts with --include"
        )
    size = len(hosts) // replicas
    places = [f"{host}:{','.join(map(str, placement.slots[host]))}" for host in hosts]
    return [
        replace(request, include="@".join(places[first : first + size]), exclude="", num_gpus=None)
        for first in range(0, len(hosts), size)
    ]


def devices_of_replicas(request: LaunchRequest, replicas: int, *, share: bool) -> list[dict[str, str]]:
    """Variables of each replica's environment that say which GPUs of this host are its own, on a host with GPUs.

    Args:
        share: whether ranks may share GPUs; replicas then see all of them, where there are too few.

    Raises:
        LaunchError: there are fewer GPUs than ranks of all replicas.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = list(map(str, range(len(list(DEVICES.glob("nvidia[0-9]*"))))))
    if visible is not None:
        devices = list(filter(None, visible.split(",")))
    if request.hostfile is not None or not devices or os.environ.get("DS_ACCELERATOR") == "cpu":
        return [{} for _ in range(replicas)]
    ranks = len(devices) // replicas if request.num_gpus is None else request.num_gpus
    if 0 < ranks * replicas <= len(devices):
        parts = [devices[number * ranks :][:ranks] for number in range(replicas)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]
    if share:
        return [{} for _ in range(replicas)]
    raise LaunchError(
        f"{replicas} replicas of {request.num_gpus or 1} ranks need a GPU each, and {len(devices)} "
        f"{'are' if len(devices) != 1 else 'is'} here; start fewer, or let ranks share them with "
        "megasdc.parallel.share_devices=true"
    )


def command_of_replica(
    request: LaunchRequest, number: int, replicas: int, sections: MegasdcSection, *, dry_run: bool
) -> list[str]:
    """Command line of a replica's launch, which has folders of its own in those of the configuration."""
    own, folder = f"replica_{number}", sections.checkpoint.folder
    sets = (
        *request.overrides,
        f"megasdc.local_sgd.replicas={replicas}",
        f"megasdc.local_sgd.replica={number}",
        f"megasdc.logging.run_dir={Path(sections.logging.run_dir) / own}",
        *([] if folder is None else [f"megasdc.checkpoint.folder={Path(folder) / own}"]),
    )
    words = [sys.executable, "-m", "megasdc", "launch", "--config", str(request.config_path)]
    words += ["--hostfile", str(request.hostfile)] if request.hostfile is not None else []
    words += ["--num-ranks", str(request.num_gpus)] if request.num_gpus is not None else []
    words += ["--include", request.include] if request.include else []
    words += ["--exclude", request.exclude] if request.exclude else []
    words += ["--launcher", request.backend]
    words += ["--script", str(request.script)] if request.script != DEFAULT_SCRIPT else []
    words += [word for one in sets for word in ("--set", one)]
    words += [word for one in request.allow_changed for word in ("--allow-changed", one)]
    words += ["--dry-run"] if dry_run else []
    return [*words, *(["--", *request.launcher_args] if request.launcher_args else [])]


def _run(every: Sequence[_Replica], server: MeetingServer) -> tuple[ReplicaEnd, ...]:
    """Run all replicas to their ends, in whose order they are returned.

    One that has trained, and was killed or hangs, is started again; not where no other goes on.
    """
    ends: dict[int, ReplicaEnd] = {}
    try:
        for one in every:
            one.start()
        while len(ends) < len(every):
            time.sleep(_POLL_S)
            for one in every:
                assert one.process is not None, "it was started"
                if one.number in ends or (code := one.process.poll()) is None:
                    continue
                lost = code in (LaunchError.exit_code, HangError.exit_code) or code < 0
                if lost and one.number in server.joined and one.starts <= RETURNS and len(ends) < len(every) - 1:
                    print_front_message(f"replica {one.number} was lost (exit code {code}), and is started again")
                    one.start()
                    continue
                ends[one.number] = ReplicaEnd(one.number, code, str(one.run_dir), one.starts)
                server.has_ended(one.number)
                if code and not (server.has_begun or server.is_stopping):
                    print_front_message(f"replica {one.number} has not come to train (exit code {code}): all end")
                    _stop(every, server, signal.SIGTERM)
    except BaseException as error:  # told to stop
        print_front_message(f"the replicas save and end; to go on: {shlex.join(['megasdc', *sys.argv[1:]])}")
        _stop(every, server, signal.SIGTERM if not isinstance(error, KeyboardInterrupt) else signal.SIGINT)
        raise
    return tuple(ends.values())


def _stop(every: Sequence[_Replica], server: MeetingServer, number: int) -> None:
    """Have all replicas save and end, and wait for that."""
    server.stop()
    running = [one.process for one in every if one.process is not None and one.process.poll() is None]
    for process in running:
        process.send_signal(number)
    deadline = time.monotonic() + stop_grace_s(os.environ) + STOP_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def describe(result: ReplicasResult) -> str:
    """The result as text."""
    ends = ", ".join(f"replica {one.replica} exit code {one.exit_code}" for one in result.replicas if one.exit_code)
    without = f", {result.incomplete} of this launch without all replicas" if result.incomplete else ""
    return f"{result.run_dir}: {result.rounds} rounds{without}; {ends or 'all replicas are done'}"
