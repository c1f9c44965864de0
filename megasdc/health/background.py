"""Work on a disk or a network that may not answer, in a thread: who asks for it never waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

POLL_S = 1.0
Task = Callable[[], None]


class Background:
    """Calls tasks once a second, in order, and once more at the end.

    A task that raises OSError is tried again a second later; ``problem`` tells what it said last, and ``num_failed``
    how often that happened.

    Args:
        name: of the thread.
        tasks: what is done each time.
    """

    def __init__(self, name: str, tasks: Sequence[Task]) -> None:
        self.name, self._tasks = name, tasks
        self._once: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.problem, self.num_failed = "", 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def once(self, task: Task) -> None:
        """Do something once, before the other tasks of the next round."""
        self._once.put(task)

    def close(self, timeout_s: float) -> bool:
        """Do everything a last time; returns whether that ended in time."""
        self._closed.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not self._closed.wait(POLL_S):
            self._round()
        self._round()

    def _round(self) -> None:
        while not self._once.empty():
            self._try(self._once.get())
        for task in self._tasks:
            self._try(task)

    def _try(self, task: Task) -> None:
        try:
            task()
        except OSError as error:
            self.problem, self.num_failed = str(error), self.num_failed + 1
