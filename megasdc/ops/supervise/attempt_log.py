"""The log of an attempt: a process that takes what the front and all that it starts say, and writes it to a file.

    python -m megasdc.ops.supervise.attempt_log FILE LIMIT_S < pipe

A file system without room is an error to who writes to it, and to a pipe it is none: what is said is kept here, and
written once there is room. It ends when nobody has the other end of the pipe any more.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

from megasdc.common import room

MODULE = "megasdc.ops.supervise.attempt_log"
_BLOCK_BYTES = 1 << 16


def main() -> None:
    """Copy standard input to the file that the first argument names, until its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # it ends after those that are asked
        signal.signal(number, signal.SIG_IGN)
    room.set_limit(float(sys.argv[2]))
    file = room.LineFile(Path(sys.argv[1]))
    while True:
        if select.select([0], [], [], room.RETRY_S)[0]:
            if not (said := os.read(0, _BLOCK_BYTES)):
                break
            file.add(said)
        file.flush()
    file.close()


if __name__ == "__main__":
    main()
