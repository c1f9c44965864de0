"""Has somebody asked this rank to stop? Signals are caught from the very start and read at step boundaries."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Remembers the last stop signal instead of dying from it, from creation until ``close``.

    Attributes:
        received: number of the signal; 0: none yet.
    """

    def __init__(self) -> None:
        self.received = 0
        self._previous = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.received = number

    def close(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
