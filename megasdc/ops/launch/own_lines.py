"""Redirection of lines of libraries to files of the run folder; the console is for ranks and megasdc.

The log of DeepSpeed's launcher goes to ``launcher_HOST.log``, what native code says in a rank to the rank's log.

The first holds command lines with encoded arguments, started processes and accelerator detection. DeepSpeed logs to the
standard output at its import, so its launcher is imported with standard output set to the file. Ranks inherit the real
streams, and a traceback that ends the launcher still reaches the console.
"""

from __future__ import annotations

import base64
import io
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from megasdc.common.credentials import without_credentials
from megasdc.common.durable import LineFile
from megasdc.ops.launch.orphans import NODE_PID_VARIABLE

FOLDER_VARIABLE = "MEGASDC_LAUNCHER_LOGS"
FOLDER_OPTION = "--launcher_logs="
CPP_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"
"""Set by the user: he wants to see the lines of PyTorch's C++ code, which stay on the console."""
_OF_DEEPSPEED = re.compile(r"\[\d{4}-\d\d-\d\d ")
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


def native_lines_to_log(run_dir: Path | str, rank: int) -> bool:
    """Send what native code of this rank writes to standard error (descriptor 2) to the rank's log; returns whether.

    PyTorch's c10d writes there by itself, on each rank, where another one has ended. Python's standard error stays on
    the console. Programs that this process starts write to the log, too. Only under our launcher of a host, which
    prints the last lines if the rank is aborted, and not where the user wants to see them.
    """
    if NODE_PID_VARIABLE not in os.environ or CPP_LEVEL_VARIABLE in os.environ:
        return False
    path = rank_log(logs_folder(run_dir), rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(file, f"{_start_of(os.getpid())}\n".encode())
    except OSError:  # told where DeepSpeed's lines are to go there
        return False
    console = io.FileIO(os.dup(2), "w")  # no child process has it
    os.dup2(file, 2)
    os.close(file)
    sys.stderr = io.TextIOWrapper(console, sys.stderr.encoding, sys.stderr.errors, write_through=True)  # as python -u
    return True


def rank_log(folder: Path, rank: int) -> Path:
    """File of a rank's lines of libraries."""
    return folder / f"deepspeed_{rank:05d}.log"


def last_native_lines(folder: Path, rank: int, pid: int) -> list[str]:
    """Last lines of a rank's process in its log, behind the last one of DeepSpeed; empty: none, or it is not known."""
    _, start, text = _read(rank_log(folder, rank)).rpartition(f"{_start_of(pid)}\n")
    lines = text.splitlines() if start else []
    first = next((place for place in range(len(lines), 0, -1) if _OF_DEEPSPEED.match(lines[place - 1])), 0)
    return _last_of(lines[first:])


def _start_of(pid: int) -> str:
    return f"--- process {pid}"


def last_lines(folder: Path) -> list[str]:
    """Last lines of this host's file, long ones truncated; empty if there is no file."""
    return _last_of(_read(_log_of_this_host(folder)).rpartition("--- ")[2].splitlines()[1:])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _last_of(lines: Sequence[str]) -> list[str]:
    return [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..." for line in lines[-LAST_LINES:]]


def _log_of_this_host(folder: Path | str) -> Path:
    return Path(folder) / f"launcher_{socket.gethostname()}.log"
