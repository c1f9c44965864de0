"""Lines of a rank on the console: our own with the rank as prefix, warnings and errors of libraries."""

from __future__ import annotations

import logging
import sys

from megasdc.common.credentials import without_credentials


class _Formatter(logging.Formatter):
    """Lines without secrets, which a library's error may hold."""

    def format(self, record: logging.LogRecord) -> str:
        return without_credentials(super().format(record))


def set_up_logging(rank: int, replica: int | None = None) -> None:
    """Log our own lines to standard error with the rank as prefix, and only warnings of libraries."""
    who = f"rank {rank}" if replica is None else f"replica {replica} rank {rank}"
    for name in ("DeepSpeed", "megatron", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"%(asctime)s [{who}] %(levelname).1s %(message)s", "%H:%M:%S"))
    # DeepSpeed's other lines go to a file, see LibraryLines.
    errors = logging.StreamHandler(sys.stderr)
    errors.name = "errors on the console"
    errors.setLevel(logging.ERROR)
    errors.setFormatter(handler.formatter)
    library = logging.getLogger("DeepSpeed")
    library.handlers[:] = [*(one for one in library.handlers if one.name != errors.name), errors]
    root = logging.getLogger("megasdc")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
