"""Does somebody who waits see how far the runs are?"""

from __future__ import annotations

import io
import time

from rich.console import Console

from megasdc.common.program import GIB, report_bytes, runs_bar


def _drawn(minutes: float | None, *told: tuple[int, int | None], seconds: float = 0.0) -> str:
    text = io.StringIO()
    began = time.monotonic()
    clock = iter([began, began, began + seconds, began + seconds])
    console = Console(file=text, force_terminal=True, width=120)
    with runs_bar(console, "verifying", minutes, lambda: next(clock)) as on_progress:
        for done, total in told:
            on_progress(done, total)
    return text.getvalue()


def test_runs() -> None:
    """Until the first run ranks are starting; then runs are counted, of all where that is known."""
    assert "verifying: starting ranks" in _drawn(None, (0, 8))
    drawn = _drawn(None, (0, 8), (2, 8))
    assert "verifying: 2 of 8 runs" in drawn and "25%" in drawn


def test_time() -> None:
    """Where time decides the bar is one of time, from the first run on."""
    drawn = _drawn(10.0, (1, None), (7, None), seconds=120.0)
    assert "verifying: 7 runs" in drawn and "20%" in drawn


def test_bytes_are_told_every_few_seconds() -> None:
    """How many of all; what takes no longer is not told."""
    told: list[str] = []
    advance = report_bytes(told.append, 4 * GIB, 0.0)
    for count in (GIB, GIB // 2):
        advance(count)
    report_bytes(told.append, 4 * GIB)(GIB)
    assert told == ["1.0 of 4.0 GiB", "1.5 of 4.0 GiB"]
