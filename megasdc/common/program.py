"""Life cycle of a command: Ctrl-C, terminals, progress bars, closed pipes, full disks, and our own errors.

rich is imported when a bar is drawn, since many commands draw none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from megasdc.common.credentials import without_credentials
from megasdc.common.durable import replacing
from megasdc.common.errors import ConfigError, MegasdcError, StorageError

if TYPE_CHECKING:
    from rich.console import Console

FRESH_LINE, SHOWN_CURSOR = "\r\x1b[K", "\x1b[?25h"
"""Control sequences: back to the beginning of a line, which is erased; the cursor, which a bar hides, is shown."""
PIPED_WIDTH = 2000
"""Width of a line in characters where standard output is no terminal: wider than any table, so that none is cut."""
INTERRUPTED, CLOSED_PIPE = 128 + signal.SIGINT, 128 + signal.SIGPIPE
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (C0 and C1), those that turn the order of what follows, halves of pairs that no stream takes."""
_HOME = re.compile(r"~([\w.-]*/|$)")
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""Error numbers that only writing raises."""


def output_console() -> Console:
    """Standard output for tables; where it is no terminal they are as wide as they need, whatever COLUMNS says."""
    return safe_console() if sys.stdout.isatty() else safe_console(width=PIPED_WIDTH)


def start(module: str, function: str = "main") -> None:
    """Import a module and call a function of it; Ctrl-C before and after its work ends the process at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell lets background jobs ignore it
        signal.signal(signal.SIGINT, _leave)
    getattr(import_module(module), function)()


def run_program(application: Callable[[], Any], name: str, unwritten: int = StorageError.exit_code) -> NoReturn:
    """Run a command line, and end the process with a documented exit code; expected errors print no traceback.

    Args:
        application: function that parses the arguments, works, prints, and ends with SystemExit.
        name: name of the program, prefix of its messages.
        unwritten: exit code where the result cannot be written, or for an OSError that nothing else handled.
    """
    refuse_pipes()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # ASCII-only terminals, file names that are not UTF-8
    try:
        code = _exit_code(application, name)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            code = CLOSED_PIPE
        else:
            code = unwritten
            _print_error(name, f"{error.filename or 'the result cannot be written'}: {error.strerror or error}")
    if code in (CLOSED_PIPE, unwritten):
        _forget_output()
    sys.exit(code)


@cache
def refuse_pipes() -> None:
    """In this whole process, opening a named pipe for reading or appending raises OSError.

    It would wait for a writer that may never come, where a run or a checkpoint has a pipe in place of a file. A pipe
    may still be opened for writing alone, as the target of a result.
    """
    sys.addaudithook(_refuse_pipe)


def _refuse_pipe(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not isinstance(arguments[0], str | bytes):
        return
    path, flags = os.fsdecode(arguments[0]), arguments[2]
    only_written = flags & os.O_ACCMODE == os.O_WRONLY and not flags & os.O_APPEND
    if not only_written and not flags & os.O_NONBLOCK and _is_named_pipe(path):
        raise OSError(errno.ENXIO, "it is a pipe, not a file", path)


def _is_named_pipe(path: str) -> bool:
    """False for an anonymous pipe, such as that of ``<(command)``."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode) and os.path.exists(os.path.realpath(path))
    except (OSError, ValueError):
        return False


def _leave(number: int, frame: Any) -> NoReturn:
    """Handler of SIGINT where nothing is to be undone."""
    os._exit(INTERRUPTED)


def _interruptible(application: Callable[[], Any]) -> None:
    """Call the application; Ctrl-C is a KeyboardInterrupt in it alone."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        application()
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        application()
    finally:
        signal.signal(signal.SIGINT, _leave)


def _exit_code(application: Callable[[], Any], name: str) -> Any:
    try:
        _interruptible(application)
    except MegasdcError as error:
        _print_error(name, str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as ended:
        # typer and rich exit with 1 on a closed pipe, where 1 would otherwise be a verdict.
        gone = ended.code == 1 and any(isinstance(cause, BrokenPipeError) for cause in _causes(ended))
        return CLOSED_PIPE if gone else ended.code
    return 0


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _print_error(name: str, text: str) -> None:
    with contextlib.suppress(OSError):  # the exit code reports it too
        print(printable(f"{name}: error: {without_credentials(text)}"), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A text for a terminal: characters that would control it are shown as escapes, but for tabs and ends of lines.

    What stands in a run's files and in models may come from anybody.
    """
    return _CONTROLS.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text of a command, ``printable``.

    Args:
        err: whether it goes to standard error.
        nl: whether a line end follows.
    """
    import typer

    typer.echo(printable(text), err=err, nl=nl)


def line_start(stream: TextIO) -> str:
    """What stands before a line: on a terminal it removes a bar that another process has drawn there."""
    return FRESH_LINE if stream.isatty() else ""


def safe_console(**options: Any) -> Console:
    """A console of rich's whose texts are ``printable``; colours and places are rich's own.

    Args:
        options: options of ``rich.console.Console``.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        """Console that makes each piece of text printable."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for one in super().render(renderable, options):
                yield one if one.control else Segment(printable(one.text), one.style)

    return SafeConsole(**options)


def _forget_output() -> None:
    """Point stdout at /dev/null: Python would flush its buffer once more at exit, and report the failure."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def at_home(value: Any) -> Any:
    """A path that a command is given, or several, with the home folder in place of ``~``: shells leave ``--out=~/x``.

    What is no path is returned as it is.

    Raises:
        ConfigError: there is no such home folder; the path would be one in a folder of the name ``~``.
    """
    if isinstance(value, list | tuple):
        return type(value)(map(at_home, value))
    if not isinstance(value, str | Path) or not _HOME.match(str(value)):
        return value
    whole = os.path.expanduser(value)
    if whole == str(value):
        raise ConfigError(f"{value}: the home folder is not known; write the whole path, also of a folder named `~`")
    return type(value)(whole)


def why_unreadable(path: str | os.PathLike[str], *, missing: bool = False) -> str | None:
    """Reason why a command cannot read a path: no permission, a named pipe, a device; None: it can.

    An anonymous pipe, such as that of ``<(command)``, is accepted; reading a named one may wait for ever.

    Args:
        path: a file or folder.
        missing: whether a path that does not exist is reported too.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "is not there" if missing else None
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISFIFO(mode) and not os.path.exists(os.path.realpath(path)):
        return None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return "is neither a file nor a folder, but a pipe, a socket or a device; give its content as a file"
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        return "cannot be read: Permission denied; ask its owner for the right to"
    return None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: on failure the previous content remains.

    A symbolic link is followed and its target replaced; a device or a pipe is written directly.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    with replacing(path, "wb") as file:
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, file.name)
        file.write(data)


GIB = 1 << 30
OnProgress = Callable[[str, int, int], None]
"""Function called with the name of the work, the number of its finished parts, and the number of all parts."""


@contextmanager
def progress_bars(*, quiet: bool = False, console: Console | None = None) -> Iterator[OnProgress]:
    """Draw a bar for each kind of work that is reported.

    Refreshed only when called, so that it takes no processor time from what is measured.

    Args:
        quiet: whether nothing is drawn.
        console: output; None: standard error.
    """
    with _bar("count", console, quiet, auto_refresh=False) as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)
            bar.refresh()

        yield show


@contextmanager
def parts_bar(description: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Draw a bar of parts; yields a function to call after each.

    Args:
        description: name of the work.
        total: number of parts.
        quiet: whether nothing is drawn.
    """
    with _bar("count", None, quiet) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def bytes_bar(description: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Draw a bar in bytes and bytes per second; yields a function to call with the bytes of each part.

    Args:
        description: name of the work.
        total: number of bytes.
        quiet: whether nothing is drawn.
    """
    with _bar("bytes", None, quiet) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


def report_bytes(say: Callable[[str], None], total: int, every_s: float = 10.0) -> Callable[[int], None]:
    """Function to call with the number of bytes of each part, which reports the progress every few seconds.

    Args:
        say: function that gets a text such as ``1.5 of 64.0 GiB``.
        total: number of all bytes.
        every_s: seconds between reports; work that takes no longer is not reported.
    """
    done, told_at = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, told_at
        done += count
        if time.monotonic() - told_at >= every_s:
            told_at = time.monotonic()
            say(f"{done / GIB:,.1f} of {total / GIB:,.1f} GiB")

    return advance


@contextmanager
def runs_bar(
    console: Console,
    what: str,
    minutes: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    unit: str = "runs",
) -> Iterator[Callable[[int, int | None], None]]:
    """Draw a bar of runs; yields a function of (runs done, total; None where time decides).

    Args:
        console: output.
        what: name of the work.
        minutes: duration after the first run, if time decides; the bar then shows time.
        clock: function that returns the time in seconds.
        unit: name of the counted unit.
    """
    with _bar("share", console, False) as bar:
        task = bar.add_task(f"{what}: starting ranks", total=None)
        began_at: float | None = None

        def update(done: int, total: int | None) -> None:
            nonlocal began_at
            if not done:
                return
            began_at = clock() if began_at is None else began_at
            of_all = f" of {total:,}" if total is not None else ""
            completed, full = (done, total) if minutes is None else (clock() - began_at, 60.0 * minutes)
            bar.update(task, completed=completed, total=full, description=f"{what}: {done:,}{of_all} {unit}")

        yield update


def _bar(kind: str, console: Console | None, quiet: bool, **settings: Any) -> Any:
    """Rich's Progress with the columns of a kind; see ``drawn_bar``."""
    from rich import progress

    columns = {
        "count": (progress.MofNCompleteColumn(), progress.TimeElapsedColumn()),
        "share": (progress.TaskProgressColumn(), progress.TimeElapsedColumn()),
        "bytes": (progress.DownloadColumn(), progress.TransferSpeedColumn()),
    }[kind]
    described = (progress.TextColumn("{task.description}"), progress.BarColumn())
    return drawn_bar(*described, *columns, progress.TimeRemainingColumn(), console=console, quiet=quiet, **settings)


def drawn_bar(*columns: Any, console: Console | None = None, quiet: bool = False, **settings: Any) -> Any:
    """Rich's Progress, which without a terminal draws nothing, not even its blank line.

    Args:
        *columns: of rich.
        console: output; None: standard error.
        quiet: whether nothing is drawn on a terminal either.
        **settings: of rich's Progress; by default it is gone at its end.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = console or Console(stderr=True)
    settings = {"transient": True, **settings}
    return Progress(*columns, console=console, disable=quiet or not console.is_terminal, **settings)
