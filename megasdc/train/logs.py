"""Lines of a rank: our own on the console, with the rank as prefix; DeepSpeed's in a file of the run folder.

The console is for our lines, the user's prints, and warnings and errors of libraries.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megasdc.common.credentials import without_credentials
from megasdc.common.durable import LineFile
from megasdc.common.program import line_start

if TYPE_CHECKING:
    from rich.console import Console


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Lines on standard error, where this or another rank's process may have drawn a bar."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.bar: Console | None = None
        """Console of this process's bar, above which lines appear while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the line of a record."""
        try:
            if self.bar is not None:
                self.bar.print(self.format(record), markup=False, highlight=False, emoji=False, soft_wrap=True)
            else:
                self.stream.write(f"{line_start(self.stream)}{self.format(record)}\n")
                self.flush()
        except Exception:
            self.handleError(record)


@contextmanager
def lines_above(bar: Console) -> Iterator[None]:
    """Context in which lines of this process appear above a bar that is drawn on a console."""
    handlers = [
        one
        for name in ("megasdc", "DeepSpeed")
        for one in logging.getLogger(name).handlers
        if isinstance(one, ConsoleHandler)
    ]
    for one in handlers:
        one.bar = bar
    try:
        yield
    finally:
        for one in handlers:
            one.bar = None


class _Formatter(logging.Formatter):
    """Lines without secrets, which a library's error may hold."""

    def format(self, record: logging.LogRecord) -> str:
        return without_credentials(super().format(record))


def set_up_logging(rank: int, replica: int | None = None) -> None:
    """Log our own lines to standard error with the rank as prefix, and only warnings of libraries."""
    who = f"rank {rank}" if replica is None else f"replica {replica} rank {rank}"
    for name in ("DeepSpeed", "megatron", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    handler = ConsoleHandler()
    handler.setFormatter(_Formatter(f"%(asctime)s [{who}] %(levelname).1s %(message)s", "%H:%M:%S"))
    # DeepSpeed's other lines go to a file, see LibraryLines.
    errors = ConsoleHandler()
    errors.name = "errors on the console"
    errors.setLevel(logging.ERROR)
    errors.setFormatter(handler.formatter)
    library = logging.getLogger("DeepSpeed")
    library.handlers[:] = [*(one for one in library.handlers if one.name != errors.name), errors]
    root = logging.getLogger("megasdc")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


logger = logging.getLogger(__name__)

LIBRARY = "deepspeed"
PRINTING = ("deepspeed.comm.torch", "deepspeed.runtime.pipe.module", "deepspeed.runtime.pipe.topology")
"""Modules of DeepSpeed (0.19.8) that print while a run is built."""


class LibraryLines(io.TextIOBase):
    """Standard output while DeepSpeed is imported: inside a ``with`` block.

    DeepSpeed logs to the standard output of the time of its import. Lines of other modules go to the console. Until the
    run folder is available, DeepSpeed's lines are buffered; ``keep_on_console`` prints them if the start fails.
    """

    def __init__(self) -> None:
        self._console: TextIO = sys.stdout
        self._kept: list[str] = []
        self._file: TextIO | LineFile | None = None
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
        """Write to the console or, if called by DeepSpeed or ``logging``, to the file or the buffer."""
        writer = str(sys._getframe(1).f_globals.get("__name__", ""))
        if writer != logging.__name__ and writer.partition(".")[0] != LIBRARY:
            return self._console.write(text)
        text = without_credentials(text)
        if self._file is None:
            self._kept.append(text)
        else:
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the file or the console."""
        (self._file or self._console).flush()

    def keep_in(self, run_dir: Path, rank: int) -> None:
        """Write buffered and future lines to ``logs/deepspeed_NNNNN.log``, or to the console if that fails."""
        path = run_dir / "logs" / f"deepspeed_{rank:05d}.log"
        try:
            self._file = LineFile(path)
        except OSError as error:
            logger.warning("%s cannot be written (%s); DeepSpeed's lines stay on the console", path, error.strerror)
            self._file = self._console
        self._write_kept(self._file)

    def keep_on_console(self) -> None:
        """Print buffered and future lines."""
        self._file = self._console
        self._write_kept(self._file)

    def _write_kept(self, file: TextIO | LineFile) -> None:
        file.write("".join(self._kept))
        self._kept.clear()
