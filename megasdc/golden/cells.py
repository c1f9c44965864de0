"""How does a rank of a cell become a process that is watched? A death or a hang of it is a result.

The watcher computes nothing itself: it starts the rank, follows its reports, and ends it when it makes no progress.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL_S = 0.1
START_S = 300.0
"""Seconds that imports, groups and the model may take, more than the timeout."""
SILENCE_S = 10.0
"""Seconds without a sign of life after which a process counts as frozen, once it hangs."""
REPORT_S = 1.0
"""Seconds between two times that progress is told."""
LOG_LINES = 15


@dataclass
class RankReport:
    """What became of one rank.

    Args:
        host: where it ran.
        rank: global rank of the watcher.
        cell: which cell.
        cell_rank: its rank in there.
        ended: ``done``, ``died``, ``hung``, ``failed`` with a documented error, or ``absent``.
        code: exit code; negative: the signal that killed it.
        differences: parts of the key that differ, as [golden, here].
        runs: one finding a run.
        position: results that it had computed when it ended.
        last: address of the last of them.
        silent_s: seconds since its last sign of life, when it ended.
        detail: why, for people.
        changed: of each fault of a drill, how often it changed bits; None while that is not known.
        acted: of each process fault of a drill, whether it acted, as 0 or 1; None while that is not known.
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


class WatchedRank:
    """One rank of a cell, started and followed.

    Args:
        request: what ``megasdc.golden.rank`` is asked; its ``folder`` is the rank's own or its cell's, and takes the
            request too, since a drill can be longer than an argument may be.
        environment: of the process, with rendezvous and rank.
        report: filled in as the rank reports.
        timeout_s: seconds without progress after which the rank hangs.
    """

    def __init__(
        self, request: dict[str, Any], environment: dict[str, str], report: RankReport, timeout_s: float
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
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megasdc.golden.rank", str(asked)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        """Of the rank's process."""
        return self._process.pid

    def poll(self) -> bool:
        """Read new reports; whether the rank has ended, or has made no progress for too long."""
        code = self._process.poll()  # before reading, so that nothing written before the end is missed
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
            self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
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


def watch(ranks: list[WatchedRank], on_report: Callable[[], None] = lambda: None, grace_s: float = 30.0) -> None:
    """Follow ranks on this host until all have ended.

    Once one of a cell has died, hung or failed, the others of the cell cannot go on and get ``grace_s`` seconds to end
    by themselves; other cells are left alone.

    Args:
        ranks: started ones.
        on_report: called once a second.
        grace_s: seconds.
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
