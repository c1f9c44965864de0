"""Has somebody asked this process to stop? Ranks read it at step boundaries, commands end after cleaning up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


AUDIT_SIGNAL = signal.SIGUSR2


class StopSignals:
    """Remembers the last stop signal instead of dying from it, from creation until ``close``; for ranks.

    SIGUSR2 asks for an audit and stops nothing.

    Attributes:
        received: number of the signal; 0: none yet.
        audit_requested: whether an audit was asked for since ``take_audit_request``.
    """

    def __init__(self) -> None:
        self.received = 0
        self.audit_requested = False
        numbers = (*STOP_SIGNALS, AUDIT_SIGNAL)
        self._previous = {number: signal.signal(number, self._on_signal) for number in numbers}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == AUDIT_SIGNAL:
            self.audit_requested = True
        else:
            self.received = number

    def request_audit(self) -> None:
        """Ask for an audit as the signal does."""
        self.audit_requested = True

    def take_audit_request(self) -> bool:
        """Whether an audit was asked for since the last call."""
        asked, self.audit_requested = self.audit_requested, False
        return asked

    def close(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Turn stop signals into ``SystemExit`` with 128 + signal, so that a command removes what it began to write.

    They are SIGINT, SIGTERM and SIGHUP. Signals after the first are ignored, so that they do not interrupt that. SIGINT
    counts also where a script started the process in the background, which makes Python ignore it; an ignored SIGHUP
    stays ignored, for ``nohup`` asks for it.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
