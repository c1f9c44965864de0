"""Transport of Python programs to many hosts at once over SSH, and of their answers.

The program travels through SSH's standard input and its answer comes back as a message (``megasdc.common.wire``), so
that the host needs only Python, no argument is read by a shell, and login messages do not matter, whatever their
encoding and wherever they are printed. Hosts that have megasdc run modules of it in the same way, which also send how
far they are. Who waits may give up: what still runs is ended, here and, a module's at the end of its input, there.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from megasdc.common.wire import MARK, VERSION, encode_message
from megasdc.ops.launch.host_process import ANSWER_BYTES, KILL_S, HostProcess, exchange

MAX_PARALLEL = 64
POLL_S = 0.2
LOAD_S = 20.0
"""Seconds that a busy host has to say how busy it is."""
LONGEST_WAIT_S = 600.0
"""The longest that is waited for a busy host."""
REMEDY_OF_SIGN = {
    "Permission denied": "let this user log in without a password (ssh-copy-id {host})",
    "Host key verification failed": "accept its host key once (ssh {host} true)",
    "Could not resolve": "use a name that this host can resolve, or add it to /etc/hosts",
    "timed out": "check that the host is on and its SSH port can be reached, or exclude it (--exclude {host})",
}
DEFAULT_REMEDY = "check that the host is on and runs sshd, or exclude it (--exclude {host})"
REFUSED_REMEDY = "see that the host runs the same as others, or exclude it (--exclude {host})"
_CALL = f"""
import json
_text = json.dumps({{"answer": answer(json.loads(REQUEST))}}) + "\\n"
print(f"\\n{MARK} {VERSION} {{len(_text)}}\\n{{_text}}", end="")  # what a login has printed may have no end of its line
"""
"""Sent behind a program, with its request in it."""


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
class HostModule:
    """A module that runs on hosts as ranks are run there, and exchanges messages with its caller.

    Attributes:
        name: of the module.
        arguments: of its command line.
        environment: variables beside those that a host has.
        python_path: folders of modules, in order; empty: those that a host knows.
        cwd: working folder; empty: that of a login.
    """

    name: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    python_path: Sequence[str] = ()
    cwd: str = ""

    @property
    def argv(self) -> list[str]:
        """The command on a host."""
        path = {"PYTHONPATH": os.pathsep.join(self.python_path)} if self.python_path else {}
        variables = [f"{name}={value}" for name, value in {**self.environment, **path}.items()]
        words = ["env", *variables, sys.executable, "-m", self.name, *self.arguments]
        return ["sh", "-c", 'cd "$0" && exec "$@"', self.cwd, *words] if self.cwd else words


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
        self,
        hosts: Sequence[str],
        program: Path | HostModule,
        request: Any,
        *,
        timeout_s: float,
        watch: HostWatch | None = None,
    ) -> list[HostAnswer]:
        """Run the same program on all hosts, in parallel; an exception, as a signal may raise, ends it everywhere.

        Args:
            program: a Python file that needs only the standard library and defines ``answer(request)``; or a module
                that begins with ``read_request`` and sends its answer by ``send_to_caller``, both of
                ``megasdc.ops.launch.host_process``.
            request: argument of ``answer``, sent as JSON; or what ``read_request`` returns, an object.
            timeout_s: time limit per host.
            watch: what is done meanwhile; None: nothing.

        Returns:
            One answer per host, in the order of ``hosts``.
        """
        watch, over, said = watch or HostWatch(), Event(), dict[str, str]()
        if isinstance(program, HostModule):
            argv, content = program.argv, encode_message(request, ANSWER_BYTES)
        else:
            call = _CALL.replace("REQUEST", repr(json.dumps(request)))
            argv, content = [sys.executable, "-"], f"{program.read_text(encoding='utf-8')}\n{call}".encode()

        def start(host: str) -> HostProcess:
            process = self.start(host, argv)
            process.write(content)
            if isinstance(program, Path):
                process.finish()  # Python begins at its end
            return process

        with ThreadPoolExecutor(max_workers=min(MAX_PARALLEL, len(hosts))) as pool:
            try:
                work = [pool.submit(self._run_on, host, start, timeout_s, over, said, watch.say) for host in hosts]
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
        start: Callable[[str], HostProcess],
        timeout_s: float,
        over: Event,
        said: dict[str, str],
        say: Callable[[str], None] | None,
    ) -> HostAnswer:
        """Run a program on one host.

        Args:
            start: starts what answers, with the request.
            over: set once nobody waits any longer.
            said: gets what the host says of its progress, as long as it works.
            say: see ``HostWatch``.
        """
        if over.is_set():
            return HostAnswer(host, problem=f"{host}: was not asked, since nobody waits any longer")
        try:
            process = start(host)
        except OSError as error:
            return HostAnswer(host, problem=f"{host}: {self.not_started(error)}")
        began, limit_s, grace_s = time.monotonic(), timeout_s, 0.0
        try:
            while process.is_open:
                exchange([process], POLL_S)
                for message in process.received():
                    if "answer" in message:
                        grace_s = KILL_S
                        return HostAnswer(host, message["answer"])
                    said[host] = str(message.get("progress", ""))
                if over.is_set():
                    return HostAnswer(host, problem=f"{host}: was not waited for any longer")
                said.setdefault(host, "")
                if time.monotonic() - began > limit_s:
                    longer_s = limit_s if say is None else self._longer_s(host, timeout_s, limit_s, say)
                    if longer_s <= limit_s:
                        limit = f"gave no answer in {limit_s:.4g} s"
                        return HostAnswer(host, problem=f"{host}: {limit}; check whether the host hangs")
                    limit_s = longer_s
            grace_s = KILL_S
            return HostAnswer(host, problem=self.why_ended(host, process))
        finally:
            said.pop(host, None)
            process.end(grace_s)

    def start(self, host: str, argv: Sequence[str]) -> HostProcess:
        """Start a command on a host.

        Raises:
            OSError: it cannot be started from here; see ``not_started``.
        """
        return HostProcess(self.command(host, argv))

    @staticmethod
    def not_started(error: OSError) -> str:
        """Message for an error of ``start``, with a remedy."""
        return f"ssh cannot be started: {error}; install an SSH client on this host"

    def why_ended(self, host: str, process: HostProcess) -> str:
        """End a process from which no more messages come, and return why there are none, with a remedy."""
        code = process.end(KILL_S)
        if process.problem:
            return f"{host}: what it sends is refused: {process.problem}; {REFUSED_REMEDY.format(host=host)}"
        text = self.failure(host, code, process.errors)
        return f"{text}; {process.unfinished}" if process.unfinished else text

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
