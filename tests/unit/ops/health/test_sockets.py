"""Connections of a process are read from the kernel's table, with those that acknowledge nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megasdc.ops.health import watched
from megasdc.ops.health.watched import Connection, connections, silent_peers

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
LINES = (
    # established, the retransmission timer runs, repeated five times
    "   0: 0B00000A:1F90 0C00000A:D431 01 00000200:00000000 01:00000190 00000005     0        0 111",
    # the same peer takes nothing, since its program does not read: a zero window is asked again, and answered
    "   1: 0B00000A:1F91 0D00000A:D432 01 00000200:00000000 04:00000190 00000009     0        0 111",
    # of another process, closing, on this host
    "   2: 0B00000A:1F92 0C00000A:D433 01 00000200:00000000 01:00000190 00000007     0        0 222",
    "   3: 0B00000A:1F93 0C00000A:D434 08 00000200:00000000 01:00000190 00000007     0        0 111",
    "   4: 0100007F:1F94 0100007F:D435 01 00000200:00000000 01:00000190 00000007     0        0 111",
)
LINE_6 = (
    "   0: 0000000000000000FFFF00000B00000A:1F90 0000000000000000FFFF00000E00000A:D431 01 00000001:00000000 "
    "01:00000190 00000003     0        0 111"
)


def test_overdue_data_of_this_process_to_other_hosts_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of the table is there for one reason; an IPv4 address within IPv6 is shown as such."""
    (tmp_path / "net").mkdir()
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "3").symlink_to("socket:[111]")
    (tmp_path / "net" / "tcp").write_text("\n".join((HEAD, *LINES)) + "\n")
    (tmp_path / "net" / "tcp6").write_text("\n".join((HEAD, LINE_6)) + "\n")
    monkeypatch.setattr(watched, "Path", lambda path: tmp_path / str(path).removeprefix("/proc/7/"))
    found = connections(7)
    assert found == [
        Connection("10.0.0.11", "10.0.0.12", 5),
        Connection("10.0.0.11", "10.0.0.13", 0),
        Connection("10.0.0.11", "10.0.0.14", 3),
    ]
    assert silent_peers(found) == {"10.0.0.12": 5, "10.0.0.14": 3}
    (tmp_path / "net" / "tcp6").unlink()  # of a kernel without IPv6
    assert connections(7) == found[:2]


def test_the_table_of_a_real_process_is_read() -> None:
    """Connections within this host do not count, and a process that has gone has none."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert all(one.retransmits == 0 for one in connections(os.getpid()))
    assert connections(2**22 + 1) == []
