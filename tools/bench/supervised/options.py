"""Options of the campaign of supervised runs."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.drills import DrillOptions
from tools.bench.options import option
from tools.bench.supervised.faults import KINDS


@dataclass(frozen=True)
class SupervisedOptions(DrillOptions):
    """Size of a campaign of supervised runs."""

    known = KINDS

    drills: int = option(75, "Runs.", least=1)
    faults: int = option(2, "Faults of a run, kinds in turn.", least=1)
    kinds: str = option(",".join(KINDS), "Kinds of faults.")
    layouts: str = option("1x1x3,2x1x2,1x2x2", "Tensor x pipeline x data of each layout.")
