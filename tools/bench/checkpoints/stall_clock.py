"""Clocks of the benchmark of what saves cost: inside the calls of savers, and of what runs beside training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megasdc.checkpoint import save
from megasdc.checkpoint.snapshot import Snapshot
from megasdc.checkpoint.writer_process import StoreTask, TaskResult, WriterProcess
from tools.bench.clocks import Clock

WAIT, CAPTURE, ALLOCATE = "wait", "capture", "allocate"
"""Parts of a saver's calls: until the copy is whole, pickling, and memory for the snapshot."""


@dataclass(frozen=True)
class Moved:
    """Bytes that were copied into a snapshot, or stored by a writer; ``began`` is on ``time.perf_counter``."""

    saver: str
    began: float
    size_bytes: int
    seconds: float


class SaveClock(Clock):
    """Times the savers' calls in this process, by saver and part; what it replaces stays replaced.

    Attributes:
        parts: seconds since ``pop_parts``; of a saver by its name, and of a part as ``saver/part``.
        copies: into snapshots so far, beside training.
        stores: by writers so far.
        open: tasks of writers that have no answer yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Moved] = []
        self.stores: list[Moved] = []
        self.open = 0
        self._saver = ""
        self._began: dict[int, tuple[str, float]] = {}
        self._sent: dict[int, list[tuple[str, float, int]]] = {}

    def timed(self, part: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A call of a saver, or within one of it a part of that."""
        if self._saver:
            return super().timed(f"{self._saver}/{part}", call, *args, **options)
        self._saver = part
        try:
            return super().timed(part, call, *args, **options)
        finally:
            self._saver = ""

    def attach(self) -> None:
        """Time all snapshots and writers of this process from now on."""
        save.capture_engine = self.wrap(CAPTURE, save.capture_engine)
        Snapshot.prepare = self.wrap(ALLOCATE, Snapshot.prepare)  # type: ignore[method-assign, assignment]
        Snapshot.wait = self.wrap(WAIT, Snapshot.wait)  # type: ignore[method-assign, assignment]
        self._watch_copies()
        self._watch_writers()

    def _watch_copies(self) -> None:
        take, copy = Snapshot.start_copy, Snapshot._copy

        def take_noted(snapshot: Snapshot, files: Any) -> None:
            self._began[id(snapshot)] = self._saver, sum(one.layout.size_bytes for one in files)
            take(snapshot, files)

        def copy_timed(snapshot: Snapshot, *args: Any) -> Any:
            saver, size_bytes = self._began[id(snapshot)]
            began = time.perf_counter()
            found = copy(snapshot, *args)
            self.copies.append(Moved(saver, began, int(size_bytes), time.perf_counter() - began))
            return found

        Snapshot.start_copy = take_noted  # type: ignore[method-assign, assignment]
        Snapshot._copy = copy_timed  # type: ignore[method-assign, assignment]

    def _watch_writers(self) -> None:
        send, answer = WriterProcess.send, WriterProcess.poll_result

        def send_noted(process: WriterProcess, task: Any) -> None:
            began = time.perf_counter()
            send(process, task)
            self.open += 1
            size = sum(one.layout.size_bytes for one in task.files) if isinstance(task, StoreTask) else 0
            self._sent.setdefault(id(process), []).append((self._saver, began, size))

        def answer_noted(process: WriterProcess) -> TaskResult | None:
            found = answer(process)
            sent = self._sent.get(id(process))
            if found is not None and sent:
                self.open -= 1
                saver, began, size = sent.pop(0)
                if size:
                    self.stores.append(Moved(saver, began, size, found.took_s))
            return found

        WriterProcess.send = send_noted  # type: ignore[method-assign, assignment]
        WriterProcess.poll_result = answer_noted  # type: ignore[method-assign, assignment]
