"""Times of ranks over those of their peers, as rank 0 of a run wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megasdc.ops.health.slow.report import HEALTH_FOLDER, SLOWNESS_FILE
from megasdc.ops.run_folder.lines import read_lines
from megasdc.output.figure import Series


def load_slowness(run: Path, notes: list[str]) -> dict[int, Series]:
    """Ratio to the peers by rank, the first tensor rank of a stage; empty where nothing was compared.

    A resumed run goes on in the same file: its lines replace those of the same and later steps.
    """
    path = run / HEALTH_FOLDER / SLOWNESS_FILE
    if not path.exists():
        return {}
    lines = read_lines(path, _row)
    notes += lines.notes
    kept: list[tuple[int, dict[int, float]]] = []
    for step, ratios in lines.rows:
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, ratios))
    found = {}
    for rank in sorted({rank for _, ratios in kept for rank in ratios}):
        points = [(step, ratios[rank]) for step, ratios in kept if rank in ratios]
        steps, values = zip(*points, strict=True)
        found[rank] = Series(np.array(steps), np.array(values))
    return found


def _row(line: dict[str, Any]) -> tuple[int, dict[int, float]]:
    return int(line["step"]), {int(rank): float(ratio) for rank, ratio in line.get("ratios", {}).items()}
