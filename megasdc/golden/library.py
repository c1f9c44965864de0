"""Which of many golden traces is for this machine? The one whose key is this machine's."""

from __future__ import annotations

from pathlib import Path

from megasdc.config import parse_config
from megasdc.errors import TraceError
from megasdc.golden.verify import layout_size
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import key_differences, load_header
from megasdc.train.golden_key import golden_key

SHOWN = 3
"""Parts of a key that are told of each file that does not fit."""


def choose_golden(folder: Path, ranks: int | None = None) -> Path:
    """Pick a golden file by its key.

    Args:
        folder: with files ``*.golden``.
        ranks: only traces whose ranks divide this number; null: of any number.

    Returns:
        The file that fits; of several the one with the most ranks, then the first by name.

    Raises:
        TraceError: none fits; says of each what differs.
    """
    files = sorted(folder.glob("*.golden"))
    if not files:
        raise TraceError(f"{folder} holds no *.golden file; `megasdc golden record` makes one")
    fitting = []
    reasons = []
    for file in files:
        try:
            reason = _unfit(file, ranks)
        except TraceError as error:
            reason = str(error)
        if reason is None:
            fitting.append(file)
        else:
            reasons.append(f"{file.name}: {reason}")
    if not fitting:
        raise TraceError(f"{folder} holds no golden trace for this machine:\n  " + "\n  ".join(reasons))
    return max(fitting, key=lambda file: layout_size(load_header(file)))


def _unfit(file: Path, ranks: int | None) -> str | None:
    header = load_header(file)
    size = layout_size(header)
    if ranks is not None and ranks % size:
        return f"is of {size} ranks, which do not divide {ranks}"
    layout = ParallelDims(**header["layout"])
    here = golden_key(parse_config(header["config"]), layout, header["algorithm"])
    differences = key_differences(header["key"], here)
    if not differences:
        return None
    told = [f"{name}: golden {a!r}, here {b!r}" for name, (a, b) in list(differences.items())[:SHOWN]]
    return "; ".join(told) + (f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else "")
