"""Has somebody asked this process to stop? Ranks read it at step boundaries, commands end after cleaning up."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from megasdc.errors import PeerError

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
AUDIT_SIGNAL = signal.SIGUSR2
STUCK_S = 5.0
POLL_S = 1.0

Leave = Callable[[int, BaseException | None], None]


class StartGuard:
    """Ends a rank that is asked to stop while it starts, from creation until ``close``.

    Python's handlers run only when the main thread returns from native code. One that waits there for a rank that has
    been killed would not return before its timeout, and keep its port until then. Until all ranks have met nothing is
    lost by leaving at once, with success; after that a rank leaves when its main thread has heard nothing for seconds.

    Args:
        leave: called in a thread; ends the process.
    """

    def __init__(self, leave: Leave) -> None:
        self._leave = leave
        self._met = False
        self._heard_at = 0.0
        self._closed = threading.Event()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._previous = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="start guard", daemon=True).start()

    def met(self) -> None:
        """From now on the others count on this rank."""
        self._met = True

    def heard(self) -> None:
        """The main thread has seen a stop signal, so that it is not stuck."""
        self._heard_at = time.monotonic()

    def close(self) -> None:
        """Leave stop signals to the training loop; idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            signal.set_wakeup_fd(self._previous)
            os.close(self._writing)  # the thread's sign to end

    def _watch(self) -> None:
        while number := os.read(self._reading, 1):
            if number[0] in STOP_SIGNALS:
                self._stop(signal.Signals(number[0]))
        os.close(self._reading)

    def _stop(self, number: signal.Signals) -> None:
        began = time.monotonic()
        while not self._closed.is_set():
            if not self._met:
                logger.info("%s before all ranks had met: nothing to save", number.name)
                self._leave(0, None)
            if time.monotonic() - max(began, self._heard_at) > STUCK_S:
                error = PeerError(f"{number.name} in the start of the run, while this rank waited for another one")
                logger.error("%s", error)
                self._leave(error.exit_code, error)
            if self._closed.wait(POLL_S):
                return
            os.kill(os.getpid(), number)  # once more: is the main thread still able to hear it?


class StopSignals:
    """Remembers the last stop signal instead of dying from it, from creation until ``close``; for ranks.

    SIGUSR2 asks for an audit and stops nothing.

    Args:
        leave: ends the process, with an exit code and the error behind it; see ``StartGuard``. None: only remember.

    Attributes:
        received: number of the signal; 0: none yet.
        audit_requested: whether an audit was asked for since ``take_audit_request``.
        start: ends a rank that is stopped before it trains; None without ``leave``.
    """

    def __init__(self, leave: Leave | None = None) -> None:
        self.received = 0
        self.audit_requested = False
        self.start = None if leave is None else StartGuard(leave)
        numbers = (*STOP_SIGNALS, AUDIT_SIGNAL)
        self._previous = {number: signal.signal(number, self._on_signal) for number in numbers}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == AUDIT_SIGNAL:
            self.audit_requested = True
        else:
            self.received = number
            if self.start is not None:
                self.start.heard()

    def request_audit(self) -> None:
        """Ask for an audit as the signal does."""
        self.audit_requested = True

    def take_audit_request(self) -> bool:
        """Whether an audit was asked for since the last call."""
        asked, self.audit_requested = self.audit_requested, False
        return asked

    def close(self) -> None:
        """Put the former handlers back."""
        if self.start is not None:
            self.start.close()
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
