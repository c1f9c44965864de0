"""Progress: bars on standard error, of parts, bytes, several kinds of work, runs under a time limit; bytes as text.

rich is imported when a bar is drawn, since many commands draw none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

GIB = 1 << 30
OnProgress = Callable[[str, int, int], None]
"""Called with what is done, how many parts of it are done, and of how many."""


@contextmanager
def progress_bars(*, quiet: bool = False, console: Console | None = None) -> Iterator[OnProgress]:
    """Draw a bar for each kind of work that is reported.

    Refreshed only when called, so that it takes no processor time from what is measured.

    Args:
        quiet: draw nothing.
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
        description: what is done.
        total: number of parts.
        quiet: draw nothing.
    """
    with _bar("count", None, quiet) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def bytes_bar(description: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Draw a bar in bytes and bytes per second; yields a function to call with the bytes of each part.

    Args:
        description: what is done.
        total: bytes.
        quiet: draw nothing.
    """
    with _bar("bytes", None, quiet) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


def report_bytes(say: Callable[[str], None], total: int, every_s: float = 10.0) -> Callable[[int], None]:
    """Make a function to call with the bytes of each part, which says every few seconds how many of all are done.

    Args:
        say: receives ``1.5 of 64.0 GiB``.
        total: bytes.
        every_s: seconds; what takes no longer is not told.
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
        minutes: where time decides: duration after the first run. The bar then shows time.
        clock: seconds.
        unit: what is counted.
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
    """Rich's Progress with the columns of a kind."""
    from rich import progress
    from rich.console import Console

    columns = {
        "count": (progress.MofNCompleteColumn(), progress.TimeElapsedColumn()),
        "share": (progress.TaskProgressColumn(), progress.TimeElapsedColumn()),
        "bytes": (progress.DownloadColumn(), progress.TransferSpeedColumn()),
    }[kind]
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *columns,
        progress.TimeRemainingColumn(),
        console=console or Console(stderr=True),
        disable=quiet,
        transient=True,
        **settings,
    )
