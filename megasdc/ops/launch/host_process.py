"""Commands that run on hosts, and the messages over their standard input and output (``megasdc.common.wire``).

Nothing here waits for one host alone: ``exchange`` moves what can be moved between this process and all of them, and
bytes that a host does not take yet are kept. What a host may send is bounded, its standard error too.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from megasdc.common.wire import MessageReader, WireError, encode_message, messages_of

ANSWER_BYTES = 64 << 20
"""Largest size of a message from or to a host: records of all ranks of a run, or traces of a test."""
KILL_S = 2.0
"""After SIGTERM, on which srun ends its tasks."""
ERROR_BYTES = 16 << 10
"""So much of the end of standard error is kept."""
_PIECE = 1 << 16
_LAST_PIECES = 100
_LOOK_S = 0.05


class Channel:
    """Messages over two pipes.

    Args:
        source: from which they come.
        sink: to which they go.

    Attributes:
        is_open: whether more messages may come.
        problem: why a message was refused, after which none is read; empty: none was.
    """

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink, self._reader = source, sink, MessageReader(ANSWER_BYTES)
        self._to_send, self._closes = bytearray(), False
        self._received: deque[dict[str, Any]] = deque()
        self.is_open, self.problem = True, ""
        for pipe in (source, sink):
            os.set_blocking(pipe.fileno(), False)

    @property
    def unfinished(self) -> str:
        """How much has come of a message that has not ended; empty: there is none."""
        return self._reader.unfinished

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message with the next calls of ``exchange``; what a host that has gone does not take is dropped.

        Raises:
            WireError: it is too long.
        """
        self.write(b"\n" + encode_message(message, ANSWER_BYTES))  # what was printed before may have no end of its line

    def write(self, content: bytes) -> None:
        """Send bytes likewise."""
        if not self._sink.closed:
            self._to_send += content

    def finish(self) -> None:
        """Close the sink once everything is sent."""
        self._closes = True
        if not self._to_send:
            self._sink.close()

    def received(self) -> Iterator[dict[str, Any]]:
        """Messages that have come, each once."""
        while self._received:
            yield self._received.popleft()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register what can be moved, with the function that moves it."""
        if self._to_send:
            selector.register(self._sink, selectors.EVENT_WRITE, self._write)
        if self.is_open:
            selector.register(self._source, selectors.EVENT_READ, self._read)

    def _write(self) -> None:
        try:
            sent = os.write(self._sink.fileno(), self._to_send[:_PIECE])
        except BlockingIOError:
            return
        except OSError:  # its reader has gone
            sent, self._closes = len(self._to_send), True
        del self._to_send[:sent]
        if self._closes:
            self.finish()

    def _read(self) -> None:
        content = _content(self._source)
        if content is None:
            return
        try:
            for message in self._reader.feed(content):
                self._received.append(message)
        except WireError as error:
            self.problem, content = str(error), b""
        if not content:
            self.is_open = False
            self._source.close()


class HostProcess(Channel):
    """A command, and messages over its standard input and output.

    Args:
        command: as ``Transport.command`` makes it.
        environment: None: that of this process.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a terminal that goes does not end it, nor does Ctrl-C
        )
        assert process.stdin and process.stdout and process.stderr, "they are pipes"
        super().__init__(process.stdout, process.stdin)
        self._stderr, self._errors = process.stderr, bytearray()
        os.set_blocking(self._stderr.fileno(), False)

    @property
    def errors(self) -> str:
        """The end of what it has printed to standard error."""
        return self._errors.decode(errors="replace")

    def register(self, selector: selectors.BaseSelector) -> None:
        """See ``Channel``."""
        super().register(selector)
        if not self._stderr.closed:
            selector.register(self._stderr, selectors.EVENT_READ, self._read_errors)

    def _read_errors(self) -> None:
        content = _content(self._stderr)
        if content == b"":
            self._stderr.close()
        self._errors += content or b""
        del self._errors[:-ERROR_BYTES]

    def end(self, grace_s: float) -> int:
        """End the command, and all that it has started here; returns its exit code.

        Args:
            grace_s: seconds that it has to end by itself, at the end of its standard input.
        """
        self._to_send.clear()
        self.finish()
        end = time.monotonic() + grace_s
        while self._process.poll() is None and (left_s := end - time.monotonic()) > 0:
            exchange([self], min(_LOOK_S, left_s))
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
        return self._close()

    def kill(self) -> int:
        """Kill the command, and all that it has started here; returns its exit code."""
        self._signal(signal.SIGKILL)
        return self._close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)

    def _close(self) -> int:
        for _ in range(_LAST_PIECES):  # what it has printed before its end; what it has left may print for ever
            if not exchange([self], 0):
                break
        for pipe in (self._source, self._sink, self._stderr):
            pipe.close()
        self.is_open = False
        code = self._process.poll()
        return -signal.SIGKILL if code is None else code  # None: it waits for a disk


def exchange(channels: Iterable[Channel], timeout_s: float | None) -> int:
    """Move bytes from and to channels, and return from and to how many pipes.

    Args:
        timeout_s: longest wait until there are some; None: without a limit.
    """
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            channel.register(selector)
        ready = selector.select(timeout_s)
        for key, _ in ready:
            key.data()
    return len(ready)


def read_request() -> dict[str, Any]:
    """On a host: the message with which the caller has started this process, which from now on ends with the caller."""
    request = next(messages_of(sys.stdin.buffer, ANSWER_BYTES))
    threading.Thread(target=_end_with_caller, name="caller", daemon=True).start()
    return request


def send_to_caller(message: Mapping[str, Any]) -> None:
    """On a host: send ``progress``, a text, or the ``answer``."""
    sys.stdout.buffer.write(b"\n" + encode_message(message, ANSWER_BYTES))
    sys.stdout.buffer.flush()


def _end_with_caller() -> None:
    """Kill this process, and all that it has started, seconds after the end of standard input."""
    while os.read(0, _PIECE):
        pass
    time.sleep(KILL_S)  # it may have sent its answer
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _content(pipe: IO[bytes]) -> bytes | None:
    """The next bytes of a pipe; empty at its end; None: there are none now."""
    try:
        return os.read(pipe.fileno(), _PIECE)
    except BlockingIOError:
        return None
    except OSError:
        return b""
