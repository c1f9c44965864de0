"""Forks of the preloaded server that run on a test host: in its namespaces, so that they end with its power."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from multiprocessing import connection, forkserver
from typing import Any

from megasdc.ops.cluster import enter_host

PR_SET_PDEATHSIG = 1
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that who stands for a process elsewhere passes on to it."""


def is_elsewhere(pid: int) -> bool:
    """Whether a process has other process ids than this one, as those of test hosts have; it may have ended."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    return False


def go_on_at_host(pid: int) -> None:
    """Go on as a process of the host of another one; this process stands for it, with signals and exit code.

    Args:
        pid: of a process of that host, seen from here.

    Raises:
        OSError: it has ended.
    """
    process = os.pidfd_open(pid)
    enter_host(process)
    os.close(process)
    child = os.fork()  # a process stays where it is: its children are born in the other namespace of process ids
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    for number in PASSED_ON:
        signal.signal(number, lambda got, _: os.kill(child, got))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve_own_forks() -> None:
    """Have forks that this process asks for made by a fork of itself, on its host, and not by its own server."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    begun: list[int] = []

    def ensure_running() -> None:
        if begun:
            return
        with socket.socket(socket.AF_UNIX) as listener:
            server._forkserver_address = connection.arbitrary_address("AF_UNIX")
            listener.bind(server._forkserver_address)
            listener.listen()
            lives, server._forkserver_alive_fd = os.pipe()
            begun.append(os.fork())
            if begun[0] == 0:
                os.close(server._forkserver_alive_fd)
                with contextlib.suppress(SystemExit):  # nobody lives who could ask
                    forkserver.main(os.dup(listener.fileno()), lives, ())
                os._exit(0)
            os.close(lives)

    server.ensure_running = ensure_running
