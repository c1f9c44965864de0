"""Transport of a Python program to many hosts at once over SSH, and of their answers.

The program travels through SSH's standard input and its answer comes back as one marked JSON line, so that the host
needs only Python, no argument is read by a shell, and login messages do not matter.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_PARALLEL = 64
ANSWER_MARK = "megasdc-answer:"
REMEDY_OF_SIGN = {
    "Permission denied": "let this user log in without a password (ssh-copy-id {host})",
    "Host key verification failed": "accept its host key once (ssh {host} true)",
    "Could not resolve": "use a name that this host can resolve, or add it to /etc/hosts",
    "timed out": "check that the host is on and its SSH port can be reached, or exclude it (--exclude {host})",
}
DEFAULT_REMEDY = "check that the host is on and runs sshd, or exclude it (--exclude {host})"


@dataclass(frozen=True)
class Answer:
    """Answer of one host: ``value``, or the ``problem`` that prevented it."""

    host: str
    value: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class Transport:
    """Connection to hosts.

    Attributes:
        remote: use SSH; false runs programs on this host.
        ssh_port: port of sshd; None leaves it to SSH's configuration.
        connect_timeout_s: seconds until a host counts as unreachable.
        prefixes: words before a command that make it run on a host, instead of SSH.
    """

    remote: bool
    ssh_port: int | None = None
    connect_timeout_s: int = 10
    prefixes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def run(self, hosts: Sequence[str], program: Path, request: object, *, timeout_s: float) -> list[Answer]:
        """Run the same program on all hosts, in parallel.

        Args:
            program: a Python file that needs only the standard library and defines ``answer(request)``.
            request: argument of ``answer``, sent as JSON.
            timeout_s: time limit per host.

        Returns:
            One answer per host, in the order of ``hosts``.
        """
        call = f"import json\nprint({ANSWER_MARK!r} + json.dumps(answer(json.loads({json.dumps(request)!r}))))\n"
        text = f"{program.read_text(encoding='utf-8')}\n{call}"
        with ThreadPoolExecutor(max_workers=min(MAX_PARALLEL, len(hosts))) as pool:
            return list(pool.map(lambda host: self._run_on(host, text, timeout_s), hosts))

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv``, quoted against shells, on a host."""
        if not self.remote:
            return list(argv)
        if prefix := self.prefixes.get(host):
            return [*prefix, *argv]
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={self.connect_timeout_s}"]
        port = [] if self.ssh_port is None else ["-p", str(self.ssh_port)]
        return ["ssh", *options, *port, "--", host, f"exec {shlex.join(argv)}"]

    def _run_on(self, host: str, text: str, timeout_s: float) -> Answer:
        try:
            done = subprocess.run(
                self.command(host, [sys.executable, "-"]),
                input=text,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                start_new_session=True,  # a terminal that goes does not end it
            )
        except subprocess.TimeoutExpired:
            return Answer(host, problem=f"{host}: gave no answer in {timeout_s:g} s; check whether the host hangs")
        except OSError as error:
            return Answer(host, problem=f"{host}: ssh cannot be started: {error}; install an SSH client on this host")
        for line in done.stdout.splitlines():
            if line.startswith(ANSWER_MARK):
                return Answer(host, json.loads(line.removeprefix(ANSWER_MARK)))
        return Answer(host, problem=self.failure(host, done.returncode, done.stderr))

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
