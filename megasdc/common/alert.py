"""Alerts: a command of the user's gets an incident as JSON on its standard input, once for each incident; no torch.

It is started without a shell, has a time limit, and nothing that it does stops a run. Who writes an incident alerts of
it; of several hosts that write the same one in a shared folder, the first.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from megasdc.common.credentials import without_credentials
from megasdc.common.origin import LAUNCH_ID_VARIABLE

LIMIT_S = 10.0
KILLED_S = 2.0
"""What was killed has so long to end, which it does not where it waits for a disk or is another user's."""
_SHOWN_BYTES = 500


def alert(command: Sequence[str], incident: Path, text: str) -> str:
    """Run the command for an incident that nobody has alerted of; returns what went wrong, empty: nothing.

    Where the mark cannot be written that it was alerted of, it is run nevertheless: perhaps once on each host.

    Args:
        command: program and arguments; empty: there are no alerts.
        incident: its JSON file, beside which the mark lies.
        text: content of that file.
    """
    if not command:
        return ""
    try:
        os.close(os.open(incident.with_suffix(".alerted"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return ""
    except OSError:
        pass
    problem = _run(command, text)
    return f"alert of {incident}: {command[0]} {problem}" if problem else ""


def _run(command: Sequence[str], text: str) -> str:
    """What went wrong; its processes are ended at the time limit."""
    environment = {name: value for name, value in os.environ.items() if name != LAUNCH_ID_VARIABLE}
    try:
        with _in_memory("incident") as content, _in_memory("errors") as errors:
            content.write(text.encode())
            content.seek(0)
            process = subprocess.Popen(
                list(command),
                stdin=content,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                with suppress(PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILLED_S)
                given_up = (
                    "" if process.poll() is not None else f", does not end, and is given up (process {process.pid})"
                )
                return f"did not end within {LIMIT_S:.0f} s and was killed{given_up}"
            errors.seek(0)
            text = errors.read(_SHOWN_BYTES).decode("utf-8", "replace").strip()
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        return f"could not be run: {error}"
    return "" if code == 0 else f"ended with {code}: {without_credentials(text)}"


def _in_memory(name: str) -> IO[bytes]:
    """A file that needs no disk."""
    return open(os.memfd_create(name), "w+b")
