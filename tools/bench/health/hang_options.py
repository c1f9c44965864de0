"""Options of the campaign of hangs."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.campaign import CampaignOptions
from tools.bench.health.hang_kinds import KINDS
from tools.bench.options import option


@dataclass(frozen=True)
class HangOptions(CampaignOptions):
    """Size of a campaign of hangs."""

    known = KINDS

    drills: int = option(120, "Hangs, kinds and layouts in turn.", least=0)
    kinds: str = option(",".join(KINDS), "Kinds of hangs.")
    layouts: str = option("1x1x4,2x2x2,1x4x1", "Tensor x pipeline x data of each layout.")
    clean_steps: int = option(10_000, "Steps without a hang; rounded up to 500.", least=0)
