"""Transport of a Python program to many hosts at once over SSH, and of their answers.

The program travels through SSH's standard input and its answer comes back as one marked JSON line, so that the host
needs only Python, no argument is read by a shell, and login messages do not matter, whatever their encoding and
wherever they are printed. Lines of progress come in the same way meanwhile. Who waits may give up: what still runs is
ended, here and, once nobody reads what it prints, there.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from megasdc.ops.launch.on_host.module import PROGRESS_MARK

MAX_PARALLEL = 64
POLL_S = 0.2
LOAD_S = 20.0
"""Seconds that a busy host has to say how busy it is."""
LONGEST_WAIT_S = 600.0
"""The longest that is waited for a busy host."""
KILL_S = 2.0
"""After SIGTERM, on which srun ends its tasks."""
ANSWER_MARK = "megasdc-answer:"
REMEDY_OF_SIGN = {
    "Permission denied": "let this user log in without a password (ssh-copy-id {host})",
    "Host key verification failed": "accept its host key once (ssh {host} true)",
    "Could not resolve": "use a name that this host can resolve, or add it to /etc/hosts",
    "timed out": "check that the host is on and its SSH port can be reached, or exclude it (--exclude {host})",
}
DEFAULT_REMEDY = "check that the host is on and runs sshd, or exclude it (--exclude {host})"


@dataclass(frozen=True)
class HostAnswer:
    """Answer of one host: ``value``, or the ``problem`` that prevented it."""

    host: str
    value: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class HostWatch:
    """What is done while hosts work, several times a second.

    Attributes:
        stops: whether they are not waited for any longer.
        tell: receives what each host that works has said last of its progress; empty: nothing.
        say: receives that a host which gave no answer in time is only busy, and is waited for longer, as much as it is
            loaded; None: it is not.
    """

    stops: Callable[[], bool] = lambda: False
    tell: Callable[[Mapping[str, str]], None] = lambda said: None
    say: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Transport:
    """Connection to hosts.

    Attributes:
        remote: use SSH; false runs programs on this host.
        ssh_port: port of sshd; None leaves it to SSH's configuration.
        connect_timeout_s: seconds until a host counts as unreachable.
        prefixes: words before a command that make it run on a host, instead of SSH.
        load_command: its last line is the number of cores; the one before begins with how many processes want to run.
    """

    remote: bool
    ssh_port: int | None = None
    connect_timeout_s: int = 10
    prefixes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    load_command: Sequence[str] = ("sh", "-c", "echo; cat /proc/loadavg; getconf _NPROCESSORS_ONLN")

    def run(
        self, hosts: Sequence[str], program: Path, request: object, *, timeout_s: float, watch: HostWatch | None = None
    ) -> list[HostAnswer]:
        """Run the same program on all hosts, in parallel; an exception, as a signal may raise, ends it everywhere.

        Args:
            program: a Python file that needs only the standard library and defines ``answer(request)``.
            request: argument of ``answer``, sent as JSON.
            timeout_s: time limit per host.
            watch: what is done meanwhile; None: nothing.

        Returns:
            One answer per host, in the order of ``hosts``.
        """
        watch, over, said = watch or HostWatch(), Event(), dict[str, str]()
        # On a line of its own: what a login prints may end without one.
        call = (
            f"import json\nprint()\nprint({ANSWER_MARK!r} + json.dumps(answer(json.loads({json.dumps(request)!r}))))\n"
        )
        text = f"{program.read_text(encoding='utf-8')}\n{call}"
        with ThreadPoolExecutor(max_workers=min(MAX_PARALLEL, len(hosts))) as pool:
            try:
                work = [pool.submit(self._run_on, host, text, timeout_s, over, said, watch.say) for host in hosts]
                while wait(work, POLL_S).not_done:
                    if watch.stops():
                        over.set()
                    watch.tell(dict(said))
            except BaseException:
                over.set()
                raise
        return [one.result() for one in work]

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv``, quoted against shells, on a host."""
        if not self.remote:
            return list(argv)
        if prefix := self.prefixes.get(host):
            return [*prefix, *argv]
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={self.connect_timeout_s}"]
        port = [] if self.ssh_port is None else ["-p", str(self.ssh_port)]
        return ["ssh", *options, *port, "--", host, f"exec {shlex.join(argv)}"]

    def _run_on(
        self,
        host: str,
        text: str,
        timeout_s: float,
        over: Event,
        said: dict[str, str],
        say: Callable[[str], None] | None,
    ) -> HostAnswer:
        """Run a program on one host.

        Args:
            text: of the program.
            over: set once nobody waits any longer.
            said: gets what the host says of its progress, as long as it works.
            say: see ``HostWatch``.
        """
        if over.is_set():
            return HostAnswer(host, problem=f"{host}: was not asked, since nobody waits any longer")
        try:
            process = subprocess.Popen(
                self.command(host, [sys.executable, "-"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal that goes does not end it
            )
        except OSError as error:
            return HostAnswer(
                host, problem=f"{host}: ssh cannot be started: {error}; install an SSH client on this host"
            )
        given: bytes | None = text.encode()
        began, limit_s = time.monotonic(), timeout_s
        try:
            while True:
                try:
                    out, err = (one.decode(errors="replace") for one in process.communicate(given, POLL_S))
                    break
                except subprocess.TimeoutExpired as waited:
                    given, said[host] = None, _progress(waited.output or b"")
                if over.is_set():
                    return HostAnswer(host, problem=f"{host}: was not waited for any longer")
                if time.monotonic() - began > limit_s:
                    longer_s = limit_s if say is None else self._longer_s(host, timeout_s, limit_s, say)
                    if longer_s <= limit_s:
                        limit = f"gave no answer in {limit_s:.4g} s"
                        return HostAnswer(host, problem=f"{host}: {limit}; check whether the host hangs")
                    limit_s = longer_s
        finally:
            said.pop(host, None)
            _end(process)
        for line in out.splitlines():
            if line.startswith(ANSWER_MARK):
                return HostAnswer(host, json.loads(line.removeprefix(ANSWER_MARK)))
        return HostAnswer(host, problem=self.failure(host, process.returncode, err))

    def _longer_s(self, host: str, timeout_s: float, limit_s: float, say: Callable[[str], None]) -> float:
        """How long a host may take in all, by what it says of its load; the limit so far where it hangs."""
        try:
            done = subprocess.run(
                self.command(host, self.load_command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=LOAD_S,
                check=True,
                start_new_session=True,
            )
            # A login may print before it, also what is not UTF-8.
            *_, first, last = done.stdout.decode(errors="replace").splitlines()
            load, cores = float(first.split()[0]), int(last)
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return limit_s
        longer_s = patience_s(timeout_s, load, cores)
        if longer_s > limit_s:
            wants = f"{load:g} processes want its {cores} cores"
            say(f"{host}: busy, {wants}; its answer is awaited {longer_s:.0f} s in all")
        return longer_s

    def failure(self, host: str, code: int, said: str) -> str:
        """Message why a host gave no answer, with a remedy.

        Args:
            code: exit code of the command of ``command``.
            said: standard error of that command.
        """
        lines = said.strip().splitlines()
        last = lines[-1] if lines else "no message"
        if self.remote and code == 255:
            remedy = next((text for sign, text in REMEDY_OF_SIGN.items() if sign in said), DEFAULT_REMEDY)
            return f"{host}: cannot be reached over SSH: {last}; {remedy.format(host=host)}"
        if code in (126, 127):
            return (
                f"{host}: {sys.executable} cannot be run there: {last}; "
                "install the same Python environment at the same path on every host"
            )
        return f"{host}: the check ended with exit code {code}: {last}"


def patience_s(timeout_s: float, load: float, cores: int) -> float:
    """How long a host may take for what takes an idle one less than a time limit.

    A host with a process for each core, or fewer, gets no longer: it hangs.

    Args:
        load: processes that want to run there.
    """
    each = load / max(1, cores)
    return timeout_s if each <= 1 else max(timeout_s, min(LONGEST_WAIT_S, timeout_s * (1 + each)))


def _progress(out: bytes) -> str:
    """The last whole line of progress of a program; empty: it has said nothing."""
    lines = [line for line in out.decode(errors="replace").split("\n")[:-1] if line.startswith(PROGRESS_MARK)]
    return lines[-1].removeprefix(PROGRESS_MARK).strip() if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program that still runs, and all that it has started here."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
