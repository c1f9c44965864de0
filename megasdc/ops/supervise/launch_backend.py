"""How attempts are started: one small interface, and the front of ``megasdc launch`` behind it.

Going back to an earlier checkpoint: where to, and the settings of an attempt that does.

torch is imported where checkpoints are looked at after NaN and Inf.

The log of an attempt: a process that takes what the front and all that it starts say, and writes it to a file.

    python -m megasdc.ops.supervise.launch_backend FILE LIMIT_S < pipe

A file system without room is an error to who writes to it, and to a pipe it is none: what is said is kept here, and
written once there is room. It ends when nobody has the other end of the pipe any more.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from megasdc.common import durable, run_lock
from megasdc.common.durable import parse_json
from megasdc.common.errors import DataError, LaunchError, PeerError, StorageError
from megasdc.common.host import DISK_S, Waker
from megasdc.common.origin import CONFIG_FILE, Launch, read_identity
from megasdc.common.user_code import alert
from megasdc.events import Event, read_events
from megasdc.metrics.writer import read_metrics
from megasdc.ops.health.hosts import last_step_seen
from megasdc.ops.health.incident_file import load_hangs
from megasdc.ops.launch.hosts import hostfile_text
from megasdc.ops.launch.launch_verdict import RUN_MEMORY, Met
from megasdc.ops.launch.records import collect
from megasdc.ops.launch.remote import HostWatch
from megasdc.ops.launch.request import LaunchRequest, way_on
from megasdc.ops.supervise import attempt_process
from megasdc.ops.supervise.allocation import Allocation
from megasdc.ops.supervise.attempt_process import FrontResult
from megasdc.ops.supervise.attempt_progress import AttemptProgress, trained_in
from megasdc.ops.supervise.diagnosis import OF_HOSTS, AttemptEvidence, HostCheckResult, RewindTarget
from megasdc.ops.supervise.fitness import HostChecks, report_every
from megasdc.ops.supervise.history import ENDED, Attempt, LaunchProcess
from megasdc.ops.supervise.journal import FOLDER
from megasdc.sdc.incident import load_incidents
from megasdc.train.signals import STOPPED_START

_END = "data/stream_end"
_RESUMED = ("checkpoint", "memory", "other_layout")
"""Events of a run that has gone on from a save of its own."""


def find_back(run_dir: Path, launch: Launch, rewind_steps: int) -> RewindTarget | None:
    """Where a run can go back to: before a checkpoint that could not be loaded, before NaN and Inf, to its beginning.

    To the beginning where none of its checkpoints can be used, damaged or not verified, and the first that it saved is
    still there: early in a run. A run that has more to lose is not begun anew without a person.

    Without ``rewind_steps`` to the checkpoint of ``find_way_back``, and no data are skipped: newer ones hold NaN or
    Inf, or lead to them. An attempt that went on from there itself has tried that.

    Args:
        launch: of the attempt that failed.
        rewind_steps: least number of steps before the first of the last skipped steps; 0: no data are skipped.

    Returns:
        None: the attempt had no such checkpoints, and no skipped step or one that is not to be gone back before.
    """
    if not run_dir.is_dir():
        return None
    resumes = list(read_events(run_dir, kind="resume", rank=0, launch=launch, broken=[]))
    failed = [one.step for one in resumes if one.name == "not_loaded"]
    if failed and failed[-1] is not None:
        return RewindTarget(failed[-1] - 1)
    if unusable := [one for one in resumes if one.name == "none_usable"]:
        saves = read_events(run_dir, kind="save", name="checkpoint", rank=0, broken=[])
        oldest = min(unusable[-1].fields["steps"])
        return None if any(one.step < oldest for one in saves if one.step is not None) else RewindTarget(0)
    skipped = list(read_events(run_dir, kind="skip", name="optimizer_step", rank=0, broken=[]))
    if not rewind_steps:
        return _to_finite(run_dir, [one.step for one in resumes if one.name in _RESUMED])
    if not skipped or skipped[-1].step is None:
        return None
    if not launch.wrote(skipped[-1].launch, skipped[-1].time):
        return None
    first, steps = skipped[-1].step, {one.step for one in skipped}
    while first - 1 in steps:  # an earlier attempt may have skipped the first of them
        first -= 1
    rows = [row for row in read_metrics(run_dir) if _END in row and row["step"] <= first - rewind_steps]
    step, start = (rows[-1]["step"], rows[-1][_END]) if rows else (0, 0)
    return RewindTarget(step, (int(start), skipped[-1].fields["stream_end"]))


def _to_finite(run_dir: Path, resumed: Sequence[int | None]) -> RewindTarget | None:
    """To the checkpoint of ``find_way_back``, if the attempt has gone on from a newer one; ``resumed``: its steps."""
    if not resumed or resumed[-1] is None:
        return None
    from megasdc.checkpoint.verify import find_way_back

    try:
        section = parse_json((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))["megasdc"]["checkpoint"]
        way = find_way_back(Path(section.get("folder") or run_dir / "checkpoints"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # nothing is known of where they lie
        return None
    return None if way is None or way.step >= resumed[-1] else RewindTarget(way.step)


def overrides_of(attempt: Attempt, skip: Sequence[Sequence[int]]) -> list[str]:
    """Settings of an attempt beside the configuration, as of ``--set``.

    Args:
        skip: ranges of samples that the configuration skips.
    """
    overrides = [] if attempt.at_most is None else [f"megasdc.checkpoint.resume_at_most={attempt.at_most}"]
    if attempt.skips_snapshots:
        overrides.append("megasdc.checkpoint.memory.without_room=go_on")
    if attempt.skip:
        overrides.append(f"megasdc.data.skip={json.dumps(union([*skip, *attempt.skip]))}")
    return overrides


def union(ranges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Ranges of the same numbers that ascend and do not touch."""
    found: list[list[int]] = []
    for first, end in sorted(map(tuple, ranges)):
        if found and first <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([first, end])
    return found


FIND_S = 2.0
LOG_S = 2.0
"""Seconds that the writer of an attempt's log has after the front's end."""
AGENTS_S = 3.0
"""Agents have so long to write where the ranks of an attempt that failed have ended."""
STOPPED_S = 10.0
"""A front may be stopped by a signal for so long."""
OF_CONFIGURATION = ("time limit", "training.stop_step")
"""How the reasons of a stop begin that the configuration asks for, see ``megasdc.train.stop``."""


class Engine(Protocol):
    """Starts, watches and ends attempts."""

    def was_started(self, attempt: Attempt) -> bool:
        """Whether an attempt was started."""

    def find_process(self, attempt: Attempt) -> LaunchProcess:
        """The process of an attempt that was started; ``ENDED``: it has ended."""

    def start(self, attempt: Attempt, check: Callable[[], None]) -> LaunchProcess:
        """Start an attempt; ``check`` is called just before, after all waits, and raises where it is not to be."""

    def lives(self, process: LaunchProcess) -> bool:
        """Whether it still runs."""

    def print_output(self, attempt: Attempt) -> None:
        """Print what it has said since the last call."""

    def stop(self, process: LaunchProcess) -> None:
        """Ask it to save and end."""

    def overrides(self, attempt: Attempt) -> tuple[str, ...]:
        """Settings of an attempt beside those of the launch, as of ``--set``."""

    def left_out(self, attempt: Attempt) -> Sequence[str]:
        """Hosts of ranks that were found wrong, and without whose replicas an attempt goes on."""

    def evidence(
        self, attempt: Attempt, waiting: Mapping[str, int], stops: Callable[[], bool] = lambda: False
    ) -> AttemptEvidence:
        """How an attempt has ended.

        Args:
            waiting: ranks of hosts that it did not use, and others may; they are checked beside its own.
            stops: whether a stop is asked for, so that nothing long is begun or gone on with.
        """

    def release(self, hosts: Sequence[str]) -> None:
        """Let the memory of hosts go that holds snapshots of the run: it does not go on there."""

    def alert(self, name: str, some: Sequence[Met]) -> str:
        """Alert of hosts that are replaced or come back and of steps back, once; returns what went wrong.

        Args:
            name: under which it is kept that this was done.

        Returns:
            Sentences; empty: nothing went wrong.
        """


class LaunchBackend:
    """Attempts by ``megasdc launch``, a process of its own session, which outlives the supervisor.

    Args:
        run_dir: of the run; in its folder ``supervise`` are hostfiles and what fronts say.
        steps: of the run; 0: not known, it is done when it ends well.
        skip: samples that the configuration skips, ranges [first, end).
        rewind_steps: see ``megasdc.ops.supervise.launch_backend.find_back``.
        request: what is launched, but for hosts and launch id.
        allocation: of the hosts.
        sizes: settings of an attempt by its number of hosts, as of ``--set``.
        alert_command: see ``megasdc.common.user_code``.

    Attributes:
        checks: of hosts.
    """

    def __init__(
        self,
        run_dir: Path,
        steps: int,
        skip: Sequence[Sequence[int]],
        rewind_steps: int,
        request: LaunchRequest,
        allocation: Allocation,
        sizes: Mapping[int, Sequence[str]],
        alert_command: Sequence[str] = (),
    ) -> None:
        self._folder, self._run_dir, self._steps, self._request = run_dir / FOLDER, run_dir, steps, request
        self._alert_command = alert_command
        self._skip, self._rewind_steps, self._allocation = skip, rewind_steps, allocation
        self._sizes = sizes
        prefixes = {host: tuple(words) for host in allocation.slots if (words := allocation.prefix(host))}
        self.checks = HostChecks(request, run_dir, prefixes)
        self._shown: dict[Path, int] = {}
        self._waker = Waker(STOPPED_S, DISK_S, polls=True)
        self._room = durable.RoomProbe(run_dir, _print)
        self._log: subprocess.Popen[bytes] | None = None
        self._ended_with: int | None = None

    def was_started(self, attempt: Attempt) -> bool:
        """See ``Engine``; its log is opened just before."""
        return self._file(attempt, "log").exists()

    def find_process(self, attempt: Attempt) -> LaunchProcess:
        """See ``Engine``; by its command line, which holds the launch id, and is empty while a program is loaded."""
        end = time.monotonic() + FIND_S
        while time.monotonic() < end and not self._file(attempt, "json").exists():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    if path.parent.stat().st_uid != os.getuid():
                        continue  # others may write what they like on their command lines
                    words = path.read_bytes().decode(errors="replace").split("\0")
                except OSError:  # it has ended
                    continue
                ticks = run_lock.start_ticks(int(path.parent.name))
                if (
                    attempt_process.MODULE in words
                    and any(attempt.launch_id in word for word in words)
                    and ticks is not None
                ):
                    return LaunchProcess(int(path.parent.name), ticks)
            time.sleep(0.1)
        return ENDED

    def start(self, attempt: Attempt, check: Callable[[], None]) -> LaunchProcess:
        """See ``Engine``.

        Raises:
            OSError: it cannot be started.
            StorageError: the run folder has no room for too long.
            MegasdcError: of ``check``.
        """

        def claim() -> None:
            check()
            path.touch()

        hostfile = self._file(attempt, "hosts")
        durable.need_room(lambda: durable.write_whole(hostfile, hostfile_text(attempt.slots)), hostfile)
        overrides = (*self._request.overrides, *self.overrides(attempt))
        request = replace(self._request, hostfile=hostfile, overrides=overrides)
        request = replace(request, launch_id=attempt.launch_id, ended=attempt.ended)
        launch = asdict(self._allocation.request(request, attempt))
        words = json.dumps({"launch": launch, "result": self._file(attempt, "json")}, default=str)
        path = self._file(attempt, "log")
        self._shown[path] = path.stat().st_size if path.exists() else 0
        durable.need_room(claim, path)
        self._room.seen = False
        writer = [sys.executable, "-m", MODULE, str(path), str(durable.limit_s())]
        self._log = subprocess.Popen(writer, stdin=subprocess.PIPE, start_new_session=True)
        assert self._log.stdin is not None, "it is a pipe"
        # Blocked for the front too, so that it lives to tell of a signal that it gets while it is loaded.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, attempt_process.HELD)
        try:
            with self._log.stdin as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", attempt_process.MODULE, words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ticks = run_lock.start_ticks(process.pid)
        return LaunchProcess(process.pid, 0 if ticks is None else ticks)

    def print_output(self, attempt: Attempt) -> None:
        """See ``Engine``; on standard error. Of an attempt that was taken over, from now on."""
        path = self._file(attempt, "log")
        with suppress(FileNotFoundError), open(path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(self._shown.get(path, end))
            sys.stderr.write(log.read().decode(errors="replace"))
            self._shown[path] = log.tell()

    def lives(self, process: LaunchProcess) -> bool:
        """See ``Engine``; one that is stopped is woken, and killed where it stays so, as one that does not run is."""
        if process == ENDED:
            return False
        with suppress(ChildProcessError):  # it is no child of this process, but of an earlier supervisor
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            self._ended_with = os.waitstatus_to_exitcode(status) if pid else None
        self._room.has_room()
        if self._log is not None and self._log.poll() is None:  # the front waits for it
            self._waker.check(self._log.pid)
        if run_lock.start_ticks(process.pid) != process.ticks:
            with suppress(subprocess.TimeoutExpired):  # what it has said last
                if self._log is not None:
                    self._log.wait(LOG_S)
            return False
        if done := self._waker.check(process.pid):
            _print(f"the front of the launch: {done}")
        return process.pid not in self._waker.given_up

    def stop(self, process: LaunchProcess) -> None:
        """See ``Engine``."""
        if self.lives(process):
            os.kill(process.pid, signal.SIGTERM)

    def overrides(self, attempt: Attempt) -> tuple[str, ...]:
        """See ``Engine``."""
        return (*self._sizes.get(len(attempt.hosts), ()), *overrides_of(attempt, self._skip))

    def left_out(self, attempt: Attempt) -> Sequence[str]:
        """See ``Engine``; as rank 0 has told."""
        told, hosts = self._isolation(attempt), _hosts_of_ranks(attempt)
        return [] if told is None else list(dict.fromkeys(hosts[rank] for rank in told.fields["wrong"]))

    def _isolation(self, attempt: Attempt) -> Event | None:
        """Told by the start without a replica that was last left out of an attempt; None: none was."""
        if not self._run_dir.is_dir():
            return None
        events = read_events(self._run_dir, kind="isolation", name="begun", rank=0, launch=attempt.launch, broken=[])
        return next(reversed(list(events)), None)

    def evidence(
        self, attempt: Attempt, waiting: Mapping[str, int], stops: Callable[[], bool] = lambda: False
    ) -> AttemptEvidence:
        """See ``Engine``; hosts are asked whether they can be reached, unless the attempt ended well."""
        result = attempt_process.load_result(self._file(attempt, "json"))
        if result is None and self._ended_with == StorageError.exit_code:  # which had no room either
            result = FrontResult(StorageError.exit_code, None, None, ["the front of the launch could write no result"])
        code = None if result is None else result.exit_code
        wrote = attempt.launch.wrote
        hangs = [one for one in load_hangs(self._run_dir)[0] if wrote(one.launch, one.time)]
        incidents = [one for _, one in load_incidents(self._run_dir / "reports", [])]
        trained = trained_in(self._run_dir, attempt.launch)
        unreachable = () if code == 0 else self._allocation.unreachable(attempt)
        # A rank that was killed has the code of a launch that failed, and says nothing of its host.
        is_asked = code in OF_HOSTS and not (code == LaunchError.exit_code and trained is not None)
        whole = code == DataError.exit_code
        checked = self._check(attempt, waiting, set(unreachable), whole, stops) if is_asked else HostCheckResult()
        isolation, hosts = self._isolation(attempt), _hosts_of_ranks(attempt)
        left = range(len(hosts)) if isolation is None else isolation.fields["launch_ranks"]
        own = [one for one in incidents if wrote(one.launch, one.found_at + 1.0)]  # their times are whole seconds
        # An earlier start's has other numbers of ranks, and has ended no more than that start.
        since = 0 if isolation is None else isolation.attempt or 0
        ending = [one for one in own if one.ends_start and (one.attempt or 0) >= since]
        return AttemptEvidence(
            exit_code=code,
            failed_rank=None if result is None else result.failed_rank,
            failed_host=None if result is None else result.failed_host,
            lines=() if result is None else tuple(result.lines),
            host_of_rank=tuple(hosts[rank] for rank in left),
            left_out=self.left_out(attempt),
            unreachable=unreachable,
            checked=checked,
            failed_alike=self._failed_alike(attempt, hosts, code) if is_asked else (),
            grows=attempt.grows,
            interrupted=self._interrupted(attempt, result, stops()),
            asked=self._asked(attempt, result, stops()),
            hang=hangs[-1] if hangs else None,
            corruption=max(ending, key=lambda one: one.place, default=None),
            reached=self._reached(attempt),
            ended_by=None if result is None else result.ended_by,
            memory=self._memory(attempt, result),
            last=self._last(attempt, trained, 0.0 if code == 0 or unreachable else AGENTS_S),
            steps=self._steps,
            trained=trained,
            back=find_back(self._run_dir, attempt.launch, self._rewind_steps),
            without_room=self._room.seen,
            by_time=any(one.launch is None for one in hangs) or any(one.launch is None for one in own),
        )

    def _check(
        self,
        attempt: Attempt,
        waiting: Mapping[str, int],
        away: Collection[str],
        whole: bool,
        stops: Callable[[], bool],
    ) -> HostCheckResult:
        """Check the hosts of an attempt that can be reached, in order of ranks, and then those that wait.

        Args:
            whole: read every byte of the data.
            stops: see ``evidence``.
        """
        slots = {host: count for host, count in {**attempt.slots, **waiting}.items() if host not in away}
        how = "every byte of the data is read there" if whole else "what a start needs"
        _print(f"whether one host alone has what ended the attempt: {', '.join(slots)} are checked, {how}")
        watch = HostWatch(stops, report_every(_print))
        return self.checks.check(slots, attempt.slots, overrides=self.overrides(attempt), whole=whole, watch=watch)

    def _failed_alike(self, attempt: Attempt, host_of_rank: Sequence[str], code: int | None) -> tuple[str, ...]:
        """Hosts whose ranks have recorded that they ended with a code themselves."""
        with suppress(OSError):
            done = collect(self._run_dir, attempt.launch_id).done
            ranks = [rank for rank, one in done.items() if one.exit_code == code and rank < len(host_of_rank)]
            return tuple(dict.fromkeys(host_of_rank[rank] for rank in sorted(ranks)))
        return ()

    def release(self, hosts: Sequence[str]) -> None:
        """See ``Engine``."""
        with suppress(StorageError):  # the run was never started, or cannot be resumed either
            if hosts and (identity := read_identity(self._run_dir)) is not None:
                self._allocation.release(hosts, identity.run)

    def alert(self, name: str, some: Sequence[Met]) -> str:
        """See ``Engine``; what cannot be written is told nevertheless."""
        if not some or not self._alert_command:
            return ""
        path, problem = self._folder / f"{name}.json", ""
        text = json.dumps([asdict(one) for one in some], indent=1) + "\n"
        try:
            durable.write_whole(path, text)
        except OSError as error:
            problem = f"alert of {path}, which cannot be written: {error}"
        return "; ".join(filter(None, (problem, alert(self._alert_command, path, text))))

    def way_on(self) -> str:
        """See ``megasdc.ops.launch.request.way_on``."""
        return way_on(self._request, self._run_dir)

    def _reached(self, attempt: Attempt) -> int:
        """Last step that was done; of programs that write no metrics by what was seen of their ranks."""
        if not self._run_dir.is_dir():
            return 0
        if self._request.program is None:
            steps = [row["step"] for row in read_metrics(self._run_dir) if "train/loss" in row]
            ends = read_events(self._run_dir, kind="end", name="run", rank=0, launch=attempt.launch, broken=[])
            steps += [one.step for one in ends if one.step is not None]  # also where lines of metrics were lost
            return max(steps, default=0)
        return last_step_seen(self._run_dir)

    def _last(self, attempt: Attempt, trained: AttemptProgress | None, wait_s: float) -> int | None:
        """Last step that an attempt did; of programs None where nothing was seen of one, which they need not tell."""
        seen = last_step_seen(self._run_dir, attempt.launch_id, wait_s) if self._run_dir.is_dir() else 0
        if self._request.program is not None:
            return seen or None
        if trained is None:  # what was seen is the step that it would have gone on from
            return 0
        return max(seen, trained.last)  # metrics may be those of some steps ago

    def _file(self, attempt: Attempt, ending: str) -> Path:
        return attempt_process.attempt_file(self._folder, attempt.number, attempt.launch_id, ending)

    def _read_log(self, attempt: Attempt) -> str:
        """What an attempt has printed."""
        log = self._file(attempt, "log")
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    def _memory(self, attempt: Attempt, result: FrontResult | None) -> str | None:
        """See ``AttemptEvidence``; where a scheduler alone knows that it was memory, it counts as the run's."""
        if result is None or result.memory is not None or not result.exit_code:
            return None if result is None else result.memory
        return RUN_MEMORY if self._allocation.lacked_memory(self._read_log(attempt), result.failed_rank) else None

    def _interrupted(self, attempt: Attempt, result: FrontResult | None, is_asked: bool) -> str:
        """How it was ended from outside; empty: it was not.

        Args:
            is_asked: whether the supervisor was asked to stop.
        """
        if attempt.job != self._allocation.job:
            return "its job has ended"
        if self._allocation.is_ending:
            return f"{self._allocation.name} is about to end"
        done, said = collect(self._run_dir, attempt.launch_id).done.values(), self._read_log(attempt)
        # A front that ends the rest after a failure has the step cancelled, too.
        is_alone = {one.exit_code for one in done} <= {0, PeerError.exit_code}
        if is_alone and self._allocation.was_cancelled(said) and not self._allocation.lacked_memory(said, None):
            return "its job step was cancelled"
        if result is not None and result.stopped_by is not None and not is_asked and not attempt.grows:
            return f"its launch got {signal.Signals(result.stopped_by).name}, which was not the supervisor's"
        if result is None or result.exit_code or result.stopped_by is not None:
            return ""
        by_signal = any(reason.startswith("signal") for reason in self._stop_reasons(attempt))
        by_signal |= {one.end for one in done} == {STOPPED_START}  # which leaves no event
        return "its ranks got a signal to save and end, which was not the supervisor's" if by_signal else ""

    def _asked(self, attempt: Attempt, result: FrontResult | None, is_asked: bool) -> str:
        """Who had asked it to stop for good; empty: nobody, whatever its exit code says.

        Args:
            is_asked: whether the supervisor was asked to stop; a signal to the front alone is no such request.
        """
        if result is not None and result.stopped_by is not None and is_asked:
            return f"its launch was asked to stop by {signal.Signals(result.stopped_by).name}"
        reasons = [one for one in self._stop_reasons(attempt) if one.startswith(OF_CONFIGURATION)]
        return f"its configuration asked it to stop: {reasons[-1]}" if reasons else ""

    def _stop_reasons(self, attempt: Attempt) -> list[str]:
        """Why its ranks have stopped before the last step."""
        if not self._run_dir.is_dir():
            return []
        stops = read_events(self._run_dir, kind="stop", name="requested", rank=0, launch=attempt.launch, broken=[])
        return [str(one.fields.get("reason")) for one in stops]


def _print(text: str) -> None:
    print(f"megasdc supervise: {text}", file=sys.stderr, flush=True)


def _hosts_of_ranks(attempt: Attempt) -> tuple[str, ...]:
    """Hosts by rank, as an attempt begins."""
    return tuple(host for host, slots in attempt.slots.items() for _ in range(slots))


MODULE = "megasdc.ops.supervise.launch_backend"
_BLOCK_BYTES = 1 << 16


def main() -> None:
    """Copy standard input to the file that the first argument names, until its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # it ends after those that are asked
        signal.signal(number, signal.SIG_IGN)
    durable.set_limit(float(sys.argv[2]))
    file = durable.LineFile(Path(sys.argv[1]))
    while True:
        if select.select([0], [], [], durable.RETRY_S)[0]:
            if not (said := os.read(0, _BLOCK_BYTES)):
                break
            file.add(said)
        file.flush()
    file.close()


if __name__ == "__main__":
    main()
