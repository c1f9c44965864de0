"""Options of campaigns of drills: kinds and layouts in turn."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from tools.bench.options import Options, option, parse_layouts


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
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """(tensor, pipeline, data) of each layout."""
        return parse_layouts(self.layouts)
