"""`megasdc launch --replicas N`: the replicas of Local-SGD, each a launch of its own, and the meeting that leads them.

Each replica is a process of `megasdc launch` with a folder `replica_K` in the run folder, and with the ranks, or with
its part of the hosts, that a single launch would have. What they print is shown with the replica's name before it.
A replica that was killed or hangs does not stop the others: it is started again, and returns at a later round.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from megasdc.checkpoint.files import MANIFEST_FILE, SHARED_STATE_FILE, list_steps, step_folder
from megasdc.common import run_lock
from megasdc.common.durable import LineFile, parse_json
from megasdc.common.errors import CheckpointError, ConfigError, HangError, LaunchError, MegasdcError, StorageError
from megasdc.common.origin import CONFIG_FILE
from megasdc.common.wire import own_address_towards
from megasdc.common.words import number_of
from megasdc.config.changes import explain_refusal, find_changes, may_change
from megasdc.config.load import load_config
from megasdc.config.local_sgd import AUTO, ROUNDS_FILE
from megasdc.config.sections import MegasdcSection
from megasdc.localsgd.meeting import MeetingServer
from megasdc.localsgd.round_clock import RoundWindow
from megasdc.localsgd.rounds import Meeting, Round, read_rounds
from megasdc.ops.launch.environment import stop_grace_s
from megasdc.ops.launch.front import check_launch, describe_placement
from megasdc.ops.launch.hosts import place_on_hosts, read_hostfile
from megasdc.ops.launch.plan import LaunchPlan
from megasdc.ops.launch.process import FORWARDED
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

    ``exit_code``: 0 if all replicas are done, or have saved where they were told to stop, else that of the first to end
    otherwise; ``rounds``: number of the last round that was agreed on; ``incomplete``: rounds of this launch that were
    made without some replica; ``stopped_by``: signal by which it was told to stop, None: it was not.
    """

    exit_code: int
    run_dir: str
    rounds: int
    incomplete: int
    replicas: tuple[ReplicaEnd, ...]
    stopped_by: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class _Replica:
    """A process of `megasdc launch`, and what it prints."""

    def __init__(self, number: int, command: Sequence[str], environment: dict[str, str], run_dir: Path) -> None:
        self.number, self.run_dir, self.starts = number, run_dir, 0
        self.code: int | None = None
        """Exit code of its last start, once it has ended for good."""
        self.ended_at = 0.0
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

    def poll(self) -> int | None:
        """Exit code of its last start; None: that runs."""
        assert self.process is not None, "it was started"
        self.ended_at = time.monotonic()
        return self.process.poll()

    def _show(self, stream: IO[bytes]) -> None:
        for line in stream:  # to its end also where the terminal has gone, since the replica would wait else
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                with suppress(OSError):
                    print(f"replica {self.number}: {text}", file=sys.stderr, flush=True)


def launch_replicas(request: LaunchRequest, replicas: int, *, dry_run: bool = False) -> ReplicasResult:
    """Start all replicas, lead them through their rounds, and wait until they have ended.

    What can be known of a start is checked here, for all replicas, before anything is written or started.

    Args:
        replicas: number of replicas, at least 2.
        dry_run: only check, and show what would be run.

    Raises:
        ConfigError: the configuration is wrong.
        CheckpointError: the replicas' checkpoints were saved with another configuration.
        LaunchError: the hosts cannot be divided among the replicas, or do not allow a start; or another launch uses the
            folder of the run.
        StorageError: folders cannot be written to, and nothing else is wrong.
        SystemExit: this process was told to stop before the replicas were started.
    """
    if request.config_path is None:
        raise ConfigError("--replicas needs a configuration")
    sections = load_config(request.config_path, request.overrides).megasdc
    section, folder = sections.local_sgd, Path(sections.logging.run_dir)
    if section.replicas not in (None, replicas):
        raise ConfigError(
            f"megasdc.local_sgd.replicas: got {section.replicas}, and --replicas {replicas}; give one of them"
        )
    replayed = {} if section.replay_rounds is None else _rounds_to_replay(section.replay_rounds, replicas)
    if (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"megasdc.logging.run_dir: {folder} holds a run of its own, which replicas would not go on from; name "
            "another folder"
        )
    parts = _divide(request, replicas)
    devices = devices_of_replicas(request, replicas, share=sections.parallel.share_devices)
    requests = [request_of_replica(part, number, replicas, sections) for number, part in enumerate(parts)]
    plans = _check(requests)
    run_dirs = [folder / f"replica_{number}" for number in range(replicas)]
    if dry_run:
        for number, plan in enumerate(plans):
            print_front_message(f"replica {number}: {describe_placement(plan.placement)}")
            print_front_message(f"replica {number} would run: {shlex.join(plan.shown_command)}")
        ends = tuple(ReplicaEnd(number, 0, str(run_dir), 0) for number, run_dir in enumerate(run_dirs))
        return ReplicasResult(0, str(folder), 0, 0, ends)
    chooses = section.threshold == AUTO and not replayed
    window = RoundWindow(section.window_rounds, section.max_drop_rate) if chooses else None
    made: list[Round] = []
    with _using(folder) as rounds, _meeting_place() as (place, secret):

        def record(one: Round) -> None:
            made.append(one)
            rounds.write(json.dumps(one.as_dict()) + "\n")
            _tell_incomplete(one)

        earlier = _earlier_rounds(folder)
        meeting = Meeting(replicas, section.deadline_s, record, window=window, replayed=replayed, earlier=earlier)
        hosts = [] if request.hostfile is None else list(read_hostfile(request.hostfile))
        address = own_address_towards(*hosts) if hosts else LOOPBACK
        server = MeetingServer(meeting, replicas, address, secret)
        environment = {**os.environ, ROUNDS_VARIABLE: f"{server.address}:{server.port}", TOGETHER_VARIABLE: str(place)}
        every = [
            _Replica(number, command_of_replica(requests[number]), environment | devices[number], run_dir)
            for number, run_dir in enumerate(run_dirs)
        ]
        try:
            stopped_by = _run(every, server)
        finally:
            server.close()
    by_number = tuple(ReplicaEnd(one.number, one.code or 0, str(one.run_dir), one.starts) for one in every)
    incomplete = sum(len(one.members) < replicas for one in made)
    code = _exit_code(every, stopped_by)
    return ReplicasResult(code, str(folder), made[-1].round if made else 0, incomplete, by_number, stopped_by)


def _rounds_to_replay(path: str, replicas: int) -> dict[int, Round]:
    """Rounds of a run of as many replicas.

    Raises:
        ConfigError: the file cannot be read, or is of another number: who is not there would be waited for.
    """
    rounds = read_rounds(path)
    seen = {one for made in rounds.values() for one in (*made.members, *made.left_out, *made.absent)}
    if rounds and seen != set(range(replicas)):
        raise ConfigError(
            f"megasdc.local_sgd.replay_rounds: {path} is of {number_of(max(seen) + 1, 'replica')}, and --replicas "
            f"{replicas}; name the rounds.jsonl of a run of as many."
        )
    return rounds


def _earlier_rounds(folder: Path) -> list[Round]:
    """Rounds of earlier starts, in order; where they cannot be read, that is printed."""
    try:
        return [one for _, one in sorted(read_rounds(folder / ROUNDS_FILE).items())]
    except ConfigError as error:
        print_front_message(f"norms and times of the rounds before are not known: {error}")
        return []


def _tell_incomplete(one: Round) -> None:
    """Print which replicas a round was made without, and why."""
    if one.left_out or one.absent:
        reasons = [f"replica {replica}: {reason}" for replica, reason in one.left_out.items()]
        reasons += [f"replica {replica} is late or not there" for replica in one.absent]
        print_front_message(f"round {one.round} goes on with replicas {list(one.members)}; {'; '.join(reasons)}")


def _check(requests: Sequence[LaunchRequest]) -> list[LaunchPlan]:
    """Check the launches of all replicas; a problem that several have is told once.

    Raises:
        ConfigError, CheckpointError, LaunchError, StorageError: see ``launch_replicas``.
    """
    plans, errors = list[LaunchPlan](), list[MegasdcError]()
    for request in requests:
        try:
            plans.append(check_launch(request))
        except ConfigError:  # the same of all
            raise
        except MegasdcError as error:
            errors.append(error)
    if errors:
        lines = dict.fromkeys(line for error in errors for line in str(error).splitlines())
        raise type(errors[0])("\n".join(lines))
    saved = [_newest_step(request, plan) for request, plan in zip(requests, plans, strict=True)]
    if any(saved) and requests[0].hostfile is None:  # else they may be on other hosts
        for number, step in enumerate(saved):
            if not step:
                print_front_message(
                    f"replica {number} has no checkpoint here, and others have one of step {max(saved)}: it takes over "
                    "their weights, and begins anew with its samples and moments"
                )
    return plans


def _newest_step(request: LaunchRequest, plan: LaunchPlan) -> int:
    """Step of a replica's newest checkpoint, as far as it is here; 0: none.

    A configuration with which it cannot be gone on from is refused. One that cannot be read, or that another layout has
    saved, is left to the ranks, which look at it again.

    Raises:
        CheckpointError: fields were changed that must not be.
    """
    assert request.config_path is not None, "a launch of replicas has one"
    config = load_config(request.config_path, request.overrides, request.allow_changed)
    saved = Path(config.megasdc.checkpoint.folder or plan.run_dir / "checkpoints")
    for step in reversed(list_steps(saved)):
        folder = saved / step_folder(step)
        try:
            layout = parse_json((folder / MANIFEST_FILE).read_text(encoding="utf-8"))["layout"]
            before = parse_json((folder / SHARED_STATE_FILE).read_text(encoding="utf-8"))["config"]
            parallel, ranks = config.megasdc.parallel, len(plan.placement.host_of_rank)
            data = ranks // (parallel.tensor * parallel.pipeline)
            if (layout["tensor"], layout["pipeline"], layout["data"]) != (parallel.tensor, parallel.pipeline, data):
                return step
            changes = find_changes(before, config, data, data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # of a save that was cut short, or damaged
            continue
        if refused := [one for one in changes if not may_change(one, request.allow_changed, universal=False)]:
            raise CheckpointError(f"{folder} cannot be loaded, nothing was started: {explain_refusal(refused)}")
        return step
    return 0


@contextmanager
def _using(folder: Path) -> Iterator[LineFile]:
    """Hold the folder of the run, so that no other launch of replicas leads rounds there; yields the file of rounds.

    A launch of which nothing has come leaves nothing.

    Raises:
        LaunchError: another launch has it.
        StorageError: it cannot be written to.
    """
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    lock = rounds = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holder = run_lock.Holder.this_process(secrets.token_hex(8), None)
        lock = run_lock.acquire_lock(folder, holder, print_front_message)
        rounds = LineFile(folder / ROUNDS_FILE)
        yield rounds
    except OSError as error:
        if rounds is not None:
            raise
        remedy = "choose another megasdc.logging.run_dir"
        raise StorageError(f"{error.filename or folder} cannot be written to: {error.strerror}; {remedy}") from error
    finally:
        if rounds is not None:
            rounds.close()
        if lock is not None:
            _release(lock, folder, rounds)
        with suppress(OSError):  # it holds something
            for one in new:
                one.rmdir()


def _release(lock: run_lock.RunLock, folder: Path, rounds: LineFile | None) -> None:
    """Release the folder of the run, and remove what is empty where no replica has written anything."""
    if not any(folder.glob("replica_*")):
        if rounds is not None and rounds.is_new:
            rounds.path.unlink(missing_ok=True)
        (folder / run_lock.LOCK_FILE).unlink(missing_ok=True)
    lock.release()


@contextmanager
def _meeting_place() -> Iterator[tuple[Path, bytes]]:
    """Folder of this user alone with the secret by which replicas know each other, and the secret."""
    together = LocalMeeting()
    os.environ[MEETING_VARIABLE] = str(together.folder)
    secret = launch_secret()
    del os.environ[MEETING_VARIABLE]
    assert secret is not None, "the folder has one"
    try:
        yield together.folder, secret
    finally:
        together.close()


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
            f"{number_of(len(hosts), 'host')} ({', '.join(hosts)}) cannot be divided among {replicas} replicas, each "
            "of which needs equally many; use another number of either, or choose hosts with --include"
        )
    size = len(hosts) // replicas
    of_parts = [[placement.slots[host] for host in hosts[first : first + size]] for first in range(0, len(hosts), size)]
    ranks = [sum(map(len, part)) for part in of_parts]
    if len(set(ranks)) > 1:
        raise LaunchError(
            f"the replicas would have {', '.join(map(str, ranks))} ranks on their hosts, in the order of the hostfile, "
            "and exchange shards of one layout; give all as many, with --num-ranks or other hosts"
        )
    if unused := [host for host in pool if host not in placement.slots]:
        print_front_message(f"not used: {', '.join(unused)}")
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


def request_of_replica(request: LaunchRequest, number: int, replicas: int, sections: MegasdcSection) -> LaunchRequest:
    """A replica's launch, which has folders of its own in those of the configuration."""
    own, folder = f"replica_{number}", sections.checkpoint.folder
    sets = (
        f"megasdc.local_sgd.replicas={replicas}",
        f"megasdc.local_sgd.replica={number}",
        f"megasdc.logging.run_dir={Path(sections.logging.run_dir) / own}",
        *([] if folder is None else [f"megasdc.checkpoint.folder={Path(folder) / own}"]),
    )
    return replace(request, overrides=(*request.overrides, *sets))


def command_of_replica(request: LaunchRequest) -> list[str]:
    """Command line of a launch."""
    words = [sys.executable, "-m", "megasdc", "launch", "--config", str(request.config_path)]
    words += ["--hostfile", str(request.hostfile)] if request.hostfile is not None else []
    words += ["--num-ranks", str(request.num_gpus)] if request.num_gpus is not None else []
    words += ["--include", request.include] if request.include else []
    words += ["--exclude", request.exclude] if request.exclude else []
    words += ["--launcher", request.backend]
    words += ["--script", str(request.script)] if request.script != DEFAULT_SCRIPT else []
    words += [word for one in request.overrides for word in ("--set", one)]
    words += [word for one in request.allow_changed for word in ("--allow-changed", one)]
    return [*words, *(["--", *request.launcher_args] if request.launcher_args else [])]


def _run(every: Sequence[_Replica], server: MeetingServer) -> int | None:
    """Run all replicas to their ends; returns the signal by which this process was told to stop them, None: none.

    One that has trained, and was killed or hangs, is started again; not where no other goes on.
    """
    with _noting_signals() as noted:
        passed_on, kill_at = 0, math.inf
        try:
            for one in every:
                one.start()
            while running := [one for one in every if one.code is None]:
                time.sleep(_POLL_S)
                if len(noted) > passed_on:
                    _pass_on(noted, every, server)
                    passed_on, kill_at = len(noted), time.monotonic() + stop_grace_s(os.environ) + STOP_S
                if time.monotonic() > kill_at:
                    _signal(running, signal.SIGKILL)
                for one in running:
                    if (code := one.poll()) is None:
                        continue
                    lost = code in (LaunchError.exit_code, HangError.exit_code) or code < 0
                    if (
                        lost
                        and one.number in server.joined
                        and one.starts <= RETURNS
                        and len(running) > 1
                        and not noted
                    ):
                        print_front_message(f"replica {one.number} was lost (exit code {code}), and is started again")
                        one.start()
                        continue
                    one.code = code
                    server.has_ended(one.number)
                    if code and not (server.has_begun or server.is_stopping):
                        print_front_message(f"replica {one.number} has not come to train (exit code {code}): all end")
                        server.stop()
                        _signal(every, signal.SIGTERM)
                        kill_at = time.monotonic() + stop_grace_s(os.environ) + STOP_S
        except BaseException:
            server.stop()
            _signal(every, signal.SIGTERM)
            raise
    return noted[0] if noted else None


@contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """Note stop signals, those that a launch passes on, instead of ending; yields their numbers, the first at first.

    An ignored SIGHUP stays ignored, as ``nohup`` requires. A terminal that goes sends several: it counts once.
    """
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if not noted or number != signal.SIGHUP:
            noted.append(number)

    heard = [one for one in FORWARDED if one is not signal.SIGHUP or callable(signal.getsignal(one))]
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(noted: Sequence[int], every: Sequence[_Replica], server: MeetingServer) -> None:
    """Have all replicas save and end, or kill their ranks where they were told so before."""
    name = signal.Signals(noted[-1]).name
    if len(noted) == 1:
        way_on = shlex.join(["megasdc", *sys.argv[1:]])
        print_front_message(f"{name}: the replicas save and end, once more kills them; to go on: {way_on}")
    else:
        print_front_message(f"{name} again: killing the replicas")
    server.stop()
    _signal(every, signal.SIGTERM)


def _signal(every: Sequence[_Replica], number: int) -> None:
    for one in every:
        if one.process is not None and one.process.poll() is None:
            one.process.send_signal(number)


def _exit_code(every: Sequence[_Replica], stopped_by: int | None) -> int:
    """0 if all replicas are done, or have saved where they were told to stop; else that of the first otherwise."""
    codes = [one.code for one in sorted(every, key=lambda one: one.ended_at) if one.code]
    told = (128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL)
    own = [code for code in codes if stopped_by is None or code not in told]
    if own or stopped_by is None or not codes:
        return next(iter(own), 0)
    return 128 + stopped_by


def describe(result: ReplicasResult) -> str:
    """The result as text."""
    ends = ", ".join(f"replica {one.replica} exit code {one.exit_code}" for one in result.replicas if one.exit_code)
    without = f", {result.incomplete} of this launch without all replicas" if result.incomplete else ""
    done = "all replicas are done"
    if result.stopped_by is not None:
        done = f"stopped by {signal.Signals(result.stopped_by).name}, all replicas saved and are done"
    return f"{result.run_dir}: {result.rounds} rounds{without}; {ends or done}"
