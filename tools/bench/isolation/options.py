"""Options of the campaign of isolation."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.campaign import CampaignOptions, Layout
from tools.bench.isolation.kinds import AGAIN, KINDS
from tools.bench.options import Options, option, parse_layouts

MORE = 2
"""Replicas that are left at least."""


@dataclass(frozen=True)
class IsolationOptions(CampaignOptions):
    """Leave replicas out of runs whose faults go on; exit code 1 if one does not end with the right bits.

    Exactly the wrong replicas must be left out, and every loss and the last checkpoint must be those of a run without
    faults whose replicas end at the same steps; clean runs leave nobody out.
    """

    known = KINDS

    drills: int = option(200, "Runs, kinds, layouts and types in turn.", least=1)
    kinds: str = option(",".join(KINDS), "Kinds of faults.")
    layouts: str = option("1x1x3,1x1x4,1x2x3,2x1x3", "Tensor x pipeline x data of each layout.")

    def problems(self) -> list[str]:
        """Layouts that have too few replicas."""
        found = [f"--layouts: {one} leaves fewer than {MORE} replicas" for one in self.sizes if one[2] <= MORE]
        if AGAIN in self.drawn and all(one[2] <= MORE + 1 for one in self.sizes):
            found.append(f"--kinds: {AGAIN} needs a layout with {MORE + 2} replicas")
        return super().problems() + found


@dataclass(frozen=True)
class RateOptions(Options):
    """Measure the rate of a run that goes on without a replica, and what it costs that it could; exit code 1 off a bar.

    Micro-batches are slept. Bars: (N - 1) / N of the samples per second within 3 %, and 1.01 of a step's time while no
    replica is left out.
    """

    layouts: str = option("1x1x3,1x1x4", "Tensor x pipeline x data of each layout; without a pipeline's bubbles.")
    rounds: int = option(2, "Rounds of three runs each.", least=1)
    steps: int = option(10, "Steps of each run that are compared.", least=1)
    micro_batch_s: float = option(0.5, "Seconds that a micro-batch is slept.", "--micro-batch-s", min=0.001)

    @property
    def sizes(self) -> tuple[Layout, ...]:
        """All layouts."""
        return parse_layouts(self.layouts)

    def problems(self) -> list[str]:
        """Layouts that have too few replicas, or a pipeline, which has fewer bubbles with more micro-batches."""
        found = [f"--layouts: {one} leaves fewer than {MORE} replicas" for one in self.sizes if one[2] <= MORE]
        return found + [f"--layouts: {one} has pipeline stages" for one in self.sizes if one[1] > 1]
