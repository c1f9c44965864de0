"""Connections between processes of a run: messages, addresses, listeners, handshake with a secret; no torch.

A message is a JSON object behind a line with the version of the messages and its size in bytes, which are checked
before more is read: on sockets, and on the pipes of what SSH starts on a host (``megasdc.ops.launch.host_process``).

A ``Door`` listens on one address. Whoever connects has ``HANDSHAKE_S`` seconds for the whole handshake, in which both
sides prove with an HMAC (RFC 2104, SHA-256) over each other's random numbers that they know a secret, which never
travels on the connection; before that nothing but short messages is read. Connections without this proof are
bounded in number; if there are too many, the oldest is closed for the newest, so that slow ones keep nobody out. What
is sent afterwards is neither secret nor encrypted: it is assumed that nobody else on the network between a run's hosts
can write into an established connection.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import logging
import math
import re
import resource
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

VERSION = 1
"""Version of all messages between processes; one of another version is refused."""
MARK = "megasdc-message"
"""Begins the line before a message."""
HEADER_BYTES = 64
"""Largest size of that line, with its end."""
HANDSHAKE_S = 5.0
HELLO_BYTES = 4 << 10
MESSAGE_BYTES = 8 << 20
SECRET_BYTES = 32
MAX_UNKNOWN = 64
"""Maximum number of a door's connections that have not proved yet that they know the secret."""
BACKLOG = 1024
"""Number of waiting connections that the kernel keeps for a door: all hosts connect at once."""
PAUSE_S = 0.05
"""Seconds until the next attempt after the process or the host had no descriptor left, or a socket was broken."""
ATTEMPTS = 3
"""Number of attempts of a caller whose connection is closed before the end of the handshake."""
KEEP_ALIVE_S, KEEP_INTERVAL_S = 30, 10
"""Idle seconds until the kernel's first keep-alive probe, and between two: firewalls forget idle connections."""
BROKEN_S = 60
"""Seconds without an acknowledgement after which the kernel closes a connection."""
DESCRIPTORS = 1 << 16
GONE = "the peer has closed the connection"
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_OF_A_CALLER = {errno.ECONNABORTED, errno.ECONNRESET, errno.EPROTO, errno.EINTR}
"""Error numbers of a caller that has gone; a pause after each would let one caller keep out others."""
_HEADER = re.compile(rb"%s (\d{1,9}) (\d{1,18})\n" % MARK.encode())
_PIECE = 1 << 16
_POLL_S = 0.2

logger = logging.getLogger(__name__)

Serve = Callable[[socket.socket, dict[str, Any]], None]


class WireError(OSError):
    """The other side does not know the secret, or sends what the protocol does not allow."""


def raise_descriptor_limit() -> None:
    """Let this process and those that it starts open as many descriptors as the system allows, at most 65,536.

    With the usual limit of 1,024, a rank fails whose gloo listener gets as many connections, and so does a front of as
    many hosts.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class BoundedExchange:
    """Exchange of bytes over a connection with one time limit for all of it: no wait for a part prolongs it.

    Args:
        connection: the connection.
        limit_s: time limit in seconds from now; infinite: none.

    Raises:
        OSError: by each method, where the peer has closed the connection or the time is up.
    """

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        self._connection, self._limit_s = connection, limit_s
        self._ends_at = time.monotonic() + limit_s

    def send(self, content: bytes) -> None:
        """Send all bytes."""
        self._in_time().sendall(content)

    def receive(self, size: int) -> bytes:
        """Receive exactly ``size`` bytes, for small sizes."""
        content = bytearray(size)
        self.fill(memoryview(content))
        return bytes(content)

    def fill(self, view: memoryview) -> None:
        """Receive exactly as many bytes as the view has, into it."""
        while view:
            got = self._in_time().recv_into(view)
            if not got:
                raise ConnectionError(GONE)
            view = view[got:]

    def message(self, limit: int) -> dict[str, Any]:
        """Receive one message, and nothing of what follows.

        Raises:
            WireError: it is none of this version, or longer than ``limit`` bytes.
        """
        header = bytearray()
        while not header.endswith(b"\n"):
            if len(header) >= HEADER_BYTES:
                raise WireError("no message of megasdc")
            seen = self._in_time().recv(HEADER_BYTES - len(header), socket.MSG_PEEK)
            if not seen:
                raise ConnectionError(GONE)
            header += self.receive(seen.find(b"\n") + 1 or len(seen))
        found = _HEADER.fullmatch(header)
        if found is None:
            raise WireError("no message of megasdc")
        return _decoded(self.receive(_size(found, limit)))

    def send_json(self, message: object, limit: int) -> None:
        """Send one message.

        Raises:
            WireError: it is longer than ``limit`` bytes.
        """
        self.send(encode_message(message, limit))

    def _in_time(self) -> socket.socket:
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"not done within {self._limit_s:g} s")
        self._connection.settimeout(None if math.isinf(left_s) else left_s)
        return self._connection


def encode_message(message: object, limit: int = MESSAGE_BYTES) -> bytes:
    """A message as it travels.

    Args:
        message: of types that JSON has; what receives it expects an object.
        limit: largest number of bytes.

    Raises:
        WireError: it is longer.
    """
    text = json.dumps(message).encode() + b"\n"
    if len(text) > limit:
        raise WireError(f"a message of {len(text)} bytes is too long, {limit} are allowed")
    return f"{MARK} {VERSION} {len(text)}\n".encode() + text


class MessageReader:
    """Reader of the messages in a stream of bytes, between which are other lines, such as those of a login.

    Args:
        limit: largest number of bytes of a message.
    """

    def __init__(self, limit: int = MESSAGE_BYTES) -> None:
        self._limit, self._content = limit, bytearray()
        self._size: int | None = None

    def feed(self, content: bytes) -> Iterator[dict[str, Any]]:
        """The messages that end with these next bytes.

        Raises:
            WireError: one has another version or is too long, which its first line says, or is no JSON object.
        """
        self._content += content
        while True:
            if self._size is None:
                end = self._content.find(b"\n") + 1
                if not end:
                    del self._content[HEADER_BYTES:]  # a longer line is none before a message
                    return
                found = _HEADER.fullmatch(self._content, 0, end)
                self._size = None if found is None else _size(found, self._limit)
                del self._content[:end]
            elif len(self._content) < self._size:
                return
            else:
                text = bytes(self._content[: self._size])
                del self._content[: self._size]
                self._size = None
                yield _decoded(text)

    @property
    def unfinished(self) -> str:
        """How much has come of a message that has not ended; empty: there is none."""
        return "" if self._size is None else f"{len(self._content)} of the {self._size} bytes of a message have come"


def messages_of(stream: BinaryIO, limit: int = MESSAGE_BYTES) -> Iterator[dict[str, Any]]:
    """Messages of a stream until its end; see ``MessageReader``."""
    reader = MessageReader(limit)
    while content := stream.read1(_PIECE):  # type: ignore[attr-defined]
        yield from reader.feed(content)


def _size(header: re.Match[bytes], limit: int) -> int:
    """Number of bytes of the message behind a header."""
    version, size = map(int, header.groups())
    if version != VERSION:
        raise WireError(
            f"a message of version {version}, here they have version {VERSION}; install the same megasdc on all hosts"
        )
    if size > limit:
        raise WireError(f"a message of {size} bytes is too long, {limit} are allowed")
    return size


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise WireError("no JSON object")
    return found


def introduce(connection: socket.socket, secret: bytes, hello: Mapping[str, Any], limit_s: float) -> None:
    """Caller's part of the handshake: send ``hello``, prove knowledge of the secret, and check the listener's proof.

    Args:
        hello: JSON object that describes the caller; ``admit`` returns it at the other end.

    Raises:
        WireError: the listener does not know the secret.
        OSError: the connection is broken, or it took longer.
    """
    exchange, own = BoundedExchange(connection, limit_s), secrets.token_hex(16)
    theirs, text = _text(exchange.message(HELLO_BYTES), "number"), json.dumps(dict(hello))
    proof = _proof(secret, "caller", theirs, own, text)
    exchange.send_json({"number": own, "hello": text, "proof": proof}, HELLO_BYTES)
    answer = _text(exchange.message(HELLO_BYTES), "proof")
    if not hmac.compare_digest(answer, _proof(secret, "listener", own, theirs, text)):
        raise WireError("who listens there does not know the secret of the launch")


def admit(connection: socket.socket, secret: bytes, limit_s: float) -> dict[str, Any]:
    """Listener's part of the handshake; returns the caller's ``hello``.

    Raises:
        WireError: the caller does not know the secret, or speaks something else.
        OSError: the connection is broken, or it took longer.
    """
    exchange, own = BoundedExchange(connection, limit_s), secrets.token_hex(16)
    exchange.send_json({"number": own}, HELLO_BYTES)
    answer = exchange.message(HELLO_BYTES)
    theirs, text = _text(answer, "number"), _text(answer, "hello")
    if not hmac.compare_digest(_text(answer, "proof"), _proof(secret, "caller", own, theirs, text)):
        raise WireError("does not know the secret of the launch")
    try:
        hello = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no greeting: {error}") from error
    if not isinstance(hello, dict):
        raise WireError("no greeting")
    exchange.send_json({"proof": _proof(secret, "listener", theirs, own, text)}, HELLO_BYTES)
    return hello


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or not value.isascii():
        raise WireError(f"a message without `{name}`")
    return value


def _proof(secret: bytes, *words: str) -> str:
    return hmac.new(secret, "\n".join(words).encode(), hashlib.sha256).hexdigest()


def connect(host: str, port: int, secret: bytes, hello: Mapping[str, Any], limit_s: float) -> socket.socket:
    """Connect to a door and introduce this process; returns the connection, without a timeout.

    A door with too many unknown callers closes the oldest connection, so it is tried up to ``ATTEMPTS`` times.

    Raises:
        WireError: the listener does not know the secret.
        OSError: it cannot be reached in time.
    """
    ends_at = time.monotonic() + limit_s
    for left in reversed(range(ATTEMPTS)):
        connection = socket.create_connection((host, port), max(PAUSE_S, ends_at - time.monotonic()))
        try:
            keep_alive(connection)
            introduce(connection, secret, hello, ends_at - time.monotonic())
        except OSError as error:
            connection.close()
            if not left or not isinstance(error, ConnectionError) or time.monotonic() + PAUSE_S >= ends_at:
                raise
            time.sleep(PAUSE_S)
            continue
        connection.settimeout(None)
        return connection
    raise AssertionError("the last attempt returns or raises")


def keep_alive(connection: socket.socket) -> None:
    """Set a connection to send small messages without delay, and keep-alive probes while it is idle."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, KEEP_ALIVE_S),
        (socket.TCP_KEEPINTVL, KEEP_INTERVAL_S),
        (socket.TCP_USER_TIMEOUT, 1000 * BROKEN_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class MessageChannel:
    """Channel of JSON objects over a connection after its handshake, each with a limit of time and length."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: object, timeout_s: float) -> None:
        """Send one message.

        Raises:
            WireError: it is too long.
            OSError: the connection is broken, or it is not taken in time.
        """
        BoundedExchange(self._connection, timeout_s).send_json(message, MESSAGE_BYTES)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Receive one message.

        Raises:
            WireError: it is no JSON object, or too long.
            OSError: the connection is broken, or it has not come in time.
        """
        return BoundedExchange(self._connection, timeout_s).message(MESSAGE_BYTES)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Door:
    """Listens on one address, on a free port, until ``close``.

    Args:
        address: address of this host on which it listens.
        secret: secret that callers must know.
        serve: function called with each caller's connection and hello, in a thread of its own; the connection is closed
            when it returns. None: ``accept`` returns them.
        say: function that gets one message when a stranger is refused first, and one when no descriptors are left.

    Raises:
        OSError: the address is none of this host's, or there is no further descriptor or thread.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        serve: Serve | None = None,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        if not address:
            raise OSError("the address by which others reach this host is not known")
        self._server = listen_on(address)
        self._server.settimeout(_POLL_S)
        self.address, self.port = address, int(self._server.getsockname()[1])
        self._secret, self._serve, self._say = secret, serve, say
        self._lock = threading.Lock()
        self._unknown: dict[socket.socket, str] = {}
        """Address of each caller that has not proved the secret yet, by connection, in order of arrival."""
        self._meeting = 0
        self._admitted: SimpleQueue[tuple[dict[str, Any], socket.socket]] = SimpleQueue()
        self._told: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="door", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no further thread
            self._server.close()
            raise OSError(f"nothing can listen on {address}: {error}") from error

    def accept(self, timeout_s: float) -> tuple[dict[str, Any], socket.socket]:
        """The next caller's hello and connection, which has no timeout.

        Raises:
            TimeoutError: nobody connected in time.
        """
        try:
            return self._admitted.get(timeout=max(0.0, timeout_s))
        except Empty:
            raise TimeoutError(f"nobody has connected within {timeout_s:g} s") from None

    def close(self) -> None:
        """Stop listening; connections that were served or taken stay."""
        self._closed.set()
        self._thread.join()
        self._server.close()
        with self._lock:
            for connection in self._unknown:
                shut(connection)
        with contextlib.suppress(Empty):
            while True:
                self._admitted.get_nowait()[1].close()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            if self._meeting > 2 * MAX_UNKNOWN:  # threads of those that were ended have not closed them yet
                self._closed.wait(0.001)
                continue
            try:
                connection, client = self._server.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if error.errno in _OF_A_CALLER:
                    continue
                self._log_once("exhausted", f"no further connection can be taken: {error.strerror}")
                if error.errno in _EXHAUSTED:
                    self._make_room((len(self._unknown) + 1) // 2)
                self._closed.wait(PAUSE_S)
                continue
            self._begin(connection, client[0])

    def _begin(self, connection: socket.socket, client: str) -> None:
        with self._lock:
            self._unknown[connection] = client
            self._meeting += 1
        self._make_room(MAX_UNKNOWN)
        try:
            threading.Thread(target=self._handshake, args=(connection, client), name="caller", daemon=True).start()
        except RuntimeError as error:  # no further thread
            self._log_once("exhausted", f"no further connection can be taken: {error}")
            self._end_meeting(connection)
            connection.close()
            self._closed.wait(PAUSE_S)

    def _make_room(self, most: int) -> None:
        """While more than ``most`` are unknown, shut down the oldest of the address with most; its thread closes it."""
        with self._lock:
            while len(self._unknown) > most:
                address = Counter(self._unknown.values()).most_common(1)[0][0]
                oldest = next(one for one, client in self._unknown.items() if client == address)
                del self._unknown[oldest]
                shut(oldest)

    def _end_meeting(self, connection: socket.socket) -> bool:
        """Count the end of a handshake, and return whether its connection was still among the unknown ones."""
        with self._lock:
            self._meeting -= 1
            return self._unknown.pop(connection, None) is not None

    def _handshake(self, connection: socket.socket, client: str) -> None:
        hello, why = None, ""
        try:
            keep_alive(connection)
            hello = admit(connection, self._secret, HANDSHAKE_S)
            connection.settimeout(None)
        except OSError as error:
            slow = isinstance(error, TimeoutError)
            why = f"not done within {HANDSHAKE_S:g} s" if slow else str(error) or type(error).__name__
        stays = self._end_meeting(connection)
        if hello is None or not stays:
            connection.close()
            why = why or "it was ended to make room"
            self._log_once("refused", f"refused a connection from {client}: {why}; further ones are not told")
            return
        if self._serve is None:
            self._admitted.put((hello, connection))
            return
        with connection:
            try:
                self._serve(connection, hello)
            except Exception:  # of this connection alone, which ends with it
                logger.warning("connection from %s failed", client, exc_info=True)

    def _log_once(self, kind: str, text: str) -> None:
        with self._lock:
            if kind in self._told:
                return
            self._told.add(kind)
        self._say(text)


def shut(connection: socket.socket) -> None:
    """End a connection in both directions, also for a thread that waits on it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def listen_on(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on one address of this host; ``port``: 0: a free one.

    Raises:
        OSError: the address is none of this host's, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


def own_address_towards(host: str, *others: str) -> str:
    """This host's address on the route to another host; nothing is sent.

    Args:
        host: name or address; it may be this host itself, under a name that leads to loopback here.
        others: names of hosts other than this one; the way to the first that is known counts where ``host`` leads to
            loopback.

    Raises:
        OSError: the name ``host`` is not known, or there is no route.
    """
    own = _route_address(host)
    if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
        return own
    for other in others:
        with contextlib.suppress(OSError):
            return _route_address(other)
    return own


def _route_address(host: str) -> str:
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; brackets around an IPv6 address are removed.

    Raises:
        ValueError: it is none, or the port is not in 1 to 65535.
    """
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f'got "{text}"; needed: "ADDRESS:PORT" with a port from 1 to 65535, such as "127.0.0.1:9400"')
    return host.removeprefix("[").removesuffix("]"), int(port)
