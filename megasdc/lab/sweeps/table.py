"""Table of a sweep beside the paper's, one row per cell, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megasdc.config.sections import FREE_RUN
from megasdc.lab.sweeps.ma_tables import NodeTable, StudiedNode, node_tables, studied_nodes
from megasdc.lab.sweeps.papers.tables import PAPER_TABLES, PaperRow, find_row
from megasdc.lab.sweeps.pei_metrics import EPSILON, CellScore, NodesScore, score_cells
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


def render_sweep(table: SweepTable, console: Console) -> None:
    """Prints the table."""
    if not table.done:
        console.print(f"no run has finished yet; there will be {table.planned:,} rows")
    for studied in node_tables(table.nodes):
        render_node_table(studied, console)
    if table.trained_scores:
        _render_scores(table, console)


def _render_scores(table: SweepTable, console: Console) -> None:
    size = f", size {table.size}" if table.size else ""
    whole = "" if table.done == table.planned else f"; {table.done} of {table.planned} rows are there"
    shown = Table(title=f"{table.name}{size}: final training loss{whole}")
    shown.add_column("cell")
    made_up = any(score.made_up.nodes for score in table.trained_scores.values())
    columns = ("healthy", "worst case", "worse", "lost")
    for column in (*columns, *(("made up: worst case", "worse", "lost") if made_up else ())):
        shown.add_column(column, justify="right")
    for cell, score in table.trained_scores.items():
        paper = table.papers[cell]
        apart = _nodes(score.made_up) if made_up else []
        shown.add_row(cell, _healthy(score), *_nodes(score.published), *apart, end_section=paper is None)
        if paper is not None:
            shown.add_row("  the paper's", *_theirs(paper), style="dim", end_section=True)
    console.print(shown)
    console.print(
        "worst case: largest final loss over unhealthy nodes that are done, and its increase over the healthy one; "
        "chance: how far a run parts from the healthy one by one low bit alone; worse: nodes with an increase above "
        f"{100 * EPSILON:g} %; with several seeds: means, with the standard deviation over seeds; lost: nodes with a "
        "run that diverged, ended with NaN or failed. Nodes are simulated; made up: those without published figures.",
        soft_wrap=True,
    )
    for name in table.tables:
        console.print(f"paper: {PAPER_TABLES[name].title}; {PAPER_TABLES[name].source}", soft_wrap=True)


def render_node_table(table: NodeTable, console: Console) -> None:
    """Prints a table of nodes."""
    console.print(f"[italic]{table.heading}.[/] {escape(table.note)}", highlight=False, soft_wrap=True)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(table.columns):
        shown.add_column(name, overflow="fold", justify="right" if place else "left")
    for row in table.rows:
        shown.add_row(*(escape(value.text) for value in row))
    console.print(shown)


def _healthy(score: CellScore) -> str:
    text = "-" if score.healthy is None else f"{score.healthy:.4f}{_spread(score.healthy_spread, '.4f')}"
    if score.healthy_failed:
        text += f"\n{score.healthy_failed} not done"
    return text if score.chance is None else f"{text}\nchance {100 * score.chance:.2f} %"


def _nodes(score: NodesScore) -> list[str]:
    """Worst case, worse and lost."""
    if not score.nodes:
        return ["-"] * 3
    worst = "-"
    if score.worst is not None and score.worst_increase is not None:
        spread = None if score.worst_spread is None else 100 * score.worst_spread
        worst = f"{score.worst:.4f} ({100 * score.worst_increase:+.2f}{_spread(spread, '.2f')} %)\n{score.worst_node}"
    kinds = {"diverged": score.diverged, "NaN": score.nan, "failed": score.failed}
    lost = "\n".join(f"{len(nodes)} {kind}" for kind, nodes in kinds.items() if nodes)
    return [worst, f"{score.worse} of {score.nodes}", lost or "0"]


def _theirs(row: PaperRow) -> list[str]:
    worst = "diverge" if row.worst is None or row.increase is None else f"{row.worst:g} ({100 * row.increase:+.2f} %)"
    return [f"{row.healthy:g}", worst, str(row.worse), f"{row.diverged} diverged" if row.diverged else "0"]


def _spread(value: float | None, form: str) -> str:
    return "" if value is None else f" ± {value:{form}}"
