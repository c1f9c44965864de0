"""Child process of DeepSpeed's conversion, in a process group that ends with its parent.

``python -P conversion_child.py ARGUMENTS``, started with a new session, is DeepSpeed's own ``ds_to_universal`` with
these arguments. Its standard input is a pipe of which the parent holds the other end; when that is closed, also by the
parent's death, the whole group is killed. Otherwise DeepSpeed's worker processes would wait forever. It imports nothing
from megasdc.
"""

from __future__ import annotations

import os
import signal
import threading


def _end_with_parent() -> None:
    os.read(0, 1)  # returns at the end of the pipe; sys.stdin would hold a lock that the interpreter's end needs
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Convert; the process must lead a group of its own."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(ds_to_universal.parse_arguments())


if __name__ == "__main__":
    main()
