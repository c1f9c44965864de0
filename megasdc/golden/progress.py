"""What does somebody see who waits for golden runs?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def run_progress(console: Console, what: str) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar of runs; yields what is to be told runs done, and of how many (null: time decides)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(f"{what}: starting ranks", total=None)

        def update(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total, description=what if done else f"{what}: starting ranks")

        yield update
