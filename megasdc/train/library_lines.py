"""What DeepSpeed says in a rank goes to a file of the run folder; the console is for us and the user's own prints."""

from __future__ import annotations

import io
import logging
import sys
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)

LIBRARY = "deepspeed"
PRINTING = ("deepspeed.comm.torch", "deepspeed.runtime.pipe.module", "deepspeed.runtime.pipe.topology")
"""Modules of DeepSpeed (0.19.8) that print while a run is built."""


class LibraryLines(io.TextIOBase):
    """Standard output while DeepSpeed is imported: inside a ``with`` block.

    DeepSpeed logs to whatever is standard output when it is imported. Lines of other modules go on to the console.
    Until the run folder may be written to, the lines are kept; ``keep_on_console`` prints those of a start that failed.
    """

    def __init__(self) -> None:
        self._console: TextIO = sys.stdout
        self._kept: list[str] = []
        self._file: TextIO | None = None
        self._redirection = ExitStack()

    def __enter__(self) -> LibraryLines:
        self._redirection.enter_context(redirect_stdout(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._redirection.close()
        if kind is not None:
            self.keep_on_console()
        for name in PRINTING:
            if (module := sys.modules.get(name)) is not None:
                own: Any = module
                own.print = partial(print, file=self)

    def write(self, text: str) -> int:
        """Take a text; who writes it is seen from the caller."""
        writer = str(sys._getframe(1).f_globals.get("__name__", ""))
        if writer != logging.__name__ and writer.partition(".")[0] != LIBRARY:
            return self._console.write(text)
        if self._file is None:
            self._kept.append(text)
        else:
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Write out what is buffered."""
        (self._file or self._console).flush()

    def keep_in(self, run_dir: Path, rank: int) -> None:
        """Write what came so far, and what comes, to ``logs/deepspeed_NNNNN.log``; where it cannot, to the console."""
        path = run_dir / "logs" / f"deepspeed_{rank:05d}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - used to the end
        except OSError as error:
            logger.warning("%s cannot be written (%s); DeepSpeed's lines stay on the console", path, error.strerror)
            self._file = self._console
        self._write_kept(self._file)

    def keep_on_console(self) -> None:
        """Print what came so far, and what comes."""
        self._file = self._console
        self._write_kept(self._file)

    def _write_kept(self, file: TextIO) -> None:
        file.write("".join(self._kept))
        self._kept.clear()
