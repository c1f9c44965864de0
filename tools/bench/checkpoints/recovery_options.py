"""Options of the campaign of recoveries."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.checkpoints.recovery_kinds import KINDS
from tools.bench.detection.options import Layouts
from tools.bench.options import Options, option, parse_layouts


@dataclass(frozen=True)
class RecoveryOptions(Options):
    """Size of a campaign of recoveries."""

    drills: int = option(300, "Faults, kinds and layouts in turn.", least=1)
    kinds: str = option(",".join(KINDS), "Kinds of faults.")
    layouts: str = option("1x1x2,1x2x1,1x1x3,1x2x2", "Tensor x pipeline x data of each layout.")
    seed: int = option(1, "Seed of ranks, steps and moments.", min=0)

    def problems(self) -> list[str]:
        """Kinds that are not known."""
        return [f"--kinds: {one!r} is none of {', '.join(KINDS)}" for one in self.drawn_kinds if one not in KINDS]

    @property
    def drawn_kinds(self) -> list[str]:
        """Kinds of faults."""
        return [one.strip() for one in self.kinds.split(",")]

    @property
    def sizes(self) -> Layouts:
        """(tensor, pipeline, data) of each layout."""
        return parse_layouts(self.layouts)
