"""Options of the campaign of guards."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.guard.cases import TRAININGS
from tools.bench.options import Options, option


@dataclass(frozen=True)
class GuardOptions(Options):
    """Size of the campaign."""

    trainings: int = option(180, "Trainings, kinds of faults, directions and types in turn.", least=1)
    golden: int = option(0, "Further trainings, with a golden trace and the faults on all replicas.", min=0)
    names: str = option(",".join(TRAININGS), "Which trainings.")
    seed: int = option(1, "Seed of ranks and submodules.", min=0)

    @property
    def drawn(self) -> list[str]:
        """Names of trainings."""
        return [one.strip() for one in self.names.split(",")]

    def problems(self) -> list[str]:
        """Trainings that are not known."""
        known = ", ".join(TRAININGS)
        return [f"--names: {one!r} is none of {known}" for one in self.drawn if one not in TRAININGS]
