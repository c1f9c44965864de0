"""Work on a disk or a network that may not answer, in a thread: who asks for it never waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

POLL_S = 1.0
Task = Callable[[], None]


class Background:
    """Calls tasks once a second, in order, and once more at the end.

    A task that fails is tried again a second later; ``problem`` is what it raised last, empty: the last round was well.

    Args:
        name: of the thread.
        tasks: what is done each time.
    """

    def __init__(self, name: str, tasks: Sequence[Task]) -> None:
        self.name, self._tasks = name, tasks
        self._once: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.problem = ""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def once(self, task: Task) -> None:
        """Do something once, before the other tasks of the next round; again where it fails."""
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
        problems, failed = [], []
        while not self._once.empty():
            task = self._once.get()
            if problem := self._problem_of(task):
                problems.append(problem)
                failed.append(task)
        for task in failed:
            self._once.put(task)
        problems += [problem for task in self._tasks if (problem := self._problem_of(task))]
        self.problem = "; ".join(dict.fromkeys(problems))

    @staticmethod
    def _problem_of(task: Task) -> str:
        """Do it; returns what it raised, empty: nothing."""
        try:
            task()
        except OSError as error:
            return str(error)
        except Exception as error:  # the thread goes on; whatever it was is reported
            return repr(error)
        return ""
