"""Heat maps of differing results by submodule and rank, small enough to read with hundreds of ranks and submodules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, REDUCED_GRAD, UPDATE, WEIGHT_GRAD
from megasdc.sdc.incidents.incident import Incident

MAX_ROWS, MAX_COLUMNS = 200, 48
_PARTS = {
    "Forward": (FORWARD, RECOMPUTE),
    "Backward": (BACKWARD, WEIGHT_GRAD),
    "Gradients, update and parameters": (REDUCED_GRAD, UPDATE, PARAMETER),
}


@dataclass(frozen=True)
class HeatMapCell:
    """One submodule (or several with equal cells) on one rank (or several).

    Args:
        count: results that differ, of each.
        shade: 0 for none, then 1 to 4 by the share of the largest count.
        origin: whether the first wrong result is here.
    """

    count: int
    shade: int
    origin: bool


@dataclass(frozen=True)
class HeatMapRow:
    """One submodule, or neighbours whose cells are all equal; one cell for each column."""

    label: str
    cells: tuple[HeatMapCell, ...]


@dataclass(frozen=True)
class HeatMap:
    """Differing results of one direction; rows are in execution order, and notes state what is not shown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[HeatMapRow, ...]
    notes: tuple[str, ...]


def build_heat_maps(incident: Incident) -> list[HeatMap]:
    """Tables of rank and submodule for each direction in which results differ."""
    maps = []
    ranks = sorted({one.rank for one in incident.ranks})
    for title, phases in _PARTS.items():
        counts = _sum_phases(incident.evidence.differing, phases)
        if counts:
            origins = {(one.first.fqn, one.rank) for one in incident.suspects if one.first.phase in phases}
            maps.append(_build(f"{title} ({', '.join(phases)})", counts, ranks, origins))
    return maps


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in ascending order as ``0-3, 7``."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


def _sum_phases(
    differing: Mapping[str, Mapping[str, Mapping[int, int]]], phases: tuple[str, ...]
) -> dict[str, dict[int, int]]:
    """Number of differing results over several phases, by submodule and rank; only counts above 0."""
    counts: dict[str, dict[int, int]] = {}
    for phase in phases:
        for fqn, by_rank in differing.get(phase, {}).items():
            for rank, count in by_rank.items():
                if count:
                    of_submodule = counts.setdefault(fqn, {})
                    of_submodule[rank] = of_submodule.get(rank, 0) + count
    return counts


def _build(title: str, counts: dict[str, dict[int, int]], ranks: list[int], origins: set[tuple[str, int]]) -> HeatMap:
    largest = max(count for by_rank in counts.values() for count in by_rank.values())
    alike: dict[tuple[tuple[int, bool], ...], list[int]] = {}
    for rank in ranks:
        column = tuple((by_rank.get(rank, 0), (fqn, rank) in origins) for fqn, by_rank in counts.items())
        alike.setdefault(column, []).append(rank)
    # If not all columns fit, those with an origin are kept first; in the table columns are ordered by rank.
    chosen = sorted(alike, key=lambda column: (not any(origin for _, origin in column), alike[column][0]))
    columns = sorted(chosen[:MAX_COLUMNS], key=lambda column: alike[column][0])
    rows = []
    table = zip(counts, zip(*columns, strict=True), strict=True)
    for values, members in groupby(table, key=lambda pair: pair[1]):
        names = [fqn for fqn, _ in members]
        cells = tuple(HeatMapCell(count, _shade(count, largest), origin) for count, origin in values)
        rows.append(HeatMapRow(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})", cells))
    notes = []
    if len(alike) > MAX_COLUMNS:
        left = sum(len(alike[column]) for column in chosen[MAX_COLUMNS:])
        notes.append(f"{left} more ranks, whose columns differ from these, are not shown.")
    if len(rows) > MAX_ROWS:
        notes.append(f"{len(rows) - MAX_ROWS} more rows, of later results, are not shown.")
    return HeatMap(title, tuple(ranges(alike[column]) for column in columns), tuple(rows[:MAX_ROWS]), tuple(notes))


def _shade(count: int, largest: int) -> int:
    if count in (0, largest):
        return 4 if count else 0
    return min(3, -(-4 * count // largest))
