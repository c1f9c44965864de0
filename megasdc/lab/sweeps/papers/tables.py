"""Numbers that the papers published: tables stored in JSON files beside this module, with their source.

The files have the conditions of the cells of sweeps too (``conditions``), which ``tools/bench/conditions.py`` reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class PaperRow:
    """One row of Pei et al.'s tables.

    Args:
        healthy: final loss on the healthy node.
        worst: largest final loss on an unhealthy node; None: a node diverged, which is the worst case.
        increase: relative increase of ``worst`` over ``healthy``; None likewise.
        worse: nodes with an increase above 0.5 %.
        diverged: nodes that diverged.
    """

    healthy: float
    worst: float | None
    increase: float | None
    worse: int
    diverged: int


@dataclass(frozen=True)
class PaperTable:
    """A table: what it shows, where it was published, and its rows by name."""

    title: str
    source: str
    rows: dict[str, PaperRow]


def _load() -> dict[str, PaperTable]:
    tables = {}
    for path in sorted(FOLDER.glob("*.json")):
        paper = json.loads(path.read_text(encoding="utf-8"))
        source = f"{paper['title']}, {paper['source']}"
        for name, table in paper["tables"].items():
            rows = {row: PaperRow(**numbers) for row, numbers in table["rows"].items()}
            tables[name] = PaperTable(table["title"], source, rows)
    return tables


PAPER_TABLES = _load()
"""Tables by name."""


def find_row(name: str) -> PaperRow | None:
    """The row ``TABLE/ROW``; None where there is none."""
    table, _, row = name.partition("/")
    return PAPER_TABLES[table].rows.get(row) if table in PAPER_TABLES else None


def missing_row(name: str) -> str | None:
    """Why a row cannot be found; None: it exists."""
    if find_row(name) is not None:
        return None
    table = name.partition("/")[0]
    if table not in PAPER_TABLES:
        return f"got {name!r}; needed TABLE/ROW with a table of {', '.join(PAPER_TABLES)}"
    return f"got {name!r}; rows of {table}: {', '.join(PAPER_TABLES[table].rows)}"
