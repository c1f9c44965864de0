"""Tests of hosts that were replaced, by ``megasdc stress``, each in a process of its own beside the run."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megasdc.errors import LaunchError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class HostTest:
    """How the test of a host ended.

    Args:
        exit_code: of ``megasdc stress``; 0: the host is healthy.
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
        """Whether the host was tested to the end."""
        return self.exit_code != LaunchError.exit_code


class Tests(Protocol):
    """Tests hosts, several at a time."""

    def runs(self, host: str) -> bool:
        """Whether a test of a host is under way."""

    def start(self, host: str, slots: int) -> None:
        """Start a test of a host with so many ranks."""

    def take(self) -> list[HostTest]:
        """Those that have ended since the last call."""

    def close(self) -> None:
        """End those that are under way."""


class StressTests:
    """See ``Tests``.

    Args:
        folder: of the supervisor, for the files ``test_HOST.*``.
        rounds: of a test.
        golden: folder of golden values; None: a host is compared with itself.
        prefix: words that make a command run on a host; none: the test reaches it by a hostfile.
    """

    def __init__(self, folder: Path, rounds: int, golden: str | None, prefix: Callable[[str], Sequence[str]]) -> None:
        self._folder, self._prefix, self._arguments = folder, prefix, ["--rounds", str(rounds)]
        self._arguments += ["--only", "collectives,gemm,training", *([] if golden is None else ["--golden", golden])]
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def runs(self, host: str) -> bool:
        """See ``Tests``."""
        return host in self._running

    def start(self, host: str, slots: int) -> None:
        """See ``Tests``; it ends with the supervisor, which does not wait for it when it is started again."""
        self._file(host, "json").unlink(missing_ok=True)
        command = [*self._prefix(host), sys.executable, "-m", "megasdc", "stress"]
        command += [*self._arguments, "--out", str(self._file(host, "json"))]
        if not self._prefix(host):
            hostfile = self._file(host, "hosts")
            hostfile.write_text(f"{host} slots={slots}\n", encoding="utf-8")
            command += ["--hostfile", str(hostfile)]
        with open(self._file(host, "log"), "ab") as log:
            self._running[host] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal that goes does not end it
                preexec_fn=end_with_parent,  # noqa: PLW1509 - there are no threads
            )

    def take(self) -> list[HostTest]:
        """See ``Tests``."""
        ended = {host: code for host, one in self._running.items() if (code := one.poll()) is not None}
        for host in ended:
            del self._running[host]
        return [HostTest(host, *self._result(host, code)) for host, code in ended.items()]

    def _result(self, host: str, code: int) -> tuple[int, str]:
        try:
            found = json.loads(self._file(host, "json").read_text(encoding="utf-8"))
            (verdict,) = found["hosts"]
            return found["exit_code"], "; ".join(one["text"] for one in verdict["reasons"]) or verdict["status"]
        except (OSError, ValueError, KeyError):  # it was killed, or refused to start
            said = self._file(host, "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return LaunchError.exit_code, f"the test ended with code {code}: {said[-1] if said else 'nothing was said'}"

    def close(self) -> None:
        """See ``Tests``."""
        for one in self._running.values():
            one.send_signal(signal.SIGINT)  # so that it ends what it has started on the host
        for one in self._running.values():
            try:
                one.wait(30)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        self._running.clear()

    def _file(self, host: str, ending: str) -> Path:
        return self._folder / f"test_{host}.{ending}"


def end_with_parent() -> None:
    """In a new process, before its program: it is interrupted where the process that started it has ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
