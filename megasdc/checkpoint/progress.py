"""Progress bars on standard error, by part or by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(description: str, total: int, enabled: bool) -> Iterator[Callable[[], None]]:
    """Draw a bar with the remaining time if standard error is a terminal.

    Args:
        description: what is done.
        total: number of parts.
        enabled: false: nothing is drawn.

    Returns:
        A function to call after each part.
    """
    if not enabled:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def bytes_bar(description: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Draw a bar in bytes and bytes per second.

    Args:
        description: what is done.
        total: bytes.
        quiet: draw nothing.

    Returns:
        A function to call with the bytes of each part.
    """
    if quiet:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)
