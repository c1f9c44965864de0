"""Options of the campaign of supervised runs."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.campaign import CampaignOptions
from tools.bench.options import option
from tools.bench.supervised.faults import CLOCKS, CONDITIONS, KINDS, SLURM, SSH


@dataclass(frozen=True)
class SupervisedOptions(CampaignOptions):
    """Bring faults about in supervised runs between test hosts; exit code 1 if one does not end right by itself.

    All losses, the last checkpoint and the places in the data as without a fault, bit for bit; few attempts; no host
    away whose test has passed, and none used again that computed wrong results. Needs root. A run with two faults
    takes a minute or two, with --slurm up to five: requeued jobs wait, and a lost node is known after a while.
    """

    known = KINDS

    drills: int = option(75, "Runs.", least=1)
    faults: int = option(2, "Faults of a run, kinds in turn.", least=1)
    fewest: int | None = option(None, "Fewest faults of a run, of which it then has so many up to --faults.", min=1)
    kinds: str = option("all", "Kinds of faults; all; conditions: of one host; clocks: dates of hosts that are off.")
    layouts: str = option("1x1x3,2x1x2,1x2x2", "Tensor x pipeline x data of each layout.")
    slurm: bool = option(False, "In jobs of a real SLURM on test hosts, instead of over SSH.")

    @property
    def drawn(self) -> list[str]:
        """See ``CampaignOptions``."""
        chosen = {"all": self._possible, "conditions": list(CONDITIONS), "clocks": list(CLOCKS)}
        return chosen[self.kinds] if self.kinds in chosen else super().drawn

    def problems(self) -> list[str]:
        """Kinds that are not known, or cannot come about there."""
        known = [one for one in self.drawn if one in KINDS and one not in self._possible]
        where = "under SLURM" if self.slurm else "without --slurm"
        wrong = [f"--fewest: {self.fewest} is more than --faults {self.faults}"] * (self.faults < (self.fewest or 0))
        return [*super().problems(), *wrong, *(f"--kinds: {one} cannot come about {where}" for one in known)]

    @property
    def _possible(self) -> list[str]:
        engine = SLURM if self.slurm else SSH
        return [name for name, kind in KINDS.items() if engine in kind.engines]
