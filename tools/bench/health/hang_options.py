"""Options of the campaign of hangs."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.detection.options import Layouts
from tools.bench.health.hang_kinds import KINDS
from tools.bench.options import Options, option, parse_layouts


@dataclass(frozen=True)
class HangOptions(Options):
    """Size of a campaign of hangs."""

    drills: int = option(120, "Hangs, kinds and layouts in turn.", least=0)
    clean_steps: int = option(10_000, "Steps without a hang; rounded up to 500.", least=0)
    kinds: str = option(",".join(KINDS), "Kinds of hangs.")
    layouts: str = option("1x1x4,2x2x2,1x4x1", "Tensor x pipeline x data of each layout.")
    seed: int = option(1, "Seed of ranks, steps and phases.", min=0)

    def problems(self) -> list[str]:
        """Kinds that are not known."""
        return [f"--kinds: {one!r} is none of {', '.join(KINDS)}" for one in self.drawn_kinds if one not in KINDS]

    @property
    def drawn_kinds(self) -> list[str]:
        """Kinds of hangs."""
        return [one.strip() for one in self.kinds.split(",")]

    @property
    def sizes(self) -> Layouts:
        """(tensor, pipeline, data) of each layout."""
        return parse_layouts(self.layouts)
