"""Tests of hosts that wait or were replaced: whether they are fit for the run, and then what they compute.

The latter is ``megasdc stress``. Each runs in a process of its own beside the run.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import psutil

from megasdc.common.durable import lacks_room, parse_json, probe
from megasdc.common.errors import LaunchError, StorageError
from megasdc.ops.launch.command import OF_PROGRAMS, parse_launcher_args
from megasdc.ops.launch.host_process import KILL_S
from megasdc.ops.launch.hosts import hostfile_text
from megasdc.ops.launch.process import end_launcher
from megasdc.ops.launch.remote import HostWatch
from megasdc.ops.supervise import fitness
from megasdc.ops.supervise.diagnosis import OF_HOSTS, HostCheckResult, UnfitHost
from megasdc.ops.supervise.fitness import HostChecks

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_COMPARED = 3
CLOSE_S = 10.0
"""In which all tests together end that are interrupted, with what they have started on hosts."""


@dataclass(frozen=True)
class HostTest:
    """How the test of a host ended.

    Args:
        exit_code: of ``megasdc stress``, 0: the host is healthy; or that a rank would end with on a host that is unfit.
        text: why it is not, or why that is not known.
    """

    host: str
    exit_code: int
    text: str

    @property
    def passed(self) -> bool:
        """Whether the host is healthy."""
        return self.exit_code == 0

    @property
    def is_conclusive(self) -> bool:
        """Whether the host was tested to the end; what makes it unfit may be mended."""
        return self.exit_code not in OF_HOSTS


class Tests(Protocol):
    """Tests hosts, several at a time."""

    def runs(self, host: str) -> bool:
        """Whether a test of a host is under way."""

    def start(self, host: str, slots: int, run: Mapping[str, int], overrides: Sequence[str]) -> None:
        """Start a test of a host with so many ranks.

        Args:
            run: ranks of the hosts of the run, which it is compared with.
            overrides: settings of the run beside those of its launch, as of ``--set``.
        """

    def check(self, slots: Mapping[str, int], run: Mapping[str, int], stops: Callable[[], bool]) -> list[HostTest]:
        """Check at once whether hosts are fit, as far as that takes no longer than a start; those that are not.

        Args:
            slots: ranks of each.
            run: those of the hosts of the run, they among them.
            stops: whether a stop is asked for: then nothing is found.
        """

    def pop_ended(self) -> list[HostTest]:
        """Those that have ended since the last call."""

    def close(self) -> None:
        """End those that are under way."""


class StressTests:
    """See ``Tests``.

    Args:
        folder: of the supervisor, for the files ``test_HOST.*``.
        rounds: of a test.
        golden: folder of golden values; None: a host is compared with itself.
        checks: whether a host is fit for the run.
    """

    def __init__(self, folder: Path, rounds: int, golden: str | None, checks: HostChecks) -> None:
        self._folder, self._checks, self._arguments = folder, checks, ["--rounds", str(rounds)]
        self._arguments += ["--only", "collectives,gemm,training", *([] if golden is None else ["--golden", golden])]
        self._checking: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: list[HostTest] = []

    def runs(self, host: str) -> bool:
        """See ``Tests``."""
        return host in self._running or host in self._checking

    def start(self, host: str, slots: int, run: Mapping[str, int], overrides: Sequence[str]) -> None:
        """See ``Tests``; it ends with the supervisor, which does not wait for it when it is started again."""
        self._go_on(host, partial(self._check, host, slots, run, overrides))

    def _go_on(self, host: str, turn: Callable[[], None]) -> None:
        """Go on with a test; without room the next call does, and any other error of the disk ends the test."""
        try:
            probe(self._folder)  # without room it could not tell what it finds
            turn()
        except OSError as error:
            if not lacks_room(error):
                self._checking.pop(host, None)
                self._ended.append(HostTest(host, StorageError.exit_code, f"it could not be tested: {error}"))

    def _check(self, host: str, slots: int, run: Mapping[str, int], overrides: Sequence[str]) -> None:
        """Start to check whether a host is fit."""
        self._file(host, "fit.json").unlink(missing_ok=True)
        asked = {"checks": asdict(self._checks), "host": host, "slots": slots, "run": dict(run)}
        asked |= {
            "overrides": list(overrides),
            "beside": _beside(run, [host]),
            "result": str(self._file(host, "fit.json")),
        }
        command = [sys.executable, "-m", fitness.MODULE, json.dumps(asked, default=str)]
        self._checking[host] = self._process(host, command), slots

    def check(self, slots: Mapping[str, int], run: Mapping[str, int], stops: Callable[[], bool]) -> list[HostTest]:
        """See ``Tests``."""
        checked = self._checks.check(slots, run, beside=_beside(run, slots), deep=False, watch=HostWatch(stops))
        return _tests(checked)

    def _stress(self, host: str, slots: int) -> None:
        """Test what a host computes."""
        self._file(host, "json").unlink(missing_ok=True)
        prefix = self._checks.prefixes.get(host, ())
        command = [*prefix, sys.executable, "-m", "megasdc", "stress"]
        command += [*self._arguments, "--out", str(self._file(host, "json"))]
        if not prefix:
            hostfile = self._file(host, "hosts")
            hostfile.write_text(hostfile_text({host: slots}), encoding="utf-8")
            command += ["--hostfile", str(hostfile)]
            port = parse_launcher_args(self._checks.request.launcher_args, OF_PROGRAMS).ssh_port
            command += [] if port is None else ["--ssh-port", str(port)]
        self._running[host] = self._process(host, command)

    def _process(self, host: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with open(self._file(host, "log"), "ab") as log:
            return start_command(command, log, log)

    def pop_ended(self) -> list[HostTest]:
        """See ``Tests``."""
        for host, (process, _) in list(self._checking.items()):
            if process.poll() is not None:
                self._go_on(host, partial(self._finish_check, host))
        for host, code in [(host, code) for host, one in self._running.items() if (code := one.poll()) is not None]:
            del self._running[host]
            self._ended.append(HostTest(host, *self._result(host, code)))
        ended, self._ended = self._ended, []
        return ended

    def _finish_check(self, host: str) -> None:
        """Go on after a check that has ended: with the test of what the host computes, if it is fit."""
        process, slots = self._checking[host]
        if (found := self._unfit(host, process.returncode)) is not None:
            self._ended.append(found)
        else:
            self._stress(host, slots)
        del self._checking[host]

    def _unfit(self, host: str, code: int) -> HostTest | None:
        """What a check has found; None: the host is fit."""
        try:
            said = parse_json(self._file(host, "fit.json").read_text(encoding="utf-8"))
            checked = HostCheckResult(tuple(UnfitHost(**one) for one in said["unfit"]), (host,), said["silent"])
        except (OSError, ValueError, KeyError, TypeError):  # it was killed
            return HostTest(host, LaunchError.exit_code, f"the check ended with code {code}")
        return next(iter(_tests(checked)), None)

    def _result(self, host: str, code: int) -> tuple[int, str]:
        try:
            found = parse_json(self._file(host, "json").read_text(encoding="utf-8"))
            (verdict,) = found["hosts"]
            return found["exit_code"], "; ".join(one["text"] for one in verdict["reasons"]) or verdict["status"]
        except (OSError, ValueError, KeyError, TypeError):  # it was killed, or refused to start
            said = list[str]()
            with suppress(OSError):
                said = self._file(host, "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return LaunchError.exit_code, f"the test ended with code {code}: {said[-1] if said else 'nothing was said'}"

    def close(self) -> None:
        """See ``Tests``."""
        under_way = [*self._running.values(), *(process for process, _ in self._checking.values())]
        for one in under_way:
            one.send_signal(signal.SIGINT)  # so that it ends what it has started on the host
        end = time.monotonic() + CLOSE_S
        for one in under_way:
            with suppress(subprocess.TimeoutExpired):
                one.wait(max(0.0, end - time.monotonic()))
        for one in under_way:
            _kill(one)
        self._running.clear()
        self._checking.clear()

    def _file(self, host: str, ending: str) -> Path:
        return self._folder / f"test_{host}.{ending}"


def _beside(run: Mapping[str, int], hosts: Collection[str]) -> list[str]:
    """A few hosts of a run that others are compared with."""
    return [host for host in run if host not in hosts][:_COMPARED]


def _tests(checked: HostCheckResult) -> list[HostTest]:
    """Results of hosts that are not fit, or gave no answer."""
    found = {one.host: HostTest(one.host, one.code, one.text) for one in reversed(checked.unfit)}
    silent = {host: HostTest(host, LaunchError.exit_code, text) for host, text in checked.silent.items()}
    return list((silent | found).values())


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that still runs, and all that it has started here; what runs on hosts ends without them."""
    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        own = psutil.Process(process.pid)
        for one in [*own.children(recursive=True), own]:
            with suppress(psutil.NoSuchProcess):
                end_launcher(one)
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)
    if process.poll() is None:
        text = f"the test of a host, process {process.pid}, was killed, does not end, and is given up"
        print(f"megasdc supervise: {text}", file=sys.stderr, flush=True)


def start_command(command: Sequence[str], stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, which neither Ctrl-C nor a terminal that goes reaches.

    SIGINT ends it, and all that it has started, also where this process ignores that; it gets it where this one ends.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=_begin,  # noqa: PLW1509 - there are no threads
    )


def _begin() -> None:
    """In a command's process, before its program."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
