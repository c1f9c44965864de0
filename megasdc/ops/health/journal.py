"""What an agent writes for people and programs: ``health/NODE.jsonl``, and where its ranks are now.

A line every ten seconds, and one for each note. The older half goes when the file is too long. ``NODE.now`` is
replaced each second and goes with the agent.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from megasdc.common.durable import append_bounded

LINE_S = 10.0
MAX_LINES_BYTES = 4 << 20
MAX_WAITING = 100
"""Lines that wait for a disk that does not answer; older ones are dropped and counted."""


class Journal:
    """The files of one host.

    Args:
        health: folder of the run, which exists.
        name: with which the files of this host begin.
        run: name of this start.
        launch: id of the launch; None: without ``megasdc launch``.
    """

    def __init__(self, health: Path, name: str, run: str, launch: str | None) -> None:
        self._path, self._now = health / f"{name}.jsonl", health / f"{name}.now"
        self._start = {"run": run, "launch": launch}
        self._line_at = 0.0
        self._latest = ""
        self._waiting: deque[str] = deque(maxlen=MAX_WAITING)
        self._dropped = 0
        self._closed = False

    def write(self, ranks: list[dict[str, Any]], note: str = "", **more: Any) -> None:
        """Take down where the ranks are: as a line, too, if it is time for one or there is a note; does not wait.

        Args:
            ranks: their positions.
            note: what has happened; empty: nothing.
            **more: further values for the line.
        """
        line = {**self._start, "time": time.time(), "monotonic": time.monotonic(), "note": note, "ranks": ranks}
        line.update(more)
        if self._dropped:
            line["dropped_lines"] = self._dropped
        self._latest = json.dumps(line) + "\n"
        if note or time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + LINE_S
            self._dropped += len(self._waiting) == MAX_WAITING
            self._waiting.append(self._latest)

    def flush(self) -> None:
        """Write what was taken down; may wait for the disk.

        Raises:
            OSError: it cannot be written; lines are kept.
        """
        while self._waiting:
            append_bounded(self._path, self._waiting[0], MAX_LINES_BYTES)
            self._waiting.popleft()
        if self._closed:
            self._now.unlink(missing_ok=True)
            return
        part = self._now.with_name(f".{self._now.name}")
        part.write_text(self._latest, encoding="utf-8")
        os.replace(part, self._now)  # not worth waiting until it is on the disk

    def close(self) -> None:
        """From the next ``flush`` on, nothing tells where the ranks are now."""
        self._closed = True
