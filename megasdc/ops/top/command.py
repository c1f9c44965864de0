"""``megasdc top``: draws a run again and again until it is over."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from megasdc.common.errors import DataError
from megasdc.ops.top.replicas import ReplicasWatcher, watcher_of
from megasdc.ops.top.screen import Screen
from megasdc.ops.top.view import RunWatcher

WAIT_S = 30.0
"""A launch may be checking its hosts, which takes seconds, before it writes into the run folder."""


def wait_for_run(
    folder: Path, console: Console, wait_s: float = WAIT_S, interval_s: float = 0.5
) -> RunWatcher | ReplicasWatcher:
    """The watcher of a run folder, once it holds a run.

    Args:
        console: is told what is waited for.
        wait_s: seconds after which the folder is refused.
        interval_s: seconds between two looks.

    Raises:
        DataError: it holds no run by then, or a study.
    """
    until, told = time.monotonic() + wait_s, False
    while True:
        # A launch makes folders before files; what comes after this look is of a run that is being started.
        empty = not any(one.is_file() for one in folder.rglob("*"))
        try:
            return watcher_of(folder)
        except DataError:
            if not empty or time.monotonic() > until:
                raise
        if not told:
            console.print(f"{folder} holds no run yet; waiting up to {wait_s:.0f} s for its start (Ctrl-C ends)")
            told = True
        time.sleep(interval_s)


def watch_run(watcher: RunWatcher | ReplicasWatcher, console: Console, interval_s: float) -> None:
    """Draws a run on a terminal until it is over, and then once more below what was there before.

    Args:
        interval_s: seconds between two looks.
    """
    view = watcher.read()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not view.over:
            live.update(Screen(view, console.height), refresh=True)
            time.sleep(interval_s)
            view = watcher.read()
    console.print(Screen(view))
