"""Stop signals: ranks read them at step boundaries, commands end after cleaning up."""

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

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
AUDIT_SIGNAL = signal.SIGUSR2
STUCK_S = 5.0
POLL_S = 1.0

Leave = Callable[[int, BaseException | None], None]


class StartGuard:
    """Ends a rank that receives a stop signal while it starts, from creation until ``close``.

    Python's handlers run only when the main thread returns from native code. A thread that waits there for a killed
    rank would not return before its timeout, and would keep its port until then. Until all ranks have met, the rank
    ends at once, with success, since nothing is lost; after that it ends when its main thread has not reacted for
    seconds. ``leave`` ends the process, and is called in a thread.
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
        """All ranks have met: from now on they depend on this rank."""
        self._met = True

    @property
    def is_closed(self) -> bool:
        """Whether the training loop has stop signals now."""
        return self._closed.is_set()

    def heard(self) -> None:
        """The main thread has handled a stop signal, so it is not stuck."""
        self._heard_at = time.monotonic()

    def close(self) -> None:
        """Hand stop signals over to the training loop; idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            signal.set_wakeup_fd(self._previous)
            os.close(self._writing)  # ends the thread

    def _watch(self) -> None:
        while number := os.read(self._reading, 1):
            if number[0] in STOP_SIGNALS:
                self._stop(signal.Signals(number[0]))
        os.close(self._reading)

    def _stop(self, number: signal.Signals) -> None:
        began = time.monotonic()
        while not self._closed.is_set():
            if not self._met:
                logger.info("%s before the process group was set up: nothing to save", number.name)
                self._leave(0, None)
            if time.monotonic() - max(began, self._heard_at) > STUCK_S:
                error = PeerError(f"{number.name} during the start of the run, while this rank waited for another one")
                logger.error("%s", error)
                self._leave(error.exit_code, error)
            if self._closed.wait(POLL_S):
                return
            os.kill(os.getpid(), number)  # again, to see whether the main thread handles it


class StopSignals:
    """Records the last stop signal instead of ending the process, from creation until ``close``; for ranks.

    Of a rank that trains a second SIGINT is a ``KeyboardInterrupt``, which saves nothing. SIGUSR2 requests an audit and
    stops nothing.

    Args:
        leave: ends the process, with an exit code and the error behind it; see ``StartGuard``. None: only record.

    Attributes:
        received: number of the signal; 0: none yet.
        audit_requested: whether an audit was requested since ``take_audit_request``.
        start: ends a rank that is stopped before it trains; None without ``leave``.
        leave_running: ends a rank that trains, in the same way; None: nothing can.
    """

    def __init__(self, leave: Leave | None = None) -> None:
        self.received = 0
        self.leave_running: Leave | None = None
        self.audit_requested = False
        self.start = None if leave is None else StartGuard(leave)
        numbers = (*STOP_SIGNALS, AUDIT_SIGNAL)
        self._previous = {number: signal.signal(number, self._on_signal) for number in numbers}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == AUDIT_SIGNAL:
            self.audit_requested = True
        elif number == self.received == signal.SIGINT and (self.start is None or self.start.is_closed):
            raise KeyboardInterrupt
        else:
            self.received = number
            if self.start is not None:
                self.start.heard()

    def request_audit(self) -> None:
        """Request an audit, as the signal does."""
        self.audit_requested = True

    def take_audit_request(self) -> bool:
        """Whether an audit was requested since the last call."""
        asked, self.audit_requested = self.audit_requested, False
        return asked

    def close(self) -> None:
        """Restore the former handlers."""
        if self.start is not None:
            self.start.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Turn stop signals into ``SystemExit`` with 128 + signal, so that a command removes unfinished files.

    The signals are SIGINT, SIGTERM and SIGHUP; after the first one all are ignored, so that the cleanup is not
    interrupted. SIGINT counts also where a script started the process in the background, which makes Python ignore it;
    an ignored SIGHUP stays ignored, as ``nohup`` requires.
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
