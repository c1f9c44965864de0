"""How far is work that goes byte by byte? A bar on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def bytes_bar(description: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Draw a bar in bytes and bytes per second.

    Args:
        description: what is done.
        total: bytes.
        quiet: draw nothing.

    Returns:
        Called with the bytes of each part.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True, disable=quiet)
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)
