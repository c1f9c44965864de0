"""Redirection of DeepSpeed's launcher log to a file of the run folder; the console is for ranks and megasdc.

It holds command lines with encoded arguments, started processes and accelerator detection. DeepSpeed logs to the
standard output at its import, so its launcher is imported with standard output set to the file. Ranks inherit the real
streams, and a traceback that ends the launcher still reaches the console.
"""

from __future__ import annotations

import base64
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from megasdc.common.credentials import without_credentials
from megasdc.common.durable import LineFile

FOLDER_VARIABLE = "MEGASDC_LAUNCHER_LOGS"
FOLDER_OPTION = "--launcher_logs="
LAST_LINES = 12
LONGEST_LINE = 300


def logs_folder(run_dir: Path | str) -> Path:
    """Folder, in a run folder, for output of libraries."""
    return Path(run_dir) / "logs"


def folder_option(folder: str) -> str:
    """The option with the folder, as one word that no shell misreads."""
    return FOLDER_OPTION + base64.urlsafe_b64encode(folder.encode()).decode()


def pop_folder_option(argv: list[str]) -> str | None:
    """Remove the option from a command line; return its folder, None if it is absent."""
    for word in argv[1:3]:
        if word.startswith(FOLDER_OPTION):
            argv.remove(word)
            return base64.urlsafe_b64decode(word.removeprefix(FOLDER_OPTION)).decode()
    return None


class _Log(LineFile):
    """Lines of DeepSpeed's launcher, which tells the values of variables, without secrets."""

    def write(self, text: str) -> int:
        super().write(without_credentials(text))
        return len(text)


@contextmanager
def own_lines_to(folder: str | None, argv: Sequence[str]) -> Iterator[None]:
    """Context in which to import DeepSpeed's launcher, so that it logs to ``launcher_HOST.log`` in a folder.

    Args:
        folder: created if absent; None, or not writable: the log stays on the console.
        argv: command line of this process, written to the file.
    """
    if folder is None:
        yield
        return
    try:
        file = _Log(_log_of_this_host(folder))
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {' '.join(argv)}\n")
    except OSError as error:
        print(f"{folder} cannot be written ({error.strerror}); DeepSpeed's log stays on the console", file=sys.stderr)
        yield
        return
    with redirect_stdout(file), redirect_stderr(file):
        yield


def last_lines(folder: Path) -> list[str]:
    """Last lines of this host's file, long ones truncated; empty if there is no file."""
    try:
        text = _log_of_this_host(folder).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = text.rpartition("--- ")[2].splitlines()[1:]
    return [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..." for line in lines[-LAST_LINES:]]


def _log_of_this_host(folder: Path | str) -> Path:
    return Path(folder) / f"launcher_{socket.gethostname()}.log"
