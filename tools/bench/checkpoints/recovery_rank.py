"""A rank of a drill of recovery: trains as the entry script does, on a host of a name of its own where it is given one.

``python -m tools.bench.checkpoints.recovery_rank CONFIG [HOST]``
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from typing import NoReturn

_CLONE_NEWUTS = 0x04000000


def rename_host(name: str) -> None:
    """Give the host another name, for this process and those that it starts.

    Raises:
        OSError: this user may not.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "a namespace for the host's name cannot be made")
    socket.sethostname(name)


def main() -> None:
    """Train."""
    config, *names = sys.argv[1:]
    for name in names:
        rename_host(name)
    from megasdc.pretrain import pretrain

    def leave(code: int, _error: BaseException | None) -> NoReturn:
        os._exit(code)

    leave(*pretrain(config, (), (), leave))


if __name__ == "__main__":
    main()
