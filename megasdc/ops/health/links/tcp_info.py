"""What the kernel knows of a TCP connection: how many segments with data it has sent, and how many were lost.

Source: ``struct tcp_info`` of Linux (linux/tcp.h), tcp(7).
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_COUNT = struct.Struct("=I")
_RESENT_AT, _SEGMENTS_AT, _NEEDLESS_AT = 100, 156, 216
"""Offsets of ``tcpi_total_retrans``, ``tcpi_data_segs_out``, and of ``tcpi_dsack_dups``, which Linux 4.19 added."""
_LEAST_BYTES, _INFO_BYTES = 160, 220
_WRAP = 1 << 32
"""The kernel counts in 32 bits."""


@dataclass(frozen=True)
class SentBytes:
    """What a connection has sent.

    Args:
        segments: with data, those that were sent again among them.
        resent: segments that were sent again.
        needless: how many of these the peer already had, as it tells (RFC 2883): they were late, not lost.
    """

    segments: int = 0
    resent: int = 0
    needless: int = 0

    @property
    def lost(self) -> int:
        """Segments that were sent again because they had not arrived."""
        return max(0, self.resent - self.needless)

    @property
    def loss(self) -> float:
        """Share of segments that were lost."""
        return self.lost / self.segments if self.segments else 0.0

    def since(self, before: SentBytes) -> SentBytes:
        """What was sent after an earlier look at the same connection."""
        return SentBytes(
            (self.segments - before.segments) % _WRAP,
            (self.resent - before.resent) % _WRAP,
            (self.needless - before.needless) % _WRAP,
        )

    def __add__(self, other: SentBytes) -> SentBytes:
        return SentBytes(self.segments + other.segments, self.resent + other.resent, self.needless + other.needless)


def sent(connection: socket.socket) -> SentBytes:
    """What a connection has sent since it began.

    Raises:
        OSError: it is no TCP connection, or the kernel is older than Linux 4.6, which counts no segments.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _LEAST_BYTES:
        raise OSError("this kernel does not count the segments of a TCP connection; Linux 4.6 and later do")
    known = len(info) >= _INFO_BYTES
    offsets = (_SEGMENTS_AT, _RESENT_AT, *([_NEEDLESS_AT] if known else []))
    return SentBytes(*(_COUNT.unpack_from(info, at)[0] for at in offsets))
