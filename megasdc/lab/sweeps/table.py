"""Scored results of a sweep beside the paper's, by cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megasdc.config.sections import FREE_RUN
from megasdc.lab.sweeps.ma_tables import StudiedNode, studied_nodes
from megasdc.lab.sweeps.papers.tables import PaperRow, find_row
from megasdc.lab.sweeps.pei_metrics import EPSILON, CellScore, score_cells
from megasdc.lab.sweeps.results import SweepResults


@dataclass(frozen=True)
class SweepTable:
    """Scored results of a sweep.

    Args:
        size: its size; None: it has none.
        folder: of the results.
        done: number of finished rows.
        planned: number of all rows.
        scores: by cell.
        papers: rows of the paper by cell; None: there is none for it.
        tables: of papers.
        nodes: of studies, where the sweep's runs are studies.
    """

    name: str
    size: str | None
    folder: str
    done: int
    planned: int
    scores: dict[str, CellScore]
    papers: dict[str, PaperRow | None]
    tables: Sequence[str]
    nodes: Sequence[StudiedNode]

    @property
    def trained_scores(self) -> dict[str, CellScore]:
        """Scores without cells of studies that synchronize replicas, where no node can be better or worse."""
        kept_equal = {one.cell for one in self.nodes if one.mode != FREE_RUN}
        return {cell: score for cell, score in self.scores.items() if cell not in kept_equal}

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        cells = [
            {"cell": cell, **asdict(score), "paper": None if (row := self.papers[cell]) is None else asdict(row)}
            for cell, score in self.scores.items()
        ]
        return {
            "name": self.name,
            "size": self.size,
            "folder": self.folder,
            "rows": self.done,
            "planned_rows": self.planned,
            "epsilon": EPSILON,
            "cells": cells,
            "studied_nodes": [one.as_dict() for one in self.nodes],
        }


def tabulate(results: SweepResults) -> SweepTable:
    """Scores the finished rows."""
    scores = score_cells(results.rows)
    rows = {cell["name"]: cell["paper"] for cell in results.sweep["cells"]}
    papers = {cell: find_row(rows[cell]) if rows.get(cell) else None for cell in scores}
    said = results.sweep["sweep"]
    return SweepTable(
        said["name"],
        results.sweep["size"],
        str(results.folder),
        len(results.rows),
        results.places,
        scores,
        papers,
        said["tables"],
        studied_nodes(results),
    )
