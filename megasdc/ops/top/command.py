"""``megasdc top``: draws a run again and again until it is over."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live

from megasdc.ops.top.screen import Screen
from megasdc.ops.top.view import RunWatcher


def watch_run(watcher: RunWatcher, console: Console, interval_s: float) -> None:
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
