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
from typing import TYPE_CHECKING

from megasdc.common.errors import LaunchError, PeerError

if TYPE_CHECKING:
    from megasdc.parallel.rendezvous import AskedRanks


logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
AUDIT_SIGNAL = signal.SIGUSR2
STOPPED_START = "stopped before its first step"
"""Text on the end of a rank that received a stop signal while it started."""
STUCK_S = 5.0
POLL_S = 1.0
LOOK_S, SETTLE_S = 0.2, 5.0
"""Seconds between two looks whether all ranks are asked to stop, and the most from there to the end of a rank."""

Leave = Callable[[int, BaseException | None], None]


class StartGuard:
    """Ends a rank that receives a stop signal while it starts, from creation until ``close``.

    Python's handlers run only when the main thread returns from native code. A thread that waits there for a killed
    rank would not return before its timeout, and would keep its port until then. Until all ranks have met, the rank
    ends at once, with success, since nothing is lost; after that it does so once all ranks of the launch are asked to
    stop, and ends when its main thread has not reacted for seconds. ``leave`` ends the process; a thread calls it.
    """

    def __init__(self, leave: Leave) -> None:
        self._leave = leave
        self._met = False
        self._ranks: AskedRanks | None = None
        self._lock = threading.Lock()
        self._has_asked = self._all_are_asked = False
        self._heard_at = 0.0
        self._closed = threading.Event()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._previous = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="start guard", daemon=True).start()

    def met(self, ranks: AskedRanks | None = None) -> None:
        """Note that all ranks have met, and depend on this rank from now on.

        Args:
            ranks: agreement with other ranks that are asked to stop; None: there is none.
        """
        self._ranks, self._met = ranks, True

    @property
    def is_closed(self) -> bool:
        """Whether the training loop has stop signals now."""
        return self._closed.is_set()

    def mark_handled(self) -> None:
        """Note that the main thread has handled a stop signal, so that it is not stuck."""
        self._heard_at = time.monotonic()

    def close(self) -> None:
        """Hand stop signals over to the training loop; idempotent. Where all ranks leave, wait for the thread's end."""
        with self._lock:
            if self._has_asked and not self._all_are_asked and self._ranks is not None:
                self._all_are_asked = not self._ranks.go_on()  # others may have seen that all are
            if not (self._all_are_asked or self._closed.is_set()):
                self._closed.set()
                signal.set_wakeup_fd(self._previous)
                os.close(self._writing)  # ends the thread
        self.wait_where_all_leave()

    def wait_where_all_leave(self) -> None:
        """Do not return where all ranks are asked to stop, and this one is about to leave: others go meanwhile."""
        while self._all_are_asked:
            time.sleep(POLL_S)

    def _request_recorded(self) -> bool:
        """Record for other ranks that this one is asked to stop; returns whether all are."""
        with self._lock:
            if self._ranks is not None and not self._all_are_asked and not self._closed.is_set():
                self._has_asked = True  # also where it is not known whether that has reached them
                self._all_are_asked = self._ranks.record_request()
            return self._all_are_asked

    def _watch(self) -> None:
        while number := os.read(self._reading, 1):
            if number[0] in STOP_SIGNALS:
                try:
                    self._stop(signal.Signals(number[0]))
                except LaunchError as error:  # somebody who does not belong to the launch has written to its store
                    logger.error("%s", error)
                    self._leave(error.exit_code, error)
        os.close(self._reading)

    def _stop(self, number: signal.Signals) -> None:
        began = asked_at = time.monotonic()
        while not self._closed.is_set():
            if not self._met:
                logger.info("%s before the process group was set up: nothing to save", number.name)
                self._leave(0, None)
            if self._request_recorded():
                logger.info("%s on all ranks while the run was starting: nothing to save", number.name)
                assert self._ranks is not None, "it has agreed with them"
                self._ranks.settle(SETTLE_S)  # who does not know it takes another's end for a failure
                self._leave(0, None)
            if time.monotonic() - max(began, self._heard_at) > STUCK_S:
                error = PeerError(f"{number.name} during the start of the run, while this rank waited for another one")
                logger.error("%s", error)
                self._leave(error.exit_code, error)
            if self._closed.wait(LOOK_S):
                return
            if time.monotonic() - asked_at >= POLL_S:
                asked_at = time.monotonic()
                os.kill(os.getpid(), number)  # again, to see whether the main thread handles it


class StopSignals:
    """Records the last stop signal instead of ending the process, from creation until ``close``; for ranks.

    Of a rank that trains a second SIGINT is a ``KeyboardInterrupt``, which saves nothing. SIGUSR2 requests an audit and
    stops nothing.

    Args:
        leave: ends the process, with an exit code and the error behind it; see ``StartGuard``. None: only record.

    Attributes:
        received: number of the last stop signal; 0: none yet.
        audit_requested: whether an audit was requested since ``pop_audit_request``.
        start: guard that ends a rank that is stopped before it trains; None without ``leave``.
        leave_running: function that ends a rank that trains, in the same way; None: nothing can.
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
                self.start.mark_handled()

    def pop_audit_request(self) -> bool:
        """Whether an audit was requested since the last call."""
        asked, self.audit_requested = self.audit_requested, False
        return asked

    def close(self) -> None:
        """Restore the former handlers."""
        if self.start is not None:
            self.start.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class ExitSignals:
    """State of a command's stop signals.

    Attributes:
        noted: number of the last signal that did not end the command; 0: none.
        end: whether stop signals end the command.
    """

    def __init__(self) -> None:
        self.noted, self.end = 0, True

    def only_note(self) -> None:
        """Only note stop signals from now on, since the command's result is known."""
        self.end = False


@contextmanager
def exiting_on_signals(*others: signal.Signals) -> Iterator[ExitSignals]:
    """Turn stop signals into ``SystemExit`` with 128 + signal, so that a command removes unfinished files.

    The signals are SIGINT, SIGTERM, SIGHUP and ``others``; after the first one all are ignored, so that the cleanup is
    not interrupted. SIGINT counts also where a script started the process in the background, which makes Python ignore
    it; an ignored SIGHUP stays ignored, as ``nohup`` requires.
    """
    signals = ExitSignals()
    numbers = [signal.SIGINT, signal.SIGTERM, *others]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        if not signals.end:
            signals.noted = number
            return
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
