"""Choice of the golden trace for this machine, by its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasdc.common.errors import MegasdcError, TraceError
from megasdc.ops.golden.verify import layout_size
from megasdc.sdc.golden import describe_differences, load_header
from megasdc.train.detection.golden_key import compare_key

SHOWN = 3
"""Number of differing key parts named for each file that does not fit."""
OF_THE_RANK = ("threads",)
"""Parts of a key that are set when a rank is started, so the parent process does not compare them."""


def choose_golden(folder: Path, ranks: int | None = None, layout: dict[str, int] | None = None) -> Path:
    """Choose a golden file by its key.

    Args:
        folder: with files ``*.golden``.
        ranks: only traces whose number of ranks divides this number; None: any.
        layout: only traces of this layout; None: any.

    Returns:
        The file that fits; of several the one with the most ranks, then the first by name.

    Raises:
        TraceError: none fits; the message names the differences of each.
    """
    files = sorted(folder.glob("*.golden"))
    if not files:
        raise TraceError(f"{folder} holds no *.golden file; `megasdc golden record` makes one")
    sizes: dict[Path, int] = {}
    reasons = []
    for file in files:
        try:
            header = load_header(file)
            reason = _unfit(header, ranks, layout)
        except MegasdcError as error:
            reason = str(error)
        if reason is None:
            sizes[file] = layout_size(header)
        else:
            reasons.append(f"{file.name}: {reason}")
    if not sizes:
        raise TraceError(f"{folder} holds no golden trace for this machine:\n  " + "\n  ".join(reasons))
    return max(sizes, key=lambda file: sizes[file])


def _unfit(header: dict[str, Any], ranks: int | None, layout: dict[str, int] | None) -> str | None:
    size = layout_size(header)
    if ranks is not None and ranks % size:
        return f"is of {size} ranks, which do not divide {ranks}"
    if layout is not None and header["layout"] != layout:
        return f"is of layout {header['layout']}, needed is {layout}"
    _, differences = compare_key(header)
    compared = {name: both for name, both in differences.items() if name not in OF_THE_RANK}
    return describe_differences(compared, SHOWN) or None
