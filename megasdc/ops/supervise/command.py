"""``megasdc supervise``: reads what is asked for, opens the journal, and supervises.

Standard error of a supervisor outlives the terminal: where that has gone, what is said goes on to a file.

With how many hosts a run can go on, and the settings that follow: whole replicas, and the same samples each step.

A journal that lost lines is completed, from the records of attempts beside it, and from the lines that are left. An
entry that its successors cannot do without is made again: the plan of an attempt from its hostfile, its end from its
result, a decision from the hosts and settings that the next attempt has. What none of these tells is not made up: an
attempt whose diagnosis is lost has ended in a kind of its own, and a test of a host is done again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any, TextIO

from megasdc.common import durable
from megasdc.common.durable import lacks_room
from megasdc.common.errors import ConfigError, LaunchError
from megasdc.config.checks import check_layout, settings_for
from megasdc.config.guard import GuardSettings
from megasdc.config.load import load_config
from megasdc.config.sections import SuperviseSection
from megasdc.ops.launch.command import OF_PROGRAMS, parse_launcher_args
from megasdc.ops.launch.deepspeed_command import DeepSpeedCommand
from megasdc.ops.launch.hosts import LOCAL_HOST, place_program_here, read_hostfile
from megasdc.ops.launch.request import DEFAULT_SCRIPT, LaunchRequest
from megasdc.ops.supervise.allocation import Allocation, ThisHost
from megasdc.ops.supervise.attempt_process import attempt_file, load_result
from megasdc.ops.supervise.diagnosis import LOST, SIGNALS, Diagnosis
from megasdc.ops.supervise.history import GROWING, HOSTS, NO_TURNS, SUSPECTED, TAKEN_OVER, JournalHistory
from megasdc.ops.supervise.host_reliability_log import HostReliabilityLog, judge_host
from megasdc.ops.supervise.host_tests import StressTests
from megasdc.ops.supervise.journal import FOLDER, Journal, JournalEntry
from megasdc.ops.supervise.launch_backend import LaunchBackend
from megasdc.ops.supervise.policy import Action, Decision, RestartLimits
from megasdc.ops.supervise.slurm import JOB_VARIABLE, SlurmJob
from megasdc.ops.supervise.supervise import Supervisor

_HOSTFILE = re.compile(r"attempt_(\d+)_(.+)\.hosts")
_TEXT = "the line of the journal that said it was damaged"


def complete(folder: Path, name: str, job: str, kept: Sequence[JournalEntry]) -> list[JournalEntry]:
    """The entries of whole lines, and those that had to be made again between and behind them.

    Args:
        folder: of the supervisor, with the records of attempts.
        name: of what is run.
        job: that the hosts belong to now.
        kept: entries of whole lines.
    """
    found = _Completed(folder, name, job)
    for entry in kept:
        found.add_entry(entry)
    found.plan_until(None, at=kept[-1].time if kept else 0.0)
    return found.entries


@dataclass(frozen=True)
class _Record:
    """What the hostfile of an attempt says; ``time``: when it was written, just after the attempt was planned."""

    launch_id: str
    slots: dict[str, int]
    time: float


class _Completed:
    """Entries in the order of turns; ``history``: what they tell."""

    def __init__(self, folder: Path, name: str, job: str) -> None:
        self._folder, self._name, self._job = folder, name, job
        self._records: dict[int, _Record] = {}
        for path in sorted(folder.glob("attempt_*.hosts"), key=lambda one: one.stat().st_mtime):
            if match := _HOSTFILE.fullmatch(path.name):
                with suppress(LaunchError):  # the record is damaged, too
                    self._records[int(match[1])] = _Record(match[2], read_hostfile(path), path.stat().st_mtime)
        self.entries: list[JournalEntry] = []
        self.history = JournalHistory()

    def add_entry(self, entry: JournalEntry) -> None:
        """Add an entry of the journal, and before it what it follows from; not one whose attempt is not known."""
        kind, at = entry.kind, entry.time
        if not self.history.stage and kind not in ("opened", *NO_TURNS):
            self._add("opened", at, config=self._name)
        if kind == "planned":
            self.plan_until(entry.fields["attempt"], at)
            self._decide_for(entry)
        needed = {"started": "planned", GROWING: "planned", "ended": "started", "decided": "ended"}.get(kind)
        if needed is not None and not self._bring_to(needed, at):
            return
        if kind in ("opened", "left", "finished") and self.history.stage in ("planned", "started"):
            self._bring_to("ended", at)
        self._append(entry)

    def plan_until(self, number: int | None, at: float) -> None:
        """Add attempts that have a record and no plan: all before a number, or all there are."""
        last = 0 if self.history.attempt is None else self.history.attempt.number
        since = self._records[last].time if last in self._records else 0.0  # older ones are of another journal
        for missing, record in sorted(self._records.items()):
            if missing > last and record.time >= since and (number is None or missing < number):
                self._plan(missing, at)
        if number is not None and self.history.stage in ("planned", "started"):
            self._bring_to("ended", at)

    def _bring_to(self, stage: str, at: float) -> bool:
        """Add the turns that lead to a stage of the next or the present attempt; whether that could be done."""
        order = ["planned", "started", "ended"]
        if self.history.stage not in order[: order.index(stage) + 1]:
            number = 1 if self.history.attempt is None else self.history.attempt.number + 1
            if number not in self._records:
                return False
            self._plan(number, at)
        if self.history.stage == stage:
            return True
        if self.history.stage == "planned" and stage != "planned":
            self._add("started", at, pid=0, ticks=0)
        if self.history.stage == "started" and stage == "ended":
            self._end(at)
        return self.history.stage == stage

    def _plan(self, number: int, at: float) -> None:
        if not self.history.stage:
            self._add("opened", at, config=self._name)
        if self.history.stage in ("planned", "started"):
            self._bring_to("ended", at)
        record = self._records[number]
        planned = {"attempt": number, "slots": record.slots, "launch_id": record.launch_id, "job": self._job}
        planned["skips_snapshots"] = self.history.skips_snapshots
        entry = JournalEntry(
            0, record.time, "planned", {**planned, "at_most": self.history.at_most, "skip": self.history.skip}
        )
        self._decide_for(entry)
        self._append(entry)

    def _end(self, at: float) -> None:
        attempt = self.history.attempt
        assert attempt is not None, "it was planned"
        result = load_result(attempt_file(self._folder, attempt.number, attempt.launch_id, "json"))
        code = None if result is None else result.exit_code
        step = self.history.failures[-1].diagnosis.step if self.history.failures else 0
        diagnosis = asdict(Diagnosis(LOST, (), step, _TEXT))
        self._add("ended", at, exit_code=code, diagnosis=diagnosis, trained=None)

    def _decide_for(self, planned: JournalEntry) -> None:
        """Add the decision that a plan shows, where that is lost: hosts that it does without, where it goes back to."""
        history = self.history
        if history.stage != "ended" or history.attempt is None:
            return
        named = history.failures[-1].diagnosis
        away = [host for host in history.attempt.hosts if host not in planned.fields["slots"]]
        replaced = away if named.kind == LOST else [host for host in away if host in named.hosts]
        skip = [one for one in map(tuple, planned.fields.get("skip", ())) if one not in history.skip]
        at_most = planned.fields.get("at_most")
        back = None if not skip and at_most in (None, history.at_most) else {"at_most": at_most, "skip": None}
        action = Action.BACK if back else Action.REPLACE if replaced else Action.AGAIN
        skips = planned.fields.get("skips_snapshots", False)
        decision = asdict(Decision(action, _TEXT, tuple(replaced), skips_snapshots=skips))
        if back is not None:
            back["skip"] = skip[0] if skip else None
        self._add("decided", planned.time, **{**decision, "action": action.value, "back": back})

    def _add(self, kind: str, at: float, **fields: Any) -> None:
        self._append(JournalEntry(0, at, kind, json.loads(json.dumps(fields))))

    def _append(self, entry: JournalEntry) -> None:
        self.entries.append(entry)
        self.history.add(entry)


_OTHER_LAYOUT = "megasdc.checkpoint.other_layout=convert"
"""Each attempt goes on from whatever layout the one before had."""


def find_sizes(
    config_path: Path,
    overrides: Sequence[str],
    slots: Mapping[str, int],
    num_hosts: int,
    min_hosts: int | None,
) -> tuple[dict[int, tuple[str, ...]], dict[int, str]]:
    """Find the numbers of hosts that a run can have.

    Args:
        overrides: of the configuration.
        slots: ranks of each host.
        num_hosts: that it should have.
        min_hosts: least number; None: it needs all of them.

    Returns:
        Settings of an attempt by number of hosts, ascending, as of ``--set``; and why others are not possible.

    Raises:
        ConfigError: the configuration is wrong, or the run needs all its hosts although fewer are asked for.
    """
    if min_hosts is None:
        return {num_hosts: ()}, {}
    if min_hosts > num_hosts:
        raise ConfigError(f"megasdc.supervise.min_hosts: got {min_hosts}, but the run has {num_hosts} hosts; set null.")
    if len(set(slots.values())) > 1:
        counts = ", ".join(f"{host} has {count}" for host, count in slots.items())
        raise ConfigError(f"megasdc.supervise.min_hosts: got {min_hosts}, which needs hosts of equal slots; {counts}.")
    ranks = next(iter(slots.values()))
    config = load_config(config_path, overrides)
    whole = check_layout(config, num_hosts * ranks)
    sizes, problems = dict[int, tuple[str, ...]](), dict[int, str]()
    for hosts in range(min_hosts, num_hosts + 1):
        replicas = max(1, hosts * ranks // (whole.tensor * whole.pipeline))
        settings = [_OTHER_LAYOUT, *settings_for(config, whole, replicas)]
        try:
            layout = check_layout(load_config(config_path, [*overrides, *settings]), hosts * ranks)
        except ConfigError as error:
            problems[hosts] = error.problems[0]
            continue
        if (layout.train_batch_size, layout.micro_batch_size) == (whole.train_batch_size, whole.micro_batch_size):
            sizes[hosts] = tuple(settings)
        else:
            problems[hosts] = f"its {whole.train_batch_size} samples of a step cannot be divided among them"
    if len(sizes) < 2 and min_hosts < num_hosts:
        reasons = "; ".join(f"with {hosts}: {problem}" for hosts, problem in problems.items())
        raise ConfigError(f"megasdc.supervise.min_hosts: got {min_hosts}, but the run needs all {num_hosts}: {reasons}")
    return sizes, problems


LOG_FILE = "supervisor.log"
"""In the folder of the supervisor."""


class LastingStream:
    """A text stream for ``print``, on to a file from its first error; SIGHUP says the same of a terminal.

    Args:
        stream: of this process, whose descriptor the file takes: programs that are started write there too.
        path: of the file, to which is appended.
    """

    def __init__(self, stream: TextIO, path: Path) -> None:
        self._stream, self._path, self._lasts, self._lost = stream, path, False, 0

    def write(self, text: str) -> int:
        """Write, where it can be written."""
        try:
            done = self._stream.write(text)
        except OSError as error:
            if lacks_room(error):
                self._lost += 1
                return len(text)
            self.go_on_in_file("it cannot be written to any more")
            return self._stream.write(text)
        if self._lost:
            lost, self._lost = self._lost, 0
            self.write(f"megasdc supervise: {lost} texts may be missing here: there was no room for them\n")
        return done

    def flush(self) -> None:
        """Write what is buffered; what the stream did not take goes to the file."""
        try:
            self._stream.flush()
        except OSError as error:
            if lacks_room(error):
                self._lost += 1
                return
            self.go_on_in_file("it cannot be written to any more")
            self._stream.flush()

    def go_on_in_file(self, why: str) -> None:
        """Append to the file from now on; a signal handler may call it within a write.

        Raises:
            OSError: that cannot be written either.
        """
        if self._lasts:
            return
        self._lasts = True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for descriptor in {self._stream.fileno(), sys.__stdout__.fileno() if sys.__stdout__ else 1}:
            os.dup2(file, descriptor)
        # Not by the stream, whose buffer may be half written when a signal comes.
        os.write(file, f"megasdc supervise: what was said before went to standard error: {why}\n".encode())
        os.close(file)


@contextmanager
def lasting_output(path: Path) -> Iterator[None]:
    """Let this process outlive its terminal: SIGHUP does not end it, and standard error goes on to a file.

    An ignored SIGHUP stays ignored, as ``nohup`` requires.
    """
    before, stream = sys.stderr, LastingStream(sys.stderr, path)

    def on_hangup(_number: int, _frame: FrameType | None) -> None:
        stream.go_on_in_file("its terminal has gone (SIGHUP)")

    handler = signal.getsignal(signal.SIGHUP)
    if handler != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, on_hangup)
    sys.stderr = stream  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stderr = before
        if handler is not None:
            signal.signal(signal.SIGHUP, handler)


def print_supervisor_message(line: str) -> None:
    """Print a message of the supervisor to standard error."""
    print(f"megasdc supervise: {line}", file=sys.stderr, flush=True)


def supervise_run(
    config_path: Path,
    launcher_args: Sequence[str] = (),
    hostfile: Path | None = None,
    script: Path | None = None,
    overrides: Sequence[str] = (),
    allow_changed: Sequence[str] = (),
) -> int:
    """Supervise a run to its end; returns the exit code of its last attempt, 0 where another job goes on with it.

    Args:
        hostfile: None: the hosts are the nodes of the SLURM job that this process runs in.

    Raises:
        ConfigError: the configuration is wrong.
        LaunchError: there is neither a hostfile nor a SLURM job, or it is wrong, or has too few hosts; or another
            supervisor has the run.
        StorageError: the journal is damaged, or cannot be written.
    """
    config = load_config(config_path, overrides, allow_changed)
    if (replicas := config.megasdc.local_sgd.replicas) is not None:
        raise ConfigError(
            f"megasdc.local_sgd.replicas: got {replicas}, and a supervisor starts one launch alone, which has none to "
            f"meet; start all with megasdc launch --replicas {replicas}, which starts a lost one again, or set null"
        )
    durable.set_limit(config.megasdc.logging.wait_for_room_s)
    allocation, section = _allocation(hostfile, launcher_args), config.megasdc.supervise
    num_hosts = _num_hosts(section.num_hosts, allocation, "megasdc.")
    sizes, impossible = find_sizes(config_path, overrides, allocation.slots, num_hosts, section.min_hosts)
    for hosts, problem in impossible.items():
        print_supervisor_message(f"with {hosts} hosts the run cannot go on: {problem}")
    run_dir = Path.cwd() / config.megasdc.logging.run_dir
    request = LaunchRequest(
        config_path.absolute(),
        launcher_args=tuple(launcher_args),
        overrides=tuple(overrides),
        allow_changed=tuple(allow_changed),
        script=DEFAULT_SCRIPT if script is None else script.absolute(),
    )
    steps, skip = config.megasdc.training.steps, config.megasdc.data.skip
    alert_command = config.megasdc.health.alert_command
    engine = LaunchBackend(run_dir, steps, skip, section.rewind_steps, request, allocation, sizes, alert_command)
    return _supervise(str(request.config_path), engine, run_dir, section, num_hosts, list(sizes), allocation)


def supervise_program(command: DeepSpeedCommand, settings: GuardSettings) -> int:
    """Supervise a training that is not megasdc's own; as ``supervise_run``.

    Raises:
        LaunchError, StorageError: likewise.
    """
    is_here = command.hostfile is None and not os.environ.get(JOB_VARIABLE)
    if not is_here and (command.include or command.exclude or command.num_gpus is not None):
        raise LaunchError(
            "deepspeed --include, --exclude, --num_gpus: not with --supervise, which chooses hosts itself: write a "
            "hostfile with all that it may use, and give --num_nodes or supervise.num_hosts"
        )
    durable.set_limit(settings.logging.wait_for_room_s)
    if is_here:
        place = place_program_here(command.include, command.exclude, command.num_gpus, os.environ)
        allocation: Allocation = ThisHost(len(place.host_of_rank))
    else:
        allocation = _allocation(command.hostfile, command.launcher_args)
    section = settings.supervise
    num_hosts = _num_hosts(section.num_hosts or command.num_hosts, allocation, "")
    run_dir = Path.cwd() / settings.logging.run_dir
    request = replace(command, num_hosts=None).request(str(run_dir), settings)
    sizes: dict[int, tuple[str, ...]] = {num_hosts: ()}
    engine = LaunchBackend(run_dir, 0, [], 0, request, allocation, sizes, settings.health.alert_command)
    name = shlex.join([command.script, *command.arguments])
    return _supervise(name, engine, run_dir, section, num_hosts, list(sizes), allocation)


def _num_hosts(wanted: int | None, allocation: Allocation, root: str) -> int:
    num_hosts = wanted or len(allocation.slots)
    if num_hosts > len(allocation.slots):
        raise LaunchError(
            f"{root}supervise.num_hosts is {num_hosts}, and {allocation.name} has {len(allocation.slots)} hosts"
        )
    return num_hosts


def _supervise(
    name: str,
    engine: LaunchBackend,
    run_dir: Path,
    section: SuperviseSection,
    num_hosts: int,
    sizes: Sequence[int],
    allocation: Allocation,
) -> int:
    """Supervise a run.

    Args:
        name: of what is run, which its journal keeps.
        sizes: numbers of hosts with which it can go on.
    """
    stop = Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # SLURM announces the end of a job by one of the others.
        if number != signal.SIGINT and allocation.can_be_left and not stop.is_set():
            allocation.is_ending = True
        stop.set()

    durable.end_waits_when(stop.is_set)
    folder = run_dir / FOLDER
    with (
        lasting_output(folder / LOG_FILE),
        Journal(folder, print_supervisor_message, partial(complete, folder, name, allocation.job)) as journal,
    ):
        _open(journal, name, allocation.slots, num_hosts, sizes)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, on_signal)
        ledger = None if section.ledger is None else HostReliabilityLog(Path(section.ledger))
        if ledger is not None:
            _suspect(journal, ledger, section.ledger_days)
        tests = StressTests(folder, section.test_rounds, section.golden, engine.checks)
        limits = RestartLimits(
            per_hour=section.failures_per_hour,
            without_progress=section.without_progress,
            failed_starts=section.failed_starts,
            same_step=section.same_step,
            pause_s=section.pause_s,
            longest_pause_s=section.longest_pause_s,
            returns=section.returns,
            retest_s=section.retest_s,
            rewinds=section.rewinds,
            spare_test_s=section.spare_test_s,
        )
        code = Supervisor(journal, engine, tests, limits, allocation, stop, print_supervisor_message, ledger).run()
        if _is_cut_short(JournalHistory.of(journal.entries), is_stopped=stop.is_set()) and (way := engine.way_on()):
            print_supervisor_message(way)
        return code


def _is_cut_short(history: JournalHistory, *, is_stopped: bool) -> bool:
    """Whether a run has ended here by a stop, killed ranks or lost hosts, so that the same command goes on."""
    code = history.exit_code  # None: it goes on in another allocation
    return code is not None and (is_stopped or code == LaunchError.exit_code or code > SIGNALS)


def _allocation(hostfile: Path | None, launcher_args: Sequence[str]) -> Allocation:
    if hostfile is not None:
        slots = read_hostfile(hostfile)
        options = parse_launcher_args(launcher_args, OF_PROGRAMS)
        is_here = list(slots) == [LOCAL_HOST]
        return ThisHost(slots[LOCAL_HOST]) if is_here else Allocation(str(hostfile), slots, options.ssh_port)
    if any(word.partition("=")[0] == "--launcher_args" for word in launcher_args):
        raise LaunchError(
            "launcher option --launcher_args: under SLURM the supervisor sets it; give options of srun by the "
            "environment variables that it reads, such as SRUN_CPUS_PER_TASK"
        )
    return SlurmJob(os.environ)


def _suspect(journal: Journal, ledger: HostReliabilityLog, days: float) -> None:
    """Write which hosts are not used before they have passed a test, since they failed often in other runs.

    The worst first, and never more than the run has spares. Only at the beginning of a run: later its own journal says
    what became of them.

    Raises:
        LaunchError: the ledger is that of other hosts.
        StorageError: it cannot be read.
    """
    history = JournalHistory.of(journal.entries)
    if history.attempt is not None:
        return
    uses = ledger.read()
    if uses and not {host for one in uses for host in one.hosts} & history.slots.keys():
        raise LaunchError(
            f"the ledger {ledger.path} knows none of the hosts {', '.join(history.slots)}, but {uses[-1].hosts[0]} and "
            "others: it is of another cluster, or hosts have new names; name another file in megasdc.supervise.ledger"
        )
    found = {host: judge_host(uses, host, time.time(), days) for host in history.slots}
    worst = sorted(found, key=lambda host: -found[host].probability)
    suspects = {host: str(found[host]) for host in worst if found[host].is_suspect}
    for host, text in suspects.items():
        print_supervisor_message(f"{host}: {text}")
    kept = dict(list(suspects.items())[: history.num_spares])
    if kept:
        print_supervisor_message(f"not used before they have passed a test: {', '.join(kept)}")
        journal.write(SUSPECTED, hosts=kept)


def _open(journal: Journal, name: str, slots: dict[str, int], num_hosts: int, sizes: Sequence[int]) -> None:
    """Write what begins the journal, or goes on with it: the run, or that it is taken over, and changed hosts.

    Raises:
        LaunchError: it is the journal of another run.
    """
    history = JournalHistory.of(journal.entries)
    if history.stage and history.config != name:
        raise LaunchError(
            f"{journal.path} is of the run of {history.config}, not of {name}; give that file, or another "
            "logging.run_dir"
        )
    if (history.slots, history.num_hosts, history.sizes) != (slots, num_hosts, tuple(sizes)):
        journal.write(HOSTS, slots=slots, num_hosts=num_hosts, sizes=sizes)
    if not history.stage or history.exit_code is not None:
        journal.write("opened", config=name)
    else:
        journal.write(TAKEN_OVER)
