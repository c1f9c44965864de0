"""Options of the benchmarks of guards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tools.bench.guard.cases import TRAININGS
from tools.bench.options import Options, option


@dataclass(frozen=True)
class GuardOptions(Options):
    """Plant faults in trainings that are not megasdc's own; exit code 1 if a guard names another or none.

    Rank, submodule and direction must be named, and in trainings without a fault nobody.
    """

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


@dataclass(frozen=True)
class DisputeOptions(Options):
    """Let the referee judge two replicas of small models in one process; exit code 1 if it names a wrong one.

    Healthy ones compute in two right ways, and nobody may be named; of faults at drawn places 95 % are to be.
    """

    healthy: int = option(2000, "Disputes of replicas that compute in two right ways.", min=0)
    faults: int = option(100, "Faults, at drawn places.", min=0)
    seed: int = option(1, "Seed of all that is drawn.", min=0)


@dataclass(frozen=True)
class GuardCostOptions(Options):
    """Measure what a guard costs a training that is not megasdc's own; exit code 1 if it is more than it may be.

    With --protect the guard of a word against none, in blocks of steps by turns: at most 1.03 times the time. What
    audits take is added by their interval, as if they came no more rarely. Run it on a machine that does nothing else.
    """

    pairs: int = option(20, "Pairs of blocks with and without a protection.", least=1)
    steps: int | None = option(None, "Steps of a block; default: 2, with --protect 50.", least=1)
    protect: Literal["standard", "strict"] | None = option(None, "Measure the guard of this word, and nothing else.")
    warmup: int = option(20, "With --protect: steps before each block, in which looks find their pace.", least=1)
    audits: int = option(12, "Audits, and comparisons with a golden trace.", least=2)
    hidden: int = option(256, "Hidden size.", least=32)
    layers: int = option(4, "Layers.", least=1)
    sequence: int = option(128, "Tokens of a micro-batch.", least=8)
    micro_batches: int = option(8, "Micro-batches of a step.", least=1)

    @property
    def block_steps(self) -> int:
        """Steps of a block; one of 50 looks at least."""
        return self.steps or (2 if self.protect is None else 50)
