"""DeepSpeed's launcher's own lines go to a file of the run folder; the console is for the ranks and for us.

They are command lines with encoded arguments, processes that were started, accelerators that were looked for. DeepSpeed
logs to whatever is standard output when it is imported, so its launcher is imported with the file in that place. Ranks
inherit the real streams, and what ends the launcher with a traceback still reaches them.
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

FOLDER_VARIABLE = "MEGASDC_LAUNCHER_LOGS"
FOLDER_OPTION = "--launcher_logs="
LAST_LINES = 12
LONGEST_LINE = 300


def logs_folder(run_dir: Path | str) -> Path:
    """Where a run folder keeps what libraries print."""
    return Path(run_dir) / "logs"


def folder_option(folder: str) -> str:
    """The folder as one word that no shell misreads."""
    return FOLDER_OPTION + base64.urlsafe_b64encode(folder.encode()).decode()


def take_folder_option(argv: list[str]) -> str | None:
    """Take the option out of a command line; returns its folder, None where it is not there."""
    for word in argv[1:3]:
        if word.startswith(FOLDER_OPTION):
            argv.remove(word)
            return base64.urlsafe_b64decode(word.removeprefix(FOLDER_OPTION)).decode()
    return None


@contextmanager
def own_lines_to(folder: str | None, argv: Sequence[str]) -> Iterator[None]:
    """Import DeepSpeed's launcher inside: what it logs from then on goes to ``launcher_HOST.log`` in a folder.

    Args:
        folder: made if absent; None, or one that cannot be written: the lines stay on the console.
        argv: command line of this process, for the file.
    """
    if folder is None:
        yield
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = open(_log_of_this_host(folder), "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - used to the end
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {' '.join(argv)}\n")
    except OSError as error:
        print(f"{folder} cannot be written ({error.strerror}); DeepSpeed's lines stay here", file=sys.stderr)
        yield
        return
    with redirect_stdout(file), redirect_stderr(file):
        yield


def last_lines(folder: Path) -> list[str]:
    """The end of this host's file, long lines cut; empty where there is none."""
    try:
        text = _log_of_this_host(folder).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = text.rpartition("--- ")[2].splitlines()[1:]
    return [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..." for line in lines[-LAST_LINES:]]


def _log_of_this_host(folder: Path | str) -> Path:
    return Path(folder) / f"launcher_{socket.gethostname()}.log"
