"""Campaigns of drills, of kinds and layouts in turn: their options, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from rich.table import Table

from tools.bench.options import Options, option, parse_layouts
from tools.bench.result import table

Layout = tuple[int, int, int]
"""Tensor, pipeline, data."""


class _Drill(Protocol):
    @property
    def layout(self) -> Layout: ...


D = TypeVar("D", bound=_Drill)


@dataclass(frozen=True)
class DrillOptions(Options):
    """Size of a campaign; ``known``: its kinds."""

    known: ClassVar[Collection[str]]

    drills: int
    kinds: str
    layouts: str
    seed: int = option(1, "Seed of ranks, steps and moments.", min=0)

    def problems(self) -> list[str]:
        """Kinds that are not known."""
        return [f"--kinds: {one!r} is none of {', '.join(self.known)}" for one in self.drawn if one not in self.known]

    @property
    def drawn(self) -> list[str]:
        """Kinds that are drawn."""
        return [one.strip() for one in self.kinds.split(",")]

    @property
    def sizes(self) -> tuple[Layout, ...]:
        """All layouts."""
        return parse_layouts(self.layouts)


def layout_text(drill: _Drill) -> str:
    """The layout of a drill, as ``2x1x2``."""
    return "x".join(map(str, drill.layout))


def tables(
    what: str,
    drills: Sequence[D],
    kind_of: Callable[[D], str],
    row_of: Callable[[str, Sequence[D]], tuple[str, ...]],
    columns: Sequence[str],
) -> Iterator[Table]:
    """A table of drills by kind and one by layout, each with a row for all.

    Args:
        kind_of: title of a drill's kind.
        row_of: a row, from its first cell and the drills that it is of.
        columns: but for the first.
    """
    for title, key in (("kind", kind_of), ("layout", layout_text)):
        groups: dict[str, list[D]] = {}
        for one in drills:
            groups.setdefault(key(one), []).append(one)
        rows = [row_of(name, found) for name, found in sorted(groups.items())]
        rows.append(row_of("all", drills))
        yield table(f"{what} by {title}", (title, *columns), rows, total=True)
