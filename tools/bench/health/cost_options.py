"""Options of the benchmark of what health costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.options import Options, option, parse_layouts
from tools.bench.small.gpt import SmallGpt, small_config


@dataclass(frozen=True)
class WatchedGpt(SmallGpt):
    """The model of a run that is watched; its vocabulary is that of the prepared text."""

    hidden: int = option(256, "Width h; a multiple of 32.", least=32)
    layers: int = option(8, "Transformer layers.", least=1)
    sequence: int = option(256, "Tokens of a sample.", least=8)
    vocab: int = 512
    micro_batches: int = option(8, "Of a replica's step.", least=1)


@dataclass(frozen=True)
class HealthCostOptions(Options):
    """Size of the measurement; layouts are (tensor, pipeline, data)."""

    steps: int = option(100, "Steps that count, in each layout.", least=2)
    settle_s: float = option(5.0, "Seconds of an agent that do not count: its start.", "--settle", min=0.0)
    weeks: float = option(0.1, "Simulated weeks of an agent; 0: none. One takes half an hour.", min=0.0)
    gpt: SmallGpt = WatchedGpt()
    layouts: tuple[tuple[int, int, int], ...] = option(
        ((1, 1, 2),), "Tensor x pipeline x data, separated by commas.", given="1x1x2", callback=parse_layouts
    )

    def problems(self) -> list[str]:
        """See ``Options``."""
        return self.gpt.problems()

    def config(self, layout: tuple[int, int, int], data: Path, folder: Path, watched: bool) -> dict[str, Any]:
        """The configuration of a run that writes to ``folder``, one step longer than the steps that count."""
        sections = {"health": {"enabled": watched}, "checkpoint": {"interval": 0}}
        return small_config(self.gpt, folder, self.steps + 1, sections, layout=layout[:2], data=data)
