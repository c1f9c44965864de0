"""Options of the campaign of recoveries."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.campaign import CampaignOptions
from tools.bench.checkpoints.recovery_kinds import KINDS
from tools.bench.options import option


@dataclass(frozen=True)
class RecoveryOptions(CampaignOptions):
    """Size of a campaign of recoveries."""

    known = KINDS

    drills: int = option(300, "Faults, kinds and layouts in turn.", least=1)
    kinds: str = option(",".join(KINDS), "Kinds of faults.")
    layouts: str = option("1x1x2,1x2x1,1x1x3,1x2x2,2x1x2", "Tensor x pipeline x data of each layout.")
