"""Watched processes of a cell's ranks; a death or a hang is a result, not an error.

The watcher computes nothing itself: it starts the rank, reads its reports, and ends it when it makes no progress.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.parallel.processes import start_module

POLL_S = 0.1
START_S = 300.0
"""Seconds that imports, groups and the model may take, in addition to the timeout."""
SILENCE_S = 10.0
"""Seconds without a sign of life after which a hanging process counts as frozen."""
REPORT_S = 1.0
"""Seconds between progress reports."""
LOG_LINES = 15


@dataclass
class RankReport:
    """Report on one rank of a cell; ``rank`` is its watcher's global rank, a negative ``code`` the signal of its end.

    ``ended``: ``done``, ``died``, ``hung``, ``failed`` with a documented error, ``stopped`` after another rank of the
    cell had ended, or ``absent``; ``differences``: parts of the key that differ, as [golden, here]; ``position``:
    number of results computed when it ended. Of each fault of a drill ``changed`` counts how often it changed bits, of
    each process fault ``acted`` is 1 if it acted; None while unknown.
    """

    host: str
    rank: int
    cell: int
    cell_rank: int
    ended: str = "absent"
    code: int = 0
    differences: dict[str, Any] = field(default_factory=dict)
    key: dict[str, Any] = field(default_factory=dict)
    algorithm: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    position: int = 0
    last: str = ""
    silent_s: float = 0.0
    detail: str = ""
    changed: list[int] | None = None
    acted: list[int] | None = None


class CellRank:
    """The process of one rank of a cell, and its report, which is filled in as the rank reports.

    ``request``: of ``megasdc.ops.golden.rank``; written to a file in its ``folder`` (the rank's own or its cell's),
    since a drill can be longer than an argument may be. ``environment``: with rendezvous and rank. ``timeout_s``:
    seconds without progress after which the rank counts as hung. ``fresh``: see ``start_module``.
    """

    def __init__(
        self,
        request: dict[str, Any],
        environment: dict[str, str],
        report: RankReport,
        timeout_s: float,
        fresh: bool = False,
    ) -> None:
        folder = Path(request["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        self.report = report
        self._timeout_s = timeout_s
        self._limit_s = timeout_s + START_S
        self._reports = folder / f"rank_{report.cell_rank:05d}.jsonl"
        self._reports.touch()
        self._log = folder / f"rank_{report.cell_rank:05d}.log"
        asked = folder / f"request_{report.cell_rank:05d}.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        self._offset = 0
        self._progress_at = self._pulse_at = time.monotonic()
        with open(self._log, "wb") as log:
            streams = (subprocess.DEVNULL, log.fileno(), log.fileno())
            self._process = start_module("megasdc.ops.golden.rank", [str(asked)], environment, *streams, fresh)

    @property
    def pid(self) -> int:
        """Process id of the rank."""
        return self._process.pid

    def poll(self) -> bool:
        """Read new reports; returns whether the rank has ended or hung."""
        code = self._process.poll()  # before reading, so that no report written before the end is missed
        self._read()
        if code is not None:
            self._end(code)
            return True
        if time.monotonic() - self._progress_at > self._limit_s:
            self._hang()
            return True
        return False

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        with open(self._reports, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._handle_message(json.loads(line))

    def _handle_message(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        message.pop("time")
        self._pulse_at = time.monotonic()
        report = self.report
        if kind == "pulse":
            if message["results"] == report.position:
                return
            report.position, report.last = message["results"], message["last"]
        elif kind == "ready":
            self._limit_s = self._timeout_s
        elif kind == "key":
            report.key, report.algorithm, report.differences = (
                message["key"],
                message["algorithm"],
                message["differences"],
            )
        elif kind == "run":
            report.runs.append(message)
        elif kind == "drill":
            report.changed, report.acted = message["changed"], message["acted"]
        elif kind == "error":
            report.ended, report.detail = "failed", f"{message['type']}: {message['text']}"
        elif kind == "done":
            report.ended = "done"
        self._progress_at = time.monotonic()

    def _end(self, code: int) -> None:
        report = self.report
        report.code = code
        if report.ended == "done":
            return
        if report.ended == "failed" and code > 0:
            return
        report.ended = "died"
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        report.detail = f"{reason}; {self._tail()}" if code > 0 else reason

    def _hang(self) -> None:
        report = self.report
        report.ended = "hung"
        report.silent_s = time.monotonic() - self._pulse_at
        frozen = report.silent_s > min(SILENCE_S, self._limit_s / 2)
        where = f"last result: {report.last}" if report.last else "before its first result"
        report.detail = f"{'frozen, no sign of life' if frozen else 'no progress'} for {self._limit_s:.0f} s; {where}"
        self.stop()

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "end of its output: " + " | ".join(lines[-LOG_LINES:]) if lines else "without output"


def watch_ranks(ranks: list[CellRank], on_report: Callable[[], None] = lambda: None, grace_s: float = 30.0) -> None:
    """Follow started ranks on this host until all have ended; ``on_report`` is called once a second.

    Once one rank of a cell has died, hung or failed, the others of the cell cannot continue and get ``grace_s`` seconds
    to end by themselves; other cells are not affected.
    """
    running = list(ranks)
    deadlines: dict[int, float] = {}  # by cell
    report_at = time.monotonic()
    try:
        while running:
            ended = [rank for rank in running if rank.poll()]
            now = time.monotonic()
            late = [rank for rank in running if rank not in ended and now > deadlines.get(rank.report.cell, now)]
            for rank in late:
                rank.stop()
                rank.report.ended = "stopped"
                rank.report.detail = "ended, because another rank of its cell had"
            for rank in ended:
                if rank.report.ended in ("died", "hung", "failed"):
                    deadlines.setdefault(rank.report.cell, now + grace_s)
            running = [rank for rank in running if rank not in ended and rank not in late]
            if now >= report_at:
                on_report()
                report_at = now + REPORT_S
            if running:
                time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.stop()
