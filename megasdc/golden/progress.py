"""Progress bar of golden runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def run_progress(
    console: Console,
    what: str,
    minutes: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    unit: str = "runs",
) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar of runs; yields a function of (runs done, total; None where time decides).

    Args:
        console: output.
        what: name of the work.
        minutes: where time decides: duration after the first run. The bar then shows time.
        clock: seconds.
        unit: what is counted.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
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
