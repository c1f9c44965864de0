"""Processes of a launch end when the one that started them has ended, also if it was killed with SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from megasdc.common.errors import LaunchError
from megasdc.common.run_lock import start_ticks

PR_SET_PDEATHSIG = 1
FOLLOW_OPTION = "--follow_input"
"""Option of ``megasdc.ops.launch.node``: call ``follow_input``."""
NODE_PID_VARIABLE = "MEGASDC_NODE_PID"
"""Set by ``megasdc.ops.launch.node`` to its own process id, for the ranks that it starts."""


def follow_parent(number: int = signal.SIGTERM, expected: int | None = None) -> None:
    """Send this process a signal as soon as its parent has ended; kept across ``exec``, not inherited by children.

    Args:
        expected: process id of the parent; if it differs, the parent has ended already, and this process exits.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if expected is not None and os.getppid() != expected:
        print(f"process {os.getpid()}: process {expected}, which started it, has ended", file=sys.stderr, flush=True)
        os._exit(LaunchError.exit_code)


def launcher_has_gone() -> bool:
    """Whether the ``megasdc.ops.launch.node`` that started this rank has ended; False if none did."""
    node = os.environ.get(NODE_PID_VARIABLE)
    # A killed process with several threads stays the parent, as a zombie, until its last thread has ended.
    return node is not None and (os.getppid() != int(node) or start_ticks(int(node)) is None)


def follow_input() -> None:
    """Send this process SIGTERM at the end of standard input, which means that the SSH client has gone."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
