"""Who ends when what started it has gone? Every process of a launch, also where that was killed with SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from megasdc.errors import LaunchError
from megasdc.run_lock import start_ticks

PR_SET_PDEATHSIG = 1
FOLLOW_OPTION = "--follow_input"
"""Of ``megasdc.launcher.node``: whether it calls ``follow_input``."""
NODE_PID_VARIABLE = "MEGASDC_NODE_PID"
"""Set by ``megasdc.launcher.node`` to its own process id, for the ranks that it starts."""


def follow_parent(number: int = signal.SIGTERM, expected: int | None = None) -> None:
    """Be sent a signal as soon as the parent process has ended; it holds through ``exec``, not for children.

    Args:
        number: of the signal.
        expected: process id that the parent has; another one means that it has ended already, and this process ends.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if expected is not None and os.getppid() != expected:
        print(f"process {os.getpid()}: process {expected}, which started it, has gone", file=sys.stderr, flush=True)
        os._exit(LaunchError.exit_code)


def launcher_has_gone() -> bool:
    """Whether the ``megasdc.launcher.node`` that started this rank has ended; False where none did."""
    node = os.environ.get(NODE_PID_VARIABLE)
    # A process of several threads stays the parent until the last of them has ended, a killed one as a zombie.
    return node is not None and (os.getppid() != int(node) or start_ticks(int(node)) is None)


def follow_input() -> None:
    """Be sent SIGTERM at the end of standard input, by which SSH says that the other side has gone."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
